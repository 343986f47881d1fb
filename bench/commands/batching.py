"""``tandem bench batching``: what continuous batching gains over naive static batching, on one server.

The workload has prompts of one length and answers of exponentially distributed lengths, as in the comparison that
reported the technique's 23-fold gain. *Continuous* sends all requests at once and leaves the order to the server.
*Static* works like a loop over batches: it sends ``--batch-size`` requests together, lets each run as long as the
longest of them, and sends the next batch when all have ended; the tokens past a request's own length are computed and
discarded. Engine, kernels and prompts are the same, so the ratio is that of batching alone, provided that the server
runs no more streams at a time than a batch has (``--max-num-seqs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bench.commands.serve import show_remarks
from bench.load import results
from bench.load.comparison import RoundRange
from bench.load.run import Run, run_now
from bench.load.setup import Prepared, prepare_with
from bench.load.tokens import Tokenizer, ordinary_ids
from bench.load.workloads import PlannedRequest, random_asks
from common.config.bench.batching import BenchBatchingConfig
from common.core.errors import StartError

LONGEST = 12
"""Longest answer, in mean answers; less where the server accepts less."""


@dataclass(frozen=True, slots=True)
class Result:
    """Useful output tokens, and the seconds they took."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Useful output tokens per second."""
        return self.tokens / self.seconds


def mixed(asks: Sequence[PlannedRequest], mean: int, most: int, seed: int) -> list[PlannedRequest]:
    """Return the same prompts with exponentially distributed answer lengths of the given ``mean``, at most ``most``."""
    drawn = np.random.default_rng(seed).exponential(mean, len(asks))
    lengths = np.clip(np.rint(drawn), 1, most).astype(int).tolist()
    return [replace(ask, output_tokens=length) for ask, length in zip(asks, lengths, strict=True)]


def longest_answer(mean: int, prompt: int, longest: int | None) -> int:
    """Return the tokens of the longest answer, if prompt and answer may have ``longest`` tokens together."""
    return LONGEST * mean if longest is None else min(LONGEST * mean, longest - prompt)


def static_batches(asks: Sequence[PlannedRequest], size: int) -> list[list[PlannedRequest]]:
    """Split into batches, in order; within a batch every answer is as long as the longest."""
    batches = [list(asks[at : at + size]) for at in range(0, len(asks), size)]
    return [
        [replace(ask, output_tokens=max(each.output_tokens for each in batch)) for ask in batch] for batch in batches
    ]


def _prompts(config: BenchBatchingConfig, tokenizer: Tokenizer) -> list[PlannedRequest]:
    """Return the prompts, with answers of the mean length."""
    lengths = config.random_input_len, config.random_output_len
    return random_asks(ordinary_ids(tokenizer), config.num_prompts, *lengths, seed=config.seed)


def run(config: BenchBatchingConfig) -> int:
    """Print tokens per second of both ways, and their ratio over the rounds."""
    console = Console(stderr=True, highlight=False)
    prepared = prepare_with(
        config, lambda tokenizer: _prompts(config, tokenizer), config, config.url, config.api_key,
        config.served_model_name, config.header,
    )  # fmt: skip
    size = config.batch_size
    alone = f"note: the ratio is that of batching alone if the server runs at most {size} requests at a time"
    console.print(f"{alone} (tandem up --max-num-seqs {size})", markup=False)
    mean = config.random_output_len
    most = longest_answer(mean, config.random_input_len, prepared.longest)
    if most < LONGEST * mean:
        console.print(
            f"note: answers have at most {most} tokens, because the server accepts no longer ones", markup=False
        )
    ways = {"continuous": _continuous, "static": _static}
    found: dict[str, list[Result]] = {way: [] for way in ways}
    for number in range(config.runs):
        for index, (way, measure) in enumerate(ways.items()):
            words = prepared.asks(1 + number * len(ways) + index)
            asks = mixed(words, mean, most, config.seed + number)
            found[way].append(measure(config, prepared, asks, console))
    for way, outcomes in found.items():
        print(f"{way:<11} useful tok/s: {RoundRange.of([each.rate for each in outcomes]):.1f}")
    ratios = [mine.rate / other.rate for mine, other in zip(found["continuous"], found["static"], strict=True)]
    gain = RoundRange.of(ratios)
    print(f"continuous batching gives {gain:.2f} times as many, against batches of {config.batch_size}")
    if config.save:
        about = {"label": config.label, "model_id": prepared.target.model}
        results.save(Path(config.save), about | _as_json(config, most, found, ratios))
    return 0


def _continuous(
    config: BenchBatchingConfig, prepared: Prepared, asks: Sequence[PlannedRequest], console: Console
) -> Result:
    warm = prepared.warm(config.num_warmups)
    run = run_now(prepared.target, asks, [0.0] * len(asks), warm=warm, console=console, title="continuous")
    _check(asks, run, console)
    return Result(sum(ask.output_tokens for ask in asks), run.seconds)


def _static(
    config: BenchBatchingConfig, prepared: Prepared, asks: Sequence[PlannedRequest], console: Console
) -> Result:
    seconds = 0.0
    for batch in static_batches(asks, config.batch_size):
        run = run_now(prepared.target, batch, [0.0] * len(batch), console=console, title="static")
        _check(batch, run, console)
        seconds += run.seconds
    return Result(sum(ask.output_tokens for ask in asks), seconds)


def _check(asks: Sequence[PlannedRequest], run: Run, console: Console) -> None:
    """Raise StartError if a request failed, or if an answer is shorter than requested: neither can be compared."""
    if not all(record.ok for record in run.records):
        show_remarks(console, run.records)
        raise StartError("requests failed", "both ways must answer all of them", "send fewer at once, or shorter ones")
    if short := sum(record.output_tokens < ask.output_tokens for ask, record in zip(asks, run.records, strict=True)):
        raise StartError(
            f"{short} of {len(asks)} answers ended early",
            "missing tokens would count as useful, and no batch would last as long as its longest answer",
            "leave out --no-ignore-eos, and use a server that supports ignore_eos",
        )


def _as_json(
    config: BenchBatchingConfig, most: int, found: dict[str, list[Result]], ratios: Sequence[float]
) -> dict[str, Any]:
    return {
        "num_prompts": config.num_prompts,
        "input_tokens": config.random_input_len,
        "mean_output_tokens": config.random_output_len,
        "most_output_tokens": most,
        "batch_size": config.batch_size,
        "useful_tokens_per_s": {way: [each.rate for each in outcomes] for way, outcomes in found.items()},
        "ratios": list(ratios),
    }
