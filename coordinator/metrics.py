"""The Prometheus metrics of ``GET /metrics``: vLLM's names where vLLM has the metric, ``tandem_`` names for the rest.

Owns one Prometheus registry. Events are observed as they happen; worker gauges are read from the worker registry at
each scrape, so that the block states of one scrape add up. Labels never hold request ids.
"""

from __future__ import annotations

import math
import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.core.ids import Incarnation
from common.core.request import FinishReason
from common.net.messages import Timing
from coordinator.cluster.registry import Registry, WorkerState
from coordinator.gpu_metrics import gpu_metrics


class Choices(Protocol):
    """The finish reasons of a request's choices."""

    @property
    def finish(self) -> Sequence[FinishReason]:
        """The finish reason of each choice."""


class ObservedRequest(Protocol):
    """The fields of a request that metrics read. Times are seconds of ``time.monotonic``; ``timings`` are the values of
    the workers' Timing messages, whose names end in their unit."""

    @property
    def n(self) -> int:
        """Number of choices."""

    @property
    def path(self) -> str:
        """``disagg``, ``local`` or another path of :data:`coordinator.routing.paths.Path`."""

    @property
    def progress(self) -> Choices:
        """The finish reasons so far."""

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""

    @property
    def output_length(self) -> int:
        """Number of output tokens of all choices."""

    @property
    def arrived_at(self) -> float:
        """When the HTTP request arrived."""

    @property
    def tokenized_at(self) -> float:
        """When the prompt's tokens were known."""

    @property
    def placed_at(self) -> float | None:
        """When the request was first placed on workers; None before."""

    @property
    def first_token_at(self) -> float | None:
        """When the first output token was accepted; None before."""

    @property
    def finished_at(self) -> float | None:
        """When the request ended; None before."""

    @property
    def timings(self) -> Mapping[str, float]:
        """Values of the workers' Timing messages by name, such as ``prefill_ms``."""


_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_BETWEEN = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.015,
    0.02,
    0.025,
    0.03,
    0.04,
    0.05,
    0.06,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2,
    5,
)
_STAGES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 1_000_000)
_FINISHES = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_REMEMBERED = 256
PAGE_S = 0.5
FRESH_PAGES = 8
"""Pages generated per PAGE_S, more than scrapers need; further requests get the latest page."""
_LIVING = (WorkerState.JOINING, WorkerState.READY, WorkerState.DRAINING)


class RequestCounts(NamedTuple):
    """The numbers of requests on workers (``running``) and in the coordinator's queue (``waiting``)."""

    running: int
    waiting: int


