"""C8: what long prompts of other clients do to running streams."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from bench.goals.field import COLOCATED, OURS, VLLM, VLLM_1P1D, Field, System, good, whole
from bench.goals.figures import GoalTarget, Row, against, by_round
from bench.load import plots
from bench.load.client import Record
from bench.load.run import Run
from common.core.errors import StartError

STREAMS, STREAM_INPUT = 8, 64
INTRUDER, INTRUDER_EVERY_S = 2048, 2.0
STRETCH = 32
"""Tokens of a stream within which its context counts as constant."""


def gaps_together(records: Sequence[Record]) -> list[tuple[int, float]]:
    """Return the seconds between tokens while all streams run (after the last has begun, before the first ends), each
    with the number of the token that ends the gap. Raises StartError if they never all run."""
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
    """Divide each gap by the median undisturbed gap at about the same token number, because a step takes longer as
    contexts grow. (By the mean if most tokens arrive together with the one before.)"""
    stretches: dict[int, list[float]] = defaultdict(list)
    for number, seconds in undisturbed:
        stretches[number // STRETCH].append(seconds)
    usual = {each: statistics.median(found) or statistics.fmean(found) for each, found in stretches.items()}
    nearest = {each // STRETCH: min(usual, key=lambda known: abs(known - each // STRETCH)) for each, _ in gaps}
    return [seconds / usual[nearest[number // STRETCH]] for number, seconds in gaps]


class Disturbed(NamedTuple):
    """Streams beside long prompts.

    p99                P99 gap, in median gaps of the same streams when undisturbed
    p99_in_one_median  P99 gap, in one median of all undisturbed gaps, however long their contexts
    undisturbed_p99    P99 gap of the undisturbed streams, which is due to the machine
    longest_s          the longest gap
    first_token_s      median time to first token of the long prompts; infinite if none was answered
    run                the run with the long prompts
    """

    p99: float
    p99_in_one_median: float
    undisturbed_p99: float
    longest_s: float
    first_token_s: float
    run: Run


def interference(field: Field, system: System) -> Disturbed:
    """Measure what long prompts do to the streams of ``system``. The streams run undisturbed before and after, because
    a shared machine may be a tenth slower ten seconds later."""

    def streams(tokens: int, what: str, intruders: int = 0) -> tuple[Run, list[tuple[int, float]]]:
        asks = [*field.asks(STREAMS, STREAM_INPUT, tokens), *field.asks(intruders, INTRUDER, 2)]
        times = [0.0] * STREAMS + [INTRUDER_EVERY_S * (1 + index) for index in range(intruders)]
        run = field.run(system, asks, times, what=what)
        if not system.is_peer:  # refusing prompts only helps a peer
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
    """Streams should not be delayed by the prompts of other clients. The note has the longest gaps (a pause of all
    streams for a whole prompt does not show in P99 if there are more than a hundred tokens per prompt) and the prompts'
    time to first token (a system that delays prompts disturbs no streams). Each other system is measured in turn with
    1P1D, which therefore has the most rounds: its P99 differs by half between rounds on shared machines."""
    others = field.open(OURS, COLOCATED[0], VLLM, VLLM_1P1D)[1:]
    pairs = {each: field.alternate([OURS, each], partial(interference, field)) for each in others}
    found: dict[System, list[Disturbed]] = {OURS: [one for pair in pairs.values() for one in pair[OURS]]}
    found |= {each: pair[each] for each, pair in pairs.items() if each in pair}

    def listed(of: Callable[[Disturbed], float], shown: str) -> str:
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
        targets=(GoalTarget("value", 1.2, 1.5, at_most=True), GoalTarget("ratio", 10)),
        note=f"in {len(ours)} rounds {min(ours):.2f} to {max(ours):.2f}; undisturbed "
        f"{listed(lambda one: one.undisturbed_p99, '{:.2f}')}; in one median of all undisturbed gaps "
        f"{listed(lambda one: one.p99_in_one_median, '{:.2f}')}; longest pause, medians of rounds, "
        f"{listed(lambda one: 1000 * one.longest_s, '{:.0f} ms')}; time to the prompts' first token, medians, "
        f"{listed(lambda one: 1000 * one.first_token_s, '{:.0f} ms')}",
        detail={
            name: by_round({system: [getattr(one, name) for one in those] for system, those in found.items()})
            for name in ("p99", "p99_in_one_median", "undisturbed_p99", "longest_s", "first_token_s")
        },
        **(versus(VLLM) if VLLM in pairs else {}),
    )
    return [first, *(replace(row, **versus(each)) for each in found if each not in (OURS, VLLM))]
