"""The decode worker: reserves blocks for hand-offs, receives KV, runs continuous batching, and sends token spans.

It also serves whole requests (``Generate``): as a colocated worker, and as a decode worker that prefills locally where
that is cheaper or no prefill worker is available. A request starts to run in one of two ways:

    Reserve ──► blocks ──► frames ──► commit verified ─┐
                                                       ├──► running ──► one span per step ──► finished
    Generate ──► waiting ──► computed in chunks ───────┘

Decode steps and prompt chunks share a batch; :class:`ChunkBudget` keeps chunks small enough not to stall streams.
"""

from __future__ import annotations

import logging
import math
from collections.abc import KeysView
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from common.core.errors import InvariantBroken, WireError
from common.core.ids import SequenceId, TransferId, sequence_holder, unpack_tokens
from common.core.request import FinishReason, Request
from common.core.sequence import Batch, Sequence, TokenLogprobs
from common.engine.scheduler import Sampled
from common.kv.layout import converts
from common.net.messages import (
    Abort,
    Commit,
    Generate,
    Hello,
    Measure,
    PromptChunk,
    Resend,
    Reserve,
    Timing,
    Welcome,
)
from common.worker.chunk_times import ChunkTimes
from common.worker.loop import Worker
from common.worker.output_history import OutputHistory
from common.worker.report import HandoffCounts
from common.worker.token_spans import TokenSpanEncoder, from_wire
from decode.chunk_budget import ChunkBudget
from decode.reservations import Reservation, Reservations
from kvtransfer.receiver import Landed, Receiver, TransferFailed
from kvtransfer.session import TransferLimits

log = logging.getLogger("tandem.decode")

BUDGET_S = 0.002
"""Seconds for receiving KV per turn of the loop (control messages are read once per turn), while no sequence runs."""
BUDGET_SHARE, MOST_BUDGET_SHARE = 0.05, 0.25
"""The time for receiving KV per turn while sequences run, as shares of the last step's duration: the first per
hand-off whose sender waits, the second for all together. Receiving delays the next step. A frame is never received in
part and takes half a millisecond or more, so with short steps one frame per step is received unless several senders
wait."""
READING_S = 0.002
"""Seconds between two checks of a read of a sender's pool, while there is nothing else to do."""


@dataclass(slots=True)
class _AttemptRecord:
    """Timestamps of one (request, attempt) in seconds, and the ids of its sequences that still run. ``local``: whether
    its prompt is computed here, in steps at ``chunks``. ``figures``: timings that prefill sent with the KV."""

    arrived_at: float
    local: bool
    running: set[SequenceId]
    started_at: float = 0.0
    landed_at: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    chunks: ChunkTimes = field(default_factory=ChunkTimes)


