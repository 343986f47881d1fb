"""How often each token occurs in the sequences that have penalties, as tensors on the device of the logits.

A sequence has a slot. Its whole history is uploaded once, when it gets the slot; from then on each step adds the one
token that is new, on the device. Must not know logits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from common.core.sequence import Sequence as Tokens

NO_SLOT = 0
"""The slot of all rows without penalties; its counts stay zero."""
_FIRST_SLOTS = 8


class Rebuild(NamedTuple):
    """A slot that must be filled anew, with the token ids ``prompt`` and ``output`` of its sequence."""

    slot: int
    prompt: list[int]
    output: list[int]


class Placed(NamedTuple):
    """The slots of a step's sequences, for each whether its last token is still to be counted (1 or 0), and the slots
    that must be filled first."""

    slots: list[int]
    grows: list[int]
    rebuilds: list[Rebuild]


@dataclass(slots=True)
class _CountedSequence:
    """A sequence with a slot, of whose tokens the first ``counted`` are in the counts."""

    sequence: Tokens
    slot: int
    counted: int


class TokenCounts:
    """``output`` int32 [slots + 1, vocab] counts the output tokens of each slot's sequence, ``prompt`` bool [slots + 1,
    vocab] marks those of its prompt. There are as many slots as one step has needed, doubled when they run out."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._entries: OrderedDict[int, _CountedSequence] = OrderedDict()
        """By id(sequence), the least recently used first."""
        self._free: list[int] = []
        self._slots = 0
        self.output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    # -- on the host --------------------------------------------------------------------------------------------------

    def place(self, sequences: Sequence[Tokens]) -> Placed:
        """Give each of ``sequences``, which are distinct, a slot, and count all their tokens as done: the caller
        fills, then grows the slots. Sequences that are not in this step may lose theirs."""
        known = [sequence for sequence in sequences if id(sequence) in self._entries]
        for sequence in known:
            self._entries.move_to_end(id(sequence))
        self._make_room(len(sequences) - len(known), len(known))
        placed = Placed([], [], [])
        for sequence in sequences:
            if (entry := self._entries.get(id(sequence))) is None:
                entry = self._entries[id(sequence)] = _CountedSequence(sequence, self._free.pop(), -1)
            length = len(sequence.tokens)
            grows = entry.counted == length - 1 >= sequence.prompt_length
            if not grows and entry.counted != length:
                placed.rebuilds.append(Rebuild(entry.slot, sequence.tokens[: sequence.prompt_length], sequence.output))
            entry.counted = length
            placed.slots.append(entry.slot)
            placed.grows.append(int(grows))
        return placed

    def _make_room(self, wanted: int, kept: int) -> None:
        """Free ``wanted`` slots without taking one from the ``kept`` entries that were used last."""
        while len(self._free) < wanted:
            if len(self._entries) > kept:
                self._free.append(self._entries.popitem(last=False)[1].slot)
            else:
                more = max(_FIRST_SLOTS, self._slots)
                self._free += range(self._slots + more, self._slots, -1)
                self._slots += more

    def forget(self) -> None:
        """Take all slots back, because a failed step may have counted only some of its tokens."""
        self._free += [entry.slot for entry in self._entries.values()]
        self._entries.clear()

    # -- on the device ------------------------------------------------------------------------------------------------

    def fill(self, slot: int, prompt: torch.Tensor, output: torch.Tensor) -> None:
        """Fill ``slot`` with the token ids of a history, int64 on the device."""
        self._extend()
        self.prompt[slot].zero_().index_fill_(0, prompt, True)
        counts = self.output[slot].zero_()
        counts.scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def grow(self, slots: torch.Tensor, tokens: torch.Tensor, grows: torch.Tensor) -> None:
        """Add ``grows`` [n] occurrences of ``tokens`` [n] to ``slots`` [n], all int64 on the device."""
        self._extend()
        self.output.view(-1).scatter_add_(0, slots * self.output.shape[1] + tokens, grows.to(torch.int32))

    def _extend(self) -> None:
        """Make the tensors as long as there are slots."""
        if (missing := self._slots + 1 - self.output.shape[0]) > 0:
            self.output = torch.cat([self.output, self.output.new_zeros(missing, self.output.shape[1])])
            self.prompt = torch.cat([self.prompt, self.prompt.new_zeros(missing, self.prompt.shape[1])])
