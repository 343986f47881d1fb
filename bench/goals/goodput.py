"""C9: the highest rate at which 90 % of requests are inside absolute objectives."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from bench.commands.goodput import FIRST_SHARE, NEAR, Point, highest, next_rate
from bench.goals.field import COLOCATED, INPUT, OURS, OUTPUT, VLLM, VLLM_1P1D, Field, Rates, System, best, good
from bench.goals.figures import Row, Target, against, by_round
from bench.load import plots
from bench.load.arrivals import arrivals
from bench.load.metrics import Objective, summarise

OBJECTIVES = (Objective("ttft", 1000.0), Objective("tpot", 40.0))
ATTAINMENT = 0.9
BUDGETS = (256, 512, 2048)
"""Tokens of a step that colocated systems are tried with: less is shorter pauses, more is faster prefill."""
ROUGHLY = 1.3
"""Two rates of this ratio tell which budget is the best."""
PACED_S = 200.0
"""About how long a rate is tried: a low one with fewer requests, at least half of the usual number."""


def search(
    attempts: Mapping[System, Callable[[float], float | None]],
    firsts: Mapping[System, float],
    wanted: float = ATTAINMENT,
    near: float = NEAR,
    doubted: Collection[System] = (),
    rivals: bool = False,
    known: Mapping[System, Sequence[Point]] | None = None,
) -> dict[System, list[Point]]:
    """The curves of several systems, each searched as ``tandem bench goodput`` does, one rate of each in turn.
    ``attempts`` give the share of requests inside the objectives at a rate, or None if there is no such system any
    more: then it has no curve. Those that are ``doubted`` have no rate once they do not do better at a lower one.
    Of ``rivals`` only the best is looked for: who has failed at a rate and would next be tried at less than another
    bears is not it. Points that are ``known`` are not tried."""
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
    best of their budgets, with half as many requests; then all are searched together, ours as one worker on all cores
    and as one on each. What each rate rests on is a few dozen requests, so those around the highest are tried again in
    further rounds."""
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
        (peer or VLLM, (Target("ratio", 2, 1.3),)),
        (VLLM_1P1D, (Target("ratio", 4),)),
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
    """The system of this kind with the budget that bears the highest rate; None if there is no such peer here. That is
    searched for roughly: how high it is, is measured again beside the others."""
    curves = searched(field, [System(kind, budget=budget) for budget in BUDGETS], rough=True)
    return max(curves, key=lambda system: highest(curves[system], ATTAINMENT).rate, default=None)


Curves = dict[System, list[Point]]


def _lines(curves: Curves) -> dict[str, list[tuple[float, float]]]:
    """By system: rates in order, each with the share of requests inside the objectives."""
    return {str(system): sorted((point.rate, point.attainment) for point in curve) for system, curve in curves.items()}


def paced(rate: float, most: int, least: int, least_s: float = 0.0) -> int:
    """With how many requests a rate is tried: ``most``, or fewer where these would take too long, or more where they
    would come within ``least_s`` seconds. What a system does not bear it bears for a while."""
    return max(least, min(most, math.ceil(rate * PACED_S)), math.ceil(rate * least_s))


def inside(field: Field, system: System, rate: float, seed: int = 0, *, rough: bool = False) -> float | None:
    """The share of requests inside the objectives at ``rate``; None if there is no such system any more."""
    half = max(1, field.effort.paced // 2)
    count = paced(rate, half if rough else field.effort.paced, half, field.effort.paced_s)
    asks = field.asks(count, INPUT, OUTPUT)
    times = arrivals(len(asks), rate, burstiness=1.0, seed=seed)

    def share(system: System) -> float:
        run = field.run(system, asks, times, what=f"{rate:.2f} requests/s")
        good(run)  # a system that answers nothing at all has not a rate of 0 but none
        found = summarise(run, objectives=OBJECTIVES).attainment or 0.0
        field.console.print(f"{system}: {found:.0%} inside at {rate:.3g} requests/s", markup=False)
        return found

    return field.tried(system, share)


def around(curve: Sequence[Point], wanted: float = ATTAINMENT) -> list[float]:
    """The rates between which the curve falls below ``wanted``, or the one that it ends with; none where there was no
    search."""
    rates = sorted(point.rate for point in curve)
    bad = min((point.rate for point in curve if point.attainment < wanted), default=math.inf)
    return [] if len(rates) < 2 else [*[rate for rate in rates if rate < bad][-1:], *([bad] if bad in rates else [])]


def again(field: Field, curves: Curves, seed: int) -> Curves:
    """The same curves, of which the points around the highest rate are measured anew, with other arrivals. Where that
    moves it, it is searched for as closely as the first time: of two rates that are far apart it would be a guess."""
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
    """The curve of each system that can be measured here, searched together, or ``rough`` ones that tell which is the
    best. Who keeps the objectives for less than half of the wanted share one by one has no other point, and who does so
    for less than the wanted share is doubted: ever lower rates take hours."""

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