class Metrics:
    """All metrics of one coordinator.

    ``request_counts``, ``bad_messages``, ``cut_off_peers`` and ``open_breakers`` are called at every scrape; the
    composition root sets them once the dispatcher exists.
    """

    def __init__(self, model: str, workers: Registry, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self._page, self._pages_made, self._pages_since = b"", 0, -math.inf
        self.request_counts: Callable[[], RequestCounts] = lambda: RequestCounts(0, 0)
        self.bad_messages: Callable[[], int] = lambda: 0
        self.cut_off_peers: Callable[[], int] = lambda: 0
        self.open_breakers: Callable[[], int] = lambda: 0
        self._model = model
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Time from arrival to the first token.", _SECONDS
        )
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Time between tokens of a choice.", _BETWEEN)
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per output token after the first.", _BETWEEN
        )
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time from arrival to the last token.", _SECONDS
        )
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Time waiting for a worker.", _SECONDS)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "Time computing the prompt.", _SECONDS)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "Time from first to last token.", _SECONDS)
        self._prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._output = self._histogram("vllm:request_generation_tokens", "Output tokens of a request.", _TOKENS)
        self._prompt_total = self._counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._output_total = self._counter("vllm:generation_tokens", "Output tokens generated.")
        self._success = Counter(
            "vllm:request_success", "Finished requests.", ("model_name", "finished_reason"), registry=self.registry
        )
        self._requests = Counter(
            "tandem_requests", "Requests by outcome and path.", ("outcome", "path"),
            registry=self.registry,
        )  # fmt: skip
        self._stages = Histogram(
            "tandem_stage_seconds", "Request time by stage.", ("stage",), buckets=_STAGES, registry=self.registry
        )
        self._bytes = Counter(
            "tandem_kv_transfer_bytes", "KV bytes transferred by hand-offs.", ("transport",), registry=self.registry
        )
        self._transfer = Histogram(
            "tandem_kv_transfer_seconds", "Duration of hand-offs.", buckets=_STAGES, registry=self.registry
        )
        self._transfer_failures = Counter(
            "tandem_kv_transfer_failures", "Hand-offs that failed.", ("reason",), registry=self.registry
        )
        self._migrations = Counter(
            "tandem_migrations", "Requests with output retried elsewhere.", registry=self.registry
        )
        self._retries = Counter("tandem_retries", "Requests retried before their first token.", registry=self.registry)
        self._cut_off = Counter(
            "tandem_clients_cut_off", "Clients cut off because they stopped reading or sending.", ("while",),
            registry=self.registry,
        )  # fmt: skip
        self._traces = Counter(
            "tandem_otlp_traces",
            "Traces of requests by what became of them: sent, dropped (the queue was full) or failed (not taken).",
            ("outcome",),
            registry=self.registry,
        )
        for outcome in ("sent", "dropped", "failed"):
            self._traces.labels(outcome)
        self._lag = Histogram(
            "tandem_event_loop_lag_seconds", "Lag of the coordinator's event loop.", buckets=_STAGES,
            registry=self.registry,
        )  # fmt: skip
        self.registry.register(_Pools(self, model, workers))

    def page(self) -> bytes:
        """Return the exposition text.

        The first FRESH_PAGES calls in each PAGE_S generate a page; further calls get the latest one. Generating a page
        takes milliseconds of the event loop, so a flood of scrapes would delay every request.
        """
        now = self._clock()
        if now - self._pages_since >= PAGE_S:
            self._pages_since, self._pages_made = now, 0
        if self._pages_made < FRESH_PAGES:
            self._pages_made += 1
            self._page = generate_latest(self.registry)
        return self._page

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry).labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("model_name",), registry=self.registry).labels(self._model)

    # -- observations ---------------------------------------------------------------------------------------------

    def first_token(self, request: ObservedRequest, now: float) -> None:
        """Record that the first output token of a request was accepted at ``now``."""
        self._ttft.observe(now - request.arrived_at)
        self._prompt_total.inc(request.prompt_length)

    def inter_token(self, seconds: float, count: int) -> None:
        """Observe ``count`` intervals of ``seconds`` each between two tokens of a choice."""
        for _ in range(count):
            self._itl.observe(seconds)

    def inter_token_buckets(self) -> list[tuple[float, float]]:
        """Return the upper bound of each bucket of the intervals between tokens in seconds, ascending, the last
        infinite, and how many intervals so far do not exceed it."""
        (family,) = self._itl.collect()
        return [(float(each.labels["le"]), each.value) for each in family.samples if each.name.endswith("_bucket")]

    def loop_lag(self, seconds: float) -> None:
        """Observe how late a timer of the event loop ran."""
        self._lag.observe(seconds)

    def cut_off(self, doing: str) -> None:
        """Count a client whose connection was cut because it stopped ``reading`` or ``sending``."""
        self._cut_off.labels(doing).inc()

    def traces(self, outcome: str, count: int) -> None:
        """Count traces that were ``sent`` to an OTLP receiver, ``dropped`` or ``failed``."""
        self._traces.labels(outcome).inc(count)

    def set_back(self, *, migration: bool) -> None:
        """Count a new attempt of a request: a migration if it had output already, else a retry."""
        (self._migrations if migration else self._retries).inc()

    def transferred(self, message: Timing) -> None:
        """Record an accepted hand-off; its request may have ended already."""
        values = message.values
        self._bytes.labels(message.link or "none").inc(max(0.0, values.get("kv_bytes", 0.0)))
        self._transfer.observe(values.get("transfer_ms", 0.0) / 1000)
        self._observe(values, "transfer", "transfer_exposed")

    def transfer_failed(self, reason: str) -> None:
        """Count a failed hand-off; ``reason`` is the code of its RequestFailed."""
        self._transfer_failures.labels(reason).inc()

    def ended(self, request: ObservedRequest, outcome: str) -> None:
        """Record the end of a request; ``outcome`` is ``done``, ``aborted`` or ``failed``."""
        self._requests.labels(outcome, request.path).inc()
        self._output_total.inc(request.output_length)
        if outcome != "done" or request.first_token_at is None or request.finished_at is None:
            return
        for finish in request.progress.finish:
            self._success.labels(self._model, _FINISHES.get(finish, "stop")).inc()
        self._prompt.observe(request.prompt_length)
        self._output.observe(request.output_length)
        self._e2e.observe(request.finished_at - request.arrived_at)
        self._decode.observe(request.finished_at - request.first_token_at)
        later = request.output_length - request.n
        if later > 0:
            self._tpot.observe((request.finished_at - request.first_token_at) * request.n / later)
        self._observe_stages(request)

    def _observe_stages(self, request: ObservedRequest) -> None:
        placed = request.placed_at if request.placed_at is not None else request.tokenized_at
        timings = request.timings
        waited = placed - request.tokenized_at + timings.get("queue_ms", 0.0) / 1000
        self._queue.observe(waited)
        self._prefill.observe(timings.get("prefill_ms", 0.0) / 1000)
        self._stages.labels("tokenize").observe(request.tokenized_at - request.arrived_at)
        self._stages.labels("queue").observe(waited)
        self._observe(timings, "prefill", "decode_wait")

    def _observe(self, timings: Mapping[str, float], *stages: str) -> None:
        for stage in stages:
            if (value := timings.get(f"{stage}_ms")) is not None:
                self._stages.labels(stage).observe(value / 1000)


