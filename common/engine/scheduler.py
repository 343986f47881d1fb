"""The scheduler core: decides which tokens to compute in the next step.

Pure. There is no prefill phase and no decode phase: every sequence has ``missing`` tokens, many or one, and a step is a
list of segments under a budget of tokens, sequences and blocks. Sequences run by rank: first by priority, then resumed
sequences (whose worker was lost after the client had received output) before new ones, then by arrival.

    add ──► waiting ── blocks for all its tokens ──► running ── finish / abort / detach ──► gone
               ▲                                        │
               └──────── park (blocks returned) ◄───────┘   when a higher rank needs its blocks

Rules, derived from "nothing starves":

- Single missing tokens (decode), with those that a grammar has forced behind them, go before chunks of prompts, so a
  prompt cannot stall a stream.
- A waiting sequence waits only for blocks, or for sequences that outrank it.
- When more sequences run than fit into a step, sequences of one priority take turns. (A sequence whose KV was handed
  over runs at once, even beyond that number.)
- Chunks fill the rest of the budget in rank order.
- Only the lowest rank is ever parked. A parked sequence keeps its rank, so it is the first to run again, and it
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
class _ScheduledSequence:
    """A sequence and its scheduling state. ``table`` is None while it waits. ``turn`` is the planner's count of turns
    when it was last placed in a step, or when it was added. ``parked``: it has started here and waits for blocks.
    ``chain`` keeps its prefix keys between attempts to admit it."""

    rank: Rank
    sequence: Sequence
    table: BlockTable | None = None
    turn: int = 0
    parked: bool = False
    chain: list[ChainKey] = field(default_factory=list)


@dataclass(slots=True)
class Sampled:
    """The ids sampled after a sequence's last known token, one per choice (see ``Sequence.choices``), not yet
    appended."""

    sequence: Sequence
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    """One entry per token."""


@dataclass(slots=True)
class _Step:
    """The next step as planned so far: its segments, and the block ids of each."""

    segments: list[Segment] = field(default_factory=list)
    tables: list[Seq[BlockId]] = field(default_factory=list)


@dataclass(slots=True)
class Started:
    """Result of :meth:`Planner.start`: one sequence per choice, and the block copies to make before the next step."""

    sequences: list[Sequence]
    copies: list[BlockCopy] = field(default_factory=list)


class Planner:
    """Packs sequences into batches of at most ``max_tokens`` tokens and ``max_sequences`` segments. Raises ValueError
    if ``max_tokens`` is the smaller one."""

    def __init__(self, cache: KvCache, *, max_tokens: int, max_sequences: int) -> None:
        if max_tokens < max_sequences:
            raise ValueError(f"a budget of {max_tokens} tokens cannot hold {max_sequences} sequences of one token each")
        self.cache, self.max_tokens, self.max_sequences = cache, max_tokens, max_sequences
        self.release: Callable[[BlockTable], None] = cache.close
        """Returns the blocks of a sequence that is over to the pool; later, if launched steps may still touch them."""
        self.held: Callable[[Sequence], bool] = lambda sequence: False
        """Whether the token behind the known ones cannot be sampled yet, as its mask is still being computed: then the
        last known token is in no step, so that nothing is computed twice and the others do not wait."""
        self.preemptions = 0
        self.queried_tokens = self.hit_tokens = 0
        """Tokens of all sequences admitted for the first time, and how many of them the prefix cache had."""
        self._short = False
        """Whether blocks were lacking when the last step was planned."""
        self._arrivals = self._turns = 0
        self._waiting: list[_ScheduledSequence] = []  # by rank
        self._running: list[_ScheduledSequence] = []  # by rank
        self._entries: dict[SequenceId, _ScheduledSequence] = {}

    # -- queries ------------------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        """Return whether there is anything to compute, now or once blocks are free."""
        return bool(self._entries)

    def __contains__(self, sequence: SequenceId) -> bool:
        return sequence in self._entries

    @property
    def running(self) -> int:
        """Number of sequences that have blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for blocks."""
        return len(self._waiting)

    @property
    def in_need(self) -> list[Sequence]:
        """The waiting sequences, if blocks were lacking when the last step was planned; else none."""
        return [entry.sequence for entry in self._waiting] if self._short else []

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens still to compute, of waiting and running sequences."""
        entries = (*self._waiting, *self._running)
        return sum(entry.sequence.missing for entry in entries if not entry.sequence.streams)

    @property
    def parked(self) -> bool:
        """Whether a sequence that had started here waits for blocks; it outranks new reservations. A sequence resumed
        after the loss of another worker is not parked: it has had no blocks here yet."""
        return any(entry.parked for entry in self._waiting)

    def resting(self) -> KeysView[RequestId]:
        """Return the requests that have output but get no tokens now: they wait for blocks, are recomputed after that,
        or are outranked by as many sequences as fit into a step."""
        overdue = self._turns - len(self._running) - self.max_sequences
        return dict.fromkeys(
            entry.sequence.request.id
            for entry in (*self._waiting, *self._running)
            if entry.sequence.output_length
            and (entry.table is None or not entry.sequence.streams or entry.turn <= overdue)
        ).keys()

    def sequences(self) -> Iterator[Sequence]:
        """Iterate over all sequences, waiting and running, in the order in which they were added."""
        return (entry.sequence for entry in self._entries.values())

    def table(self, sequence: Sequence) -> BlockTable:
        """Return the table of a running sequence."""
        table = self._entries[sequence.id].table
        if table is None:
            raise InvariantBroken(f"{sequence} has no blocks")
        return table

    # -- adding and removing ------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Add a sequence that waits for blocks, behind others of its priority and kind (resumed or new)."""
        self._insert(self._waiting, _ScheduledSequence(self._next_rank(sequence), sequence))

    def adopt(self, sequence: Sequence, table: BlockTable) -> None:
        """Add a sequence whose KV is already in ``table``, held under the sequence's own name: it runs at once."""
        if table.holder != sequence_holder(sequence.id):
            raise InvariantBroken(f"{sequence} is adopted with the table of {table.holder}")
        self._insert(self._running, _ScheduledSequence(self._next_rank(sequence), sequence, table))

    def start(self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprobs | None]) -> Started:
        """Append the first sampled tokens, one per choice; fork the sequence if there are several. ``logprobs`` has one
        entry per token."""
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
        """Remove a sequence that is over and return its blocks to the pool (cached ones stay findable)."""
        entry = self._remove(sequence.id)
        if entry.table is not None:
            self.release(entry.table)

    def detach(self, sequence: Sequence, holder: Holder) -> BlockTable:
        """Remove a sequence but keep its blocks, under ``holder``; return its table."""
        table = self._remove(sequence.id).table
        if table is None:
            raise InvariantBroken(f"{sequence} has no blocks to keep")
        self.cache.rename(table, holder)
        return table

    # -- a step -------------------------------------------------------------------------------------------------------

    def plan(self, most_of_prompts: Callable[[int], int | None] | None = None) -> Batch | None:
        """Return the next step, with room for all its tokens in the tables; None if nothing can run now.
        ``most_of_prompts`` maps the step's number of streams to the most prompt tokens beside them (None: no limit)."""
        self._short = False
        if not self._entries:  # fast path: the worker waits for KV or for a request
            return None
        step = _Step()
        budget = self._plan_decodes(step)
        if most_of_prompts is not None and (most := most_of_prompts(len(step.segments))) is not None:
            budget = min(budget, most)
        budget = self._plan_chunks(step, budget)
        self._plan_waiting(step, budget)
        return Batch(tuple(step.segments), tuple(step.tables)) if step.segments else None

    def plan_ahead(self, launched: Batch) -> Batch | None:
        """Return the decode step to launch behind ``launched``, whose tokens are not known yet; None if these must be
        read first: a prompt waits or is computed, blocks are short, or there is nothing to compute.

        A segment that starts at the end of its sequence's known tokens computes the token that ``launched`` samples for
        it. If that is the sequence's last token, it has no segment. No sequence is parked: its blocks are in use."""
        if self._waiting or any(entry.sequence.missing > 1 or entry.sequence.siblings for entry in self._running):
            return None
        ends = {segment.sequence: segment.end for segment in launched.segments}
        ready = [e for e in self._running if e.sequence not in ends or not e.sequence.ends_with_next]
        segments, tables = list[Segment](), list[Seq[BlockId]]()
        for entry in self._next_in_turn(ready):
            segment = Segment(entry.sequence, ends.get(entry.sequence, entry.sequence.computed), 1)
            table = self.table(entry.sequence)
            try:
                self.cache.grow(table, segment.end)
            except OutOfBlocks:
                return None
            segments.append(segment)
            tables.append(table.blocks)
            self._turns += 1
            entry.turn = self._turns
        return Batch(tuple(segments), tuple(tables)) if segments else None

    def complete(self, batch: Batch, result: StepResult) -> list[Sampled]:
        """Record a finished step: count its tokens as computed, publish full blocks to the prefix cache, and return the
        sampled tokens.

        Segments of sequences that have left since are skipped, and segments with an error or a refusal: the caller
        finishes those.
        """
        sampled: list[Sampled] = []
        for index, segment in enumerate(batch.segments):
            sequence = segment.sequence
            entry = self._entries.get(sequence.id)
            if entry is None or entry.table is None or entry.sequence is not sequence:
                continue
            if index in result.errors or index in result.refusals:
                continue
            sequence.computed = segment.end - (index in result.late)
            if (span := result.prompts.get(index)) is not None:
                sequence.scored = span.end - 1
            self.cache.publish(entry.table, sequence.tokens, sequence.computed)
            if result.tokens[index]:
                tokens, logprobs = result.tokens[index], result.logprobs[index]
                sampled.append(Sampled(sequence, tokens, [*logprobs] if logprobs else [None] * len(tokens)))
        return sampled

    # -- planning -----------------------------------------------------------------------------------------------------

    def _plan_decodes(self, step: _Step) -> int:
        # make room for all of them first, in rank order: a sequence that is placed in the step must not be parked
        streams = [entry for entry in self._running if entry.sequence.streams and not self._held(entry)]
        ready = [entry for entry in streams if self._room(entry)]
        placed = [entry for entry in self._next_in_turn(ready) if entry.sequence.streams]
        budget = self.max_tokens - len(placed)
        for entry in placed:
            more = min(entry.sequence.missing - 1, budget)
            self._place(step, entry, 1 + more)
            budget -= more
        return budget

    def _next_in_turn(self, ready: list[_ScheduledSequence]) -> list[_ScheduledSequence]:
        """Return the entries whose turn it is, among ``ready`` and the first running one with a chunk to compute: by
        priority, and within one priority those whose last turn was longest ago."""
        chunk = [entry for entry in self._running if not entry.sequence.streams][:1]
        if len(ready) + len(chunk) <= self.max_sequences:
            return ready
        return sorted(ready + chunk, key=lambda entry: (entry.rank[0], entry.turn))[: self.max_sequences]

    def _plan_chunks(self, step: _Step, budget: int) -> int:
        for entry in self._running:
            if not entry.sequence.streams and budget > 0 and len(step.segments) < self.max_sequences:
                budget -= self._chunk(step, entry, budget)
        return budget

    def _plan_waiting(self, step: _Step, budget: int) -> None:
        """Admit in rank order; stop at the first that does not fit, so that a long prompt is not overtaken for ever."""
        while self._waiting:
            entry = self._waiting[0]
            room = budget > 0 if len(self._running) < self.max_sequences else self._takes_turns(entry)
            if not room or not self._admit(entry):
                return
            self._waiting.pop(0)
            bisect.insort(self._running, entry, key=lambda each: each.rank)
            if budget > 0 and len(step.segments) < self.max_sequences:
                budget -= self._chunk(step, entry, budget)

    def _takes_turns(self, entry: _ScheduledSequence) -> bool:
        """Return whether ``entry`` may run although as many sequences run as fit into a step. Those that it outranks
        then pause, or take turns with it. Within one priority at most twice as many run: resumed ones beside new
        ones."""
        return entry.rank < self._running[self.max_sequences - 1].rank

    def _chunk(self, step: _Step, entry: _ScheduledSequence, budget: int) -> int:
        missing = entry.sequence.missing - self._held(entry)
        if length := min(missing, budget):
            self._place(step, entry, length)
        return length

    def _held(self, entry: _ScheduledSequence) -> bool:
        return entry.sequence.constrained and self.held(entry.sequence)

    def _place(self, step: _Step, entry: _ScheduledSequence, length: int) -> None:
        if entry.table is None or length < 1:
            raise InvariantBroken(f"{entry.sequence} has no blocks, or nothing to compute")
        step.segments.append(Segment(entry.sequence, entry.sequence.computed, length))
        step.tables.append(entry.table.blocks)
        self._turns += 1
        entry.turn = self._turns

    def _admit(self, entry: _ScheduledSequence) -> bool:
        """Give ``entry`` blocks for all its tokens at once, if that leaves one block of growth for every running
        sequence; return whether it did."""
        sequence = entry.sequence
        holder, salt = sequence_holder(sequence.id), sequence.request.cache_salt
        table = self.cache.open(holder, sequence.tokens, salt, entry.chain, most=sequence.reusable)
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

    def _room(self, entry: _ScheduledSequence) -> bool:
        """Make room for one more token, parking lower ranks until there is; False if ``entry`` itself was parked."""
        while entry.table is not None:
            try:
                self.cache.grow(entry.table, len(entry.sequence.tokens))
                return True
            except OutOfBlocks:
                self._park(self._running[-1])
        return False

    def _park(self, entry: _ScheduledSequence) -> None:
        if entry.table is None:
            raise InvariantBroken(f"{entry.sequence} is parked without blocks")
        self.cache.close(entry.table)
        entry.table, entry.sequence.computed, entry.parked = None, 0, True
        self._running.remove(entry)
        bisect.insort(self._waiting, entry, key=lambda each: each.rank)
        self.preemptions += 1

    def _fork(self, sequence: Sequence, other: Sequence) -> Iterable[BlockCopy]:
        """Let ``other`` run over shared blocks, or wait to recompute if no block is free for its own partial one."""
        rank = self._next_rank(other)
        try:
            table, copies = self.cache.fork(self.table(sequence), sequence_holder(other.id), sequence.computed)
        except OutOfBlocks:
            other.computed = 0
            self._insert(self._waiting, _ScheduledSequence(rank, other, parked=True))
            return []
        self._insert(self._running, _ScheduledSequence(rank, other, table))
        return copies

    def _next_rank(self, sequence: Sequence) -> Rank:
        self._arrivals += 1
        return (sequence.request.priority, not sequence.request.emitted, self._arrivals)

    def _insert(self, queue: list[_ScheduledSequence], entry: _ScheduledSequence) -> None:
        if entry.sequence.id in self._entries:
            raise InvariantBroken(f"{entry.sequence} is already here")
        self._entries[entry.sequence.id] = entry
        entry.turn = self._turns
        bisect.insort(queue, entry, key=lambda each: each.rank)

    def _remove(self, sequence: SequenceId) -> _ScheduledSequence:
        entry = self._entries.pop(sequence)
        (self._waiting if entry.table is None else self._running).remove(entry)
        return entry
