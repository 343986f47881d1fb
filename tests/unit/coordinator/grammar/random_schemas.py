"""Random JSON schemas of the supported keywords, each with values that are likely to be near its edge."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
NAMES = ("a", "b", "c d", "é", 'q"', "name_1")
WORDS = ("", "x", "yes", "no", "abc", 'é"\\\n', "2024-02-29", "12")


class Generator:
    """Draws schemas and values from one random source."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.definitions: dict[str, Schema] = {}

    def document(self) -> Schema:
        """Return a whole schema, sometimes with definitions and an address."""
        schema = self.schema(3)
        if self.definitions:
            schema = {**schema, "$defs": self.definitions}
        if self.rng.random() < 0.2:
            schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", **schema}
        return schema

    def schema(self, depth: int) -> Schema:
        makers = [self._string, self._number, self._integer, self._plain, self._enum, self._const]
        if depth:
            makers += [self._object, self._object, self._array, self._any_of, self._reference]
        return self.rng.choice(makers)(depth - 1)

    def _string(self, _: int) -> Schema:
        schema: Schema = {"type": "string"}
        match self.rng.randrange(5):
            case 0:
                low = self.rng.randrange(4)
                schema |= {"minLength": low, "maxLength": low + self.rng.randrange(5)}
            case 1:
                schema["pattern"] = self.rng.choice(["^[a-c]{1,3}$", "x", "^a|b$", "[0-9]+", "^(yes|no)$"])
            case 2:
                schema["format"] = self.rng.choice(["date", "ipv4", "uuid", "color"])
        return schema

    def _number(self, _: int) -> Schema:
        schema: Schema = {"type": "number"}
        if self.rng.random() < 0.5:
            low = self.rng.choice([-2.5, 0, 1.25])
            schema |= {self.rng.choice(["minimum", "exclusiveMinimum"]): low}
            schema |= {self.rng.choice(["maximum", "exclusiveMaximum"]): low + 3}
        return schema

    def _integer(self, _: int) -> Schema:
        schema: Schema = {"type": "integer"}
        match self.rng.randrange(4):
            case 0:
                low = self.rng.randrange(-20, 20)
                schema |= {"minimum": low, "maximum": low + self.rng.randrange(30)}
            case 1:
                schema["multipleOf"] = self.rng.choice([2, 5, 7])
            case 2:
                schema["exclusiveMinimum"] = self.rng.randrange(-5, 5)
        return schema

    def _plain(self, _: int) -> Schema:
        kinds = ["null", "boolean", "integer", "string"]
        return {"type": self.rng.choice([*kinds, self.rng.sample(kinds, 2)])}

    def _enum(self, _: int) -> Schema:
        values = [*WORDS, 1, 2.5, None, True, {"k": [1]}, []]
        return {"enum": self.rng.sample(values, self.rng.randint(1, 5))}

    def _const(self, _: int) -> Schema:
        return {"const": self.rng.choice([*WORDS, 3, {"a": 1, "b": ["x"]}])}

    def _object(self, depth: int) -> Schema:
        names = self.rng.sample(NAMES, self.rng.randrange(4))
        schema: Schema = {"type": "object", "properties": {name: self.schema(depth) for name in names}}
        schema["required"] = [name for name in names if self.rng.random() < 0.6]
        match self.rng.randrange(3):
            case 0:
                schema["additionalProperties"] = False
            case 1:
                schema["additionalProperties"] = self.schema(0)
        return schema

    def _array(self, depth: int) -> Schema:
        schema: Schema = {"type": "array", "items": self.schema(depth)}
        if self.rng.random() < 0.5:
            low = self.rng.randrange(3)
            schema |= {"minItems": low, "maxItems": low + self.rng.randrange(3)}
        if self.rng.random() < 0.2:
            schema["prefixItems"] = [self.schema(0)]
        return schema

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.schema(depth) for _ in range(self.rng.randint(1, 3))]}

    def _reference(self, depth: int) -> Schema:
        name = f"d/{len(self.definitions)}"
        self.definitions[name] = {}
        self.definitions[name] = self.schema(depth)
        return {"$ref": f"#/$defs/{name.replace('/', '~1')}"}

    # -- values -----------------------------------------------------------------------------------------------------

    def values(self, schema: Schema, count: int) -> list[Any]:
        """Return values, about half of which match ``schema``."""
        return [self.value(schema) for _ in range(count)]

    def value(self, schema: Schema) -> Any:
        if self.rng.random() < 0.1:
            return self.rng.choice([None, 0, "x", [], {}, True, -1.5])
        if "$ref" in schema:
            return self.value(self.definitions[schema["$ref"].removeprefix("#/$defs/").replace("~1", "/")])
        for keyword in ("enum", "anyOf"):
            if keyword in schema:
                chosen = self.rng.choice(schema[keyword])
                return chosen if keyword == "enum" else self.value(chosen)
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        match self.rng.choice(kind) if isinstance(kind, list) else kind:
            case "object":
                return self._object_value(schema)
            case "array":
                return [self.value(schema["items"]) for _ in range(self.rng.randrange(4))]
            case "string":
                return self.rng.choice([*WORDS, "abcx", "1.2.3.4", "a" * 6])
            case "number":
                return self.rng.choice([-2.5, -1, 0, 0.5, 1.25, 4.25, 3, 10])
            case "integer":
                return self.rng.randrange(-25, 45)
            case "boolean":
                return self.rng.random() < 0.5
        return None

    def _object_value(self, schema: Schema) -> dict[str, Any]:
        """Return an object with its properties in the order that llguidance prescribes."""
        made = {
            name: self.value(inner)
            for name, inner in schema["properties"].items()
            if name in schema["required"] or self.rng.random() < 0.5
        }
        if self.rng.random() < 0.3:
            made["extra"] = self.rng.choice(["x", 1, None])
        return made
