"""The oracle engine with constrained outputs: its next token is one of those that masks allow, chosen by all KV bytes.

:func:`constrained_stream` computes the expected tokens with llguidance alone, without :mod:`common.grammar`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from common.core.ids import SequenceId, unpack_tokens
from common.core.request import SamplingParams
from common.core.sequence import Batch, Segment, StepResult, TokenLogprobs
from common.engine.restrictions import restricted
from common.grammar.errors import NOTHING_LEFT
from common.grammar.masks import Grammars, begin_masks
from common.grammar.matcher import Mask
from common.kv.storage.host import Table
from tests.fakes.oracle import OracleEngine, oracle_stream

TOKENIZER = Path(__file__).parents[2] / "common" / "builtin" / "model" / "tokenizer.json"
TOKENS, EOS = 2048, 0
"""Token ids of the built-in model, and the one that ends its outputs."""


class ConstrainedOracle(OracleEngine):
    """An :class:`OracleEngine` whose outputs are constrained; by default over the vocabulary of the built-in model.

    ``grammars`` belong to the engine, and cover its vocabulary of ``vocab_size`` ids."""

    def __init__(
        self, blocks: int, *args: Any, grammars: Grammars | None = None, vocab_size: int = TOKENS, **fields: Any
    ) -> None:
        super().__init__(blocks, *args, **fields)
        self.vocab_size = vocab_size
        self.grammars = Grammars(TOKENIZER, TOKENS, (EOS,)) if grammars is None else grammars
        self._masks: dict[SequenceId, Mask] = {}
        self._stuck: set[SequenceId] = set()
        """Sequences of the running step for which no token is left."""

    def step(self, batch: Batch) -> StepResult:
        sampled = [index for index, each in enumerate(batch.segments) if each.wants_token]
        if not any(batch.segments[index].sequence.masked for index in sampled):
            return super().step(batch)
        masks = begin_masks(self.grammars, batch, sampled)
        if masks is not None:
            masks.finish()
            self._masks = {batch.segments[index].sequence.id: row.mask for index, row in masks.ready.items()}
        result = super().step(batch)
        for index in sampled:
            if batch.segments[index].sequence.id in self._stuck:
                result.tokens[index], result.logprobs[index] = [], []
                result.refusals[index] = NOTHING_LEFT
        if masks is not None:
            masks.settle(result)
        self._masks.clear()
        self._stuck.clear()
        return result

    def _sample(self, segment: Segment, table: Table) -> list[int]:
        chosen, sequence = super()._sample(segment, table), segment.sequence
        if not (chosen and sequence.masked):
            return chosen
        mask = restricted(sequence, self._masks.get(sequence.id), self.vocab_size)
        if mask is None:  # that of the grammar is late, so nothing is sampled
            return chosen
        if not (ids := allowed(mask)):
            self._stuck.add(sequence.id)
            return chosen
        return [_pick(ids, token) for token in chosen]

    @staticmethod
    def _logprobs(segment: Segment, ids: list[int]) -> list[TokenLogprobs]:
        """Return the log-probabilities of the base class, and the token itself as the most likely one if one is
        wanted."""
        wanted, found = segment.sequence.request.sampling.logprobs, OracleEngine._logprobs(segment, ids)
        if not wanted:
            return found
        return [TokenLogprobs(each.logprob, (token,), (each.logprob,)) for token, each in zip(ids, found, strict=True)]

    def close(self) -> None:
        if self.grammars is not None:
            self.grammars.close()
        super().close()


def _pick(ids: list[int], token: int) -> int:
    """Return the one of the allowed ``ids`` that is sampled if the KV chooses ``token``."""
    return ids[(token * 7919) % len(ids)]


def allowed(mask: Mask) -> list[int]:
    """Return the token ids that ``mask`` allows, in ascending order."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


class Stream(NamedTuple):
    """The whole output of a choice. ``refused``: after these tokens its request fails, as no token is left."""

    tokens: list[int]
    refused: bool


def constrained_stream(prompt: list[int], sampling: SamplingParams, choice: int, vocabulary: LLTokenizer) -> Stream:
    """Return the output that a request with a grammar or other restrictions must get."""
    rules = _Rules(sampling, vocabulary)
    tokens = oracle_stream(prompt, sampling.seed, choice, sampling.max_tokens, rules.pick)
    return Stream(tokens, rules.refused and len(tokens) < sampling.max_tokens)


class _Rules:
    """Follows one output: a token is sampled among the allowed ones, then come those that the grammar forces."""

    def __init__(self, sampling: SamplingParams, vocabulary: LLTokenizer) -> None:
        self._sampling, self._ids = sampling, range(vocabulary.vocab_size)
        self._wanted = set(unpack_tokens(sampling.allowed_token_ids)) or self._ids
        self._matcher = matcher_of(sampling.grammar, vocabulary) if sampling.grammar else None
        self._over = False
        self.refused = False

    def pick(self, output: list[int], token: int) -> list[int]:
        """Return the tokens that follow ``output``; none if it has ended or no token is left."""
        if self._over or self.refused:
            return []
        ids = self._free(output, self._grammatical())
        if not ids:
            self.refused = True
            return []
        run = [_pick(ids, token)]
        self._follow(run[-1])
        while not self._over and (forced := self._forced()) is not None:
            if not self._free(output + run, [forced]):
                self.refused = True
                break
            run.append(forced)
            self._follow(forced)
        return run

    def _grammatical(self) -> Iterable[int]:
        """Return the ids that the grammar allows. An ending id is one of them where the grammar is complete."""
        if self._matcher is None:
            return self._ids
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        ids = set(allowed(mask)) - set(self._sampling.ending_token_ids)
        return sorted(ids.union(self._sampling.ending_token_ids if self._matcher.is_accepting() else ()))

    def _free(self, output: list[int], ids: Iterable[int]) -> list[int]:
        """Return those of ``ids`` that the other parameters allow after ``output``."""
        if not self._sampling.restricts:
            return [*ids]
        wanted, words = self._wanted, self._sampling.bad_words
        ends = {word: tuple(output[len(output) - len(word) + 1 :]) for word in words if len(word) <= len(output) + 1}
        banned = {word[-1] for word, end in ends.items() if end == word[:-1]}
        return [token for token in ids if token in wanted and token not in banned]

    def _forced(self) -> int | None:
        """Return the next token if the grammar leaves no choice: its text, or an end."""
        if self._matcher is None:
            return None
        if self._matcher.is_stopped():
            return self._sampling.ending_token_ids[0]
        following = self._matcher.compute_ff_tokens()[:1]
        return None if not following or following[0] in self._sampling.ending_token_ids else following[0]

    def _follow(self, token: int) -> None:
        self._over = token in self._sampling.ending_token_ids
        if self._matcher is not None and not self._over:
            assert self._matcher.consume_token(token), self._matcher.get_error()


def matcher_of(grammar: str, vocabulary: LLTokenizer) -> LLMatcher:
    """Return a matcher of ``grammar`` at its start."""
    return _start(grammar, vocabulary).deep_copy()


@functools.lru_cache(64)
def _start(grammar: str, vocabulary: LLTokenizer) -> LLMatcher:
    return LLMatcher(vocabulary, grammar, log_level=0)


@functools.cache
def _vocabulary() -> LLTokenizer:
    return LLTokenizer(TOKENIZER.read_text(encoding="utf-8"), n_vocab=TOKENS, eos_token=EOS)


def text_of(ids: list[int]) -> str:
    """Return the text of token ids of the built-in model."""
    return _vocabulary().decode_str(ids)
