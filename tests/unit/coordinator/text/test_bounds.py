"""Limits on waiting bodies and texts: lanes, places in them, memory, and the number of JSON values."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import threading
import weakref
from typing import Any

import pytest

from common.core.errors import RequestError
from coordinator.api.fields import MAX_CONTAINERS, JsonBudget, parse_json
from coordinator.http.bodies import Bodies, BodyKind, kind_of
from coordinator.text.lanes import INLINE_BYTES, INLINE_OBJECTS, LARGE_BYTES, Bounds
from tests.fakes.checkpoint import POSITIONS
from tests.pace import scaled
from tests.unit.coordinator.fake_cluster import CHAT, HELLO, TEXT, FakeCluster, HeldTokenizer, chat_of, until


async def test_ids_are_counted_before_they_are_read(cluster: FakeCluster) -> None:
    for path, name in ((TEXT, "prompt"), ("/detokenize", "tokens")):
        response, body = await cluster.post(path, {name: [True] * ((1 << 20) + 1)})
        assert response.status == 400 and str((1 << 20) + 1) in body["error"]["message"]
    response, body = await cluster.post("/detokenize", {"tokens": [5] * (POSITIONS + 1)})
    assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"


async def test_long_bodies_are_parsed_beside_the_event_loop(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def parse(body: bytes, budget: JsonBudget) -> Any:
        threads.append(threading.current_thread())
        return parse_json(body, budget)

    monkeypatch.setattr("coordinator.http.context.parse_json", parse)
    for length in (10, INLINE_BYTES):
        assert (await cluster.post("/tokenize", {"prompt": "x" * length}))[0].status == 200
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
    for count in (2, INLINE_OBJECTS):
        assert (await cluster.post("/tokenize", {"messages": HELLO["messages"] * count}))[0].status == 200
    assert [thread is threading.main_thread() for thread in threads[2:]] == [True, False]


SHORT_TEXT, LONG_TEXT = "x" * 4_000, "x" * 20_000
PROSE = "the quick brown fox " * 150


@pytest.mark.parametrize("text", [SHORT_TEXT, LONG_TEXT])
async def test_texts_that_wait_for_tokens_are_bounded(cluster: FakeCluster, held: HeldTokenizer, text: str) -> None:
    lanes = cluster.services.model._lanes
    lanes.of(len(text))._bounds = Bounds(texts=1, chars=1 << 30, by_size=True)
    asked = {"prompt": text}
    first = asyncio.create_task(cluster.post("/tokenize", asked))
    await until(lambda: held.begun, "the first is tokenized")
    async with asyncio.timeout(scaled(10)):
        response, body = await cluster.post("/tokenize", asked)
    assert response.status == 429 and body["error"]["code"] == "server_is_overloaded"
    assert response.headers["Retry-After"]
    held.go_on.set()
    assert (await first)[0].status == (await cluster.post("/tokenize", asked))[0].status == 200


async def test_texts_that_wait_do_not_use_up_the_places_of_smaller_ones(
    cluster: FakeCluster, held: HeldTokenizer
) -> None:
    lane = cluster.services.model._lanes.of(len(SHORT_TEXT))
    lane._bounds = Bounds(texts=1, chars=1 << 30, by_size=True)
    long = asyncio.create_task(cluster.post("/tokenize", {"prompt": SHORT_TEXT * 4}))
    await until(lambda: held.begun, "the long one is tokenized")
    short = asyncio.create_task(cluster.post("/tokenize", {"prompt": SHORT_TEXT}))
    await until(lambda: lane.texts == 2, "the short one waits")
    held.go_on.set()
    assert [(await each)[0].status for each in (long, short)] == [200, 200]


async def test_a_lane_keeps_nothing_of_a_text_that_was_refused(cluster: FakeCluster) -> None:
    class Text:
        """An argument of a step, so that a weak reference can show when it is freed."""

    def refuse_it(text: Text) -> None:
        raise RequestError(str(text))

    text = Text()
    left = weakref.ref(text)
    gc.disable()
    try:
        with pytest.raises(RequestError):
            await cluster.services.model.in_lane(10, functools.partial(refuse_it, text))
        del text
        await until(lambda: left() is None, "it is freed without a collection")
    finally:
        gc.enable()


async def test_a_lane_takes_the_smallest_and_the_oldest_in_turn(cluster: FakeCluster, held: HeldTokenizer) -> None:
    lane = cluster.services.model._lanes.of(len(SHORT_TEXT))
    sizes = [4_000, 4_009, 4_008, 4_002, 4_001, 4_007]
    waiting = []
    for number, size in enumerate(sizes):
        waiting.append(asyncio.create_task(cluster.post("/tokenize", {"prompt": "x" * size})))
        await until(lambda number=number: lane.texts == number + 1 and bool(held.begun), f"{number + 1} are there")
    held.go_on.set()
    await asyncio.gather(*waiting)
    order = list(dict.fromkeys(map(len, held.begun)))
    assert order[0] == 4_000 and order[1:] in (
        [4_001, 4_009, 4_002, 4_008, 4_007],
        [4_009, 4_001, 4_008, 4_002, 4_007],
    )


async def test_a_short_text_does_not_wait_for_a_long_one(cluster: FakeCluster, held: HeldTokenizer) -> None:
    long = asyncio.create_task(cluster.post("/tokenize", {"prompt": LONG_TEXT}))
    await until(lambda: held.begun, "the long one is tokenized")
    async with asyncio.timeout(scaled(10)):
        response, _ = await cluster.post(CHAT, {**chat_of(PROSE), "max_tokens": 1})
    assert response.status == 200 and not long.done()
    held.go_on.set()
    assert (await long)[0].status == 200


async def test_work_on_a_text_ends_when_its_client_has_left(cluster: FakeCluster, held: HeldTokenizer) -> None:
    running = asyncio.create_task(cluster.post("/tokenize", {"prompt": LONG_TEXT}))
    await until(lambda: held.begun, "the first is tokenized")
    waiting = asyncio.create_task(cluster.post("/tokenize", {"prompt": LONG_TEXT + "y"}))
    lane = cluster.services.model._lanes.of(len(LONG_TEXT))
    await until(lambda: lane.texts == 2, "the second waits")
    for task in (running, waiting):
        task.cancel()
    await until(lambda: not lane.texts and not lane.chars, "neither counts")
    held.go_on.set()
    assert (await cluster.post("/tokenize", {"prompt": LONG_TEXT + "z"}))[0].status == 200, "the lane is free"
    assert held.begun.count(LONG_TEXT) == 1 and LONG_TEXT + "y" not in held.begun


async def test_bodies_in_memory_are_bounded_and_large_ones_apart(cluster: FakeCluster) -> None:
    bodies = cluster.services.bodies
    large, ordinary = ({"prompt": "x " * (size // 2)} for size in (LARGE_BYTES * 2, LARGE_BYTES // 16))
    with bodies.share() as share:
        share.grow(bodies.budgets[BodyKind.LARGE])
        response, body = await cluster.post("/tokenize", large)
        assert response.status == 429 and body["error"]["code"] == "server_is_overloaded"
        assert (await cluster.post("/tokenize", ordinary))[0].status == 200
        share.grow(LARGE_BYTES)
        bodies.budgets[BodyKind.ORDINARY] = LARGE_BYTES
        assert (await cluster.post("/tokenize", ordinary))[0].status == 429
    assert (await cluster.post("/tokenize", large))[0].status == 400, "read, and too long for the context"
    assert (await cluster.post("/tokenize", ordinary))[0].status == 200
    assert not any(bodies.held.values())


def _grow_all(shares: contextlib.ExitStack, bodies: Bodies, size: int, count: int) -> None:
    for _ in range(count):
        shares.enter_context(bodies.share()).grow(size)


@pytest.mark.parametrize(
    ("size", "most"), [(1_000, 40 << 20), (INLINE_BYTES + 1, 40 << 20), (LARGE_BYTES, 40 << 20), (8 << 20, 80 << 20)]
)
def test_all_bodies_of_a_kind_together_are_bounded(size: int, most: int) -> None:
    bodies = Bodies(8 << 20)
    with contextlib.ExitStack() as shares:
        for _ in range(most // (2 * size)):
            shares.enter_context(bodies.share()).grow(size)
        with pytest.raises(RequestError, match="are being received"):
            _grow_all(shares, bodies, size, most // size)
        for other in {1, INLINE_BYTES + 1, LARGE_BYTES + 1}:
            if kind_of(other) is not kind_of(size):
                shares.enter_context(bodies.share()).grow(other)
    assert not any(bodies.held.values())


async def test_a_small_body_counts_while_it_is_unfinished(cluster: FakeCluster) -> None:
    bodies = cluster.services.bodies
    reader, writer = await asyncio.open_connection("127.0.0.1", int(cluster.url.rsplit(":", 1)[1]))
    body = b'{"prompt": "x"}'
    writer.write(f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode())
    writer.write(body[:-2])
    await until(lambda: bodies.held[BodyKind.SMALL] == len(body) - 2, "it counts")
    bodies.budgets[BodyKind.SMALL] = 0
    assert (await cluster.post("/tokenize", {"prompt": "x"}))[0].status == 200, "it came in one piece"
    writer.write(body[-2:-1])
    assert b" 429 " in await reader.readline()
    writer.close()
    await until(lambda: not any(bodies.held.values()), "nothing is left")


@pytest.fixture
def roomy(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """A cluster whose model's context has room for any body."""
    monkeypatch.setattr(type(cluster.services.model), "context_length", 1 << 22)
    return cluster


