"""The coordinator's real dispatcher with checks of its invariants."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from common.core.ids import RequestId
from common.net.messages import RequestFailed, Tokens
from coordinator.cluster.events import Loss
from coordinator.cluster.registry import WorkerHandle
from coordinator.requests.admission import MIN_RETRIES, RETRY_SHARE
from coordinator.requests.dispatcher import Dispatcher
from coordinator.requests.record import RequestRecord
from coordinator.requests.state import State
from coordinator.routing.breakers import FAILURES, FIRST_COOL_DOWN_S, WITHIN_S, Pair, SingleWorker
from coordinator.routing.router import Placement
from tests.simulation.liveness import Attempt, RequestTimeline


class CheckedDispatcher(Dispatcher):
    """A dispatcher that calls ``complain`` for each violated invariant."""

    complain: Callable[[str], None]

    def start(self) -> None:
        self._failures: dict[Pair, deque[float]] = defaultdict(lambda: deque(maxlen=FAILURES))
        self._watch(self._placer, "_place", self._place)
        self._watch(self._assignments, "release", self._released)
        self._watch(self._assignments, "hand_off_accepted", self._accepted)
        self._watch(self._recovery, "failed", self._failed)
        self._watch(self._stream, "_span", self._span)
        super().start()

    def _watch(self, part: object, method: str, check: Callable[..., Any]) -> None:
        """Call ``check`` instead of a method of a part of the dispatcher, with the method as its first argument."""
        setattr(part, method, functools.partial(check, getattr(part, method)))

    def _place(
        self, place: Callable[[RequestRecord, Placement], None], request_record: RequestRecord, placement: Placement
    ) -> None:
        names = {worker.hello.name for worker in (placement.prefill, placement.decode) if worker is not None}
        _record(request_record).attempts.append(Attempt(frozenset(names), self._clock()))
        self._look_at_breakers(placement)
        self._look_at_room(request_record, placement)
        place(request_record, placement)
        self._look_at_retries()

    def without_room(self) -> set[RequestId]:
        """Return the queued requests for which the router's ledger has no room on any worker, and those behind one."""
        holders = [*self.registry.ready("decode"), *self.registry.ready("colocated")]

        def fits(request_record: RequestRecord) -> bool:
            demand = self._placer._demand(request_record)
            return not holders or any(self.router._fits(demand, worker) for worker in holders)

        return {request_record.id for request_record in itertools.dropwhile(fits, self._queue.in_order())}

    def _look_at_breakers(self, placement: Placement) -> None:
        """Check that a pair whose hand-offs keep failing is not used during its cool-down."""
        if placement.prefill is None:
            return
        failures = self._failures.get(Pair(placement.prefill.id, placement.decode.id), ())
        if _too_many(failures):
            since = self._clock() - failures[-1]
            if since < FIRST_COOL_DOWN_S - 1e-6:
                self.complain(f"a pair is tried {since:.2f} s after its third failure")

    def _look_at_room(self, request_record: RequestRecord, placement: Placement) -> None:
        """Check that no request is placed where its output is truncated while another eligible worker has more room."""
        demand, decode = self._placer._demand(request_record), placement.decode

        def room(worker: WorkerHandle) -> int:
            return min(demand.output, demand.room(worker.hello))

        others = [each for each in self.registry.ready(decode.role) if each.id not in demand.apart_from]
        most = max((room(each) for each in others if self.breakers.allows(SingleWorker(each.id))), default=0)
        if room(decode) < min(most, demand.output):
            self.complain(f"{room(decode)} tokens fit on {decode.hello.name}, {most} elsewhere")

    def _look_at_retries(self) -> None:
        """Check that retries stay within the retry budget."""
        again = sum(
            bool(request_record.progress.attempt) and request_record.progress.state in (State.PLACED, State.PREFILLING)
            for request_record in self.records.values()
        )
        if again > max(MIN_RETRIES, RETRY_SHARE * len(self.records)):
            self.complain(f"{again} of {len(self.records)} requests are tried again at once")

    def _released(self, release: Callable[[RequestRecord], None], request_record: RequestRecord) -> None:
        release(request_record)
        for attempt in _record(request_record).attempts[-1:]:
            attempt.ended = min(attempt.ended, self._clock())

    def _accepted(self, accepted: Callable[[RequestRecord], bool], request_record: RequestRecord) -> bool:
        if request_record.pair is not None and request_record.progress.state is State.DECODING:
            self._failures.pop(request_record.pair, None)
        return accepted(request_record)

    def _failed(
        self, failed: Callable[[WorkerHandle, RequestFailed], None], worker: WorkerHandle, message: RequestFailed
    ) -> None:
        request_record = self.records.get(message.request)
        pair = request_record and request_record.pair
        failed(worker, message)
        if request_record is not None and pair and request_record.pair is None and message.code == "transfer_failed":
            failures = self._failures[pair]
            if not _too_many(failures):  # failures of hand-offs that were in flight then add nothing
                failures.append(self._clock())

    def on_worker_lost(self, worker: WorkerHandle, how: Loss) -> None:
        for pair in [pair for pair in self._failures if worker.id in pair]:
            del self._failures[pair]
        super().on_worker_lost(worker, how)

    def _span(
        self,
        span: Callable[..., None],
        worker: Any,
        request_record: RequestRecord,
        message: Tokens,
        index: int,
        *rest: Any,
    ) -> None:
        attempt, before = request_record.progress.attempt, request_record.output_length
        span(worker, request_record, message, index, *rest)
        if request_record.output_length > before and message.attempts[index] != attempt:
            self.complain(f"tokens of an older attempt ({message.attempts[index]}, not {attempt}) are taken")


def _too_many(failures: Sequence[float]) -> bool:
    return len(failures) == FAILURES and failures[-1] - failures[0] <= WITHIN_S


def _record(request_record: RequestRecord) -> RequestTimeline:
    client: Any = request_record.client
    record: RequestTimeline = client.record
    return record
