"""The HTTP door over real sockets, with fake workers: answers, streams, errors, and what happens when workers go."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import math
import re
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from aiohttp import HttpVersion11, web
from prometheus_client import CollectorRegistry, generate_latest

from common.core.errors import RequestError
from common.core.ids import Incarnation, RequestId, new_incarnation, pack_tokens, unpack_transfers
from common.core.request import FinishReason, Request, SamplingParams
from common.core.timeouts import FailureTimes
from common.net.messages import (
    Abort,
    Drain,
    Failed,
    Generate,
    Goodbye,
    Lease,
    Logprobs,
    Prefill,
    Rejoin,
    Renewed,
    Resend,
    Reserve,
    Role,
    Timing,
    Tokens,
    Welcome,
)
from common.net.wire import MAX_REPORT_BYTES, seal
from coordinator.api.fields import MAX_CONTAINERS, JsonBudget, parse_json
from coordinator.api.openai import parse_chat
from coordinator.api.response_encoder import (
    ChatShape,
    Choice,
    CompletionShape,
    Head,
    Usage,
    chat_logprob,
    completion_logprobs,
    encode,
)
from coordinator.app import LAG_EVERY_S, drain
from coordinator.cluster.registry import Worker
from coordinator.http import application, sse
from coordinator.http.application import make_runner
from coordinator.http.bodies import Bodies, Kind, kind_of
from coordinator.http.context import read_timeout
from coordinator.http.middleware import error_response
from coordinator.http.repeats import RateLimitedLog
from coordinator.http.reply import WholeReply
from coordinator.http.server import MAX_WAITING_BYTES, Connection
from coordinator.http.sse import EventStream, deliver
from coordinator.metrics import FRESH_PAGES, PAGE_S, _Sum
from coordinator.requests import dispatcher as dispatch
from coordinator.requests.record import Ticket
from coordinator.requests.residence import ASSUMED_S, ENOUGH
from coordinator.requests.state import MAX_BREAKS, MAX_MIGRATIONS, MAX_RETRIES, State
from coordinator.routing.breakers import FAILURES
from coordinator.routing.router import HORIZON_TOKENS, Router
from coordinator.text.lanes import INLINE_BYTES, INLINE_OBJECTS, LARGE_BYTES, Bounds
from coordinator.text.tokenizer import TextModel
from tests.fakes.checkpoint import EOS, POSITIONS, VOCAB, fake_checkpoint
from tests.fakes.worker import FakeWorker, formula
from tests.leaked_keys import new_key
from tests.pace import scaled
from tests.unit.coordinator.house import House, open_house, until, valid

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_checkpoint(tmp_path_factory.mktemp("served"), temperature=0.7, top_k=20)


@pytest.fixture
async def house(model: Path) -> AsyncIterator[House]:
    async with open_house(model, "prefill", "decode") as house:
        yield house


def letters(text: str) -> Any:
    """A script that says ``text`` and then ends; every character is one token."""
    from coordinator.text.tokenizer import _BYTE_OF

    byte_tokens = {value: index for index, value in enumerate(sorted(_BYTE_OF), start=8)}
    chars = {byte: char for char, byte in _BYTE_OF.items()}
    ids = [byte_tokens[chars[byte]] for byte in text.encode()]

    def script(request: Request, choice: int, position: int) -> int:
        return ids[position] if position < len(ids) else EOS

    return script


async def talkers(house: House, text: str, **options: Any) -> None:
    roles: tuple[Role, ...] = ("prefill", "decode")
    for role in roles:
        await house.add(role, script=letters(text), **options)


async def prefilled(house: House, count: int) -> list[Request]:
    """The requests that the first worker was given, once they are so many: decode may have been faster."""
    worker = house.workers[0]
    await until(lambda: len(worker.got(Prefill)) == count, f"prefill has {count} requests")
    return [sent.request for sent in worker.got(Prefill)]


# -- answers ----------------------------------------------------------------------------------------------------------


async def test_a_chat_is_answered_by_a_pair(house: House) -> None:
    response, body = await house.post(CHAT, {**HELLO, "max_tokens": 6, "return_token_ids": True})
    assert response.status == 200
    valid("CreateChatCompletionResponse", body)
    prompt, ids = body["prompt_token_ids"], body["choices"][0]["token_ids"]
    (sent,) = house.workers[0].got(Prefill)
    assert sent.request.prompt_tokens() == prompt
    assert ids == [formula(sent.request, 0, position) for position in range(6)]
    assert body["choices"][0]["message"]["content"] == house.services.model.text.decode(ids)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 6,
        "total_tokens": len(prompt) + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert body["model"] == "tiny" and body["system_fingerprint"].startswith("tandem-")
    assert response.headers["x-tandem-path"] == "disagg"
    assert response.headers["x-tandem-prefill"] == "prefill-0"
    assert response.headers["x-tandem-decode"] == "decode-1"
    (reserved,) = house.workers[1].got(Reserve)
    assert reserved.request.id == sent.request.id and reserved.prefill.name == "prefill-0"
    assert sent.decode.address == "tcp://127.0.0.1:1"


async def test_the_system_fingerprint_tells_how_weights_were_loaded(model: Path) -> None:
    """Which only workers know: quantised ones give other answers to the same request."""
    seen: dict[str, list[str]] = {}
    roles: tuple[Role, ...] = ("prefill", "decode")
    for loaded in ("w", "w.int8", "w"):
        async with open_house(model) as house:
            fingerprint = f"{house.services.model.checkpoint.fingerprint}.{loaded}"
            for role in roles:
                await house.add(role, fingerprint=fingerprint)
            _, body = await house.post(CHAT, {**HELLO, "max_tokens": 1})
            seen.setdefault(loaded, []).append(body["system_fingerprint"])
    first, again = seen["w"]
    assert first == again and first not in seen["w.int8"]


async def test_the_models_sampling_defaults_count_unless_asked_otherwise(house: House) -> None:
    await house.post(CHAT, {**HELLO, "max_tokens": 1})
    await house.post(CHAT, {**HELLO, "max_tokens": 1, "temperature": 0, "top_k": -1, "seed": -1})
    first, second = (request.sampling for request in await prefilled(house, 2))
    assert (first.temperature, first.top_k, first.eos_token_ids) == (0.7, 20, (EOS,))
    assert (second.temperature, second.top_k) == (0.0, 0) and second.seed >= 0


async def test_different_seeds_stay_different(house: House) -> None:
    seeds = (-1, (1 << 63) - 1, 0, -(1 << 63), 1)
    for seed in seeds:
        await house.post(CHAT, {**HELLO, "max_tokens": 1, "seed": seed})
    sent = {request.sampling.seed for request in await prefilled(house, len(seeds))}
    assert sent == {seed % (1 << 64) for seed in seeds} and len(sent) == len(seeds)


async def test_a_stream_has_one_chunk_per_token(house: House) -> None:
    asked = {**HELLO, "max_tokens": 5, "stream_options": {"include_usage": True}, "return_token_ids": True}
    response, events = await house.stream(CHAT, asked)
    for event in events:
        valid("CreateChatCompletionStreamResponse", event)
    tokens, (end, usage) = events[:-2], events[-2:]
    assert len(tokens) == 5
    assert tokens[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in event["choices"][0]["delta"] for event in tokens[1:])
    ids = [event["choices"][0]["token_ids"] for event in tokens]
    assert all(len(each) == 1 for each in ids) and tokens[0]["prompt_token_ids"]
    said = "".join(event["choices"][0]["delta"]["content"] for event in tokens)
    assert said == house.services.model.text.decode([each[0] for each in ids])
    assert end["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert all(event["usage"] is None for event in events[:-1])
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 5
    assert response.headers["Cache-Control"] == "no-cache" and response.headers["X-Accel-Buffering"] == "no"
    assert response.headers["x-tandem-path"] == "disagg" and response.headers["x-request-id"]
    assert len({event["id"] for event in events}) == 1


async def test_usage_in_every_chunk(house: House) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, events = await house.stream(TEXT, {"prompt": "hi", "max_tokens": 3, "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3, 3]


async def test_completions_of_several_prompts_and_choices(house: House) -> None:
    asked = {"prompt": ["one", "two three"], "n": 2, "max_tokens": 3, "logprobs": 2, "return_token_ids": True}
    _, body = await house.post(TEXT, asked)
    valid("CreateCompletionResponse", body)
    choices = body["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    requests = [sent.request for sent in house.workers[0].got(Prefill)]
    for index, choice in enumerate(choices):
        request = requests[index // 2]
        assert choice["prompt_token_ids"] == request.prompt_tokens()
        assert choice["token_ids"] == [formula(request, index % 2, at) for at in range(3)]
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["top_logprobs"]) == 3
    assert body["usage"]["completion_tokens"] == 12


async def test_streamed_completions_of_several_choices(house: House) -> None:
    _, events = await house.stream(TEXT, {"prompt": [[40, 41], [42]], "n": 2, "max_tokens": 2, "logprobs": 0})
    for event in events:
        valid("CreateCompletionStreamResponse", event)
    for index in range(4):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [choice["finish_reason"] for choice in mine] == [None, None, "length"]
        assert all(choice["logprobs"]["token_logprobs"] == [-0.5] for choice in mine[:2])


async def test_chat_logprobs(house: House) -> None:
    asked = {**HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    _, body = await house.post(CHAT, asked)
    valid("CreateChatCompletionResponse", body)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == 2 and [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]
    _, events = await house.stream(CHAT, asked)
    streamed = [event["choices"][0]["logprobs"]["content"][0] for event in events[:-1]]
    assert [entry["top_logprobs"] for entry in streamed] == [entry["top_logprobs"] for entry in content]


@pytest.mark.parametrize("shape", [ChatShape, functools.partial(CompletionShape, echoes=[])])
def test_logprobs_of_a_whole_answer_are_what_they_are_at_once(model: Path, shape: Any) -> None:
    """The JSON of an answer whose log-probabilities were encoded with each token is that of all of them together."""
    text, tokens = TextModel(model, vocab_size=VOCAB), list(range(8, 60))
    body = parse_chat({**HELLO, "logprobs": True, "top_logprobs": 2})
    known = [Logprobs(-(at**2), pack_tokens([at, 7]), (-0.1 * at, -math.inf)) for at in tokens]
    choices = [Choice(at, [1], body.options, text, None) for at in range(2)]
    made = shape(Head("id", 0, "tiny", "print"), body.options, text)
    pieces = list(choices[0].feed(tokens, known, FinishReason.STOP))
    for piece in pieces:
        made.keep_logprobs(choices[0], piece)
    whole = made.whole(choices, Usage())
    if shape is ChatShape:
        full = {"content": [chat_logprob(text, *pair) for pair in zip(tokens, known, strict=True)], "refusal": None}
        none: Any = {"content": [], "refusal": None}
    else:
        full, none = completion_logprobs(text, pieces, 0), completion_logprobs(text, [], 0)
    assert [encode(choice["logprobs"]) for choice in whole["choices"]] == [encode(full), encode(none)]


async def test_logprobs_are_not_left_for_the_end(model: Path) -> None:
    """With a thousand tokens the end of an answer takes little of the time that all of it takes."""
    text, options = TextModel(model, vocab_size=VOCAB), parse_chat({**HELLO, "logprobs": True}).options
    shape = ChatShape(Head("id", 0, "tiny", "print"), options, text)
    reply = WholeReply(options, shape, 1, lambda index: Choice(index, [1], options, text, None))
    ticket: Any = SimpleNamespace(id=b"id", n=1, prompt_length=1, timings={})
    reply.expect([ticket])
    known = Logprobs(-0.5, pack_tokens(list(range(20))), tuple(-0.1 * at for at in range(20)))
    began = time.thread_time()
    for _ in range(1000):
        reply.tokens(ticket, 0, [9], [known], FinishReason.RUNNING)
    until_the_end = time.thread_time() - began
    body = encode(reply.body())
    assert len(body) > 1_000_000
    assert time.thread_time() - began - until_the_end < until_the_end / 5


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        (CHAT, {**HELLO, "n": 16, "logprobs": True, "top_logprobs": 20}, "top_logprobs"),
        (TEXT, {"prompt": [[9]] * 8, "n": 4, "logprobs": 20}, "logprobs"),
    ],
)
async def test_logprobs_of_a_whole_answer_are_bounded(
    house: House, monkeypatch: pytest.MonkeyPatch, path: str, asked: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr("coordinator.api.service.MOST_LOGPROB_BYTES", 100_000)
    _, body = await house.post(path, {**asked, "max_tokens": 40})
    assert (body["error"]["param"], body["error"]["code"]) == (param, "invalid_value")
    await house.stream(path, {**asked, "max_tokens": 40})
    _, body = await house.post(path, {**asked, "max_tokens": 2})
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    if path == CHAT:  # who sets no limit gets what fits
        _, body = await house.post(path, asked)
        assert body["usage"]["completion_tokens"] == 2 * 16


async def test_echo_repeats_the_prompt(house: House) -> None:
    _, body = await house.post(TEXT, {"prompt": "hello", "echo": True, "max_tokens": 1})
    assert body["choices"][0]["text"].startswith("hello")
    _, events = await house.stream(TEXT, {"prompt": "hello", "echo": True, "max_tokens": 2})
    assert events[0]["choices"][0]["text"].startswith("hello")
    assert not events[1]["choices"][0]["text"].startswith("hello")


async def test_return_metrics_adds_up(house: House) -> None:
    _, body = await house.post(CHAT, {**HELLO, "max_tokens": 4, "return_metrics": True})
    stages = body["tandem"]
    assert stages["path"] == "disagg" and stages["why"] and stages["kv_bytes"] == 4096
    total = stages["queue_ms"] + stages["tokenize_ms"] + stages["prefill_ms"]
    assert total == pytest.approx(stages["ttft_ms"], abs=0.01)
    _, events = await house.stream(CHAT, {**HELLO, "max_tokens": 4, "return_metrics": True})
    assert events[-1]["choices"][0]["finish_reason"] and events[-1]["tandem"]["decode"] == "decode-1"
    asked = {**HELLO, "max_tokens": 4, "return_metrics": True, "stream_options": {"include_usage": True}}
    assert (await house.stream(CHAT, asked))[1][-1]["tandem"]["itl_ms_mean"] > 0


# -- how a choice ends ------------------------------------------------------------------------------------------------


async def test_end_of_sequence_is_not_shown(model: Path) -> None:
    async with open_house(model) as house:
        await talkers(house, "hi")
        _, body = await house.post(CHAT, {**HELLO, "return_token_ids": True, "skip_special_tokens": False})
        choice = body["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("hi", "stop")
        assert choice["token_ids"][-1] == EOS


async def test_the_first_token_may_end_it_on_prefill(model: Path) -> None:
    async with open_house(model, "prefill") as house:
        decode = await house.add("decode", delay_s=5)
        response, body = await house.post(CHAT, {**HELLO, "max_tokens": 1, "return_metrics": True})
        assert body["usage"]["completion_tokens"] == 1
        assert response.headers["x-tandem-path"] == body["tandem"]["path"] == "prefill"
        assert response.headers["x-tandem-decode"] == "none"
        await until(lambda: decode.got(Abort), "decode is told")
        _, events = await house.stream(CHAT, {**HELLO, "max_tokens": 1, "return_metrics": True})
        assert events[-1]["tandem"]["path"] == "prefill"


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_it_everywhere_and_never_leaks(model: Path, include: bool) -> None:
    async with open_house(model) as house:
        await talkers(house, "some text STOP and more of it" * 5)
        asked = {**HELLO, "stop": ["xyz", "STOP"], "include_stop_str_in_output": include}
        wanted = "some text STOP" if include else "some text "
        _, body = await house.post(CHAT, asked)
        assert body["choices"][0]["message"]["content"] == wanted
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == len("some text STOP")
        _, events = await house.stream(CHAT, asked)
        parts = [event["choices"][0]["delta"]["content"] for event in events[:-1]]
        assert len(parts) == len("some text STOP") and "".join(parts) == wanted
        await until(lambda: len(house.workers[1].got(Abort)) == 2, "decode is told")


async def test_stop_strings_wait_for_min_tokens(model: Path) -> None:
    async with open_house(model) as house:
        await talkers(house, "ababab")
        _, body = await house.post(CHAT, {**HELLO, "stop": "b", "min_tokens": 3})
        assert body["choices"][0]["message"]["content"] == "aba"


async def test_a_character_of_several_tokens_comes_whole(model: Path) -> None:
    async with open_house(model) as house:
        await talkers(house, "é🙂!")
        _, events = await house.stream(CHAT, HELLO)
        parts = [event["choices"][0]["delta"]["content"] for event in events[:-1]]
        assert parts == ["", "é", "", "", "", "🙂", "!", ""]


# -- the way of a request ---------------------------------------------------------------------------------------------


async def test_colocated_workers_do_it_all(model: Path) -> None:
    async with open_house(model, "colocated") as house:
        response, body = await house.post(CHAT, {**HELLO, "max_tokens": 3, "n": 3})
        assert response.headers["x-tandem-path"] == "colocated" and len(body["choices"]) == 3
        assert len(house.workers[0].got(Generate)) == 1


async def test_a_decode_worker_alone_prefills_by_itself(model: Path) -> None:
    async with open_house(model, "decode") as house:
        response, _ = await house.post(CHAT, {**HELLO, "max_tokens": 3})
        assert response.headers["x-tandem-path"] == "local"


@pytest.mark.parametrize(
    ("roles", "options", "role"),
    [((), {}, "decode"), (("prefill",), {}, "decode"), (("decode",), {"no_prefill_policy": "reject"}, "prefill")],
)
async def test_no_worker_of_a_role_is_said_at_once(
    model: Path, roles: Any, options: Any, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "STARTING_WAIT_S", 0.0)
    async with open_house(model, *roles, **options) as house:
        started = time.monotonic()
        response, body = await house.post(CHAT, HELLO)
        assert response.status == 503 and time.monotonic() - started < 1
        assert body["error"]["code"] == f"no_{role}_workers" and f"tandem {role}" in body["error"]["message"]
        assert response.headers["Retry-After"]
        valid("ErrorResponse", body)


async def test_what_does_not_fit_now_waits_in_order_of_priority(model: Path) -> None:
    async with open_house(model, "prefill") as house:
        await house.add("decode", step_s=0.02, changes={"kv_blocks": 3})
        asked = {"prompt": [50] * 16, "max_tokens": 16}
        running = asyncio.create_task(house.post(TEXT, asked))
        await until(lambda: house.dispatcher.tickets, "the first is placed")
        done: list[str] = []

        async def later(name: str, priority: int) -> None:
            await house.post(TEXT, {**asked, "priority": priority})
            done.append(name)

        tasks = [asyncio.create_task(later("late", 5)), asyncio.create_task(later("early", -5))]
        await until(lambda: house.dispatcher.admission.requests == 2, "two wait")
        await asyncio.gather(running, *tasks)
        assert done == ["early", "late"]


async def test_of_many_prompts_decode_takes_some_and_the_rest_goes_where_one_is_done_first(model: Path) -> None:
    async with open_house(model) as house:
        await house.add("prefill", delay_s=0.05, changes={"max_num_batched_tokens": 2})
        await house.add("decode", delay_s=0.05)
        asked = {"prompt": [50] * 16, "max_tokens": 4, "return_metrics": True}
        tasks = [asyncio.create_task(house.post(TEXT, asked)) for _ in range(12)]
        await until(lambda: house.dispatcher.admission.requests, "some wait with the coordinator")
        assert len(house.workers[0].got(Prefill)) <= 4, "of 24 steps"
        paths = Counter([body["tandem"]["path"] for _, body in await asyncio.gather(*tasks)])
        assert paths["local"] >= 2 and paths["disagg"] >= 4 and paths.total() == 12, paths


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("colocated",)])
async def test_requests_wait_for_the_workers_of_a_coordinator_that_has_just_started(model: Path, roles: Any) -> None:
    async with open_house(model) as house:
        asked = asyncio.create_task(house.post(CHAT, {**HELLO, "n": 2, "max_tokens": 4}))
        await until(lambda: house.dispatcher.tickets, "it waits")
        assert (await house.get("/ready"))[0].status == 503
        for role in roles:
            await house.add(role)
        assert (await asked)[0].status == 200


@pytest.mark.parametrize("expected", [{}, {"decode": 2}, {"colocated": 1}])
async def test_they_wait_a_bounded_time_and_later_ones_not_at_all(
    model: Path, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "STARTING_WAIT_S", 1.0)
    options = {f"expect_{role}": count for role, count in expected.items()}
    async with open_house(model, max_queued_requests=1, **options) as house:
        for later in (False, True):
            began = time.monotonic()
            first = asyncio.create_task(house.post(CHAT, HELLO))
            if not later:
                await until(lambda: house.dispatcher.tickets, "it waits")
                assert (await house.post(CHAT, HELLO))[0].status == 429, "no more than may queue"
            response, body = await first
            assert response.status == 503 and body["error"]["code"] == "no_decode_workers"
            assert ("still starting" in body["error"]["message"]) == bool(expected)
            assert time.monotonic() - began < (0.5 if later else 1.25)


async def test_a_drain_does_not_wait_for_workers_that_may_join(model: Path) -> None:
    async with open_house(model) as house:
        asked = asyncio.create_task(house.post(CHAT, HELLO))
        await until(lambda: house.dispatcher.tickets, "it waits")
        began = time.monotonic()
        await drain(house.services, asyncio.Event())
        assert (await asked)[0].status == 503 and time.monotonic() - began < 2.0


async def test_a_client_that_hangs_up_while_it_waits_for_workers_leaves_the_queue(model: Path) -> None:
    async with open_house(model, max_queued_requests=1) as house:
        asked = asyncio.create_task(house.post(CHAT, HELLO))
        await until(lambda: house.dispatcher.tickets, "it waits")
        asked.cancel()
        await until(lambda: not house.dispatcher.tickets, "its place is free", 1.0)
        assert house.dispatcher.admission.requests == 0


async def test_nobody_waits_for_the_start_of_a_worker_that_was_there(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "STARTING_WAIT_S", 60.0)
    async with open_house(model) as house:
        worker = await house.add("colocated")
        worker.say(Goodbye(worker.hello.incarnation, "drained"))
        await until(lambda: not len(house.dispatcher.registry), "it has left")
        async with asyncio.timeout(5):
            response, body = await house.post(CHAT, HELLO)
        assert response.status == 503 and body["error"]["code"] == "no_decode_workers"


async def test_who_waits_for_the_start_has_its_own_deadline(model: Path) -> None:
    async with open_house(model, request_timeout=0.3) as house:
        response, body = await house.post(CHAT, HELLO)
        assert response.status == 504 and body["error"]["code"] == "request_timeout"


async def test_a_full_queue_says_when_to_come_back(model: Path) -> None:
    async with open_house(model, "prefill", max_queued_requests=1) as house:
        await house.add("decode", step_s=0.05, changes={"kv_blocks": 3})
        asked = {"prompt": [50] * 16, "max_tokens": 16}
        tasks = [asyncio.create_task(house.post(TEXT, asked)) for _ in range(2)]
        await until(lambda: house.dispatcher.admission.requests == 1, "one waits")
        response, body = await house.post(TEXT, asked)
        assert response.status == 429 and body["error"]["code"] == "server_is_overloaded"
        delay_ms = int(response.headers["retry-after-ms"])
        assert delay_ms >= 1000 * ASSUMED_S / 2, "nothing was measured yet"
        assert int(response.headers["Retry-After"]) == math.ceil(delay_ms / 1000)
        await asyncio.gather(*tasks)


async def test_a_full_queue_says_when_a_place_frees_by_what_requests_took_and_what_runs(model: Path) -> None:
    async with open_house(model, "prefill", max_queued_requests=1) as house:
        await house.add("decode", step_s=0.05, changes={"kv_blocks": 3})
        asked = {"prompt": [50] * 16, "max_tokens": 8}
        for _ in range(ENOUGH):
            assert (await house.post(TEXT, asked))[0].status == 200
        running = asyncio.create_task(house.post(TEXT, {**asked, "max_tokens": 16}))
        await until(lambda: len(list(house.dispatcher.admission.running())) == 1, "one runs")
        waiting = asyncio.create_task(house.post(TEXT, asked))
        await until(lambda: house.dispatcher.admission.requests == 1, "one waits")
        response, _ = await house.post(TEXT, asked)
        assert response.status == 429 and int(response.headers["retry-after-ms"]) < 1000 * ASSUMED_S / 2
        await asyncio.gather(running, waiting)
        assert not list(house.dispatcher.admission.running())


def test_retry_times_are_spread() -> None:
    error = RequestError("later", status=429, retry_after_s=2.0)
    delays_ms = [int(error_response(error).headers["retry-after-ms"]) for _ in range(200)]
    assert 1600 <= min(delays_ms) < 1800 and 2200 < max(delays_ms) <= 2400


async def test_a_deadline_is_kept(model: Path) -> None:
    async with open_house(model, "prefill", request_timeout=0.2) as house:
        await house.add("decode", step_s=0.05)
        response, body = await house.post(CHAT, {**HELLO, "max_tokens": 100})
        assert response.status == 504 and body["error"]["code"] == "request_timeout"
        _, events = await house.stream(CHAT, {**HELLO, "max_tokens": 100})
        assert events[-1]["error"]["code"] == "request_timeout"
        valid("ErrorResponse", events[-1])


def _told(worker: FakeWorker, times: int) -> bool:
    return len(worker.got(Abort)) >= times


@pytest.mark.alone
async def test_a_client_that_leaves_stops_the_work(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.http")
    async with open_house(model, "prefill") as house:
        decode = await house.add("decode", step_s=0.05)
        for stream in (True, False):
            told = len(decode.got(Abort)) + 1
            asked = {**HELLO, "max_tokens": 1000, "stream": stream}
            response = asyncio.create_task(house.client.post(f"{house.url}{CHAT}", json=asked))
            await until(lambda: decode.busy, "it runs")
            if stream:
                (await response).close()
            else:
                response.cancel()
            started = time.monotonic()
            await until(functools.partial(_told, decode, told), "decode is told")
            assert time.monotonic() - started < scaled(0.2)
        await until(lambda: not decode.busy, "decode is free")
    assert caplog.messages.count("499 POST /v1/chat/completions: the client has left") == 1
    more = "1 more clients have left before they were answered: 1 POST /v1/chat/completions"
    assert caplog.messages.count(more) == 1


async def test_a_client_that_has_read_its_stream_to_the_end_leaves_without_a_word(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many do not wait for the end of the response behind the last event."""
    caplog.set_level(logging.INFO, "tandem.http")
    at_its_end = asyncio.Event()

    async def never_ends(*_: object) -> web.StreamResponse:
        at_its_end.set()
        return await asyncio.get_running_loop().create_future()

    async with open_house(model, "colocated") as house:
        monkeypatch.setattr(sse, "deliver", never_ends)
        async with house.client.post(f"{house.url}{CHAT}", json={**HELLO, "max_tokens": 3, "stream": True}) as response:
            while b"[DONE]" not in await response.content.readany():
                pass
            await at_its_end.wait()
            response.close()
        await until(lambda: not house.services.answers.count, "it has left")
    assert not [line for line in caplog.messages if "499" in line]


