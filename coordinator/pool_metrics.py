"""The metrics of the present state: the pools of workers, and the counters that workers report in their heartbeats.

All are read at each scrape, so that the block states of one scrape add up. A worker's name is a label only while the
worker is registered, so that the number of series is bounded by the number of workers.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from common.core.ids import Incarnation
from common.net.messages import STEP_SIZES, STEPS_OF
from coordinator.cluster.registry import Registry, WorkerHandle, WorkerState
from coordinator.gpu_metrics import gpu_metrics

VLLM_LABELS = ("model_name", "engine")
"""Labels of every metric that vLLM has too."""
ENGINE = "0"
"""The label ``engine``. To clients and gateways all workers together are one engine."""
_REMEMBERED = 256
_LIVING = (WorkerState.JOINING, WorkerState.READY, WorkerState.DRAINING)
_WORKER = ("worker", "role")


class RequestCounts(NamedTuple):
    """The numbers of requests on workers (``running``) and in the coordinator's queue (``waiting``), and the prompt
    tokens of the latter."""

    running: int
    waiting: int
    waiting_tokens: int


@dataclass(slots=True)
class Sources:
    """Functions that return the coordinator's present state. ``ready``: whether it could serve a request now.
    ``output_tokens``: how many were accepted from workers since the start."""

    request_counts: Callable[[], RequestCounts] = lambda: RequestCounts(0, 0, 0)
    output_tokens: Callable[[], int] = lambda: 0
    ready: Callable[[], bool] = lambda: False
    bad_messages: Callable[[], int] = lambda: 0
    cut_off_peers: Callable[[], int] = lambda: 0
    open_breakers: Callable[[], int] = lambda: 0


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


@dataclass(frozen=True, slots=True)
class _OfWorker:
    """A metric of each worker: its name without ``tandem_worker_`` (and, of a counter, without ``_total``), its help
    text, and its value, None if the worker has not reported it."""

    name: str
    help: str
    value: Callable[[WorkerHandle], float | None]
    family: type[CounterMetricFamily | GaugeMetricFamily] = GaugeMetricFamily

    def collect(self, workers: Iterable[WorkerHandle]) -> Metric:
        metric = self.family(f"tandem_worker_{self.name}", self.help, labels=_WORKER)
        for worker in workers:
            if (value := self.value(worker)) is not None:
                metric.add_metric((worker.hello.name, worker.role), value)
        return metric


def _counted(name: str, help: str, counter: str, default: float | None = 0.0) -> _OfWorker:
    """Return the metric of a counter in heartbeats. ``default``: the value before the counter was first reported."""
    return _OfWorker(name, help, lambda worker: _counter(worker, counter, default), CounterMetricFamily)


def _counter(worker: WorkerHandle, name: str, default: float | None) -> float | None:
    return default if worker.beat is None else worker.beat.counters.get(name, default)


_OF_WORKERS = (
    _OfWorker("running", "Sequences in the batch.", lambda worker: worker.beat.running if worker.beat else 0),
    _OfWorker("max_running", "Most sequences in a batch.", lambda worker: worker.hello.max_num_seqs),
    _OfWorker("waiting", "Waiting sequences and hand-offs.", lambda worker: worker.beat.waiting if worker.beat else 0),
    _OfWorker(
        "waiting_tokens", "Prompt tokens that wait or are partly computed.",
        lambda worker: worker.beat.waiting_tokens if worker.beat else 0,
    ),
    _counted("steps", "Steps of the engine.", "steps"),
    _counted("step_tokens", "Tokens computed in steps.", "step_tokens"),
    _counted("busy_seconds", "Time spent in steps; its rate is the share of time in which the worker computes.",
             "step_seconds"),
    _counted("process_cpu_seconds", "CPU time of the worker's process.", "process_cpu_seconds", None),
    _OfWorker(
        "process_resident_memory_bytes", "Resident memory of the worker's process.",
        lambda worker: _counter(worker, "process_resident_bytes", None),
    ),
)  # fmt: skip


class PoolMetrics(Collector):
    """Collects the metrics of the present state of a coordinator and its workers, at each scrape."""

    def __init__(self, sources: Sources, model: str, workers: Registry, version: str) -> None:
        self._sources, self._model, self._workers, self._version = sources, model, workers, version
        self._sums: defaultdict[str, _Sum] = defaultdict(_Sum)

    def collect(self) -> Iterator[Metric]:
        yield from self._coordinator()
        yield from self._blocks()
        yield from self._counters()
        yield self._step_sizes()
        yield from self._states()
        for each in _OF_WORKERS:
            yield each.collect(self._workers)
        yield from gpu_metrics(self._workers)

    def _coordinator(self) -> Iterator[Metric]:
        sources = self._sources
        counts = sources.request_counts()
        yield self._gauge("vllm:num_requests_running", "Requests on workers.", counts.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting for a worker.", counts.waiting)
        yield self._counter("vllm:generation_tokens", "Output tokens generated.", sources.output_tokens())
        yield GaugeMetricFamily(
            "tandem_waiting_tokens", "Prompt tokens of the requests waiting for a worker.", counts.waiting_tokens
        )
        yield GaugeMetricFamily("tandem_ready", "1 while a request could be served, as GET /ready.", sources.ready())
        yield GaugeMetricFamily(
            "tandem_open_breakers",
            "Circuit breakers of workers and pairs that are not closed.",
            sources.open_breakers(),
        )
        info = GaugeMetricFamily("tandem_build_info", "1, with the version of Tandem.", labels=("version",))
        info.add_metric((self._version,), 1)
        yield info
        # The value is a time: readers take the sample with the latest one.
        lora = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "LoRA adapters, of which there are none; the value is the time of the scrape.",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        lora.add_metric(("0", "", ""), time.time())
        yield lora

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=VLLM_LABELS)
        family.add_metric((self._model, ENGINE), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=VLLM_LABELS)
        family.add_metric((self._model, ENGINE), value)
        return family

    def _blocks(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily("tandem_kv_blocks", "KV blocks by state.", labels=(*_WORKER, "state"))
        leaked = GaugeMetricFamily(
            "tandem_leaked_kv_blocks", "KV blocks whose holder is gone; anything above 0 is a bug.", labels=_WORKER
        )
        held = total = size = 0
        for worker in self._workers:
            free, cached, taken = worker.blocks
            for state, value in (("free", free), ("cached", cached), ("held", taken)):
                blocks.add_metric((worker.hello.name, worker.role, state), value)
            leaked.add_metric((worker.hello.name, worker.role), _counter(worker, "leaked_blocks", 0.0) or 0.0)
            if worker.role != "prefill":
                held, total, size = held + taken, total + worker.hello.kv_blocks, worker.hello.block_size
        yield blocks
        yield leaked
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share of KV blocks in use on decode and colocated workers.",
            held / total if total else 0,
        )
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Block size and number of blocks of the decode and colocated workers.",
            labels=(*VLLM_LABELS, "block_size", "num_gpu_blocks"),
        )
        info.add_metric((self._model, ENGINE, str(size), str(total)), 1)
        yield info

    def _counters(self) -> Iterator[Metric]:
        for name, text in (
            ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
            ("prefix_cache_hits", "Tokens found in the prefix cache."),
            ("num_preemptions", "Sequences preempted to free blocks for others."),
        ):
            yield self._counter(f"vllm:{name}", text, self._sum(name))
        for name, text, own in (
            ("bad_messages", "Bad messages that were dropped.", self._sources.bad_messages()),
            ("cut_off_peers", "Peers cut off after bad messages.", self._sources.cut_off_peers()),
        ):
            family = CounterMetricFamily(f"tandem_{name}", text, labels=("source",))
            family.add_metric(("coordinator",), own)
            family.add_metric(("workers",), self._sum(name))
            yield family
        for name, text in (
            ("stale_frames", "KV frames that arrived after their hand-off had ended."),
            ("reaped_requests", "Requests that workers dropped because no lease listed them."),
            ("borrowed_core_seconds", "Time that workers computed on cores lent by other workers."),
        ):
            yield CounterMetricFamily(f"tandem_{name}", text, self._sum(name))

    def _step_sizes(self) -> Metric:
        """Return the histogram of the tokens of a step over all workers."""
        steps = list(accumulate(self._sum(name) for name in STEPS_OF))
        buckets = [(str(float(size)), count) for size, count in zip(STEP_SIZES, steps, strict=False)]
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens of a step of a worker.", labels=VLLM_LABELS
        )
        family.add_metric(
            (self._model, ENGINE), buckets=[*buckets, ("+Inf", steps[-1])], sum_value=self._sum("step_tokens")
        )
        return family

    def _sum(self, name: str) -> float:
        beats = ((worker.id, worker.beat) for worker in self._workers)
        return self._sums[name].of({id: beat.counters.get(name, 0.0) for id, beat in beats if beat is not None})

    def _states(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("tandem_workers", "Workers by state.", labels=("role", "state"))
        expected = GaugeMetricFamily("tandem_workers_expected", "Workers that should be running.", labels=("role",))
        tally = Tally((worker.role, worker.state) for worker in self._workers)
        for role, wanted in self._workers.expected.items():
            for state in _LIVING:
                family.add_metric((role, state.value), tally[(role, state)])
            expected.add_metric((role,), wanted)
        yield family
        yield expected
