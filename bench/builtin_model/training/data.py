"""Batches: a pure function of seed and step, so that a run can be resumed at any step and made again anywhere."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import NamedTuple

import torch

from bench.builtin_model.corpus import LATER_SHARES, SHARES, conversation
from bench.builtin_model.training.recipe import Recipe
from bench.builtin_model.training.tokenizer import CONTEXT, Encoder

Row = tuple[list[int], list[bool]]


class Piece(NamedTuple):
    """Rows of about equal length, padded on the right: causal attention never sees the padding."""

    ids: torch.Tensor  # [rows, length]
    weights: torch.Tensor  # [rows, length]: of predicting this token


class Batches:
    """``batches[step]``, with the next one made in the background."""

    def __init__(self, encoder: Encoder, recipe: Recipe) -> None:
        self._encoder, self._recipe = encoder, recipe
        self._pool = ThreadPoolExecutor(1)
        self._next: tuple[int, Future[list[Piece]]] | None = None

    def __getitem__(self, step: int) -> list[Piece]:
        ready = self._next
        pieces = ready[1].result() if ready and ready[0] == step else self._make(step)
        self._next = (step + 1, self._pool.submit(self._make, step + 1))
        return pieces

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _make(self, step: int) -> list[Piece]:
        """Conversations are drawn independently and only then sorted by length: little padding, no bias."""
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
        """Pieces are limited in size, and a piece that is worth its overhead is not padded much further."""
        uneven = length > 1.3 * len(group[0][0]) and len(group) * length > self._recipe.piece_tokens // 4
        return uneven or (len(group) + 1) * length > self._recipe.piece_tokens

    def _piece(self, rows: list[Row]) -> Piece:
        length = max(len(ids) for ids, _ in rows)
        ids = torch.full((len(rows), length), self._encoder.pad)
        weights = torch.zeros(len(rows), length)
        for at, (row, spoken) in enumerate(rows):
            ids[at, : len(row)] = torch.tensor(row)
            weights[at, : len(row)] = torch.tensor([1.0 if said else self._recipe.other_weight for said in spoken])
        return Piece(ids, weights)
