"""The forms of request fields that are no plain scalars, for the OpenAPI description.

Each form allows all that the parsers accept. It is narrower than "any object" where a parser refuses most objects, so
that random requests made from the description are mostly answered, not refused. JSON Schema cannot express everything:
what depends on another field, on the model's vocabulary or on the context length is left to the parsers.
"""

from __future__ import annotations

from typing import Any

from common.core.request import MAX_TOKENS
from coordinator.api.fields import INT64
from coordinator.api.openai import MAX_TOKEN_ID
from coordinator.api.responses import INCLUDES, LOGPROBS
from coordinator.api.tools import TOOL_NAME

Shape = dict[str, Any]


def _object(required: str, **properties: Any) -> Shape:
    """Return an object with the members ``properties``, of which those in ``required``, split at spaces, are needed."""
    return {"type": "object", "required": required.split(), "properties": properties}


def _list(items: Any, least: int = 0, most: int | None = None) -> Shape:
    shape: Shape = {"type": "array", "items": items}
    return shape | ({"minItems": least} if least else {}) | ({"maxItems": most} if most else {})


def _any(*shapes: Shape) -> Shape:
    return {"anyOf": list(shapes)}


def _unless_off(shape: Shape) -> Shape:
    """Return the form of a constraint, which may also be null or false."""
    return _any(shape, {"enum": [None, False]})


