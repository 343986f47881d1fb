"""``tandem bench compare``: should this workload be disaggregated on these cores, and with which pools?

Every system (pools of ``tandem up`` on the same cores, and the server at ``--url`` if there is one) gets the same
requests at the same times, round by round, so that a slow minute of the machine affects all of them. Ratios are taken
within a round; their spread over the rounds shows how reliable a difference is. The verdict is in
:mod:`bench.load.comparison`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.commands.goodput import measured_objectives, unloaded, wanted_objectives
from bench.commands.serve import show_remarks
from bench.load import neighbours, results
from bench.load.comparison import FIGURES, OTHER, Outcome, base_of, table, verdict
from bench.load.metrics import METRICS, Objective, as_json, summarise
from bench.load.run import run_now
from bench.load.setup import Prepared, as_load, prepare, times
from bench.load.systems import counts, running, usable_cores, usual_systems
from common.config.bench.compare import BenchCompareConfig
from common.core.errors import StartError
from common.net.http_client import HttpClient


@dataclass
class Terms:
    """What is the same for all systems."""

    longest: int | None = None
    """Most tokens of a prompt and its answer together; longer requests are left out for all systems."""
    objectives: tuple[Objective, ...] = ()
    asked: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)
    """The requests by round, as far as they do not depend on a server's vocabulary."""

    def hold(self, prepared: Prepared, number: int, system: str) -> None:
        """Raise StartError if these requests differ from those of the systems before, because limits or tokenizers
        differ."""
        asked = [
            (ask.prompt if isinstance(ask.prompt, str) else ask.prompt_tokens, ask.output_tokens, ask.at)
            for ask in prepared.workload
        ]
        if self.asked.setdefault(number, asked) != asked:
            most = f"of which a prompt and its answer may have {prepared.longest} tokens"
            todo = "give shorter lengths, or --up-flags with a --max-model-len for all"
            raise StartError(f"{system} would not get the same requests", f"other ones fit into it, {most}", todo)
        self.longest = prepared.longest


def run(config: BenchCompareConfig) -> int:
    """Print the figures of all systems, their ratios and the advice."""
    cores = usable_cores()
    wanted = usual_systems(cores) if config.systems is None else config.systems
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    for name in names:
        counts(name)
    if len(set(names)) < len(names) or not names:
        raise StartError(f"--systems {wanted} cannot be compared", "it takes different ones", "correct it")
    wanted_objectives(config.goodput)
    console = Console(stderr=True, highlight=False)
    if config.systems is None:
        console.print(f"comparing {wanted}, chosen for {cores} core{'s' if cores > 1 else ''} (--systems names others)")
    terms = Terms()
    if config.url:
        terms.longest = _look_at(config.url, config.api_key, config.served_model_name, console)
    neighbours.note(console)
    outcomes = {name: Outcome(name) for name in [*names, *([OTHER] if config.url else [])]}
    for number in range(config.runs):
        for outcome in outcomes.values():
            _measure(config, outcome, number, terms, console)
    rounds = list(outcomes.values())
    for line in table(rounds):
        print(line)
    words = verdict(rounds, terms.objectives)
    if config.runs == 1:
        words.append("One round only: how much of this is chance is unknown (--runs).")
    print("\n".join(words))
    if config.save:
        results.save(Path(config.save), _as_json(config, rounds, terms.objectives, words))
    if config.plot:
        from bench.load import plots

        plots.draw_runs({each.system: each.runs[0] for each in rounds}, Path(config.plot), terms.objectives)
    return 0


def _look_at(url: str, api_key: str | None, model: str | None, console: Console) -> int | None:
    """Return the most tokens of one request at the server at ``--url``, or None if it does not report them. Raise
    StartError if it does not answer or does not serve the model: its turn comes minutes from now, after all others."""
    served = HttpClient(url, api_key).served(model)
    console.print(
        "note: the server at --url keeps running while the others are measured: if it is on this machine and polls, it "
        "takes cores from them",
        markup=False,
    )
    length = served.get("max_model_len")
    return length if isinstance(length, int) else None


def _measure(config: BenchCompareConfig, outcome: Outcome, number: int, terms: Terms, console: Console) -> None:
    """Measure one round of one system. The first of all determines which requests fit and, if the objectives are
    relative, measures the system without load."""
    options = replace(config, seed=config.seed + number)
    with ExitStack() as stack:
        if outcome.system == OTHER:
            url, key, name = config.url or "", config.api_key, config.served_model_name
        else:
            console.print(f"round {number + 1}: starting {outcome.system}")
            words = shlex.split(config.up_flags or "")
            url, key, name = stack.enter_context(running(config.model, outcome.system, words)), None, None
        prepared = prepare(options, url, key, name, longest=terms.longest)
        terms.hold(prepared, number, outcome.system)
        if not terms.objectives:
            for note in prepared.notes:
                console.print(f"note: {note}", markup=False)
            terms.objectives = measured_objectives(wanted_objectives(config.goodput), unloaded(prepared, console))
        asks = prepared.asks(number + 1)
        run = run_now(
            prepared.target,
            asks,
            times(options, asks),
            max_concurrency=config.max_concurrency,
            warm=prepared.warm(config.num_warmups),
            console=console,
            title=f"round {number + 1}: {outcome.system}",
        )
    show_remarks(console, run.records)
    outcome.runs.append(run)
    outcome.summaries.append(summarise(run, objectives=terms.objectives))


def _as_json(
    config: BenchCompareConfig, outcomes: Sequence[Outcome], objectives: Sequence[Objective], words: Sequence[str]
) -> dict[str, Any]:
    return {
        "load": as_load(config, config.model) | {"max_concurrency": config.max_concurrency},
        "up_flags": config.up_flags or "",
        "objectives_ms": {each.metric: each.bound for each in objectives},
        "systems": {
            each.system: {
                "busy": each.busy(),
                "rounds": [as_json(summary, metrics=METRICS) for summary in each.summaries],
            }
            for each in outcomes
        },
        "ratios_to": (base := base_of(outcomes)).system,
        "ratios": {
            each.system: {name: asdict(each.against(base, name)) for name in FIGURES}
            for each in outcomes
            if each is not base
        },
        "advice": list(words),
    }