# -- workers come and go ----------------------------------------------------------------------------------------------


async def stream_over(house: House, loss: Any, path: str = "disagg") -> None:
    """A stream during which ``loss(house)`` happens: nothing missing, nothing twice."""
    async with house.client.post(
        f"{house.url}{CHAT}", json={**HELLO, "max_tokens": 40, "stream": True, "return_token_ids": True}
    ) as response:
        lines: list[str] = []
        async for line in response.content:
            if line.startswith(b"data: {"):
                lines.append(line.decode().removeprefix("data: "))
            if len(lines) == 10:
                await loss(house)
    events = [json.loads(line) for line in lines]
    assert "error" not in events[-1], events[-1]
    ids = [event["choices"][0]["token_ids"][0] for event in events[:-1]]
    request = next(w for w in house.workers if w.got(Prefill) or w.got(Generate)).received
    sent = next(message for message in request if isinstance(message, Prefill | Generate)).request
    assert ids == [formula(sent, 0, position) for position in range(40)]


async def test_a_dead_decode_worker_is_replaced_in_mid_stream(model: Path) -> None:
    async with open_house(model, "prefill") as house:
        first = await house.add("decode", step_s=0.01)
        await house.add("decode", step_s=0.01)

        async def kill(_: House) -> None:
            first.stop()

        await stream_over(house, kill)
        migrated = [sent for sent in house.workers[0].got(Prefill) if sent.attempt == 1]
        assert migrated and len(migrated[0].request.emitted_tokens(0)) >= 10


