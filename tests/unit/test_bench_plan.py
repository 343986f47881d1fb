"""The planner's world: the real router and planners on virtual time, against queues that can be computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.cost import CostModel, fit, hats, shape
from bench.load import Run
from bench.workloads import Ask, random_asks
from bench.world import Limits, World
from common.errors import StartError
from common.ids import BlockId, new_request_id, pack_tokens
from common.request import Request, SamplingParams
from common.sequence import Batch, Segment, Sequence
from deploy import cli

COST = CostModel(
    streams=((0, 0.01), (64, 0.01)), context=0.0, token=0.001, square=0.0, kv_bytes=1000, layers=10, threads=1,
    dtype="float32", error=0.0,
)  # fmt: skip
LIMITS = Limits(
    kv_blocks=1000, block_size=16, max_num_seqs=8, max_num_batched_tokens=100, max_model_len=4096, link_bytes_per_s=1e6
)
ASK = Ask(list(range(100, 200)), 100, 5)


def lived(asks: list[Ask], times: list[float], pools: tuple[int, int, int], **changes: float) -> Run:
    world = World(COST, replace(LIMITS, **changes), *pools)  # type: ignore[arg-type]
    run = world.run(asks, times)
    assert not world.leaks()
    assert [len(record.moments) for record in run.records] == [ask.output_tokens for ask in asks]
    return run


def test_one_request_alone_takes_what_its_steps_take() -> None:
    """Prompt: 10 ms + 100 tokens of 1 ms. The last of ten layers is exposed: 100 kB at 1 MB/s / 10 = 10 ms."""
    apart = lived([ASK], [1.0], (1, 1, 0)).records[0]
    assert apart.ttft == pytest.approx(0.11)
    assert apart.itls == pytest.approx([0.02, 0.01, 0.01, 0.01])
    together = lived([ASK], [1.0], (0, 0, 1)).records[0]
    assert together.ttft == pytest.approx(0.11) and together.itls == pytest.approx([0.01] * 4)
    assert apart.stages is not None and apart.stages["prefill_ms"] == pytest.approx(110)
    assert [apart.stages[name] for name in ("path", "prefill", "decode")] == ["disagg", "prefill-0", "decode-0"]


def test_what_a_turn_takes_besides_its_step_is_taken_by_every_step() -> None:
    record = World(replace(COST, turn=0.002), LIMITS, 0, 0, 1).run([ASK], [0.0]).records[0]
    assert record.ttft == pytest.approx(0.112) and record.itls == pytest.approx([0.012] * 4)


def test_a_cost_is_that_of_the_steps_it_stands_for() -> None:
    cost = CostModel(((0, 0.01), (1, 0.012), (4, 0.02)), 1e-6, 0.0005, 1e-6, 1000, 10, 1, "float32", 0.0)
    decode, chunk = (
        Sequence(Request(new_request_id(), pack_tokens([1] * length), SamplingParams(1, 0)), 0) for length in (50, 100)
    )
    blocks = [BlockId(0)]
    assert cost.decode_s(3, 50) == pytest.approx(cost.step(Batch((Segment(decode, 49, 1),) * 3, (blocks,) * 3)))
    steps = [Batch((Segment(chunk, start, length),), (blocks,)) for start, length in ((0, 64), (64, 36))]
    assert cost.prompt_s(100, 64) == pytest.approx(sum(map(cost.step, steps)))


@pytest.mark.parametrize("pools", [(1, 1, 0), (0, 0, 1)])
def test_texts_are_not_taken_for_one_and_the_same(pools: tuple[int, int, int]) -> None:
    """Of recorded text only the length is known; nobody's prefix is in a cache because somebody else's is as long."""
    records = lived([Ask(f"question {number}", 96, 5) for number in range(3)], [0.0, 10.0, 20.0], pools).records
    assert [record.ttft for record in records] == pytest.approx([0.106] * 3)


def test_a_slow_link_is_exposed_and_holds_prefills_blocks() -> None:
    """100 kB at 100 kB/s take 1 s, of which 0.9 of the prefill's 110 ms hide some."""
    record = lived([ASK], [0.0], (1, 1, 0), link_bytes_per_s=1e5).records[0]
    assert record.itls[0] == pytest.approx(1.0 - 0.11 * 0.9 + 0.01)


def test_a_prompt_stalls_streams_only_where_both_run_together() -> None:
    stream, prompts = Ask(list(range(100, 116)), 16, 40), random_asks(range(500), 3, 100, 1)
    asks = [stream, *prompts]
    times = [0.0, 0.1, 0.2, 0.3]
    assert max(lived(asks, times, (1, 1, 0)).records[0].itls[1:]) == pytest.approx(0.01)
    assert max(lived(asks, times, (0, 0, 1)).records[0].itls) > 0.1


