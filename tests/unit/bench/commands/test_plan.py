"""The planner's simulation: the real router and planners on virtual time, compared with queues computed by hand."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.commands import plan
from bench.load import results
from bench.load.run import Run
from bench.load.setup import times, workload
from bench.load.tokens import FileTokenizer
from bench.load.workloads import PlannedRequest, random_asks, relabelled
from bench.simulate import cost as costs
from bench.simulate import prediction
from bench.simulate.cost import CostModel, fit, hats, load_costs, machines_differ, shape, source
from bench.simulate.world import Limits, World
from common import builtin
from common.checkpoint.files import open_checkpoint
from common.config.bench.compare import BenchCompareConfig
from common.config.bench.plan import BenchPlanConfig
from common.core.errors import StartError
from common.core.ids import BlockId, new_request_id, pack_tokens
from common.core.request import Request, SamplingParams
from common.core.sequence import Batch, Segment, Sequence
from common.platform import device
from deploy.cli import main as cli
from tests.fakes.checkpoint import fake_checkpoint

COST = CostModel(
    streams=((0, 0.01), (64, 0.01)), context=0.0, token=0.001, square=0.0, kv_bytes=1000, layers=10, threads=1,
    dtype="float32", error=0.0,
)  # fmt: skip
LIMITS = Limits(
    kv_blocks=1000, block_size=16, max_num_seqs=8, max_num_batched_tokens=100, max_model_len=4096, link_bytes_per_s=1e6
)
ASK = PlannedRequest(list(range(100, 200)), 100, 5)


def saved_costs(path: Path, **changes: Any) -> Path:
    """Write a file of costs for the built-in model and this machine, with ``changes``; None removes an entry."""
    origin = source(builtin.NAME, open_checkpoint(str(builtin.path())).fingerprint)
    found = origin | COST.as_json() | changes
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))
    return path


def lived(asks: list[PlannedRequest], times: list[float], pools: tuple[int, int, int], **changes: float) -> Run:
    world = World(COST, replace(LIMITS, **changes), *pools)  # type: ignore[arg-type]
    run = world.run(asks, times)
    assert not world.leaks()
    assert [len(record.moments) for record in run.records] == [ask.output_tokens for ask in asks]
    return run


def test_simulated_request_takes_sum_of_step_costs() -> None:
    """The prompt takes 10 ms + 100 tokens of 1 ms. The last of ten layers is exposed: 100 kB at 1 MB/s / 10 = 10 ms."""
    apart = lived([ASK], [1.0], (1, 1, 0)).records[0]
    assert apart.ttft == pytest.approx(0.11)
    assert apart.itls == pytest.approx([0.02, 0.01, 0.01, 0.01])
    together = lived([ASK], [1.0], (0, 0, 1)).records[0]
    assert together.ttft == pytest.approx(0.11) and together.itls == pytest.approx([0.01] * 4)
    assert apart.stages is not None and apart.stages["prefill_ms"] == pytest.approx(110)
    assert [apart.stages[name] for name in ("path", "prefill", "decode")] == ["disagg", "prefill-0", "decode-0"]


def test_simulation_adds_turn_overhead_to_every_step() -> None:
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
    """Only the length of a recorded text is known; another text of the same length must not hit its cached prefix."""
    records = lived(
        [PlannedRequest(f"question {number}", 96, 5) for number in range(3)], [0.0, 10.0, 20.0], pools
    ).records
    assert [record.ttft for record in records] == pytest.approx([0.106] * 3)


def test_a_slow_link_is_exposed_and_holds_prefills_blocks() -> None:
    """Shipping 100 kB at 100 kB/s takes 1 s, of which 0.9 of prefill's 110 ms is hidden."""
    record = lived([ASK], [0.0], (1, 1, 0), link_bytes_per_s=1e5).records[0]
    assert record.itls[0] == pytest.approx(1.0 - 0.11 * 0.9 + 0.01)


