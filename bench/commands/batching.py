"""``tandem bench batching``: what continuous batching brings over naive static batching, on one server.

One workload of prompts of one length and answers of very different ones (exponentially distributed, as in the
comparison that named the technique's 23-fold gain). *Continuous* sends all at once and leaves the order to the server.
*Static* does what a loop over batches does: it sends ``--batch-size`` requests together, lets each run as long as the
longest of them, and sends the next when all have ended; tokens past a request's own length are computed and thrown
away. The engine, its kernels and its prompts are the same, so the ratio is that of the batching alone, if the
server runs no more streams at a time than a batch has (``--max-num-seqs``).
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
from bench.load.comparison import Spread
from bench.load.run import Run, run_now
from bench.load.setup import Prepared, prepare_with
from bench.load.tokens import Tokenizer, ordinary_ids
from bench.load.workloads import Ask, random_asks
from common.config.bench.batching import BenchBatchingConfig
from common.core.errors import StartError

LONGEST = 12
"""An answer is at most so many times as long as the mean one; less where the server takes less."""


@dataclass(frozen=True, slots=True)
class Result:
    """Useful output tokens and the seconds that they took."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def mixed(asks: Sequence[Ask], mean: int, most: int, seed: int) -> list[Ask]:
    """The same prompts with exponentially distributed lengths of answers, ``mean`` in the mean, at most ``most``."""
    drawn = np.random.default_rng(seed).exponential(mean, len(asks))
    lengths = np.clip(np.rint(drawn), 1, most).astype(int).tolist()
    return [replace(ask, output_tokens=length) for ask, length in zip(asks, lengths, strict=True)]


def longest_answer(mean: int, prompt: int, longest: int | None) -> int:
    """Tokens of the longest answer, where prompt and answer together may have ``longest``."""
    return LONGEST * mean if longest is None else min(LONGEST * mean, longest - prompt)


def static_batches(asks: Sequence[Ask], size: int) -> list[list[Ask]]:
    """Batches in order; within each every answer is as long as the longest."""
    batches = [list(asks[at : at + size]) for at in range(0, len(asks), size)]
    return [
        [replace(ask, output_tokens=max(each.output_tokens for each in batch)) for ask in batch] for batch in batches
    ]


def _prompts(config: BenchBatchingConfig, tokenizer: Tokenizer) -> list[Ask]:
    """With answers of the mean length."""
    lengths = config.random_input_len, config.random_output_len
    return random_asks(ordinary_ids(tokenizer), config.num_prompts, *lengths, seed=config.seed)


def run(config: BenchBatchingConfig) -> int:
    """Prints tokens per second of both ways and their ratio over the rounds."""
    console = Console(stderr=True, highlight=False)
    prepared = prepare_with(
        config, lambda tokenizer: _prompts(config, tokenizer), config, config.url, config.api_key,
        config.served_model_name, config.header,
    )  # fmt: skip
    size = config.batch_size
    alone = f"note: the ratio is that of batching alone if the server answers no more than {size} requests at a time"
    console.print(f"{alone} (tandem up --max-num-seqs {size})", markup=False)
    mean = config.random_output_len
    most = longest_answer(mean, config.random_input_len, prepared.longest)
    if most < LONGEST * mean:
        console.print(f"note: answers have at most {most} tokens, which is what the server has room for", markup=False)
    ways = {"continuous": _continuous, "static": _static}
    found: dict[str, list[Result]] = {way: [] for way in ways}
    for number in range(config.runs):
        for index, (way, measure) in enumerate(ways.items()):
            words = prepared.asks(1 + number * len(ways) + index)
            asks = mixed(words, mean, most, config.seed + number)
            found[way].append(measure(config, prepared, asks, console))
    for way, outcomes in found.items():
        print(f"{way:<11} useful tok/s: {Spread.of([each.rate for each in outcomes]):.1f}")
    ratios = [mine.rate / other.rate for mine, other in zip(found["continuous"], found["static"], strict=True)]
    gain = Spread.of(ratios)
    print(f"continuous batching gives {gain:.2f} times as many, against batches of {config.batch_size}")
    if config.save:
        about = {"label": config.label, "model_id": prepared.target.model}
        results.save(Path(config.save), about | _as_json(config, most, found, ratios))
    return 0


def _continuous(config: BenchBatchingConfig, prepared: Prepared, asks: Sequence[Ask], console: Console) -> Result:
    warm = prepared.warm(config.num_warmups)
    run = run_now(prepared.target, asks, [0.0] * len(asks), warm=warm, console=console, title="continuous")
    _check(asks, run, console)
    return Result(sum(ask.output_tokens for ask in asks), run.seconds)


def _static(config: BenchBatchingConfig, prepared: Prepared, asks: Sequence[Ask], console: Console) -> Result:
    seconds = 0.0
    for batch in static_batches(asks, config.batch_size):
        run = run_now(prepared.target, batch, [0.0] * len(batch), console=console, title="static")
        _check(batch, run, console)
        seconds += run.seconds
    return Result(sum(ask.output_tokens for ask in asks), seconds)


def _check(asks: Sequence[Ask], run: Run, console: Console) -> None:
    """A way in which requests fail cannot be compared, nor one whose answers are not as long as was asked for."""
    if not all(record.ok for record in run.records):
        show_remarks(console, run.records)
        raise StartError("requests failed", "both ways must answer all of them", "ask for less at once, or for shorter")
    if short := sum(record.output_tokens < ask.output_tokens for ask, record in zip(asks, run.records, strict=True)):
        raise StartError(
            f"{short} of {len(asks)} answers ended early",
            "tokens that nobody had would count, and no batch would be as long as its longest answer",
            "leave --no-ignore-eos out, and ask a server that knows ignore_eos",
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
