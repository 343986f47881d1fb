"""``tandem bench goals [--only C1,C4] [--resume]``: measure the goals of :mod:`bench.goals` and write their table."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.goals import checkpoint, coordinator, engine, goodput, handoff, interference, saturation, start
from bench.goals.field import FULL, QUICK, Field, opened
from bench.goals.figures import Row, as_json, of_json, table
from bench.load import neighbours, results
from bench.peers import vllm
from common.config.bench.goals import BenchGoalsConfig
from common.core.errors import StartError, reason

Goal = Callable[[Field], list[Row]]
GOALS: dict[str, Goal] = {
    "C12": start.c12, "C6": coordinator.c6, "C5": handoff.c5, "C1": engine.c1, "C2": engine.c2, "C3": engine.c3,
    "C7": engine.c7, "C4": handoff.c4, "C8": interference.c8, "C10": saturation.c10, "C11": saturation.c11,
    "C9": goodput.c9,
}  # fmt: skip
"""In the order in which they are measured: goals that need the same servers follow one another."""
CORES = 2
"""Number of cores for which the goals are stated."""
LOCAL = results.ROOT / "bench" / "results" / "local" / "goals.json"
"""Git ignores this folder. A run to be published is saved in the folder of its machine."""


def chosen(text: str | None) -> list[str]:
    """Return the goals that ``--only`` names, in the order in which they are measured. Raises StartError for an unknown
    one."""
    names = list(GOALS) if text is None else [name.strip().upper() for name in text.split(",") if name.strip()]
    if strange := [name for name in names if name not in GOALS]:
        raise StartError(f"there is no goal {strange[0]}", "goals are C1 to C12", "correct --only")
    return [name for name in GOALS if name in names]


@dataclass
class Found:
    """The rows of the goals, and which goals have none: those that failed, with the reason, and those not yet
    measured."""

    rows: list[Row] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    """Peers that did not start, and why."""
    parts: dict[str, list[str]] = field(default_factory=dict)
    """Earlier runs that this run continues: the goals that each measured, by date."""
    quick: bool = False
    """Whether the loads were so small that the figures must not be judged."""

    def lines(self) -> list[str]:
        """Return the table, notes on what is missing in it, and its provenance."""
        lines = table(self.rows) + [f"- {name} could not be measured: {why}" for name, why in self.failed.items()]
        lines += [f"- {name} is missing: {why}" for name, why in self.broken.items()]
        if self.left:
            lines.append(f"- not measured so far: {', '.join(self.left)}")
        lines += [f"- measured before, by a run of {date}: {', '.join(names)}" for date, names in self.parts.items()]
        if self.quick:
            lines.append("- a quick run: its figures, and whether they meet a target, mean nothing")
        return [*lines, "", results.provenance_line()]

    def as_json(self) -> dict[str, Any]:
        """Return what is saved: all fields but ``quick``, as :func:`resumed` reads them."""
        rest = {"failed": self.failed, "broken": self.broken, "left": self.left, "parts": self.parts}
        return rest | {"rows": [as_json(row) for row in self.rows]}


def resumed(save: Path, of: dict[str, Any]) -> Found:
    """Return what the run that was saved in ``save`` has measured. ``of``: model, peers and effort of this run. Raises
    StartError if the saved run differs in one of them, or was made on another machine or from other sources."""
    try:
        kept = json.loads(save.read_text(encoding="utf-8"))
        rows = [of_json(each) for each in kept["rows"]]
        parts, date, broken = dict(kept["parts"]), str(kept["date"]), dict(kept["broken"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StartError(f"cannot resume {save}", reason(error), "leave --resume out") from error
    if not results.comparable(kept):
        raise StartError(
            f"cannot resume {save}",
            "it was measured on another machine or from other sources, or there are uncommitted changes",
            "leave --resume out",
        )
    if other := [f"{name} {kept.get(name)!r}, not {value!r}" for name, value in of.items() if kept.get(name) != value]:
        why = f"its run had {' and '.join(other)}"
        raise StartError(f"cannot resume {save}", why, "leave --resume out, or give the same options")
    before = {name for names in parts.values() for name in names}
    if new := [name for name in GOALS if name in {row.goal for row in rows} - before]:
        parts[date] = new
    return Found(rows, parts=parts, broken=broken)


def measure(
    setting: Field, names: Sequence[str], console: Console, keep: Callable[[Found], None], found: Found | None = None
) -> Found:
    """Measure those of the goals that ``found`` lacks, and call ``keep`` after each, so that a goal that fails, or an
    interruption, does not lose the others."""
    found = found or Found()
    known = {row.goal for row in found.rows}
    found.left = [name for name in names if name not in known]
    found.quick = setting.effort is QUICK
    for name in list(found.left):
        began = time.monotonic()
        found.left.remove(name)
        try:
            rows = GOALS[name](setting)
        except Exception as error:  # a goal that fails must not end the run
            found.failed[name] = str(error) or type(error).__name__
            if not isinstance(error, StartError):
                console.print_exception()
            console.print(f"{name} could not be measured: {found.failed[name]}", markup=False)
        else:
            found.rows = sorted([*found.rows, *rows], key=lambda row: int(row.goal[1:]))
            for line in table(rows)[2:]:
                console.print(line, markup=False, soft_wrap=True)
            console.print(f"{name}: {time.monotonic() - began:.0f} s", markup=False)
        found.broken |= {str(system): why for system, why in setting.broken.items()}
        keep(found)
    return found


def run(config: BenchGoalsConfig) -> int:
    """Measure the goals and print their table. Exit code 1 if a goal could not be measured, a peer did not start or,
    except in a quick run, a floor does not hold."""
    console = Console(stderr=True, highlight=False)
    names = chosen(config.only)
    peers = Path(config.peers).resolve() if config.peers else None
    if peers:
        vllm.check_installed(peers)
    model = Path(config.model or checkpoint.make(results.ROOT / ".cache" / "llama-82m")).resolve()
    save = _output(config, whole=len(names) == len(GOALS))
    of = {"quick": config.quick, "model": model.name, "peers": vllm.version(peers) if peers else None}
    before = resumed(save, of) if config.resume and save else None
    if save and find_spec("matplotlib") is None:
        console.print("there will be no pictures: matplotlib is not installed (make bench installs it)")

    def keep(found: Found) -> None:
        if save:
            results.save(save, of | found.as_json())
            save.with_suffix(".md").write_text("\n".join(found.lines()) + "\n", encoding="utf-8")
            for name in list(setting.pictures) if find_spec("matplotlib") else ():
                setting.pictures.pop(name)(save.with_name(f"{save.stem}-{name}.png"))

    cores = tuple(sorted(os.sched_getaffinity(0)))[:CORES]
    neighbours.note(console, cores)
    with opened(Field(model, cores, peers, QUICK if config.quick else FULL, console)) as setting:
        found = measure(setting, names, console, keep, before)
    print("\n".join(found.lines()))
    below = any(row.held is False for row in found.rows)
    return 1 if found.failed or found.broken or (below and not found.quick) else 0


def _output(config: BenchGoalsConfig, *, whole: bool) -> Path | None:
    """Return the file to save in: ``--save``, else ``LOCAL`` for a run of all goals that is not a quick one, else None.
    Raises StartError if ``--resume`` has no file to continue."""
    if config.save:
        return Path(config.save)
    if whole and not config.quick:
        LOCAL.parent.mkdir(parents=True, exist_ok=True)
        return LOCAL
    if config.resume:
        raise StartError("cannot resume a run", "no file with its figures is named", "name it with --save")
    return None
