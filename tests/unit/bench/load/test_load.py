"""Load: arrival times, workloads and their files, the reading of streams, and the figures."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from bench.load import run as load
from bench.load.arrivals import Ramp, arrivals
from bench.load.client import Events, Record, Target
from bench.load.metrics import QUEUED, Objective, as_json, parse_objectives, rows, summarise
from bench.load.run import Run
from bench.load.setup import times
from bench.load.workloads import (
    PlannedRequest,
    azure_asks,
    mooncake_asks,
    prefix_repetition_asks,
    random_asks,
    relabelled,
    sharegpt_asks,
    within,
)
from common.config.bench.serve import BenchServeConfig
from common.core.errors import StartError
from common.platform.threads import may_be_real_time
from deploy.cli import main as cli

IDS = list(range(100, 400))
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def gaps(times: list[float]) -> np.ndarray:
    return np.diff([0.0, *times])


# -- arrivals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0])
def test_the_last_request_leaves_at_count_over_rate(burstiness: float) -> None:
    times = arrivals(500, 4.0, burstiness=burstiness, seed=3)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(125)


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    """A Gamma distribution's coefficient of variation is 1/sqrt(shape)."""
    found = gaps(arrivals(20_000, 10.0, burstiness=burstiness, seed=1))
    assert found.mean() == pytest.approx(0.1)
    assert found.std() / found.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.06)


def test_arrivals_at_the_limits() -> None:
    assert arrivals(3, math.inf) == [0, 0, 0]
    assert arrivals(4, 2.0, burstiness=math.inf) == pytest.approx([0.5, 1, 1.5, 2])
    assert arrivals(0, 2.0) == []
    assert arrivals(50, 2.0, seed=1) == arrivals(50, 2.0, seed=1) != arrivals(50, 2.0, seed=2)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_goes_from_its_start_to_its_end(strategy: str) -> None:
    ramp = Ramp("linear" if strategy == "linear" else "exponential", 2.0, 32.0)
    found = gaps(arrivals(5, 1.0, burstiness=math.inf, ramp=ramp))
    middle = 17.0 if strategy == "linear" else 8.0
    assert 1 / found[[0, 2, 4]] == pytest.approx([2, middle, 32])


# -- workloads --------------------------------------------------------------------------------------------------------


def test_random_prompts_have_the_lengths_asked_for() -> None:
    asks = random_asks(IDS, 200, 50, 10, range_ratio=0.2, prefix_len=7, seed=5)
    assert {ask.prompt_tokens for ask in asks} == set(range(47, 68))
    assert {ask.output_tokens for ask in asks} == set(range(8, 13))
    assert all(len(ask.prompt) == ask.prompt_tokens for ask in asks)
    assert len({tuple(ask.prompt[:7]) for ask in asks}) == 1
    assert len({tuple(ask.prompt[:17]) for ask in asks}) == 200
    assert set(asks[0].prompt) <= set(IDS)
    assert asks == random_asks(IDS, 200, 50, 10, range_ratio=0.2, prefix_len=7, seed=5)


def test_prefixes_are_repeated() -> None:
    asks = prefix_repetition_asks(IDS, 25, prefix_len=30, suffix_len=20, num_prefixes=4, output_len=3, seed=1)
    counts: dict[tuple[object, ...], int] = {}
    for ask in asks:
        counts[tuple(ask.prompt[:30])] = counts.get(tuple(ask.prompt[:30]), 0) + 1
        assert (ask.prompt_tokens, ask.output_tokens) == (50, 3)
    assert sorted(counts.values()) == [6, 6, 6, 7]
    assert len({tuple(ask.prompt[30:]) for ask in asks}) == 25


