"""Compares systems under the same load: figures by round, a table, and in words whether to disaggregate. Pure.

Disaggregation is advised only where it is better in every round: two pools cost a second copy of the weights, and a
hand-off for every request.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bench.load.metrics import Objective, Summary
from bench.load.run import Run
from bench.load.systems import counts

WORTH = 1.05
"""A smaller gain does not justify a second pool."""
LITTLE = 0.25
"""Below this share of requests inside the objectives a system is overloaded, and a comparison with it is
meaningless."""
FEW = 0.05
"""If at most this share of requests misses an objective, that says nothing about pool sizes: with any sizes, a pause of
the machine delays a few requests in a hundred."""
OTHER = "other"
"""Name of the server at ``--url``."""


@dataclass(frozen=True, slots=True)
class RoundRange:
    """Median and range of a figure over the rounds; the range is shown only if the rounds differ."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> RoundRange:
        """Compute the median and range of one value per round; there must be at least one."""
        return cls(statistics.median(values), min(values), max(values))

    def __format__(self, how: str) -> str:
        return f"{self.median:{how}}" + (f" ({self.low:{how}} to {self.high:{how}})" if self.low < self.high else "")


@dataclass
class Outcome:
    """The results of one system, round by round."""

    system: str
    summaries: list[Summary] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def colocated(self) -> bool:
        """Whether the system has colocated workers; False for the server at ``--url``."""
        return self.system != OTHER and counts(self.system)[2] > 0

    @property
    def disaggregated(self) -> bool:
        """Whether the system has decode workers; False for the server at ``--url``."""
        return self.system != OTHER and counts(self.system)[1] > 0

    def figure(self, name: str) -> RoundRange:
        """Return the figure ``name``, a key of FIGURES, over the rounds."""
        return RoundRange.of([FIGURES[name](summary) for summary in self.summaries])

    def against(self, other: Outcome, name: str) -> RoundRange:
        """Return the ratio of a figure to that of ``other`` within each round. A figure that is 0 in both has the ratio
        1."""
        return RoundRange.of(
            [
                _ratio(FIGURES[name](mine), FIGURES[name](theirs))
                for mine, theirs in zip(self.summaries, other.summaries, strict=True)
            ]
        )

    @property
    def answered(self) -> int:
        """Number of requests that succeeded, over all rounds."""
        return sum(summary.completed for summary in self.summaries)

    @property
    def failed(self) -> int:
        """Number of requests that failed, over all rounds."""
        return sum(summary.failed for summary in self.summaries)

    def busy(self) -> dict[str, float]:
        """Return the share of time in which the workers of each pool had work, over all rounds, as far as the server
        reports it."""
        found: dict[str, list[float]] = {}
        for run in self.runs:
            for pool, share in busy_shares(run).items():
                found.setdefault(pool, []).append(share)
        return {pool: statistics.fmean(shares) for pool, shares in found.items()}


def _ratio(mine: float, theirs: float) -> float:
    return mine / theirs if theirs else (1.0 if not mine else float("inf"))


