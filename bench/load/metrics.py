"""Metrics of a run, defined so that they can be compared with those of other tools.

Pure. Metric names and JSON keys are those of ``vllm bench serve``. TTFT, TPOT and E2EL are per request; ITL pools the
gaps between chunks of all requests. All are computed over successful requests. For service-level objectives, a failed
or rejected request counts as one that missed them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from bench.load.client import Record
from bench.load.run import Run

Metric = Literal["ttft", "tpot", "itl", "e2el"]
METRICS: tuple[Metric, ...] = get_args(Metric)
QUEUED = ("client_queue_time", "e2el_including_client_queue")
"""Additional metrics when ``--max-concurrency`` makes requests wait in the client."""
PER_REQUEST: dict[str, Callable[[Record], float]] = {
    "ttft": lambda record: record.ttft,
    "tpot": lambda record: record.tpot,
    "e2el": lambda record: record.latency,
}
"""The metrics that an objective can bound, in seconds per request."""
STAGES = ("queue_ms", "tokenize_ms", "prefill_ms", "transfer_ms", "transfer_exposed_ms", "decode_wait_ms", "ttft_ms")
"""The stages that Tandem reports for a request (``return_metrics``), in ms."""


@dataclass(frozen=True, slots=True)
class Objective:
    """An upper bound on one metric: in ms or, if ``relative``, as a multiple of its median without load."""

    metric: str
    bound: float
    relative: bool = False

    def absolute(self, unloaded_ms: Mapping[str, float]) -> Objective:
        """Return the objective with its bound in ms, given the median of each metric without load."""
        return Objective(self.metric, self.bound * unloaded_ms[self.metric]) if self.relative else self

    def met(self, record: Record) -> bool:
        """Return whether a successful request meets the objective, whose bound must be absolute."""
        return PER_REQUEST[self.metric](record) * 1000 <= self.bound

    def __str__(self) -> str:
        return f"{self.metric}:{self.bound:g}{'x' if self.relative else ''}"


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """Parse ``ttft:1000,tpot:40`` (ms) or ``ttft:5x,tpot:3x`` (multiples of the median without load).

    Raises ValueError with an explanation."""
    found = []
    for part in text.replace(",", " ").split():
        metric, colon, bound = part.partition(":")
        if metric not in PER_REQUEST or not colon:
            raise ValueError(f"{part} is not one of {', '.join(f'{name}:MS' for name in PER_REQUEST)}")
        try:
            value = float(bound.removesuffix("x"))
        except ValueError:
            value = 0.0
        if not value > 0:
            raise ValueError(f"{part}: a bound must be a number greater than 0")
        found.append(Objective(metric, value, bound.endswith("x")))
    if not found:
        raise ValueError("no objective")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of one metric in ms; ``percentiles`` maps a percentage to its percentile."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]

    @classmethod
    def of(cls, seconds: Sequence[float], percents: Sequence[float]) -> Spread:
        """Compute the statistics of values in seconds; all are 0 if there are no values."""
        values = np.asarray(seconds or [0.0]) * 1000
        at = {percent: float(np.percentile(values, percent)) for percent in percents}
        return cls(float(values.mean()), float(np.median(values)), float(values.std()), at)


@dataclass(frozen=True, slots=True)
class Summary:
    """The metrics of one run. Rates are per second of the run."""

    seconds: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    inside: int | None
    """Number of requests that met all objectives; None if no objectives were given."""
    peak_output_tokens: float
    peak_concurrent: int
    spreads: dict[str, Spread]
    stages: dict[str, Spread]
    """Times per stage, over the requests for which the server reported them."""
    paths: dict[str, int]

    @property
    def asked(self) -> int:
        """Number of all requests, including failed ones."""
        return self.completed + self.failed

    @property
    def attainment(self) -> float | None:
        """Fraction of all requests, including failed ones, that met the objectives."""
        return None if self.inside is None else self.inside / max(1, self.asked)

    @property
    def request_rate(self) -> float:
        """Successful requests per second."""
        return self.completed / self.seconds

    @property
    def goodput(self) -> float | None:
        """Requests per second that met the objectives. (:mod:`bench.commands.goodput` uses another definition of
        goodput.)"""
        return None if self.inside is None else self.inside / self.seconds

    @property
    def output_rate(self) -> float:
        """Output tokens of successful requests per second."""
        return self.output_tokens / self.seconds

    @property
    def token_rate(self) -> float:
        """Prompt and output tokens of successful requests per second."""
        return (self.input_tokens + self.output_tokens) / self.seconds


def summarise(run: Run, *, percents: Sequence[float] = (99,), objectives: Iterable[Objective] = ()) -> Summary:
    """Compute the metrics of ``run``. ``objectives`` must be absolute, not relative."""
    good = [record for record in run.records if record.ok]
    bounds = tuple(objectives)
    values: dict[str, list[float]] = {
        "ttft": [record.ttft for record in good],
        "tpot": [record.tpot for record in good if record.output_tokens > 1],
        "itl": [gap for record in good for gap in record.itls],
        "e2el": [record.latency for record in good],
        "client_queue_time": [record.waited for record in good],
        "e2el_including_client_queue": [record.latency + record.waited for record in good],
    }
    reported_stages = [_reported_stages(record.stages) for record in good if record.stages]
    tokens, concurrent = _peaks(good)
    return Summary(
        seconds=run.seconds,
        completed=len(good),
        failed=len(run.records) - len(good),
        input_tokens=sum(record.prompt_tokens for record in good),
        output_tokens=sum(record.output_tokens for record in good),
        inside=sum(all(bound.met(record) for bound in bounds) for record in good) if bounds else None,
        peak_output_tokens=tokens,
        peak_concurrent=concurrent,
        spreads={name: Spread.of(each, percents) for name, each in values.items()},
        stages={
            stage: Spread.of([stages[stage] / 1000 for stages in reported_stages if stage in stages], percents)
            for stage in STAGES
            if any(stage in stages for stages in reported_stages)
        },
        paths=_counted(str(each["path"]) for each in reported_stages if "path" in each),
    )


def _reported_stages(stages: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``stages`` without the values that the server reported as null."""
    return {name: value for name, value in stages.items() if value is not None}