def test_sharegpt(tmp_path: Path) -> None:
    def entry(*said: str) -> dict[str, object]:
        return {"id": "x", "conversations": [{"from": "human", "value": each} for each in said]}

    path = tmp_path / "share.json"
    kept = entry("a " * 10, "b " * 20, "c")
    too_short, too_long, alone = entry("a", "b " * 20), entry("a " * 1025, "b " * 20), entry("a " * 10)
    path.write_text(json.dumps([kept, too_short, too_long, alone, {"id": "none"}, "odd"]))
    found = sharegpt_asks(path, 10, lambda text: len(text.split()))
    assert found == [PlannedRequest("a " * 10, 10, 20)]
    assert sharegpt_asks(path, 10, lambda text: len(text.split()), output_len=3)[0].output_tokens == 3


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"{AZURE}\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.2299600,31,8\n")
    first, second = azure_asks(path, IDS)
    assert (first.prompt_tokens, first.output_tokens, first.at) == (4808, 10, 0)
    assert (len(second.prompt), second.output_tokens, second.at) == (31, 8, 0.25)


def test_rows_of_a_trace_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    seconds = (3, 13, 6, 2)
    path.write_text("\n".join([AZURE, *(f"2023-11-16 18:17:{at:02},{n},8" for n, at in enumerate(seconds, 1))]))
    found, _ = within(azure_asks(path, IDS), 10, None)
    assert [(ask.prompt_tokens, ask.at) for ask in found] == [(4, -1.0), (1, 0.0), (3, 3.0), (2, 10.0)]
    options = BenchServeConfig(dataset_name="azure", dataset_path=str(path))
    assert times(options, found) == [0.0, 1.0, 4.0, 11.0]


def test_lengths_that_no_model_has_are_refused_before_they_are_made_up(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for lengths in ("100000000000,8", "8,100000000000"):
        path.write_text(f"{AZURE}\n2023-11-16 18:17:03.9799600,{lengths}\n")
        with pytest.raises(StartError, match=r"line 2: .*100000000000"):
            list(azure_asks(path, IDS))
    path.write_text(json.dumps({"timestamp": 0, "input_length": 10**11, "output_length": 1}))
    with pytest.raises(StartError, match="line 1: unusable lengths, 100000000000 prompt tokens"):
        list(mooncake_asks(path, IDS))
    assert cli.main(["bench", "serve", "--random-input-len", "100000000000"]) == 1


def test_azure_of_2024(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"{AZURE}\r\n2024-05-10 00:00:00.009930+00:00,20,3\r\n2024-05-10 00:00:01+00:00,9,1")
    assert [ask.at for ask in azure_asks(path, IDS)] == pytest.approx([0, 0.99007])


def test_mooncake(tmp_path: Path) -> None:
    rows_ = [
        {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 3500, "input_length": 1030, "output_length": 6, "hash_ids": [0, 2, 3]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows_)) + "\n")
    first, second = mooncake_asks(path, IDS)
    assert (first.at, second.at) == (0, 0.5)
    assert (len(first.prompt), len(second.prompt)) == (700, 1030)
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:] != second.prompt[512:700]


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (azure_asks, "TIMESTAMP,ContextTokens\n", "GeneratedTokens"),
        (azure_asks, AZURE + "\n2023-11-16 18:17:03,x,1\n", "line 2: ContextTokens is x, not a whole number"),
        (azure_asks, AZURE + "\n2023-11-16 18:17:03\n", "line 2: ContextTokens is missing"),
        (azure_asks, AZURE + "\nyesterday,9,1\n", "line 2: TIMESTAMP is yesterday, not a date"),
        (azure_asks, AZURE + "\n2023-11-16 18:17:03,0,1\n", "0 prompt tokens"),
        (azure_asks, AZURE + '\n2023-11-16 18:17:03,"' + "9" * 140_000, "field larger than"),
        (azure_asks, AZURE + "\n2023-11-16 18:17:03,9,1\n2023-11-16 18:17:03+00:00,9,1\n", "line 3"),
        (azure_asks, "", "has no column ContextTokens, GeneratedTokens, TIMESTAMP"),
        (mooncake_asks, '{"timestamp": 0}', "line 1: 'input_length' is missing"),
        (mooncake_asks, "{", "line 1: not JSON"),
        (mooncake_asks, "[1]", "line 1"),
        (mooncake_asks, '{"timestamp": NaN, "input_length": 1, "output_length": 1}', "line 1"),
        (mooncake_asks, '{"timestamp": 0, "input_length": Infinity, "output_length": 1}', "line 1"),
        (mooncake_asks, '\n{"timestamp": 0, "input_length": -1, "output_length": 1}', "line 2"),
    ],
)
def test_files_that_do_not_parse_are_refused_in_words(read: object, text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(StartError, match=said):
        list(read(path, IDS))  # type: ignore[operator]
    with pytest.raises(StartError, match="cannot read"):
        list(read(tmp_path / "nowhere", IDS))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("read", "head", "row"),
    [
        (azure_asks, AZURE + "\n", "2023-11-16 18:17:03,9,1\n"),
        (mooncake_asks, "", '{"timestamp": 0, "input_length": 9, "output_length": 1}\n'),
    ],
)
def test_trace_reader_reads_only_requested_rows(read: object, head: str, row: str, tmp_path: Path) -> None:
    """A trace may be larger than memory. Here, a part behind the wanted rows cannot be read at all."""
    path = tmp_path / "trace"
    path.write_bytes((head + row * 5_000).encode() + b"\xff")
    assert len(within(read(path, IDS), 50, None)[0]) == 50  # type: ignore[operator]
    with pytest.raises(StartError, match="cannot read"):
        list(read(path, IDS))  # type: ignore[operator]


