"""Goals: their arithmetic on scripted results, which goals are met, the table, and one broken goal among others."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.commands import goals as command
from bench.commands.goodput import Point, highest
from bench.goals import engine, field, goodput, handoff, interference, mocks, saturation
from bench.goals.calibration import Calibration, Decoded, Prefilled
from bench.goals.coordinator import added_ms
from bench.goals.field import (
    COLOCATED,
    FULL,
    OURS,
    OURS_ONE_CORE,
    QUICK,
    VLLM,
    VLLM_1P1D,
    VLLM_ONE_CORE,
    Effort,
    Field,
    System,
)
from bench.goals.figures import GoalTarget, Row, against, as_json, of_json, ratios, table
from bench.goals.turns import Turn
from bench.load import results
from bench.load.client import Record
from bench.load.run import Run
from bench.load.workloads import PlannedRequest
from bench.peers import vllm
from bench.simulate.cost import CostModel
from common.core.errors import StartError
from common.core.ids import new_request_id, pack_tokens, unpack_tokens
from common.core.request import FinishReason, Request, SamplingParams
from common.worker.token_spans import TokenSpanEncoder
from deploy.cli import main as cli

SOME = Path("somewhere")
COST = CostModel(((0, 0.0), (64, 0.064)), 0.0, 0.000093, 0.0, 1, 12, 1, "bfloat16", 0.0)
"""A cost model in which 512 prompt tokens take as long as 48 tokens of an answer."""


def record(first: float, *gaps: float, sent: float = 0.0, error: str = "", stages: Any = None) -> Record:
    """Return a request sent at ``sent`` with its first token ``first`` s later and the others after ``gaps`` (s)."""
    moments = [sent + first]
    for gap in gaps:
        moments.append(moments[-1] + gap)
    return Record(sent, 10, sent, moments, output_tokens=len(moments), error=error, stages=stages)


class Scripted(Field):
    """Servers with scripted answers: ``answer`` returns the record for a system, an ask and a time."""

    def __init__(self, answer: Any, *, peers: Path | None = SOME, effort: Effort = QUICK) -> None:
        super().__init__(SOME, (0, 1), peers, effort, Console(quiet=True))
        self.answer = answer
        self.opened: list[tuple[System, ...]] = []
        self.order: list[System] = []

    def open(self, *wanted: System) -> list[System]:
        self.opened.append(wanted)
        return [each for each in wanted if each not in self.broken and (self.peers or not each.is_peer)]

    def asks(self, count: int, input_tokens: int, output_tokens: int) -> list[PlannedRequest]:
        return [PlannedRequest([1] * input_tokens, input_tokens, output_tokens)] * count

    def run(self, system: System, asks: Any, times: Any = None, *, concurrency: Any = None, what: str = "") -> Run:
        self.order.append(system)
        records = [self.answer(system, ask, at) for ask, at in zip(asks, times or [0.0] * len(asks), strict=True)]
        return Run(records, max(each.moments[-1] for each in records), 0.0)


# -- rows -------------------------------------------------------------------------------------------------------------


def row(*targets: GoalTarget, value: float = 2.0, **given: Any) -> Row:
    return Row("C1", "something", "ms", value, targets, **given)


@pytest.mark.parametrize(
    ("value", "met", "held"), [(0.5, True, True), (1.0, True, True), (1.2, False, True), (1.6, False, False)]
)
def test_a_target_has_a_bound_and_a_floor(value: float, met: bool, held: bool) -> None:
    found = row(GoalTarget("value", 1.0, 1.5, at_most=True), value=value)
    assert (found.met, found.held) == (met, held)
    mirrored = row(GoalTarget("share", -1.0, -1.5), share=-value)
    assert (mirrored.met, mirrored.held) == (met, held)


def test_row_is_undecided_without_peer_unless_a_bound_is_missed() -> None:
    good, bad = GoalTarget("value", 3.0, at_most=True), GoalTarget("value", 1.0, at_most=True)
    unknown = GoalTarget("ratio", 2.0)
    assert row(good).met is True and row(good, unknown).met is None and row(bad, unknown).met is False
    assert row().met is None and "reported" in table([row()])[2] and "not judged" in table([row(good, unknown)])[2]


def test_ratios_are_within_a_round_and_more_than_one_is_better() -> None:
    found = ratios([1.0, 2.0, 4.0], [2.0, 2.0, 2.0])
    assert (found.median, found.low, found.high) == (1.0, 0.5, 2.0)
    assert ratios([1.0, 2.0, 4.0], [2.0, 2.0, 2.0], less_is_better=True).high == 2.0
    assert ratios([1.0], [0.0]).median == math.inf, "a system that never meets an objective counts 0"
    assert ratios([0.0], [0.0]).median == 1.0
    assert against("peer", [1.0], []) == {}


def test_the_table_says_all_and_json_too(tmp_path: Path) -> None:
    full = row(
        GoalTarget("share", 0.85, 0.75), GoalTarget("ratio", 1.15), value=9.87, limit=10.9, share=0.905, note="noted",
        detail={"by_round": [1.0]},
        **against("vLLM", [2.0, 4.0], [1.0, 1.0]),
    )  # fmt: skip
    lines = table([full, row(GoalTarget("value", 1.0, 1.5, at_most=True), value=1600.0)])
    wanted = "share ≥ 0.850 (floor 0.750), ratio ≥ 1.15"
    assert (
        lines[2]
        == f"| C1 | something | 9.87 ms | 10.9 ms | 90.5% | 1.00 ms (vLLM) | 3.00 (2.00 to 4.00) | {wanted} | yes |"
    )
    assert lines[3].endswith("| value ≤ 1.00 (floor 1.50) | no, below the floor |") and "1,600 ms" in lines[3]
    assert lines[-1] == "- C1, something: noted."
    found = json.loads(json.dumps(as_json(full)))
    assert of_json(found) == full
    assert (
        found["met"] is True and found["ratio"] == {"median": 3.0, "low": 2.0, "high": 4.0} and found["limit"] == 10.9
    )


# -- C1, C2, C3, C7 ---------------------------------------------------------------------------------------------------


def core() -> Calibration:
    """Return a calibration: weights of 100 MB, KV of 10 kB per token, 10 GB/s, 1 TFLOP/s."""
    return Calibration(
        weight_bytes=100_000_000, kv_bytes=10_000, layer_weights=40_000_000, head_weights=10_000_000,
        last_weights=5_000_000, attention_width=10_000,
        decode=[Decoded({1: 0.0125, 16: 0.0227}, 10e9, 1e12)],
        prefill={1024: [Prefilled(0.125, 1e12)], 4096: [Prefilled(1.0, 1e12)]},
        turns=[[Turn(0.02, 0.0194), Turn(0.1, 0.0194), Turn(0.02, 0.0194)]], kernels=0.018,
    )  # fmt: skip


def test_limits_are_those_of_the_formulas() -> None:
    found = core()
    assert found.step_bytes(1) == 105_120_000 and found.step_bytes(16) == 181_920_000
    assert found.prefill_flops(1000) == 2 * 35e6 * 1000 + 2 * 10_000 * 1000**2 + 2 * (5e6 + 10e6)


def test_decode_goal_compares_with_read_limit_and_peer() -> None:
    gap = {OURS_ONE_CORE: 0.02, VLLM_ONE_CORE: 0.03}
    scripted = Scripted(lambda system, ask, at: record(0.1, *[gap[system]] * 9))
    scripted.remembered["calibration"] = core()
    (one,), (many,) = engine.c1(scripted), engine.c2(scripted)
    assert (
        one.value == pytest.approx(8.41, abs=0.01) and one.limit == 10 and one.share == pytest.approx(0.841, abs=1e-3)
    )
    assert one.ratio and one.ratio.median == pytest.approx(1.5) and one.met is False and one.held is True
    assert one.peer == pytest.approx(0.10512 / 0.03)
    assert many.share == pytest.approx(0.801, abs=1e-3) and many.met is True
    (rest,) = engine.c7(scripted)
    assert rest.value == pytest.approx(3.0) and rest.met is True and rest.note.endswith("share is 10.0%")
    assert scripted.order == [OURS_ONE_CORE, VLLM_ONE_CORE] * 2, "in turn, and measured once for both goals"


def test_decode_that_multiplies_for_longer_than_it_reads_is_compared_with_that() -> None:
    scripted = Scripted(lambda system, ask, at: record(0.1, 0.02), peers=None)
    slow = replace(core(), decode=[Decoded({1: 0.0125, 16: 0.04}, 10e9, 50e9)])
    scripted.remembered["calibration"] = slow
    (one,), (many,) = engine.c1(scripted), engine.c2(scripted)
    assert one.share == pytest.approx(0.841, abs=1e-3) and "multiplication" not in one.note
    assert many.share == pytest.approx(2 * 16 * 50e6 / 50e9 / 0.04)
    assert many.note.endswith("the limit is the core's multiplication rate, the share of its read rate is 45.5%")


def test_prefill_goal_compares_with_flop_limit() -> None:
    first = {OURS_ONE_CORE: 0.2, VLLM_ONE_CORE: 0.25}
    scripted = Scripted(lambda system, ask, at: record(first[system], 0.02))
    scripted.remembered["calibration"] = core()
    short, long = engine.c3(scripted)
    limit = core().prefill_flops(1024) / 1e12
    assert short.share == pytest.approx(limit / 0.125) and short.limit == pytest.approx(1000 * limit)
    assert short.value == 125 and short.peer == pytest.approx(250) and short.ratio and short.ratio.median == 1.25
    assert "4,096" in long.what and long.value == 1000


def test_without_peers_only_our_own_are_measured() -> None:
    scripted = Scripted(lambda system, ask, at: record(0.2, 0.02), peers=None)
    scripted.remembered["calibration"] = core()
    (one,) = engine.c1(scripted)
    assert set(scripted.order) == {OURS_ONE_CORE} and one.peer is None and one.ratio is None
    assert one.met is False, "its share is below the target, whatever the peers"


# -- C4, C5, C6 -------------------------------------------------------------------------------------------------------


def test_handoff_goal_measures_added_ttft_and_first_gap() -> None:
    """Prefill has one core, as the system it is compared with."""
    first = {handoff.ON_ITS_CORE: 0.204, OURS_ONE_CORE: 0.2, VLLM_1P1D: 0.9, VLLM_ONE_CORE: 0.3}
    scripted = Scripted(lambda system, ask, at: record(first[system], 0.03, *[0.02] * 5))
    added, gap = handoff.c4(scripted)
    assert added.value == pytest.approx(2.0) and added.met is False and added.held is True
    assert added.peer == pytest.approx(200.0)
    assert gap.value == pytest.approx(1.5) and gap.met is True


@pytest.mark.parametrize("missing", [VLLM_1P1D, VLLM_ONE_CORE])
def test_the_hand_off_is_measured_where_a_peer_is_missing(missing: System) -> None:
    class Without(Scripted):
        def open(self, *wanted: System) -> list[System]:
            return [system for system in wanted if system != missing]

    added, gap = handoff.c4(Without(lambda system, ask, at: record(0.2, *[0.02] * 5)))
    assert added.peer is None and added.met is True and gap.met is True


def hand_offs(*exposed_ms: float) -> list[dict[str, float]]:
    """Return the stages of hand-offs of 10 MB each, granted while their prompt was computed for 100 ms."""
    return [{"transfer_ms": 100 + each, "transfer_exposed_ms": each, "kv_bytes": 1e7} for each in exposed_ms]


def test_hidden_share_is_transfer_time_minus_exposed_time() -> None:
    found = handoff._hidden(1024, hand_offs(1.0, 1.5, 5.0), 1e9)
    assert found.value == pytest.approx(85.0) and found.met is True
    assert "takes 10.00 ms, 1.50 ms of the hand-off" in found.note
    late = handoff._hidden(1024, hand_offs(10.0, 12.0, 11.0), 1e9)
    assert late.value == 0.0 and late.met is False, "all of it after its prompt: nothing is hidden"
    assert handoff._hidden(1024, [], 1e9).met is False, "a server that reports no hand-off has hidden none"


def test_added_time_subtracts_bare_server_per_request() -> None:
    through, bare = ([record(base + late) for late in (0.0, 0.001, 0.004)] for base in (0.0035, 0.001))
    assert added_ms(through, bare) == pytest.approx([2.5] * 3)
    late = added_ms(through, bare[::-1])
    assert late == pytest.approx([-1.5, 2.5, 6.5]), "a slow moment of one is no slow moment of the other"


def test_a_mock_decode_worker_says_all_tokens_once_after_the_one_that_prefill_said() -> None:
    request = Request(new_request_id(), pack_tokens([7, 8]), SamplingParams(max_tokens=3, seed=0))
    stream = mocks._Stream(request, 0, 7)
    first, second = TokenSpanEncoder(), TokenSpanEncoder()
    assert not stream.step(first) and stream.step(second)
    (one,), (two,) = first.messages(), second.messages()
    assert (one.starts, unpack_tokens(one.ids), one.finish) == ((0,), [7, 7], (FinishReason.RUNNING,))
    assert (two.starts, unpack_tokens(two.ids), two.finish) == ((2,), [7], (FinishReason.LENGTH,))


# -- C8 ---------------------------------------------------------------------------------------------------------------


def test_only_gaps_while_all_stream_count() -> None:
    """Gaps while the first stream waits for the other prompts, or the last stream runs on alone, do not count."""
    records = [record(0.1, 0.5, 0.02, 0.02, 0.02), record(0.6, 0.02, 0.02, 0.02, 0.3, 0.3)]
    found = interference.gaps_together(records)
    assert [number for number, _ in found] == [2, 3, 4, 1, 2, 3]
    assert [seconds for _, seconds in found] == pytest.approx([0.02] * 6)
    with pytest.raises(StartError, match="did not run together"):
        interference.gaps_together([record(0.1, 0.02), record(0.6, 0.02)])


def test_gaps_are_in_medians_of_the_same_stretch_of_a_stream() -> None:
    """A stream that slows down as its context grows does not count as disturbed."""
    stretch = interference.STRETCH
    alone = [(number, 0.01 if number < stretch else 0.02) for number in range(2 * stretch)]
    longer = [*alone, (2 * stretch, 0.02)]
    assert interference.in_usual(longer, alone) == pytest.approx([1.0] * len(longer)), (
        "beyond what is known: the nearest"
    )
    assert interference.in_usual([(3, 0.03), (40, 0.03)], alone) == pytest.approx([3.0, 1.5])


def test_interference_is_the_tail_over_the_undisturbed_median_of_the_same_system(tmp_path: Path) -> None:
    def answer(system: System, ask: PlannedRequest, at: float) -> Record:
        if ask.prompt_tokens == interference.INTRUDER or ask.output_tokens == QUICK.streamed_tokens:
            return record(0.1, *[0.02] * (ask.output_tokens - 1), sent=at)
        long = {OURS: 0.024, VLLM: 0.4}.get(system, 0.1)
        return record(0.1, *[long if index % 20 == 7 else 0.02 for index in range(ask.output_tokens - 1)])

    scripted = Scripted(answer)
    disturbed, *others = interference.c8(scripted)
    assert disturbed.value == pytest.approx(1.2) and disturbed.peer == pytest.approx(20.0)
    assert disturbed.ratio and disturbed.ratio.median == pytest.approx(20 / 1.2) and disturbed.met is True
    tails = "1.20 (1p1d), 5.00 (1c), 20.00 (vLLM colocated), 5.00 (vLLM 1P1D); "
    reported = f"in 3 rounds 1.20 to 1.20; undisturbed {tails}in one median of all undisturbed gaps {tails}"
    assert disturbed.note.startswith(reported + "longest pause, medians of rounds, 24 ms (1p1d), 100 ms (1c)")
    assert "time to the prompts' first token, medians, 100 ms (1p1d), 100 ms (1c)" in disturbed.note
    assert [each.against for each in others] == [str(COLOCATED[0]), str(VLLM_1P1D)]
    assert all(each.met is None for each in others)
    turns = [system for number, system in enumerate(scripted.order) if system != scripted.order[number - 1]]
    assert turns == [OURS, COLOCATED[0], OURS, VLLM, OURS, VLLM_1P1D], "ours is measured beside each of them"
    assert len(disturbed.detail["p99"]["1p1d"]) == 3 and len(disturbed.detail["p99"]["1c"]) == 1
    assert drawn(scripted, tmp_path) == ["streams", "timeline"]


def test_interference_ignores_slowing_machine() -> None:
    """The runs are: warm-up, undisturbed, disturbed, undisturbed again, on a machine that slows down."""

    def answer(system: System, ask: PlannedRequest, at: float) -> Record:
        pace = (0.02, 0.02, 0.025, 0.03)[len(scripted.order) - 1]
        return record(0.1, *[pace] * (ask.output_tokens - 1), sent=at)

    scripted = Scripted(answer)
    assert interference.interference(scripted, OURS).p99 == pytest.approx(1.0)
    assert len(scripted.order) == 4


def test_interference_reports_growing_gaps_relative_to_both_medians() -> None:
    """Every token takes 1 ms longer than the one before, with and without disturbance."""
    scripted = Scripted(
        lambda system, ask, at: record(0.1, *[0.02 + 0.001 * i for i in range(ask.output_tokens - 1)], sent=at)
    )
    found = interference.interference(scripted, OURS)
    assert found.p99 == pytest.approx(found.undisturbed_p99) and found.p99_in_one_median > found.p99 > 1


@pytest.mark.parametrize("refused", [interference.INTRUDER, interference.STREAM_INPUT])
def test_interference_rejects_own_refused_requests(refused: int) -> None:
    def by(who: System) -> Any:
        def answer(system: System, ask: PlannedRequest, at: float) -> Record:
            error = "HTTP 503: full" if system == who and ask.prompt_tokens == refused else ""
            return record(0.1, *[0.02] * (ask.output_tokens - 1), sent=at, error=error)

        return answer

    for ours in (OURS, COLOCATED[0]):
        with pytest.raises(StartError, match="requests failed: HTTP 503: full"):
            interference.c8(Scripted(by(ours)))
    if refused == interference.INTRUDER:
        found = interference.c8(Scripted(by(VLLM)))[0]
        assert found.peer == pytest.approx(1.0), "a peer may have that advantage"
        assert found.note.count("inf ms (vLLM colocated)") == 1


def drawn(scripted: Scripted, folder: Path) -> list[str]:
    """Draw all pictures, which must be PNGs of some size; return their names."""
    for name, draw in scripted.pictures.items():
        draw(path := folder / f"{name}.png")
        assert path.read_bytes()[1:4] == b"PNG" and path.stat().st_size > 10_000
    return sorted(scripted.pictures)


# -- C9 ---------------------------------------------------------------------------------------------------------------


def test_searches_take_turns_and_each_finds_its_own_rate() -> None:
    asked: list[System] = []
    capacity = {OURS: 3.0, VLLM: 1.1}

    def attempt(system: System) -> Any:
        def inside(rate: float) -> float:
            asked.append(system)
            return 1.0 if rate <= capacity[system] else 0.0

        return inside

    curves = goodput.search({system: attempt(system) for system in capacity}, {OURS: 1.0, VLLM: 1.0})
    assert asked[:6] == [OURS, VLLM] * 3, "one rate of each in turn"
    for system, curve in curves.items():
        assert highest(curve, 0.9).rate == pytest.approx(capacity[system], rel=0.1)


def test_of_rivals_only_the_best_is_searched_to_the_end() -> None:
    """No system is tried at a lower rate than another is known to sustain."""
    capacity, asked = {OURS: 3.0, VLLM: 1.1, VLLM_1P1D: 0.3}, list[tuple[System, float]]()

    def attempt(system: System) -> Any:
        def inside(rate: float) -> float:
            borne = [tried for other, tried in asked if other != system and tried <= capacity[other]]
            assert rate >= max(borne, default=0.0)
            asked.append((system, rate))
            return 1.0 if rate <= capacity[system] else 0.0

        return inside

    attempts = {system: attempt(system) for system in (VLLM, VLLM_1P1D, OURS)}
    curves = goodput.search(attempts, dict.fromkeys(capacity, 1.0), near=1.3, rivals=True)
    assert max(curves, key=lambda system: highest(curves[system], 0.9).rate) == OURS
    assert highest(curves[OURS], 0.9).rate == pytest.approx(3.0, rel=0.3)
    assert [len(curves[each]) for each in (VLLM, VLLM_1P1D)] == [2, 1]
    every = goodput.search(attempts_of(capacity), dict.fromkeys(capacity, 1.0), near=1.3)
    assert sum(map(len, every.values())) > len(asked)


def test_a_rival_that_has_not_failed_is_not_given_up() -> None:
    """It starts at a slightly lower rate than the other, and sustains a higher one."""
    curves = goodput.search(attempts_of({VLLM: 1.1, OURS: 3.0}), {VLLM: 1.0, OURS: 0.9}, near=1.3, rivals=True)
    assert highest(curves[OURS], 0.9).rate == pytest.approx(3.0, rel=0.3)


def attempts_of(capacity: dict[System, float]) -> Any:
    return {system: lambda rate, most=most: float(rate <= most) for system, most in capacity.items()}


@pytest.mark.parametrize(("rate", "requests"), [(8.01, 161), (2.0, 40), (0.2, 40), (0.15, 30), (0.1, 20), (0.01, 20)])
def test_a_low_rate_is_tried_with_fewer_requests_and_a_high_one_with_more(rate: float, requests: int) -> None:
    assert goodput.paced(rate, 40, 20, least_s=20) == requests


def test_search_stops_for_doubted_system_without_improvement() -> None:
    shares = {OURS: {1.0: 0.2, 0.5: 0.5}, VLLM: {1.0: 0.2, 0.5: 0.1}}

    def attempt(system: System) -> Any:
        return lambda rate: shares[system].get(rate, 1.0)

    curves = goodput.search({system: attempt(system) for system in shares}, dict.fromkeys(shares, 1.0), doubted=shares)
    assert highest(curves[OURS], 0.9).rate == pytest.approx(0.5, rel=0.1)
    assert [point.rate for point in curves[VLLM]] == [1.0, 0.5] and not highest(curves[VLLM], 0.9).rate


def test_goodput_is_against_the_best_budget_and_a_system_that_never_meets_it_counts_nothing(tmp_path: Path) -> None:
    """Requests that arrive faster than a system's capacity are late; with vLLM as 1P1D they always are."""
    capacity = {("1p1d", None): 4.0, ("2c", 2048): 3.0, ("vllm", 256): 1.0, ("vllm", 512): 1.6, ("vllm", 2048): 0.5}

    paced = set[str]()

    class Paced(Scripted):
        def run(self, system: System, asks: Any, times: Any = None, **given: Any) -> Run:
            rate = len(times) / times[-1] if times else 0.1
            paced.update([system.kind] if times else [])
            most = capacity.get((system.kind, system.budget), 0.0 if system.kind == "vllm-1p1d" else 2.0)
            late = 0.5 if rate <= most else 2.0
            return Run([record(late, 0.02, sent=at) for at in times or [0.0] * len(asks)], 1.0, 0.0)

    scripted = Paced(None, effort=replace(QUICK, rounds=2, paced=40))
    vllm, apart, own = goodput.c9(scripted)
    assert vllm.against == "vLLM colocated with 512 tokens a step" and vllm.met is True
    assert vllm.ratio and vllm.ratio.median == pytest.approx(4 / 1.6, rel=0.2)
    assert apart.peer == 0 and apart.ratio and apart.ratio.median == math.inf and apart.met is True
    assert paced == {"1p1d", "1c", "2c", "vllm"}, "a system that is late without load has no rate"
    assert own.targets == () and own.value == vllm.value == pytest.approx(4.0, rel=0.1)
    together = scripted.opened[-1]
    one, two = System("1c", budget=256), System("2c", budget=2048)
    assert together == (OURS, one, two, System("vllm", budget=512), VLLM_1P1D)
    curve, *more = (each["1p1d"] for each in vllm.detail["rate_and_share_inside"])
    assert len(more) == scripted.effort.rounds - 1 == len(vllm.detail["requests_per_s"]["1p1d"]) - 1
    assert curve == sorted(curve) and curve[0][1] == 1.0 and curve[-1][1] == 0.0
    assert drawn(scripted, tmp_path) == ["attainment"]


