"""C9: the highest rate at which 90 % of requests are inside absolute objectives."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from bench.commands.goodput import FIRST_SHARE, NEAR, Point, highest, next_rate
from bench.goals.field import COLOCATED, INPUT, OURS, OUTPUT, VLLM, VLLM_1P1D, Field, Rates, System, best, good
from bench.goals.figures import GoalTarget, Row, against, by_round
from bench.load import plots
from bench.load.arrivals import arrivals
from bench.load.metrics import Objective, summarise

OBJECTIVES = (Objective("ttft", 1000.0), Objective("tpot", 40.0))
ATTAINMENT = 0.9
BUDGETS = (256, 512, 2048)
"""Tokens per step that are tried for colocated systems: fewer give shorter pauses, more give faster prefill."""
ROUGHLY = 1.3
"""Two rates with a smaller ratio are close enough to choose the best budget."""
PACED_S = 200.0
"""About how long a rate is tried; low rates get fewer requests, but at least half of the usual number."""


def search(
    attempts: Mapping[System, Callable[[float], float | None]],
    firsts: Mapping[System, float],
    wanted: float = ATTAINMENT,
    near: float = NEAR,
    doubted: Collection[System] = (),
    rivals: bool = False,
    known: Mapping[System, Sequence[Point]] | None = None,
) -> dict[System, list[Point]]:
    """Search the curves of several systems as ``tandem bench goodput`` does, one rate of each in turn. ``attempts``
    return the share of requests inside the objectives at a rate, or None for a system that is gone, which then has no
    curve. Systems that are ``doubted`` are given up as soon as a lower rate does not improve their share. With
    ``rivals`` only the best is searched for: a system that failed at a rate and would next be tried below a rate that
    another sustains is given up. ``known`` points are not tried again."""
    curves = {system: list((known or {}).get(system, ())) for system in attempts}
    left = list(attempts)
    while left:
        for system in list(left):
            rate = next_rate(curves[system], wanted, firsts[system], near)
            others = [point for each, curve in curves.items() if each != system for point in curve]
            borne = max((point.rate for point in others if point.attainment >= wanted), default=0.0)
            failed = any(point.attainment < wanted for point in curves[system])
            if rate is None or (rivals and failed and rate < borne):
                left.remove(system)
            elif (share := attempts[system](rate)) is None:
                left.remove(system)
                del curves[system]
            else:
                curve = curves[system]
                curve.append(Point(rate, share))
                if system in doubted and any(each.rate > rate and each.attainment >= share for each in curve):
                    left.remove(system)
    return curves


def c9(field: Field) -> list[Row]:
    """The highest rate at which 90 % of requests are inside one absolute objective. Colocated systems first find the
    best of their budgets with half as many requests; then all are searched together. A rate rests on a few dozen
    requests, so the rates around the highest are tried again in further rounds."""
    own = [system for each in COLOCATED if (system := _best_budget(field, each.kind))]
    peer = _best_budget(field, VLLM.kind)
    curves = searched(field, [OURS, *own, *([peer] if peer else []), VLLM_1P1D])
    rounds = [curves, *(again(field, curves, seed) for seed in range(1, field.effort.rounds))]
    found: Rates = {system: [highest(each[system], ATTAINMENT).rate for each in rounds] for system in curves}
    objectives = " and ".join(f"{each.metric.upper()} {each.bound:,.0f} ms" for each in OBJECTIVES)
    effort = f"of {field.effort.paced} requests at each rate, fewer at those below {field.effort.paced / PACED_S:g}/s"
    if field.effort.paced_s:
        effort += f", more at those above {field.effort.paced / field.effort.paced_s:g}/s"
    rows = []
    for other, targets in (
        (peer or VLLM, (GoalTarget("ratio", 2, 1.3),)),
        (VLLM_1P1D, (GoalTarget("ratio", 4),)),
        (best(found, own), ()),
    ):
        bounded = [
            str(system)
            for system in (OURS, other)
            if any(highest(each[system], ATTAINMENT).at_least for each in rounds if system in each)
        ]
        rows.append(
            Row(
                "C9",
                f"rate with {ATTAINMENT:.0%} of requests inside {objectives}, {INPUT:,}/{OUTPUT}",
                "req/s",
                statistics.median(found[OURS]),
                targets,
                note=effort + (f", a lower bound: {', '.join(bounded)}" if bounded else ""),
                **against(str(other), found[OURS], found.get(other, [])),
            )
        )
    detail = {"requests_per_s": by_round(found), "rate_and_share_inside": [_lines(each) for each in rounds]}
    return [replace(rows[0], detail=detail), *rows[1:]]


def _best_budget(field: Field, kind: str) -> System | None:
    """Return the system of this kind with the budget that sustains the highest rate, or None if there is no such peer.
    The search is rough: the rate itself is measured again beside the others."""
    curves = searched(field, [System(kind, budget=budget) for budget in BUDGETS], rough=True)
    return max(curves, key=lambda system: highest(curves[system], ATTAINMENT).rate, default=None)


Curves = dict[System, list[Point]]


def _lines(curves: Curves) -> dict[str, list[tuple[float, float]]]:
    """Return, by system, the rates in order with their shares of requests inside the objectives."""
    return {str(system): sorted((point.rate, point.attainment) for point in curve) for system, curve in curves.items()}


def paced(rate: float, most: int, least: int, least_s: float = 0.0) -> int:
    """Return the number of requests at a rate: ``most``, or fewer where these would take too long, or more where they
    would arrive within ``least_s`` seconds, because a rate that is too high is sustained for a while."""
    return max(least, min(most, math.ceil(rate * PACED_S)), math.ceil(rate * least_s))


def inside(field: Field, system: System, rate: float, seed: int = 0, *, rough: bool = False) -> float | None:
    """Measure the share of requests inside the objectives at ``rate``; None if the system is gone."""
    half = max(1, field.effort.paced // 2)
    count = paced(rate, half if rough else field.effort.paced, half, field.effort.paced_s)
    asks = field.asks(count, INPUT, OUTPUT)
    times = arrivals(len(asks), rate, burstiness=1.0, seed=seed)

    def share(system: System) -> float:
        run = field.run(system, asks, times, what=f"{rate:.2f} requests/s")
        good(run)  # raises: a system that answers nothing has no rate, not a rate of 0
        found = summarise(run, objectives=OBJECTIVES).attainment or 0.0
        field.console.print(f"{system}: {found:.0%} inside at {rate:.3g} requests/s", markup=False)
        return found

    return field.tried(system, share)


def around(curve: Sequence[Point], wanted: float = ATTAINMENT) -> list[float]:
    """Return the two rates between which the curve falls below ``wanted``, or the last rate; none if there was no
    search."""
    rates = sorted(point.rate for point in curve)
    bad = min((point.rate for point in curve if point.attainment < wanted), default=math.inf)
    return [] if len(rates) < 2 else [*[rate for rate in rates if rate < bad][-1:], *([bad] if bad in rates else [])]


def again(field: Field, curves: Curves, seed: int) -> Curves:
    """Return the curves with the points around the highest rate measured again, with other arrivals. If that moves the
    highest rate, it is searched for again: interpolation between distant rates would be a guess."""
    fresh = {system: {point.rate: point for point in curve} for system, curve in curves.items()}
    for number in range(2):  # one rate of each in turn
        for system, curve in curves.items():
            for rate in around(curve)[number : number + 1]:
                if (share := inside(field, system, rate, seed)) is not None:
                    fresh[system][rate] = Point(rate, share)
    points = {system: list(each.values()) for system, each in fresh.items()}
    firsts = {system: min(fresh[system]) for system, curve in curves.items() if highest(curve, ATTAINMENT).rate}
    return points | search({each: partial(inside, field, each, seed=seed) for each in firsts}, firsts, known=points)


def searched(field: Field, systems: Sequence[System], *, rough: bool = False) -> Curves:
    """Search the curves of the systems that can be measured here together (``rough``: only to find the best). A system
    that keeps the objectives for less than half of the wanted share with one request at a time gets no other point, and
    one that keeps them for less than the wanted share is doubted: ever lower rates take hours."""

    def unloaded(system: System) -> Point:
        asks = field.asks(field.effort.singles, INPUT, OUTPUT)
        run = field.run(system, asks, concurrency=1, what="one at a time")
        rate = 1 / statistics.fmean(record.latency for record in good(run))
        return Point(rate, summarise(run, objectives=OBJECTIVES).attainment or 0.0)

    points = {system: field.tried(system, unloaded) for system in field.open(*systems)}
    alone = {system: point for system, point in points.items() if point is not None}
    firsts = {system: FIRST_SHARE * point.rate for system, point in alone.items() if 2 * point.attainment >= ATTAINMENT}
    curves = {system: [point] for system, point in alone.items() if system not in firsts}
    doubted = [system for system in firsts if alone[system].attainment < ATTAINMENT]
    attempts = {system: partial(inside, field, system, rough=rough) for system in firsts}
    curves |= search(attempts, firsts, near=ROUGHLY if rough else NEAR, doubted=doubted, rivals=rough)
    shown = ", ".join(f"{each} ms" for each in OBJECTIVES)
    field.pictures["attainment"] = partial(plots.draw_attainment, _lines(curves), wanted=ATTAINMENT, objectives=shown)
    return curves
