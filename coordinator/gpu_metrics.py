"""The metrics of the workers' GPUs, from the latest report of each worker.

A value that a card does not have has no sample: absent is not zero. Counts that NVML keeps since the driver was loaded
are gauges, because they fall to zero when it is loaded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from common.core.gpu import THROTTLE_REASONS, GpuState
from coordinator.cluster.registry import Registry

_MEGA = 1e6
Values = Iterable[tuple[tuple[str, ...], float | None]]
"""Values of the labels beside worker and gpu, each with a number or None."""


@dataclass(frozen=True, slots=True)
class _Gauge:
    """One gauge: its name without ``tandem_gpu_``, its help text, its labels beside worker and gpu, and its values."""

    name: str
    help: str
    labels: tuple[str, ...]
    values: Callable[[GpuState], Values]


def _plain(name: str, help: str, value: Callable[[GpuState], float | None]) -> _Gauge:
    return _Gauge(name, help, (), lambda gpu: [((), value(gpu))])


def _pair(name: str, help: str, label: str, value: Callable[[GpuState], dict[str, float | None]]) -> _Gauge:
    return _Gauge(name, help, (label,), lambda gpu: [((key,), each) for key, each in value(gpu).items()])


def _scaled(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor


_GAUGES = (
    _Gauge("info", "1 for each GPU of a worker.", ("uuid", "name"), lambda gpu: [((gpu.uuid, gpu.name), 1)]),
    _plain("utilization_ratio", "Share of time with a running kernel.", lambda gpu: _scaled(gpu.utilization, 0.01)),
    _plain("memory_used_bytes", "GPU memory in use, by all processes.", lambda gpu: gpu.memory_used),
    _plain("memory_total_bytes", "GPU memory in all.", lambda gpu: gpu.memory_total),
    _plain("power_watts", "Power that the GPU draws.", lambda gpu: _scaled(gpu.power_mw, 0.001)),
    _plain("power_limit_watts", "Power that the GPU may draw.", lambda gpu: _scaled(gpu.power_limit_mw, 0.001)),
    _plain("temperature_celsius", "Temperature of the GPU.", lambda gpu: gpu.temperature),
    _pair(
        "clock_hertz", "Clock of the multiprocessors (sm) and of the memory.", "clock",
        lambda gpu: {"sm": _scaled(gpu.sm_mhz, _MEGA), "memory": _scaled(gpu.memory_mhz, _MEGA)},
    ),
    _pair(
        "throttled", "1 while this reason lowers the clocks.", "reason",
        lambda gpu: {} if gpu.throttle is None else {
            name: float(name in gpu.throttled_by) for name in THROTTLE_REASONS.values()
        },
    ),
    _plain("nvlinks_active", "Active NVLinks of the GPU.", lambda gpu: gpu.nvlinks_active),
    _pair(
        "nvlink_bytes", "Bytes over NVLink since the driver was loaded.", "direction",
        lambda gpu: {"sent": gpu.nvlink_sent, "received": gpu.nvlink_received},
    ),
    _pair(
        "ecc_errors", "Memory errors found by ECC since the driver was loaded.", "kind",
        lambda gpu: {"corrected": gpu.ecc_corrected, "uncorrected": gpu.ecc_uncorrected},
    ),
    _pair(
        "remapped_rows", "Memory rows that were replaced because of errors.", "kind",
        lambda gpu: {"corrected": gpu.remapped_corrected, "uncorrected": gpu.remapped_uncorrected},
    ),
    _plain("row_remap_pending", "1 if a memory row is replaced at the next reset.", lambda gpu: gpu.remap_pending),
    _plain("row_remap_failed", "1 if a memory row could not be replaced.", lambda gpu: gpu.remap_failed),
    _pair(
        "retired_pages", "Memory pages that were retired because of errors.", "kind",
        lambda gpu: {"corrected": gpu.retired_corrected, "uncorrected": gpu.retired_uncorrected},
    ),
    _Gauge(
        "xid_errors", "Xid errors since the worker started, by number.", ("xid",),
        lambda gpu: [((str(xid),), count) for xid, count in gpu.xids.items()],
    ),
)  # fmt: skip


def gpu_metrics(workers: Registry) -> Iterator[Metric]:
    """Yield every gauge, with a sample for each GPU that has the value."""
    for gauge in _GAUGES:
        family = GaugeMetricFamily(f"tandem_gpu_{gauge.name}", gauge.help, labels=("worker", "gpu", *gauge.labels))
        for worker in workers:
            for gpu in worker.gpus:
                for labels, value in gauge.values(gpu):
                    if value is not None:
                        family.add_metric((worker.hello.name, str(gpu.index), *labels), value)
        yield family