def test_prefill_is_a_queue_and_more_workers_shorten_it() -> None:
    """Four prompts at once on one worker: chunks of 100 tokens, so 110 ms each, one after the other."""
    asks = random_asks(range(500), 4, 100, 2, seed=1)
    one = sorted(record.ttft for record in lived(asks, [0.0] * 4, (1, 1, 0)).records)
    assert one == pytest.approx([0.11, 0.22, 0.33, 0.44])
    two = sorted(record.ttft for record in lived(asks, [0.0] * 4, (2, 1, 0)).records)
    assert two == pytest.approx([0.11, 0.11, 0.22, 0.22])


def test_who_rests_computes_for_who_has_many_tokens() -> None:
    """200 tokens take one worker 210 ms, and each that rests is worth 0.9 of one; a stream is not shared."""
    ask = Ask(list(range(200)), 200, 2)
    wide = {"max_num_batched_tokens": 256, "lend_cores": True}
    alone = lived([ask], [0.0], (1, 1, 0), max_num_batched_tokens=256).records[0]
    helped = lived([ask], [0.0], (1, 1, 0), **wide).records[0]
    assert (alone.ttft, helped.ttft) == (pytest.approx(0.21), pytest.approx(0.21 / 1.9))
    assert lived([ask], [0.0], (1, 3, 0), **wide).records[0].ttft == pytest.approx(0.21 / 3.7)
    two = lived([ask, replace(ask, prompt=list(range(200, 400)))], [0.0, 0.0], (2, 2, 0), **wide)
    assert [record.ttft for record in two.records] == pytest.approx([0.21 / 1.9] * 2), (
        "each has one of the two that rest"
    )
    some = lived([ASK], [0.0], (1, 1, 0), **wide).records[0]
    assert some.ttft == pytest.approx(0.11 / 1.6), "100 tokens gain less"
    few = lived([Ask(list(range(15)), 15, 1)], [0.0], (1, 1, 0), **wide).records[0]
    assert few.ttft == pytest.approx(0.025), "15 are too few"


def test_a_worker_that_has_steps_has_its_cores_for_itself() -> None:
    """The stream is decoded from 25 to 135 ms, while 110 of the prompt's 210 ms are done; the rest by both."""
    stream, prompt = Ask(list(range(100, 115)), 15, 12), Ask(list(range(500, 700)), 200, 1)
    limits = {"max_num_batched_tokens": 256, "lend_cores": True, "link_bytes_per_s": 1e9}
    first, second = lived([stream, prompt], [0.0, 0.025], (1, 1, 0), **limits).records
    assert first.moments[-1] == pytest.approx(0.135, abs=1e-4)
    assert second.ttft == pytest.approx(0.11 + 0.1 / 1.9, abs=1e-4)
    assert lived([prompt, stream], [0.0, 0.2], (1, 1, 0), **limits).records[0].ttft == pytest.approx(0.21 / 1.9)


def test_a_pool_that_is_too_small_makes_requests_wait_and_loses_none() -> None:
    asks = random_asks(range(500), 30, 90, 20, seed=2)
    roomy = lived(asks, [0.0] * 30, (1, 1, 0))
    tight = lived(asks, [0.0] * 30, (1, 1, 0), kv_blocks=16)
    assert tight.seconds > roomy.seconds


@pytest.mark.parametrize("pools", [(1, 1, 0), (2, 3, 0), (0, 0, 2), (0, 1, 0)])
def test_any_pools_serve_everything(pools: tuple[int, int, int]) -> None:
    asks = random_asks(range(500), 60, 70, 12, range_ratio=0.9, prefix_len=20, seed=3)
    lived(asks, [index * 0.03 for index in range(60)], pools, kv_blocks=40)


def test_what_no_worker_can_hold_is_a_failure() -> None:
    world = World(COST, replace(LIMITS, kv_blocks=4), 1, 1, 0)
    assert world.run([ASK], [0.0]).records[0].error


def test_what_was_placed_and_never_ended_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """However that comes about: it must not count as answered by its first token."""
    monkeypatch.setattr(World, "_land", lambda *_: False)
    (record,) = World(COST, LIMITS, 1, 1, 0).run([ASK], [0.0]).records
    assert len(record.moments) == 1 and record.error == "it was placed and never ended"


