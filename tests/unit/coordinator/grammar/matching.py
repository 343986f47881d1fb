"""Grammars tried out on texts, with the built-in model's tokenizer."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

import common.builtin
from common.grammar.limits import parser_limits
from coordinator.grammar.checks import screen
from coordinator.grammar.task import Answer, Task, Verdict
from coordinator.grammar.vocabulary import ModelVocabulary

DIRECTORY = Path(common.builtin.__file__).parent / "model"
VOCAB, END_IDS = 2048, (7, 1)
_DIGITS = bytes.maketrans(b"01", b"\0\1")


@dataclass(frozen=True)
class Model:
    """A tokenizer with which grammars are tried out."""

    tokenizer: LLTokenizer
    vocabulary: ModelVocabulary

    def verdict(self, task: Task) -> Verdict:
        return screen(task, self.tokenizer, self.vocabulary, parser_limits())

    def grammar(self, task: Task) -> str:
        """Return the grammar of ``task``, which must be possible."""
        made = self.verdict(task)
        assert not made.error, made
        return made.grammar

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher of ``grammar`` at its beginning."""
        return _compiled(self, grammar).deep_copy()

    def ids(self, text: str) -> list[int]:
        """Return the tokens of ``text``, in which control tokens may be spelled out."""
        return self.tokenizer.tokenize_str(text, parse_special=True)

    def begins(self, grammar: str, text: str, *, whole: bool = False) -> bool:
        """Return whether ``text`` is the beginning of a match."""
        state, ids = self.matcher(grammar), self.ids(text)
        return state.try_consume_tokens(ids) == len(ids) and (state.is_accepting() or not whole)

    def accepts(self, grammar: str, text: str) -> bool:
        """Return whether ``text`` matches as a whole."""
        return self.begins(grammar, text, whole=True)

    def allowed(self, state: LLMatcher) -> set[int]:
        """Return the tokens that may come next."""
        bits = int.from_bytes(state.compute_bitmask(), "little")
        assert not state.is_error(), state.get_error()
        flags = f"{bits:b}"[::-1].encode().translate(_DIGITS)
        return set(itertools.compress(range(self.tokenizer.vocab_size), flags))

    def random_match(self, grammar: str, rng: random.Random, most: int = 400) -> str | None:
        """Return a random text that matches, None if it is not complete after ``most`` tokens. Half of the choices
        prefer the marks that bring JSON to its end."""
        state = self.matcher(grammar)
        closing = [self.ids(text)[0] for text in '"}],:<)']
        chosen: list[int] = []
        for _ in range(most):
            options = self.allowed(state)
            if options & set(self.tokenizer.eos_tokens):
                return self.tokenizer.decode_str(chosen)
            preferred = [token for token in closing if token in options]
            token = rng.choice(preferred if preferred and rng.random() < 0.5 else sorted(options))
            assert state.consume_token(token), state.get_error()
            chosen.append(token)
        return None


@functools.lru_cache(maxsize=8)
def _compiled(model: Model, grammar: str) -> LLMatcher:
    made = LLMatcher(model.tokenizer, grammar, log_level=0, limits=parser_limits())
    assert not made.is_error(), made.get_error()
    return made


@functools.cache
def builtin() -> Model:
    """Return the built-in model's tokenizer."""
    tokenizer = LLTokenizer(str(DIRECTORY / "tokenizer.json"), n_vocab=VOCAB, eos_token=list(END_IDS))
    return Model(tokenizer, ModelVocabulary(tokenizer))


def verdict(task: Task) -> Verdict:
    return builtin().verdict(task)


def answer(kind: Any, value: Any = None, **options: Any) -> str:
    """Return the grammar of a constraint."""
    return builtin().grammar(Task(Answer(kind, value, **options)))


def error(kind: Any, value: Any = None, **options: Any) -> Verdict:
    """Return the error of a constraint that cannot be obeyed."""
    made = verdict(Task(Answer(kind, value, **options)))
    assert made.error and not made.grammar, made
    return made


def accepts(grammar: str, text: str) -> bool:
    return builtin().accepts(grammar, text)


def begins(grammar: str, text: str) -> bool:
    return builtin().begins(grammar, text)


def random_match(grammar: str, rng: random.Random) -> str | None:
    return builtin().random_match(grammar, rng)
