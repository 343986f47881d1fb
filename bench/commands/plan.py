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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.load import results
from bench.load.comparison import Outcome, table
from bench.load.metrics import METRICS, as_json
from bench.load.setup import as_load
from bench.load.systems import counts
from bench.simulate.prediction import objectives_of, predict, systems_of
from common.config.bench.plan import BenchPlanConfig
from common.config.options import Parser, add_options, options
from common.config.up import UpConfig
from common.core.errors import StartError, reason

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
    for name in systems_of(config):
        counts(name)
    objectives_of(config.goodput)
    measured = _measured(config, Path(config.check), systems_of(config)) if config.check else {}
    found = predict(config, Console(stderr=True, highlight=False))
    cost, outcomes, objectives, advice = found.cost, found.outcomes, found.objectives, found.advice
    terms = ", ".join(f"{count} streams {seconds:.3g}" for count, seconds in cost.streams)
    terms += "".join(f", {name} {getattr(cost, name):.3g}" for name in ("context", "token", "square", "turn"))
    of = f"{cost.threads} thread{'s' if cost.threads > 1 else ''}"
    print(f"costs in seconds ({of}, {cost.dtype}, median error {cost.error:.1%}): {terms}")
    print(f"Assumed, not measured: {'; '.join(found.assumptions)}.")
    for line in table(outcomes):
        print(line)
    print("\n".join(advice))
    checked = _check(outcomes, measured)
    for system, ratios in checked.items():
        shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        print(f"planned / measured, {system}: {shown}")
    if config.save:
        figures = {
            "load": as_load(config, config.model),
            "cost": found.origin | cost.as_json(),
            "assumed": found.assumed,
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
