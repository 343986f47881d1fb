"""Log-probabilities of prompts over HTTP, from fake workers: shapes, placement, lost messages and retries."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from common.core.request import Request
from common.net.messages import Generate, Prefill, PromptLogprobs, ResendPrompt, Reserve, Role, Tokens
from coordinator.api import sampling
from tests.fakes.oracle import oracle_prompt
from tests.unit.coordinator.fake_cluster import CHAT, HELLO, TEXT, FakeCluster, open_cluster, until, valid

PROMPT = list(range(40, 140))
Fields = dict[str, Any]


def expected_field(cluster: FakeCluster, prompt: list[int], tops: int) -> list[Fields | None]:
    """Return the member ``prompt_logprobs`` that the fake workers' numbers give."""
    text, span = cluster.services.model.text, oracle_prompt(prompt, 1, len(prompt), tops)
    shown: list[Fields | None] = [None]
    for at in range(span.end - 1):
        ids, top = span.top_ids[at * tops : (at + 1) * tops], span.top[at * tops : (at + 1) * tops]
        rows = [(prompt[at + 1], span.logprobs[at], span.ranks[at])]
        rows += [(token, value, rank) for rank, (token, value) in enumerate(zip(ids, top, strict=True), 1)]
        shown.append({str(t): {"logprob": p, "rank": rank, "decoded_token": text.token_text(t)} for t, p, rank in rows})
    return shown


