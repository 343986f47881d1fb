"""The oracle engine with grammars: its next token is one of those that a mask allows, chosen by all KV bytes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLTokenizer

from common.core.sequence import Batch, Segment, StepResult, TokenLogprobs
from common.grammar.masks import Grammars, StepMasks, begin_masks
from common.kv.storage.host import Table
from tests.fakes.oracle import OracleEngine

TOKENIZER = Path(__file__).parents[2] / "common" / "builtin" / "model" / "tokenizer.json"
TOKENS, EOS = 2048, 0
"""Token ids of the built-in model, and the one that ends its outputs."""


class ConstrainedOracle(OracleEngine):
    """An :class:`OracleEngine` over the vocabulary of the built-in model, whose outputs are constrained."""

    def __init__(self, blocks: int, *args: Any, tokenizer: Path = TOKENIZER, **fields: Any) -> None:
        super().__init__(blocks, *args, **fields)
        self.vocab_size = TOKENS
        self.grammars = Grammars(tokenizer, TOKENS, (EOS,))
        self._masks: StepMasks | None = None

    def step(self, batch: Batch) -> StepResult:
        sampled = [index for index, segment in enumerate(batch.segments) if segment.wants_token]
        masks = begin_masks(self.grammars, batch, sampled)
        self._allowed = {}
        if masks is not None:
            masks.finish()
            for index, row in masks.ready.items():
                self._allowed[batch.segments[index].sequence.id] = allowed(row.mask)
        result = super().step(batch)
        if masks is not None:
            masks.settle(result)
        return result

    def _sample(self, segment: Segment, table: Table) -> list[int]:
        chosen = super()._sample(segment, table)
        ids = self._allowed.get(segment.sequence.id)
        return chosen if ids is None or not chosen else [ids[(token * 7919) % len(ids)] for token in chosen]

    @staticmethod
    def _logprobs(segment: Segment, ids: list[int]) -> list[TokenLogprobs]:
        wanted = segment.sequence.request.sampling.logprobs
        if wanted is None:
            return []
        return [TokenLogprobs(-1.0 - token, *(((token,), (-1.0 - token,)) if wanted else ())) for token in ids]

    def close(self) -> None:
        if self.grammars is not None:
            self.grammars.close()
        super().close()


def allowed(mask: np.ndarray) -> list[int]:
    """Return the token ids that ``mask`` allows."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@functools.cache
def _vocabulary() -> LLTokenizer:
    return LLTokenizer(TOKENIZER.read_text(encoding="utf-8"), n_vocab=TOKENS, eos_token=EOS)


def text_of(ids: list[int]) -> str:
    """Return the text of token ids."""
    return _vocabulary().decode_str(ids)
