"""Asks for one feature (``tests/e2e/features.py``) and returns its answer, whole or put together from a stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.e2e.features import Feature, Fields
from tests.e2e.system import ApiClient, events

TOLERANCE = 1e-4
"""Largest difference between two log-probabilities of the same token."""
RANKS = 3
"""Largest difference between two ranks of the same prompt token: tokens are often almost equally unlikely."""


@dataclass
class FeatureChoice:
    """One choice. ``calls``: name and arguments of each tool call. ``logprobs``: as in the body. ``pieces``: what each
    chunk of a stream adds to the content."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    prompt_logprobs: list[Any] | None = None
    pieces: list[str] = field(default_factory=list, compare=False)


@dataclass
class FeatureAnswer:
    """An answer."""

    prompt: list[int]
    choices: list[FeatureChoice]
    usage: Fields
    path: str


async def ask(client: ApiClient, feature: Feature, *, stream: bool) -> FeatureAnswer:
    """Send the request of ``feature``; AssertionError unless its answer is complete."""
    path = "/v1/completions" if "prompt" in feature.fields else "/v1/chat/completions"
    fields = {**feature.fields, "return_token_ids": True}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    async with await client.post(path, **fields) as response:
        assert response.status == 200, await response.text()
        answer = FeatureAnswer([], [], {}, response.headers["x-tandem-path"])
        if stream:
            await _read_stream(answer, response)
        else:
            _read_body(answer, await response.json())
    return answer


def _read_body(answer: FeatureAnswer, body: Fields) -> None:
    answer.usage = body["usage"]
    answer.prompt = body.get("prompt_token_ids") or body["choices"][0]["prompt_token_ids"]
    for part in body["choices"]:
        choice = FeatureChoice()
        _add(choice, part, part.get("message") or part)
        choice.token_ids = part["token_ids"]
        choice.prompt_logprobs = part.get("prompt_logprobs") or body.get("prompt_logprobs")
        answer.choices.append(choice)


async def _read_stream(answer: FeatureAnswer, response: aiohttp.ClientResponse) -> None:
    async for event in events(response):
        assert "error" not in event, event
        answer.usage = event.get("usage") or answer.usage
        answer.prompt = event.get("prompt_token_ids") or answer.prompt
        for part in event["choices"]:
            while len(answer.choices) <= part["index"]:
                answer.choices.append(FeatureChoice())
            choice = answer.choices[part["index"]]
            assert choice.finish_reason is None, "a chunk after the finish reason"
            answer.prompt = part.get("prompt_token_ids") or answer.prompt
            scores = part.get("prompt_logprobs") or event.get("prompt_logprobs")
            choice.prompt_logprobs = choice.prompt_logprobs or scores
            choice.token_ids += part.get("token_ids", [])
            _add(choice, part, part.get("delta") if "delta" in part else part)
            choice.pieces.append((part.get("delta") or part).get("content") or part.get("text") or "")


def _add(choice: FeatureChoice, part: Fields, message: Mapping[str, Any]) -> None:
    choice.text += message.get("content") or message.get("text") or ""
    choice.reasoning += message.get("reasoning_content") or ""
    for at, call in enumerate(message.get("tool_calls") or ()):
        index = call.get("index", at)
        assert index <= len(choice.calls), f"call {index} before call {len(choice.calls)}"
        if index == len(choice.calls):
            assert call["id"] and call["type"] == "function"
            choice.calls.append([call["function"]["name"], ""])
        choice.calls[index][1] += call["function"]["arguments"]
    choice.finish_reason = part["finish_reason"]
    for name, values in (part["logprobs"] or {}).items():
        choice.logprobs.setdefault(name, []).extend(values or ())


def check_same(answer: FeatureAnswer, other: FeatureAnswer) -> None:
    """Check that two answers are equal, with TOLERANCE for log-probabilities."""
    assert answer.prompt == other.prompt
    assert answer.usage["completion_tokens"] == other.usage["completion_tokens"]
    assert len(answer.choices) == len(other.choices)
    for index, (one, two) in enumerate(zip(answer.choices, other.choices, strict=True)):
        assert one.token_ids == two.token_ids, f"choice {index}"
        assert (one.text, one.reasoning, one.calls) == (two.text, two.reasoning, two.calls), f"choice {index}"
        assert one.finish_reason == two.finish_reason
        _check_near(one.logprobs, two.logprobs, f"choice {index} logprobs")
        _check_near(one.prompt_logprobs, two.prompt_logprobs, f"choice {index} prompt_logprobs")


def _check_near(one: Any, two: Any, where: str) -> None:
    """Compare JSON values; numbers may differ by TOLERANCE, ranks by RANKS."""
    if isinstance(one, dict) and isinstance(two, dict):
        assert one.keys() == two.keys(), f"{where}: {sorted(one)} and {sorted(two)}"
        for name, value in one.items():
            _check_near(value, two[name], f"{where}.{name}")
    elif isinstance(one, list) and isinstance(two, list):
        assert len(one) == len(two), f"{where}: {len(one)} and {len(two)} entries"
        for at, value in enumerate(one):
            _check_near(value, two[at], f"{where}[{at}]")
    elif isinstance(one, float) and isinstance(two, float):
        assert abs(one - two) <= TOLERANCE, f"{where}: {one} and {two}"
    elif where.endswith(".rank"):
        assert abs(one - two) <= RANKS, f"{where}: {one} and {two}"
    else:
        assert one == two, f"{where}: {one!r} and {two!r}"
