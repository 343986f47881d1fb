"""The coordinator process: start, signals, drain and shutdown.

Composes the registry, gateway, router, admission, dispatcher and HTTP application. SIGTERM or SIGINT starts a drain:
new requests get 503, and running requests have ``drain_timeout`` seconds to finish and to be read by their clients.
With ``handover_time`` another coordinator takes over the workers before that, while requests are still accepted.
Without a launcher, a second signal ends the drain at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

import uvloop
from aiohttp import web

from common.checkpoint.files import open_checkpoint
from common.config.coordinator import CoordinatorConfig
from common.core.errors import StartError, reason
from common.core.ids import WorkerName
from common.core.timeouts import FailureTimes
from common.net.hosts import bracketed, is_loopback
from common.net.keys import ClusterKeys
from common.net.sockets import Channels
from common.platform import open_files, threads
from coordinator.api.service import ServedModel, product_version
from coordinator.cluster.gateway import Gateway
from coordinator.cluster.registry import Registry
from coordinator.http.application import BACKLOG, make_app, serving
from coordinator.http.context import SERVICES, Scale, Services
from coordinator.http.pages import not_ready
from coordinator.live.feed import Feed
from coordinator.metrics import Metrics
from coordinator.pool_metrics import RequestCounts
from coordinator.requests.admission import Admission
from coordinator.requests.dispatcher import Dispatcher
from coordinator.requests.errors import shutting_down
from coordinator.requests.timeline import Timeline
from coordinator.requests.trace_context import TraceSampler
from coordinator.routing.queue_pressure import QueuePressure
from coordinator.routing.router import Router

log = logging.getLogger("tandem.coordinator")

LAG_EVERY_S = 0.05
"""Interval between samples of the event loop's lag. A stall is under-reported by at most this much; a shorter interval
would wake an idle loop more often."""

HANDOVER_LOOK_S = 0.1
"""Interval at which a coordinator that is leaving looks whether its workers have moved."""


class LauncherClient(Protocol):
    """Requests to the launcher that supervises this coordinator and the workers of the same machine."""

    async def scale(self, prefill: int | None, decode: int | None) -> tuple[int, int]:
        """Resize the pools for POST /admin/scale; see :data:`coordinator.http.context.Scale`."""

    def replace(self, name: str, pid: int, why: str) -> None:
        """Kill a worker process that hangs and start another; see :data:`coordinator.cluster.gateway.Replace`."""

    def report_queue_pressure(self, deep: bool) -> None:
        """Report that prompts have begun to pile up (``deep``) or no longer do."""

    def follow(self, follow: Callable[[WorkerName, str, float], None]) -> None:
        """Call ``follow`` with the name, reason and restart delay in seconds of each worker process that ends. The
        reason is "" if the worker is not to run any more."""


def run(
    config: CoordinatorConfig,
    on_ready: Callable[[str, str], None] | None = None,
    launcher: LauncherClient | None = None,
    workers: Mapping[WorkerName, int] | None = None,
    at_once: bool = False,
    keys: ClusterKeys | None = None,
) -> int:
    """Serve until a signal and return the exit code.

    ``on_ready`` is called with the URL and the control address once both listen. ``workers`` maps the launcher's
    workers that are already running to their process ids; one that does not join is treated as hung. ``at_once`` runs
    the coordinator's threads with real-time priority, see :func:`common.platform.threads.answer`. ``keys`` are the
    keys that ``launcher`` made; None takes them from the configured key file.

    Raises StartError if the coordinator cannot start: a busy port, a model without a tokenizer, an address that needs
    a key.
    """
    open_files.raise_limit()
    loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with threads.answering(threads.URGENT, at_once=at_once), loop as runner:
        return runner.run(_serve(config, on_ready, launcher, workers or {}, at_once, keys))


async def _serve(
    config: CoordinatorConfig,
    on_ready: Callable[[str, str], None] | None,
    launcher: LauncherClient | None,
    workers: Mapping[WorkerName, int],
    at_once: bool,
    keys: ClusterKeys | None,
) -> int:
    config.check_binds(keys)
    stop = _Stop(alone=launcher is None)
    listener = _listen(config.host, config.port)
    with contextlib.closing(listener):
        scale = launcher.scale if launcher else None
        async with running(config, scale, at_once, keys) as services, serving(make_app(services), listener):
            if launcher is not None:
                services.dispatcher.gateway.supervise(launcher.replace, workers)
                services.dispatcher.queue_pressure = QueuePressure(launcher.report_queue_pressure)
                launcher.follow(services.registry.absent.reported(services.dispatcher.gateway.clock))
            url = f"http://{bracketed(config.host)}:{listener.getsockname()[1]}"
            log.info("serving %s at %s, workers at %s", services.model.name, url, services.dispatcher.gateway.address)
            for remark in services.model.checkpoint.remarks() if launcher is None else ():
                log.info("%s", remark)
            if services.dispatcher.gateway.channels.keys is None:
                log.warning(
                    "without --cluster-key-file every user of this machine can join as a worker and read prompts"
                )
            if not (is_loopback(config.host) or config.api_keys()):
                log.warning("no API key is set: every client that reaches %s can use it", url)
            gc.collect()
            gc.freeze()  # these objects live for ever, and a full collection that visits them stalls every stream
            if on_ready is not None:
                on_ready(url, services.dispatcher.gateway.address)
            await stop.first.wait()
            await drain(services, stop.second, await hand_over(services, stop.second))
    return 0


@contextlib.asynccontextmanager
async def running(
    config: CoordinatorConfig, scale: Scale | None = None, at_once: bool = False, keys: ClusterKeys | None = None
) -> AsyncIterator[Services]:
    """Run all services except HTTP in the running event loop."""
    checkpoint = open_checkpoint(config.model, config.revision, config.trust_remote_code)
    registry = Registry(checkpoint.fingerprint, FailureTimes(config.failure_timeout))
    registry.expected = {
        "prefill": config.expect_prefill,
        "decode": config.expect_decode,
        "colocated": config.expect_colocated,
    }
    model = ServedModel(checkpoint, config, registry)
    channels = Channels(keys or config.keys_of("coordinator"), at_once=at_once)
    gateway = Gateway(
        registry,
        config.control_host,
        config.control_port,
        insecure_cluster=config.insecure_cluster,
        near=scale is not None,  # only a launcher gives scale, and its workers are on this machine
        channels=channels,
    )
    metrics = Metrics(model.name, registry, version=product_version())
    router = Router(registry, config.local_prefill, config.no_prefill_policy)
    admission = Admission(config.max_queued_requests, config.max_queued_tokens)
    dispatcher = Dispatcher(gateway, router, admission, metrics, starting_wait_s=config.starting_wait)
    metrics.sources.request_counts = lambda: RequestCounts(
        len(dispatcher.records) - admission.requests, admission.requests, admission.tokens
    )
    metrics.sources.output_tokens = lambda: dispatcher.accepted_tokens
    metrics.sources.bad_messages = lambda: gateway.bad_messages
    metrics.sources.open_breakers = lambda: router.breakers.open
    metrics.sources.cut_off_peers = lambda: gateway.ban_list.cut_off
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(model.close)
        stack.callback(gateway.close)
        export = await stack.enter_async_context(_exporting(config, model.name, dispatcher, metrics))
        dispatcher.start()
        stack.callback(dispatcher.close)
        stack.enter_context(contextlib.closing(_LagSampler(metrics.loop_lag)))
        feed = Feed(dispatcher, metrics, model.name, product_version())
        stack.enter_context(contextlib.closing(feed))
        sampler = TraceSampler(config.trace_sample_ratio if config.otlp_traces_endpoint else None)
        services = Services(config, model, dispatcher, registry, metrics, feed, scale, sampler, export)
        metrics.sources.ready = lambda: not_ready(services) is None
        yield services


def _exporting(
    config: CoordinatorConfig, model: str, dispatcher: Dispatcher, metrics: Metrics
) -> contextlib.AbstractAsyncContextManager[Callable[[Timeline], None] | None]:
    """Return what exports traces and metrics by OTLP while it is entered, if that is configured; it yields a function
    that exports a request which the dispatcher has not seen. Raises StartError if a package is missing."""
    if not (config.otlp_traces_endpoint or config.otlp_metrics_endpoint):
        return contextlib.nullcontext(None)
    config.check_telemetry()
    from coordinator.telemetry.start import exporting

    return exporting(config, model, product_version(), dispatcher.timelines, metrics.traces)


@contextlib.asynccontextmanager
async def create_app(config: CoordinatorConfig, scale: Scale | None = None) -> AsyncIterator[web.Application]:
    """Yield the HTTP application over running services, for tests; ``app[SERVICES]`` holds the services."""
    async with running(config, scale) as services:
        yield make_app(services)


async def hand_over(services: Services, second: asyncio.Event) -> float:
    """Send the workers to the next coordinator, and go on serving for ``handover_time`` seconds and until they have
    joined it, at most for half of ``drain_timeout`` more, or until ``second`` is set. Clients and load balancers learn
    of it: connections are closed with each answer, and /ready is 503. Return the seconds that remain for a drain."""
    config, gateway, began_s = services.config, services.dispatcher.gateway, time.monotonic()
    if not config.handover_time:
        return config.drain_timeout
    text = (
        "leaving: the workers are sent to the next coordinator, requests are accepted for %g s or until they are there"
    )
    log.info(text, config.handover_time)
    services.dispatcher.leaving = True
    gateway.leave()
    elapsed_s = 0.0
    while not second.is_set() and elapsed_s < config.handover_time + config.drain_timeout / 2:
        if elapsed_s >= config.handover_time and gateway.handed_over:
            break
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(second.wait(), HANDOVER_LOOK_S)
        elapsed_s = time.monotonic() - began_s
    if not gateway.handed_over:
        log.warning("not all workers have joined another coordinator after %.0f s: draining all the same", elapsed_s)
    return config.handover_time + config.drain_timeout - elapsed_s


async def drain(services: Services, second: asyncio.Event, patience_s: float | None = None) -> None:
    """Refuse new requests and wait until running ones are answered to the last byte.

    The wait ends after ``patience_s`` seconds (None: ``drain_timeout``) or when ``second`` is set. Requests that still
    run then fail with an error; a client that has not read its whole answer loses the rest.
    """
    dispatcher, answers = services.dispatcher, services.answers
    dispatcher.draining = True
    log.info("draining: %d requests are running, %d answers are open", len(dispatcher.records), answers.count)
    waits = [asyncio.ensure_future(event.wait()) for event in (answers.none, second)]
    timeout_s = services.config.drain_timeout if patience_s is None else patience_s
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    for record in list(dispatcher.records.values()):
        dispatcher.fail(record, shutting_down())


class _LagSampler:
    """Measures the lag of the running event loop and calls ``report`` with it, in seconds, every LAG_EVERY_S until
    ``close``. The dispatcher's sweep timer cannot serve for this: a stall between two sweeps does not delay the
    next one."""

    def __init__(self, report: Callable[[float], None]) -> None:
        self._report, self._loop = report, asyncio.get_running_loop()
        self._wait()

    def close(self) -> None:
        self._timer.cancel()

    def _wait(self) -> None:
        self._due = time.monotonic() + LAG_EVERY_S
        self._timer = self._loop.call_later(LAG_EVERY_S, self._sample)

    def _sample(self) -> None:
        self._report(max(0.0, time.monotonic() - self._due))
        self._wait()


class _Stop:
    """SIGTERM and SIGINT as two events: the first signal and the second.

    ``second`` is set only without a launcher (``alone``). With one, a second signal is no request to stop faster: a
    service manager sends SIGTERM to every process of the service, and the launcher then forwards the one that it got. A
    launcher that must stop at once kills its children.
    """

    def __init__(self, alone: bool) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self._alone = alone
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:  # the launcher handles Ctrl-C for its children
                loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if not self.first.is_set():
            self.first.set()
        elif self._alone:
            self.second.set()


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises StartError if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(
            f"cannot listen on {bracketed(host)}:{port}",
            reason(error),
            "stop what uses that port, or choose another with --port",
        ) from error
    listener.setblocking(False)
    return listener


__all__ = ["SERVICES", "Services", "create_app", "run", "running"]