_STRING: Shape = {"type": "string"}
_NAME: Shape = {"type": "string", "minLength": 1, "maxLength": 256}
_TOOL_NAME: Shape = {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"}
_BOUND: Shape = {"type": "integer", "minimum": -1, "maximum": MAX_TOKENS}
_OBJECT: Shape = {"type": "object"}
_OPTIONAL_TEXT: Shape = {"type": ["string", "null"]}
_TOKENS = _list({"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID})
_SOME_TOKENS = {**_TOKENS, "minItems": 1}
_STOP: Shape = {"type": "string", "minLength": 1, "maxLength": 1024}
_AT_LEAST_ONE: Shape = {"type": "integer", "minimum": -1, "maximum": MAX_TOKENS, "not": {"const": 0}}

# -- chats ------------------------------------------------------------------------------------------------------------

_PART = _any(
    _STRING,
    _object("type text", type={"enum": ["text", "input_text", "output_text"]}, text=_STRING),
    _object("type refusal", type={"const": "refusal"}, refusal=_STRING),
)
_CONTENT = _any(_STRING, _list(_PART))
_NO_CONTENT = _any(*_CONTENT["anyOf"], {"type": "null"})
_CALL = _object("function", id=_OPTIONAL_TEXT, function=_object("name", name=_NAME, arguments=_OPTIONAL_TEXT))


def _assistant(member: str, shape: Shape) -> Shape:
    """Return the form of an assistant's turn that has ``member``."""
    members = {"content": _NO_CONTENT, "tool_calls": {"type": ["array", "null"], "items": _CALL}, member: shape}
    return _object(f"role {member}", role={"const": "assistant"}, **members)


_CHAT_MESSAGE = _any(
    _object("role content", role={"enum": ["system", "developer", "user"]}, content=_CONTENT),
    _object("role content tool_call_id", role={"const": "tool"}, content=_CONTENT, tool_call_id=_NAME),
    _object("role name", role={"const": "function"}, name=_NAME, content=_NO_CONTENT),
    _assistant("content", _CONTENT),
    _assistant("tool_calls", _list(_CALL, 1)),
    _assistant("function_call", _object("name", name=_NAME, arguments=_OPTIONAL_TEXT)),
    *(_assistant(name, _STRING) for name in ("reasoning_content", "reasoning", "refusal")),
)
_FUNCTION: Shape = {
    "name": _TOOL_NAME,
    "description": _OPTIONAL_TEXT,
    "parameters": {"type": ["object", "null"]},
    "strict": {"type": ["boolean", "null"]},
}
_TOOL = _any(
    _object("type function", type={"const": "function"}, function=_object("name", **_FUNCTION)),
    _object("type name", type={"const": "function"}, **_FUNCTION),
)
_NAMED = _any(_object("name", name=_NAME), _object("function", function=_object("name", name=_NAME)))
_ALLOWED = _object("mode tools", mode={"enum": ["auto", "required"]}, tools=_list(_NAMED, 1))
_TOOL_CHOICE = _any(
    {"enum": ["none", "auto", "required"]},
    {"type": "object", "required": ["type"], "properties": {"type": {"const": "function"}}, **_NAMED},
    _object("type mode tools", type={"const": "allowed_tools"}, **_ALLOWED["properties"]),
    _object("type allowed_tools", type={"const": "allowed_tools"}, allowed_tools=_ALLOWED),
)
_SCHEMA = _any(_OBJECT, _STRING, {"type": "boolean"})
_FORMAT = _any(
    _object("type", type={"enum": ["text", "json_object"]}),
    _object("type json_schema", type={"const": "json_schema"}, json_schema=_OBJECT),
    _object("type schema", type={"const": "json_schema"}, schema=_SCHEMA),
    _object("type", type={"const": "structural_tag"}),
)
_CHOICES = _list(_STRING, 1)

# -- the other APIs ---------------------------------------------------------------------------------------------------

_REASONING = _object("type text", type={"enum": ["reasoning_text", "summary_text", "text"]}, text=_STRING)
_ITEM = _any(
    _object("role content", role={"enum": ["system", "developer", "user", "assistant"]}, content=_CONTENT),
    _object("type call_id name", type={"const": "function_call"}, call_id=_NAME, name=_NAME, arguments=_OPTIONAL_TEXT),
    _object("type call_id output", type={"const": "function_call_output"}, call_id=_NAME, output=_CONTENT),
    _object(
        "type",
        type={"const": "reasoning"},
        content={"type": ["array", "null"], "items": _REASONING},
        summary={"type": ["array", "null"], "items": _REASONING},
    ),
)
_SUMMARY: Shape = {"enum": ["auto", "concise", "detailed", None]}
_TEXT_BLOCK = _object("type text", type={"const": "text"}, text=_STRING)
_TEXTS = _any(_STRING, _list(_TEXT_BLOCK))
_RESULT = _object(
    "type tool_use_id",
    type={"const": "tool_result"},
    tool_use_id=_NAME,
    content=_any(*_TEXTS["anyOf"], {"type": "null"}),
    is_error={"type": ["boolean", "null"]},
)
_USE = _object("type id name input", type={"const": "tool_use"}, id=_NAME, name=_NAME, input=_OBJECT)
_THINKING = _object("type thinking", type={"const": "thinking"}, thinking=_STRING)
_REDACTED = _object("type", type={"const": "redacted_thinking"})
_MESSAGE = _any(
    _object("role content", role={"const": "system"}, content=_TEXTS),
    _object("role content", role={"const": "user"}, content=_any(_STRING, _list(_any(_TEXT_BLOCK, _RESULT)))),
    _object(
        "role content",
        role={"const": "assistant"},
        content=_any(_STRING, _list(_any(_TEXT_BLOCK, _USE, _THINKING, _REDACTED))),
    ),
)
_MESSAGES_TOOL = _object("name input_schema", name=_TOOL_NAME, description=_OPTIONAL_TEXT, input_schema=_OBJECT)
_MESSAGES_CHOICE = _any(
    _object("type", type={"enum": ["auto", "any", "none"]}),
    _object("type name", type={"const": "tool"}, name=_NAME),
)

# -- by name ----------------------------------------------------------------------------------------------------------

_SHAPES: dict[str, Shape] = {
    "allowed_token_ids": _SOME_TOKENS,
    "bad_words": _list({"type": "string", "pattern": r"\S", "maxLength": 256}, most=128),
    "cache_salt": {"type": "string", "minLength": 1, "maxLength": 1024},
    "documents": _list(_OBJECT),
    "function_call": _any({"enum": ["none", "auto"]}, _object("name", name=_NAME)),
    "functions": _list(_object("name", **_FUNCTION)),
    "guided_choice": _unless_off(_CHOICES),
    "guided_grammar": _unless_off(_STRING),
    "guided_json": _unless_off(_SCHEMA),
    "guided_json_object": {"type": "boolean"},
    "guided_regex": _unless_off(_STRING),
    "include": _list({"enum": [LOGPROBS, *INCLUDES]}),
    "input": _any(_STRING, _list(_ITEM, 1)),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "max_completion_tokens": _AT_LEAST_ONE,
    "max_reasoning_tokens": _BOUND,
    "max_tokens": _AT_LEAST_ONE,
    "messages": _list(_CHAT_MESSAGE, 1),
    "metadata": {
        "type": "object",
        "maxProperties": 16,
        "propertyNames": {"maxLength": 64},
        "additionalProperties": {"type": "string", "maxLength": 512},
    },
    "modalities": {"const": ["text"]},
    "prompt": _any(_STRING, _list(_STRING, 1, 64), _SOME_TOKENS, _list(_any(_STRING, _SOME_TOKENS), 1, 64)),
    "reasoning.generate_summary": _SUMMARY,
    "reasoning.summary": _SUMMARY,
    "response_format": _FORMAT,
    "seed": {"type": "integer", "minimum": -INT64, "maximum": INT64 - 1},
    "stop": _any(_STOP, _list(_STOP, most=16)),
    "stop_sequences": _any(_STOP, _list(_STOP, most=16)),
    "stop_token_ids": {**_TOKENS, "maxItems": 128},
    "structured_outputs.choice": _unless_off(_CHOICES),
    "structured_outputs.grammar": _unless_off(_STRING),
    "structured_outputs.json": _unless_off(_SCHEMA),
    "structured_outputs.json_object": {"type": ["boolean", "null"]},
    "structured_outputs.regex": _unless_off(_STRING),
    "text.format": _any(*_FORMAT["anyOf"], {"type": "null"}),
    "thinking": _any({"type": "boolean"}, _object("type")),
    "thinking.type": {"enum": ["enabled", "adaptive", "disabled"]},
    "thinking_budget": _BOUND,
    "thinking_token_budget": _BOUND,
    "tokens": _TOKENS,
    "tool_choice": _TOOL_CHOICE,
    "tools": _list(_TOOL),
    "top_k": {"type": "integer", "minimum": -1},
    "truncate_prompt_tokens": _AT_LEAST_ONE,
    "truncation": {"const": "disabled"},
}
"""Forms by the name of the field."""
_OF_PATH: dict[str, dict[str, Shape | None]] = {
    "/v1/completions": {"max_tokens": _BOUND, "max_completion_tokens": _BOUND},
    "/v1/responses": {"n": {"const": 1}},
    "/v1/messages": {
        "n": {"const": 1},
        "max_tokens": None,
        "metadata": None,
        "messages": _list(_MESSAGE, 1),
        "output_config.effort": {"enum": ["low", "medium", "high", "xhigh", "max", None]},
        "system": _TEXTS,
        "thinking.display": {"enum": ["summarized", "omitted", None]},
        "thinking": _object("type"),
        "tool_choice": _MESSAGES_CHOICE,
        "tools": _list(_MESSAGES_TOOL),
    },
    "/tokenize": {"prompt": _STRING},
}
"""Forms that differ for a path; None: a plain scalar there."""
_OF_PATH |= {
    "/v1/messages/count_tokens": _OF_PATH["/v1/messages"],
    "/v1/responses/input_tokens": _OF_PATH["/v1/responses"],
    "/v1/tokenize": _OF_PATH["/tokenize"],
}


def shape_of(path: str, name: str) -> Shape | None:
    """Return the form of the field ``name`` in bodies sent to ``path``, None if it is a plain scalar or object."""
    special = _OF_PATH.get(path, {})
    return special[name] if name in special else _SHAPES.get(name)