FIGURES: dict[str, Callable[[Summary], float]] = {
    "goodput": lambda summary: summary.goodput or 0.0,
    "inside": lambda summary: summary.attainment or 0.0,
    "output": lambda summary: summary.output_rate,
    "ttft_p50": lambda summary: summary.spreads["ttft"].median,
    "ttft_p99": lambda summary: summary.spreads["ttft"].percentiles[99],
    "itl_p50": lambda summary: summary.spreads["itl"].median,
    "itl_p99": lambda summary: summary.spreads["itl"].percentiles[99],
    "tpot_p50": lambda summary: summary.spreads["tpot"].median,
}
_COLUMNS = ("goodput", "inside", "output", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")


# -- what the figures say ---------------------------------------------------------------------------------------------


def merit(outcomes: Iterable[Outcome]) -> str:
    """Return the figure that decides. For requests that arrive at their own times it is the share inside the
    objectives, because the length of a run then mostly shows when its last request arrived; for requests sent all at
    once it is those inside per second."""
    paced = all(run.records[-1].due_at > run.began_at for each in outcomes for run in each.runs)
    return "inside" if paced else "goodput"


def best(outcomes: Iterable[Outcome], figure: str) -> Outcome | None:
    """Return the outcome with most of ``figure``; among equals the one with the shorter tail between tokens."""
    return max(
        outcomes,
        key=lambda each: (round(each.figure(figure).median, 3), -each.figure("itl_p99").median),
        default=None,
    )


def pays(apart: Outcome, together: Outcome, figure: str) -> bool:
    """Return whether the disaggregated system ``apart`` is so much better than the colocated one that it should be
    run: by ``figure`` in every round, and if either system meets the objectives at all."""
    if not (apart.answered and together.answered) or _most_inside(apart, together) < LITTLE:
        return False
    gain = apart.against(together, figure)
    alone = not together.figure("goodput").high and apart.figure("goodput").low > 0
    return alone or (gain.low > 1 and gain.median >= WORTH)


def _most_inside(*outcomes: Outcome) -> float:
    return max(each.figure("inside").high for each in outcomes)


def recommended(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the system that :func:`verdict` advises; None if there is nothing to compare, or if the load is too high
    for all."""
    figure = merit(outcomes)
    apart = best((each for each in outcomes if each.disaggregated), figure)
    together = best((each for each in outcomes if each.colocated), figure)
    if apart is None or together is None or _most_inside(apart, together) < LITTLE:
        return None
    return apart if pays(apart, together, figure) else together


def verdict(outcomes: Sequence[Outcome], bounds: Sequence[Objective]) -> list[str]:
    """Say whether to disaggregate and why, which pool sizes might be better, and how the server at ``--url`` compares
    with the best of these systems."""
    objectives = f"{' '.join(map(str, bounds))} (ms)"
    figure = merit(outcomes)
    return [*_advice(outcomes, bounds, figure, objectives), *_beside_other(outcomes, figure, objectives)]


def _advice(outcomes: Sequence[Outcome], bounds: Sequence[Objective], figure: str, objectives: str) -> list[str]:
    apart = best((each for each in outcomes if each.disaggregated), figure)
    together = best((each for each in outcomes if each.colocated), figure)
    if apart is None or together is None:
        return ["No advice: it takes a disaggregated and a colocated system to compare."]
    if silent := [each.system for each in (apart, together) if not each.answered]:
        return [f"No advice: {' and '.join(silent)} answered no request."]
    gain, advised = apart.against(together, figure), pays(apart, together, figure)
    tail = together.against(apart, "itl_p99")
    output = apart.against(together, "output")
    lines = []
    most = _most_inside(apart, together)
    if most < LITTLE:
        few = f"at most {most:.0%} of requests are" if most else "no request is"
        lines.append(
            f"This comparison gives no reason to disaggregate: {few} inside {objectives} with either system, so the "
            "load is too high for these cores or the objectives are too strict."
        )
    elif advised and not together.figure("goodput").high:
        lines.append(f"Disaggregate, as {apart.system}: {together.system} has no request inside {objectives}.")
    elif advised:
        lines.append(
            f"Disaggregate, as {apart.system}: {gain:.2f} times as many requests inside {objectives} as "
            f"{together.system}."
        )
    elif gain.high < 1 / WORTH:
        lines.append(
            f"Do not disaggregate: {apart.system} has only {gain:.2f} times as many requests inside "
            f"{objectives} as {together.system}."
        )
    else:
        few = f"less than the {WORTH:g} times that" if gain.median < WORTH else "but not more in every round, which"
        lines.append(
            f"Do not disaggregate: {apart.system} has {gain:.2f} times as many requests inside {objectives} "
            f"as {together.system}, {few} a second pool should bring."
        )
    shown = f"output with {apart.system} is {output:.2f} times as much."
    if min(each.figure("itl_p99").low for each in (apart, together)):  # else no answer had a second token
        shown = f"P99 time between tokens is {tail:.2f} times as long with {together.system}; {shown}"
    lines.append(shown[0].upper() + shown[1:])
    if apart.failed or together.failed:
        failures = (f"{each.failed} of {each.failed + each.answered} with {each.system}" for each in (apart, together))
        lines.append(
            f"Requests failed, {', '.join(failures)}: they count as outside, and times are those of the others."
        )
    return [*lines, *_sizes(apart, bounds, advised)]


def _beside_other(outcomes: Sequence[Outcome], figure: str, objectives: str) -> list[str]:
    other = next((each for each in outcomes if each.system == OTHER), None)
    ours = best((each for each in outcomes if each.system != OTHER and each.answered), figure)
    if other is None or ours is None:
        return []
    if not other.answered:
        return ["The server at --url answered no request."]
    if not (other.figure(figure).high or ours.figure(figure).high):
        return [f"Neither {ours.system} nor the server at --url has any request inside {objectives}."]
    gain = ours.against(other, figure)
    shown = f"{ours.system} has {gain:.2f} times as many requests inside {objectives} as the server at --url"
    if min(each.figure("itl_p99").low for each in (ours, other)):
        shown += f", whose P99 time between tokens is {other.against(ours, 'itl_p99'):.2f} times as long"
    return [f"{shown}."]


def _sizes(apart: Outcome, bounds: Sequence[Objective], advised: bool) -> list[str]:
    """Say what the missed objectives show about the sizes of the pools: the first token waits for prefill, the others
    for decode. Larger pools are suggested only where disaggregation is advised at all, and only as a possibility: they
    were not measured, and on these cores they would take cores from other workers."""
    records = [record for run in apart.runs for record in run.records if record.ok]
    missed = {"ttft": 0.0, "tpot": 0.0} | {
        each.metric: sum(not each.met(record) for record in records) / max(1, len(records)) for each in bounds
    }
    late, slow = missed["ttft"], missed["tpot"]
    busy = ", ".join(f"{pool} workers were busy {share:.0%} of the time" for pool, share in apart.busy().items())
    shown = f"With {apart.system} {late:.0%} miss the objective for TTFT, {slow:.0%} that for TPOT"
    shown += f"; {busy}" if busy else ""
    if max(late, slow) <= FEW:
        enough = "its pools are large enough for these objectives"
        return [f"{shown}: {'of those that were answered' if apart.failed else enough}."]
    if not advised:
        return [f"{shown}."]
    prefill, decode, _ = counts(apart.system)
    if late > 2 * slow:
        lacks, wanted, larger = "it lacks prefill", "for prefill", f"{prefill + 1}p{decode}d"
    elif slow > 2 * late:
        lacks, wanted, larger = "it lacks decode", "for decode", f"{prefill}p{decode + 1}d"
    else:
        lacks, wanted, larger = "both pools are too small", "for each", f"{prefill + 1}p{decode + 1}d"
    more = f"With another core {wanted}, {larger} may serve more (tandem bench plan estimates how much)."
    return [f"{shown}: {lacks}. {more}"]


def busy_shares(run: Run) -> dict[str, float]:
    """Return, by pool, the share of the run in which its workers had a request in that phase, averaged over the workers
    that had any."""
    spans: dict[str, dict[str, list[tuple[float, float]]]] = {"prefill": {}, "decode": {}}
    for record in run.records:
        stages = record.stages
        if not (record.moments and stages):
            continue
        first, last = record.moments[0], record.moments[-1]
        if stages.get("prefill"):
            began = first - float(stages.get("prefill_ms") or 0.0) / 1000
            pool = "decode" if stages.get("path") == "local" else "prefill"
            spans[pool].setdefault(str(stages["prefill"]), []).append((began, first))
        if stages.get("decode"):
            spans["decode"].setdefault(str(stages["decode"]), []).append((first, last))
    return {
        pool: statistics.fmean(_covered(each) for each in workers.values()) / run.seconds
        for pool, workers in spans.items()
        if workers
    }


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the spans."""
    total, until = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def base_of(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome that ratios refer to: the first colocated system, or else the first."""
    return next((each for each in outcomes if each.colocated), outcomes[0])


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a Markdown table of the medians over the rounds, and the ratios to the first colocated system with their
    spread."""
    base = base_of(outcomes)
    titles = "goodput (req/s) | inside | output (tok/s) | TTFT p50 | TTFT p99 | ITL p50 | ITL p99 | failed"
    lines = [f"| system (times in ms) | {titles} |", "|---|---|---|---|---|---|---|---|---|"]
    for each in outcomes:
        goodput, inside, *others = (each.figure(name).median for name in _COLUMNS)
        cells = [f"{goodput:.2f}", f"{inside:.0%}", *(f"{value:.1f}" for value in others), str(each.failed)]
        lines.append(f"| {each.system} | {' | '.join(cells)} |")
    for each in outcomes:
        if each is not base:
            ratios = ", ".join(
                f"{name} {each.against(base, name):.2f}" for name in ("goodput", "inside", "output", "itl_p99")
            )
            lines.append(f"{each.system} / {base.system}, within a round: {ratios}")
    return lines
