"""The Prometheus metrics of ``GET /metrics``: vLLM's names where vLLM has the metric, ``tandem_`` names for the rest.

Owns one Prometheus registry and the metrics of events, which are observed as they happen. Metrics of the present state
are read at each scrape (:mod:`coordinator.pool_metrics`). The number of series is bounded: no label holds anything that
a client chose, such as a request id or an unknown path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest

from common.config.engine import KvTransport
from common.core.request import FinishReason
from common.net.messages import Role, Timing
from coordinator.cluster.events import Loss
from coordinator.cluster.registry import Registry
from coordinator.pool_metrics import ENGINE, VLLM_LABELS, PoolMetrics, Sources


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

    @property
    def longest_output(self) -> int:
        """Number of output tokens of the longest choice."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of output tokens of each choice, as requested or else as fits."""

    @property
    def key_name(self) -> str:
        """Name of the API key that the client sent."""


_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_BETWEEN = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.06, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5),
)
_STAGES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 1_000_000)
_CHOICES = (1, 2, 5, 10, 20)
_FINISHES = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_LINKS = frozenset(get_args(KvTransport))
_OTHER = "other"
_OUTCOMES = ("done", "aborted", "failed")
PATHS = ("disagg", "local", "colocated", "prefill")
"""The values of :data:`coordinator.routing.paths.Path`."""
_ROLES = get_args(Role)
MAX_KEY_NAMES = 128
"""Most names of API keys that have series of their own; further ones share the name ``other``."""
PAGE_S = 0.125
"""Mean interval in seconds between two pages that are generated, however often ``/metrics`` is requested."""
FRESH_PAGES = 8
"""Pages that may be generated at once after a pause."""


