"""Random JSON schemas whose documents are short, as JSON text of grammars for workers."""

from __future__ import annotations

import random
from typing import Any

from llguidance import LLMatcher

NAMES = "name age kind value total items colour description identifier x y user_id createdAt größe".split()
Schema = dict[str, Any]


def random_schema(rng: random.Random, depth: int = 0) -> Schema:
    """Return a schema of nested objects, arrays and scalars; every document of it is finite and short."""
    leaves = ["string", "integer", "number", "enum", "const", "boolean", "null", "pattern"]
    match rng.choice(leaves if depth > 2 else ["object", "object", "array", "anyOf", *leaves]):
        case "object":
            names = rng.sample(NAMES, rng.randint(0, 4))
            required = [name for name in names if rng.random() < 0.7]
            fields = {name: random_schema(rng, depth + 1) for name in names}
            return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}
        case "array":
            least = rng.randint(0, 2)
            most = least + rng.randint(0, 2)
            return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": least, "maxItems": most}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 8)}
        case "integer":
            return {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 5000)}
        case "number":
            return {"enum": [round(rng.uniform(-9, 9), 3) for _ in range(3)]}
        case "enum":
            return {"enum": [rng.choice(NAMES) + str(rng.randint(0, 99)) for _ in range(rng.randint(1, 4))]}
        case "const":
            return {"const": rng.choice(["a long constant, with words", "ünïcode 你好", 3.25, None, True, [1, "two"]])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-z]{1,4}$", "^(ab|ba){1,3}$", "^[0-9]{3}-[0-9]{2}$"])}
        case kind:
            return {"type": kind}


def schema_grammar(schema: Schema, *, spaces: bool = False) -> str:
    """Return the grammar of the documents of ``schema``; ``spaces``: with any white space between tokens."""
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": spaces})
