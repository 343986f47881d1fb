"""Answers over real sockets with fake workers: whole answers, streams, log-probabilities, and how a choice ends."""

from __future__ import annotations

import functools
import json
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.core.ids import pack_tokens
from common.core.request import FinishReason
from common.net.messages import Abort, Generate, Logprobs, Prefill, Reserve, Role
from coordinator.api.choice import Choice
from coordinator.api.delta_encoder import encode
from coordinator.api.logprobs import chat_logprob, completion_logprobs
from coordinator.api.openai import parse_chat
from coordinator.api.prompt_report import TokenNames
from coordinator.api.response_encoder import ChatShape, CompletionShape
from coordinator.api.shape import Head, Usage
from coordinator.http.reply import WholeReply
from coordinator.text.tokenizer import StopStrings, TextModel
from tests.fakes.checkpoint import EOS, VOCAB
from tests.fakes.worker import formula
from tests.unit.coordinator.fake_cluster import (
    CHAT,
    HELLO,
    TEXT,
    FakeCluster,
    letters,
    open_cluster,
    prefilled,
    until,
    valid,
)


async def talkers(cluster: FakeCluster, text: str, **options: Any) -> None:
    roles: tuple[Role, ...] = ("prefill", "decode")
    for role in roles:
        await cluster.add(role, script=letters(text), **options)


async def test_a_chat_is_answered_by_a_pair(cluster: FakeCluster) -> None:
    response, body = await cluster.post(CHAT, {**HELLO, "max_tokens": 6, "return_token_ids": True})
    assert response.status == 200
    valid("CreateChatCompletionResponse", body)
    prompt, ids = body["prompt_token_ids"], body["choices"][0]["token_ids"]
    (sent,) = cluster.workers[0].got(Prefill)
    assert sent.request.prompt_tokens() == prompt
    assert ids == [formula(sent.request, 0, position) for position in range(6)]
    assert body["choices"][0]["message"]["content"] == cluster.services.model.text.decode(ids)
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
    (reserved,) = cluster.workers[1].got(Reserve)
    assert reserved.request.id == sent.request.id and reserved.prefill.name == "prefill-0"
    assert sent.decode.address == "tcp://127.0.0.1:1"


async def test_system_fingerprint_depends_on_loaded_weights(model: Path) -> None:
    """Only workers know how they loaded the weights, and quantized weights answer the same request differently."""
    seen: dict[str, list[str]] = {}
    roles: tuple[Role, ...] = ("prefill", "decode")
    for loaded in ("w", "w.int8", "w"):
        async with open_cluster(model) as cluster:
            fingerprint = f"{cluster.services.model.checkpoint.fingerprint}.{loaded}"
            for role in roles:
                await cluster.add(role, fingerprint=fingerprint)
            _, body = await cluster.post(CHAT, {**HELLO, "max_tokens": 1})
            seen.setdefault(loaded, []).append(body["system_fingerprint"])
    first, again = seen["w"]
    assert first == again and first not in seen["w.int8"]


async def test_the_models_sampling_defaults_count_unless_asked_otherwise(cluster: FakeCluster) -> None:
    await cluster.post(CHAT, {**HELLO, "max_tokens": 2})
    await cluster.post(CHAT, {**HELLO, "max_tokens": 2, "temperature": 0, "top_k": -1, "seed": -1})
    first, second = (request.sampling for request in await prefilled(cluster, 2))
    assert (first.temperature, first.top_k, first.eos_token_ids) == (0.7, 20, (EOS,))
    assert (second.temperature, second.top_k) == (0.0, 0) and second.seed >= 0


async def test_different_seeds_stay_different(cluster: FakeCluster) -> None:
    seeds = (-1, (1 << 63) - 1, 0, -(1 << 63), 1)
    for seed in seeds:
        await cluster.post(CHAT, {**HELLO, "max_tokens": 2, "seed": seed})
    sent = {request.sampling.seed for request in await prefilled(cluster, len(seeds))}
    assert sent == {seed % (1 << 64) for seed in seeds} and len(sent) == len(seeds)


