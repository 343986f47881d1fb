"""The result of a goal: rows with targets, their table and their JSON. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bench.load.comparison import RoundRange

Of = Literal["value", "share", "ratio"]


@dataclass(frozen=True, slots=True)
class GoalTarget:
    """A bound on one part of a row. The ``floor`` (for an upper bound: a ceiling) is the bound that must not be
    missed."""

    of: Of
    bound: float
    floor: float | None = None
    at_most: bool = False

    def met(self, value: float) -> bool:
        """Return whether ``value`` is within the bound, which is inclusive."""
        return value <= self.bound if self.at_most else value >= self.bound

    def held(self, value: float) -> bool:
        """Return whether the floor holds; True without a floor."""
        if self.floor is None:
            return True
        return value <= self.floor if self.at_most else value >= self.floor

    def __str__(self) -> str:
        sign = "≤" if self.at_most else "≥"
        floor = "" if self.floor is None else f" (floor {_number(self.floor)})"
        return f"{self.of} {sign} {_number(self.bound)}{floor}"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; all figures are medians over the rounds. ``limit`` is the best that this machine can do,
    ``share`` the fraction of it that is reached; ``peer`` is the figure of the other system (``against``) and ``ratio``
    how many times as good this one is, above 1 if better. None: not measured. ``detail`` holds the figures of each
    round and the curves, for the JSON only."""

    goal: str
    what: str
    unit: str
    value: float
    targets: tuple[GoalTarget, ...]
    limit: float | None = None
    share: float | None = None
    against: str = ""
    peer: float | None = None
    ratio: RoundRange | None = None
    note: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)

    def of(self, part: Of) -> float | None:
        """Return the figure that a target is about."""
        if part == "ratio":
            return self.ratio.median if self.ratio else None
        return self.value if part == "value" else self.share

    @property
    def met(self) -> bool | None:
        """Whether all targets are met; None if none is missed and one could not be judged."""
        return _all(None if (found := self.of(each.of)) is None else each.met(found) for each in self.targets)

    @property
    def held(self) -> bool | None:
        """Whether all floors hold; None if none is broken and one could not be judged."""
        return _all(None if (found := self.of(each.of)) is None else each.held(found) for each in self.targets)


def _all(answers: Iterable[bool | None]) -> bool | None:
    found = list(answers)
    if False in found:
        return False
    return None if None in found or not found else True


def ratios(ours: Sequence[float], theirs: Sequence[float], *, less_is_better: bool = False) -> RoundRange:
    """Return how many times as good our figures are as theirs, within each round: above 1 if better. Two zeros have the
    ratio 1; a ratio to 0 alone is infinite."""
    above, below = (theirs, ours) if less_is_better else (ours, theirs)
    pairs = zip(above, below, strict=True)
    return RoundRange.of([one / other if other else (1.0 if not one else math.inf) for one, other in pairs])


def by_round(found: Mapping[Any, Sequence[float]]) -> dict[str, list[float]]:
    """Return the figures of each round by the name of the system, for a row's ``detail``."""
    return {str(system): list(figures) for system, figures in found.items()}


def against(
    name: str, ours: Sequence[float], theirs: Sequence[float], *, less_is_better: bool = False
) -> dict[str, Any]:
    """Return the fields of a row that are about a peer; none if it was not measured."""
    if not theirs:
        return {}
    ratio = ratios(ours, theirs, less_is_better=less_is_better)
    return {"against": name, "peer": statistics.median(theirs), "ratio": ratio}


# -- shown ------------------------------------------------------------------------------------------------------------

_TITLES = ("goal", "what", "value", "limit", "share", "peer", "ratio", "target", "met")


def table(rows: Iterable[Row]) -> list[str]:
    """Return the rows as a Markdown table, with the notes below it."""
    rows = list(rows)
    lines = [f"| {' | '.join(_TITLES)} |", "|---" * len(_TITLES) + "|"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    notes = [f"{', '.join(filter(None, (row.goal, row.what)))}: {row.note}." for row in rows if row.note]
    return [*lines, *([""] if notes else []), *(f"- {note}" for note in notes)]


def _cells(row: Row) -> list[str]:
    share = "" if row.share is None else f"{row.share:.1%}"
    peer = "" if row.peer is None else f"{_number(row.peer)} {row.unit} ({row.against})"
    ratio = ""
    if row.ratio is not None:
        low, high = row.ratio.low, row.ratio.high
        ratio = f"{_number(row.ratio.median)}" + (f" ({_number(low)} to {_number(high)})" if low != high else "")
    limit = "" if row.limit is None else f"{_number(row.limit)} {row.unit}"
    wanted = ", ".join(map(str, row.targets))
    return [row.goal, row.what, f"{_number(row.value)} {row.unit}", limit, share, peer, ratio, wanted, _verdict(row)]


def _verdict(row: Row) -> str:
    if not row.targets:
        return "reported"
    if row.met is None:
        return "not judged"
    if row.met:
        return "yes"
    return "no" if row.held is not False else "no, below the floor"


def _number(value: float) -> str:
    """Return ``value`` with three significant digits."""
    if not math.isfinite(value):
        return "∞"
    if value and abs(value) < 1000:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        return f"{value:.{min(digits, 4)}f}"
    return f"{value:,.0f}"


def of_json(kept: dict[str, Any]) -> Row:
    """Make a row from what :func:`as_json` returned."""
    same = {name: kept[name] for name in ("goal", "what", "unit", "value", "limit", "share", "peer")}
    ratio = kept["ratio"]
    return Row(
        **same,
        targets=tuple(GoalTarget(**each) for each in kept["targets"]),
        against=kept["against"] or "",
        ratio=None if ratio is None else RoundRange(**{name: float(figure) for name, figure in ratio.items()}),
        note=kept["note"] or "",
        detail=kept.get("detail") or {},
    )


def as_json(row: Row) -> dict[str, Any]:
    """Return a row as :func:`of_json` reads it, with ``met`` and ``floors_hold`` in addition."""
    spread = row.ratio
    return {
        "goal": row.goal,
        "what": row.what,
        "unit": row.unit,
        "value": row.value,
        "limit": row.limit,
        "share": row.share,
        "against": row.against or None,
        "peer": row.peer,
        "ratio": None if spread is None else {"median": spread.median, "low": spread.low, "high": spread.high},
        "targets": [
            {"of": each.of, "bound": each.bound, "floor": each.floor, "at_most": each.at_most} for each in row.targets
        ],
        "met": row.met,
        "floors_hold": row.held,
        "note": row.note or None,
        "detail": dict(row.detail) or None,
    }
