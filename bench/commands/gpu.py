"""``tandem bench gpu [--dry] [--only kernels,decode] [--resume]``: run the stages of :mod:`bench.gpu` on one GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.goals.figures import Row, table
from bench.gpu.stages import STAGES, Setting, StageOutcome
from bench.gpu.stages import run as run_stage
from bench.load import results
from common.config.bench.gpu import BenchGpuConfig
from common.core.errors import StartError, reason

LOCAL = results.ROOT / "bench" / "results" / "local" / "gpu.json"
"""Git ignores this folder. A run to be published is saved in the folder of its machine."""


def chosen(text: str | None) -> list[str]:
    """Return the stages that ``--only`` names, in order, and the one that measures the card. Raises StartError for an
    unknown one."""
    names = list(STAGES) if text is None else [name.strip() for name in text.split(",") if name.strip()]
    if strange := [name for name in names if name not in STAGES]:
        raise StartError(f"there is no stage {strange[0]}", f"stages are {', '.join(STAGES)}", "correct --only")
    return [name for name in STAGES if name in {"ceilings", *names}]


def card(dry: bool) -> tuple[str, str]:
    """Return torch's name of the device to measure, and the card's. Raises StartError without a GPU."""
    import torch  # only now: other mistakes are found at once

    if dry:
        return "cpu", "CPU, dry run"
    if not torch.cuda.is_available():
        raise StartError("no GPU to measure", "torch finds no CUDA device", "use --dry to try the stages on a CPU")
    return "cuda:0", torch.cuda.get_device_name(0)


def run(config: BenchGpuConfig) -> int:
    """Run the stages and print their table. Exit code 1 if a stage failed or, except in a dry run, a floor does not
    hold."""
    console = Console(stderr=True, highlight=False)
    names = chosen(config.only)
    device, name = card(config.dry)
    save = Path(config.save) if config.save else LOCAL
    save.parent.mkdir(parents=True, exist_ok=True)
    of = {"card": name, "dry": config.dry}
    found = resumed(save, of) if config.resume and save.exists() else {}
    setting = Setting(device, config.dry, Path(config.checkpoints).absolute())
    for stage in (STAGES[each] for each in names):
        if stage.name in found and not found[stage.name].failure:
            continue
        console.print(f"{stage.name}: {stage.what}", markup=False)
        found[stage.name] = outcome = run_stage(replace(setting, ceilings=_ceilings(found)), stage)
        console.print(f"{stage.name}: {outcome.failure or 'done'}, {outcome.seconds:.0f} s", markup=False)
        results.save(save, of | {"stages": {each: it.as_json() for each, it in found.items()}})
        save.with_suffix(".md").write_text("\n".join(lines(found, of)) + "\n", encoding="utf-8")
    print("\n".join(lines(found, of)))
    broken = any(outcome.failure for outcome in found.values())
    return int(broken or (not config.dry and any(row.held is False for row in _rows(found))))


def resumed(save: Path, of: dict[str, Any]) -> dict[str, StageOutcome]:
    """Return the stages that the saved run has. Raises StartError if it is of another card or cannot be read."""
    try:
        kept = json.loads(save.read_text(encoding="utf-8"))
        stages = {name: StageOutcome.of_json(each) for name, each in kept["stages"].items()}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StartError(f"cannot resume {save}", reason(error), "leave --resume out") from error
    if other := [f"{key} {kept.get(key)!r}, not {value!r}" for key, value in of.items() if kept.get(key) != value]:
        raise StartError(f"cannot resume {save}", f"its run had {' and '.join(other)}", "leave --resume out")
    return stages


def lines(found: dict[str, StageOutcome], of: dict[str, Any]) -> list[str]:
    """Return the table of all stages, what failed, and the provenance."""
    failed = [f"- {name} failed: {outcome.failure}" for name, outcome in found.items() if outcome.failure]
    left = [name for name in STAGES if name not in found]
    notes = [*failed, *([f"- not run: {', '.join(left)}"] if left else [])]
    if of["dry"]:
        notes.append("- a dry run on a CPU with tiny shapes: its figures mean nothing")
    return [f"{of['card']}", "", *table(_rows(found)), "", *notes, "", results.provenance_line()]


def _rows(found: dict[str, StageOutcome]) -> list[Row]:
    return [row for name in STAGES if name in found for row in found[name].rows]


def _ceilings(found: dict[str, StageOutcome]) -> dict[str, float]:
    rows = found["ceilings"].rows if "ceilings" in found else []
    return dict(rows[0].detail) if rows else {}