async def test_a_stream_has_one_chunk_per_token(cluster: FakeCluster) -> None:
    asked = {**HELLO, "max_tokens": 5, "stream_options": {"include_usage": True}, "return_token_ids": True}
    response, events = await cluster.stream(CHAT, asked)
    for event in events:
        valid("CreateChatCompletionStreamResponse", event)
    tokens, (end, usage) = events[:-2], events[-2:]
    assert len(tokens) == 5
    assert tokens[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in event["choices"][0]["delta"] for event in tokens[1:])
    ids = [event["choices"][0]["token_ids"] for event in tokens]
    assert all(len(each) == 1 for each in ids) and tokens[0]["prompt_token_ids"]
    said = "".join(event["choices"][0]["delta"]["content"] for event in tokens)
    assert said == cluster.services.model.text.decode([each[0] for each in ids])
    assert end["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert all(event["usage"] is None for event in events[:-1])
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 5
    assert response.headers["Cache-Control"] == "no-cache" and response.headers["X-Accel-Buffering"] == "no"
    assert response.headers["x-tandem-path"] == "disagg" and response.headers["x-request-id"]
    assert len({event["id"] for event in events}) == 1


async def test_usage_in_every_chunk(cluster: FakeCluster) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, events = await cluster.stream(TEXT, {"prompt": "hi", "max_tokens": 3, "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3, 3]


async def test_completions_of_several_prompts_and_choices(cluster: FakeCluster) -> None:
    asked = {"prompt": ["one", "two three"], "n": 2, "max_tokens": 3, "logprobs": 2, "return_token_ids": True}
    _, body = await cluster.post(TEXT, asked)
    valid("CreateCompletionResponse", body)
    choices = body["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    requests = [sent.request for sent in cluster.workers[0].got(Prefill)]
    for index, choice in enumerate(choices):
        request = requests[index // 2]
        assert choice["prompt_token_ids"] == request.prompt_tokens()
        assert choice["token_ids"] == [formula(request, index % 2, at) for at in range(3)]
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["top_logprobs"]) == 3
    assert body["usage"]["completion_tokens"] == 12


async def test_streamed_completions_of_several_choices(cluster: FakeCluster) -> None:
    _, events = await cluster.stream(TEXT, {"prompt": [[40, 41], [42]], "n": 2, "max_tokens": 2, "logprobs": 0})
    for event in events:
        valid("CreateCompletionStreamResponse", event)
    for index in range(4):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [choice["finish_reason"] for choice in mine] == [None, None, "length"]
        assert all(choice["logprobs"]["token_logprobs"] == [-0.5] for choice in mine[:2])


async def test_chat_logprobs(cluster: FakeCluster) -> None:
    asked = {**HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    _, body = await cluster.post(CHAT, asked)
    valid("CreateChatCompletionResponse", body)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == 2 and [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]
    _, events = await cluster.stream(CHAT, asked)
    streamed = [event["choices"][0]["logprobs"]["content"][0] for event in events[:-1]]
    assert [entry["top_logprobs"] for entry in streamed] == [entry["top_logprobs"] for entry in content]


async def test_tokens_may_be_named_by_their_ids(cluster: FakeCluster) -> None:
    fields = {"max_tokens": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    _, body = await cluster.post(CHAT, {**HELLO, **fields, "logprobs": True, "top_logprobs": 2})
    valid("CreateChatCompletionResponse", body)
    (choice,) = body["choices"]
    named = [f"token_id:{token}" for token in choice["token_ids"]]
    text = cluster.services.model.text
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == named
    assert [bytes(entry["bytes"]) for entry in content] == list(map(text.token_bytes, choice["token_ids"]))
    assert all(top["token"].startswith("token_id:") for entry in content for top in entry["top_logprobs"])
    asked = {"prompt": [40, 41], "echo": True, "logprobs": 1, "prompt_logprobs": 0, **fields}
    _, body = await cluster.post(TEXT, asked)
    (choice,) = body["choices"]
    shown = [f"token_id:{token}" for token in (40, 41, *choice["token_ids"])]
    assert choice["logprobs"]["tokens"] == shown
    for name, top in zip(shown[1:], choice["logprobs"]["top_logprobs"][1:], strict=True):
        assert name in top and all(re.fullmatch(r"token_id:\d+", each) for each in top)
    assert choice["prompt_logprobs"][1]["41"]["decoded_token"] == text.token_text(41)
    _, events = await cluster.stream(TEXT, {**asked, "echo": False, "prompt_logprobs": None})
    assert [event["choices"][0]["logprobs"]["tokens"][0] for event in events[:2]] == shown[2:]


async def test_the_server_may_name_tokens_by_their_ids_unless_a_request_says_otherwise(model: Path) -> None:
    async with open_cluster(model, "colocated", return_tokens_as_token_ids=True) as cluster:
        asked = {"prompt": [40], "max_tokens": 1, "logprobs": 0}
        for field, by_id in (({}, True), ({"return_tokens_as_token_ids": False}, False)):
            _, body = await cluster.post(TEXT, {**asked, **field})
            assert body["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:") == by_id


@pytest.mark.parametrize("shape", [ChatShape, functools.partial(CompletionShape, echoes=[])])
def test_incremental_logprobs_equal_logprobs_encoded_together(model: Path, shape: Any) -> None:
    """Log-probabilities that were encoded token by token give the same JSON as all of them encoded together."""
    text, tokens = TextModel(model, vocab_size=VOCAB), list(range(8, 60))
    body = parse_chat({**HELLO, "logprobs": True, "top_logprobs": 2})
    known = [Logprobs(-(at**2), pack_tokens([at, 7]), (-0.1 * at, -math.inf)) for at in tokens]
    choices = [Choice(at, [1], body.options, text, None) for at in range(2)]
    names = TokenNames(text)
    made = shape(Head("id", 0, "tiny", "print"), body.options, names)
    pieces = list(choices[0].feed(tokens, known, FinishReason.STOP))
    for piece in pieces:
        made.keep(choices[0], piece)
    whole = made.whole(choices, Usage())
    if shape is ChatShape:
        full = {"content": [chat_logprob(names, *pair) for pair in zip(tokens, known, strict=True)], "refusal": None}
        none: Any = {"content": [], "refusal": None}
    else:
        full, none = completion_logprobs(names, pieces, 0), completion_logprobs(names, [], 0)
    assert [encode(choice["logprobs"]) for choice in whole["choices"]] == [encode(full), encode(none)]


@pytest.mark.parametrize("shape", [ChatShape, functools.partial(CompletionShape, echoes=[])])
def test_text_held_back_when_the_end_comes_without_a_token_is_sent_with_the_end(model: Path, shape: Any) -> None:
    text, options = TextModel(model, vocab_size=VOCAB), parse_chat({**HELLO, "stop": "abc"}).options
    choice = Choice(0, [1], options, text, StopStrings(options.stop, False))
    ids = text.encode("xab", add_special_tokens=False)
    sent = "".join(piece.text for piece in choice.feed(ids, [], FinishReason.RUNNING))
    assert list(choice.feed([], [], FinishReason.LENGTH)) == []
    made = shape(Head("id", 0, "tiny", "print"), options, TokenNames(text))
    (end,) = json.loads(made.end(choice, None, {}).removeprefix(b"data: "))["choices"]
    assert sent == "x" and (end["delta"]["content"] if shape is ChatShape else end["text"]) == "ab"
    assert end["finish_reason"] == "length" and "".join(choice.text) == "xab"


async def test_logprobs_are_not_left_for_the_end(model: Path) -> None:
    """With 1,000 tokens, building the body at the end takes little of the total time."""
    text, options = TextModel(model, vocab_size=VOCAB), parse_chat({**HELLO, "logprobs": True}).options
    shape = ChatShape(Head("id", 0, "tiny", "print"), options, TokenNames(text))
    reply = WholeReply(options, shape, 1, lambda index: Choice(index, [1], options, text, None))
    record: Any = SimpleNamespace(id=b"id", n=1, prompt_length=1, timings={})
    reply.expect([record])
    known = Logprobs(-0.5, pack_tokens(list(range(20))), tuple(-0.1 * at for at in range(20)))
    began = time.thread_time()
    for _ in range(1000):
        reply.tokens(record, 0, [9], [known], FinishReason.RUNNING)
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
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, path: str, asked: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr("coordinator.api.sampling.MOST_LOGPROB_BYTES", 100_000)
    _, body = await cluster.post(path, {**asked, "max_tokens": 40})
    assert (body["error"]["param"], body["error"]["code"]) == (param, "invalid_value")
    await cluster.stream(path, {**asked, "max_tokens": 40})
    _, body = await cluster.post(path, {**asked, "max_tokens": 2})
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    if path == CHAT:  # a chat request without a limit gets as many tokens as fit
        _, body = await cluster.post(path, asked)
        assert body["usage"]["completion_tokens"] == 2 * 16


async def test_echo_repeats_the_prompt(cluster: FakeCluster) -> None:
    _, body = await cluster.post(TEXT, {"prompt": "hello", "echo": True, "max_tokens": 1})
    assert body["choices"][0]["text"].startswith("hello")
    _, events = await cluster.stream(TEXT, {"prompt": "hello", "echo": True, "max_tokens": 2})
    assert events[0]["choices"][0]["text"].startswith("hello")
    assert not events[1]["choices"][0]["text"].startswith("hello")


async def test_return_metrics_adds_up(cluster: FakeCluster) -> None:
    _, body = await cluster.post(CHAT, {**HELLO, "max_tokens": 4, "return_metrics": True})
    stages = body["tandem"]
    assert stages["path"] == "disagg" and stages["why"] and stages["kv_bytes"] == 4096
    total = stages["queue_ms"] + stages["tokenize_ms"] + stages["prefill_ms"]
    assert total == pytest.approx(stages["ttft_ms"], abs=0.01)
    _, events = await cluster.stream(CHAT, {**HELLO, "max_tokens": 4, "return_metrics": True})
    assert events[-1]["choices"][0]["finish_reason"] and events[-1]["tandem"]["decode"] == "decode-1"
    asked = {**HELLO, "max_tokens": 4, "return_metrics": True, "stream_options": {"include_usage": True}}
    assert (await cluster.stream(CHAT, asked))[1][-1]["tandem"]["itl_ms_mean"] > 0


async def test_end_of_sequence_is_not_shown(model: Path) -> None:
    async with open_cluster(model) as cluster:
        await talkers(cluster, "hi")
        _, body = await cluster.post(CHAT, {**HELLO, "return_token_ids": True, "skip_special_tokens": False})
        choice = body["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("hi", "stop")
        assert choice["token_ids"][-1] == EOS


async def test_the_first_token_may_end_it_on_prefill(model: Path) -> None:
    async with open_cluster(model) as cluster:
        await cluster.add("prefill", script=letters(""))
        decode = await cluster.add("decode", delay_s=5)
        response, body = await cluster.post(CHAT, {**HELLO, "max_tokens": 9, "return_metrics": True})
        assert body["usage"]["completion_tokens"] == 1
        assert response.headers["x-tandem-path"] == body["tandem"]["path"] == "prefill"
        assert response.headers["x-tandem-decode"] == "none"
        await until(lambda: decode.got(Abort), "decode gets the Abort")
        _, events = await cluster.stream(CHAT, {**HELLO, "max_tokens": 9, "return_metrics": True})
        assert events[-1]["tandem"]["path"] == "prefill"


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {**HELLO, "n": 3, "return_metrics": True}),
        # what lm-eval sends to score texts
        (TEXT, {"prompt": [[50] * 20, [51] * 30], "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}),
    ],
)
async def test_a_single_token_needs_no_decode_worker(model: Path, path: str, asked: dict[str, Any]) -> None:
    async with open_cluster(model, "prefill", "decode") as cluster:
        for stream in (False, True):
            body = {**asked, "max_tokens": 1}
            if stream:
                response, _ = await cluster.stream(path, body)
            else:
                response, whole = await cluster.post(path, body)
                assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
                assert whole["usage"]["completion_tokens"] == len(whole["choices"])
            assert response.headers["x-tandem-path"] == "prefill" and response.headers["x-tandem-decode"] == "none"
        prefill, decode = cluster.workers
        assert not any(decode.got(kind) for kind in (Reserve, Generate, Abort))
        assert prefill.got(Generate) and not prefill.got(Prefill)


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_it_everywhere_and_never_leaks(model: Path, include: bool) -> None:
    async with open_cluster(model) as cluster:
        await talkers(cluster, "some text STOP and more of it" * 5)
        asked = {**HELLO, "stop": ["xyz", "STOP"], "include_stop_str_in_output": include}
        wanted = "some text STOP" if include else "some text "
        _, body = await cluster.post(CHAT, asked)
        assert body["choices"][0]["message"]["content"] == wanted
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == len("some text STOP")
        _, events = await cluster.stream(CHAT, asked)
        parts = [event["choices"][0]["delta"]["content"] for event in events[:-1]]
        assert len(parts) == len("some text STOP") and "".join(parts) == wanted
        await until(lambda: len(cluster.workers[1].got(Abort)) == 2, "decode gets the Abort")


async def test_stop_strings_wait_for_min_tokens(model: Path) -> None:
    async with open_cluster(model) as cluster:
        await talkers(cluster, "ababab")
        _, body = await cluster.post(CHAT, {**HELLO, "stop": "b", "min_tokens": 3})
        assert body["choices"][0]["message"]["content"] == "aba"


async def test_a_character_of_several_tokens_comes_whole(model: Path) -> None:
    async with open_cluster(model) as cluster:
        await talkers(cluster, "é🙂!")
        _, events = await cluster.stream(CHAT, HELLO)
        parts = [event["choices"][0]["delta"]["content"] for event in events[:-1]]
        assert parts == ["", "é", "", "", "", "🙂", "!", ""]