def as_shown(events: list[Any]) -> list[tuple[str, list[Any], str]]:
    """Text, log-probabilities and finish reason of each choice of a streamed chat, however its chunks are cut."""
    shown = []
    for index in range(1 + max(event["choices"][0]["index"] for event in events)):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        text = "".join(choice["delta"].get("content") or "" for choice in mine)
        entries = [entry for choice in mine if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        shown.append((text, entries, mine[-1]["finish_reason"]))
    return shown


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("before", ["S", "STO"])
async def test_a_stop_string_of_which_two_decode_workers_have_a_part_each(
    model: Path, before: str, n: int, *, stream: bool
) -> None:
    """The second choice has met its own before the first worker died."""
    talks = [letters("some text STOP and more of it"), letters("bySTOP and more of it")]
    said = len("some text " + before)
    asked = {**HELLO, "stop": ["xyz", "STOP"], "logprobs": True, "top_logprobs": 1, "n": n}

    def talk(request: Request, choice: int, position: int) -> int:
        return int(talks[choice](request, choice, position))

    async with open_house(model) as house:
        await house.add("prefill", script=talk)
        first = await house.add("decode", script=talk)

        def talk_no_further(request: Request, choice: int, position: int) -> int:
            if position == said - 1:
                first.step_s = 30.0  # before the next
            return talk(request, choice, position)

        async def ask() -> Any:
            if stream:
                return as_shown((await house.stream(CHAT, asked))[1])
            _, body = await house.post(CHAT, asked)
            return body["choices"], body["usage"]["completion_tokens"]

        undisturbed = await ask()
        first.script = talk_no_further
        disturbed = asyncio.create_task(ask())
        await until(lambda: house.dispatcher.tickets, "it runs")
        [ticket] = house.dispatcher.tickets.values()
        await until(lambda: len(ticket.life.output[0]) == said, "its first part is here")
        await house.add("decode", script=talk)
        first.stop()
        assert await disturbed == undisturbed
        assert house.services.metrics.registry.get_sample_value("tandem_migrations_total") == 1
    if stream:
        shown = [(text, finish) for text, _, finish in undisturbed]
    else:
        shown = [(choice["message"]["content"], choice["finish_reason"]) for choice in undisturbed[0]]
    assert shown == [("some text ", "stop"), ("by", "stop")][:n]


async def test_a_silent_decode_worker_is_replaced_in_mid_stream(model: Path) -> None:
    async with open_house(model, "prefill", failure_timeout=0.5) as house:
        first = await house.add("decode", step_s=0.01)
        await house.add("decode", step_s=0.01)

        async def hang(_: House) -> None:
            first.fall_silent()

        await stream_over(house, hang)


@pytest.mark.parametrize("cut_off", ["it hears nothing", "it is not heard"])
@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
async def test_a_worker_whose_heart_beats_over_another_connection_than_the_dead_one_is_replaced(
    model: Path, role: Role, cut_off: str
) -> None:
    """Before the first token too: nothing of such a request would ever be told, and a heart goes on beating."""
    others: dict[Role, tuple[Role, ...]] = {"prefill": ("decode",), "decode": ("prefill",), "colocated": ()}
    async with open_house(model, *others[role], failure_timeout=0.5) as house:
        dead = await house.add(role, name="dead", rejoins=False)
        await house.add(role, name="alive")
        if cut_off == "it hears nothing":
            dead.deaf = True
        else:
            dead.drop |= {Tokens, Timing, Renewed}
        asked = [house.post(CHAT, {**HELLO, "max_tokens": 4}) for _ in range(6)]
        async with asyncio.timeout(5):
            answers = await asyncio.gather(*asked)
        assert [response.status for response, _ in answers] == [200] * 6
        known = house.dispatcher.registry
        await until(lambda: [worker.hello.name for worker in known.ready(role)] == ["alive"], "it is gone")


async def test_a_shorter_failure_timeout_notices_silence_sooner_than_the_usual_one_could(model: Path) -> None:
    async with open_house(model, failure_timeout=0.5) as house:
        worker = await house.add("colocated")
        (welcome,) = worker.got(Welcome)
        assert (welcome.heartbeat_ms, welcome.lease_ms, welcome.patience_ms) == (125, 2000, 500)
        worker.fall_silent()
        silent_at = time.monotonic()
        await until(lambda: not len(house.dispatcher.registry), "it is gone")
        assert time.monotonic() - silent_at < FailureTimes().silence_s


async def test_a_worker_that_leaves_politely(model: Path) -> None:
    async with open_house(model, "prefill") as house:
        first = await house.add("decode", step_s=0.01)
        await house.add("decode", step_s=0.01)

        async def leave(_: House) -> None:
            first.say(Goodbye(first.hello.incarnation, "drained"))

        await stream_over(house, leave)


async def test_the_last_words_of_a_worker_are_read_before_it_is_called_lost(model: Path) -> None:
    """It said Goodbye and is gone before anybody has read it: sending to it fails first."""
    async with open_house(model, "colocated", "colocated") as house:
        for worker in house.workers:
            worker.step_s = 0.02
        asked = asyncio.create_task(house.post(TEXT, {"prompt": "wait", "max_tokens": 50, "ignore_eos": True}))
        await until(lambda: any(worker.busy for worker in house.workers), "somebody has it")
        leaving = next(worker for worker in house.workers if worker.busy)
        ticket = next(iter(house.dispatcher.tickets.values()))
        registered = house.services.registry.get(leaving.hello.incarnation)
        assert registered is not None
        leaving.say(Goodbye(leaving.hello.incarnation, "drained"))
        time.sleep(0.3)  # noqa: ASYNC251 - the event loop is to be away while both happen
        leaving.stop()
        time.sleep(0.2)  # noqa: ASYNC251
        assert not house.dispatcher.gateway.send(registered, Abort(ticket.id, 99))
        response, body = await asked
        assert response.status == 200 and body["usage"]["completion_tokens"] == 50
        assert (
            ticket.life.attempt == 1 and not ticket.life.crashes and ticket.life.migrations == ticket.life.retries == 0
        )


async def test_streams_move_from_workers_that_leave_more_often_than_they_could_after_losses(model: Path) -> None:
    """A planned move costs nothing of the budget, and the stream is the one that nothing had disturbed."""
    body = {"prompt": "moved about", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    async with open_house(model, "decode", "decode") as house:
        for worker in house.workers:
            worker.step_s = 0.0
        _, quiet = await house.stream(TEXT, body)
        for worker in house.workers:
            worker.step_s = 0.02
        asked = asyncio.create_task(house.stream(TEXT, body))
        for _ in range(MAX_MIGRATIONS + 2):
            await until(
                lambda: house.dispatcher.tickets and any(worker.busy for worker in house.workers), "somebody has it"
            )
            leaving = next(worker for worker in house.workers if worker.busy)
            ticket = next(iter(house.dispatcher.tickets.values()))
            attempt = ticket.life.attempt
            leaving.say(Goodbye(leaving.hello.incarnation, "drained"))
            await until(lambda before=attempt, ticket=ticket: ticket.life.attempt > before, "it moves on")
            leaving._jobs.clear()
            await until(lambda: len(house.services.registry.ready("decode")) == 2, "the one that left is back")
        for worker in house.workers:
            worker.step_s = 0.0
        _, events = await asked
        assert ticket.life.migrations == 0
        texts = ["".join(event["choices"][0]["text"] for event in each if event["choices"]) for each in (quiet, events)]
        assert texts[0] == texts[1] and texts[0]


async def test_a_dead_prefill_worker_costs_a_retry_only(model: Path) -> None:
    async with open_house(model, "decode") as house:
        house.workers[0].delay_s = 30
        slow = await house.add("prefill", delay_s=30)
        asked = asyncio.create_task(house.post(CHAT, {**HELLO, "max_tokens": 3}))
        await until(lambda: slow.busy, "it prefills")
        await house.add("prefill")
        house.workers[0].delay_s = 0
        slow.stop()
        response, body = await asked
        assert response.status == 200 and body["usage"]["completion_tokens"] == 3
        assert response.headers["x-tandem-prefill"] == "prefill-2"


async def test_a_tick_that_fails_is_not_the_last(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(now_s: float) -> None:
        calls.append(now_s)
        raise RuntimeError("this time only, let us say")

    monkeypatch.setattr(house.dispatcher.gateway, "sweep", fail)
    await until(lambda: len(calls) > 1, "it is called again")


async def test_no_stream_stalls_while_what_workers_say_cannot_be_read(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is behind a message of too many parts. When that is dropped the time until then was our lag."""
    sweeps, looks = list[float](), list[Any]()
    gateway, sweep = house.dispatcher.gateway, house.dispatcher.gateway.sweep
    monkeypatch.setattr(house.dispatcher, "_look_for_stalls", lambda worker, now: looks.append(worker))
    with monkeypatch.context() as patch:
        patch.setattr(gateway, "sweep", lambda now: sweeps.append(now) or sweep(now))
        patch.setattr(gateway._socket, "dropping", True)
        patch.setattr(gateway._socket, "recv_multipart", lambda *_, **__: [])
        await until(lambda: len(sweeps) > 10, "it looks again and again, for longer than a worker may be silent")
        assert not looks
    await until(lambda: len(looks) > 1, "and looks for stalls again")
    assert len(house.services.registry) == 2


@pytest.mark.parametrize("policy", ["wait", "reject"])
async def test_one_failed_hand_off_holds_nobody_up(model: Path, policy: str) -> None:
    async with open_house(model, "decode", no_prefill_policy=policy) as house:
        broken = Failed(RequestId(bytes(16)), 0, "transfer_failed", "connection reset", retriable=True)
        prefill = await house.add("prefill", refuse=broken)
        asked = asyncio.create_task(house.post(CHAT, {**HELLO, "max_tokens": 2}))
        await until(lambda: prefill.got(Prefill), "it tries")
        prefill.refuse = None
        async with asyncio.timeout(5):
            assert (await asked)[0].status == 200
            assert (await house.post(CHAT, {**HELLO, "max_tokens": 2}))[0].status == 200


async def test_who_was_away_himself_has_not_heard_a_silence(model: Path) -> None:
    async with open_house(model, "prefill") as house:
        await house.add("decode", step_s=0.05)
        asked = asyncio.create_task(house.post(CHAT, {**HELLO, "max_tokens": 20, "ignore_eos": True}))
        await until(lambda: any(t.life.state is State.DECODING for t in house.dispatcher.tickets.values()), "it runs")
        [ticket] = house.dispatcher.tickets.values()
        lags = house.services.registry.lags
        await until(lambda: lags._looked_at is not None, "it has looked once")
        for worker in house.services.registry:  # as if this process had been stopped for so long
            worker.heard_at -= 5.0
        ticket.heard_at -= 5.0
        assert lags._looked_at is not None and not asked.done()
        lags._looked_at -= 5.0
        house.dispatcher._tick()
        assert (await asked)[0].status == 200 and ticket.life.attempt == 0


async def test_requests_whose_clients_left_do_not_stay_behind_one_that_waits(model: Path) -> None:
    async with open_house(model, "decode", no_prefill_policy="wait", max_queued_requests=1000) as house:
        first = asyncio.create_task(house.post(CHAT, HELLO))
        for _ in range(4):
            tasks = [asyncio.create_task(house.post(CHAT, HELLO)) for _ in range(50)]
            await until(lambda: len(house.dispatcher.tickets) == 51, "all wait")
            for task in tasks:
                task.cancel()
            await until(lambda: len(house.dispatcher.tickets) == 1, "they are forgotten")
        assert len(house.dispatcher._queue) < 100
        await house.add("prefill")
        response, _ = await first
        assert response.status == 200


async def test_how_a_stream_went_on_elsewhere_is_no_part_of_its_usage(model: Path) -> None:
    async with open_house(model, "prefill") as house:
        decode = await house.add("decode", step_s=0.05)
        asked = asyncio.create_task(house.post(CHAT, {**HELLO, "max_tokens": 20}))
        await until(lambda: any(t.life.state is State.DECODING for t in house.dispatcher.tickets.values()), "it runs")
        [ticket] = house.dispatcher.tickets.values()
        [worker] = [each for each in house.dispatcher.registry if each.id == decode.hello.incarnation]
        ticket.life.attempt += 1
        house.dispatcher.timing(worker, Timing(ticket.id, ticket.life.attempt, {"cached_tokens": 80.0}))
        ticket.life.attempt -= 1
        _, body = await asked
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_two_crashes_are_enough(model: Path) -> None:
    async with open_house(model) as house:
        workers = [await house.add("colocated", delay_s=30, name=f"c{n}") for n in range(3)]
        asked = asyncio.create_task(house.post(CHAT, HELLO))
        for _ in range(2):
            await until(lambda: any(worker.busy for worker in workers), "it runs somewhere")
            victim = next(worker for worker in workers if worker.busy)
            workers.remove(victim)
            victim.stop()
        response, body = await asked
        assert response.status == 500 and body["error"]["code"] == "request_quarantined"


async def test_broken_connections_cost_no_attempt_while_their_workers_live(model: Path) -> None:
    """But for a request that breaks more than anybody else would meet."""
    async with open_house(model) as house:
        for n in range(2):
            await house.add("colocated", delay_s=30, name=f"c{n}")
        asked = asyncio.create_task(house.post(CHAT, HELLO))
        await until(lambda: house.dispatcher.tickets, "it has come")
        [ticket] = house.dispatcher.tickets.values()

        def runs_on() -> list[Worker]:
            known = house.dispatcher.registry
            return [each for each in known if each.id in ticket.life.workers and each.answered >= ticket.asked]

        for broken in range(MAX_BREAKS + MAX_RETRIES + 1):
            await until(runs_on, "it runs somewhere")
            assert ticket.life.retries == max(0, broken - MAX_BREAKS)
            house.dispatcher.gateway._lose(runs_on()[0])
            lost = functools.partial(lambda at: ticket.life.attempt > at or ticket.life.over, broken)
            await until(lost, "it has lost its worker")
        response, body = await asked
        assert response.status == 500 and body["error"]["code"] == "worker_lost"


async def test_a_new_request_waits_for_a_worker_that_may_have_lost_only_its_connection(model: Path) -> None:
    async with open_house(model, "prefill") as house:
        decode = await house.add("decode")
        [worker] = [each for each in house.dispatcher.registry if each.role == "decode"]
        house.dispatcher.gateway._lose(worker)
        assert (await house.post(CHAT, HELLO))[0].status == 200
        decode.stop()
        await until(lambda: not house.dispatcher.registry.ready("decode"), "it is missed")
        asked = [asyncio.create_task(house.post(CHAT, HELLO)) for _ in range(2)]
        await until(lambda: len(house.dispatcher.tickets) == 2, "they wait")
        async with asyncio.timeout(dispatch.WORKERLESS_WAIT_S / 2):  # no longer than that is not known
            for response, body in await asyncio.gather(*asked):
                assert response.status == 503 and body["error"]["code"] == "no_decode_workers"
        response, _ = await house.post(CHAT, HELLO)
        assert response.status == 503


async def test_nobody_waits_for_a_worker_that_has_lost_its_connection_and_hangs(model: Path) -> None:
    """As long as its heart tells of a turn that may end it is waited for; then it is left to the launcher."""
    async with open_house(model, "prefill", failure_timeout=0.5) as house:
        decode = await house.add("decode", rejoins=False)
        gateway, replaced = house.dispatcher.gateway, []
        gateway.supervise(lambda name, pid, why: replaced.append((name, why)), {})
        [worker] = house.dispatcher.registry.ready("decode")
        gateway._lose(worker)
        asked = asyncio.create_task(house.post(CHAT, HELLO))
        await until(lambda: house.dispatcher.tickets, "it waits")
        decode.turn_ms = 10_000
        async with asyncio.timeout(5):
            response, body = await asked
        assert response.status == 503 and body["error"]["code"] == "no_decode_workers"
        assert (await house.post(CHAT, HELLO))[0].status == 503
        await until(lambda: replaced, "it is replaced")
        [(name, why)] = replaced
        assert name == decode.name and why.startswith("no Hello since its connection broke for 2")


async def test_a_request_that_waits_for_a_missing_worker_gets_what_that_one_holds(model: Path) -> None:
    """Who asks for no length gets what fits, as of a worker that is there."""
    async with open_house(model, "prefill") as house:
        await house.add("decode", changes={"kv_blocks": 16, "max_model_len": 200})
        usages = []
        for lost in (False, True):
            for worker in list(house.dispatcher.registry) if lost else ():
                house.dispatcher.gateway._lose(worker)
            response, body = await house.post(CHAT, {**HELLO, "n": 2})
            assert response.status == 200, body
            usages.append(body["usage"])
        assert usages[0] == usages[1]


async def test_who_waited_for_a_missing_worker_that_came_back_waits_for_the_next_as_others_do(model: Path) -> None:
    async with open_house(model) as house:
        worker = await house.add("colocated", delay_s=30, changes={"max_num_seqs": 1})
        [known] = house.dispatcher.registry
        house.dispatcher.gateway._lose(known)
        asked = [asyncio.create_task(house.post(CHAT, HELLO)) for _ in range(2)]
        await until(lambda: worker.busy == 1 and len(house.dispatcher.tickets) == 2, "one runs, the other waits")
        worker.stop()
        await until(lambda: not len(house.dispatcher.registry), "it is missed")
        await until(lambda: not house.dispatcher.gateway.may_return("decode"), "it has died")
        looked_at = house.dispatcher._clock() + 2 * house.dispatcher.times.sweep_s
        await until(lambda: house.dispatcher._clock() > looked_at, "who may not wait is told so")
        await house.add("colocated")
        assert [(await each)[0].status for each in asked] == [200, 200]


async def test_suspects_do_not_wait_for_ever_where_no_worker_is_left(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "WORKERLESS_WAIT_S", 0.2)
    async with open_house(model) as house:
        first = await house.add("colocated", delay_s=30)
        asked = [asyncio.create_task(house.post(CHAT, HELLO)) for _ in range(2)]
        await until(lambda: first.busy == 2, "both run")
        second = await house.add("colocated", delay_s=30)
        first.stop()
        await until(lambda: second.busy == 2, "both run elsewhere")
        second.stop()
        async with asyncio.timeout(10):
            for response, body in await asyncio.gather(*asked):
                assert response.status == 503 and body["error"]["code"] == "no_decode_workers"


async def test_nobody_dies_of_a_request_that_got_it_when_dead(model: Path) -> None:
    """Several workers are killed at once, and the connections of some are closed when the request has moved there."""
    async with open_house(model) as house:
        dying = [await house.add("colocated", delay_s=30, name=f"c{n}") for n in range(4)]
        asked = asyncio.create_task(house.post(CHAT, {**HELLO, "max_tokens": 4}))
        await until(lambda: any(worker.busy for worker in dying), "it runs somewhere")
        for worker in dying:
            worker.fall_silent()
        [ticket] = house.dispatcher.tickets.values()
        while dying:
            await until(lambda: any(on_it(ticket, worker) for worker in dying), "the next one gets it")
            victim = next(worker for worker in dying if on_it(ticket, worker))
            victim.stop()
            dying.remove(victim)
        await house.add("colocated", name="new")
        response, _ = await asked
        assert response.status == 200
        assert len(ticket.life.crashes) == 1, "that of the one that died with it"


async def test_nobody_dies_of_a_request_that_got_it_when_dead_after_it_had_answered(model: Path) -> None:
    """While the request waited for room there."""
    one = {"changes": {"max_num_seqs": 1}, "step_s": 0.01}
    async with open_house(model) as house:
        workers = [await house.add("colocated", name=f"c{n}", **one) for n in range(2)]
        asked = [asyncio.create_task(house.post(CHAT, {**HELLO, "max_tokens": 150})) for _ in range(2)]
        await until(lambda: all(worker.busy for worker in workers), "both run")
        bereft, leaving = house.dispatcher.tickets.values()
        dies, dies_too = sorted(workers, key=lambda worker: not on_it(bereft, worker))
        dies.stop()
        shortages = house.dispatcher._shortages
        await until(lambda: house.dispatcher._shortages > shortages, "the other one has answered, and has no room")
        dies_too.answers = False  # what a process that was killed has not sent so far, it does not send
        asked[1].cancel()
        await until(lambda: leaving.id not in house.dispatcher.tickets, "a place is free")
        await until(lambda: on_it(bereft, dies_too), "it has that")
        dies_too.stop()
        await house.add("colocated", name="new")
        response, _ = await asked[0]
        assert response.status == 200


async def test_who_did_not_answer_is_asked_again(model: Path) -> None:
    """Else all that it dies of later would be taken for what it got when it was dead. An answer to an earlier
    coordinator, which has asked more often, is none."""
    async with open_house(model) as house:
        workers = [await house.add("colocated", delay_s=30, name=f"c{n}") for n in range(3)]
        asked = asyncio.create_task(house.post(CHAT, HELLO))
        await until(lambda: any(worker.busy for worker in workers), "it runs somewhere")
        victim = next(worker for worker in workers if worker.busy)
        others = [worker for worker in workers if worker is not victim]
        for worker in others:
            worker.answers = False
        victim.stop()
        await until(lambda: any(worker.busy for worker in others), "it is given to another, which has not answered")
        victim = next(worker for worker in others if worker.busy)
        known = house.dispatcher.registry.get(victim.hello.incarnation)
        assert known is not None
        victim.say(victim.beat(99))
        heard_at = known.heard_at
        await until(lambda: known.heard_at > heard_at + 2 * victim.beat_s, "it has beaten")
        assert known.answered == 0
        victim.answers = True
        await until(lambda: known.answered == 1, "it has answered")
        victim.stop()
        response, body = await asked
        assert response.status == 500 and body["error"]["code"] == "request_quarantined"


async def test_who_has_lost_its_worker_goes_before_who_came_later(model: Path) -> None:
    """Also while it is not known yet who else lives: a place that becomes free meanwhile is not for a later request."""
    one = {"changes": {"max_num_seqs": 1}, "step_s": 0.01}
    async with open_house(model) as house:
        workers = [await house.add("colocated", name=f"c{n}", **one) for n in range(2)]
        long = [asyncio.create_task(house.post(CHAT, {**HELLO, "max_tokens": 60})) for _ in range(2)]
        await until(lambda: all(worker.busy for worker in workers), "both run")
        later = asyncio.create_task(house.post(CHAT, {**HELLO, "max_tokens": 60}))
        await until(lambda: len(house.dispatcher.tickets) == 3, "one waits")
        bereft, leaving, waiting = house.dispatcher.tickets.values()
        dies, lives = sorted(workers, key=lambda worker: not on_it(bereft, worker))
        lives.answers = False
        dies.stop()
        await until(lambda: bereft.queued, "it has lost its worker")
        long[1].cancel()
        await until(lambda: leaving.id not in house.dispatcher.tickets, "a place is free")
        await until(lambda: on_it(bereft, lives), "it has that")
        assert waiting.queued
        assert [response.status for response, _ in await asyncio.gather(long[0], later)] == [200, 200]


async def test_it_does_so_too_when_another_worker_dies_meanwhile(model: Path) -> None:
    """Of a request that may be the reason, and waits until that is known."""
    one = {"changes": {"max_num_seqs": 1}, "step_s": 0.01}
    async with open_house(model) as house:
        workers = [await house.add("colocated", name=f"c{n}", **one) for n in range(3)]
        long = [asyncio.create_task(house.post(CHAT, {**HELLO, "max_tokens": 150})) for _ in range(3)]
        await until(lambda: all(worker.busy for worker in workers), "all run")
        bereft, leaving, suspect = house.dispatcher.tickets.values()
        later = asyncio.create_task(house.post(CHAT, {**HELLO, "max_tokens": 60}))
        await until(lambda: len(house.dispatcher.tickets) == 4, "one waits")
        waiting = list(house.dispatcher.tickets.values())[3]
        suspect.life.crashes.add(Incarnation("one that died before"))
        dies, lives, dies_too = (next(each for each in workers if on_it(t, each)) for t in (bereft, leaving, suspect))
        lives.answers = False
        dies.stop()
        await until(lambda: bereft.queued, "it has lost its worker")
        dies_too.stop()
        await until(lambda: suspect.queued, "the other one, too")
        long[1].cancel()
        await until(lambda: leaving.id not in house.dispatcher.tickets, "a place is free")
        await until(lambda: on_it(bereft, lives), "it has that")
        assert waiting.queued
        later.cancel()
        for answer in long:
            answer.cancel()


def on_it(ticket: Ticket, worker: FakeWorker) -> bool:
    return worker.hello.incarnation in ticket.life.workers


async def test_a_stream_that_is_held_and_never_served_moves(model: Path) -> None:
    """The decode worker lives, lists the request, and says nothing about it."""
    async with open_house(model, "prefill", failure_timeout=0.5) as house:
        stuck = await house.add("decode", step_s=30.0)
        await house.add("decode", step_s=0.001, name="other")
        answers = [await house.post(CHAT, {**HELLO, "max_tokens": 4}) for _ in range(2)]
        assert [response.status for response, _ in answers] == [200, 200]
        await until(lambda: not stuck.busy, "the stuck worker is told")


async def test_lost_token_messages_are_asked_for_again(model: Path) -> None:
    async with open_house(model, "prefill") as house:
        decode = await house.add("decode", step_s=0.02)
        asked = asyncio.create_task(house.stream(CHAT, {**HELLO, "max_tokens": 60, "return_token_ids": True}))
        await until(lambda: decode.busy, "it decodes")
        decode.drop.add(Tokens)
        await asyncio.sleep(0.1)
        decode.drop.clear()
        _, events = await asked
        sent = house.workers[0].got(Prefill)[0].request
        ids = [event["choices"][0]["token_ids"][0] for event in events[:-1]]
        assert ids == [formula(sent, 0, position) for position in range(60)]
        assert decode.got(Resend)


async def test_lost_last_tokens_are_asked_for_when_heartbeats_omit_the_request(model: Path) -> None:
    async with open_house(model, "prefill") as house:
        decode = await house.add("decode", drop={Tokens})
        asked = asyncio.create_task(house.post(CHAT, {**HELLO, "max_tokens": 5, "n": 2}))
        await until(lambda: decode.got(Reserve) and not decode.busy, "it has finished")
        decode.drop.clear()
        response, body = await asked
        assert response.status == 200 and body["usage"]["completion_tokens"] == 10
        assert len(decode.got(Reserve)) == 1, "nothing was computed again"
        assert {message.choice for message in decode.got(Resend)} == {0, 1}


async def test_the_lost_end_of_one_choice_is_asked_for_while_another_goes_on(model: Path) -> None:
    def script(request: Request, choice: int, position: int) -> int:
        worker.drop = {Tokens} if position == 20 else set()  # of that step: both choices' tokens, and the end of one
        return EOS if (choice, position) == (0, 20) else formula(request, choice, position)

    async with open_house(model) as house:
        worker = await house.add("colocated", script=script, step_s=0.02)
        body = {**HELLO, "n": 2, "max_tokens": 500, "stream": True, "return_token_ids": True}
        tokens: dict[int, list[int]] = {0: [], 1: []}
        async with house.client.post(house.url + CHAT, json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {") and (told := json.loads(line[6:])["choices"]):
                    tokens[told[0]["index"]] += told[0].get("token_ids") or []
                    if told[0]["finish_reason"]:
                        break
        assert told[0]["index"] == 0 and told[0]["finish_reason"] == "stop", "the other would go on for seconds"
        [request] = [message.request for message in worker.got(Generate)]
        assert tokens[0] == [*(formula(request, 0, position) for position in range(20)), EOS]
        assert tokens[1] == [formula(request, 1, position) for position in range(len(tokens[1]))]
        assert (0, 20) in {(message.choice, message.start) for message in worker.got(Resend)}


async def test_a_request_whose_end_is_not_told_again_is_given_again(model: Path) -> None:
    async with open_house(model, "prefill") as house:
        decode = await house.add("decode", drop={Tokens})
        asked = asyncio.create_task(house.post(CHAT, {**HELLO, "max_tokens": 5}))
        await until(lambda: len(decode.got(Reserve)) > 1, "it is given again")
        decode.drop.clear()
        response, body = await asked
        assert response.status == 200 and body["usage"]["completion_tokens"] == 5


async def test_decode_alone_is_enough_when_prefills_token_is_lost(model: Path) -> None:
    async with open_house(model, "decode") as house:
        await house.add("prefill", drop={Tokens, Timing})
        _, body = await house.post(CHAT, {**HELLO, "max_tokens": 4, "return_token_ids": True})
        assert len(body["choices"][0]["token_ids"]) == 4


async def test_a_pair_that_keeps_failing_is_left_alone_until_it_works_again(model: Path) -> None:
    async def path() -> str:
        response, _ = await house.post(CHAT, {**HELLO, "max_tokens": 2})
        return response.headers["x-tandem-path"]

    async with open_house(model) as house:
        await house.add("decode", delay_s=0.2)  # longer than it takes prefill to say so
        broken = Failed(RequestId(bytes(16)), 0, "transfer_failed", "connection reset", retriable=True)
        prefill = await house.add("prefill", refuse=broken)
        assert [await path() for _ in range(FAILURES + 1)] == ["local"] * (FAILURES + 1), "decode does it all"
        assert len(prefill.got(Prefill)) == FAILURES, "the last one did not even try"
        _, body = await house.get("/admin/workers")
        assert {worker["id"]: worker["avoids"] for worker in body["workers"]}["prefill-1"] == ["decode-0"]
        async with house.client.get(f"{house.url}/metrics") as response:
            assert "tandem_open_breakers 1.0" in await response.text()
        prefill.refuse = None
        async with asyncio.timeout(10):
            while await path() == "local":  # noqa: ASYNC110 - the cool-down is the coordinator's own
                await asyncio.sleep(0.05)
        _, body = await house.get("/admin/workers")
        assert not any(worker["avoids"] for worker in body["workers"]), "one success is enough"


async def test_leases_list_what_a_worker_may_hold(model: Path) -> None:
    def listed(worker: FakeWorker) -> set[int]:
        return {transfer.attempt for transfer in unpack_transfers(worker.got(Lease)[-1].live)}

    async with open_house(model) as house:
        first = await house.add("colocated", name="a", delay_s=60.0)
        asked = asyncio.create_task(house.post(CHAT, {**HELLO, "max_tokens": 2}))
        await until(lambda: first.got(Lease) and listed(first) == {0}, "it is told that it may hold it")
        second = await house.add("colocated", name="b", delay_s=60.0)
        first.say(Failed(first.got(Generate)[0].request.id, 0, "draining", "this worker is leaving", retriable=True))
        await until(lambda: second.got(Lease) and listed(second) == {1}, "the other may hold the next attempt")
        await until(lambda: listed(first) == set(), "the first may not")
        asked.cancel()
        await until(lambda: listed(second) == set(), "nobody wants it any more")


async def test_a_worker_that_refuses(model: Path) -> None:
    async with open_house(model) as house:
        failure = Failed(RequestId(bytes(16)), 0, "no_memory", "full", retriable=True)
        unwilling = await house.add("colocated", refuse=failure, name="a")
        asked = asyncio.create_task(house.post(CHAT, {**HELLO, "max_tokens": 2}))
        await until(lambda: unwilling.got(Generate), "it was asked")
        unwilling.refuse = None
        assert (await asked)[0].status == 200
        unwilling.refuse = Failed(RequestId(bytes(16)), 0, "too_long", "9 tokens, 5 fit", retriable=False)
        response, body = await house.post(CHAT, HELLO)
        assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("name", ["cached_tokens", "kv_bytes"])
async def test_a_time_that_is_no_number_keeps_no_answer_from_its_end(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    async with open_house(model) as house:
        worker = await house.add("colocated")
        monkeypatch.setattr(worker, "_timings", lambda: {name: value})
        asked = {**HELLO, "max_tokens": 3, "return_metrics": True}
        async with asyncio.timeout(3.0):
            response, _ = await house.post(CHAT, asked)
            assert response.status == 200
            await house.stream(CHAT, asked)


async def test_an_answer_whose_end_cannot_be_written_ends_all_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.http.reply.StreamReply._complete", lambda reply: 1 // 0)
    async with open_house(model) as house:
        await house.add("colocated")
        async with asyncio.timeout(3.0):
            _, events = await house.stream(CHAT, {**HELLO, "max_tokens": 3})
        assert events[-1]["error"]["code"] == "internal_error"


async def test_a_request_that_cannot_be_placed_is_gone_once_it_is_answered(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher = house.dispatcher
    with monkeypatch.context() as broken:
        broken.setattr(Router, "place", lambda router, need: 1 // 0)
        response, body = await house.post(CHAT, {**HELLO, "max_tokens": 3})
        assert response.status == 500 and body["error"]["code"] == "internal_error"
    assert not dispatcher.tickets and not dispatcher.admission.requests
    response, _ = await house.post(CHAT, {**HELLO, "max_tokens": 3})
    assert response.status == 200


async def test_workers_that_leave_cost_a_request_nothing(model: Path) -> None:
    """There are more of them than retries, and a request is the first to hear of it."""
    async with open_house(model) as house:
        draining = Failed(RequestId(bytes(16)), 0, "draining", "this worker is leaving", retriable=True)
        leaving = [await house.add("colocated", refuse=draining, name=f"a{index}") for index in range(MAX_RETRIES + 2)]
        await house.add("colocated", name="z")
        response, _ = await house.post(CHAT, {**HELLO, "max_tokens": 2})
        assert response.status == 200
        assert [len(worker.got(Generate)) for worker in leaving] == [1] * len(leaving), "each is asked once"
        await house.post(CHAT, {**HELLO, "max_tokens": 2})
        assert all(len(worker.got(Generate)) == 1 for worker in leaving), "and never again"


async def test_a_worker_of_another_model_is_turned_away(house: House, caplog: pytest.LogCaptureFixture) -> None:
    stranger = await house.add("decode", fingerprint="other")
    assert stranger.turned and "fingerprint" not in stranger.turned, "it has shown no key"
    assert "decode-2" in caplog.text and "fingerprint other" in caplog.text
    _, body = await house.get("/admin/workers")
    assert [worker["id"] for worker in body["workers"]] == ["prefill-0", "decode-1"]


async def test_an_unknown_worker_is_asked_to_say_hello_again(house: House) -> None:
    decode = house.workers[1]
    worker = house.services.registry.get(decode.hello.incarnation)
    assert worker is not None
    house.services.registry.gone(worker)
    await until(lambda: decode.got(Rejoin), "it is told")
    await until(lambda: house.services.registry.ready("decode"), "it is back")


async def test_more_than_any_worker_says_is_not_read(house: House) -> None:
    gateway = house.dispatcher.gateway
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        closed = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(gateway.address)
        socket.send(bytes(2 * MAX_REPORT_BYTES))
        await until(lambda: closed.poll(0), "its connection is closed")
        socket.disable_monitor()
        closed.close()
    assert not gateway.bad_messages and len(house.services.registry) == 2
    assert (await house.post(CHAT, {**HELLO, "max_tokens": 1}))[0].status == 200


async def test_rubbish_on_the_control_socket_is_counted_and_survived(
    house: House, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.cluster.gateway.COMPLAIN_EVERY_S", 0.5)
    gateway = house.dispatcher.gateway
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(gateway.address)
        packed = (b"\x80\x04\x95", b"\x91\xa5hello", b"\xdd\xff\xff\xff\xff")
        frames = ([b""], [b"x"], [b"a", b"b"], *([seal(data)] for data in packed))
        for parts in frames:
            socket.send_multipart(parts)
        await until(lambda: gateway.bad_messages == len(frames), "all are counted")
    await until(lambda: f"dropped {len(frames) - 1} bad messages" in caplog.text, "the rest is told of together")
    assert caplog.text.count("bad messages") == 2, "not a line for each"
    async with house.client.get(f"{house.url}/metrics") as response:
        assert 'tandem_cut_off_peers_total{source="coordinator"} 1.0' in await response.text()
    assert (await house.post(CHAT, {**HELLO, "max_tokens": 1}))[0].status == 200


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"", 400, "invalid_json", None),
        (b"{", 400, "invalid_json", None),
        (b'{"messages": NaN}', 400, "invalid_json", None),
        ({"messages": []}, 400, "invalid_value", "messages"),
        ({}, 400, "missing_required_parameter", "messages"),
        ({**HELLO, "temperature": True}, 400, "invalid_type", "temperature"),
        ({**HELLO, "model": "gpt-4"}, 404, "model_not_found", "model"),
        ({**HELLO, "max_tokens": POSITIONS}, 400, "context_length_exceeded", "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, 400, "context_length_exceeded", "messages"),
        ({**HELLO, "logit_bias": {str(VOCAB): 1}}, 400, "invalid_value", "logit_bias"),
        ({**HELLO, "stop_token_ids": [VOCAB]}, 400, "invalid_value", "stop_token_ids"),
    ],
)
async def test_errors_have_openais_shape(house: House, body: Any, status: int, code: str, param: str | None) -> None:
    response, answer = await house.post(CHAT, body)
    assert response.status == status
    error = valid("ErrorResponse", answer)["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert response.headers["x-request-id"] and "Traceback" not in error["message"]


async def test_more_errors(house: House) -> None:
    for path, body, status in [
        (TEXT, {"prompt": ""}, 400),
        (TEXT, {"prompt": [VOCAB]}, 400),
        (TEXT, {"prompt": [5] * POSITIONS}, 400),
        (TEXT, {"prompt": "x" * (9 << 20)}, 413),
        ("/v1/embeddings", {}, 404),
        ("/v1/models", {}, 405),
        ("/nowhere", {}, 404),
    ]:
        response, answer = await house.post(path, body)
        assert response.status == status, (path, answer)
        valid("ErrorResponse", answer)
    _, answer = await house.post(TEXT, {"prompt": "x" * (9 << 20)})
    assert all(told in answer["error"]["message"] for told in ("8,388,608 bytes", "--max-body-bytes"))
    response, answer = await house.post("/admin/scale", {})
    assert response.status == 400 and "give prefill, decode or both" in answer["error"]["message"]
    response, answer = await house.post(CHAT, b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert response.status == 415


async def test_a_wrong_method_is_told_the_right_ones(house: House) -> None:
    response, _ = await house.post("/v1/models", {})
    assert response.status == 405 and response.headers["Allow"] == "GET,HEAD"


async def test_what_is_hopelessly_long_is_refused_without_any_work(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = house.services.model
    monkeypatch.setattr(model.text, "_control", None)
    monkeypatch.setattr(model.text, "slices", None)
    monkeypatch.setattr(model.text, "template", None)
    most = model.context_length * model.text.chars_per_token
    long = "x" * (most + 1)
    messages = [{"role": "user", "content": long}]
    for path, asked in (
        (TEXT, {"prompt": long}),
        (TEXT, {"prompt": ["a", long]}),
        (CHAT, {"messages": messages}),
        ("/tokenize", {"prompt": long}),
        ("/tokenize", {"messages": messages}),
    ):
        response, body = await house.post(path, asked)
        assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert f"{model.context_length} tokens, at most {most} characters" in body["error"]["message"]


async def test_what_a_template_makes_too_long_is_refused(model: Path) -> None:
    repeated = "{% for message in messages %}{{ message.content * 3 }}{% endfor %}"
    async with open_house(model, "prefill", "decode", chat_template=repeated) as house:
        most = house.services.model.context_length * house.services.model.text.chars_per_token
        asked = {"messages": [{"role": "user", "content": "x" * (most // 2)}]}
        response, body = await house.post("/tokenize", asked)
        assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert f"at most {most} characters" in body["error"]["message"]


async def test_values_that_a_template_indents_are_refused_beside_the_event_loop(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def parse(body: bytes, budget: JsonBudget) -> Any:
        threads.append(threading.current_thread())
        return parse_json(body, budget)

    monkeypatch.setattr("coordinator.http.context.parse_json", parse)
    value: Any = [1] * 2000
    for _ in range(55):
        value = [value]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": value}}}
    async with open_house(model, "prefill", "decode", chat_template="{{ tools | tojson(indent=4) }}") as house:
        for path in (CHAT, "/tokenize"):
            response, body = await house.post(path, {**HELLO, "tools": [tool]})
            assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"
            assert body["error"]["param"] == "messages" and "the chat template makes more" in body["error"]["message"]
    assert threading.main_thread() not in threads


async def test_more_tokens_than_the_context_are_refused_on_the_way(house: House) -> None:
    limit = house.services.model.context_length
    response, body = await house.post("/tokenize", {"prompt": "é" * limit * 4})
    assert response.status == 200 and body["count"] > 2 * limit, "counting may go on"
    for path, asked in ((TEXT, {"prompt": "é" * limit * 10}), (CHAT, chat_of("é" * limit * 10))):
        response, body = await house.post(path, asked)
        assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert f"has more than {limit}" in body["error"]["message"]


def chat_of(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


async def test_ids_are_counted_before_they_are_read(house: House) -> None:
    for path, name in ((TEXT, "prompt"), ("/detokenize", "tokens")):
        response, body = await house.post(path, {name: [True] * ((1 << 20) + 1)})
        assert response.status == 400 and str((1 << 20) + 1) in body["error"]["message"]
    response, body = await house.post("/detokenize", {"tokens": [5] * (POSITIONS + 1)})
    assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"


async def test_long_bodies_are_parsed_beside_the_event_loop(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def parse(body: bytes, budget: JsonBudget) -> Any:
        threads.append(threading.current_thread())
        return parse_json(body, budget)

    monkeypatch.setattr("coordinator.http.context.parse_json", parse)
    for length in (10, INLINE_BYTES):
        assert (await house.post("/tokenize", {"prompt": "x" * length}))[0].status == 200
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
    for count in (2, INLINE_OBJECTS):
        assert (await house.post("/tokenize", {"messages": HELLO["messages"] * count}))[0].status == 200
    assert [thread is threading.main_thread() for thread in threads[2:]] == [True, False]


class Held:
    """Texts whose tokens are held back until ``go_on``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, house: House) -> None:
        self.begun: list[str] = []
        self.go_on = threading.Event()
        self._slices = house.services.model.text.slices
        monkeypatch.setattr(house.services.model.text, "slices", self)

    def __call__(self, text: str, **_: Any) -> Iterator[list[int]]:
        for part in self._slices(text):
            self.begun.append(text)
            self.go_on.wait()
            yield part


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, house: House) -> Iterator[Held]:
    made = Held(monkeypatch, house)
    yield made
    made.go_on.set()


SHORT_TEXT, LONG_TEXT = "x" * 4_000, "x" * 20_000
PROSE = "the quick brown fox " * 150


@pytest.mark.parametrize("text", [SHORT_TEXT, LONG_TEXT])
async def test_texts_that_wait_for_tokens_are_bounded(house: House, held: Held, text: str) -> None:
    lanes = house.services.model._lanes
    lanes.of(len(text))._bounds = Bounds(texts=1, chars=1 << 30, by_size=True)
    asked = {"prompt": text}
    first = asyncio.create_task(house.post("/tokenize", asked))
    await until(lambda: held.begun, "the first is tokenized")
    async with asyncio.timeout(10):
        response, body = await house.post("/tokenize", asked)
    assert response.status == 429 and body["error"]["code"] == "server_is_overloaded"
    assert response.headers["Retry-After"]
    held.go_on.set()
    assert (await first)[0].status == (await house.post("/tokenize", asked))[0].status == 200


async def test_texts_that_wait_do_not_use_up_the_places_of_smaller_ones(house: House, held: Held) -> None:
    lane = house.services.model._lanes.of(len(SHORT_TEXT))
    lane._bounds = Bounds(texts=1, chars=1 << 30, by_size=True)
    long = asyncio.create_task(house.post("/tokenize", {"prompt": SHORT_TEXT * 4}))
    await until(lambda: held.begun, "the long one is tokenized")
    short = asyncio.create_task(house.post("/tokenize", {"prompt": SHORT_TEXT}))
    await until(lambda: lane.texts == 2, "the short one waits")
    held.go_on.set()
    assert [(await each)[0].status for each in (long, short)] == [200, 200]


async def test_a_lane_keeps_nothing_of_a_text_that_was_refused(house: House) -> None:
    class Text:
        """What a step works on."""

    def refuse_it(text: Text) -> None:
        raise RequestError(str(text))

    text = Text()
    left = weakref.ref(text)
    gc.disable()
    try:
        with pytest.raises(RequestError):
            await house.services.model.in_lane(10, functools.partial(refuse_it, text))
        del text
        await until(lambda: left() is None, "it is freed without a collection")
    finally:
        gc.enable()


async def test_a_lane_takes_the_smallest_and_the_oldest_in_turn(house: House, held: Held) -> None:
    lane = house.services.model._lanes.of(len(SHORT_TEXT))
    sizes = [4_000, 4_009, 4_008, 4_002, 4_001, 4_007]
    waiting = []
    for number, size in enumerate(sizes):
        waiting.append(asyncio.create_task(house.post("/tokenize", {"prompt": "x" * size})))
        await until(lambda number=number: lane.texts == number + 1 and bool(held.begun), f"{number + 1} are there")
    held.go_on.set()
    await asyncio.gather(*waiting)
    order = list(dict.fromkeys(map(len, held.begun)))
    assert order[0] == 4_000 and order[1:] in (
        [4_001, 4_009, 4_002, 4_008, 4_007],
        [4_009, 4_001, 4_008, 4_002, 4_007],
    )


async def test_a_short_text_does_not_wait_for_a_long_one(house: House, held: Held) -> None:
    long = asyncio.create_task(house.post("/tokenize", {"prompt": LONG_TEXT}))
    await until(lambda: held.begun, "the long one is tokenized")
    async with asyncio.timeout(10):
        response, _ = await house.post(CHAT, {**chat_of(PROSE), "max_tokens": 1})
    assert response.status == 200 and not long.done()
    held.go_on.set()
    assert (await long)[0].status == 200


async def test_work_on_a_text_ends_when_its_client_has_left(house: House, held: Held) -> None:
    running = asyncio.create_task(house.post("/tokenize", {"prompt": LONG_TEXT}))
    await until(lambda: held.begun, "the first is tokenized")
    waiting = asyncio.create_task(house.post("/tokenize", {"prompt": LONG_TEXT + "y"}))
    lane = house.services.model._lanes.of(len(LONG_TEXT))
    await until(lambda: lane.texts == 2, "the second waits")
    for task in (running, waiting):
        task.cancel()
    await until(lambda: not lane.texts and not lane.chars, "neither counts")
    held.go_on.set()
    assert (await house.post("/tokenize", {"prompt": LONG_TEXT + "z"}))[0].status == 200, "the lane is free"
    assert held.begun.count(LONG_TEXT) == 1 and LONG_TEXT + "y" not in held.begun


async def test_bodies_in_memory_are_bounded_and_large_ones_apart(house: House) -> None:
    bodies = house.services.bodies
    large, ordinary = ({"prompt": "x " * (size // 2)} for size in (LARGE_BYTES * 2, LARGE_BYTES // 16))
    with bodies.share() as share:
        share.grow(bodies.budgets[Kind.LARGE])
        response, body = await house.post("/tokenize", large)
        assert response.status == 429 and body["error"]["code"] == "server_is_overloaded"
        assert (await house.post("/tokenize", ordinary))[0].status == 200
        share.grow(LARGE_BYTES)
        bodies.budgets[Kind.ORDINARY] = LARGE_BYTES
        assert (await house.post("/tokenize", ordinary))[0].status == 429
    assert (await house.post("/tokenize", large))[0].status == 400, "read, and too long for the context"
    assert (await house.post("/tokenize", ordinary))[0].status == 200
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


async def test_a_small_body_counts_while_it_is_unfinished(house: House) -> None:
    bodies = house.services.bodies
    reader, writer = await asyncio.open_connection("127.0.0.1", int(house.url.rsplit(":", 1)[1]))
    body = b'{"prompt": "x"}'
    writer.write(f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode())
    writer.write(body[:-2])
    await until(lambda: bodies.held[Kind.SMALL] == len(body) - 2, "it counts")
    bodies.budgets[Kind.SMALL] = 0
    assert (await house.post("/tokenize", {"prompt": "x"}))[0].status == 200, "it came in one piece"
    writer.write(body[-2:-1])
    assert b" 429 " in await reader.readline()
    writer.close()
    await until(lambda: not any(bodies.held.values()), "nothing is left")


@pytest.fixture
def roomy(house: House, monkeypatch: pytest.MonkeyPatch) -> House:
    """Of a model whose context has room for any body."""
    monkeypatch.setattr(type(house.services.model), "context_length", 1 << 22)
    return house


def called_with(*arguments: object) -> dict[str, Any]:
    """A message of the assistant that calls a tool once with each of ``arguments``."""
    functions = [{"name": "f", "arguments": json.dumps(each)} for each in arguments]
    calls = [{"id": "a", "type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": calls}


async def test_values_of_tool_call_arguments_are_counted_too(roomy: House) -> None:
    asked = {"messages": [called_with({"x": [[]] * (MAX_CONTAINERS + 1)})]}
    for path in (CHAT, "/tokenize"):
        response, body = await roomy.post(path, asked)
        assert response.status == 400 and "at most 131072 are allowed" in body["error"]["message"]
        assert body["error"]["param"] == "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize("value", [[], ""], ids=["arrays", "strings"])
async def test_values_of_a_body_and_of_arguments_are_counted_together(roomy: House, value: object) -> None:
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
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = house.services.model.context_length * house.services.model.text.chars_per_token
    arguments = {"x": "y" * (most // 3)}
    messages = [called_with(arguments, arguments)] * 2
    monkeypatch.setattr("coordinator.api.chat_messages.parse_arguments", None)
    for path in (CHAT, "/tokenize"):
        response, body = await house.post(path, {"messages": messages})
        assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert str(4 * len(json.dumps(arguments))) in body["error"]["message"] and body["error"]["param"] == "messages"


@pytest.mark.parametrize(
    "arguments",
    [r'{"x":"\ud800"}', '{"x":' + "[" * 64 + "]" * 64 + "}", '{"x":' + "[" * 900 + "]" * 900 + "}", '{"x":NaN}', "[]"],
)
async def test_tool_call_arguments_are_read_as_strictly_as_a_body(house: House, arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    asked = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
    for path in (CHAT, "/tokenize"):
        response, body = await house.post(path, asked)
        assert response.status == 400, body
        assert body["error"]["param"] == "messages[0].tool_calls[0].function.arguments"


async def test_more_blocks_than_any_worker_has(model: Path) -> None:
    async with open_house(model, "prefill") as house:
        await house.add("decode", changes={"kv_blocks": 20})
        response, body = await house.post(CHAT, {**HELLO, "n": 8, "max_tokens": 100})
        assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert "20" in body["error"]["message"]


@pytest.mark.parametrize("n", [1, 4])
async def test_who_sets_no_limit_gets_what_the_pool_holds(model: Path, n: int) -> None:
    async with open_house(model) as house:
        await house.add("prefill", script=letters("hi"))
        await house.add("decode", script=letters("hi"), changes={"kv_blocks": 40})
        response, _ = await house.post(CHAT, {**HELLO, "n": n})
        assert response.status == 200
        (request,) = await prefilled(house, 1)
        assert 0 <= 40 * 16 - request.prompt_length - n * request.sampling.max_tokens < n * 16


async def asked_until_one_token(house: House, body: Any) -> asyncio.Task[Any]:
    """A stream that has begun."""
    stream = asyncio.create_task(house.stream(TEXT, {**body, "stream_options": {"include_usage": True}}))
    tickets = house.dispatcher.tickets
    await until(lambda: any(each.output_length > 1 for each in tickets.values()), "it has begun")
    return stream


async def test_a_stream_without_a_limit_goes_on_where_less_fits(model: Path) -> None:
    """The only decode worker comes back with one block less, as pools do that are a share of the free memory."""
    async with open_house(model, "prefill", failure_timeout=0.5) as house:
        first = await house.add("decode", step_s=0.01, changes={"kv_blocks": 20})
        body = {"messages": HELLO["messages"], "ignore_eos": True, "stream_options": {"include_usage": True}}
        stream = asyncio.create_task(house.stream(CHAT, body))
        await until(lambda: any(each.output_length > 1 for each in house.dispatcher.tickets.values()), "it has begun")
        first.stop()
        await house.add("decode", changes={"kv_blocks": 19})
        _, events = await stream
        usage = events[-1]["usage"]
        assert usage["total_tokens"] == 19 * 16
        assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_a_stream_with_a_limit_waits_for_a_worker_that_holds_all_of_it(model: Path) -> None:
    async with open_house(model, "prefill", failure_timeout=0.5) as house:
        first = await house.add("decode", step_s=0.01)
        body = {"prompt": [50] * 16, "max_tokens": 300, "ignore_eos": True}
        stream = await asked_until_one_token(house, body)
        short = await house.add("decode", changes={"max_model_len": 200})
        first.stop()
        await until(lambda: any(each.stranded_at for each in house.dispatcher.tickets.values()), "nobody holds it")
        await house.add("decode")
        _, events = await stream
        assert events[-1]["usage"]["completion_tokens"] == 300 and not short.got(Reserve) and not short.got(Generate)


async def test_a_stream_that_fits_nobody_any_more_ends_in_words(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "WORKERLESS_WAIT_S", 0.3)
    async with open_house(model, "prefill", failure_timeout=0.5) as house:
        first = await house.add("decode", step_s=0.01)
        stream = await asked_until_one_token(house, {"prompt": [50] * 16, "max_tokens": 300, "ignore_eos": True})
        await house.add("decode", changes={"kv_blocks": 10})
        first.stop()
        _, events = await stream
        assert events[-1]["error"]["code"] == "worker_lost" and "316 tokens" in events[-1]["error"]["message"]


async def test_who_settles_for_less_gets_what_there_is(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an answer without a limit much less than half fits: it waits for a larger worker, and then takes that."""
    monkeypatch.setattr(dispatch, "WORKERLESS_WAIT_S", 0.3)
    async with open_house(model, "prefill", failure_timeout=0.5) as house:
        first = await house.add("decode", step_s=0.01, changes={"kv_blocks": 40})
        stream = asyncio.create_task(house.stream(CHAT, {"messages": HELLO["messages"], "ignore_eos": True}))
        tickets = house.dispatcher.tickets
        await until(lambda: any(each.output_length > 1 for each in tickets.values()), "it has begun")
        (ticket,) = tickets.values()
        blocks = -(-ticket.prompt_length // 16) + 3
        await house.add("decode", changes={"kv_blocks": blocks})
        first.stop()
        await until(lambda: ticket.stranded_at, "nobody holds enough of it")
        _, events = await stream
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert ticket.prompt_length + ticket.output_length == 16 * blocks


async def test_suspects_that_fit_nobody_any_more_end_in_words_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that have met two deaths each, so that they are tried apart from each other."""
    monkeypatch.setattr(dispatch, "WORKERLESS_WAIT_S", 0.3)
    async with open_house(model, "prefill", failure_timeout=0.5) as house:
        first = await house.add("decode", step_s=0.02)
        asked = {"prompt": [50] * 16, "max_tokens": 300, "ignore_eos": True}
        streams = [asyncio.create_task(house.stream(TEXT, asked)) for _ in range(2)]
        tickets = house.dispatcher.tickets
        await until(lambda: [each.output_length > 1 for each in tickets.values()] == [True] * 2, "both have begun")
        for ticket in tickets.values():
            ticket.life.crashes.add(new_incarnation())
        await house.add("decode", changes={"kv_blocks": 10})
        first.stop()
        for stream in streams:
            _, events = await stream
            assert events[-1]["error"]["code"] == "worker_lost"


async def test_a_worker_that_is_only_busy_is_waited_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who could be served there does not settle for less meanwhile, and when that one is lost, too, waits anew."""
    monkeypatch.setattr(dispatch, "WORKERLESS_WAIT_S", 0.3)
    async with open_house(model, "prefill", failure_timeout=0.5) as house:
        first = await house.add("decode", step_s=0.01, changes={"kv_blocks": 40})
        stream = asyncio.create_task(house.stream(CHAT, {"messages": HELLO["messages"], "ignore_eos": True}))
        tickets, router = house.dispatcher.tickets, house.dispatcher.router
        await until(lambda: any(each.output_length > 1 for each in tickets.values()), "it has begun")
        (ticket,) = tickets.values()
        await house.add("decode", changes={"kv_blocks": -(-ticket.prompt_length // 16) + 3})
        first.stop()
        await until(lambda: ticket.stranded_at, "nobody holds enough of it")
        fits = Router._fits

        def full(self: Router, need: Any, worker: Worker) -> bool:
            return worker.hello.kv_blocks < 30 and fits(self, need, worker)

        monkeypatch.setattr(Router, "_fits", full)
        busy = await house.add("decode", changes={"kv_blocks": 30})
        assert router.could_serve(ticket.need())
        await until(lambda: ticket.stranded_at is None, "it waits for that one")
        await asyncio.sleep(house.dispatcher.times.lease_s + 0.6)  # longer than who fits nobody waits
        assert ticket.queued and not ticket.settles
        busy.stop()
        await until(lambda: ticket.stranded_at, "nobody holds enough of it again")
        monkeypatch.setattr(Router, "_fits", fits)
        await house.add("decode", changes={"kv_blocks": 30})
        _, events = await stream
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert ticket.prompt_length + ticket.output_length == 16 * 30


@pytest.mark.parametrize("policy", ["wait", "reject"])
async def test_a_prompt_that_only_decode_could_compute_is_refused_where_it_may_not(model: Path, policy: str) -> None:
    async with open_house(model, no_prefill_policy=policy) as house:
        await house.add("prefill", changes={"kv_blocks": 4})
        await house.add("decode")
        response, body = await house.post(TEXT, {"prompt": [50] * 65, "max_tokens": 3})
        assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert body["error"]["param"] == "prompt" and "64" in body["error"]["message"]
        assert (await house.post(TEXT, {"prompt": [50] * 64, "max_tokens": 3}))[0].status == 200


def test_what_a_ticket_needs_is_what_its_choices_need_that_have_not_ended() -> None:
    def ticket(**changes: Any) -> Ticket:
        sampling = SamplingParams(2000, 1, min_tokens=changes.pop("min_tokens", 0))
        client: Any = None
        return Ticket(RequestId(bytes(16)), pack_tokens([1] * 16), sampling, 2, "", 0, {}, client, 0, 0, 1, **changes)

    limited, free = ticket(), ticket(open_ended=True)
    assert (limited.need().least, free.need().least) == (2000, HORIZON_TOKENS)
    for each in (limited, free):
        each.life.output = [[1] * 1000, [1] * 20]
        assert each.need().tokens == 1016 and each.need().choices == 2
        each.life.finish[0] = FinishReason.LENGTH
        assert each.need().tokens == 36 and each.need().choices == 1
    assert (limited.need().least, free.need().least) == (1980, HORIZON_TOKENS)
    assert ticket(open_ended=True, min_tokens=900).need().least == 900, "what the client wants at least"
    free.settles = True
    assert free.need().least == 1


async def test_what_fits_nobody_any_more_does_not_block_the_queue(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.requests.dispatcher.WORKERLESS_WAIT_S", 0.3)
    async with open_house(model, "prefill") as house:
        large = await house.add("decode", step_s=0.02, changes={"kv_blocks": 20})
        await house.add("decode", changes={"kv_blocks": 3})
        asked = {"prompt": [50] * 16, "max_tokens": 240, "ignore_eos": True}
        running = [asyncio.create_task(house.post(TEXT, asked)) for _ in range(2)]
        await until(lambda: house.dispatcher.admission.requests == 1, "one waits")
        behind = asyncio.create_task(house.post(TEXT, {**asked, "max_tokens": 4}))
        await until(lambda: house.dispatcher.admission.requests == 2, "two wait")
        large.stop()
        assert (await behind)[0].status == 200
        (refused,), (started,) = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        response, body = refused.result()
        assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"
        await house.add("decode", changes={"kv_blocks": 20})  # the worker comes back, and what had started goes on
        response, body = await started
        assert response.status == 200 and body["usage"]["completion_tokens"] == 240


async def test_what_nobody_has_seen_yet_ends_in_words_and_a_stream_waits(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.requests.dispatcher.WORKERLESS_WAIT_S", 0.3)
    async with open_house(model, "prefill", failure_timeout=0.5) as house:
        only = await house.add("decode", step_s=0.02)
        asked = {"prompt": [50] * 16, "max_tokens": 100, "ignore_eos": True}
        whole = asyncio.create_task(house.post(TEXT, asked))
        stream = asyncio.create_task(house.stream(TEXT, {**asked, "stream_options": {"include_usage": True}}))
        tickets = house.dispatcher.tickets
        await until(lambda: [each.life.started for each in tickets.values()] == [True] * 2, "both have begun")
        only.stop()
        response, body = await whole
        assert response.status == 503 and body["error"]["code"] == "no_decode_workers"
        assert len(tickets) == 1, "the stream waits"
        await house.add("decode")
        _, events = await stream
        assert events[-1]["usage"]["completion_tokens"] == 100
        assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_request_ids_are_echoed_if_sane(house: House) -> None:
    for given, same in (("my-id.1", True), ("x" * 200, False), ("a b", False)):
        response, _ = await house.get("/health", headers={"X-Request-Id": given})
        assert (response.headers["x-request-id"] == given) is same


async def test_ignored_fields_are_named(house: House) -> None:
    response, _ = await house.post(CHAT, {**HELLO, "max_tokens": 1, "store": True, "foo": 1})
    assert response.headers["x-tandem-ignored"] == "store, foo"


async def test_other_web_sites_can_neither_post_nor_read_here(house: House) -> None:
    foreign = [("Host", "evil.example"), ("Origin", "https://evil.example"), ("Origin", "null")]
    for name, value in [*foreign, ("Host", "["), ("Origin", "http://["), ("Origin", "")]:
        response, body = await house.post(CHAT, HELLO, headers={name: value})
        assert response.status == 403 and body["error"]["code"] == "forbidden_origin"
        response, _ = await house.get("/admin/workers", headers={name: value})
        assert response.status == 403, "nor read"
    response, _ = await house.post(CHAT, {**HELLO, "max_tokens": 1}, headers={"Origin": "http://localhost:3000"})
    assert response.status == 200


async def test_with_a_key_everything_is_closed(model: Path) -> None:
    key, root = new_key(), new_key()
    async with open_house(model, "colocated", api_key=key, admin_api_key=root) as house:
        good, admin = {"Authorization": f"Bearer {key}"}, {"Authorization": f"Bearer {root}"}
        bad = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {key}"}, {"Authorization": "Bearer é"}]
        for path in ("/", "/v1/models", "/version", "/nowhere", "/admin/workers"):
            for headers in bad:
                response, body = await house.get(path, headers=headers)
                assert response.status == 401 and body["error"]["code"] == "invalid_api_key"
                assert response.headers["WWW-Authenticate"] == "Bearer"
        assert (await house.get("/v1/models", headers=good))[0].status == 200
        assert (await house.get("/admin/workers", headers=good))[0].status == 403
        assert (await house.get("/admin/workers", headers=admin))[0].status == 200
        assert (await house.get("/health"))[0].status == 200
        assert (await house.get("/ready"))[0].status == 200


def _narrow(port: int) -> socket.socket:
    """A connection on which little is under way."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    return connection


async def _ask_and_read_no_more(
    house: House, asked: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that reads nothing so far, with buffers so small that the server notices soon."""
    body = json.dumps(asked)
    connection = _narrow(int(house.url.rsplit(":", 1)[1]))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    writer.write(f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    return reader, writer


async def _cut_off(house: House) -> dict[str, float]:
    async with house.client.get(f"{house.url}/metrics") as response:
        lines = re.findall(r'^tandem_clients_cut_off_total\{while="(\w+)"\} (\S+)', await response.text(), re.MULTILINE)
    return {doing: float(count) for doing, count in lines}


async def test_a_reader_that_stopped_reading_is_cut_and_others_feel_nothing(model: Path) -> None:
    asked = {"prompt": "x", "stream": True, "n": 16, "logprobs": 20, "max_tokens": 2000, "ignore_eos": True}
    async with open_house(model, client_timeout=0.5) as house:
        worker = await house.add("colocated", changes={"kv_blocks": 4096})
        _, writer = await _ask_and_read_no_more(house, asked)
        other = asyncio.create_task(house.stream(TEXT, {"prompt": "y", "max_tokens": 200, "ignore_eos": True}))
        await until(lambda: worker.got(Abort), "it is cut and its work stopped", 20)
        assert len([event for event in (await other)[1] if event["choices"][0]["text"]]) > 100
        assert await _cut_off(house) == {"reading": 1}
        writer.close()


async def test_a_reader_of_a_whole_answer_that_takes_nothing_of_it_is_cut() -> None:
    """The answer is larger than what the kernel takes without a reader."""
    cut, over = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await deliver(request, web.Response(body=bytes(64 << 20)), 0.3, lambda _: cut.set())
        finally:
            over.set()

    app = web.Application()
    app.router.add_get("/", answer)
    runner = make_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        _, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1], limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(20):
            await cut.wait()
            await over.wait()
        writer.close()
    finally:
        await runner.cleanup()


async def test_clients_that_are_cut_off_are_counted_in_the_log(house: House, caplog: pytest.LogCaptureFixture) -> None:
    _, cut = read_timeout(house.services)
    for _ in range(1000):
        cut("is too far behind")
    house.services.cuts.close()
    assert caplog.messages == [
        "a client is cut off: it is too far behind",
        "999 more clients were cut off: 999 (is too far behind)",
    ]


async def test_counted_lines_come_while_it_goes_on_and_then_stop(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.http.repeats.LOG_EVERY_S", 0.05)
    many = RateLimitedLog(logging.WARNING, "%d more: %s")
    for number in range(5):
        many.add("even" if number % 2 == 0 else "odd", f"it is {number}")
    await until(lambda: len(caplog.messages) == 2, "they are counted")
    await until(lambda: many._pause is None, "it is over")
    many.add("odd", "it is odd again")
    many.close()
    assert caplog.messages == ["it is 0", "4 more: 2 odd, 2 even", "it is odd again"]


class _Stalls:
    """A transport, and a response that waits for it: the reader takes one byte after ``moves_s``, and then none."""

    def __init__(self, moves_s: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.left, self.gone = 1_000_000, asyncio.Event()
        self.moved_at = self.cut_at = self.loop.time()
        self.loop.call_later(moves_s, self._move)

    def _move(self) -> None:
        self.left -= 1
        self.moved_at = self.loop.time()

    def get_write_buffer_size(self) -> int:
        return self.left

    def set_write_buffer_limits(self, high: int | None) -> None: ...

    def is_closing(self) -> bool:
        return self.gone.is_set()

    def abort(self) -> None:
        self.cut_at = self.loop.time()
        self.gone.set()

    async def prepare(self, request: object) -> None: ...

    async def write_eof(self) -> None:
        await self.gone.wait()
        raise ConnectionResetError


@pytest.mark.parametrize("moves_s", [0.05, 0.45])
async def test_a_reader_of_a_whole_answer_is_cut_when_it_has_stalled_for_so_long_and_not_twice(moves_s: float) -> None:
    stalls, cuts = _Stalls(moves_s), list[str]()
    request: Any = SimpleNamespace(transport=stalls)
    response: Any = stalls
    with pytest.raises(ConnectionResetError):
        await deliver(request, response, 1.0, cuts.append)
    assert cuts == ["has taken nothing of its answer for 1 s"] and 1.0 <= stalls.cut_at - stalls.moved_at < 1.6


class _Takes:
    """A transport whose reader has taken nothing of what is written, and can take more at any time."""

    def __init__(self) -> None:
        self.left, self.gone = 0, False

    def write(self, data: bytes) -> None:
        self.left += len(data)

    def get_write_buffer_size(self) -> int:
        return self.left

    def is_closing(self) -> bool:
        return self.gone

    def abort(self) -> None:
        self.gone = True


async def test_a_reader_that_is_slower_than_its_stream_is_cut_before_much_waits_for_it() -> None:
    transport, cuts = _Takes(), list[str]()
    request: Any = SimpleNamespace(transport=transport, version=HttpVersion11)
    stream = EventStream(request, {}, 1000.0, cuts.append)
    sent = 0
    while not cuts and sent < 64 << 20:
        stream.send(bytes(16 << 10))
        sent += 16 << 10
    assert cuts == ["is too far behind"] and transport.gone
    assert 512 << 10 < sent <= 2 << 20


async def test_an_answer_is_delivered_when_the_kernel_has_its_last_byte() -> None:
    """Also a small one, which an event loop would keep for a reader that is in no hurry."""
    left: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        response = await deliver(request, web.Response(body=bytes(48 << 10)), 20, lambda _: None)
        left.append(request.transport.get_write_buffer_size())
        return response

    app = web.Application()
    app.router.add_get("/", answer)
    runner = make_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(sock=_narrow(runner.addresses[0][1]), limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2)
        async with asyncio.timeout(20):
            for _ in range(2):
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(48 << 10)
        assert left == [0, 0]
        writer.close()
    finally:
        await runner.cleanup()


async def test_a_body_that_does_not_come_is_answered_in_time(model: Path) -> None:
    async with open_house(model, "colocated", client_timeout=0.3) as house:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(house.url.rsplit(":", 1)[1]))
        writer.write(f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode())
        async with asyncio.timeout(10):
            assert b" 408 " in await reader.readline()
        assert await _cut_off(house) == {"sending": 1}
        writer.close()


async def test_headers_that_do_not_come_hold_no_connection(model: Path) -> None:
    async with open_house(model, "colocated", client_timeout=0.4) as house:
        port = int(house.url.rsplit(":", 1)[1])
        lines = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        (never, _), (slow, dripping), (kept, asking) = lines
        asking.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in await kept.readline()
        async with asyncio.timeout(10):
            dripping.write(b"GET /health HTTP/1.1\r\n")
            while not slow.at_eof() and not slow.exception():
                dripping.write(b"X: y\r\n")
                with contextlib.suppress(TimeoutError, ConnectionError):
                    await asyncio.wait_for(slow.read(1), 0.1)
            assert await never.read() == b""
        asking.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in (await kept.readuntil(b" 200 ")), "one that has asked may wait"
        assert await _cut_off(house) == {"sending": 2}
        for _, writer in lines:
            writer.close()


async def test_a_connection_that_was_used_is_closed_when_its_next_request_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert application.KEEPALIVE_CONNECTION_S == 75.0, "as the threat model says"
    monkeypatch.setattr(application, "KEEPALIVE_CONNECTION_S", 0.2)

    async def answer(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/", answer)
    runner = make_runner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.read()).startswith(b"HTTP/1.1 200 "), "answered, and closed later"
        writer.close()
    finally:
        await runner.cleanup()


async def test_a_connection_whose_task_fails_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: Connection) -> None:
        raise ValueError("as no part of aiohttp is known to")

    monkeypatch.setattr(Connection, "start", fail)
    runner = make_runner(web.Application())
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
    finally:
        await runner.cleanup()
    assert len(caplog.messages) == 1 and "ValueError at" in caplog.messages[0] and "aiohttp" not in caplog.messages[0]


@contextlib.asynccontextmanager
async def _busy(
    go_on: asyncio.Event,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, Callable[[], list[Connection]]]]:
    """A connection on which nothing is answered before ``go_on``, and the server's side of it."""

    async def answer(request: web.Request) -> web.Response:
        await go_on.wait()
        return web.Response(body=str(len(await request.read())))

    app = web.Application()
    app.router.add_route("*", "/", answer)
    runner = make_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
        server = runner.server
        assert server is not None
        yield reader, writer, lambda: [each for each in server.connections if isinstance(each, Connection)]
        writer.close()
    finally:
        await runner.cleanup()


def _is_refused(connection: Connection) -> bool:
    return connection._refused and connection._body is None


async def test_headers_of_requests_that_wait_for_an_earlier_one_are_bounded() -> None:
    go_on = asyncio.Event()
    async with _busy(go_on) as (reader, writer, connections):
        one = "GET / HTTP/1.1\r\nHost: localhost\r\n" + f"x: {'y' * 15_000}\r\n" * 4 + "\r\n"
        fit = MAX_WAITING_BYTES // len(one)
        for _ in range(fit + 5):
            writer.write(one.encode())
        await until(lambda: any(map(_is_refused, connections())), "the rest is refused")
        go_on.set()
        async with asyncio.timeout(10):
            said = await reader.read()
        assert said.count(b"HTTP/1.1 200") in (fit, fit + 1), "the first no longer waits"
        assert said.count(b"HTTP/1.1 400") == 1


BUSY = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
WAITING = b"POST / HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize("size", [900_000, 768_000])
async def test_the_last_body_that_waits_for_an_earlier_request_is_read_when_it_is_its_turn(size: int) -> None:
    """Whether it is long or has many chunks: what its client still sends waits there."""
    long = b"Content-Length: %d\r\n\r\n" % size + bytes(size)
    chunks = b"Transfer-Encoding: chunked\r\n\r\n" + (b"100\r\n" + bytes(256) + b"\r\n") * (size // 256) + b"0\r\n\r\n"
    go_on = asyncio.Event()
    async with _busy(go_on) as (reader, writer, connections):
        writer.write(BUSY)
        await writer.drain()
        writer.write(WAITING + (long if size > 800_000 else chunks))
        await until(lambda: any(each._reading_paused for each in connections()), "no more is read")
        held = max(each._mine for each in connections())
        go_on.set()
        async with asyncio.timeout(10):
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(1) == b"0"
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(len(str(size))) == str(size).encode()
        assert held < 4 * MAX_WAITING_BYTES, held


async def test_bodies_of_requests_that_wait_for_an_earlier_one_are_bounded() -> None:
    go_on = asyncio.Event()
    async with _busy(go_on) as (reader, writer, connections):
        one = WAITING + b"Content-Length: 100000\r\n\r\n" + bytes(100_000)
        writer.write(BUSY + one * 8)
        await until(lambda: any(map(_is_refused, connections())), "the rest is refused")
        go_on.set()
        async with asyncio.timeout(10):
            said = await reader.read()
        assert said.count(b"HTTP/1.1 200") in (4, 5) and said.count(b"HTTP/1.1 400") == 1, said
        assert b"wait for an earlier one" in said


async def test_small_bodies_that_wait_are_served_in_their_order_and_a_long_one_of_its_own_is_not_bounded() -> None:
    go_on = asyncio.Event()
    async with _busy(go_on) as (reader, writer, connections):
        long = bytes(MAX_WAITING_BYTES * 2)
        writer.write(WAITING + b"Content-Length: %d\r\n\r\n" % len(long) + long)
        for size in range(1, 21):
            writer.write(WAITING + b"Content-Length: %d\r\n\r\n" % size + bytes(size))
        await asyncio.sleep(0.1)
        go_on.set()
        async with asyncio.timeout(10):
            for size in (len(long), *range(1, 21)):
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(len(str(size))) == str(size).encode()
        assert not any(map(_is_refused, connections()))


async def test_a_worker_is_drained_by_name(model: Path) -> None:
    async with open_house(model, "prefill", "decode") as house:
        other = await house.add("decode")
        response, body = await house.post("/admin/drain", {"worker": "decode-2", "timeout": 2.5})
        assert response.status == 202 and body == {"worker": "decode-2", "timeout": 2.5}
        await until(lambda: other.got(Drain), "it hears of it")
        assert other.got(Drain) == [Drain(2500)]
        for wrong, code in ({"worker": "decode-7"}, 404), ({}, 400), ({"worker": "decode-2", "timeout": -1}, 400):
            response, body = await house.post("/admin/drain", wrong)
            assert response.status == code, body


# -- pages ------------------------------------------------------------------------------------------------------------


async def test_the_root_tells_what_is_here(house: House) -> None:
    response, body = await house.get("/")
    assert response.status == 200 and body["server"] == "tandem" and body["model"] == "tiny"
    assert {"POST /v1/chat/completions", "GET /v1/models", "GET /health", "GET /metrics"} <= set(body["endpoints"])
    assert "GET /" not in body["endpoints"]
    assert (await house.get("/nowhere"))[0].status == 404


async def test_a_browser_gets_a_page_whose_links_lead_somewhere(model: Path) -> None:
    async with open_house(model, "colocated", served_model_name="<b>&co") as house:
        async with house.client.get(house.url, headers={"Accept": "text/html,*/*;q=0.8"}) as response:
            page = await response.text()
        assert response.content_type == "text/html" and response.headers["Vary"] == "Accept"
        assert "serves &lt;b&gt;&amp;co<" in page and "<b>" not in page
        assert "POST /v1/chat/completions" in page
        links = re.findall(r'href="([^"]+)"', page)
        assert {"/v1/models", "/health", "/metrics", "/admin/workers"} <= set(links)
        for link in links:
            async with house.client.get(house.url + link) as response:
                assert response.status == 200, link


async def test_models(house: House) -> None:
    _, body = await house.get("/v1/models")
    valid("ListModelsResponse", body)
    assert body["data"][0]["id"] == "tiny" and body["data"][0]["max_model_len"] == POSITIONS
    valid("Model", (await house.get("/v1/models/tiny"))[1])
    assert (await house.get("/v1/models/other"))[0].status == 404


async def test_tokens_there_and_back(house: House) -> None:
    _, body = await house.post("/tokenize", {"prompt": "héllo", "return_token_strs": True})
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) and body["max_model_len"] == POSITIONS
    _, back = await house.post("/detokenize", {"tokens": body["tokens"]})
    assert back == {"prompt": "héllo"}
    _, body = await house.post("/tokenize", HELLO)
    assert (await house.post("/detokenize", {"tokens": body["tokens"]}))[1]["prompt"].endswith("<|assistant|>")
    assert (await house.post("/tokenize", {}))[0].status == 400
    assert (await house.post("/detokenize", {"tokens": [VOCAB]}))[0].status == 400


async def test_ready_waits_for_everybody_who_was_asked_for(model: Path) -> None:
    async with open_house(model, expect_prefill=1, expect_decode=2) as house:
        roles: tuple[Role, ...] = ("prefill", "decode")
        for role in roles:
            response, body = await house.get("/ready")
            assert response.status == 503 and "0 of" in body["error"]["message"]
            await house.add(role)
        assert "1 of 2 decode" in (await house.get("/ready"))[1]["error"]["message"]
        await house.add("decode")
        assert (await house.get("/ready"))[0].status == 200


async def test_workers_as_they_see_themselves(house: House) -> None:
    await until(lambda: all(worker.beat for worker in house.services.registry), "heartbeats")
    await until(lambda: house.dispatcher.links.of(next(iter(house.services.registry))), "the link is measured")
    _, body = await house.get("/admin/workers")
    for worker in body["workers"]:
        blocks = worker["kv_blocks"]
        assert blocks["free"] + blocks["cached"] + blocks["held"] == blocks["total"] == 256
        assert worker["state"] == "ready" and worker["incarnation"]
        assert worker["waiting_tokens"] == 7 and worker["turn_ms"] is None
    prefill, decode = body["workers"]
    assert prefill["links"] == [{"to": "decode-1", "transport": "shm", "gb_per_s": 1.024, "latency_us": 1000.0}]
    assert decode["links"] == [] and prefill["transports"] == decode["transports"] == ["shm", "zmq"]


async def test_metrics_have_vllms_names(house: House) -> None:
    await house.post(CHAT, {**HELLO, "max_tokens": 4})
    await until(lambda: all(worker.beat for worker in house.services.registry), "heartbeats")
    async with house.client.get(f"{house.url}/metrics") as response:
        page = await response.text()
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        'vllm:cache_config_info{block_size="16",model_name="tiny",num_gpu_blocks="256"}',
        "vllm:time_to_first_token_seconds_bucket",
        'vllm:inter_token_latency_seconds_bucket{le="0.001"',
        "vllm:request_time_per_output_token_seconds_count",
        "vllm:e2e_request_latency_seconds_sum",
        "vllm:request_queue_time_seconds_count",
        "vllm:request_prefill_time_seconds_count",
        "vllm:request_decode_time_seconds_count",
        "vllm:request_prompt_tokens_count",
        "vllm:request_generation_tokens_count",
        "vllm:prompt_tokens_total",
        'vllm:generation_tokens_total{model_name="tiny"} 4.0',
        'vllm:prefix_cache_queries_total{model_name="tiny"} 20.0',
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0',
        'tandem_stage_seconds_bucket{le="0.01",stage="transfer"}',
        'tandem_kv_transfer_bytes_total{transport="shm"} 4096.0',
        "tandem_kv_transfer_seconds_count",
        'tandem_kv_blocks{role="decode",state="free",worker="decode-1"}',
        'tandem_requests_total{outcome="done",path="disagg"} 1.0',
        'tandem_workers{role="prefill",state="ready"} 1.0',
        "tandem_migrations_total",
        "tandem_event_loop_lag_seconds_count",
        'tandem_bad_messages_total{source="coordinator"} 0.0',
        'tandem_bad_messages_total{source="workers"} 4.0',
        'tandem_cut_off_peers_total{source="coordinator"} 0.0',
        'tandem_cut_off_peers_total{source="workers"} 2.0',
        "tandem_stale_frames_total 6.0",
        "tandem_reaped_requests_total 10.0",
        "tandem_borrowed_core_seconds_total 3.0",
        'tandem_leaked_kv_blocks{role="decode",worker="decode-1"} 1.0',
        "tandem_open_breakers 0.0",
        'tandem_stage_seconds_sum{stage="transfer_exposed"} 0.0005',
        'tandem_stage_seconds_count{stage="transfer_exposed"} 1.0',
    ):
        assert name in page, name


async def test_a_flood_of_scrapes_makes_few_pages(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whereas each of a few shows what happened just before it."""
    metrics, now, made = house.services.metrics, 100.0, 0

    def make(registry: CollectorRegistry) -> bytes:
        nonlocal made
        made += 1
        return generate_latest(registry)

    async def scrape() -> float:
        async with house.client.get(f"{house.url}/metrics") as response:
            found = re.search(r'^tandem_clients_cut_off_total\{while="reading"\} (\S+)', await response.text(), re.M)
            return float(found[1]) if found else 0.0

    monkeypatch.setattr(metrics, "_clock", lambda: now)
    monkeypatch.setattr("coordinator.metrics.generate_latest", make)
    for number in range(FRESH_PAGES):
        assert await scrape() == number
        metrics.cut_off("reading")
    assert await asyncio.gather(*(scrape() for _ in range(64))) == [FRESH_PAGES - 1] * 64
    assert made == FRESH_PAGES
    now += PAGE_S
    assert await scrape() == FRESH_PAGES


async def test_what_holds_the_event_loop_up_is_measured(house: House) -> None:
    """Also what is over before anybody's watchdog looks."""
    lag = functools.partial(house.services.metrics.registry.get_sample_value, "tandem_event_loop_lag_seconds_sum")
    before, began = lag(), time.monotonic()
    assert before is not None
    time.sleep(0.2)  # noqa: ASYNC251 - this is what holds it up
    await until(lambda: (lag() or 0.0) - before > 0.195 - LAG_EVERY_S, "it is seen", 1.0)  # timers count milliseconds
    assert (lag() or 0.0) - before <= time.monotonic() - began + LAG_EVERY_S, "no more than the time that passed"


async def test_a_hand_off_counts_though_its_answer_has_ended_before(house: House) -> None:
    """A short one may, whose last token decode has sent while prefill still learns that all of its KV was accepted."""
    prefill = next(worker for worker in house.workers if worker.hello.role == "prefill")
    values = {"transfer_ms": 4.0, "transfer_exposed_ms": 2.0, "kv_bytes": 4096.0}
    prefill.say(Timing(RequestId(bytes(16)), 1, values, "shm"))
    metrics = house.services.metrics
    shown = functools.partial(metrics.registry.get_sample_value, "tandem_stage_seconds_sum")
    await until(lambda: shown({"stage": "transfer_exposed"}), "it is counted")
    assert shown({"stage": "transfer_exposed"}) == 0.002 and shown({"stage": "transfer"}) == 0.004


def test_counters_of_gone_workers_count_and_are_few() -> None:
    total, longest = _Sum(), 0
    for number in range(1000):
        assert total.of({Incarnation(f"i{number}"): 1.0, Incarnation("always"): 5.0}) == number + 6
        longest = max(longest, len(total._latest))
    assert total.of({Incarnation("i999"): 3.0}) == 1007, "it was away only"
    assert longest < 300


async def test_draining_finishes_what_runs_and_refuses_the_rest(model: Path) -> None:
    async with open_house(model, "prefill", drain_timeout=5.0) as house:
        await house.add("decode", step_s=0.02)
        asked = asyncio.create_task(house.stream(CHAT, {**HELLO, "max_tokens": 20}))
        await until(lambda: house.workers[1].busy, "it runs")
        draining = asyncio.create_task(drain(house.services, asyncio.Event()))
        await until(lambda: house.dispatcher.draining, "it drains")
        response, body = await house.post(CHAT, HELLO)
        assert response.status == 503 and body["error"]["code"] == "server_shutting_down"
        assert response.headers["Connection"] == "close"
        assert (await house.get("/ready"))[0].status == 503
        _, events = await asked
        assert len(events) == 21
        await draining


async def test_a_drain_that_takes_too_long_ends_streams_with_an_error(model: Path) -> None:
    async with open_house(model, "prefill", drain_timeout=0.1) as house:
        await house.add("decode", step_s=0.02)
        asked = asyncio.create_task(house.stream(CHAT, {**HELLO, "max_tokens": 500}))
        await until(lambda: house.workers[1].busy, "it runs")
        await drain(house.services, asyncio.Event())
        _, events = await asked
        assert events[-1]["error"]["code"] == "server_shutting_down"


async def _leave_unread(house: House) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """An answer that is computed, larger than what the kernel takes, and not read yet."""
    asked = {"prompt": ["x"] * 3, "n": 16, "logprobs": 20, "max_tokens": 900, "ignore_eos": True, "seed": 1}
    connection = await _ask_and_read_no_more(house, asked)
    await until(lambda: house.workers[0].busy, "it runs")
    await until(lambda: not house.dispatcher.tickets, "it is computed", 20)
    return connection


async def test_a_drain_waits_for_an_answer_that_is_still_read(model: Path) -> None:
    async with open_house(model, drain_timeout=20.0) as house:
        await house.add("colocated", step_s=0.0, changes={"kv_blocks": 8192})
        reader, writer = await _leave_unread(house)
        draining = asyncio.create_task(drain(house.services, asyncio.Event()))
        done, _ = await asyncio.wait([draining], timeout=0.3)
        assert not done
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(re.findall(rb"Content-Length: (\d+)", head)[0]))
        await draining
        writer.close()


async def test_a_drain_ends_in_time_whoever_does_not_read(model: Path) -> None:
    async with open_house(model, drain_timeout=0.1) as house:
        await house.add("colocated", step_s=0.0, changes={"kv_blocks": 8192})
        reader, writer = await _leave_unread(house)
        async with asyncio.timeout(5):
            await drain(house.services, asyncio.Event())
        assert house.services.answers.count == 1
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):  # the connections are closed, too
        await reader.readexactly(64 << 20)
    writer.close()