def test_a_prompt_stalls_streams_only_where_both_run_together() -> None:
    stream, prompts = PlannedRequest(list(range(100, 116)), 16, 40), random_asks(range(500), 3, 100, 1)
    asks = [stream, *prompts]
    times = [0.0, 0.1, 0.2, 0.3]
    assert max(lived(asks, times, (1, 1, 0)).records[0].itls[1:]) == pytest.approx(0.01)
    assert max(lived(asks, times, (0, 0, 1)).records[0].itls) > 0.1


def test_prefill_is_a_queue_and_more_workers_shorten_it() -> None:
    """Four prompts arrive at one worker at once; each is one chunk of 100 tokens and takes 110 ms, in turn."""
    asks = random_asks(range(500), 4, 100, 2, seed=1)
    one = sorted(record.ttft for record in lived(asks, [0.0] * 4, (1, 1, 0)).records)
    assert one == pytest.approx([0.11, 0.22, 0.33, 0.44])
    two = sorted(record.ttft for record in lived(asks, [0.0] * 4, (2, 1, 0)).records)
    assert two == pytest.approx([0.11, 0.11, 0.22, 0.22])


def test_simulated_idle_workers_lend_cores_to_prefill() -> None:
    """200 tokens take one worker 210 ms, and each idle worker adds 0.9 of a worker; a stream's steps are not shared."""
    ask = PlannedRequest(list(range(200)), 200, 2)
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
    few = lived([PlannedRequest(list(range(15)), 15, 1)], [0.0], (1, 1, 0), **wide).records[0]
    assert few.ttft == pytest.approx(0.025), "15 are too few"


def test_a_worker_that_has_steps_has_its_cores_for_itself() -> None:
    """The stream decodes from 25 to 135 ms, while prefill alone does 110 of the prompt's 210 ms; both do the rest."""
    stream, prompt = PlannedRequest(list(range(100, 115)), 15, 12), PlannedRequest(list(range(500, 700)), 200, 1)
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


