"""Grammars tried out on texts, with the built-in model's tokenizer."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

import common.builtin
from coordinator.grammar.checks import screen
from coordinator.grammar.limits import LIMITS
from coordinator.grammar.task import Answer, Task, Verdict
from coordinator.grammar.vocabulary import ModelVocabulary

DIRECTORY = Path(common.builtin.__file__).parent / "model"
VOCAB, END_IDS = 2048, (7, 1)


@functools.cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer(str(DIRECTORY / "tokenizer.json"), n_vocab=VOCAB, eos_token=list(END_IDS))


@functools.cache
def vocabulary() -> ModelVocabulary:
    return ModelVocabulary(tokenizer())


def verdict(task: Task) -> Verdict:
    return screen(task, tokenizer(), vocabulary(), LIMITS)


def grammar(task: Task) -> str:
    """Return the grammar of ``task``, which must be possible."""
    made = verdict(task)
    assert not made.error, made
    return made.grammar


def answer(kind: Any, value: Any = None, **options: Any) -> str:
    """Return the grammar of a constraint."""
    return grammar(Task(Answer(kind, value, **options)))


def error(kind: Any, value: Any = None, **options: Any) -> Verdict:
    """Return the error of a constraint that cannot be obeyed."""
    made = verdict(Task(Answer(kind, value, **options)))
    assert made.error and not made.grammar, made
    return made


@functools.lru_cache(maxsize=8)
def _compiled(text: str) -> LLMatcher:
    made = LLMatcher(tokenizer(), text, log_level=0, limits=LIMITS)
    assert not made.is_error(), made.get_error()
    return made


def matcher(text: str) -> LLMatcher:
    """Return a matcher of the grammar ``text`` at its beginning."""
    return _compiled(text).deep_copy()


def accepts(grammar: str, text: str) -> bool:
    """Return whether ``text``, in which control tokens may be spelled out, matches as a whole."""
    return begins(grammar, text, whole=True)


def begins(grammar: str, text: str, *, whole: bool = False) -> bool:
    """Return whether ``text`` is the beginning of a match."""
    state = matcher(grammar)
    ids = tokenizer().tokenize_str(text, parse_special=True)
    return state.try_consume_tokens(ids) == len(ids) and (state.is_accepting() or not whole)


def allowed(state: LLMatcher) -> set[int]:
    """Return the tokens that may come next."""
    bits = int.from_bytes(state.compute_bitmask(), "little")
    assert not state.is_error(), state.get_error()
    return {token for token in range(VOCAB) if bits >> token & 1}


@functools.cache
def _closing() -> list[int]:
    return [tokenizer().tokenize_str(text)[0] for text in '"}],:']


def random_match(grammar: str, rng: random.Random, most: int = 400) -> str | None:
    """Return a random text that matches, None if it is not complete after ``most`` tokens. Half of the choices prefer
    the marks that bring JSON to its end."""
    state = matcher(grammar)
    chosen: list[int] = []
    for _ in range(most):
        options = allowed(state)
        if options & set(END_IDS):
            return tokenizer().decode_str(chosen)
        preferred = [token for token in _closing() if token in options]
        token = rng.choice(preferred if preferred and rng.random() < 0.5 else sorted(options))
        assert state.consume_token(token), state.get_error()
        chosen.append(token)
    return None