def test_the_rates_around_the_highest_are_tried_again() -> None:
    """A lucky run at one rate does not decide: the median over rounds is reported, with its range."""
    nearly = [Point(1.0, 1.0), Point(2.0, 0.95), Point(2.1, 0.85), Point(4.0, 0.0)]
    assert goodput.around(nearly) == [2.0, 2.1] and goodput.around([Point(1.0, 1.0), Point(2.0, 0.9)]) == [2.0]
    assert goodput.around([Point(1.0, 0.8), Point(2.0, 0.5)]) == [1.0], "too much, however little"
    assert goodput.around([Point(1.0, 0.0)]) == [], "late one by one: there was no search"
    late = {OURS: 0.5, VLLM: 2.0}
    scripted = Scripted(lambda system, ask, at: record(late[system], 0.02, sent=at))
    curves = goodput.again(scripted, {OURS: nearly, VLLM: nearly, VLLM_1P1D: [Point(0.3, 0.0)]}, 1)
    assert sorted(curves[OURS], key=lambda point: point.rate)[1:3] == [Point(2.0, 1.0), Point(2.1, 1.0)]
    assert curves[VLLM_1P1D] == [Point(0.3, 0.0)]
    assert scripted.order[:4] == [OURS, VLLM] * 2, "one rate of each in turn"


