"""``tandem bench serve``: one run of load against any OpenAI-compatible server, told as ``vllm bench serve`` does."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from bench import results
from bench.arrivals import Ramp
from bench.asking import prepare, times
from bench.client import Record
from bench.load import run_now
from bench.metrics import METRICS, Objective, as_json, detailed, parse_objectives, rows, summarise
from common.config import BenchServeConfig
from common.errors import StartError

SHOWN_ERRORS = 5


def run(config: BenchServeConfig) -> int:
    """Prints the figures; exit code 1 if no request succeeded."""
    objectives = absolute_objectives(config.goodput)
    metrics = _metrics(config.percentile_metrics)
    console = Console(stderr=True, highlight=False)
    prepared = prepare(config, config.url, config.api_key, config.served_model_name)
    for note in prepared.notes:
        console.print(f"note: {note}", markup=False)
    asks = prepared.asks()
    run = run_now(
        prepared.target,
        asks,
        times(config, asks, ramp=_ramp(config)),
        max_concurrency=config.max_concurrency,
        warm=prepared.warm(config.num_warmups),
        console=console,
    )
    show_errors(console, run.records)
    summary = summarise(run, percents=config.metric_percentiles, objectives=objectives)
    print("\n".join(rows(
        summary, rate=config.request_rate, max_concurrency=config.max_concurrency, metrics=metrics
    )))  # fmt: skip
    if config.save:
        figures = {
            "backend": config.backend,
            "model_id": prepared.target.model,
            "dataset_name": config.dataset_name,
            "num_prompts": len(asks),
            "request_rate": config.request_rate,
            "burstiness": config.burstiness,
            "max_concurrency": config.max_concurrency,
            "goodput": config.goodput,
            **as_json(summary, metrics=metrics, max_concurrency=config.max_concurrency),
            **(detailed(run) if config.save_detailed else {}),
        }
        results.save(Path(config.save), figures)
    if config.plot:
        from bench import plots

        plots.draw_run(run, Path(config.plot), objectives)
    return 0 if summary.completed else 1


def absolute_objectives(text: str | None) -> tuple[Objective, ...]:
    """``--goodput`` in ms; StartError if it is anything else."""
    try:
        found = parse_objectives(text) if text else ()
    except ValueError as error:
        raise StartError(f"--goodput cannot be {text!r}", str(error), "give for example ttft:1000,tpot:40") from None
    if any(each.relative for each in found):
        why = "one run does not know the unloaded median"
        raise StartError("--goodput needs times in ms here", why, "use tandem bench goodput, or give ms")
    return found


def show_errors(console: Console, records: list[Record]) -> None:
    """Why requests failed, each reason once, the most frequent ones first."""
    counts: dict[str, int] = {}
    for record in records:
        if record.error:
            counts[record.error] = counts.get(record.error, 0) + 1
    for error, count in sorted(counts.items(), key=lambda item: -item[1])[:SHOWN_ERRORS]:
        console.print(f"failed: {count} x {error}", markup=False)


def _metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if strange := [name for name in names if name not in METRICS]:
        why = f"metrics are {', '.join(METRICS)}"
        raise StartError(f"--percentile-metrics does not know {strange[0]}", why, "correct it")
    return names


def _ramp(config: BenchServeConfig) -> Ramp | None:
    strategy, start, end = config.ramp_up_strategy, config.ramp_up_start_rps, config.ramp_up_end_rps
    return Ramp(strategy, start, end) if strategy and start and end else None