def _counted(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


def _peaks(good: Sequence[Record]) -> tuple[float, int]:
    """Return the largest number of output tokens, and of requests in flight, within one second.

    Seconds are counted from the first request."""
    if not good:
        return 0.0, 0
    began = min(record.sent_at for record in good)
    moments = np.concatenate([np.asarray(record.moments) for record in good])
    tokens = np.bincount((moments - began).astype(int))
    flights = np.zeros(len(tokens) + 1, int)
    for record in good:
        flights[int(record.sent_at - began)] += 1
        flights[int(record.moments[-1] - began) + 1] -= 1
    return float(tokens.max()), int(np.cumsum(flights).max())


# -- as text and as JSON ----------------------------------------------------------------------------------------------

_TITLES: dict[str, tuple[str, str]] = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
WIDTH = 50


def rows(summary: Summary, *, rate: float, max_concurrency: int | None, metrics: Sequence[str]) -> list[str]:
    """Return the result as lines of text: those of ``vllm bench serve``, then Tandem's stages if it reported any.

    Latencies are left out if no request succeeded."""
    lines = [_title(" Serving Benchmark Result ", "=")]
    lines.append(_row("Successful requests:", summary.completed))
    lines.append(_row("Failed requests:", summary.failed))
    if max_concurrency is not None:
        lines.append(_row("Maximum request concurrency:", max_concurrency))
    if rate != float("inf"):
        lines.append(_row("Request rate configured (RPS):", rate))
    lines.append(_row("Benchmark duration (s):", summary.seconds))
    lines.append(_row("Total input tokens:", summary.input_tokens))
    lines.append(_row("Total generated tokens:", summary.output_tokens))
    lines.append(_row("Request throughput (req/s):", summary.request_rate))
    if summary.goodput is not None and summary.attainment is not None:
        lines.append(_row("Request goodput (req/s):", summary.goodput))
        lines.append(_row("Requests within the SLO (%):", 100 * summary.attainment))
    lines.append(_row("Output token throughput (tok/s):", summary.output_rate))
    lines.append(_row("Peak output token throughput (tok/s):", summary.peak_output_tokens))
    lines.append(_row("Peak concurrent requests:", float(summary.peak_concurrent)))
    lines.append(_row("Total token throughput (tok/s):", summary.token_rate))
    for name in _shown(metrics, max_concurrency, rate) if summary.completed else ():
        label, title = _TITLES[name]
        spread = summary.spreads[name]
        lines.append(_title(title, "-"))
        lines.append(_row(f"Mean {label} (ms):", spread.mean))
        lines.append(_row(f"Median {label} (ms):", spread.median))
        lines += [_row(f"P{percent:g} {label} (ms):", value) for percent, value in spread.percentiles.items()]
    if summary.stages:
        lines.append(_title("Stages reported by the server", "-"))
        lines += [
            _row(f"{which} {stage.removesuffix('_ms')} (ms):", value)
            for stage, spread in summary.stages.items()
            for which, value in (
                ("Median", spread.median),
                *((f"P{percent:g}", value) for percent, value in spread.percentiles.items()),
            )
        ]
        lines += [_row(f"Requests over path {path}:", count) for path, count in sorted(summary.paths.items())]
    return [*lines, "=" * WIDTH]


def _shown(metrics: Sequence[str], max_concurrency: int | None, rate: float) -> list[str]:
    """Return the metrics to show, in order. ``e2el_including_client_queue`` is left out if all requests arrive at once:
    it would only repeat the duration of the run."""
    queued = 0 if max_concurrency is None else 1 if math.isinf(rate) else 2
    return [name for name in (*METRICS, *QUEUED[:queued]) if name in metrics]


def _title(text: str, line: str) -> str:
    return f"{text:{line}^{WIDTH}}"


def _row(label: str, value: int | float) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


def as_json(
    summary: Summary, *, metrics: Sequence[str], max_concurrency: int | None = None, rate: float = math.inf
) -> dict[str, Any]:
    """Return the result with the keys of ``vllm bench serve``'s result file, and ``slo_attainment``, ``stages`` and
    ``paths``."""
    found: dict[str, Any] = {
        "duration": summary.seconds,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.request_rate,
        "request_goodput": summary.goodput,
        "output_throughput": summary.output_rate,
        "total_token_throughput": summary.token_rate,
        "max_output_tokens_per_s": summary.peak_output_tokens,
        "max_concurrent_requests": summary.peak_concurrent,
        "rtfx": 0.0,  # seconds of audio per second (vLLM's key); never audio here
        "slo_attainment": summary.attainment,
    }
    for name in _shown(metrics, max_concurrency, rate):
        found |= _spread_keys(name, summary.spreads[name])
    if summary.stages:
        found["stages"] = {
            stage: _spread_keys(stage.removesuffix("_ms"), spread) for stage, spread in summary.stages.items()
        }
        found["paths"] = summary.paths
    return found


def _spread_keys(name: str, spread: Spread) -> dict[str, float]:
    keys = {f"mean_{name}_ms": spread.mean, f"median_{name}_ms": spread.median, f"std_{name}_ms": spread.std}
    return keys | {f"p{percent:g}_{name}_ms": value for percent, value in spread.percentiles.items()}


def detailed(run: Run) -> dict[str, Any]:
    """Return the columns that ``--save-detailed`` adds, one item per request. Times are in seconds; ``start_times``
    count from the start of the run."""
    records = run.records
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens if record.ok else 0 for record in records],
        "ttfts": [record.ttft for record in records],
        "itls": [record.itls for record in records],
        "latencies": [record.latency for record in records],
        "start_times": [record.sent_at - run.began_at for record in records],
        "queue_times": [record.waited for record in records],
        "generated_texts": ["".join(record.said) for record in records],
        "errors": [record.error for record in records],
        "request_stages": [record.stages for record in records],
    }
