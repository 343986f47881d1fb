"""``tandem bench serve``: one run of load against any OpenAI-compatible server, reported as ``vllm bench serve``
does."""

from __future__ import annotations

import math
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.load import results
from bench.load.arrivals import Ramp
from bench.load.client import Record
from bench.load.metrics import METRICS, QUEUED, Objective, as_json, detailed, parse_objectives, rows, summarise
from bench.load.run import Run, run_now
from bench.load.setup import as_load, prepare, times
from common.config.bench.serve import BenchServeConfig
from common.core.errors import StartError

CACHED = 0.02
"""Smallest share of cached prompt tokens that is worth a note."""
SHOWN_ERRORS = 5


def run(config: BenchServeConfig) -> int:
    """Print the figures; exit code 1 if no request succeeded."""
    objectives = absolute_objectives(config.goodput)
    metrics, ramp = _metrics(config.percentile_metrics), _ramp(config)
    console = Console(stderr=True, highlight=False)
    prepared = prepare(config, config.url, config.api_key, config.served_model_name, config.header)
    for note in prepared.notes:
        console.print(f"note: {note}", markup=False)
    asks = prepared.asks()
    run = run_now(
        prepared.target,
        asks,
        times(config, asks, ramp),
        max_concurrency=config.max_concurrency,
        warm=prepared.warm(config.num_warmups),
        console=console,
    )
    show_remarks(console, run.records)
    summary = summarise(run, percents=config.metric_percentiles, objectives=objectives)
    print("\n".join(rows(
        summary, rate=config.request_rate, max_concurrency=config.max_concurrency, metrics=metrics
    )))  # fmt: skip
    if config.save:
        figures = {
            **(config.metadata or {}),
            "endpoint_type": config.backend,  # the name in older files of vllm bench serve
            "backend": config.backend,
            "label": config.label,
            "model_id": prepared.target.model,
            "tokenizer_id": config.tokenizer,
            "dataset_name": config.dataset_name,
            "num_prompts": len(asks),
            "request_rate": config.request_rate,
            "burstiness": config.burstiness,
            "load": as_load(config, prepared.target.model),
            "max_concurrency": config.max_concurrency,
            "goodput": config.goodput,
            **(ramp_as_json(ramp, run) if ramp else {}),
            **as_json(summary, metrics=metrics, max_concurrency=config.max_concurrency, rate=config.request_rate),
            **(detailed(run) if config.save_detailed else {}),
        }
        results.save(Path(config.save), figures)
    if config.plot:
        from bench.load import plots

        plots.draw_run(run, Path(config.plot), objectives)
    return 0 if summary.completed else 1


def absolute_objectives(text: str | None) -> tuple[Objective, ...]:
    """Parse ``--goodput`` in ms. Raises StartError for anything else."""
    try:
        found = parse_objectives(text) if text else ()
    except ValueError as error:
        raise StartError(f"--goodput cannot be {text!r}", str(error), "give for example ttft:1000,tpot:40") from None
    if any(each.relative for each in found):
        why = "one run does not know the unloaded median"
        raise StartError("--goodput needs times in ms here", why, "use tandem bench goodput, or give ms")
    return found


def show_remarks(console: Console, records: list[Record]) -> None:
    """Print what the figures do not show: why requests failed (each reason once, most frequent first), how many
    were sent twice, and how many prompt tokens came from the server's prefix cache, which also happens if a seed is
    reused."""
    cached = sum(record.cached_tokens for record in records) / max(1, sum(record.prompt_tokens for record in records))
    if cached >= CACHED:
        console.print(f"note: {cached:.0%} of prompt tokens came from the server's prefix cache", markup=False)
    if resent := sum(record.resent for record in records):
        console.print(f"note: {resent} sent again: the server had closed a kept connection", markup=False)
    counts: dict[str, int] = {}
    for record in records:
        if record.error:
            counts[record.error] = counts.get(record.error, 0) + 1
    for error, count in sorted(counts.items(), key=lambda item: -item[1])[:SHOWN_ERRORS]:
        console.print(f"failed: {count} x {error}", markup=False)


def _metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if strange := [name for name in names if name not in (*METRICS, *QUEUED)]:
        why = f"metrics are {', '.join((*METRICS, *QUEUED))}"
        raise StartError(f"--percentile-metrics does not know {strange[0]}", why, "correct it")
    return names


def _ramp(config: BenchServeConfig) -> Ramp | None:
    strategy, start, end = config.ramp_up_strategy, config.ramp_up_start_rps, config.ramp_up_end_rps
    if not (strategy and start and end):
        return None
    if math.isfinite(config.request_rate):
        raise StartError("--request-rate would not count", "the ramp says the rate", "leave one of them out")
    return Ramp(strategy, start, end)


def ramp_as_json(ramp: Ramp, run: Run) -> dict[str, Any]:
    """Return how the rate grew, and when it reached each whole number of requests per second."""
    to_date = time.time() - time.perf_counter()
    reached = int(ramp.start)
    events = [(ramp.start, run.began_at)]
    for index, record in enumerate(run.records):
        rate = int(ramp.rate(index, len(run.records)))
        events += [(float(each), record.due_at) for each in range(reached + 1, rate + 1)]
        reached = max(reached, rate)
    return {
        "ramp_up_strategy": ramp.strategy,
        "ramp_up_start_rps": ramp.start,
        "ramp_up_end_rps": ramp.end,
        "rps_change_events": [
            {"rps": rate, "timestamp": datetime.fromtimestamp(at + to_date).isoformat()} for rate, at in events
        ],
    }
