"""Which tokens to compute in the next step.

Pure. There is no prefill phase and no decode phase: every sequence has ``missing`` tokens, many or one, and a step is a
list of segments under a budget of tokens, sequences and blocks. Who runs is decided by rank: priority, then streams
that lost another worker (somebody has read their beginning) before those that begin, then arrival.

    add ──► waiting ── blocks for all its tokens ──► running ── finish / abort / detach ──► gone
               ▲                                        │
               └──────── park (blocks given back) ◄─────┘   when a higher rank needs its blocks

Rules, derived from "nothing starves": single missing tokens (decode) go before chunks of prompts, so a prompt cannot
stall a stream; who waits, waits for blocks or for those that outrank it; when more run than fit into a step (KV that
was handed over runs at once, too), those of one priority take turns; chunks fill what is left of the budget in rank
order; only the lowest rank is ever parked; a parked sequence keeps its rank, so it is the first to come back, and it
recomputes what the prefix cache no longer has.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, KeysView
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from common.core.errors import InvariantBroken, OutOfBlocks
from common.core.ids import BlockId, Holder, RequestId, SequenceId, sequence_holder
from common.core.sequence import Batch, Segment, Sequence, StepResult, TokenLogprobs
from common.kv.cache import BlockCopy, KvCache
from common.kv.prefix import ChainKey
from common.kv.table import BlockTable

Rank = tuple[int, bool, int]


@dataclass(slots=True)
class _Entry:
    """A sequence and its place; ``table`` is None while it waits. ``turn`` is the number of the last turn
    that it had, or that others had before it came. ``parked``: it has begun here and waits for blocks. ``chain`` keeps
    its prefix keys between attempts."""

    rank: Rank
    sequence: Sequence
    table: BlockTable | None = None
    turn: int = 0
    parked: bool = False
    chain: list[ChainKey] = field(default_factory=list)


@dataclass(slots=True)
class Sampled:
    """A sequence reached its last token: one sampled id per choice (see ``Sequence.choices``), not yet appended."""

    sequence: Sequence
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    """Matches ``tokens``."""


@dataclass(slots=True)
class _Step:
    """The next step, as far as it is planned: who has a place in it, and their blocks."""

    segments: list[Segment] = field(default_factory=list)
    tables: list[Seq[BlockId]] = field(default_factory=list)


@dataclass(slots=True)
class Started:
    """What :meth:`Planner.start` made of a prompt's first tokens: one sequence per choice, and copies to make first."""

    sequences: list[Sequence]
    copies: list[BlockCopy] = field(default_factory=list)


