"""A hundred generated questions that need a tool: the built-in model picks it, and every call fits its schema."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest

from bench.builtin_model.corpus import tools
from bench.builtin_model.corpus.items import Item
from common import builtin
from tests.e2e.system import ApiClient, RunningSystem

pytestmark = pytest.mark.e2e

SMALL = ("--threads", "1", "--num-kv-blocks", "2048")
COUNT = 100
LEAST_RIGHT = 95


def questions() -> list[Item]:
    """Draw items that end with a call. The generator also asks clocks that require a city for the time here, without
    one: no call fits both."""
    rng, found = Random(54), dict[str, Item]()
    while len(found) < COUNT:
        item = tools.draw(rng)
        if item.check["kind"] != "tool_call":
            continue
        schema = parameters(item, item.check["name"])
        if all(name in item.check["arguments"] for name in schema.get("required", ())):
            found[json.dumps(item.messages[:-1])] = item
    return list(found.values())


def parameters(item: Item, name: str) -> dict[str, Any]:
    (schema,) = [tool["function"]["parameters"] for tool in item.tools if tool["function"]["name"] == name]
    return schema


async def call_of(client: ApiClient, item: Item, free: asyncio.Semaphore) -> tuple[str, Any] | None:
    """Return the name and the arguments of the only call, None if there is none. It must fit its schema."""
    async with free:
        asked = {"messages": item.messages[:-1], "tools": item.tools, "temperature": 0, "max_tokens": 128}
        response = await client.post("/v1/chat/completions", **asked)
        body = await response.json()
    assert response.status == 200, body
    choice = body["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    assert (choice["finish_reason"] == "tool_calls") is bool(calls)
    named = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    for name, arguments in named:
        jsonschema.validate(arguments, parameters(item, name))
    return named[0] if len(named) == 1 else None


async def test_questions_that_need_a_tool(tmp_path: Path) -> None:
    items, free = questions(), asyncio.Semaphore(16)
    with RunningSystem.up(tmp_path, builtin.path(), small=SMALL) as system:
        async with system.client() as client:
            found = await asyncio.gather(*(call_of(client, item, free) for item in items))
    wrong = [
        (item.messages[-2]["content"], call)
        for item, call in zip(items, found, strict=True)
        if call != (item.check["name"], item.check["arguments"])
    ]
    assert len(wrong) <= COUNT - LEAST_RIGHT, wrong