@pytest.mark.parametrize("text", ["{", "{}", ""])
def test_sharegpt_that_does_not_parse(text: str, tmp_path: Path) -> None:
    (tmp_path / "share").write_text(text)
    with pytest.raises(StartError, match="is no"):
        sharegpt_asks(tmp_path / "share", 1, len)


def test_within_leaves_out_too_long_requests() -> None:
    asks = [
        PlannedRequest([1] * 10, 10, 5),
        PlannedRequest([1] * 20, 20, 5),
        PlannedRequest([1], 1, 0),
        PlannedRequest([1] * 9, 9, 5),
        PlannedRequest([1], 1, 1),
    ]
    assert within(asks, 2, 15) == ([asks[0], asks[3]], 2)
    assert within(asks, 9, None)[1] == 1


def test_trace_times_start_at_first_requested_row() -> None:
    """The time before its first wanted row is not waited for."""
    asks = [PlannedRequest([1], 1, 1, at=at) for at in (30.0, 30.5, 32.0)]
    options = BenchServeConfig(dataset_name="azure", dataset_path="trace.csv", time_scale=2.0)
    assert times(options, asks) == [0.0, 1.0, 4.0]
    with pytest.raises(StartError, match="would have no effect"):
        replace(options, burstiness=2.0)
    with pytest.raises(StartError, match="would have no effect"):
        replace(options, request_rate=1.0)


def test_the_same_asks_in_other_words() -> None:
    asks = [*prefix_repetition_asks(IDS, 6, num_prefixes=2, seed=1), PlannedRequest("who is there", 3, 2)]
    other = relabelled(asks, 7)
    assert other == relabelled(asks, 7) != relabelled(asks, 8)
    assert other[-1] == replace(asks[-1], prompt="7 who is there") and relabelled(asks[-1:], 7) == other[-1:]
    for mine, theirs in zip(asks[:-1], other[:-1], strict=True):
        assert len(mine.prompt) == len(theirs.prompt) and mine.prompt[:16] != theirs.prompt[:16]
        assert (mine.prompt_tokens, mine.output_tokens, mine.at) == (
            theirs.prompt_tokens,
            theirs.output_tokens,
            theirs.at,
        )
    shared = [[a.prompt[:256] == b.prompt[:256] for a in asks[:-1]] for b in asks[:-1]]
    assert shared == [[a.prompt[:256] == b.prompt[:256] for a in other[:-1]] for b in other[:-1]]
    assert {token for ask in other[:-1] for token in ask.prompt} <= set(IDS)


