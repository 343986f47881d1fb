"""Constrained outputs through OpenAI's own client, with the built-in model on one prefill and one decode worker."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

from common import builtin
from tests.e2e.system import RunningSystem

pytestmark = pytest.mark.e2e

SMALL = ("--dtype", "float32", "--threads", "1", "--num-kv-blocks", "1024")
MESSAGES: Any = [{"role": "user", "content": "Tell me about Oslo."}]


class Day(BaseModel):
    name: str
    hours: list[int]
    sky: Literal["clear", "rainy"]


class City(BaseModel):
    city: str
    days: list[Day]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    with (
        RunningSystem.up(tmp_path_factory.mktemp("structured"), builtin.path(), small=SMALL) as system,
        OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def content(client: OpenAI, *, stream: bool = False, **fields: Any) -> list[str]:
    """Return the contents of all complete choices. Without a seed some answers might not end within the limit."""
    fields = {"model": "model", "messages": MESSAGES, "max_tokens": 200, "temperature": 1, "seed": 1, **fields}
    if not stream:
        choices = client.chat.completions.create(**fields).choices
        return [choice.message.content or "" for choice in choices if choice.finish_reason == "stop"]
    parts: dict[int, list[str]] = {}
    complete = set()
    for chunk in client.chat.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            parts.setdefault(choice.index, []).append(choice.delta.content or "")
            if choice.finish_reason == "stop":
                complete.add(choice.index)
    return ["".join(parts[index]) for index in sorted(complete)]


def test_parse(client: OpenAI) -> None:
    for seed in range(5):
        answer = client.chat.completions.parse(
            model="model", messages=MESSAGES, response_format=City, seed=seed, max_tokens=400
        )
        choice = answer.choices[0]
        if choice.finish_reason == "stop":
            assert isinstance(choice.message.parsed, City)
            return
    pytest.fail("no answer was complete")


@pytest.mark.parametrize("stream", [False, True])
def test_json_of_any_shape(client: OpenAI, stream: bool) -> None:
    found = content(client, stream=stream, n=4, seed=3, response_format={"type": "json_object"})
    assert found
    for text in found:
        assert isinstance(json.loads(text), dict)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["kind", "sizes"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"seed": 1, "n": 3},
        {"seed": 1, "logprobs": True, "top_logprobs": 3},
        {"frequency_penalty": 2, "presence_penalty": 1, "logit_bias": {"8": 5}},
        {"min_tokens": 3},
        {"stop": ["never there"]},
        {"ignore_eos": True},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_a_schema_composes_with_other_fields(client: OpenAI, fields: dict[str, Any]) -> None:
    known = {name: fields[name] for name in fields.keys() - {"min_tokens", "ignore_eos"}}
    extra = {name: fields[name] for name in fields.keys() & {"min_tokens", "ignore_eos"}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    found = content(client, response_format=form, extra_body=extra, **known)
    assert found
    for text in found:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("constraint", "check"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, lambda text: re.fullmatch("[0-9]{3}-[a-f]{2}", text)),
        ({"choice": ["Oslo", "Bergen", "Bergen is far"]}, lambda text: text in ("Oslo", "Bergen", "Bergen is far")),
        ({"grammar": 'root ::= "yes" " indeed"*'}, lambda text: re.fullmatch("yes( indeed)*", text)),
        ({"json": SCHEMA, "disable_any_whitespace": True}, lambda text: " " not in text and json.loads(text)),
    ],
)
def test_structured_outputs_of_vllm(client: OpenAI, constraint: dict[str, Any], check: Any) -> None:
    found = content(client, n=4, seed=5, extra_body={"structured_outputs": constraint})
    assert found
    for text in found:
        assert check(text), text
    answer = client.completions.create(
        model="model", prompt=["Oslo is", "Once"], max_tokens=60, extra_body={"structured_outputs": constraint}
    )
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            assert check(choice.text), choice.text


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": properties, "required": [*properties]},
        },
    }
    for name, properties in (
        ("set_level", {"level": {"type": "integer", "minimum": 3, "maximum": 5}}),
        ("say", {"word": {"enum": ["hi", "bye"]}}),
    )
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "say"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_can_be_forced(client: OpenAI, choice: Any, stream: bool) -> None:
    fields: Any = {"model": "model", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "temperature": 0}
    if stream:
        with client.chat.completions.stream(**fields) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**fields, parallel_tool_calls=False).choices[0].message
    assert message.tool_calls and not message.content
    for call in message.tool_calls:
        assert call.type == "function"
        (tool,) = [each["function"] for each in TOOLS if each["function"]["name"] == call.function.name]
        jsonschema.validate(json.loads(call.function.arguments), tool["parameters"])
        assert choice == "required" or call.function.name == "say"


def test_what_cannot_be_obeyed_is_a_bad_request(client: OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    with pytest.raises(BadRequestError) as caught:
        content(client, response_format=form)
    assert (caught.value.code, caught.value.param) == ("unsupported", "response_format.json_schema.schema.not")
