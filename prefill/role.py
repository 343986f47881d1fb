"""The prefill worker: prompts in, KV blocks and first tokens out.

The states of a prompt here:

    Prefill ──► waiting ──► computing (frames leave meanwhile) ──► first token to the coordinator, at once
            ──► blocks renamed from the sequence to ``xfer:`` until decode has accepted ──► evictable cache

A prompt may be computed before decode has found blocks for it. When a prompt that has decode's grant is short of blocks
here, one without a grant yields: its blocks go back to the cache, and those that are evicted from there are computed
again when its grant comes. So a prompt that holds blocks on decode never waits here for one that still waits for blocks
on decode, which rules out a deadlock between the two pools.

Every way out (shipped, aborted, failed, ended by its first token) goes through ``_drop``, which frees whatever is left.
"""

from __future__ import annotations

import logging
import math
from collections.abc import KeysView
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from common.core.errors import WireError
from common.core.ids import BlockId, Incarnation, SequenceId, TransferId, pack_tokens, transfer_holder
from common.core.request import FinishReason
from common.core.sequence import Batch, Segment, Sequence
from common.engine.scheduler import Sampled
from common.kv.storage.cuda import CudaMemory
from common.kv.storage.device_calls import Event
from common.kv.table import BlockTable
from common.net.messages import Abort, Generate, Measure, Measured, Prefill, Resend, Timing, Welcome
from common.worker.chunk_times import ChunkTimes
from common.worker.loop import Worker
from common.worker.output_history import OutputHistory
from common.worker.report import HandoffCounts
from common.worker.token_spans import TokenSpanEncoder, stop_id, to_wire
from kvtransfer.sender import FirstTokens, Sender, SendFailed, Shipped
from kvtransfer.session import TransferLimits

log = logging.getLogger("tandem.prefill")

LOOK_S = 0.2
"""Least seconds between two calls of the sender while a step runs, which send computed layers and read messages."""
LISTEN_S = 0.0005
"""Longest wait for a message between two looks at what a GPU has computed."""
BUDGET_S = 0.001
"""Seconds for moving KV between two looks at control messages."""


@dataclass(slots=True)
class _Prompt:
    """A prompt held by this worker, with its timestamps in seconds. ``first`` is set once the prompt is computed, in
    steps at ``chunks``; ``table`` is set while its blocks are kept only for the hand-off."""

    sequence: Sequence
    arrived_at: float
    started_at: float = 0.0
    chunks: ChunkTimes = field(default_factory=ChunkTimes)
    first: FirstTokens | None = None
    table: BlockTable | None = None