def test_between_two_numbers_of_streams_costs_lie_on_a_straight_line() -> None:
    assert hats(4, (0, 4, 16)) == [0.0, 1.0, 0.0] and hats(0, (0, 4, 16)) == [1.0, 0.0, 0.0]
    assert hats(7, (0, 4, 16)) == [0.0, 0.75, 0.25] and hats(28, (0, 4, 16)) == [0.0, -1.0, 2.0]
    assert hats(5, (3,)) == [1.0]


def test_costs_are_fitted() -> None:
    """Exactly where the formula holds; nothing becomes negative where noise would have it so."""
    generator = np.random.default_rng(1)
    known = ((0, 0.01), (1, 0.02), (4, 0.021), (16, 0.06))
    steps = [
        (known[number][0], *(int(each) for each in generator.integers(0, 1000, 3)))
        for number in generator.integers(0, 4, 60)
    ]
    seconds = [dict(known)[a] + 0.0001 * b + 0.002 * c + 0.0005 * d for a, b, c, d in steps]
    streams, others, error = fit(steps, seconds)
    assert [number for number, _ in streams] == [0, 1, 4, 16] and error < 1e-6
    assert [each for _, each in streams] == pytest.approx([each for _, each in known], rel=1e-3)
    assert others == pytest.approx([0.0001, 0.002, 0.0005], rel=1e-3)
    noisy = [0.01 * (1 + 0.2 * generator.standard_normal()) for _ in steps]
    streams, others, error = fit(steps, noisy)
    assert min(*others, *(each for _, each in streams)) >= 0 and error < 0.5


def test_what_of_a_step_costs() -> None:
    decode, chunk = (
        Sequence(Request(new_request_id(), pack_tokens([1] * length), SamplingParams(1, 0)), 0) for length in (50, 100)
    )
    blocks = [BlockId(0)]
    batch = Batch((Segment(decode, 49, 1), Segment(decode, 49, 1), Segment(chunk, 40, 60)), (blocks,) * 3)
    assert shape(batch) == (2, 100, 60, 60 * 70)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planning from a file of costs, checked against a measured comparison: what is off by too much exits with 1."""
    cost, saved, measured = tmp_path / "cost.json", tmp_path / "plan.json", tmp_path / "compare.json"
    cost.write_text(json.dumps(COST.as_json()))
    words = f"bench plan --cost {cost} --num-prompts 20 --request-rate 5 --random-input-len 100 --random-output-len 10"
    systems = ["--systems", "1p1d,2c", "--save", str(saved)]
    assert cli.main([*words.split(), *systems]) == 0
    shown = capsys.readouterr().out
    assert "2 workers: Do not disaggregate" in shown
    figures = json.loads(saved.read_text())
    rounds = [figures["systems"]["1p1d"]]
    measured.write_text(json.dumps({"systems": {"1p1d": {"rounds": rounds}}}))
    check = [*words.split(), *systems, "--runs", "1", "--check", str(measured)]
    assert cli.main(check) == 0
    assert "planned / measured, 1p1d: inside 1.00, ttft_p50 1.00" in capsys.readouterr().out
    load = {"request_rate": 5, "random_output_len": 10, "model": "", "max_concurrency": None, "seed": 0}
    measured.write_text(json.dumps({"load": load, "systems": {"1p1d": {"rounds": rounds}}}))
    assert cli.main(check) == 0
    capsys.readouterr()
    for name, other in (("request_rate", "inf"), ("random_output_len", 11), ("max_concurrency", 4), ("model", "m")):
        measured.write_text(json.dumps({"load": load | {name: other}, "systems": {"1p1d": {"rounds": rounds}}}))
        assert cli.main(check) == 1
        said = capsys.readouterr().err
        assert "is of another load" in said and f"{name} {other} measured" in said
    rounds[0]["median_ttft_ms"] *= 3
    measured.write_text(json.dumps({"systems": {"1p1d": {"rounds": rounds}}}))
    assert cli.main(check) == 1
    assert "the plan is off by more than 50% (--tolerance): ttft_p50 of 1p1d" in capsys.readouterr().out


def test_what_cannot_be_planned_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / "odd.json"
    odd.write_text("{}")
    with pytest.raises(StartError, match="cannot read the costs"):
        CostModel.load(odd)
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps(COST.as_json()))
    assert CostModel.load(cost) == COST
    for words in (
        ["--goodput", "ttft:3x"],
        ["--systems", "1p0d"],
        ["--cost", str(odd)],
        ["--cost", str(cost), "--check", str(odd), "--num-prompts", "2"],
        ["--cost", str(cost), "--random-input-len", "9000", "--num-prompts", "2"],
        ["--max-num-batched-tokens", "4"],
    ):
        assert cli.main(["bench", "plan", *words]) == 1
        assert "error:" in capsys.readouterr().err