def check_echo(cluster: FakeCluster, prompt: list[int], choice: Fields, output: int) -> None:
    """Check the ``logprobs`` object of a choice that echoes ``prompt`` before ``output`` tokens."""
    text, shown = cluster.services.model.text, choice["logprobs"]
    assert choice["text"].startswith(text.decode_prompt(prompt))
    assert {len(array) for array in shown.values()} == {len(prompt) + output}
    assert shown["token_logprobs"][0] is None and shown["top_logprobs"][0] is None
    assert shown["token_logprobs"][1 : len(prompt)] == list(oracle_prompt(prompt, 1, len(prompt), 0).logprobs)
    assert all(
        top[name] >= own
        for name, own, top in zip(*(shown[n][1:] for n in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
    )
    assert shown["tokens"][: len(prompt)] == [text.token_text(token) for token in prompt]
    for offset, token in zip(shown["text_offset"], shown["tokens"], strict=True):
        # an incomplete character before the token is shown with it
        assert choice["text"][offset:].lstrip("�").startswith(token) or "�" in token


@pytest.fixture(params=[("prefill", "decode"), ("colocated",)], ids="+".join)
async def served(request: pytest.FixtureRequest, model: Path) -> Any:
    roles: tuple[Role, ...] = request.param
    async with open_cluster(model, *roles) as cluster:
        yield cluster


@pytest.mark.parametrize("tops", [0, 2])
async def test_chats_have_vllms_field(served: FakeCluster, tops: int) -> None:
    asked = {**HELLO, "prompt_logprobs": tops, "n": 2, "max_tokens": 3, "return_token_ids": True}
    _, body = await served.post(CHAT, asked)
    valid("CreateChatCompletionResponse", body)
    expected = expected_field(served, body["prompt_token_ids"], tops)
    assert body["prompt_logprobs"] == expected
    _, events = await served.stream(CHAT, asked)
    for event in events:
        valid("CreateChatCompletionStreamResponse", event)
    assert [event["prompt_logprobs"] for event in events if "prompt_logprobs" in event] == [expected]
    assert "prompt_logprobs" in events[0]


async def test_completions_have_the_field_per_choice(served: FakeCluster) -> None:
    prompts = [PROMPT, [7], [8, 9]]
    asked = {"prompt": prompts, "prompt_logprobs": 1, "n": 2, "max_tokens": 3}
    _, body = await served.post(TEXT, asked)
    valid("CreateCompletionResponse", body)
    expected = [expected_field(served, prompt, 1) for prompt in prompts for _ in range(2)]
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == expected
    assert all(choice["logprobs"] is None for choice in body["choices"])
    _, events = await served.stream(TEXT, asked)
    shown = {choice["index"]: choice["prompt_logprobs"] for choice in choices_with(events, "prompt_logprobs")}
    assert [shown[index] for index in range(6)] == expected


def without_nulls(body: Fields) -> Fields:
    """Return ``body`` without the first elements that OpenAI sends as null and that its schema does not allow."""
    copy = json.loads(json.dumps(body))
    for choice in copy["choices"]:
        for name in ("token_logprobs", "top_logprobs"):
            del choice["logprobs"][name][0]
    return copy


def choices_with(events: list[Fields], name: str) -> list[Fields]:
    return [choice for event in events for choice in event["choices"] if choice.get(name)]


@pytest.mark.parametrize("output", [0, 1, 3])
@pytest.mark.parametrize("logprobs", [0, 1, 5])
async def test_an_echo_shows_the_log_probabilities_of_prompt_and_output(
    served: FakeCluster, output: int, logprobs: int
) -> None:
    prompts = [PROMPT, [50], [60, 61]]
    asked = {"prompt": prompts, "echo": True, "logprobs": logprobs, "max_tokens": output, "n": 2, "seed": 1234}
    _, body = await served.post(TEXT, asked)
    valid("CreateCompletionResponse", without_nulls(body))
    assert body["usage"]["completion_tokens"] == output * 6 and len(body["choices"]) == 6
    for choice in body["choices"]:
        assert choice["finish_reason"] == "length" and "prompt_logprobs" not in choice
        check_echo(served, prompts[choice["index"] // 2], choice, output)
    _, events = await served.stream(TEXT, asked)
    whole: dict[int, Fields] = {}
    for choice in choices_with(events, "logprobs"):
        into = whole.setdefault(choice["index"], {"text": "", "logprobs": {name: [] for name in choice["logprobs"]}})
        into["text"] += choice["text"]
        for name, array in choice["logprobs"].items():
            into["logprobs"][name] += array
    for index, choice in whole.items():
        check_echo(served, prompts[index // 2], choice, output)
    ends = [choice["index"] for choice in choices_with(events, "finish_reason")]
    assert sorted(ends) == list(range(6))
    assert sum(len(event["choices"]) for event in events) == 6 * (max(1, output) + 1)


async def test_an_echo_without_log_probabilities_needs_none(served: FakeCluster) -> None:
    _, body = await served.post(TEXT, {"prompt": "hello", "echo": True, "max_tokens": 0})
    assert [(choice["text"], choice["logprobs"]) for choice in body["choices"]] == [("hello", None)]
    _, body = await served.post(TEXT, {"prompt": "hello", "max_tokens": 0, "return_token_ids": True})
    assert body["choices"][0]["text"] == "" and body["choices"][0]["token_ids"] == []


async def test_a_request_without_output_never_reaches_decode(cluster: FakeCluster) -> None:
    asked = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0, "return_metrics": True}
    response, body = await cluster.post(TEXT, asked)
    assert response.headers["x-tandem-path"] == "prefill" == body["tandem"]["path"]
    assert response.headers["x-tandem-prefill"] == "prefill-0" and response.headers["x-tandem-decode"] == "none"
    prefill, decode = cluster.workers
    assert [sent.request.sampling.max_tokens for sent in prefill.got(Generate)] == [0]
    assert not prefill.got(Prefill) and not decode.got(Reserve) and not decode.got(Generate)


async def test_the_context_may_be_filled_by_a_prompt_without_output(cluster: FakeCluster) -> None:
    long = [40] * cluster.services.model.context_length
    response, _ = await cluster.post(TEXT, {"prompt": long, "max_tokens": 0, "echo": True, "logprobs": 0})
    assert response.status == 200
    for fields in ({"max_tokens": 1}, {"max_tokens": 0, "prompt": [*long, 40]}):
        response, body = await cluster.post(TEXT, {"prompt": long, **fields})
        assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"


async def test_prompts_with_log_probabilities_are_not_routed_by_what_is_cached(cluster: FakeCluster) -> None:
    await cluster.post(TEXT, {"prompt": PROMPT, "prompt_logprobs": 0, "max_tokens": 2})
    [sent] = cluster.workers[0].got(Prefill)
    assert sent.request.sampling.prompt_logprobs == 0 and sent.request.scored == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 20, "n": 16}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "n": 16, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 20, "n": 16, "stream": True}, "logprobs"),
        ({"prompt_logprobs": 0, "prompt": ["a" * 2000] * 8}, "prompt_logprobs"),
    ],
)
async def test_answers_with_too_many_log_probabilities_are_refused(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, fields: Fields, param: str
) -> None:
    monkeypatch.setattr(sampling, "MOST_LOGPROB_BYTES", 60_000)
    small = {"prompt": PROMPT, "max_tokens": 1}
    response, body = await cluster.post(TEXT, {**small, **fields})
    assert response.status == 400 and body["error"]["param"] == param, body
    response, _ = await cluster.post(TEXT, {**small, "prompt_logprobs": 1, "echo": True, "logprobs": 1})
    assert response.status == 200


# -- messages that are lost, and workers that die ---------------------------------------------------------------------


ASKED = {"prompt": PROMPT, "prompt_logprobs": 1, "max_tokens": 6, "return_token_ids": True}