def test_repeated_search_refines_rates_for_new_arrivals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two rates that are far apart, interpolation would be a guess."""
    curve = [Point(1.0, 1.0), Point(2.0, 0.95), Point(2.1, 0.85), Point(4.0, 0.0)]
    capacity = {OURS: 3.1, VLLM: 1.6, VLLM_ONE_CORE: 2.05, VLLM_1P1D: 0.1}
    asked: list[System] = []

    def inside(field: object, system: System, rate: float, seed: int = 0) -> float:
        assert seed == 1, "all with the arrivals of this round"
        asked.append(system)
        return float(rate <= capacity[system])

    monkeypatch.setattr(goodput, "inside", inside)
    never = {VLLM_1P1D: [Point(1.0, 0.5), Point(0.5, 0.4)]}
    curves = goodput.again(Scripted(None), dict.fromkeys(capacity, curve) | never, 1)
    for system in (OURS, VLLM, VLLM_ONE_CORE):
        assert highest(curves[system], 0.9).rate == pytest.approx(capacity[system], rel=0.05)
    assert asked.count(VLLM_ONE_CORE) == 2, "nothing has moved"
    assert asked.count(VLLM_1P1D) == 1, "a system without a rate is not searched again"


@pytest.mark.parametrize("dies_after", [0, 1, 2, 3, 4])
def test_dead_peer_is_left_out_of_other_figures(dies_after: int) -> None:
    """A dead server gets no rate of 0, and the rounds of the other systems go on."""

    class Dies(Scripted):
        left = dies_after

        def run(self, system: System, asks: Any, times: Any = None, **given: Any) -> Run:
            if system.kind == "vllm":
                self.left -= 1
                if self.left < 0:
                    return Run([record(0.5, error="refused") for _ in asks], 1.0, 0.0)
            late = 2.0 if times and len(times) / times[-1] > 2.0 else 0.5
            return Run([record(late, 0.02, sent=at) for at in times or [0.0] * len(asks)], 1.0, 0.0)

    found = Dies(None, effort=Effort(rounds=3))
    found.remembered["cost"] = COST
    ours, *_ = saturation.c10(found)
    assert ours.value > 0 and ours.against in ("1c", "2c")
    assert (list(found.broken) == [VLLM]) is (dies_after < 1 + found.effort.rounds), "once to warm up"
    peer, apart, _ = goodput.c9(Dies(None))
    assert peer.value == apart.peer == pytest.approx(2.0, rel=0.1), "what all others bear"
    assert peer.peer is None, "it died before it found its rate"


def test_without_peers_goodput_is_reported_against_our_own_only() -> None:
    late = {OURS: 0.5}
    scripted = Scripted(lambda system, ask, at: record(late.get(system, 2.0), 0.02, sent=at), peers=None)
    vllm, apart, own = goodput.c9(scripted)
    assert vllm.peer is None and vllm.met is None and apart.met is None and own.peer == 0
    reported = "of 4 requests at each rate, fewer at those below 0.02/s, a lower bound: 1p1d"
    assert own.note == reported, "no rate that was tried was too high for it"


# -- C10, C11 ---------------------------------------------------------------------------------------------------------


def test_a_balanced_load_keeps_both_pools_equally_long() -> None:
    cost = CostModel(((0, 0.01), (50, 0.015)), 1e-8, 0.0002, 0.0, 1, 12, 1, "bfloat16", 0.0)
    tokens = saturation.balanced_output(cost, 512, 32)
    prefill_s = 0.01 + 512 * 0.0002
    step_s = 0.01 + 32 * 0.0001 + 1e-8 * 32 * (512 + tokens / 2)
    assert tokens * step_s / 32 == pytest.approx(prefill_s, rel=1 / tokens)
    assert saturation.balanced_output(cost, 1024, 32) > tokens, "a longer prompt needs a longer answer"


def test_saturation_is_against_the_best_colocated_one() -> None:
    seconds = {OURS: 10.0, COLOCATED[0]: 12.0, COLOCATED[1]: 9.8, VLLM: 15.0, VLLM_1P1D: 30.0}
    scripted = Scripted(lambda system, ask, at: record(1.0, seconds[system] - 1.0))
    scripted.remembered["cost"] = COST
    own, vllm = saturation.c10(scripted)
    assert own.value == QUICK.balanced / 10 and own.against == "2c" and own.ratio
    assert own.ratio.median == pytest.approx(0.98) and own.met is False and own.held is True
    assert vllm.ratio and vllm.ratio.median == pytest.approx(1.5) and vllm.met is True
    assert "512/48" in own.what
    assert own.limit == pytest.approx(2 / (512 * 0.000093 + 48 * 0.001)) and own.share == own.value / own.limit
    assert own.detail["requests_per_s"]["2c"] == [pytest.approx(QUICK.balanced / 9.8)]
    vllm, own, apart = saturation.c11(scripted)
    assert [vllm.against, own.against, apart.against] == [str(VLLM), "2c", str(VLLM_1P1D)]
    assert apart.ratio and apart.ratio.median == pytest.approx(3.0) and apart.targets == ()


def test_saturation_covers_whole_run_and_reports_token_times() -> None:
    """The last answer takes twice as long as all others."""
    numbers = itertools.count(1)

    def answered(system: System, ask: PlannedRequest, at: float) -> Record:
        last = next(numbers) % QUICK.balanced == 0
        found = record(10.0 if last else 5.0, *[1.0 if last else 0.5] * 10)
        stages = {"prefill": "prefill-0", "prefill_ms": 5000.0, "decode": "decode-0"}
        return replace(found, stages=stages) if system == OURS else found

    scripted = Scripted(answered, peers=None)
    scripted.remembered["cost"] = COST
    own, _ = saturation.c10(scripted)
    assert own.value == pytest.approx(QUICK.balanced / 20)
    took = "500 ms (1p1d), 500 ms (1c), 500 ms (2c)"
    assert own.note.endswith(f"{took}; prefill workers busy 50% of the time; decode workers busy 75% of the time")


# -- the command ------------------------------------------------------------------------------------------------------

INTERRUPTED = 130


def bench(*words: str) -> int:
    """Run ``tandem bench WORDS``; return its exit code."""
    return cli.main(["bench", *words])


def test_goals_are_chosen_by_name() -> None:
    assert command.chosen("c9, C1") == ["C1", "C9"] and len(command.chosen(None)) == 12
    with pytest.raises(StartError, match="no goal C13"):
        command.chosen("C1,C13")


def test_a_goal_that_cannot_be_measured_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Field) -> list[Row]:
        raise StartError("vLLM did not start", "no memory", "free some")

    def made(_: Field) -> list[Row]:
        return [row()]

    def refused(_: Field) -> list[Row]:
        field.good(Run([record(0.0, error="HTTP 503: full")], 1.0, 0.0))
        raise AssertionError

    def wrong(_: Field) -> list[Row]:
        raise KeyError("prefill_ms")

    monkeypatch.setattr(command, "GOALS", {"C2": broken, "C3": refused, "C4": wrong, "C1": made})
    kept: list[Any] = []
    names = ["C2", "C1", "C3", "C4"]
    found = command.measure(Scripted(None), names, Console(quiet=True), lambda found: kept.append(found.as_json()))
    assert [each.goal for each in found.rows] == ["C1"] and found.left == []
    failed = found.failed
    assert failed["C2"] == "vLLM did not start: no memory" and failed["C4"] == "'prefill_ms'"
    assert failed["C3"] == "no request was answered: HTTP 503: full"
    assert len(kept) == 4
    lines = found.lines()
    assert "- C2 could not be measured: vLLM did not start: no memory" in lines and " x " in lines[-1]


def test_goals_save_rows_of_interrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_: Field) -> list[Row]:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "GOALS", {"C1": lambda _: [row()], "C2": stopped, "C3": stopped})
    saved = tmp_path / "goals.json"
    assert bench("goals", "--quick", str(tmp_path), "--save", str(saved)) == INTERRUPTED
    figures = json.loads(saved.read_text())
    assert [each["goal"] for each in figures["rows"]] == ["C1"] and figures["left"] == ["C2", "C3"]
    assert "- not measured so far: C2, C3" in saved.with_suffix(".md").read_text()


@pytest.mark.parametrize("quick", [True, False])
def test_a_quick_run_is_not_judged(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loads of a quick run are too small: it shows only that everything works."""
    below = row(GoalTarget("value", 1, 1.5, at_most=True), value=20.0)
    assert below.held is False
    monkeypatch.setattr(command, "GOALS", {"C1": lambda _: [below]})
    words = ["goals", str(tmp_path), "--save", str(tmp_path / "goals.json")]
    assert bench(*words, *(["--quick"] if quick else [])) == (0 if quick else 1)
    assert ("mean nothing" in capsys.readouterr().out) is quick