class Metrics:
    """All metrics of one coordinator. ``sources`` are called at every scrape; the composition root sets them once the
    dispatcher exists."""

    def __init__(
        self, model: str, workers: Registry, clock: Callable[[], float] = time.monotonic, version: str = ""
    ) -> None:
        self.registry = CollectorRegistry()
        self.sources = Sources()
        self._clock = clock
        self._page, self._pages_left, self._refilled_at = b"", float(FRESH_PAGES), clock()
        self._model = model
        self._key_names: set[str] = set()
        self._times()
        self._sizes()
        self._events()
        self.registry.register(PoolMetrics(self.sources, model, workers, version))
        ProcessCollector(registry=self.registry)

    def _times(self) -> None:
        """Create the histograms of durations, in seconds."""
        seconds = self._histogram
        self._ttft = seconds("vllm:time_to_first_token_seconds", "Time from arrival to the first token.", _SECONDS)
        self._itl = seconds("vllm:inter_token_latency_seconds", "Time between tokens of a choice.", _BETWEEN)
        self._tpot = seconds(
            "vllm:request_time_per_output_token_seconds", "Mean time per output token after the first.", _BETWEEN
        )
        self._e2e = seconds("vllm:e2e_request_latency_seconds", "Time from arrival to the last token.", _SECONDS)
        self._queue = seconds("vllm:request_queue_time_seconds", "Time waiting for a worker.", _SECONDS)
        self._inference = seconds("vllm:request_inference_time_seconds", "Time on workers.", _SECONDS)
        self._prefill = seconds("vllm:request_prefill_time_seconds", "Time computing the prompt.", _SECONDS)
        self._decode = seconds("vllm:request_decode_time_seconds", "Time from first to last token.", _SECONDS)
        self._stages = Histogram(
            "tandem_stage_seconds", "Request time by stage.", ("stage",), buckets=_STAGES, registry=self.registry
        )
        self._transfer = Histogram(
            "tandem_kv_transfer_seconds", "Duration of hand-offs.", buckets=_STAGES, registry=self.registry
        )
        self._lag = Histogram(
            "tandem_event_loop_lag_seconds", "Lag of the coordinator's event loop.", buckets=_STAGES,
            registry=self.registry,
        )  # fmt: skip

    def _sizes(self) -> None:
        """Create the metrics of tokens and of what requests asked for."""
        tokens = self._histogram
        self._prompt = tokens("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._computed = tokens(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached.", _TOKENS
        )
        self._output = tokens("vllm:request_generation_tokens", "Output tokens of a request.", _TOKENS)
        self._longest = tokens(
            "vllm:request_max_num_generation_tokens", "Output tokens of the longest choice of a request.", _TOKENS
        )
        self._max_tokens = tokens(
            "vllm:request_params_max_tokens", "max_tokens of a request, or what fitted if it set none.", _TOKENS
        )
        self._n = tokens("vllm:request_params_n", "Choices of a request (n).", _CHOICES)
        self._prompt_total = self._counter("vllm:prompt_tokens", "Prompt tokens processed.").labels(*self._vllm)
        self._cached_total = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens found in a prefix cache."
        ).labels(*self._vllm)
        self._key_prompt = self._by("tandem_key_prompt_tokens", "Prompt tokens by API key.", "key_name")
        self._key_cached = self._by(
            "tandem_key_cached_tokens", "Prompt tokens found in a prefix cache by API key.", "key_name"
        )
        self._key_output = self._by("tandem_key_output_tokens", "Output tokens by API key.", "key_name")

    def _events(self) -> None:
        """Create the counters of events. Series whose labels are known exist from the start, so that a rate over them
        sees the first event too."""
        self._success = self._counter("vllm:request_success", "Finished requests.", "finished_reason")
        for reason in _FINISHES.values():
            self._success.labels(*self._vllm, reason)
        self._requests = self._by("tandem_requests", "Requests by outcome and path.", "outcome", "path")
        for outcome in _OUTCOMES:
            for path in PATHS:
                self._requests.labels(outcome, path)
        self._key_requests = self._by("tandem_key_requests", "Requests by API key and outcome.", "key_name", "outcome")
        self._http = self._by("tandem_http_requests", "HTTP requests by endpoint and status.", "endpoint", "status")
        self._bytes = self._by("tandem_kv_transfer_bytes", "KV bytes transferred by hand-offs.", "transport")
        self._transfer_failures = self._by("tandem_kv_transfer_failures", "Hand-offs that failed.", "reason")
        self._transfer_failures.labels("transfer_failed")
        self._migrations = self._by("tandem_migrations", "Requests with output retried elsewhere.")
        self._retries = self._by("tandem_retries", "Requests retried before their first token.")
        self._lost = self._by("tandem_workers_lost", "Workers lost without a goodbye, and how.", "role", "how")
        for role in _ROLES:
            for how in Loss:
                self._lost.labels(role, how.name.lower())
        self._cut_off = self._by(
            "tandem_clients_cut_off", "Clients cut off because they stopped reading or sending.", "while"
        )
        for doing in ("reading", "sending"):
            self._cut_off.labels(doing)
        self._traces = self._by(
            "tandem_otlp_traces",
            "Traces of requests by what became of them: sent, dropped (the queue was full) or failed (not taken).",
            "outcome",
        )
        for outcome in ("sent", "dropped", "failed"):
            self._traces.labels(outcome)

    def page(self) -> bytes:
        """Return the exposition text.

        A token bucket limits how many pages are generated; further calls get the latest one. Generating a page takes
        milliseconds of the event loop, so a flood of scrapes would delay every request. A gateway's endpoint picker
        scrapes 20 times per second.
        """
        now = self._clock()
        self._pages_left = min(FRESH_PAGES, self._pages_left + max(0.0, now - self._refilled_at) / PAGE_S)
        self._refilled_at = now
        if self._pages_left >= 1:
            self._pages_left -= 1
            self._page = generate_latest(self.registry)
        return self._page

    @property
    def _vllm(self) -> tuple[str, str]:
        """The values of VLLM_LABELS."""
        return self._model, ENGINE

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, VLLM_LABELS, buckets=buckets, registry=self.registry).labels(*self._vllm)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, (*VLLM_LABELS, *labels), registry=self.registry)

    def _by(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

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

    def responded(self, endpoint: str, status: int) -> None:
        """Count an HTTP response. ``endpoint`` is the path pattern of a route, or one name for all unknown paths."""
        self._http.labels(endpoint, str(status)).inc()

    def cut_off(self, doing: str) -> None:
        """Count a client whose connection was cut because it stopped ``reading`` or ``sending``."""
        self._cut_off.labels(doing).inc()

    def traces(self, outcome: str, count: int) -> None:
        """Count traces that were ``sent`` to an OTLP receiver, ``dropped`` or ``failed``."""
        self._traces.labels(outcome).inc(count)

    def set_back(self, *, migration: bool) -> None:
        """Count a new attempt of a request: a migration if it had output already, else a retry."""
        (self._migrations if migration else self._retries).inc()

    def worker_lost(self, role: Role, how: Loss) -> None:
        """Count a worker that was lost without a Goodbye."""
        self._lost.labels(role, how.name.lower()).inc()

    def transferred(self, message: Timing) -> None:
        """Record an accepted hand-off; its request may have ended already."""
        values = message.values
        link = message.link if message.link in _LINKS else _OTHER
        self._bytes.labels(link).inc(max(0.0, values.get("kv_bytes", 0.0)))
        self._transfer.observe(values.get("transfer_ms", 0.0) / 1000)
        self._observe(values, "transfer", "transfer_exposed")

    def transfer_failed(self, reason: str) -> None:
        """Count a failed hand-off; ``reason`` is the code of its RequestFailed."""
        self._transfer_failures.labels(reason).inc()

    def ended(self, request: ObservedRequest, outcome: str) -> None:
        """Record the end of a request; ``outcome`` is ``done``, ``aborted`` or ``failed``."""
        self._requests.labels(outcome, request.path).inc()
        cached = min(request.prompt_length, max(0, int(request.timings.get("cached_tokens", 0.0))))
        self._charge(request, outcome, cached)
        if outcome != "done" or request.first_token_at is None or request.finished_at is None:
            return
        for finish in request.progress.finish:
            self._success.labels(*self._vllm, _FINISHES.get(finish, "stop")).inc()
        self._prompt.observe(request.prompt_length)
        self._computed.observe(request.prompt_length - cached)
        self._output.observe(request.output_length)
        self._longest.observe(request.longest_output)
        self._max_tokens.observe(request.max_tokens)
        self._n.observe(request.n)
        self._e2e.observe(request.finished_at - request.arrived_at)
        self._decode.observe(request.finished_at - request.first_token_at)
        later = request.output_length - request.n
        if later > 0:
            self._tpot.observe((request.finished_at - request.first_token_at) * request.n / later)
        self._observe_stages(request, request.finished_at)

    def _charge(self, request: ObservedRequest, outcome: str, cached: int) -> None:
        """Count a request, and its tokens if its prompt was computed, for its API key."""
        name = request.key_name
        if name not in self._key_names:
            if len(self._key_names) < MAX_KEY_NAMES:
                self._key_names.add(name)
            else:
                name = _OTHER
        self._key_requests.labels(name, outcome).inc()
        if request.first_token_at is not None:
            self._cached_total.inc(cached)
            self._key_prompt.labels(name).inc(request.prompt_length)
            self._key_cached.labels(name).inc(cached)
            self._key_output.labels(name).inc(request.output_length)

    def _observe_stages(self, request: ObservedRequest, finished_at: float) -> None:
        placed = request.placed_at if request.placed_at is not None else request.tokenized_at
        timings = request.timings
        waited = placed - request.tokenized_at + timings.get("queue_ms", 0.0) / 1000
        self._queue.observe(waited)
        self._inference.observe(max(0.0, finished_at - request.tokenized_at - waited))
        self._prefill.observe(timings.get("prefill_ms", 0.0) / 1000)
        self._stages.labels("tokenize").observe(request.tokenized_at - request.arrived_at)
        self._stages.labels("queue").observe(waited)
        self._observe(timings, "prefill", "decode_wait")

    def _observe(self, timings: Mapping[str, float], *stages: str) -> None:
        for stage in stages:
            if (value := timings.get(f"{stage}_ms")) is not None:
                self._stages.labels(stage).observe(value / 1000)