@pytest.mark.parametrize("output", [0, 6])
async def test_lost_log_probabilities_are_asked_for_again(model: Path, output: int) -> None:
    """Whether decode's tokens find them missing, or heartbeats of the worker that has ended."""
    async with open_cluster(model) as cluster:
        prefill = await cluster.add("prefill", drop={PromptLogprobs})
        await cluster.add("decode")
        asked = asyncio.create_task(cluster.post(TEXT, {**ASKED, "max_tokens": output}))
        await until(lambda: prefill.got(ResendPrompt), "they are asked for")
        prefill.drop.clear()
        response, body = await asked
        assert response.status == 200 and body["usage"]["completion_tokens"] == output
        assert body["choices"][0]["prompt_logprobs"] == expected_field(cluster, PROMPT, 1)
        assert {sent.start for sent in prefill.got(ResendPrompt)} == {1}


async def test_a_request_is_placed_again_if_its_log_probabilities_are_gone(model: Path) -> None:
    async with open_cluster(model) as cluster:
        prefill = await cluster.add("prefill", drop={PromptLogprobs, Tokens})
        decode = await cluster.add("decode")
        asked = asyncio.create_task(cluster.post(TEXT, ASKED))
        await until(lambda: len([*prefill.got(Prefill), *decode.got(Generate)]) > 1, "it is placed again")
        prefill.drop.clear()
        response, body = await asked
        assert response.status == 200 and body["usage"]["completion_tokens"] == 6
        assert body["choices"][0]["prompt_logprobs"] == expected_field(cluster, PROMPT, 1)


async def test_a_retry_computes_only_what_is_missing(model: Path) -> None:
    """The first worker dies in the middle of the prompt: nothing is lost or shown twice."""
    async with open_cluster(model) as cluster:
        dying = await cluster.add("prefill", delay_s=30.0, drop={PromptLogprobs})
        await cluster.add("decode")
        asked = asyncio.create_task(cluster.stream(TEXT, {**ASKED, "echo": True, "logprobs": 1}))
        await until(lambda: dying.got(Prefill), "it is computed")
        [sent] = dying.got(Prefill)
        for start, end in ((1, 30), (1, 30), (25, 41)):
            dying.say(message_of(sent.request, sent.attempt, start, end))
        record = next(iter(cluster.dispatcher.records.values()))
        await until(lambda: record.progress.scored == 40, "a part has arrived")
        await cluster.add("prefill", name="heir")
        dying.stop()
        _, events = await asked
        [again] = cluster.workers[2].got(Prefill)
        assert again.request.scored == 40 and again.attempt == sent.attempt + 1
        first = events[0]["choices"][0]
        assert first["prompt_logprobs"] == expected_field(cluster, PROMPT, 1)
        check_echo(cluster, PROMPT, first, 1)


def message_of(request: Request, attempt: int, start: int, end: int, tops: int = 1) -> PromptLogprobs:
    span = oracle_prompt(request.prompt_tokens(), start, end, tops)
    columns = (span.logprobs, span.ranks, span.top_ids, span.top)
    return PromptLogprobs(request.id, attempt, start, *(column.tobytes() for column in columns))


async def test_messages_that_were_not_asked_for_are_dropped(model: Path) -> None:
    async with open_cluster(model) as cluster:
        prefill = await cluster.add("prefill", delay_s=0.3, drop={PromptLogprobs})
        await cluster.add("decode")
        asked = asyncio.create_task(cluster.post(TEXT, ASKED))
        await until(lambda: prefill.got(Prefill), "it is computed")
        [sent] = prefill.got(Prefill)
        prefill.say(message_of(sent.request, sent.attempt, 1, 20, tops=3))
        longer = [*PROMPT, 1, 2]
        span = oracle_prompt(longer, 90, 102, 1)
        columns = (each.tobytes() for each in (span.logprobs, span.ranks, span.top_ids, span.top))
        prefill.say(PromptLogprobs(sent.request.id, sent.attempt, 90, *columns))
        await until(lambda: cluster.dispatcher.gateway.bad_messages == 2, "both are bad")
        prefill.say(message_of(sent.request, sent.attempt + 1, 1, 20))  # of no attempt, and with a gap: no fault
        prefill.say(message_of(sent.request, sent.attempt, 50, 60))
        await until(lambda: prefill.got(ResendPrompt), "the gap is asked for")
        prefill.drop.clear()
        response, body = await asked
        assert response.status == 200
        assert body["choices"][0]["prompt_logprobs"] == expected_field(cluster, PROMPT, 1)
        assert cluster.dispatcher.gateway.bad_messages == 2