class Planner:
    """Packs sequences into batches of at most ``max_tokens`` tokens and ``max_sequences`` segments."""

    def __init__(self, cache: KvCache, *, max_tokens: int, max_sequences: int) -> None:
        if max_tokens < max_sequences:
            raise ValueError(f"a budget of {max_tokens} tokens cannot hold {max_sequences} sequences of one token each")
        self.cache, self.max_tokens, self.max_sequences = cache, max_tokens, max_sequences
        self.preemptions = 0
        self.queried_tokens = self.hit_tokens = 0
        """Of sequences that began to be computed here: all their tokens, and those found in the prefix cache."""
        self._short = False
        self._arrivals = self._turns = 0
        self._waiting: list[_Entry] = []  # by rank
        self._running: list[_Entry] = []  # by rank
        self._entries: dict[SequenceId, _Entry] = {}

    # -- asking -------------------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        """Whether there is anything to compute, now or when blocks come back."""
        return bool(self._entries)

    def __contains__(self, sequence: SequenceId) -> bool:
        return sequence in self._entries

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def in_need(self) -> list[Sequence]:
        """Those that wait, if blocks were lacking when the last step was planned."""
        return [entry.sequence for entry in self._waiting] if self._short else []

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens still to compute, of waiting and of running sequences."""
        return sum(entry.sequence.missing for entry in (*self._waiting, *self._running) if entry.sequence.missing > 1)

    @property
    def parked(self) -> bool:
        """Whether a sequence that had already started here waits for blocks: it outranks new reservations. One that
        lost another worker had none here yet."""
        return any(entry.parked for entry in self._waiting)

    def resting(self) -> KeysView[RequestId]:
        """Requests that have begun and get no tokens now: parked, computed again after that, or outranked by as many
        as fit into a step."""
        overdue = self._turns - len(self._running) - self.max_sequences
        return dict.fromkeys(
            entry.sequence.request.id
            for entry in (*self._waiting, *self._running)
            if entry.sequence.output_length
            and (entry.table is None or entry.sequence.missing > 1 or entry.turn <= overdue)
        ).keys()

    def sequences(self) -> Iterator[Sequence]:
        return (entry.sequence for entry in self._entries.values())

    def table(self, sequence: Sequence) -> BlockTable:
        """The table of a running sequence."""
        table = self._entries[sequence.id].table
        if table is None:
            raise InvariantBroken(f"{sequence} has no blocks")
        return table

    # -- coming and going ---------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """A new sequence, last among its priority."""
        self._insert(self._waiting, _Entry(self._next_rank(sequence), sequence))

    def adopt(self, sequence: Sequence, table: BlockTable) -> None:
        """A sequence whose KV is already in ``table`` (held under the sequence's own name): it runs at once."""
        if table.holder != sequence_holder(sequence.id):
            raise InvariantBroken(f"{sequence} is adopted with the table of {table.holder}")
        self._insert(self._running, _Entry(self._next_rank(sequence), sequence, table))

    def start(self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprobs | None]) -> Started:
        """Appends the first sampled tokens, one per choice, forking the sequence when there are several. ``logprobs``
        matches ``tokens``."""
        siblings, sequence.siblings = sequence.siblings, 0
        if len(tokens) != siblings + 1:
            raise InvariantBroken(f"{sequence} gets {len(tokens)} tokens for {siblings + 1} choices")
        started = Started([sequence])
        for choice in range(1, len(tokens)):
            other = sequence.fork(choice)
            started.sequences.append(other)
            started.copies += self._fork(sequence, other)
        for each, token, entry in zip(started.sequences, tokens, logprobs, strict=True):
            each.append(token, entry)
        return started

    def finish(self, sequence: Sequence) -> None:
        """The sequence is over: its blocks go back (what is cached stays findable)."""
        entry = self._remove(sequence.id)
        if entry.table is not None:
            self.cache.close(entry.table)

    def detach(self, sequence: Sequence, holder: Holder) -> BlockTable:
        """The sequence is over here, but its blocks live on under ``holder``."""
        table = self._remove(sequence.id).table
        if table is None:
            raise InvariantBroken(f"{sequence} has no blocks to keep")
        self.cache.rename(table, holder)
        return table

    # -- a step -------------------------------------------------------------------------------------------------------

    def plan(self, most_of_prompts: Callable[[int], int | None] | None = None) -> Batch | None:
        """The next step, with room for all its tokens in the tables; None when nothing can run now.
        ``most_of_prompts`` says how many tokens of prompts it may have beside so many streams (None: any number)."""
        self._short = False
        if not self._entries:  # most turns of a worker that waits for KV or for a request
            return None
        step = _Step()
        budget = self._plan_decodes(step)
        if most_of_prompts is not None and (most := most_of_prompts(len(step.segments))) is not None:
            budget = min(budget, most)
        budget = self._plan_chunks(step, budget)
        self._plan_waiting(step, budget)
        return Batch(tuple(step.segments), tuple(step.tables)) if step.segments else None

    def complete(self, batch: Batch, result: StepResult) -> list[Sampled]:
        """Books a finished step: tokens count as computed, full blocks become findable; returns what was sampled.

        Segments with an error are skipped: the caller finishes those sequences.
        """
        sampled: list[Sampled] = []
        for index, segment in enumerate(batch.segments):
            entry = self._entries.get(segment.sequence.id)
            if entry is None or entry.table is None or index in result.errors:
                continue
            sequence = segment.sequence
            sequence.computed = segment.end
            self.cache.publish(entry.table, sequence.tokens, sequence.computed)
            if result.tokens[index]:
                tokens, logprobs = result.tokens[index], result.logprobs[index]
                sampled.append(Sampled(sequence, tokens, [*logprobs] if logprobs else [None] * len(tokens)))
        return sampled

    # -- inside -------------------------------------------------------------------------------------------------------

    def _plan_decodes(self, step: _Step) -> int:
        # room first, by rank and for all of them: a sequence that already has its place in the step is never parked
        ready = [entry for entry in self._running[:] if entry.sequence.missing == 1 and self._room(entry)]
        for entry in self._next_in_turn(ready):
            if entry.sequence.missing == 1:
                self._place(step, entry, 1)
        return self.max_tokens - len(step.segments)

    def _next_in_turn(self, ready: list[_Entry]) -> list[_Entry]:
        """Those of ``ready`` whose turn it is, and the first chunk if it is its turn: priorities in order, of one
        priority those whose last turn is longest ago."""
        chunk = [entry for entry in self._running if entry.sequence.missing > 1][:1]
        if len(ready) + len(chunk) <= self.max_sequences:
            return ready
        return sorted(ready + chunk, key=lambda entry: (entry.rank[0], entry.turn))[: self.max_sequences]

    def _plan_chunks(self, step: _Step, budget: int) -> int:
        for entry in self._running:
            if entry.sequence.missing > 1 and budget > 0 and len(step.segments) < self.max_sequences:
                budget -= self._chunk(step, entry, budget)
        return budget

    def _plan_waiting(self, step: _Step, budget: int) -> None:
        """Admits in rank order and stops at the first that does not fit: a long prompt is not overtaken for ever."""
        while self._waiting:
            entry = self._waiting[0]
            room = budget > 0 if len(self._running) < self.max_sequences else self._takes_turns(entry)
            if not room or not self._admit(entry):
                return
            self._waiting.pop(0)
            bisect.insort(self._running, entry, key=lambda each: each.rank)
            if budget > 0 and len(step.segments) < self.max_sequences:
                budget -= self._chunk(step, entry, budget)

    def _takes_turns(self, entry: _Entry) -> bool:
        """Whether it runs though as many run as a step has places: those that it outranks rest, or take turns with it.
        Of each priority twice as many can be let in: those that lost another worker, beside those that begin."""
        return entry.rank < self._running[self.max_sequences - 1].rank

    def _chunk(self, step: _Step, entry: _Entry, budget: int) -> int:
        length = min(entry.sequence.missing, budget)
        self._place(step, entry, length)
        return length

    def _place(self, step: _Step, entry: _Entry, length: int) -> None:
        if entry.table is None:
            raise InvariantBroken(f"{entry.sequence} has no blocks")
        step.segments.append(Segment(entry.sequence, entry.sequence.computed, length))
        step.tables.append(entry.table.blocks)
        self._turns += 1
        entry.turn = self._turns

    def _admit(self, entry: _Entry) -> bool:
        """Blocks for all known tokens at once, leaving a block of growth for every running sequence."""
        sequence = entry.sequence
        holder, salt = sequence_holder(sequence.id), sequence.request.cache_salt
        table = self.cache.open(holder, sequence.tokens, salt, entry.chain)
        if table.lacking(len(sequence.tokens)) + len(self._running) > self.cache.pool.available:
            self.cache.close(table)
            self._short = True
            return False
        self.cache.grow(table, len(sequence.tokens))
        if self.cache.prefix_caching and not entry.parked:
            self.queried_tokens += len(sequence.tokens)
            self.hit_tokens += table.cached_tokens
        entry.table, sequence.computed, entry.parked = table, table.cached_tokens, False
        return True

    def _room(self, entry: _Entry) -> bool:
        """Room for one more token, parking lower ranks until it is found; False if the entry itself is parked."""
        while entry.table is not None:
            try:
                self.cache.grow(entry.table, len(entry.sequence.tokens))
                return True
            except OutOfBlocks:
                self._park(self._running[-1])
        return False

    def _park(self, entry: _Entry) -> None:
        if entry.table is None:
            raise InvariantBroken(f"{entry.sequence} is parked without blocks")
        self.cache.close(entry.table)
        entry.table, entry.sequence.computed, entry.parked = None, 0, True
        self._running.remove(entry)
        bisect.insort(self._waiting, entry, key=lambda each: each.rank)
        self.preemptions += 1

    def _fork(self, sequence: Sequence, other: Sequence) -> Iterable[BlockCopy]:
        """``other`` runs over shared blocks, or waits to recompute when not even one block is free for its own end."""
        rank = self._next_rank(other)
        try:
            table, copies = self.cache.fork(self.table(sequence), sequence_holder(other.id), sequence.computed)
        except OutOfBlocks:
            other.computed = 0
            self._insert(self._waiting, _Entry(rank, other, parked=True))
            return []
        self._insert(self._running, _Entry(rank, other, table))
        return copies

    def _next_rank(self, sequence: Sequence) -> Rank:
        self._arrivals += 1
        return (sequence.request.priority, not sequence.request.emitted, self._arrivals)

    def _insert(self, queue: list[_Entry], entry: _Entry) -> None:
        if entry.sequence.id in self._entries:
            raise InvariantBroken(f"{entry.sequence} is already here")
        self._entries[entry.sequence.id] = entry
        entry.turn = self._turns
        bisect.insort(queue, entry, key=lambda each: each.rank)

    def _remove(self, sequence: SequenceId) -> _Entry:
        entry = self._entries.pop(sequence)
        (self._waiting if entry.table is None else self._running).remove(entry)
        return entry