class _Sum:
    """Sums one counter over all workers, including those that are gone.

    Keeps the values of the latest _REMEMBERED gone workers apart, because such a worker may come back and continue its
    count; older values are merged into one sum.
    """

    def __init__(self) -> None:
        self._latest: dict[Incarnation, float] = {}
        self._forgotten = 0.0

    def of(self, values: Mapping[Incarnation, float]) -> float:
        """Return the sum after updating it with the workers' current ``values``."""
        for worker, value in values.items():
            self._latest.pop(worker, None)
            self._latest[worker] = value
        while len(self._latest) > len(values) + _REMEMBERED:
            self._forgotten += self._latest.pop(next(iter(self._latest)))
        return self._forgotten + sum(self._latest.values())


class _Pools(Collector):
    """Collects the gauges and counters that workers report in their heartbeats, at each scrape."""

    def __init__(self, metrics: Metrics, model: str, workers: Registry) -> None:
        self._metrics, self._model, self._workers = metrics, model, workers
        self._sums: defaultdict[str, _Sum] = defaultdict(_Sum)

    def collect(self) -> Iterator[Metric]:
        counts = self._metrics.request_counts()
        yield self._gauge("vllm:num_requests_running", "Requests on workers.", counts.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting for a worker.", counts.waiting)
        yield from self._pool()
        yield from self._counters()
        yield self._states()
        yield from gpu_metrics(self._workers)
        yield GaugeMetricFamily(
            "tandem_open_breakers",
            "Circuit breakers of workers and pairs that are not closed.",
            self._metrics.open_breakers(),
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _pool(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily("tandem_kv_blocks", "KV blocks by state.", labels=("worker", "role", "state"))
        held = total = size = 0
        for worker in self._workers:
            free, cached, taken = worker.blocks
            for state, value in (("free", free), ("cached", cached), ("held", taken)):
                blocks.add_metric((worker.hello.name, worker.role, state), value)
            if worker.role != "prefill":
                held, total, size = held + taken, total + worker.hello.kv_blocks, worker.hello.block_size
        yield blocks
        leaked = GaugeMetricFamily(
            "tandem_leaked_kv_blocks",
            "KV blocks whose holder is gone; anything above 0 is a bug.",
            labels=("worker", "role"),
        )
        for worker in self._workers:
            leaked_blocks = worker.beat.counters.get("leaked_blocks", 0.0) if worker.beat is not None else 0.0
            leaked.add_metric((worker.hello.name, worker.role), leaked_blocks)
        yield leaked
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share of KV blocks in use on decode and colocated workers.",
            held / total if total else 0,
        )
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Block size and number of blocks of the decode and colocated workers.",
            labels=("model_name", "block_size", "num_gpu_blocks"),
        )
        info.add_metric((self._model, str(size), str(total)), 1)
        yield info

    def _counters(self) -> Iterator[Metric]:
        for name, text in (
            ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
            ("prefix_cache_hits", "Tokens found in the prefix cache."),
            ("num_preemptions", "Sequences preempted to free blocks for others."),
        ):
            family = CounterMetricFamily(f"vllm:{name}", text, labels=("model_name",))
            family.add_metric((self._model,), self._sum(name))
            yield family
        family = CounterMetricFamily("tandem_bad_messages", "Bad messages that were dropped.", labels=("source",))
        family.add_metric(("coordinator",), self._metrics.bad_messages())
        family.add_metric(("workers",), self._sum("bad_messages"))
        yield family
        family = CounterMetricFamily("tandem_cut_off_peers", "Peers cut off after bad messages.", labels=("source",))
        family.add_metric(("coordinator",), self._metrics.cut_off_peers())
        family.add_metric(("workers",), self._sum("cut_off_peers"))
        yield family
        for name, text in (
            ("stale_frames", "KV frames that arrived after their hand-off had ended."),
            ("reaped_requests", "Requests that workers dropped because no lease listed them."),
            ("borrowed_core_seconds", "Time that workers computed on cores lent by other workers."),
        ):
            yield CounterMetricFamily(f"tandem_{name}", text, self._sum(name))

    def _sum(self, name: str) -> float:
        beats = ((worker.id, worker.beat) for worker in self._workers)
        return self._sums[name].of({id: beat.counters.get(name, 0.0) for id, beat in beats if beat is not None})

    def _states(self) -> Metric:
        family = GaugeMetricFamily("tandem_workers", "Workers by state.", labels=("role", "state"))
        tally = Tally((worker.role, worker.state) for worker in self._workers)
        for role in ("prefill", "decode", "colocated"):
            for state in _LIVING:
                family.add_metric((role, state.value), tally[(role, state)])
        return family