def test_goals_resume_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def goal(name: str) -> command.Goal:
        def measured(_: Field) -> list[Row]:
            asked.append(name)
            if name == "C2" and len(asked) == 2:
                raise KeyboardInterrupt
            peer = against("vLLM", [1.0], [0.0])
            return [Row(name, "something", "ms", 1.0, (GoalTarget("value", 2.0, at_most=True),), **peer)]

        return measured

    monkeypatch.setattr(command, "GOALS", {name: goal(name) for name in ("C1", "C2", "C3")})
    monkeypatch.setattr(results, "comparable", lambda earlier: earlier["machine"]["cores"] > 0)
    saved = tmp_path / "goals.json"
    words = ["goals", "--quick", str(tmp_path), "--save", str(saved)]
    assert bench(*words) == INTERRUPTED
    assert bench(*words, "--resume") == 0 and asked == ["C1", "C2", "C2", "C3"]
    figures = json.loads(saved.read_text())
    assert [each["goal"] for each in figures["rows"]] == ["C1", "C2", "C3"] and list(figures["parts"].values()) == [
        ["C1"]
    ]
    assert figures["rows"][0] == figures["rows"][1] | {"goal": "C1"}, "what was kept is what was measured"
    assert "- measured before, by a run of" in saved.with_suffix(".md").read_text()


