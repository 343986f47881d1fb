"""C8 to C12: what clients of whole systems see: interference, goodput, saturation, and how long a start takes."""

from __future__ import annotations

import math
import os
import statistics
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.commands.compare import busy_shares
from bench.commands.goodput import FIRST_SHARE, NEAR, Point, highest, next_rate
from bench.goals.calibration import CHUNK, in_child
from bench.goals.field import COLOCATED, OURS, PLACES, VLLM, VLLM_1P1D, Field, System, good, whole
from bench.goals.figures import Row, Target, against, by_round
from bench.load import plots, results
from bench.load.arrivals import arrivals
from bench.load.client import Record
from bench.load.metrics import Objective, summarise
from bench.load.run import Run
from bench.load.systems import running
from bench.simulate.cost import CostModel, measure
from common.core.errors import StartError
from common.net.http_client import HttpClient

STREAMS, STREAM_INPUT = 8, 64
INTRUDER, INTRUDER_EVERY_S = 2048, 2.0
STRETCH = 32
"""Tokens of a stream within which its context counts as of one length."""

OBJECTIVES = (Objective("ttft", 1000.0), Objective("tpot", 40.0))
ATTAINMENT = 0.9
BUDGETS = (256, 512, 2048)
"""Tokens of a step that colocated systems are tried with: less is shorter pauses, more is faster prefill."""
ROUGHLY = 1.3
"""Two rates of this ratio tell which budget is the best."""
PACED_S = 200.0
"""About how long a rate is tried: a low one with fewer requests, at least half of the usual number."""
INPUT, OUTPUT = 1024, 32
BALANCED_INPUT = 512


# -- C8: interference -------------------------------------------------------------------------------------------------


def gaps_together(records: Sequence[Record]) -> list[tuple[int, float]]:
    """Seconds between tokens of streams while all of them stream: after the last has begun, before the first ends;
    each with the number of the token that ends it. StartError if they never do."""
    began = max(record.moments[0] for record in records)
    ended = min(record.moments[-1] for record in records)
    found = [
        (number, after - before)
        for record in records
        for number, (before, after) in enumerate(pairwise(record.moments), 1)
        if before >= began and after <= ended
    ]
    if not found:
        raise StartError("the streams did not run together", "some ended before others began", "make them longer")
    return found