def called_with(*arguments: object) -> dict[str, Any]:
    """Return an assistant message with one tool call for each of ``arguments``."""
    functions = [{"name": "f", "arguments": json.dumps(each)} for each in arguments]
    calls = [{"id": "a", "type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": calls}


async def test_values_of_tool_call_arguments_are_counted_too(roomy: FakeCluster) -> None:
    asked = {"messages": [called_with({"x": [[]] * (MAX_CONTAINERS + 1)})]}
    for path in (CHAT, "/tokenize"):
        response, body = await roomy.post(path, asked)
        assert response.status == 400 and "at most 131072 are allowed" in body["error"]["message"]
        assert body["error"]["param"] == "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize("value", [[], ""], ids=["arrays", "strings"])
async def test_values_of_a_body_and_of_arguments_are_counted_together(roomy: FakeCluster, value: object) -> None:
    values = [value] * (MAX_CONTAINERS // 3)
    asked: Any = {"messages": [called_with({"x": values}), called_with({"x": values[:-1000]})]}
    asked["an_unknown_field"] = values[:-1000]
    assert (await roomy.post("/tokenize", asked))[0].status == 200
    asked["messages"].append(called_with({}, {"x": values[:3000]}))
    for path in (CHAT, "/tokenize"):
        response, body = await roomy.post(path, asked)
        assert response.status == 400 and "at most 131072 are allowed" in body["error"]["message"]
        assert body["error"]["param"] == "messages[2].tool_calls[1].function.arguments"


async def test_arguments_that_are_too_long_together_are_not_parsed(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = cluster.services.model.context_length * cluster.services.model.text.chars_per_token
    arguments = {"x": "y" * (most // 3)}
    messages = [called_with(arguments, arguments)] * 2
    monkeypatch.setattr("coordinator.api.chat_messages.parse_arguments", None)
    for path in (CHAT, "/tokenize"):
        response, body = await cluster.post(path, {"messages": messages})
        assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert str(4 * len(json.dumps(arguments))) in body["error"]["message"] and body["error"]["param"] == "messages"


@pytest.mark.parametrize(
    "arguments",
    [r'{"x":"\ud800"}', '{"x":' + "[" * 64 + "]" * 64 + "}", '{"x":' + "[" * 900 + "]" * 900 + "}", '{"x":NaN}', "[]"],
)
async def test_tool_call_arguments_are_read_as_strictly_as_a_body(cluster: FakeCluster, arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    asked = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
    for path in (CHAT, "/tokenize"):
        response, body = await cluster.post(path, asked)
        assert response.status == 400, body
        assert body["error"]["param"] == "messages[0].tool_calls[0].function.arguments"