@pytest.mark.parametrize("why", ["No such file", "another machine", "no file"])
def test_a_run_that_cannot_go_on_says_why(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "goals.json"
    if why == "another machine":
        results.save(saved, {"machine": {"cores": 1000}} | command.Found([row()]).as_json())
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("it was measured"))
    words = ["goals", "--quick", "--resume", str(tmp_path)]
    assert bench(*words, *([] if why == "no file" else ["--save", str(saved)])) == 1
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        (["one", "--quick"], ["one"], "quick True, not False"),
        (["one"], ["one", "--quick"], "quick False, not True"),
        (["one"], ["one", "--peers", "there"], "peers None, not 'vllm-1.2'"),
        (["one"], ["two"], "model 'one', not 'two'"),
    ],
)
def test_a_run_does_not_go_on_with_figures_of_something_else(
    before: list[str],
    now: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "GOALS", {"C1": lambda _: [row()]})
    monkeypatch.setattr(results, "comparable", lambda earlier: True)
    monkeypatch.setattr(vllm, "check_installed", lambda environment: None)
    monkeypatch.setattr(vllm, "version", lambda environment: "vllm-1.2")
    words = ["goals", "--save", str(tmp_path / "goals.json")]
    assert bench(*words, *before) == 0
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("it was measured"))
    capsys.readouterr()
    assert bench(*words, *now, "--resume") == 1
    assert why in capsys.readouterr().err


