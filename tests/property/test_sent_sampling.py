"""Every request that the coordinator accepts can be read by a worker, up to the maximum of each field."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.checkpoint.files import Checkpoint
from common.core.errors import RequestError
from common.core.ids import RequestId, pack_tokens
from common.core.request import MAX_BAD_WORD_TOKENS, MAX_CHOICES, MAX_GRAMMAR, MAX_LOGPROBS, Request, SamplingParams
from common.net.messages import Peer, Prefill, ToWorker
from common.net.wire import decode, encode
from coordinator.api.openai import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, MAX_BIASES, MAX_STOP_IDS, parse_completion
from coordinator.api.sampling import SamplingRules
from coordinator.text.tokenizer import TextModel

VOCAB, CONTEXT = 260_000, 1 << 20
WIDE = "\N{MUSICAL SYMBOL G CLEF}"
"""A character of four bytes in UTF-8, and of four tokens here."""


def _tokens_of(words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(text.encode()) for word in words for text in (word, f" {word}"))


def _rules() -> SamplingRules:
    checkpoint = SimpleNamespace(vocab_size=VOCAB, eos_token_ids=(1, 2, 3), generation_config={})
    text = SimpleNamespace(bad_words=_tokens_of, control_tokens=lambda stops: range(100, 100 + len(stops)))
    return SamplingRules(cast(Checkpoint, checkpoint), cast(TextModel, text), lambda: CONTEXT)


RULES = _rules()
FIELDS: dict[str, tuple[Callable[[], Any], ...]] = {
    "n": (lambda: MAX_CHOICES,),
    "max_tokens": (lambda: 0, lambda: CONTEXT - 3),
    "seed": (lambda: -(1 << 63), lambda: (1 << 63) - 1),
    "temperature": (lambda: 2,),
    "top_p": (lambda: 0, lambda: 1),
    "top_k": (lambda: -1, lambda: 1 << 31),
    "min_p": (lambda: 1,),
    "repetition_penalty": (lambda: 0.01, lambda: 100),
    "frequency_penalty": (lambda: -2,),
    "presence_penalty": (lambda: 2,),
    "logit_bias": (lambda: dict.fromkeys(map(str, range(VOCAB - MAX_BIASES, VOCAB)), -100),),
    "stop_token_ids": (lambda: list(range(VOCAB - MAX_STOP_IDS, VOCAB)),),
    "stop": (lambda: [WIDE * 1024] * 16,),
    "logprobs": (lambda: 0, lambda: MAX_LOGPROBS),
    "prompt_logprobs": (lambda: MAX_LOGPROBS,),
    "allowed_token_ids": (lambda: list(range(VOCAB)), lambda: [VOCAB - 1] * (1 << 20)),
    "bad_words": (
        lambda: ["x" * MAX_BAD_WORD_CHARS] * MAX_BAD_WORDS,
        lambda: [WIDE * 255 + str(at % 10) for at in range(MAX_BAD_WORDS)],
    ),
    "cache_salt": (lambda: WIDE * 1024,),
    "priority": (lambda: -(1 << 31), lambda: (1 << 31) - 1),
    "ignore_eos": (lambda: True,),
}
"""Fields that reach workers, each with its extreme values."""
GRAMMARS = ("", "start: /x*/ //" + "x" * (MAX_GRAMMAR - 14), WIDE * MAX_GRAMMAR)


def survives(fields: dict[str, Any], grammar: str) -> SamplingParams:
    """Send a request with ``fields`` to a worker, and return what it reads."""
    options = parse_completion({"prompt": [5, 6, 7], "stream": True, "max_tokens": 2, **fields}).options
    sampling = RULES.params(options, 3, "prompt", None, options.n, grammar)
    request = Request(
        id=RequestId(bytes(16)),
        prompt=pack_tokens([5, 6, 7]),
        sampling=sampling,
        n=options.n,
        cache_salt=options.cache_salt,
        priority=options.priority,
    )
    peer = Peer("decode-0", "00ff00ff00ff00ff", "tcp://127.0.0.1:5555", "boot/ipc:net/0", "float32")  # type: ignore[arg-type]
    message = Prefill(request, 1, peer)
    assert decode(encode(message), ToWorker) == message
    return sampling


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_at_its_maximum_reaches_workers(name: str) -> None:
    for value in FIELDS[name]:
        survives({name: value()}, "")


@pytest.mark.parametrize("grammar", GRAMMARS, ids=["none", "ASCII", "four bytes per character"])
def test_the_longest_grammar_reaches_workers(grammar: str) -> None:
    assert survives({}, grammar).grammar == grammar


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sets(st.sampled_from(sorted(FIELDS))), st.sampled_from(GRAMMARS), st.data())
def test_all_fields_together_reach_workers(names: set[str], grammar: str, data: st.DataObject) -> None:
    survives({name: data.draw(st.sampled_from(FIELDS[name]))() for name in sorted(names)}, grammar)


def test_every_field_at_its_maximum_at_once() -> None:
    survives({name: values[-1]() for name, values in FIELDS.items()}, GRAMMARS[-1])


def test_a_bad_word_of_too_many_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match=f"1025 tokens, at most {MAX_BAD_WORD_TOKENS}"):
        survives({"bad_words": [WIDE * MAX_BAD_WORD_CHARS]}, "")
