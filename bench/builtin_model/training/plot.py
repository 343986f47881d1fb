"""Plots the loss curve of a training run, if matplotlib is installed (extra ``bench``)."""

from __future__ import annotations

import json
from pathlib import Path

SMOOTH = 0.98


def loss_curve(room: Path, directory: Path) -> Path | None:
    """Draw ``directory/loss.png`` from ``room/history.jsonl``: the loss above, intermediate evaluations below."""
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        print("no plot: matplotlib is not installed (pip install -e '.[bench]')")
        return None
    rows = [json.loads(line) for line in (room / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(7, 6), dpi=80, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = [row["step"] for row in rows]
    above.semilogy(steps, [row["loss"] for row in rows], color="#c8d4e8", linewidth=0.5)
    above.semilogy(steps, _smooth([row["loss"] for row in rows]), color="#24508c")
    above.set_ylabel("loss on the assistant's tokens")
    looks = [row for row in rows if len(row) > 2]
    for name in [key for key in (looks[-1] if looks else {}) if key not in ("step", "loss")]:
        below.plot([row["step"] for row in looks], [row.get(name) for row in looks], marker=".", label=name)
    below.set_ylabel("held-out items right")
    below.set_xlabel("step")
    if looks:
        below.legend(fontsize=7, ncols=2)
    target = directory / "loss.png"
    figure.savefig(target)
    return target


def _smooth(values: list[float]) -> list[float]:
    smooth, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = SMOOTH * mean + (1 - SMOOTH) * value, SMOOTH * weight + (1 - SMOOTH)
        smooth.append(mean / weight)
    return smooth