class PrefillWorker(Worker):
    """Serves ``Prefill``; see the module's docstring."""

    def open_links(self) -> None:
        self._prompts: dict[TransferId, _Prompt] = {}
        self._aside: set[TransferId] = set()
        """Prompts that were computed and have given their blocks back, until decode's grant comes."""
        self._last_pair: dict[TransferId, Incarnation] = {}
        """The decode worker of each link trial."""
        self._batch = Batch((), ())
        self._ended: list[Shipped | SendFailed] = []
        self._output_history = OutputHistory()
        self._step_at = self._looked_at = 0.0
        self._last_event: Event | None = None
        self.sender = Sender(
            self.channels,
            self.engine.memory,
            self.incarnation,
            self.settings.host_id,
            transport=self.settings.kv_transport,
            host=urlsplit(self.settings.data_address).hostname or "127.0.0.1",
        )
        self.engine.on_layer = self._on_layer

    def close_links(self) -> None:
        self.sender.close()

    def configure(self, welcome: Welcome) -> None:
        self.sender.limit(TransferLimits.of_welcome(welcome))

    def holdings(self) -> KeysView[TransferId]:
        return dict.fromkeys((*self._prompts, *self.requests.trials)).keys()

    def handoff_counts(self) -> HandoffCounts:
        return HandoffCounts(0, self.sender.bad_messages, 0, self.sender.ban_list.cut_off)

    # -- messages -----------------------------------------------------------------------------------------------------

    def handle(self, message: Any, now: float) -> None:
        match message:
            case Prefill():
                self._prefill(message, now)
            case Generate():
                self._compute_only(message, now)
            case Abort(request=request, attempt=attempt):
                self.abort(TransferId(request, attempt))
            case Resend(request=request, attempt=attempt, choice=choice, start=start):
                self._resend(SequenceId(request, choice, attempt), start)
            case Measure():
                self._measure(message, now)
            case _:
                log.warning("dropped a %s message: a prefill worker does not handle it", type(message).__name__)

    def _prefill(self, message: Prefill, now: float) -> None:
        request, transfer = message.request, TransferId(message.request.id, message.attempt)
        sequence = Sequence(request, message.attempt)
        if self.requests.accept(request, message.attempt, now, len(sequence.tokens)):
            try:
                self.sender.open(transfer, message.decode, len(sequence.tokens), [], now)
            except WireError as error:
                self.requests.fail(transfer, "transfer_failed", str(error), retriable=True)
                return
            self._prompts[transfer] = _Prompt(sequence, now)
            self.planner.add(sequence)

    def _compute_only(self, message: Generate, now: float) -> None:
        """Accept a prompt that at most one token follows: its log-probabilities are requested, or its first token."""
        request, transfer = message.request, TransferId(message.request.id, message.attempt)
        sequence = Sequence(request, message.attempt)
        if not sequence.ends_with_next:
            raise WireError(f"{request.sampling.max_tokens} output tokens, which a prefill worker does not compute")
        if self.requests.accept(request, message.attempt, now, len(sequence.tokens)):
            self._prompts[transfer] = _Prompt(sequence, now)
            self.planner.add(sequence)

    def abort(self, transfer: TransferId) -> None:
        self.sender.cancel(transfer, "aborted")
        self._drop(transfer)

    def _drop(self, transfer: TransferId) -> None:
        self._last_pair.pop(transfer, None)
        self.requests.close_trial(transfer)
        prompt = self._prompts.pop(transfer, None)
        if prompt is not None and prompt.table is not None:
            self.cache.close(prompt.table)
        elif prompt is not None and transfer not in self._aside:
            self.planner.finish(prompt.sequence)
        self._aside.discard(transfer)
        self.requests.over(transfer)

    def _resend(self, sequence_id: SequenceId, start: int) -> None:
        """Send the first token again. Nothing is sent for a prompt that was handed over, since decode's first span
        repeats the token. For a prompt that ended here, only this worker has the token."""
        writer = TokenSpanEncoder()
        prompt = self._prompts.get(sequence_id.transfer)
        if prompt is None:
            self._output_history.replay(sequence_id, start, writer)
        elif prompt.sequence.id == sequence_id and prompt.sequence.output_length > start:
            writer.add(prompt.sequence, start)
        self._send(writer)

    # -- computing ----------------------------------------------------------------------------------------------------

    def before_step(self, batch: Batch, now: float) -> None:
        for segment in batch.segments:
            prompt = self._prompts[segment.sequence.id.transfer]
            prompt.started_at = prompt.started_at or now
        self._batch, self._step_at = batch, now

    def _on_layer(self, layer: int) -> None:
        """Send what the running step has computed up to ``layer``, which is now in the pool, while the next layer is
        computed. This is done at most every LOOK_S and after the last layer: between two layers this code is not in the
        CPU's caches, and running it delays a prompt more than sending its bytes does."""
        if isinstance(self.engine.memory, CudaMemory):
            self._on_launched_layer(layer + 1, self.engine.memory)
            return
        done, batch, now = layer + 1, self._batch, self.clock()
        if now - self._looked_at < LOOK_S and done < len(self.engine.layout.layers):
            return
        for segment, table in zip(batch.segments, batch.tables, strict=True):
            self._computed(segment, table, done, now)
        self._pump(now)

    def _on_launched_layer(self, done: int, memory: CudaMemory) -> None:
        """Record that the kernels of ``done`` layers were launched: the layers are sent once the GPU has computed them.
        After the last layer's, send layers while the GPU computes later ones, until only the last is left: then
        sampling must be launched."""
        batch, now, event = self._batch, self.clock(), memory.mark()
        for segment, table in zip(batch.segments, batch.tables, strict=True):
            self._computed(segment, table, done, now, event)
        before, self._last_event = self._last_event, event
        if done == len(self.engine.layout.layers) > 1:
            while not self.sender.has_ended(before):
                self._pump(self.clock())
                self.channels.poll(LISTEN_S)

    def _computed(
        self, segment: Segment, table: Seq[BlockId], layers: int, now: float, after: Event | None = None
    ) -> None:
        """Send what the running step has computed of ``segment`` in ``layers`` layers, but for the last token of a
        prompt with a grammar: it is computed again if its mask is late, and must not change under way. It is sent at
        the hand-over."""
        end = segment.end - (segment.sequence.constrained and segment.wants_token)
        if end > segment.start:
            self.sender.computed(segment.sequence.id.transfer, table, end, layers, now, after)

    def sampled(self, batch: Batch, samples: list[Sampled], now: float) -> None:
        """Send the first tokens of completed prompts to the coordinator before anything else, then hand over the KV."""
        for segment in batch.segments:
            computing = self._prompts.get(segment.sequence.id.transfer)
            if computing is not None and computing.first is None:
                computing.chunks.add(self._step_at - computing.started_at, now - self._step_at, segment.length)
        writer = TokenSpanEncoder()
        ready: list[tuple[TransferId, list[Sequence], FirstTokens]] = []
        for sample in samples:
            transfer = sample.sequence.id.transfer
            prompt = self._prompts[transfer]
            if prompt.first is not None:  # computed again: the token that was sent the first time stays
                ready.append((transfer, [sample.sequence], prompt.first))
                continue
            figures, choices = self._figures(sample.sequence, now), self._choices(sample)
            prompt.first = FirstTokens(
                pack_tokens(sample.tokens),
                tuple(choice.finish for choice in choices),
                tuple(stop_id(choice) for choice in choices),
                tuple(to_wire(entry) for entry in sample.logprobs),
                figures,
            )
            chunks = prompt.chunks.reported()
            self.membership.send(Timing(transfer.request, transfer.attempt, figures, chunks=chunks))
            for choice in choices:
                writer.add(choice, max(0, choice.output_length - 1))
            ready.append((transfer, choices, prompt.first))
        self._send(writer)
        for transfer, choices, first in ready:
            self._hand_over(transfer, choices, first, now)

    @staticmethod
    def _choices(sample: Sampled) -> list[Sequence]:
        """Return one sequence per choice, each with its first token, if the request asks for output. Their blocks are
        not forked: decode does that."""
        sequence = sample.sequence
        sequence.siblings = 0
        choices = [sequence, *(sequence.fork(choice) for choice in range(1, len(sample.tokens)))]
        for choice, token, logprobs in zip(choices, sample.tokens, sample.logprobs, strict=True):
            if choice.end_unsampled() is FinishReason.RUNNING:
                choice.append(token, logprobs)
        return choices

    def _hand_over(self, transfer: TransferId, choices: list[Sequence], first: FirstTokens, now: float) -> None:
        if all(choice.finish is not FinishReason.RUNNING for choice in choices):
            for choice in choices:
                self._output_history.keep(choice, now)
            self.sender.cancel(transfer, "ended by its first token")
            self._drop(transfer)
            return
        prompt = self._prompts[transfer]
        prompt.table = self.planner.detach(prompt.sequence, transfer_holder(transfer))
        if prompt.sequence.constrained:
            layers = len(self.engine.layout.layers)
            self.sender.computed(transfer, prompt.table.blocks, prompt.sequence.computed, layers, now)
        self.sender.finish(transfer, first, now)

    def _figures(self, sequence: Sequence, now: float) -> dict[str, float]:
        prompt = self._prompts[sequence.id.transfer]
        return {
            "queue_ms": (prompt.started_at - prompt.arrived_at) * 1000,
            "prefill_ms": (now - prompt.started_at) * 1000,
            "cached_tokens": float(self.planner.table(sequence).cached_tokens),
        }

    def _send(self, writer: TokenSpanEncoder) -> None:
        for message in writer.messages():
            self.membership.send(message)

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _make_way(self, now: float) -> None:
        """Take blocks from prompts without decode's grant if prompts with a grant need them. Compute prompts again that
        gave their blocks back and have a grant now."""
        for transfer in [each for each in self._aside if self.sender.granted(each)]:
            self._aside.remove(transfer)
            aside = self._prompts[transfer].sequence
            again = Sequence(aside.request, aside.attempt)
            again.scored = aside.scored
            self.planner.add(again)
        if any(self.sender.granted(sequence.id.transfer) for sequence in self.planner.in_need):
            for transfer, prompt in self._prompts.items():
                if prompt.table is not None and not self.sender.granted(transfer):
                    self._set_aside(transfer, prompt, now)

    def _set_aside(self, transfer: TransferId, prompt: _Prompt, now: float) -> None:
        assert prompt.table is not None
        self.sender.withdraw(transfer, now)
        self.cache.close(prompt.table)
        prompt.table = None
        self._aside.add(transfer)
        self.report.count("set_aside_prompts")

    # -- shipping -----------------------------------------------------------------------------------------------------

    def _pump(self, now: float, budget_s: float = math.inf) -> None:
        self._looked_at = now
        self._ended += self.sender.pump(now, budget_s)

    def more_to_move(self) -> bool:
        return self.sender.behind

    def rest_s(self) -> float:
        return LISTEN_S if self.sender.waits_for_device else super().rest_s()

    def move_kv(self, now: float) -> None:
        self._output_history.forget(now)
        self._pump(now, BUDGET_S)
        ended, self._ended = self._ended, []
        for end in ended:
            if decode := self._last_pair.get(end.transfer):
                self._drop(end.transfer)
                if isinstance(end, Shipped):
                    self.membership.send(Measured(decode, end.link, end.bytes, end.seconds))
                continue
            if end.transfer not in self._prompts:
                continue
            self._drop(end.transfer)
            match end:
                case Shipped():
                    self._shipped(end)
                case SendFailed():
                    self._lost(end)
        self._make_way(now)

    def _shipped(self, end: Shipped) -> None:
        self.report.count(f"kv_bytes_{end.link}", end.bytes)
        self.report.count(f"kv_seconds_{end.link}", end.seconds)
        self.report.count("kv_transfers")
        values = {
            "transfer_ms": end.seconds * 1000,
            "transfer_exposed_ms": end.exposed_seconds * 1000,
            "kv_bytes": float(end.bytes),
        }
        self.membership.send(Timing(end.transfer.request, end.transfer.attempt, values, end.link))

    def _lost(self, end: SendFailed) -> None:
        if end.cancelled_by_peer:  # decode called it off, and reports it if it is a failure
            log.debug("hand-off %s was called off: %s", end.transfer, end.reason)
        else:
            log.warning("hand-off %s failed: %s", end.transfer, end.reason)
            self.report.count("kv_transfer_failures")
            self.requests.fail(end.transfer, "transfer_failed", end.reason, retriable=True)

    def _measure(self, message: Measure, now: float) -> None:
        """Run a link trial: ship blocks with arbitrary contents, with the frames and checks of a real hand-off."""
        transfer = TransferId(message.request, message.attempt)
        if (table := self.requests.open_trial(transfer, message.tokens, now)) is None:
            return
        self._last_pair[transfer] = message.peer.incarnation
        try:
            self.sender.open(transfer, message.peer, message.tokens, table.blocks, now)
        except WireError:
            self._drop(transfer)
            raise
        self.sender.computed(transfer, table.blocks, message.tokens, len(self.engine.layout.layers), now)
        self.sender.finish(transfer, FirstTokens(b"", (), (), ()), now)
