"""The dispatcher: receives requests from HTTP and events from the gateway, and passes them to its parts.

Owns the parts and the periodic tick. Knows neither text nor HTTP: tokens go to a ``Client``. Each part knows only those
above it in this list:

    queue, placement_timer    which requests wait, in which order, and when the next pass over them runs
    ping_rounds               Pings after a worker's death, and which requests wait for the answers
    assignments               what is booked for a request on its workers
    active                    the records of requests that have not ended, and their ends
    recovery, crash_verdicts  new attempts, and which request crashed a worker
    token_stream              tokens and timings from workers
    silence_watch             requests for which a live worker sends nothing
    placement, wait_limits    passes over the queue, and how long requests wait for workers that are missing
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from common.config.coordinator import STARTING_WAIT_S
from common.core.errors import RequestError
from common.core.ids import Incarnation
from common.net.messages import Measured, PromptLogprobs, RequestFailed, Timing, Tokens
from coordinator.cluster.events import Loss
from coordinator.cluster.gateway import Gateway
from coordinator.cluster.link_trials import LinkTrials
from coordinator.cluster.registry import Registry, WorkerHandle
from coordinator.cluster.worker_log import WorkerLog
from coordinator.metrics import Metrics
from coordinator.requests.active import ActiveRequests
from coordinator.requests.admission import Admission
from coordinator.requests.assignments import Assignments
from coordinator.requests.crash_verdicts import CrashVerdicts
from coordinator.requests.errors import no_workers, shutting_down
from coordinator.requests.ping_rounds import PingRounds
from coordinator.requests.placement import Placer
from coordinator.requests.placement_timer import PlacementTimer
from coordinator.requests.queue import RequestQueue
from coordinator.requests.record import RequestRecord
from coordinator.requests.recovery import Recovery
from coordinator.requests.silence_watch import SilenceWatch
from coordinator.requests.token_stream import TokenStream
from coordinator.requests.wait_limits import WaitLimits
from coordinator.routing.queue_pressure import QueuePressure
from coordinator.routing.router import Router

log = logging.getLogger("tandem.dispatch")


class Dispatcher:
    """Admits requests, connects the parts that carry them, and passes events on."""

    def __init__(
        self,
        gateway: Gateway,
        router: Router,
        admission: Admission,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop | None = None,
        starting_wait_s: float = STARTING_WAIT_S,
    ) -> None:
        self.gateway, self.router, self.admission, self.metrics = gateway, router, admission, metrics
        self.registry: Registry = gateway.registry
        self.times = self.registry.times
        self.breakers = router.breakers
        self._link_trials = LinkTrials(gateway)
        self.link_stats = self._link_trials.stats
        self.leaving = False
        """Whether another coordinator takes over, while this one still accepts requests."""
        self.draining = False
        self.worker_log = WorkerLog()
        self.registry.on_drain = self.worker_log.draining
        self.queue_pressure: QueuePressure | None = None
        """Set if a launcher wants to be informed of queue pressure."""
        self._clock = gateway.clock
        self._loop = loop or asyncio.get_running_loop()
        self._queue = RequestQueue()
        self._timer = PlacementTimer(self._queue, lambda: self._placer.run_pass(), self._loop, self._clock)
        self._pings = PingRounds(gateway)
        self._assignments = Assignments(gateway, router)
        self._active = ActiveRequests(
            admission, metrics, self._queue, self._timer, self._pings, self._assignments, self._loop, self._clock
        )
        self._recovery = Recovery(gateway, router.breakers, metrics, self._active, self._assignments)
        self._crashes = CrashVerdicts(self._active, self._recovery, self._pings, self._timer)
        self._placer = Placer(
            gateway, router, self._queue, self._timer, self._pings, self._assignments, self._active, self._recovery
        )
        self._limits = WaitLimits(gateway, router, self._queue, self._timer, self._active, starting_wait_s)
        self._silence = SilenceWatch(gateway, self._assignments, self._recovery)
        self._stream = TokenStream(
            gateway, router, metrics, self._active, self._assignments, self._recovery, self._timer
        )
        self.records, self.timelines = self._active.records, self._active.timelines
        admission.running = self._active.running
        self._ticks: asyncio.TimerHandle | None = None
        self._leases_due = 0.0

    def start(self) -> None:
        """Start the gateway and the periodic tick, in the event loop of this dispatcher."""
        self.gateway.start(self, self._loop)
        now = self._clock()
        self._limits.start(now)
        self.registry.loop_lag.look(now)  # so that the lag of the first sweep is measured too
        self._next_tick()

    def close(self) -> None:
        """Stop the tick and abort all requests. The gateway stays open."""
        if self._ticks is not None:
            self._ticks.cancel()
        self._timer.at(None)
        for record in list(self.records.values()):
            self.abort(record)

    # -- the client's side ----------------------------------------------------------------------------------------

    def submit(self, records: Sequence[RequestRecord], *, first_try: bool = False) -> None:
        """Admit all of the requests or none; raises RequestError if they are refused. ``first_try``: by the client's
        headers, the requests have not been refused before."""
        if self.draining:
            raise shutting_down()
        role = self.router.missing_role()
        now = self._clock()
        if role is not None and not self._limits.may_come(role, now):
            raise no_workers(role, starting=self.registry.starting(role))
        for record in records:
            if (reason := self._limits.size_error(record)) is not None:
                raise reason
        self.admission.enter(
            len(records),
            sum(record.prompt_length for record in records),
            now,
            priority=records[0].priority,
            within_s=records[0].deadline_at - now,
            key=hash((records[0].cache_salt, *(record.prompt for record in records))),
            first_try=first_try,
        )
        for record in records:
            record.awaiting_reconnect = role is not None
            self._active.open(record, now)
        self._timer.now()

    def abort(self, record: RequestRecord) -> None:
        """End a request whose client has left or wants no more output. Idempotent; ignores a request that was not
        admitted."""
        self._active.abort(record)

    def fail(self, record: RequestRecord, error: RequestError) -> None:
        """End the request with an error that is sent to the client. Idempotent."""
        self._active.fail(record, error)

    # -- events from workers --------------------------------------------------------------------------------------

    @property
    def accepted_tokens(self) -> int:
        """Number of output tokens that were accepted from workers."""
        return self._stream.accepted

    def on_worker_joined(self, worker: WorkerHandle) -> None:
        self.worker_log.joined(worker)
        self.on_worker_reconnected(worker.id)
        self._limits.worker_joined()
        self._link_trials.begin(worker)
        self._timer.soon()

    def measured(self, worker: WorkerHandle, message: Measured) -> None:
        self._link_trials.measured(worker, message)

    async def measure_links(self) -> None:
        """Measure the links of all pairs of workers anew."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._link_trials.measure_all(lambda: None if done.done() else done.set_result(None))
        await done

    def on_worker_lost(self, worker: WorkerHandle, how: Loss) -> None:
        """Retry the requests of a worker that was lost without a Goodbye.

        They are retried at once unless the worker may have died (MISSING). Then they wait until the other workers have
        answered a Ping, and requests suspected of crashing this worker and others before it wait until its death is
        confirmed or refuted.
        """
        self.worker_log.lost(worker, how.value)
        self.metrics.worker_lost(worker.role, how)
        records = self._requests_lost_with(worker)
        if how is not Loss.MISSING:
            for record in records:
                free = how is Loss.RECONNECTED and record.progress.disconnected()
                self._recovery.retry(record, worker, how.value, free=free)
        elif records:
            self._crashes.worker_missing(worker, records)
        self._pings.complete()  # the worker that is gone may have been the last one to answer
        self._timer.soon()

    def on_worker_died(self, worker: Incarnation) -> None:
        self.worker_log.died(worker)
        self._crashes.worker_died(worker)

    def on_worker_reconnected(self, worker: Incarnation) -> None:
        self._crashes.worker_reconnected(worker)

    def on_worker_left(self, worker: WorkerHandle) -> None:
        """Retry the requests that the worker has not finished, without charging their retry budgets."""
        absence = self.registry.absent.get(worker.hello.name)
        self.worker_log.left(worker, "it has drained, or was stopped" if absence is None else absence.why)
        for record in self._requests_lost_with(worker):
            self._recovery.retry(record, worker, "it has left", free=True)
        self._timer.soon()

    def _requests_lost_with(self, worker: WorkerHandle) -> list[RequestRecord]:
        """Forget a worker that is gone and return the requests whose current attempt is lost with it."""
        self.router.forget(worker)
        self._link_trials.forget(worker)
        self._silence.forget(worker.id)
        records = [record for record in self._assignments.forget(worker.id) if record.progress.needs(worker.id)]
        if records:
            log.info("requests of %s that are retried: %d", worker.hello.name, len(records))
        return records

    def tokens(self, worker: WorkerHandle, message: Tokens) -> None:
        self._stream.tokens(worker, message)

    def prompt_logprobs(self, worker: WorkerHandle, message: PromptLogprobs) -> None:
        self._stream.prompt_logprobs(worker, message)

    def timing(self, worker: WorkerHandle, message: Timing) -> None:
        self._stream.timing(worker, message)

    def failed(self, worker: WorkerHandle, message: RequestFailed) -> None:
        self._recovery.failed(worker, message)

    def beat(self, worker: WorkerHandle) -> None:
        if self._pings.complete():
            self._timer.soon()
        self._silence.beat(worker)

    # -- time -----------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = self._clock()
        try:
            listened = self.gateway.sweep(now)
            if self.breakers.tick(now):
                self._timer.soon()
            if now >= self._leases_due:
                self._leases_due = now + self.times.heartbeat_s - self.times.sweep_s / 2
                self._assignments.renew_leases()
            if self.queue_pressure is not None:
                self.queue_pressure.look(self.router.backlog_steps())
            self._link_trials.look(now)
            for worker in list(self.registry) if listened else ():
                self._silence.look_for_stalls(worker, now)
            self._limits.look(now, self._placer.workerless_since, draining=self.draining)
        except Exception:  # a failed sweep must not stop the detection of silent workers
            log.exception("a sweep over the workers failed")
        finally:
            self._next_tick()

    def _next_tick(self) -> None:
        self._ticks = self._loop.call_later(self.times.sweep_s, self._tick)
