"""``tandem bench plan``: predicts which pools serve a workload best, including pools that this machine cannot run.

Answers the same question as ``tandem bench compare``, by a simulation (:mod:`bench.simulate.world`) whose step times
come from a cost model fitted to steps of the real engine (:mod:`bench.simulate.cost`). Each simulated worker has as
many cores as the measured one and by default lends them while it is idle, as on one machine. Systems with the same
number of workers therefore have the same number of cores, and the advice is given for each number of workers. A single
colocated worker on all of these cores is not planned; ``compare`` can measure it. ``--check`` compares the plan with a
file that ``compare`` saved for the same systems.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.load import neighbours, results
from bench.load.client import Target
from bench.load.comparison import Outcome, table, verdict
from bench.load.metrics import METRICS, Objective, as_json, parse_objectives, summarise
from bench.load.run import run_now
from bench.load.setup import as_load, times, workload
from bench.load.systems import counts, running
from bench.load.tokens import FileTokenizer, ordinary_ids
from bench.load.workloads import PlannedRequest, random_asks, relabelled, within
from bench.simulate.cost import CostModel, load_costs, machines_differ, measure, source
from bench.simulate.world import HELP_WITH_FEW, HELP_WITH_MANY, LENT_TOKENS, MANY_TOKENS, Limits, World
from common import builtin
from common.checkpoint.files import Checkpoint, open_checkpoint
from common.config.bench.plan import BenchPlanConfig
from common.config.options import Parser, add_options, options
from common.config.up import UpConfig
from common.core.errors import StartError, reason
from common.kv.budget import human_bytes
from common.net.http_client import HttpClient

SERVED = (4, 64, 128)
"""Streams, prompt tokens and answer tokens of the load with which the cost of a loop turn outside the engine step is
measured."""
CHECKED = {
    "inside": "slo_attainment",
    "ttft_p50": "median_ttft_ms",
    "itl_p50": "median_itl_ms",
    "itl_p99": "p99_itl_ms",
    "output": "output_throughput",
}
"""The figures that ``--check`` compares, with their keys in a file saved by ``compare``."""
ALIKE = ("block_size", "max_num_seqs", "max_num_batched_tokens", "lend_cores")
"""Options of workers whose defaults are the same here and in ``tandem up``."""


def run(config: BenchPlanConfig) -> int:
    """Print the planned figures and the advice; exit code 1 if the check is off by more than ``--tolerance``."""
    systems = [name.strip() for name in config.systems.split(",") if name.strip()]
    for name in systems:
        counts(name)
    objectives = _objectives(config.goodput)
    measured = _measured(config, Path(config.check), systems) if config.check else {}
    model = config.model or str(builtin.path())
    checkpoint = open_checkpoint(model)
    tokenizer = FileTokenizer(Path(config.tokenizer) if config.tokenizer else checkpoint.path)
    cost, origin = _cost(config, checkpoint, tokenizer)
    terms = ", ".join(f"{count} streams {seconds:.3g}" for count, seconds in cost.streams)
    terms += "".join(f", {name} {getattr(cost, name):.3g}" for name in ("context", "token", "square", "turn"))
    of = f"{cost.threads} thread{'s' if cost.threads > 1 else ''}"
    print(f"costs in seconds ({of}, {cost.dtype}, median error {cost.error:.1%}): {terms}")
    limits = Limits(
        config.num_kv_blocks, config.block_size, config.max_num_seqs, config.max_num_batched_tokens,
        checkpoint.position_limit, config.link_rate, config.lend_cores,
    )  # fmt: skip
    assumed, words = _assumed(limits, systems)
    print(f"Assumed, not measured: {'; '.join(words)}.")
    longest = min(limits.max_model_len, limits.kv_blocks * limits.block_size)
    rounds = [_round(config, number, tokenizer, longest) for number in range(config.runs)]
    outcomes = [planned(name, cost, limits, rounds, objectives) for name in systems]
    for line in table(outcomes):
        print(line)
    advice = _advice(outcomes, objectives, cost.threads)
    print("\n".join(advice))
    checked = _check(outcomes, measured)
    for system, ratios in checked.items():
        shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        print(f"planned / measured, {system}: {shown}")
    if config.save:
        figures = {
            "load": as_load(config, config.model),
            "cost": origin | cost.as_json(),
            "assumed": assumed,
            "objectives_ms": {each.metric: each.bound for each in objectives},
            "systems": {
                each.system: {"rounds": [as_json(summary, metrics=METRICS) for summary in each.summaries]}
                for each in outcomes
            },
            "advice": advice,
            "planned_over_measured": checked,
        }
        results.save(Path(config.save), figures)
    if config.plot:
        from bench.load import plots

        plots.draw_runs({each.system: each.runs[0] for each in outcomes}, Path(config.plot), objectives)
    off = [
        f"{name} of {system}"
        for system, ratios in checked.items()
        for name, ratio in ratios.items()
        if abs(ratio - 1) > config.tolerance
    ]
    if off:
        print(f"the plan is off by more than {config.tolerance:.0%} (--tolerance): {', '.join(off)}")
    return 1 if off else 0


def _round(
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


def _objectives(text: str) -> tuple[Objective, ...]:
    try:
        found = parse_objectives(text)
    except ValueError as error:
        raise StartError(f"--goodput cannot be {text!r}", str(error), "give for example ttft:1000,tpot:40") from None
    if any(each.relative for each in found):
        raise StartError("--goodput needs times in ms here", "nothing is measured unloaded", "give ms")
    return found


def _cost(
    config: BenchPlanConfig, checkpoint: Checkpoint, tokenizer: FileTokenizer
) -> tuple[CostModel, dict[str, Any]]:
    """Return the step costs and their origin (model and machine). They are read from the file ``--cost`` if it exists,
    else measured now and saved there."""
    console = Console(stderr=True, highlight=False)

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
    cost = measure(model, config.threads, say)  # last, so that no system runs beside the engine it loads
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


def _measured(config: BenchPlanConfig, path: Path, systems: Sequence[str]) -> dict[str, Any]:
    """Return the systems in the file ``path`` saved by ``compare``. Called first, so that a wrong file is noticed
    before minutes are spent on the plan. StartError if ``path`` is not such a file, was measured with another load,
    or contains none of ``systems``."""
    todo = "give a file that tandem bench compare has saved"
    try:
        found = results.load(path)
        measured: dict[str, Any] = found["systems"]
        load = dict(found.get("load", {}))
        if "up_flags" in found:
            load |= _workers(found["up_flags"] or "")
        for system in measured.values():
            for each in system["rounds"]:
                for key in CHECKED.values():
                    float(each[key])
    except OSError as error:
        raise StartError(f"cannot check against {path}", reason(error), todo) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise StartError(f"cannot check against {path}", f"it is no such file ({error!r})", todo) from error
    of_workers = {each.name: getattr(config, each.name) for each in options(UpConfig) if hasattr(config, each.name)}
    mine = of_workers | as_load(config, config.model) | {"max_concurrency": None}
    if other := [name for name, value in load.items() if name in mine and value != mine[name]]:
        why = ", ".join(f"{name} {load[name]} measured, {mine[name]} planned" for name in other)
        raise StartError(f"{path} is of another load", why, "plan with the flags of its command")
    if not set(systems) & set(measured):
        raise StartError(f"{path} has none of these systems", f"it has {', '.join(measured)}", "name some of them")
    return measured


def _workers(flags: str) -> dict[str, Any]:
    """Return the options of the measured workers that ``plan`` has too, from ``flags`` of the measured ``tandem up`` or
    its defaults."""
    parser = Parser(add_help=False)
    add_options(parser, UpConfig)
    given = vars(parser.parse_args(shlex.split(flags)))
    here = {each.name: each for each in options(BenchPlanConfig)}
    found = {name: here[name].default for name in ALIKE}
    for each in options(UpConfig):
        if each.name in here and each.name in given and not each.positional:
            value = given[each.name]
            found[each.name] = each.parse(value, each.flag) if isinstance(value, str) else value
    return found


def _check(outcomes: Sequence[Outcome], measured: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the ratio of each planned figure to the measured one (medians over the rounds), for the systems that are
    in both."""
    found = {}
    for outcome in outcomes:
        if outcome.system in measured:
            rounds = measured[outcome.system]["rounds"]
            medians = {key: statistics.median(each[key] for each in rounds) for key in CHECKED.values()}
            found[outcome.system] = {
                name: outcome.figure(name).median / medians[key] for name, key in CHECKED.items() if medians[key]
            }
    return found