def test_of_prompts_that_pile_up_decode_takes_some() -> None:
    """Its streams slow to half speed: a step of 10 ms gets a prompt chunk of 10 ms more, or of 64 tokens until the time
    per token is known."""
    asks = random_asks(range(500), 40, 100, 10, seed=4)
    run = lived(asks, [0.0] * 40, (1, 1, 0))
    paths = [record.stages["path"] for record in run.records if record.stages]
    assert 4 <= paths.count("local") <= 20
    assert run.seconds < 0.9 * 40 * 0.11, "what prefill alone takes"
    gaps = sorted(gap for record in run.records for gap in record.itls)
    assert gaps[len(gaps) // 2] <= 0.021 and gaps[-1] < 0.125


def test_simulated_request_larger_than_pool_fails() -> None:
    world = World(COST, replace(LIMITS, kv_blocks=4), 1, 1, 0)
    assert world.run([ASK], [0.0]).records[0].error


def test_simulated_request_without_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason, such a request must not count as answered by its first token."""
    monkeypatch.setattr(World, "_land", lambda *_: False)
    (record,) = World(COST, LIMITS, 1, 1, 0).run([ASK], [0.0]).records
    assert len(record.moments) == 1 and record.error == "it was placed but never ended"


def test_between_two_numbers_of_streams_costs_lie_on_a_straight_line() -> None:
    assert hats(4, (0, 4, 16)) == [0.0, 1.0, 0.0] and hats(0, (0, 4, 16)) == [1.0, 0.0, 0.0]
    assert hats(7, (0, 4, 16)) == [0.0, 0.75, 0.25] and hats(28, (0, 4, 16)) == [0.0, -1.0, 2.0]
    assert hats(5, (3,)) == [1.0]


def test_costs_are_fitted() -> None:
    """The fit is exact where the formula holds, and no cost is negative however noisy the times are."""
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


def test_step_shape_counts_segments_and_attention() -> None:
    decode, chunk = (
        Sequence(Request(new_request_id(), pack_tokens([1] * length), SamplingParams(1, 0)), 0) for length in (50, 100)
    )
    blocks = [BlockId(0)]
    batch = Batch((Segment(decode, 49, 1), Segment(decode, 49, 1), Segment(chunk, 40, 60)), (blocks,) * 3)
    assert shape(batch) == (2, 100, 60, 60 * 70)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plan from a file of costs and check it against a measured comparison; too large a difference exits with 1."""
    cost, saved, measured = saved_costs(tmp_path / "cost.json"), tmp_path / "plan.json", tmp_path / "compare.json"
    words = f"bench plan --cost {cost} --num-prompts 20 --request-rate 5 --random-input-len 100 --random-output-len 10"
    systems = ["--systems", "1p1d,2c", "--save", str(saved)]
    assert cli.main([*words.split(), *systems]) == 0
    shown, said = capsys.readouterr()
    assert "2 workers: Do not disaggregate" in shown and "note:" not in said
    figures = json.loads(saved.read_text())
    assert figures["cost"] == json.loads(cost.read_text()), "with where they come from"
    assert [len(each["rounds"]) for each in figures["systems"].values()] == [3, 3]
    rounds = figures["systems"]["1p1d"]["rounds"][:1]
    measured.write_text(json.dumps({"systems": {"1p1d": {"rounds": rounds}}}))
    check = [*words.split(), *systems, "--runs", "1", "--check", str(measured)]
    assert cli.main(check) == 0
    assert "planned / measured, 1p1d: inside 1.00, ttft_p50 1.00" in capsys.readouterr().out
    load = {"request_rate": 5, "random_output_len": 10, "model": "", "max_concurrency": None, "seed": 0}
    for flags in (None, "--api-key ... --max-num-seqs 64 --log-level warning"):
        measured.write_text(json.dumps({"load": load, "up_flags": flags, "systems": {"1p1d": {"rounds": rounds}}}))
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


def test_plan_refuses_invalid_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd, cost = tmp_path / "odd.json", saved_costs(tmp_path / "cost.json")
    for text in ("{}", "[]", "null", "no json"):
        odd.write_text(text)
        with pytest.raises(StartError, match="cannot read the costs"):
            load_costs(odd, {}, 1)
    odd.write_text("{}")
    wanted = source("", open_checkpoint(str(builtin.path())).fingerprint)
    assert load_costs(cost, wanted, 1)[0] == COST
    for words in (
        ["--goodput", "ttft:3x"],
        ["--systems", "1p0d"],
        ["--systems", "0p1d"],
        ["--cost", str(odd)],
        ["--cost", str(cost), "--check", str(odd), "--num-prompts", "2"],
        ["--cost", str(cost), "--random-input-len", "9000", "--num-prompts", "2"],
        ["--max-num-batched-tokens", "4"],
    ):
        assert cli.main(["bench", "plan", *words]) == 1
        assert "error:" in capsys.readouterr().err


def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("running", "measure", "served_gap_s"):
        monkeypatch.setattr(prediction, name, lambda *_: pytest.fail("something was measured"))


@pytest.mark.parametrize(
    ("changes", "flags", "said"),
    [
        ({"model": "m-1", "fingerprint": "00ff"}, "", ("the costs of another model", "m-1 (00ff)", "tandem-builtin (")),
        ({"fingerprint": "00ff"}, "", ("the costs of another model",)),
        ({"threads": 3}, "", ("the costs of other workers", "3 compute thread(s)", "give --threads 3, ")),
        ({}, "--threads 2", ("the costs of other workers", "1 compute thread(s)", "give --threads 1, ")),
        (
            {"model": None, "fingerprint": None},
            "",
            ("cannot use the costs in", "does not record their model and machine"),
        ),
        ({"machine": None}, "", ("cannot use the costs in", "does not record their model and machine")),
    ],
)
def test_costs_of_something_else_are_refused(
    changes: dict[str, Any],
    flags: str,
    said: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    nothing_is_measured(monkeypatch)
    cost = saved_costs(tmp_path / "cost.json", **changes)
    assert cli.main(["bench", "plan", "--cost", str(cost), "--num-prompts", "2", *flags.split()]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "leave --cost out, or name another file to measure into" in error
    for words in said:
        assert words in error


def test_costs_are_known_by_the_weights_and_not_by_where_they_lie(tmp_path: Path) -> None:
    here, there = fake_checkpoint(tmp_path / "here"), fake_checkpoint(tmp_path / "there")
    found = [source(str(path), open_checkpoint(str(path)).fingerprint) for path in (here, there)]
    assert [each["model"] for each in found] == ["here", "there"], "no folders of this machine"
    assert source("owner/name", "")["model"] == "owner/name"
    cost = saved_costs(tmp_path / "cost.json", **found[0])
    assert load_costs(cost, found[1], 1) == (COST, json.loads(json.dumps(found[0])))


def test_costs_of_another_machine_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = results.provenance()["machine"]
    assert machines_differ(here, here) == ""
    there = here | {"cores": 96, "instructions": ["avx2", "bf16"]}
    ours = "+".join(here["instructions"])
    reported = f"instructions avx2+bf16 there and {ours} here, cores 96 there and {here['cores']} here"
    assert machines_differ(there, here) == reported
    cost = saved_costs(tmp_path / "cost.json", machine=there)
    words = f"bench plan --cost {cost} --num-prompts 2 --systems 1p1d,2c --random-input-len 100"
    assert cli.main(words.split()) == 0
    shown, said = capsys.readouterr()
    assert f"note: the costs in {cost} were measured on another machine: {reported}\n" in said and "note" not in shown


def test_costs_that_are_measured_are_kept_with_where_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second plan reuses the saved costs and reports the same origin."""
    monkeypatch.setattr(prediction, "served_gap_s", lambda *_: 0.05)
    monkeypatch.setattr(prediction, "measure", lambda *_: COST)
    cost, plans = tmp_path / "cost.json", [tmp_path / "first.json", tmp_path / "second.json"]
    for each in plans:
        words = f"bench plan --cost {cost} --num-prompts 2 --systems 1p1d,2c --random-input-len 100 --save {each}"
        assert cli.main(words.split()) == 0
        nothing_is_measured(monkeypatch)
    kept = json.loads(cost.read_text())
    assert kept["model"] == builtin.NAME and kept["fingerprint"] == open_checkpoint(str(builtin.path())).fingerprint
    assert kept["threads"] == 1 and kept["dtype"] == "float32" and kept["turn"] == pytest.approx(0.04)
    first, second = (json.loads(each.read_text())["cost"] for each in plans)
    assert first == second == {name: value for name, value in kept.items() if name != "command"}
    assert {"date", "commit", "machine"} <= set(first)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"load": {"random_output_len": 11}}, "is of another load"),
        ({"load": {"max_concurrency": 4}}, "max_concurrency 4 measured, None planned"),
        ({"load": 5}, "is no such file"),
        ({"up_flags": "--max-num-batched-tokens 2048"}, "max_num_batched_tokens 2048 measured, 512 planned"),
        ({"up_flags": "--no-lend-cores --block-size=32"}, "block_size 32 measured, 16 planned"),
        ({"up_flags": "--threads 2"}, "threads 2 measured, 1 planned"),
        ({"up_flags": '"'}, "is no such file"),
        ({}, "has none of these systems"),
    ],
)
def test_plan_refuses_unusable_check_file_before_measuring(
    found: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    nothing_is_measured(monkeypatch)
    figures = dict.fromkeys(plan.CHECKED.values(), 1.0)
    measured = tmp_path / "compare.json"
    measured.write_text(json.dumps({"systems": {"2p1d" if not found else "1p1d": {"rounds": [figures]}}} | found))
    words = f"bench plan --systems 1p1d,2c --random-output-len 10 --check {measured}"
    assert cli.main(words.split()) == 1
    assert said in " ".join(capsys.readouterr().err.split())


WAY = "no network time, some milliseconds before the first token"
LINK = "1.0 GiB per second between two workers (--link-rate)"
LENT = (
    "an idle worker adds 0.6 of a worker from 16 tokens on and 0.9 of a worker from 128 tokens on to a step "
    "(--no-lend-cores: none)"
)


@pytest.mark.parametrize(
    ("flags", "reported", "kept"),
    [
        ("--systems 1p1d,2c", [LINK, LENT], {"link_bytes_per_s", "resting_worker_is_worth"}),
        ("--systems 1p1d,2c --no-lend-cores", [LINK], {"link_bytes_per_s"}),
        ("--systems 2c", [LENT], {"resting_worker_is_worth"}),
        ("--systems 1c", [], set()),
    ],
)
def test_plan_reports_assumed_costs(
    flags: str, reported: list[str], kept: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost, saved = saved_costs(tmp_path / "cost.json"), tmp_path / "plan.json"
    words = f"bench plan --cost {cost} --num-prompts 2 --random-input-len 100 --save {saved} {flags}"
    assert cli.main(words.split()) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "ssumed" in line]
    assert lines == [f"Assumed, not measured: {'; '.join([WAY, *reported])}."]
    assumed = json.loads(saved.read_text())["assumed"]
    assert set(assumed) == kept
    assert assumed.get("link_bytes_per_s", 1 << 30) == 1 << 30
    assert assumed.get("resting_worker_is_worth", {"from_16_tokens": 0.6, "from_128_tokens": 0.9}) == {
        "from_16_tokens": 0.6,
        "from_128_tokens": 0.9,
    }


def test_plan_rounds_use_workload_of_compare() -> None:
    """Each round has its own lengths and times, from the same seeds as in a comparison."""
    words = BenchPlanConfig(
        model="", num_prompts=8, random_input_len=40, random_range_ratio=0.5, request_rate=3, seed=5
    )
    tokenizer = FileTokenizer(builtin.path())
    rounds = [prediction.round_of(words, number, tokenizer, 1 << 20) for number in range(3)]
    for number, (asks, due) in enumerate(rounds):
        config = BenchCompareConfig(
            model="", num_prompts=8, random_input_len=40, random_range_ratio=0.5, request_rate=3, seed=5 + number
        )
        assert relabelled(list(workload(config, tokenizer)), number + 1) == asks
        assert times(config, asks) == due
    assert len({tuple(ask.prompt_tokens for ask in asks) for asks, _ in rounds}) == 3


def test_advice_says_that_one_worker_over_all_cores_is_not_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unplanned = "one worker over all cores (1c) is not planned: tandem bench compare measures that."
    cost, saved = saved_costs(tmp_path / "cost.json", threads=2), tmp_path / "plan.json"
    words = f"bench plan --cost {cost} --threads 2 --num-prompts 2 --random-input-len 100 --save {saved} --systems"
    assert cli.main([*words.split(), "1p1d,2c"]) == 0
    said = f"A colocated worker here has 2 cores (--threads), as every worker; {unplanned}"
    assert said in capsys.readouterr().out.splitlines()
    assert json.loads(saved.read_text())["advice"][-1] == said
    assert cli.main([*words.split(), "1p1d,1p2d"]) == 0
    assert "is not planned" not in capsys.readouterr().out


def test_steps_are_measured_on_the_cores_of_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards the process may use all of its cores again."""
    bound: list[list[int]] = []

    def pin(cpus: list[int], threads: int) -> None:
        bound.append(cpus)
        raise StartError("no engine", "it is left out here", f"not {threads}")

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9, 5, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append(sorted(cpus)))
    monkeypatch.setattr(device, "pin", pin)
    for threads in (1, 2, 4):
        with pytest.raises(StartError, match="no engine"):
            costs.measure(str(builtin.path()), threads, lambda _: None)
    assert bound == [[5], [5, 7, 9], [5, 7], [5, 7, 9], [5, 7, 9], [5, 7, 9]]