def test_a_peer_that_was_missing_before_a_run_goes_on_is_still_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The goals that were measured while it was missing have no figure of it."""
    asked: list[str] = []

    def goal(name: str) -> command.Goal:
        def measured(setting: Field) -> list[Row]:
            asked.append(name)
            if name == "C2" and len(asked) == 2:
                raise KeyboardInterrupt
            if len(asked) == 1:
                setting.broken[VLLM_1P1D] = "it said nothing"
            return [Row(name, "something", "ms", 1.0, ())]

        return measured

    monkeypatch.setattr(command, "GOALS", {name: goal(name) for name in ("C1", "C2")})
    monkeypatch.setattr(results, "comparable", lambda earlier: True)
    words = ["goals", str(tmp_path), "--save", str(tmp_path / "goals.json")]
    assert bench(*words) == INTERRUPTED
    capsys.readouterr()
    assert bench(*words, "--resume") == 1 and asked == ["C1", "C2", "C2"]
    assert "vLLM 1P1D is missing: it said nothing" in capsys.readouterr().out


def test_peers_that_are_not_installed_are_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("goals", str(tmp_path), "--only", "C1", "--peers", str(tmp_path)) == 1
    assert f"there is no vLLM in {tmp_path}" in capsys.readouterr().err


def test_where_nothing_can_be_saved_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("it was measured"))
    assert bench("goals", str(tmp_path), "--save", str(tmp_path / "no" / "goals.json")) == 1
    assert "there is no directory" in capsys.readouterr().err


def test_systems_stay_as_long_as_goals_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class StartingField(Field):
        def start(self, system: System) -> Any:
            @contextlib.contextmanager
            def server() -> Any:
                events.append(f"+{system}")
                yield "http://127.0.0.1:1"
                events.append(f"-{system}")

            return server()

        def _warm_up(self, system: System) -> None: ...

    monkeypatch.setattr(field.Field, "_target", lambda self, url, system: None)
    watched = StartingField(SOME, (0, 1), None, FULL, Console(quiet=True))
    with field.opened(watched):
        assert watched.open(OURS, VLLM) == [OURS]
        assert watched.open(OURS, COLOCATED[0]) == [OURS, COLOCATED[0]]
        watched.open(COLOCATED[0])
    assert events == ["+1p1d", "+1c", "-1p1d", "-1c"]


def test_peers_are_halted_while_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class PausingField(Field):
        def start(self, system: System) -> Any:
            peer = vllm.PeerSystem("http://127.0.0.1:1", [])
            monkeypatch.setattr(peer, "pause", lambda: events.append(f"-{system}"))
            monkeypatch.setattr(peer, "resume", lambda: events.append(f"+{system}"))
            return contextlib.nullcontext(peer if system.is_peer else "http://127.0.0.1:1")

        def _warm_up(self, system: System) -> None: ...

    monkeypatch.setattr(field.Field, "_target", lambda self, url, system: None)
    monkeypatch.setattr(field, "run_now", lambda *_, **__: Run([], 1.0, 0.0))
    with field.opened(PausingField(SOME, (0, 1), SOME, FULL, Console(quiet=True))) as watched:
        watched.open(OURS, VLLM, VLLM_1P1D)
        watched.run(OURS, [])
        assert events == ["-vLLM colocated", "-vLLM 1P1D"]
        watched.run(VLLM_1P1D, [])
        assert events[2:] == ["-vLLM colocated", "+vLLM 1P1D"]
        watched.open(OURS, VLLM)
        watched.run(VLLM, [])
        assert events[4:] == ["+vLLM colocated"], "a stopped peer is neither paused nor resumed"


@pytest.mark.parametrize("when", ["it starts", "it is warmed up"])
def test_a_peer_that_does_not_start_is_left_out_and_not_tried_again(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Broken(Field):
        def start(self, system: System) -> Any:
            @contextlib.contextmanager
            def server() -> Any:
                events.append(f"+{system}")
                if when == "it starts" and system in bad:
                    raise StartError("it did not start", "no memory", "free some")
                try:
                    yield "http://127.0.0.1:1"
                finally:
                    events.append(f"-{system}")

            return server()

        def _warm_up(self, system: System) -> None:
            if system in bad:
                raise StartError("no request was answered", "HTTP 503", "try the system alone")

    monkeypatch.setattr(field.Field, "_target", lambda self, url, system: None)
    bad = {VLLM_1P1D}
    with field.opened(Broken(SOME, (0, 1), SOME, FULL, Console(quiet=True))) as measured:
        for _ in range(2):
            assert measured.open(OURS, VLLM, VLLM_1P1D) == [OURS, VLLM]
        assert list(measured.broken) == [VLLM_1P1D]
        monkeypatch.setattr(command, "GOALS", {"C1": lambda _: [row()]})
        found = command.measure(measured, ["C1"], Console(quiet=True), lambda _: None)
        assert any(line.startswith("- vLLM 1P1D is missing: ") for line in found.lines())
        bad.add(COLOCATED[1])
        with pytest.raises(StartError):
            measured.open(OURS, COLOCATED[1])
    assert events.count("+vLLM 1P1D") == 1
    if when == "it is warmed up":
        began, ended = (sorted(event[1:] for event in events if event[0] == sign) for sign in "+-")
        assert began == ended, "what was started is stopped"


def test_all_systems_get_the_same_limits_and_the_cores_that_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    ours: list[tuple[Any, ...]] = []
    theirs: list[tuple[Any, ...]] = []
    monkeypatch.setattr(field, "running", lambda *given: ours.append(given))
    monkeypatch.setattr(field.vllm, "running", lambda *given, **named: theirs.append((*given, named["flags"])))
    measured = Field(SOME, (2, 5), SOME, FULL, Console(quiet=True))
    measured.start(System("1c", budget=256))
    measured.start(OURS_ONE_CORE)
    measured.start(System("vllm", budget=256))
    measured.start(VLLM_ONE_CORE)
    measured.start(VLLM_1P1D)
    for two in ("2c", "1p1d"):
        measured.start(System(two))
    (_, kind, flags), (_, _, alone), (_, _, halves), (_, _, pair) = ours
    assert kind == "1c" and flags[-4:] == ["--cpus", "2,5", "--kv-cache-memory", "2GiB"]
    assert flags[2:4] == pair[2:4] == ["--max-num-seqs", "128"] and pair[-1] == "2GiB", "one of two decodes"
    assert halves[2:4] == ["--max-num-seqs", "64"] and halves[-1] == "1GiB", "each of two has half"
    assert alone[-3] == "2", "one core is the first"
    assert theirs[0] == (SOME, str(SOME), "colocated", (2, 5), flags[:-4])
    assert theirs[1][3] == (2,) and theirs[2][2:4] == ("1p1d", (2, 5)) and theirs[2][4] == alone[:-4]