class DecodeWorker(Worker):
    """Serves ``Reserve`` and ``Generate``; see the module's docstring."""

    overlaps = True

    def open_links(self) -> None:
        self._records: dict[TransferId, _AttemptRecord] = {}
        self._unstarted: set[TransferId] = set()
        """Transfers for which no step has computed anything here yet."""
        self._computing: set[TransferId] = set()
        """Transfers whose prompt, with the output of an earlier attempt, is being computed here: until the first token
        of a choice."""
        self._step_at = 0.0
        self._output_history = OutputHistory()
        self.reservations = Reservations(self.cache)
        self.chunks = ChunkBudget()
        self._short_since = math.inf
        """The time since which prompts to be computed here have waited for blocks; infinity if none wait."""
        self.receiver = Receiver(
            self.channels,
            self.engine.memory,
            self.settings.host_id,
            self.settings.data_address,
            transport=self.settings.kv_transport,
        )

    def introduce(self, hello: Hello) -> Hello:
        return msgspec.structs.replace(hello, data_address=self.receiver.address)

    def close_links(self) -> None:
        self.receiver.close()

    def configure(self, welcome: Welcome) -> None:
        self.receiver.limit(TransferLimits.of_welcome(welcome))

    def holdings(self) -> KeysView[TransferId]:
        return dict.fromkeys((*self._records, *self.requests.trials)).keys()

    def handoff_counts(self) -> HandoffCounts:
        receiver = self.receiver
        return HandoffCounts(
            len(self.reservations), receiver.bad_messages, receiver.stale_frames, receiver.ban_list.cut_off
        )

    # -- messages -----------------------------------------------------------------------------------------------------

    def handle(self, message: Any, now: float) -> None:
        match message:
            case Reserve():
                if not converts(message.prefill.dtype, self.engine.layout.dtype):
                    raise WireError(f"KV in {message.prefill.dtype}, which this pool cannot store")
                self._reserve(message, now)
            case Generate():
                self._generate(message, now)
            case Abort(request=request, attempt=attempt):
                self.abort(TransferId(request, attempt))
            case Resend(request=request, attempt=attempt, choice=choice, start=start):
                self._resend(SequenceId(request, choice, attempt), start)
            case Measure():
                self._measure(message, now)
            case _:
                log.warning("dropped a %s message: a decode worker does not handle it", type(message).__name__)

    def _reserve(self, message: Reserve, now: float) -> None:
        request = message.request
        if self.requests.accept(request, message.attempt, now, self._most_tokens(request)):
            sequence = Sequence(request, message.attempt)
            self._begin(sequence.id.transfer, _AttemptRecord(now, local=False, running=set()))
            self.reservations.ask(Reservation(request, sequence, now, message.prefill))

    def _generate(self, message: Generate, now: float) -> None:
        request = message.request
        if not self.requests.accept(request, message.attempt, now, self._most_tokens(request)):
            return
        choices = [choice for choice in range(request.n) if choice not in request.ended] if request.emitted else [0]
        sequences = [Sequence(request, message.attempt, choice) for choice in choices]
        running = {sequence.id for sequence in sequences}
        self._begin(TransferId(request.id, message.attempt), _AttemptRecord(now, local=True, running=running))
        for sequence in sequences:
            self.planner.add(sequence)

    def _begin(self, transfer: TransferId, record: _AttemptRecord) -> None:
        self._records[transfer] = record
        self._unstarted.add(transfer)

    def _end(self, transfer: TransferId) -> bool:
        """Forget a transfer's state; False if it is unknown."""
        self._unstarted.discard(transfer)
        self._computing.discard(transfer)
        return self._records.pop(transfer, None) is not None

    def _most_tokens(self, request: Request) -> int:
        """Return the maximum length of one choice in tokens: its prompt and its output."""
        return request.prompt_length + request.sampling.max_tokens

    def _measure(self, message: Measure, now: float) -> None:
        """Expect a trial hand-off, whose blocks have no content and are dropped once they have landed."""
        transfer = TransferId(message.request, message.attempt)
        if table := self.requests.open_trial(transfer, message.tokens, now):
            self.receiver.expect(transfer, message.tokens, 0, table.blocks, message.peer, now)

    def abort(self, transfer: TransferId) -> None:
        self.receiver.cancel(transfer, "aborted")
        self.requests.close_trial(transfer)
        if not self._end(transfer):
            return
        self.reservations.drop(transfer)
        for sequence in self._sequences(transfer):
            self.planner.finish(sequence)
        self.requests.over(transfer)

    def _sequences(self, transfer: TransferId) -> list[Sequence]:
        """Return the sequences of (request, attempt) that are in the planner."""
        return [sequence for sequence in self.planner.sequences() if sequence.id.transfer == transfer]

    def _resend(self, sequence_id: SequenceId, start: int) -> None:
        writer = TokenSpanEncoder()
        if not self._output_history.replay(sequence_id, start, writer):
            for sequence in self._sequences(sequence_id.transfer):
                if sequence.id == sequence_id and sequence.output_length > start:
                    writer.add(sequence, start)
        self._send(writer)

    # -- incoming KV --------------------------------------------------------------------------------------------------

    def rest_s(self) -> float:
        return READING_S if self.receiver.reading else super().rest_s()

    def move_kv(self, now: float) -> None:
        self._output_history.forget(now)
        self.receiver.step_s = self.step_times.longest
        self._grant(now)
        for end in self.receiver.pump(self.clock, self._budget_s()):
            if self.requests.close_trial(end.transfer):
                continue
            match end:
                case Landed():
                    self._land(end.transfer, end.commit, now)
                case TransferFailed(
                    cancelled_by_peer=True
                ):  # cancelled by the sender, which reports it if it is a failure
                    log.debug("hand-off %s was called off: %s", end.transfer, end.reason)
                    self.abort(end.transfer)
                case TransferFailed():
                    log.warning("hand-off %s failed: %s", end.transfer, end.reason)
                    self.report.count("kv_transfer_failures")
                    self.requests.fail(end.transfer, "transfer_failed", end.reason, retriable=True)

    def _budget_s(self) -> float:
        """Return the seconds for receiving KV in this turn."""
        if not self.planner.running:
            return BUDGET_S
        share = BUDGET_SHARE * max(1, self.receiver.waited_for)  # at least 1: a first message may be unread
        return min(share, MOST_BUDGET_SHARE) * self.step_times.last

    def _grant(self, now: float) -> None:
        """Grant waiting reservations in order, unless a parked (preempted) sequence waits for blocks. While a prompt to
        be computed here waits for blocks, reservations that arrived after it began to wait are not granted: the prompt
        needs all of its blocks at once, and would never get them if every hand-off went first."""
        if not self.planner.in_need:
            self._short_since = math.inf
        elif self._short_since == math.inf:
            self._short_since = now
        while not self.planner.parked and (
            reservation := self.reservations.grant(self.planner.running, self._short_since)
        ):
            table = reservation.table
            if table is None:
                raise InvariantBroken(f"{reservation.transfer} was granted without a table")
            tokens = len(reservation.sequence.tokens)
            self.receiver.expect(reservation.transfer, tokens, table.cached_tokens, table.blocks, reservation.peer, now)

    def _land(self, transfer: TransferId, commit: Commit, now: float) -> None:
        """Make verified KV visible to the prefix cache and to the next batch."""
        reservation = self.reservations.claim(transfer)
        if reservation is None or reservation.table is None:
            raise InvariantBroken(f"{transfer} has landed without a reservation")
        sequence, table = reservation.sequence, reservation.table
        try:
            tokens, logprobs = self._first(sequence, commit)
        except ValueError as error:
            self.cache.close(table)
            why = f"the commit's first tokens are invalid: {error}"
            self.requests.fail(transfer, "transfer_failed", why, retriable=True)
            return
        sequence.computed = len(sequence.tokens)
        self.cache.publish(table, sequence.tokens, sequence.computed)
        self.cache.rename(table, sequence_holder(sequence.id))
        self.planner.adopt(sequence, table)
        self._records[transfer].landed_at, self._records[transfer].figures = now, commit.figures
        writer = TokenSpanEncoder()
        self._start(sequence, tokens, logprobs, writer)
        self._send(writer)

    def _first(self, sequence: Sequence, commit: Commit) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Return the first tokens of all choices, which are part of the Commit, and their log-probabilities. ValueError
        if their numbers differ from the number of choices, or a token id is out of range."""
        tokens, logprobs = unpack_tokens(commit.first), [from_wire(entry) for entry in commit.logprobs]
        if not len(tokens) == len(logprobs) == len(sequence.choices):
            raise ValueError(
                f"{len(tokens)} tokens, {len(logprobs)} log-probabilities, {len(sequence.choices)} choices"
            )
        if max(tokens) >= self.engine.vocab_size:
            raise ValueError(f"token {max(tokens)} is outside the vocabulary of {self.engine.vocab_size}")
        return tokens, logprobs

    # -- computing ----------------------------------------------------------------------------------------------------

    def plan(self) -> Batch | None:
        """Return the next step. :class:`ChunkBudget` limits the prompt tokens in a step with streams, unless the worker
        is colocated or a stream that has begun waits for its recomputation."""
        if self.role == "colocated" or self._has_recomputed_stream():
            return self.planner.plan()
        return self.planner.plan(partial(self.chunks.most, more_come=bool(self.reservations)))

    def _has_recomputed_stream(self) -> bool:
        """Return whether a stream that has begun is being recomputed. It gets no tokens until that is done."""
        return any(not it.streams and (it.output_length or it.request.emitted) for it in self.planner.sequences())

    def before_step(self, batch: Batch, now: float) -> None:
        self._step_at = now
        if self.step_times.longest:
            self.receiver.away(self.step_times.expect(batch.length, batch.attended))
        for segment in batch.segments if self._unstarted else ():
            transfer = segment.sequence.id.transfer
            if transfer in self._unstarted:
                self._unstarted.remove(transfer)
                record = self._records[transfer]
                record.started_at = now
                if record.local:
                    self._computing.add(transfer)
                else:
                    waited_ms = (now - record.landed_at) * 1000
                    self._time(segment.sequence, {**record.figures, "decode_wait_ms": waited_ms})

    def sampled(self, batch: Batch, samples: list[Sampled], now: float) -> None:
        self.chunks.took(batch, self.step_times.last)
        if self._computing:
            self._note_chunks(batch, now)
        writer = TokenSpanEncoder()
        for sample in samples:
            sequence = sample.sequence
            if sequence.id.transfer in self._computing:
                self._computing.remove(sequence.id.transfer)
                self._time_prompt(sequence, now)
            if sequence.end_unsampled() is not FinishReason.RUNNING:
                self._end_unsampled(sequence, writer)
            elif sequence.siblings:
                self._start(sequence, sample.tokens, sample.logprobs, writer)
            else:
                sequence.append(sample.tokens[0], sample.logprobs[0])
                self._report(sequence, writer)
        self._send(writer)

    def _start(
        self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprobs | None], writer: TokenSpanEncoder
    ) -> None:
        """Append the first tokens of all choices. From here on each choice is a sequence of its own."""
        record = self._records[sequence.id.transfer]
        started = self.planner.start(sequence, tokens, logprobs)
        self.engine.copy_blocks(started.copies)
        record.running = {each.id for each in started.sequences}
        for each in started.sequences:
            self._report(each, writer)

    def _report(self, sequence: Sequence, writer: TokenSpanEncoder) -> None:
        """Add the newest token of ``sequence`` to ``writer``, and those that its grammar forces behind it; return the
        blocks of a finished sequence to the pool."""
        start = sequence.output_length - 1
        if sequence.constrained and sequence.finish is FinishReason.RUNNING and self.engine.grammars is not None:
            for token in self.engine.grammars.force(sequence):
                if sequence.force(token) is not FinishReason.RUNNING:
                    break
        writer.add(sequence, start)
        if sequence.finish is FinishReason.RUNNING:
            return
        self.planner.finish(sequence)
        self._output_history.keep(sequence, self.clock())
        record = self._records[sequence.id.transfer]
        record.running.discard(sequence.id)
        if not record.running:
            self._end(sequence.id.transfer)
            self.requests.over(sequence.id.transfer)

    def _end_unsampled(self, sequence: Sequence, writer: TokenSpanEncoder) -> None:
        """End a request without output, whose prompt is computed."""
        for each in (sequence, *map(sequence.fork, sequence.choices[1:])):
            each.end_unsampled()
            writer.add(each, 0)
            self._output_history.keep(each, self.clock())
        self.planner.finish(sequence)
        self._end(sequence.id.transfer)
        self.requests.over(sequence.id.transfer)

    def _note_chunks(self, batch: Batch, now: float) -> None:
        """Note the step that has ended at ``now`` as a chunk of each prompt that it computed a part of. Choices that
        are computed again are sequences of their own: the parts of all in one step are one chunk."""
        tokens: dict[TransferId, int] = {}
        for segment in batch.segments:
            if (transfer := segment.sequence.id.transfer) in self._computing:
                tokens[transfer] = tokens.get(transfer, 0) + segment.length
        for transfer, count in tokens.items():
            record = self._records[transfer]
            record.chunks.add(self._step_at - record.started_at, now - self._step_at, count)

    def _time_prompt(self, sequence: Sequence, now: float) -> None:
        record = self._records[sequence.id.transfer]
        values = {
            "queue_ms": (record.started_at - record.arrived_at) * 1000,
            "prefill_ms": (now - record.started_at) * 1000,
            "cached_tokens": float(self.planner.table(sequence).cached_tokens),
        }
        self._time(sequence, values, record.chunks.reported())

    def _time(self, sequence: Sequence, values: dict[str, float], chunks: tuple[PromptChunk, ...] = ()) -> None:
        self.membership.send(Timing(sequence.request.id, sequence.attempt, values, chunks=chunks))

    def _send(self, writer: TokenSpanEncoder) -> None:
        for message in writer.messages():
            self.membership.send(message)
