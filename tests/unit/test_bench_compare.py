"""Comparing systems: ratios within a round, the advice, and what busy pools say about their sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.client import Record
from bench.compare import Outcome, best, busy_shares, table, verdict
from bench.load import Run
from bench.metrics import Objective, summarise
from bench.systems import pools
from common.errors import StartError
from deploy import cli

OBJECTIVES = (Objective("ttft", 1000.0), Objective("tpot", 40.0))


def outcome(system: str, *rounds: tuple[int, float], prefill: float = 0.0, decode: float = 0.0) -> Outcome:
    """A round is (how many of 100 requests are inside, ms between tokens); a run takes 10 s."""
    found = Outcome(system)
    for inside, gap_ms in rounds:
        records = []
        for index in range(100):
            sent = index / 10
            first = sent + (0.5 if index < inside else 2.0)
            moments = [first, first + gap_ms / 1000]
            records.append(Record(sent, 10, sent, moments, output_tokens=2))
        if prefill or decode:
            for index, record in enumerate(records):
                record.stages = {"prefill": "p", "decode": "d", "prefill_ms": prefill * 100}
                first = index / 10 + 0.1
                record.moments = [first, first + decode / 10]
        found.runs.append(Run(records, 10.0, 0.0))
        found.summaries.append(summarise(found.runs[-1], objectives=OBJECTIVES))
    return found


def test_a_gain_in_every_round_is_advised() -> None:
    lines = verdict([outcome("1p1d", (90, 10), (95, 10)), outcome("1c", (50, 35), (60, 25))], OBJECTIVES)
    assert lines[0].startswith("Disaggregate, as 1p1d: 1.69 (1.58 to 1.80) times as many")
    assert "3.00 (2.50 to 3.50) times as long with 1c" in lines[1]


def test_what_is_as_good_together_stays_together() -> None:
    """Short prompts, light load: all are inside either way."""
    lines = verdict([outcome("1p1d", (100, 10), (100, 10)), outcome("1c", (100, 12), (100, 12))], OBJECTIVES)
    assert lines[0].startswith("Do not disaggregate: 1p1d has 1.00 times")


@pytest.mark.parametrize(
    ("apart", "said"),
    [
        (((40, 10), (45, 10)), "has only 0.85"),
        (((90, 10), (40, 10)), "no gain that shows in every round"),
        (((51, 10), (51, 10)), "no gain that shows in every round"),
        (((0, 10), (0, 10)), "has only 0.00"),
    ],
)
def test_less_or_doubtful_gain_is_not_advised(apart: tuple[tuple[int, float], ...], said: str) -> None:
    lines = verdict([outcome("1p1d", *apart), outcome("2c", (50, 10), (50, 10))], OBJECTIVES)
    assert lines[0].startswith("Do not disaggregate") and said in lines[0]


def test_a_run_that_only_took_longer_is_no_worse() -> None:
    """Of requests that come at their own times; sent all at once, the time that they take is what counts."""
    apart, together = outcome("1p1d", (100, 10)), outcome("1c", (100, 10))
    together.runs[0] = replace(together.runs[0], seconds=12.0)
    together.summaries[0] = summarise(together.runs[0], objectives=OBJECTIVES)
    assert verdict([apart, together], OBJECTIVES)[0].startswith("Do not disaggregate")
    for record in (*apart.runs[0].records, *together.runs[0].records):
        record.due_at = 0.0
    assert verdict([apart, together], OBJECTIVES)[0].startswith("Disaggregate, as 1p1d: 1.20")


def test_a_system_that_never_meets_the_objectives_counts_nothing() -> None:
    lines = verdict([outcome("1p1d", (40, 10)), outcome("1c", (50, 90))], OBJECTIVES)
    assert lines[0] == "Disaggregate, as 1p1d: 1c has no request inside ttft:1000 tpot:40 (ms)."


def test_systems_that_are_both_overloaded_tell_nothing() -> None:
    """Also where one of them has some requests inside, those that came before it was late for all others."""
    lines = verdict([outcome("1p1d", (0, 10)), outcome("1c", (0, 10))], OBJECTIVES)
    assert lines[0].startswith("Do not disaggregate on the strength of this: no request is inside ttft:1000")
    lines = verdict([outcome("1p1d", (10, 10), (12, 10)), outcome("1c", (0, 10), (2, 10))], OBJECTIVES)
    assert lines[0].startswith("Do not disaggregate on the strength of this: at most 12% of requests are inside")


def failing(outcome: Outcome, count: int) -> Outcome:
    """The same, but the last ``count`` requests of each round failed."""
    for index, run in enumerate(outcome.runs):
        for record in run.records[len(run.records) - count :]:
            record.moments, record.error = [], "HTTP 503: full"
        outcome.summaries[index] = summarise(run, objectives=OBJECTIVES)
    return outcome


def test_a_system_that_answers_nothing_gives_no_advice() -> None:
    """It is broken, which says nothing about how it should be built."""
    for count, said in (((100, 0), "1p1d"), ((0, 100), "1c"), ((100, 100), "1p1d and 1c")):
        rounds = [failing(outcome(name, (90, 10)), each) for name, each in zip(("1p1d", "1c"), count, strict=True)]
        assert verdict(rounds, OBJECTIVES) == [f"No advice: {said} answered no request."]


def test_requests_that_failed_are_told_and_do_not_speak_for_the_pools() -> None:
    words = verdict([failing(outcome("1p1d", (100, 10)), 20), outcome("1c", (100, 10))], OBJECTIVES)
    assert "has only 0.80" in words[0]
    assert words[2].startswith("Requests failed, 20 of 100 with 1p1d, 0 of 100 with 1c: they count as outside")
    assert words[3].endswith("0% that for TPOT: of those that were answered.")


def test_answers_of_one_token_have_no_time_between_tokens() -> None:
    rounds = [outcome("1p1d", (90, 10)), outcome("1c", (90, 10))]
    for each in rounds:
        for record in each.runs[0].records:
            record.moments, record.output_tokens = record.moments[:1], 1
        each.summaries[0] = summarise(each.runs[0], objectives=OBJECTIVES)
    assert verdict(rounds, OBJECTIVES)[1] == "Output with 1p1d is 1.00 times as much."


def test_the_best_of_each_kind_are_compared() -> None:
    rounds = [outcome("1p1d", (50, 10)), outcome("2p1d", (90, 10)), outcome("1c", (40, 9)), outcome("2c", (40, 5))]
    assert best(rounds[:2], "goodput") is rounds[1] and best(rounds[2:], "inside") is rounds[3]
    assert best([], "goodput") is None
    assert "as 2p1d" in verdict(rounds, OBJECTIVES)[0] and "as 2c" in verdict(rounds, OBJECTIVES)[0]
    assert verdict(rounds[:2], OBJECTIVES)[0].startswith("No advice")
    lines = table([*rounds, outcome("other", (99, 3))])
    assert lines[2].startswith("| 1p1d | 5.00 | 50% |") and lines[-1].startswith(
        "other / 1c, within a round: goodput 2.48"
    )


def test_the_server_at_the_url_is_compared_with_the_best_system() -> None:
    other = outcome("other", (30, 35), (60, 35))
    rounds = [outcome("1p1d", (60, 10), (60, 10)), outcome("1c", (90, 10), (90, 10))]
    assert verdict([*rounds, other], OBJECTIVES)[-1] == (
        "1c has 2.25 (1.50 to 3.00) times as many requests inside ttft:1000 tpot:40 (ms) as the server at --url, whose"
        " P99 time between tokens is 3.50 times as long."
    )
    alone = verdict([rounds[0], other], OBJECTIVES)
    assert alone[0].startswith("No advice") and alone[1].startswith("1p1d has 1.50 (1.00 to 2.00) times")
    dead = failing(outcome("other", (90, 10), (90, 10)), 100)
    assert verdict([*rounds, dead], OBJECTIVES)[-1] == "The server at --url answered no request."
    late = [outcome(name, (0, 10), (0, 10)) for name in ("1p1d", "1c", "other")]
    assert verdict(late, OBJECTIVES)[-1].startswith("Neither 1p1d nor the server at --url has any request inside")


@pytest.mark.parametrize(
    ("inside", "gap_ms", "said"),
    [
        (70, 10, "it lacks prefill, 2p1d would serve more"),
        (95, 60, "it lacks decode, 1p2d would serve more"),
        (30, 60, "both pools are too small, 2p2d would"),
        (100, 10, "its pools are large enough"),
    ],
)
def test_the_objectives_that_are_missed_say_which_pool_is_too_small(inside: int, gap_ms: float, said: str) -> None:
    lines = verdict([outcome("1p1d", (inside, gap_ms)), outcome("1c", (50, 10))], OBJECTIVES)
    assert said in lines[-1]


def test_how_busy_workers_were() -> None:
    apart = outcome("1p1d", (100, 10), prefill=0.9, decode=0.3)
    assert busy_shares(apart.runs[0]) == pytest.approx({"prefill": 0.9, "decode": 0.3}, rel=0.01)
    words = verdict([apart, outcome("1c", (50, 10))], OBJECTIVES)[-1]
    assert "prefill workers had work 90% of the time, decode workers had work 30% of the time" in words


def test_time_in_which_several_requests_run_counts_once() -> None:
    run = outcome("1p1d", (90, 10), decode=5.0).runs[0]
    assert busy_shares(run)["decode"] == pytest.approx((9.9 + 0.5) / 10)


def test_names_of_systems() -> None:
    assert pools("2p3d") == ["--prefill", "2", "--decode", "3"] and pools("2c") == ["--colocated", "2"]
    for wrong in ("", "1p", "d", "1p1d1c", "c", "colocated"):
        with pytest.raises(StartError):
            pools(wrong)
    for words in (["--systems", "1p1d,x"], ["--systems", "1c,1c"], ["--systems", ","]):
        assert cli.main(["bench", "compare", *words]) == 1