# -- sending ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="there are no real-time threads of one user here")
@pytest.mark.parametrize(("cores", "few"), [(2, True), (load.FEW_CORES + 1, False)])
def test_where_cores_are_few_load_waits_for_none(cores: int, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load runs in a real-time thread, if the user may have one; after the run the thread is normal again."""
    policy = os.SCHED_RR if few and may_be_real_time() else os.SCHED_OTHER

    async def ranked(*_: Any, **__: Any) -> int:
        return os.sched_getscheduler(0)

    monkeypatch.setattr(load, "run_load", ranked)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert load.run_now(Target("", ""), [], []) == policy
    assert load.run_now(Target("", ""), [], [], at_once=False) == os.SCHED_OTHER
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


async def test_what_exists_before_a_load_is_not_collected_while_it_runs(garbage: mock.Mock) -> None:
    garbage.reset_mock()
    await load.run_load(Target("", ""), [], [])
    assert garbage.mock_calls == [mock.call.collect(), mock.call.freeze(), mock.call.unfreeze()]


# -- reading a stream -------------------------------------------------------------------------------------------------


def event(**chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def delta(**said: object) -> bytes:
    return event(choices=[{"index": 0, "delta": said, "finish_reason": None}])


def read(*pieces: tuple[float, bytes]) -> Record:
    record = Record(0.0, 3)
    events = Events(record)
    for now, data in pieces:
        events.feed(data, now)
    events.close()
    return record


USAGE = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 4})
END = event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
DONE = b"data: [DONE]\n\n"


def test_a_role_is_no_token_and_an_end_is_none() -> None:
    record = read(
        (0.1, delta(role="assistant", content="")),
        (0.5, delta(content="a")),
        (0.6, delta(content="")),  # a token with an incomplete character
        (0.8, delta(content="é")),
        (1.1, delta(content="b") + END + USAGE + DONE),
    )
    assert record.ok and record.moments == [0.5, 0.6, 0.8, 1.1]
    assert (record.ttft, record.latency, record.tpot) == (0.5, 1.1, pytest.approx(0.2))
    assert record.itls == pytest.approx([0.1, 0.2, 0.3])
    assert (record.prompt_tokens, record.output_tokens, "".join(record.said)) == (9, 4, "aéb")


def test_events_are_cut_anywhere_by_the_network() -> None:
    stream = b": keep-alive\n\n" + delta(content="a\n\nb") + delta(content="ç") + END + DONE.replace(b"\n", b"\r\n")
    record = read(*((float(at), stream[at : at + 1]) for at in range(len(stream))))
    assert record.ok and len(record.moments) == 2 and record.output_tokens == 2


def test_the_last_line_needs_no_break() -> None:
    assert read((0.5, delta(content="a") + b"data: [DONE]")).ok
    assert "incomplete" in read((0.5, delta(content="a") + b"data: [DON")).error


def test_reasoning_is_text() -> None:
    assert read((0.5, delta(reasoning_content="hm")), (0.7, delta(content="a") + DONE)).moments == [0.5, 0.7]


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (b"", "no text"),
        (delta(role="assistant") + DONE, "no text"),
        (delta(content="a"), "incomplete"),
        (delta(content="a") + event(error={"message": "worker lost"}) + DONE, "worker lost"),
    ],
)
def test_half_an_answer_is_a_failure(stream: bytes, said: str) -> None:
    assert said in read((1.0, stream)).error


def test_stages_are_kept() -> None:
    reported = {"prefill_ms": 2.0, "path": "disagg"}
    assert read((1.0, delta(content="a") + event(choices=[], tandem=reported) + DONE)).stages == reported


# -- figures ----------------------------------------------------------------------------------------------------------


def answered(sent_at: float, ttft: float, gap: float, tokens: int, **more: object) -> Record:
    moments = [sent_at + ttft + gap * index for index in range(tokens)]
    return Record(sent_at, 10, sent_at, moments, output_tokens=tokens, **more)  # type: ignore[arg-type]


RUN = Run(
    [
        answered(0.0, 0.2, 0.01, 11),
        answered(0.5, 0.4, 0.03, 21, stages={"prefill_ms": 5.0, "path": "disagg"}),
        answered(1.0, 0.6, 0.02, 1),
        Record(1.5, 10, 1.5, error="HTTP 503: full"),
    ],
    seconds=4.0,
    began_at=0.0,
)


def test_figures_of_a_run() -> None:
    summary = summarise(RUN, percents=(50, 99), objectives=parse_objectives("ttft:500 tpot:15"))
    assert (summary.completed, summary.failed) == (3, 1)
    assert (summary.input_tokens, summary.output_tokens) == (30, 33)
    assert summary.spreads["ttft"].mean == pytest.approx(400)
    assert summary.spreads["tpot"].median == pytest.approx(20), "an answer of one token has none"
    assert summary.spreads["itl"].mean == pytest.approx((10 * 10 + 20 * 30) / 30)
    assert summary.spreads["e2el"].percentiles[50] == pytest.approx(600)
    assert summary.inside == 1, "one is too slow between tokens, one too late, one was refused"
    assert summary.attainment == 0.25 and summary.goodput == 0.25
    assert summary.peak_concurrent == 2
    assert summary.peak_output_tokens == 18, "in second 1, seventeen of the second request and the one of the third"
    assert summary.paths == {"disagg": 1} and summary.stages["prefill_ms"].median == pytest.approx(5)


def test_rows_and_keys_are_those_of_vllm() -> None:
    summary = summarise(RUN, objectives=parse_objectives("ttft:500"))
    lines = rows(summary, rate=2.0, max_concurrency=8, metrics=["ttft", "tpot", "itl", "e2el", *QUEUED])
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert "Successful requests:                     3         " in lines
    assert "Request rate configured (RPS):           2.00      " in lines
    assert "Peak concurrent requests:                2.00      " in lines
    assert "---------------Time to First Token----------------" in lines
    assert "P99 TTFT (ms):                           596.00    " in lines
    assert {line.partition(":")[0] for line in lines} >= {
        "Maximum request concurrency", "Benchmark duration (s)", "Total input tokens", "Total generated tokens",
        "Request throughput (req/s)", "Request goodput (req/s)", "Output token throughput (tok/s)",
        "Peak output token throughput (tok/s)", "Peak concurrent requests", "Total token throughput (tok/s)",
        "Mean TPOT (ms)", "Median ITL (ms)", "P99 E2EL (ms)", "Median Client Queue Time (ms)",
        "Mean E2EL incl. Client Queue (ms)",
    }  # fmt: skip
    assert as_json(summary, metrics=["ttft", "e2el"]).keys() >= {
        "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
        "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
        "max_concurrent_requests", "rtfx", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms",
        "p99_e2el_ms",
    }  # fmt: skip


def test_summary_reports_client_queue_time() -> None:
    waited = answered(1.0, 0.2, 0.01, 11)
    waited.due_at = 0.6
    summary = summarise(Run([waited], 2.0, 0.0))
    found = as_json(summary, metrics=QUEUED, max_concurrency=1, rate=3.0)
    assert found["mean_client_queue_time_ms"] == pytest.approx(400)
    assert found["p99_e2el_including_client_queue_ms"] == pytest.approx(700)
    assert "p99_e2el_including_client_queue_ms" not in as_json(summary, metrics=QUEUED, max_concurrency=1)
    assert not any("queue" in key for key in as_json(summary, metrics=QUEUED))
    assert not any("queue" in key for key in as_json(summary, metrics=["ttft"], max_concurrency=1, rate=3.0))


def test_a_run_where_all_failed_has_figures() -> None:
    summary = summarise(Run([Record(0, 1, error="x")], 1.0, 0.0), objectives=parse_objectives("ttft:1"))
    assert (summary.attainment, summary.peak_concurrent, summary.spreads["ttft"].mean) == (0, 0, 0)


def test_objectives() -> None:
    assert parse_objectives("ttft:1000,tpot:2.5x") == (Objective("ttft", 1000), Objective("tpot", 2.5, relative=True))
    assert Objective("tpot", 2.5, relative=True).absolute({"tpot": 10.0}) == Objective("tpot", 25)
    assert [str(each) for each in parse_objectives("e2el:5 ttft:3x")] == ["e2el:5", "ttft:3x"]
    for wrong in ("", "itl:5", "ttft", "ttft:", "ttft:-1", "ttft:nan", "ttft:5y"):
        with pytest.raises(ValueError):
            parse_objectives(wrong)
    with pytest.raises(ValueError, match="ttft:soon: a bound must be a number greater than 0"):
        parse_objectives("ttft:soon")