def in_usual(gaps: Sequence[tuple[int, float]], undisturbed: Sequence[tuple[int, float]]) -> list[float]:
    """Each gap in medians of undisturbed ones about as far into a stream: a step takes longer as contexts grow, with
    or without anybody else's prompts. (In means, if most tokens come together with the one before.)"""
    stretches: dict[int, list[float]] = defaultdict(list)
    for number, seconds in undisturbed:
        stretches[number // STRETCH].append(seconds)
    usual = {each: statistics.median(found) or statistics.fmean(found) for each, found in stretches.items()}
    nearest = {each // STRETCH: min(usual, key=lambda known: abs(known - each // STRETCH)) for each, _ in gaps}
    return [seconds / usual[nearest[number // STRETCH]] for number, seconds in gaps]


class Disturbed(NamedTuple):
    """Streams while long prompts arrive: P99 time between tokens, in medians of the same streams when none does; the
    same in one median of all that they did undisturbed, however long their contexts; and of the undisturbed streams
    themselves, which is the machine's; the longest time; the median time to the prompts' first token, infinite if none
    was answered (seconds); and the run."""

    p99: float
    p99_in_one_median: float
    undisturbed_p99: float
    longest_s: float
    first_token_s: float
    run: Run


def interference(field: Field, system: System) -> Disturbed:
    """What long prompts do to the streams of ``system``, which are undisturbed before and after: a machine that others
    use, too, may be a tenth slower ten seconds later."""

    def streams(tokens: int, what: str, intruders: int = 0) -> tuple[Run, list[tuple[int, float]]]:
        asks = [*field.asks(STREAMS, STREAM_INPUT, tokens), *field.asks(intruders, INTRUDER, 2)]
        times = [0.0] * STREAMS + [INTRUDER_EVERY_S * (1 + index) for index in range(intruders)]
        run = field.run(system, asks, times, what=what)
        if not system.is_peer:  # a peer that refuses prompts is less disturbed: that is to its advantage
            whole(run)
        return run, gaps_together(good(Run(run.records[:STREAMS], run.seconds, run.began_at)))

    _, first = streams(field.effort.streamed_tokens, "finding their pace")
    tokens = math.ceil(field.effort.seconds / statistics.median(seconds for _, seconds in first))
    run, alone = streams(tokens, "undisturbed")
    intruders = max(1, math.floor(run.seconds / INTRUDER_EVERY_S))
    run, disturbed = streams(tokens, "with long prompts between", intruders)
    _, after = streams(tokens, "undisturbed again")
    waited = [record.ttft if record.ok else math.inf for record in run.records[STREAMS:]]
    usual = [*alone, *after]
    p99, own = (float(np.percentile(in_usual(gaps, usual), 99)) for gaps in (disturbed, usual))
    one = [seconds for _, seconds in usual]
    plain = float(np.percentile([seconds for _, seconds in disturbed], 99)) / (
        statistics.median(one) or statistics.fmean(one)
    )
    return Disturbed(p99, plain, own, max(seconds for _, seconds in disturbed), statistics.median(waited), run)


def c8(field: Field) -> list[Row]:
    """Decode does not notice that others' prompts are computed. The note has the longest pauses (of one who makes all
    streams wait for a whole prompt P99 knows nothing, once there are more than a hundred tokens to a prompt) and when
    the prompts had their first token: who lets them wait disturbs nobody. Each system is measured in turn with ours,
    which so has the most rounds: its P99 differs by half between rounds where machines are shared."""
    others = field.open(OURS, COLOCATED[0], VLLM, VLLM_1P1D)[1:]
    pairs = {each: field.alternate([OURS, each], partial(interference, field)) for each in others}
    found: dict[System, list[Disturbed]] = {OURS: [one for pair in pairs.values() for one in pair[OURS]]}
    found |= {each: pair[each] for each, pair in pairs.items() if each in pair}

    def told(of: Callable[[Disturbed], float], shown: str) -> str:
        return ", ".join(f"{shown.format(statistics.median(map(of, those)))} ({it})" for it, those in found.items())

    def versus(other: System) -> dict[str, Any]:
        ours, theirs = ([one.p99 for one in pairs[other].get(each, ())] for each in (OURS, other))
        return against(str(other), ours, theirs, less_is_better=True)

    last = {system: those[-1].run for system, those in found.items()}
    field.pictures["streams"] = partial(plots.draw_distributions, {str(system): run for system, run in last.items()})
    field.pictures["timeline"] = partial(plots.draw_timelines, {str(OURS): last[OURS]})
    what = f"P99 gap between tokens of {STREAMS} streams in undisturbed medians, a {INTRUDER:,}-token prompt every"
    ours = [one.p99 for one in found[OURS]]
    row = Row("C8", f"{what} {INTRUDER_EVERY_S:g} s", "", statistics.median(ours), ())
    first = replace(
        row,
        targets=(Target("value", 1.2, 1.5, at_most=True), Target("ratio", 10)),
        note=f"in {len(ours)} rounds {min(ours):.2f} to {max(ours):.2f}; undisturbed "
        f"{told(lambda one: one.undisturbed_p99, '{:.2f}')}; in one median of all that is undisturbed "
        f"{told(lambda one: one.p99_in_one_median, '{:.2f}')}; longest pause, medians of rounds, "
        f"{told(lambda one: 1000 * one.longest_s, '{:.0f} ms')}; time to the prompts' first token, medians, "
        f"{told(lambda one: 1000 * one.first_token_s, '{:.0f} ms')}",
        detail={
            name: by_round({system: [getattr(one, name) for one in those] for system, those in found.items()})
            for name in ("p99", "p99_in_one_median", "undisturbed_p99", "longest_s", "first_token_s")
        },
        **(versus(VLLM) if VLLM in pairs else {}),
    )
    return [first, *(replace(row, **versus(each)) for each in found if each not in (OURS, VLLM))]


# -- C9: goodput ------------------------------------------------------------------------------------------------------


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
Rates = dict[System, list[float]]
"""Requests per second, by round."""


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


# -- C10, C11: saturation ---------------------------------------------------------------------------------------------


def answer_s(cost: CostModel, prompt: int, tokens: int, streams: int) -> float:
    """Seconds of one core for an answer, whose steps all of ``streams`` share."""
    return tokens * cost.decode_s(streams, prompt + tokens / 2) / streams


def balanced_output(cost: CostModel, prompt: int, streams: int) -> int:
    """Output tokens with which one prefill and one decode worker take equally long per request: T_P = T_D."""
    wanted = cost.prompt_s(prompt, CHUNK)
    return next((tokens for tokens in range(1, 4096) if answer_s(cost, prompt, tokens, streams) >= wanted), 4096)


def most_per_s(cost: CostModel, cores: int, prompt: int, tokens: int, streams: int) -> float:
    """Requests that so many cores would serve if they were always busy with steps that cost what they cost one core
    alone, those of decode with ``streams``."""
    return cores / (cost.prompt_s(prompt, CHUNK) + answer_s(cost, prompt, tokens, streams))


def saturation(
    field: Field, cost: CostModel, systems: Sequence[System], count: int, input_tokens: int, output_tokens: int
) -> tuple[Rates, dict[str, Any]]:
    """What each does when ``count`` are sent at once, from then to the last token of all; and what the first row has
    besides. Its limit is :func:`most_per_s` with all places taken. Before, each has as many of them as it has places:
    memory is found when it is first used, and a server that lives has used it."""
    busy: dict[str, list[float]] = defaultdict(list)

    def fill(system: System) -> list[Record]:
        return good(field.run(system, field.asks(min(count, PLACES), input_tokens, output_tokens), what="warming up"))

    def once(system: System) -> tuple[float, float]:
        run = field.run(system, field.asks(count, input_tokens, output_tokens), what="all at once")
        records = good(run)
        seconds = max(record.moments[-1] for record in records) - min(record.sent_at for record in records)
        if system == OURS:
            for pool, share in busy_shares(run).items():
                busy[pool].append(share)
        return len(records) / seconds, statistics.median(record.tpot for record in records)

    found = field.alternate([*field.alternate(systems, fill, rounds=1)], once)
    each = (f"{1000 * statistics.median(tpot for _, tpot in rounds):.0f} ms ({it})" for it, rounds in found.items())
    rates = {system: [rate for rate, _ in rounds] for system, rounds in found.items()}
    limit = most_per_s(cost, len(field.cores), input_tokens, output_tokens, min(count, PLACES))
    return rates, {
        "limit": limit,
        "share": statistics.median(rates[OURS]) / limit,
        "note": f"meanwhile a token after the first takes, median of requests, {', '.join(each)}"
        + "".join(f"; {pool} has work {statistics.median(shares):.0%} of the time" for pool, shares in busy.items()),
        "detail": {"requests_per_s": by_round(rates), "busy": busy},
    }


def c10(field: Field) -> list[Row]:
    """On a load that keeps both pools equally busy, two pools serve as much as one, their beginning, when decode waits
    for prompts, and their end, when none is left for prefill, included: there are enough requests for a while between.
    vLLM 1P1D, which is slow and has no goal here, is measured in C11."""

    cost = _cost(field)
    output = balanced_output(cost, BALANCED_INPUT, PLACES // 4)
    systems = field.open(OURS, *COLOCATED, VLLM)
    in_time = field.effort.balanced_s * most_per_s(cost, len(field.cores), BALANCED_INPUT, output, PLACES)
    count = max(field.effort.balanced, round(in_time))
    found, first = saturation(field, cost, systems, count, BALANCED_INPUT, output)
    what = f"throughput with all requests sent at once, {BALANCED_INPUT}/{output} (balanced)"
    return [
        _saturated("C10", what, found, best(found, COLOCATED), Target("ratio", 1.0, 0.95), **first),
        _saturated("C10", what, found, VLLM, Target("ratio", 1.2, 1.0)),
    ]


def c11(field: Field) -> list[Row]:
    """Where prefill is most of the work, one core that only decodes is little used."""
    cost = _cost(field)  # before there are any servers
    systems = field.open(OURS, *COLOCATED, VLLM, VLLM_1P1D)
    found, first = saturation(field, cost, systems, field.effort.requests, INPUT, OUTPUT)
    what = f"throughput with all requests sent at once, {INPUT:,}/{OUTPUT}"
    return [
        _saturated("C11", what, found, VLLM, Target("ratio", 1.0), **first),
        _saturated("C11", what, found, best(found, COLOCATED)),
        *([_saturated("C11", what, found, VLLM_1P1D)] if VLLM_1P1D in found else []),
    ]


def best(found: Mapping[System, Sequence[float]], among: Sequence[System]) -> System:
    """The system with the highest median."""
    return max(among, key=lambda system: statistics.median(found[system]))


def _saturated(goal: str, what: str, found: Rates, peer: System, *targets: Target, **more: Any) -> Row:
    fields = against(str(peer), found[OURS], found.get(peer, []))
    return Row(goal, what, "req/s", statistics.median(found[OURS]), targets, **more, **fields)


def _cost(field: Field) -> CostModel:
    """Measured once for all goals, with no server running beside it."""

    def make() -> CostModel:
        field.open()
        return in_child(_measured_cost, str(field.model), field.cores[0])

    found: CostModel = field.remember("cost", make)
    return found


def _measured_cost(model: str, core: int) -> CostModel:
    os.sched_setaffinity(0, (core,))
    return measure(model, 1, lambda _: None)


# -- C12: start -------------------------------------------------------------------------------------------------------


def c12(field: Field) -> list[Row]:
    """From the command to the first token with the built-in model; cold is with nothing of it in the page cache."""
    field.open()
    warm, cold = [], []
    for _ in range(field.effort.rounds):
        forget_files()
        cold.append(first_token_s())
        warm.append(first_token_s())
    return [
        Row("C12", f"start to first token, {how}", "s", statistics.median(seconds),
            (Target("value", most, at_most=True),), detail={"seconds": seconds})
        for how, seconds, most in (("cold", cold, 15), ("warm", warm, 8))
    ]  # fmt: skip


def first_token_s() -> float:
    """Seconds from the start of a system with the built-in model to its first token."""
    began = time.perf_counter()
    with running("", "1p1d") as url:
        server = HttpClient(url)
        server.post("/v1/completions", {"model": server.served(None)["id"], "prompt": "one", "max_tokens": 1})
        return time.perf_counter() - began


def forget_files() -> int:
    """Drops this environment's and this program's files from the page cache, as far as nobody has them mapped; how
    many."""
    count = 0
    for folder in (sys.prefix, sysconfig.get_path("stdlib"), results.ROOT):
        for path in Path(folder).rglob("*"):
            if path.is_file() and not path.is_symlink():
                try:
                    descriptor = os.open(path, os.O_RDONLY)
                except OSError:
                    continue
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    count += 1
                finally:
                    os.close(descriptor)
    return count
