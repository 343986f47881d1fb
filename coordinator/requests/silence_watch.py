"""Requests for which a live worker sends nothing.

Two signs: heartbeats that do not list a request which the worker should have, and a stream without tokens for too long.
Owns ``record.missed_beats`` and which heartbeats count. Asks for missing tokens before it gives up an attempt. Does not
know about workers that are silent altogether (:mod:`coordinator.cluster.liveness`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from common.core.ids import REQUEST_ID_BYTES, Incarnation
from common.net.messages import Resend, ResendPrompt
from coordinator.cluster.gateway import Gateway
from coordinator.cluster.registry import WorkerHandle
from coordinator.requests.assignments import Assignments
from coordinator.requests.record import RequestRecord
from coordinator.requests.recovery import Recovery
from coordinator.requests.state import State

log = logging.getLogger("tandem.dispatch")

MISSED_BEATS = 3
"""A worker does not have a request that this many of its heartbeats in a row omit, although it got a Resend for the
missing tokens after each earlier one. One omission proves nothing: tokens travel on another socket than heartbeats."""
STALL_INTERVALS, STALL_STEPS = 20, 4
"""A stream without tokens for longer than the failure timeout, this many of its median intervals and this many of its
worker's longest steps is retried on another worker, unless its worker lists it as resting."""


class SilenceWatch:
    """Retries the requests that a live worker has lost or has stopped serving."""

    def __init__(self, gateway: Gateway, assignments: Assignments, recovery: Recovery) -> None:
        self._gateway, self._assignments, self._recovery = gateway, assignments, recovery
        self._loop_lag, self._times, self._clock = gateway.registry.loop_lag, gateway.registry.times, gateway.clock
        self._emptied: dict[Incarnation, int] = {}
        """``Gateway.times_emptied`` at the last heartbeat of each worker that counted."""

    def beat(self, worker: WorkerHandle) -> None:
        """Retry the requests that the worker should have but that MISSED_BEATS of its heartbeats in a row do not list;
        before that, send a Resend for their missing tokens.

        A heartbeat counts only if everything that had arrived was read at least once since the last one that counted:
        under a backlog a heartbeat overtakes the tokens that explain it.
        """
        beat, on, emptied = worker.beat, self._assignments.on(worker.id), self._gateway.times_emptied
        if beat is None or not on or self._emptied.get(worker.id) == emptied:
            return
        self._emptied[worker.id] = emptied
        known = set(_ids(beat.live))
        for record in list(on.values()):
            if record.sent.get(worker.id, 0) > beat.acted_on or not self._should_have(record, worker):
                continue
            missed = 0 if record.id in known else record.missed_beats.get(worker.id, 0) + 1
            record.missed_beats[worker.id] = missed
            if missed >= MISSED_BEATS:
                log.warning(
                    "%s does not have a request that was sent to it", worker.hello.name, extra=record.log_fields
                )
                self._recovery.failed_by(worker, record, "it does not have the request")
            elif missed:
                self._ask_for_the_end(worker, record)
            elif record.n > 1:
                self._ask_for_the_silent(worker, record)

    def look_for_stalls(self, worker: WorkerHandle, now: float) -> None:
        """Retry the streams that a live worker lists but for which it sends no tokens."""
        beat, on = worker.beat, self._assignments.on(worker.id)
        if beat is None or not on:
            return
        resting, least_s = set(_ids(beat.resting)), self._times.timeout_s
        for record in list(on.values()):
            if (
                record.progress.state is not State.DECODING
                or record.progress.decode != worker.id
                or record.id in resting
            ):
                continue
            if now - record.heard_at <= least_s:  # the common case; the exact limit below is costlier to compute
                continue
            silence_s = self._loop_lag.silence(record.heard_at, now)
            if silence_s > max(least_s, STALL_INTERVALS * record.interval_s, STALL_STEPS * beat.longest_ms / 1000):
                log.warning(
                    "%s has sent no tokens of a stream for %.1f s",
                    worker.hello.name,
                    silence_s,
                    extra=record.log_fields,
                )
                self._recovery.failed_by(worker, record, f"it has sent no tokens for {silence_s:.1f} s")

    def forget(self, worker: Incarnation) -> None:
        """Forget the heartbeats of a worker that is gone."""
        self._emptied.pop(worker, None)

    def _ask_for_the_end(self, worker: WorkerHandle, record: RequestRecord) -> None:
        """Ask the worker to resend the missing tokens of a request that it does not list: it may have finished the
        request, and its last message was lost. A worker keeps such output for a while. The next heartbeat counts only
        once the worker has acted on this, which a worker in a long step has not."""
        progress = record.progress
        if not progress.all_scored and worker.id == progress.workers[0]:  # the one that computes the prompt
            again = ResendPrompt(record.id, progress.attempt, progress.scored + 1)
            if not self._assignments.send(record, worker, again):
                return
        for choice, finish in enumerate(progress.finish):
            if not finish and not self._assignments.send(
                record, worker, Resend(record.id, progress.attempt, choice, len(progress.output[choice]))
            ):
                return

    def _ask_for_the_silent(self, worker: WorkerHandle, record: RequestRecord) -> None:
        """Ask the worker to resend the missing tokens of choices that got none for a heartbeat interval.

        The last message of such a choice may be lost, and heartbeats list the request as long as any other choice goes
        on, even one that the coordinator has ended. A choice that waits for a slot or for blocks has nothing to resend.
        These messages are not noted in ``record.sent``, so that heartbeats count whether or not the worker has acted on
        them.
        """
        progress = record.progress
        if progress.state is not State.DECODING:
            return
        for choice, (finish, heard_at) in enumerate(zip(progress.finish, record.last_token_at, strict=True)):
            if not finish and self._clock() - heard_at > self._times.heartbeat_s:
                self._gateway.send(worker, Resend(record.id, progress.attempt, choice, len(progress.output[choice])))

    def _should_have(self, record: RequestRecord, worker: WorkerHandle) -> bool:
        """Return whether the worker must have the request: decode from the reservation to the end, prefill until the
        first token and all log-probabilities of the prompt have arrived."""
        progress = record.progress
        if worker.id == progress.prefill:
            return progress.state is State.PREFILLING or (progress.needs(worker.id) and not progress.all_scored)
        return worker.id == progress.decode and progress.needs(worker.id)


def _ids(joined: bytes) -> Iterator[bytes]:
    """Split joined request ids."""
    return (joined[at : at + REQUEST_ID_BYTES] for at in range(0, len(joined), REQUEST_ID_BYTES))
