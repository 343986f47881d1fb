"""Predicts by simulation which pools serve a workload best: measures or reads the costs of steps, simulates each
system, and advises. For ``tandem bench plan`` and ``tandem doctor --workload``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.load import neighbours, results
from bench.load.client import Target
from bench.load.comparison import Outcome, verdict
from bench.load.metrics import Objective, parse_objectives, summarise
from bench.load.run import run_now
from bench.load.setup import times, workload
from bench.load.systems import counts, running
from bench.load.tokens import FileTokenizer, ordinary_ids
from bench.load.workloads import PlannedRequest, random_asks, relabelled, within
from bench.simulate.cost import CostModel, load_costs, machines_differ, measure, source
from bench.simulate.world import HELP_WITH_FEW, HELP_WITH_MANY, LENT_TOKENS, MANY_TOKENS, Limits, World
from common import builtin
from common.checkpoint.files import Checkpoint, open_checkpoint
from common.config.bench.plan import BenchPlanConfig
from common.core.errors import StartError
from common.kv.budget import human_bytes
from common.net.http_client import HttpClient

SERVED = (4, 64, 128)
"""Streams, prompt tokens and answer tokens of the load with which the cost of a loop turn outside the engine step is
measured."""


@dataclass(frozen=True)
class Prediction:
    """The simulated systems and what they say. ``origin`` is where the costs come from, ``assumed`` what the simulation
    takes for granted, ``assumptions`` the same in words."""

    cost: CostModel
    origin: dict[str, Any]
    objectives: tuple[Objective, ...]
    assumed: dict[str, Any]
    assumptions: list[str]
    outcomes: list[Outcome]
    advice: list[str]


def predict(config: BenchPlanConfig, console: Console) -> Prediction:
    """Measure or read the costs of steps, and simulate the systems of ``config``. Raises StartError."""
    systems, objectives = systems_of(config), objectives_of(config.goodput)
    checkpoint = open_checkpoint(config.model or str(builtin.path()))
    tokenizer = FileTokenizer(Path(config.tokenizer) if config.tokenizer else checkpoint.path)
    cost, origin = _cost(config, checkpoint, tokenizer, console)
    limits = Limits(
        config.num_kv_blocks, config.block_size, config.max_num_seqs, config.max_num_batched_tokens,
        checkpoint.position_limit, config.link_rate, config.lend_cores,
    )  # fmt: skip
    assumed, words = _assumed(limits, systems)
    longest = min(limits.max_model_len, limits.kv_blocks * limits.block_size)
    rounds = [round_of(config, number, tokenizer, longest) for number in range(config.runs)]
    outcomes = [planned(name, cost, limits, rounds, objectives) for name in systems]
    advice = _advice(outcomes, objectives, cost.threads)
    return Prediction(cost, origin, objectives, assumed, words, outcomes, advice)


def systems_of(config: BenchPlanConfig) -> list[str]:
    """Return the names in ``--systems``."""
    return [name.strip() for name in config.systems.split(",") if name.strip()]


def round_of(
    config: BenchPlanConfig, number: int, tokenizer: FileTokenizer, longest: int
) -> tuple[list[PlannedRequest], list[float]]:
    """Return the requests of one round and their arrival times in seconds, made with the same seed as in round
    ``number`` of ``compare``."""
    options = replace(config, seed=config.seed + number)
    asks, left_out = within(workload(options, tokenizer), config.num_prompts, longest)
    if not asks:
        raise StartError("there is nothing to plan for", f"all {left_out} requests are too long", "give shorter ones")
    words = relabelled(asks, number + 1)
    return words, times(options, words)


def planned(
    system: str,
    cost: CostModel,
    limits: Limits,
    rounds: Iterable[tuple[list[PlannedRequest], list[float]]],
    objectives: Sequence[Objective],
) -> Outcome:
    """Simulate the rounds of one system."""
    outcome = Outcome(system)
    for asks, due in rounds:
        run = World(cost, limits, *counts(system)).run(asks, due)
        outcome.runs.append(run)
        outcome.summaries.append(summarise(run, objectives=objectives))
    return outcome


def objectives_of(text: str) -> tuple[Objective, ...]:
    """Parse ``--goodput``, whose objectives are times in ms. Raises StartError."""
    try:
        found = parse_objectives(text)
    except ValueError as error:
        raise StartError(f"--goodput cannot be {text!r}", str(error), "give for example ttft:1000,tpot:40") from None
    if any(each.relative for each in found):
        raise StartError("--goodput needs times in ms here", "nothing is measured unloaded", "give ms")
    return found


def _cost(
    config: BenchPlanConfig, checkpoint: Checkpoint, tokenizer: FileTokenizer, console: Console
) -> tuple[CostModel, dict[str, Any]]:
    """Return the step costs and their origin (model and machine). They are read from the file ``--cost`` if it exists,
    else measured now and saved there."""

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    model = checkpoint.name
    origin = source(config.model or builtin.NAME, checkpoint.fingerprint)
    if config.cost and (path := Path(config.cost)).exists():
        cost, found = load_costs(path, origin, config.threads)
        if other := machines_differ(found["machine"], origin["machine"]):
            say(f"note: the costs in {path} were measured on another machine: {other}")
        return cost, found
    neighbours.note(console)
    say(f"measuring turns of {model} as a client sees them")
    gap_s = served_gap_s(
        model, config.threads, random_asks(ordinary_ids(tokenizer), *SERVED, seed=config.seed), console
    )
    cost = measure(model, config.threads, say, console)  # last, so that no system runs beside the engine it loads
    streams, prompt, tokens = SERVED
    cost = replace(cost, turn=max(0.0, gap_s - cost.decode_s(streams, prompt + tokens / 2)))
    if config.cost:
        results.save(Path(config.cost), origin | cost.as_json())
    return cost, origin


def served_gap_s(model: str, threads: int, asks: Sequence[PlannedRequest], console: Console) -> float:
    """Return the median time in seconds between tokens of ``asks``, sent at once to a system with one decode worker."""
    with running(model, "1p1d", ["--threads", str(threads)]) as url:
        target = Target(url, str(HttpClient(url).served(None)["id"]), extra={"ignore_eos": True, "temperature": 0})
        run = run_now(target, asks, [0.0] * len(asks), warm=asks[:1], console=console, title="streams")
    gaps = [gap for record in run.records for gap in record.itls if record.ok]
    if not gaps:
        raise StartError("nothing was answered", run.records[0].error, "try the same tandem up")
    return statistics.median(gaps)


def _assumed(limits: Limits, systems: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the assumptions that the plan makes without a measurement: as figures for the saved file, and in words."""
    pools = [counts(name) for name in systems]
    found: dict[str, Any] = {}
    words = ["no network time, some milliseconds before the first token"]
    if any(prefill for prefill, _, _ in pools):
        found["link_bytes_per_s"] = limits.link_bytes_per_s
        words.append(f"{human_bytes(limits.link_bytes_per_s)} per second between two workers (--link-rate)")
    if limits.lend_cores and any(sum(each) > 1 for each in pools):
        worth = {LENT_TOKENS: HELP_WITH_FEW, MANY_TOKENS: HELP_WITH_MANY}
        found["resting_worker_is_worth"] = {f"from_{tokens}_tokens": share for tokens, share in worth.items()}
        shares = " and ".join(f"{share:g} of a worker from {tokens} tokens on" for tokens, share in worth.items())
        words.append(f"an idle worker adds {shares} to a step (--no-lend-cores: none)")
    return found, words


def _advice(outcomes: Sequence[Outcome], objectives: Sequence[Objective], threads: int) -> list[str]:
    """Return the advice for each number of workers with which there are disaggregated and colocated systems, and a note
    that one colocated worker on all cores is not planned."""
    sizes = sorted({sum(counts(each.system)) for each in outcomes})
    lines = []
    for size in sizes:
        equal = [each for each in outcomes if sum(counts(each.system)) == size]
        if len({each.disaggregated for each in equal}) == 2:
            lines += [f"{size} workers: {line}" for line in verdict(equal, objectives)]
    if not lines:
        return ["No advice: no two systems, one disaggregated and one colocated, have as many workers."]
    lines.append(
        f"A colocated worker here has {threads} core{'s' if threads > 1 else ''} (--threads), as every worker; one "
        "worker over all cores (1c) is not planned: tandem bench compare measures that."
    )
    return lines
