"""Requests of clients that verify their answers: plain ones, constrained ones, and ones about their prompts."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from common.core.ids import pack_tokens
from common.core.request import SamplingParams
from coordinator.grammar.build import build
from coordinator.grammar.task import Answer, Task
from coordinator.grammar.vocabulary import ModelVocabulary
from tests.fakes.checkpoint import EOS, tokenizer_json
from tests.fakes.constrained import constrained_stream
from tests.fakes.constraints import Constraint, vocabulary
from tests.fakes.oracle import oracle_prompt, oracle_stream

JSON = {"Content-Type": "application/json"}
BAD_WORDS = ["ab", "cde", "h"]
clock = time.monotonic


@functools.cache
def letters() -> tuple[int, ...]:
    """Return the token ids of some letters, which restricted outputs consist of."""
    return tuple(map(Tokenizer.from_str(tokenizer_json()).token_to_id, "abcdefgh"))


@functools.cache
def bad_words() -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of ``BAD_WORDS``, each bare and behind a space."""
    tokenizer = Tokenizer.from_str(tokenizer_json())
    texts = (text for word in BAD_WORDS for text in (word, f" {word}"))
    return tuple(dict.fromkeys(tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts))


def grammar_of(constraint: Constraint) -> str:
    """Return the grammar that the coordinator makes of a constraint."""
    return _grammar(constraint.field, json.dumps(constraint.value))


@functools.cache
def _grammar(field: str, value: str) -> str:
    answer = Answer("json_schema" if field == "json" else field, json.loads(value))  # type: ignore[arg-type]
    text, _ = build(Task(answer), ModelVocabulary(vocabulary()))
    return text


def _without_text(entries: dict[str, Any] | None) -> dict[str, Any] | None:
    return entries and {token: {name: of[name] for name in ("logprob", "rank")} for token, of in entries.items()}


def prompt_logprobs(prompt: list[int]) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt as in an answer, without the texts of tokens."""
    span = oracle_prompt(prompt, 1, len(prompt), 0)
    found = zip(prompt[1:], span.logprobs, span.ranks, strict=True)
    return [None, *({str(token): {"logprob": logprob, "rank": rank}} for token, logprob, rank in found)]


@dataclass
class ChaosRequest:
    """A request to POST /v1/completions and its answer. Times are monotonic seconds.

    ``constraint`` is what the output must match; ``restricted`` means few allowed ids and some bad words, ``scores``
    log-probabilities of the prompt. ``sent`` is set when the body has been sent, ``came`` with each token; ``left`` is
    the phase in which the client disconnected, or empty."""

    prompt: list[int]
    max_tokens: int
    seed: int
    stream: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    constraint: Constraint | None = None
    restricted: bool = False
    scores: bool = False
    status: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    prompt_logprobs: list[dict[str, Any] | None] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    error: str = ""
    done: bool = False
    left: str = ""
    sent: asyncio.Event = field(default_factory=asyncio.Event)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    started_at: float = 0.0
    ended_at: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)

    @functools.cached_property
    def wanted(self) -> list[int]:
        if self.constraint is None and not self.restricted:
            return oracle_stream(self.prompt, self.seed, 0, self.max_tokens)
        return constrained_stream(self.prompt, self._sampling(), 0, vocabulary()).tokens

    def _sampling(self) -> SamplingParams:
        """Return what the coordinator makes of the request."""
        grammar = "" if self.constraint is None else grammar_of(self.constraint)
        ids, words = (letters(), bad_words()) if self.restricted else ((), ())
        return SamplingParams(
            self.max_tokens, self.seed, eos_token_ids=(EOS,), ignore_eos=self.constraint is None, grammar=grammar,
            allowed_token_ids=pack_tokens(ids), bad_words=words,
        )  # fmt: skip

    def _is_as_wanted(self) -> bool:
        """Return whether what has arrived beside the token ids agrees with them."""
        scored = self.scores and bool(self.ids or (self.done and not self.error))
        if scored and list(map(_without_text, self.prompt_logprobs)) != prompt_logprobs(self.prompt):
            return False
        if self.constraint is None:
            return True
        text = vocabulary().decode_str([token for token in self.ids if token != EOS])
        if self.done and not self.error and "\ufffd" not in text and self.text != text:
            return False
        return not self.constraint.object_to(self.ids, grammar_of(self.constraint), ended=self.ids[-1:] == [EOS])

    def verdict(self) -> str:
        """Judge the answer: ``exact``, ``wrong`` (a token differs, whatever else happened), ``left WHEN`` (the client
        disconnected), ``error CODE`` or ``cut`` (the stream ended without an end or an error)."""
        wanted = self.wanted
        if self.ids != wanted[: len(self.ids)] or not self._is_as_wanted():
            return "wrong"
        if self.left:
            return f"left {self.left}"
        if self.error:
            return f"error {self.error}"
        if not self.done:
            return "cut"
        return "exact" if len(self.ids) == len(wanted) else "wrong"

    def largest_gap(self, since: float) -> float:
        """Return the longest time without a token from ``since`` (or the start, if later) to the end, in seconds."""
        since = max(since, self.started_at)
        marks = [since, *(at for at in self.arrivals if at > since), max(self.ended_at, since)]
        return max(after - before for before, after in itertools.pairwise(marks))

    def body(self) -> bytes:
        """Return the request body as JSON."""
        fields: dict[str, Any] = {
            "model": "oracle", "prompt": self.prompt, "max_tokens": self.max_tokens, "seed": self.seed,
            "ignore_eos": self.constraint is None, "stream": self.stream, "return_token_ids": True, **self.extra,
        }  # fmt: skip
        if self.constraint is not None:
            fields["structured_outputs"] = {self.constraint.field: self.constraint.value}
        if self.restricted:
            fields |= {"allowed_token_ids": letters(), "bad_words": BAD_WORDS}
        if self.scores:
            fields["prompt_logprobs"] = 0
        return json.dumps(fields).encode()

    async def send(self, session: aiohttp.ClientSession) -> ChaosRequest:
        self.started_at = clock()
        try:
            asked = session.post("/v1/completions", data=self.body(), headers=JSON, trace_request_ctx=self)
            async with asked as response:
                self.status, self.headers = response.status, dict(response.headers)
                if self.stream and response.status == 200:
                    await self._read(response)
                else:
                    self._take(await response.json())
                    self.done = True
        except (aiohttp.ClientError, ConnectionError):
            pass  # cut: ``done`` is False
        finally:
            self.ended_at = clock()
        return self

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                self.done = True
            elif line.startswith(b"data: "):
                self._take(json.loads(line[6:]))

    def _take(self, body: dict[str, Any]) -> None:
        if "error" in body:
            self.error = body["error"]["code"] or body["error"]["type"]
            return
        for choice in body["choices"]:
            ids = choice.get("token_ids") or []
            self.ids += ids
            self.text += choice["text"]
            self.prompt_logprobs = choice.get("prompt_logprobs") or self.prompt_logprobs
            self.arrivals += [clock()] * len(ids)
            self.came.set()
