"""The stream of tokens from workers to clients.

Checks each message, accepts the new part of each span, asks for missing parts and measures intervals. Owns the times of
tokens in the records, and ``record.timings``. Does not know text, or how a lost attempt is retried. Runs for every
engine step of every worker, so it must stay cheap.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from common.core.errors import WireError
from common.core.ids import REQUEST_ID_BYTES, unpack_tokens
from common.core.request import FinishReason
from common.net.messages import Logprobs, PromptLogprobs, Resend, ResendPrompt, Timing, Tokens
from common.net.prompt_columns import from_message
from coordinator.cluster.gateway import Gateway
from coordinator.cluster.registry import WorkerHandle
from coordinator.metrics import Metrics
from coordinator.requests.active import ActiveRequests
from coordinator.requests.assignments import Assignments
from coordinator.requests.errors import internal
from coordinator.requests.placement_timer import PlacementTimer
from coordinator.requests.record import RequestRecord
from coordinator.requests.recovery import Recovery
from coordinator.requests.state import Contradiction, Gap, Unscored
from coordinator.requests.timeline import STALL_S
from coordinator.routing.breakers import SingleWorker
from coordinator.routing.router import Router

log = logging.getLogger("tandem.dispatch")

RESEND_EVERY_S = 0.2
"""Minimum interval between two Resend messages that fill gaps of one request."""
_FINISHES = tuple(FinishReason)


class TokenStream:
    """Delivers the workers' tokens and timings to the requests and their clients."""

    def __init__(
        self,
        gateway: Gateway,
        router: Router,
        metrics: Metrics,
        active: ActiveRequests,
        assignments: Assignments,
        recovery: Recovery,
        timer: PlacementTimer,
    ) -> None:
        self._gateway, self._router, self._metrics = gateway, router, metrics
        self._active, self._assignments, self._recovery, self._timer = active, assignments, recovery, timer
        self._records, self._breakers, self._clock = active.records, router.breakers, gateway.clock
        self.accepted = 0
        """Number of output tokens accepted so far."""

    def tokens(self, worker: WorkerHandle, message: Tokens) -> None:
        """Deliver the token spans of one engine step; raises WireError if the columns do not match."""
        ids = _checked_ids(message)
        now = self._clock()
        logprobs = message.logprobs
        at = 0
        for index, count in enumerate(message.counts):
            record = self._records.get(message.requests[index * REQUEST_ID_BYTES : (index + 1) * REQUEST_ID_BYTES])
            if record is not None:
                self._span(worker, record, message, index, ids[at : at + count], logprobs[at : at + count], now)
            at += count

    def _span(
        self,
        worker: WorkerHandle,
        record: RequestRecord,
        message: Tokens,
        index: int,
        ids: list[int],
        logprobs: Sequence[Logprobs | None],
        now: float,
    ) -> None:
        progress, choice, attempt = record.progress, message.choices[index], message.attempts[index]
        if worker.id != progress.decode and worker.id != progress.prefill:
            return
        finish = _FINISHES[message.finish[index]]
        if finish in (FinishReason.ABORTED, FinishReason.FAILED):
            if attempt == progress.attempt and progress.needs(worker.id):
                self._recovery.retry(record, worker, "it ended the request early")
            return
        news = progress.accept(choice, attempt, message.starts[index], ids, finish)
        if news is None:
            return
        if isinstance(news, Contradiction):
            log.warning(
                "%s contradicts tokens accepted before, from token %d", worker.hello.name, message.starts[index],
                extra=record.log_fields,
            )  # fmt: skip
            self._recovery.failed_by(worker, record, "it contradicts tokens that were accepted before")
            return
        if isinstance(news, Gap):
            self._ask_again(worker, record, choice, news.start, now)
            return
        if isinstance(news, Unscored):
            record.held_back = True
            self._ask_for_prompt(record, now)
            return
        self._note_progress(worker, record, len(news.ids), now)
        self._observe(record, choice, len(news.ids), now)
        try:
            ended = record.client.tokens(record, choice, news.ids, logprobs[news.skip :], finish)
        except Exception:  # an error in one answer's text must not stop the others
            self._spoiled(record)
            return
        if ended and not progress.over:
            progress.end_choice(choice)
            record.cut = True
        if progress.finished and not progress.over:
            self._active.finish(record)

    def _spoiled(self, record: RequestRecord) -> None:
        """End a request whose client has raised an error; called in the handler of that error."""
        log.exception("an answer could not be written", extra=record.log_fields)
        self._active.fail(record, internal())

    def _note_progress(self, worker: WorkerHandle, record: RequestRecord, count: int, now: float) -> None:
        """Note that the worker has computed ``count`` new tokens: for the circuit breakers, the suspicion of a crash,
        the retry budget and the watch for silence."""
        progress = record.progress
        progress.on_tokens(worker.id)
        if not self._breakers.calm and self._breakers.succeeded(SingleWorker(worker.id)):
            self._timer.soon()
        if progress.crashes and progress.survives(count):
            self._timer.soon()  # other suspects may be placed on its workers now
        if self._assignments.budget.settled(record.id):
            self._timer.soon()
        self._note_hand_off(record)
        record.heard_at = now
        record.missed_beats.pop(worker.id, None)

    def _observe(self, record: RequestRecord, choice: int, count: int, now: float) -> None:
        self.accepted += count
        if record.promise is not None and record.promise.prefill_tokens:
            self._router.prefilled(record.promise)
            self._timer.soon()  # a prefill worker has room for the next prompt
            record.timeline.first_tokens(now, record.output_length)
        if record.first_token_at is None:
            record.first_token_at, record.first_attempt = now, record.progress.attempt
            self._metrics.first_token(record, now)
        elif (before := record.last_token_at[choice]) and count:
            self._metrics.inter_token((now - before) / count, count)
            if now - before > STALL_S:
                record.timeline.gap(before, now, record.interval_s, len(record.intervals))
            record.intervals.append((now - before) / count)
        record.last_token_at[choice] = now

    def _ask_again(self, worker: WorkerHandle, record: RequestRecord, choice: int, start: int, now: float) -> None:
        if now - record.asked_at >= RESEND_EVERY_S:
            record.asked_at = now
            self._gateway.send(worker, Resend(record.id, record.progress.attempt, choice, start))

    def prompt_logprobs(self, worker: WorkerHandle, message: PromptLogprobs) -> None:
        """Deliver log-probabilities of a prompt; raises WireError if the message contradicts itself or the request."""
        span = from_message(message)
        record = self._records.get(message.request)
        if record is None or worker.id not in record.progress.workers:
            return
        progress, now = record.progress, self._clock()
        if span.end - 1 > progress.to_score or span.tops > (record.sampling.prompt_logprobs or 0):
            raise WireError("log-probabilities that were not requested")
        first = progress.accept_prompt(message.attempt, span.start, span.end)
        if isinstance(first, Gap):
            self._ask_for_prompt(record, now)
            return
        if first is None:
            return
        record.heard_at = now
        record.missed_beats.pop(worker.id, None)
        try:
            record.client.prompt_logprobs(record, span.part(first, span.end))
        except Exception:  # an error in one answer's text must not stop the others
            self._spoiled(record)
            return
        if progress.all_scored and record.held_back:
            record.held_back = False
            self._ask_for_output(record)

    def _ask_for_prompt(self, record: RequestRecord, now: float) -> None:
        """Ask the worker that computes the prompt for the log-probabilities that are missing."""
        progress = record.progress
        worker = self._gateway.registry.get(progress.workers[0])
        if worker is not None and now - record.asked_at >= RESEND_EVERY_S:
            record.asked_at = now
            self._gateway.send(worker, ResendPrompt(record.id, progress.attempt, progress.scored + 1))

    def _ask_for_output(self, record: RequestRecord) -> None:
        """Ask the workers of a request for all output that is missing."""
        progress = record.progress
        for incarnation in progress.workers:
            if (worker := self._gateway.registry.get(incarnation)) is not None:
                for choice, (finish, output) in enumerate(zip(progress.finish, progress.output, strict=True)):
                    if not finish:
                        self._gateway.send(worker, Resend(record.id, progress.attempt, choice, len(output)))

    def timing(self, worker: WorkerHandle, message: Timing) -> None:
        """Record what a worker measured about a request, and that its hand-off was accepted if decode reports."""
        if "kv_bytes" in message.values:  # also if the request has ended meanwhile
            self._metrics.transferred(message)
        record = self._records.get(message.request)
        timeline = record.timeline if record is not None else self._active.timelines.get(message.request)
        if timeline is not None:
            timeline.report(message.attempt, message.values, message.link, message.chunks)
        if record is None or message.attempt != record.progress.attempt:
            return
        if record.first_attempt in (None, message.attempt):  # a later attempt shows as a gap in the stream instead
            record.timings.update(message.values)
        if worker.id == record.progress.decode and record.progress.path == "disagg":
            record.progress.decoding()
            record.heard_at = self._clock()
            self._note_hand_off(record)

    def _note_hand_off(self, record: RequestRecord) -> None:
        if record.pair is not None and self._assignments.hand_off_accepted(record):
            self._timer.soon()


def _checked_ids(message: Tokens) -> list[int]:
    """Return the token ids of a message; raises WireError if its columns do not fit together."""
    rows = len(message.counts)
    columns = (message.choices, message.attempts, message.starts, message.finish, message.stop_ids)
    if {rows, *map(len, columns)} != {rows} or len(message.requests) != rows * REQUEST_ID_BYTES:
        raise WireError("columns of different lengths")
    try:
        ids = unpack_tokens(message.ids)
    except ValueError as error:
        raise WireError(str(error)) from error
    if not rows:
        return ids
    if min(message.counts) < 0 or min(message.starts) < 0 or sum(message.counts) != len(ids):
        raise WireError("counts that do not match the tokens")
    if message.logprobs and len(message.logprobs) != len(ids):
        raise WireError("log-probabilities that do not match the tokens")
    if min(message.finish) < 0 or max(message.finish) >= len(_FINISHES):
        raise WireError("an unknown finish reason")
    return ids
