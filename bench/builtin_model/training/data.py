"""Training batches: a pure function of seed and step, so that a run can be resumed at any step and reproduced."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import NamedTuple

import torch

from bench.builtin_model.corpus import LATER_SHARES, SHARES, conversation
from bench.builtin_model.training.recipe import Recipe
from bench.builtin_model.training.tokenizer import CONTEXT, Encoder

Row = tuple[list[int], list[bool]]


class PaddedRows(NamedTuple):
    """Rows of similar length, padded on the right, where causal attention never sees the padding."""

    ids: torch.Tensor  # [rows, length]
    weights: torch.Tensor  # [rows, length]: loss weight of predicting this token


class Batches:
    """``batches[step]`` is the batch of a step; the next one is prepared in a background thread."""

    def __init__(self, encoder: Encoder, recipe: Recipe) -> None:
        self._encoder, self._recipe = encoder, recipe
        self._pool = ThreadPoolExecutor(1)
        self._next: tuple[int, Future[list[PaddedRows]]] | None = None

    def __getitem__(self, step: int) -> list[PaddedRows]:
        ready = self._next
        pieces = ready[1].result() if ready and ready[0] == step else self._make(step)
        self._next = (step + 1, self._pool.submit(self._make, step + 1))
        return pieces

    def close(self) -> None:
        """Wait for the batch that is being prepared, and end the background thread."""
        self._pool.shutdown(cancel_futures=True)

    def _make(self, step: int) -> list[PaddedRows]:
        """Return the pieces of a step's batch. Conversations are drawn independently and only then sorted by length,
        which saves padding without a bias."""
        rng, rows, total = Random(f"{self._recipe.seed} {step}"), [], 0
        shares = SHARES if step < self._recipe.later * self._recipe.steps else LATER_SHARES
        while total < self._recipe.batch_tokens:
            ids, spoken = self._encoder.example(conversation(rng, shares))
            rows.append((ids[:CONTEXT], spoken[:CONTEXT]))
            total += len(rows[-1][0])
        rows.sort(key=lambda row: len(row[0]))
        pieces, group = [], list[Row]()
        for row in rows:
            if group and self._is_full(group, len(row[0])):
                pieces.append(self._piece(group))
                group = []
            group.append(row)
        return [*pieces, self._piece(group)]

    def _is_full(self, group: list[Row], length: int) -> bool:
        """Return whether a row of ``length`` must begin a new piece: the piece would exceed its size limit, or it is
        large enough already and the row would add much padding."""
        uneven = length > 1.3 * len(group[0][0]) and len(group) * length > self._recipe.piece_tokens // 4
        return uneven or (len(group) + 1) * length > self._recipe.piece_tokens

    def _piece(self, rows: list[Row]) -> PaddedRows:
        length = max(len(ids) for ids, _ in rows)
        ids = torch.full((len(rows), length), self._encoder.pad)
        weights = torch.zeros(len(rows), length)
        for at, (row, spoken) in enumerate(rows):
            ids[at, : len(row)] = torch.tensor(row)
            weights[at, : len(row)] = torch.tensor([1.0 if said else self._recipe.other_weight for said in spoken])
        return PaddedRows(ids, weights)
