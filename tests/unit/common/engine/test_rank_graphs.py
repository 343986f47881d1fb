"""Decode steps of two tensor-parallel ranks as graphs, on devices that compute late: every rank repeats the same
graphs, and the tokens, which rank 0 samples, are those of eager steps.

gloo cannot be captured, but the graphs here are Python code that is repeated. Rank 0's device computes when the host
waits for it, the other's at once: there it waits inside the first exchange of a step, as a GPU would.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.core.ids import RequestId, pack_tokens
from common.core.request import Request, SamplingParams
from common.engine import rank_follower
from common.engine.cuda_graphs import KINDS, sizes_of
from common.engine.parallel import LeadingEngine
from common.engine.runner import ModelEngine
from common.net.messages import Abort, Generate
from tests.fakes.late_graphs import LateAttention, LateCalls, PaddedStore
from tests.fakes.stand_in_gpu import MIB
from tests.models import VOCAB
from tests.ranks import split_engine
from tests.reference import Reference
from tests.unit.common.engine.test_cuda_graphs import MAX_LEN, SHORT, after, note_of, on_late_device, running
from tests.unit.common.engine.test_cuda_graphs import together as batch_of
from tests.unit.workers import Bench

pytestmark = pytest.mark.usefixtures("one_thread", "gpus")
ROWS = 6
OPTIONS: dict[str, Any] = {
    "max_num_seqs": ROWS, "max_batched_tokens": 64, "num_kv_blocks": 24, "max_model_len": MAX_LEN,
}  # fmt: skip


@pytest.fixture
def calls() -> list[LateCalls]:
    """The devices of both ranks."""
    return [LateCalls(), LateCalls(eager=lambda: True)]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch, calls: list[LateCalls]) -> None:
    """Let other ranks attend as on the late device."""
    make_store = rank_follower.rank_store

    def rank_store(*arguments: Any) -> Any:
        store, slab = make_store(*arguments)
        return PaddedStore(store), slab

    def select(store: Any, *_: Any) -> Any:
        return SimpleNamespace(backend=LateAttention(store, calls[1]))

    monkeypatch.setattr(rank_follower, "rank_store", rank_store)
    monkeypatch.setattr(rank_follower, "select_backend", select)
    monkeypatch.setattr(rank_follower, "CudaCalls", lambda _: calls[1])


@contextmanager
def late_engine(path: Path, calls: list[LateCalls], **options: Any) -> Iterator[LeadingEngine]:
    """Yield an engine of two ranks on late devices."""
    with split_engine(path, 2, gpu=True, **(OPTIONS | options)) as engine:
        assert isinstance(engine, LeadingEngine)
        channel = engine._leader.channel
        copy_blocks = channel.copy_blocks

        def copy(copies: Any) -> None:
            calls[0].catch_up(calls[0]._queued)  # the other's copy waits for its device, which waits for this one
            copy_blocks(copies)

        channel.copy_blocks = copy  # type: ignore[method-assign]
        on_late_device(engine, calls[0])
        yield engine
        calls[0].catch_up(calls[0]._queued)


@contextmanager
def captured(path: Path, calls: list[LateCalls], **options: Any) -> Iterator[LeadingEngine]:
    with late_engine(path, calls, **options) as engine:
        engine.capture_graphs(calls[0])
        yield engine


def serve(bench: Bench, engine: ModelEngine, seed: int) -> list[Request]:
    """Serve requests that come at random times and end at different ones, some of which need more than graphs have;
    return those that were not aborted."""
    rng, kept = random.Random(seed), []
    bench.add("colocated", engine, max_num_seqs=ROWS)  # type: ignore[arg-type]
    for number in range(9):
        sampling = SamplingParams(
            rng.choice([3, 12, 24]), rng.getrandbits(63), temperature=rng.choice([0.0, 0.0, 0.9]),
            top_p=rng.choice([0.9, 1.0]), stop_token_ids=tuple(rng.sample(range(VOCAB), 8)),
            logprobs=2 if number == 4 else None,
        )  # fmt: skip
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 16, 20]))]
        request = Request(RequestId(number.to_bytes(16, "big")), pack_tokens(prompt), sampling, n=1 + (number == 2))
        bench.deliver("colocated-0", Generate(request, 1))
        for _ in range(rng.randrange(6)):
            bench.turn()
        if number == 6:
            bench.send("colocated-0", Abort(request.id, 1))
        else:
            kept.append(request)
    bench.until(lambda: bench.done(*kept))
    bench.until(bench.quiet)
    assert not bench.failed, bench.failed
    return kept


@pytest.mark.parametrize("name", ["llama", "one KV head", pytest.param("qwen3-moe", marks=pytest.mark.whole)])
def test_tokens_are_those_of_eager_steps(
    model: Callable[[str], Path], late: None, calls: list[LateCalls], name: str
) -> None:
    seed, found = len(name), []
    rng = random.Random(seed)
    calls[0].eager = lambda: rng.random() < 0.2
    for graphs in (True, False):
        with captured(model(name), calls) if graphs else split_engine(model(name), 2, gpu=True, **OPTIONS) as engine:
            with closing(Bench()) as bench:
                requests = serve(bench, engine, seed)
            found.append((requests, dict(bench.streams), dict(bench.finished)))
    assert calls[0].replays > 8 and calls[0].replayed == calls[1].replayed, "every rank repeats the same graphs"
    assert len(set(calls[0].replayed)) > 2
    (requests, streams, finished), (others, expected, ends) = found
    assert requests == others
    reference = Reference(model(name), MAX_LEN)
    for request in requests:
        for choice in range(request.n):
            key = request.id, 1, choice
            assert streams[key] == expected[key] and finished[key] == ends[key], request
            reference.check(request.prompt_tokens(), streams[key], request.sampling, choice=choice)


def test_a_step_is_launched_before_the_tokens_of_the_last_are_read(
    model: Callable[[str], Path], late: None, calls: list[LateCalls]
) -> None:
    """Its inputs reach the other rank within the graph, also when rows have changed their places."""
    with captured(model("llama"), calls) as engine:
        assert engine.launch is not None
        rows = [running(engine, number, 3 * number) for number in range(3)]
        expected = [engine.step(row).tokens[0][0] for row in rows]
        one = engine.launch(batch_of(*rows))
        two = engine.launch(after(batch_of(*rows[::-1])))
        assert one is not None and two is not None and calls[0].queue and not calls[1].replayed[2:]
        assert [tokens[0] for tokens in one.result().tokens] == expected
        later = [tokens[0] for tokens in two.result().tokens]
        for row, token in zip(rows, expected, strict=True):
            row.segments[0].sequence.append(token)
        assert later == [engine.step(after(row)).tokens[0][0] for row in rows[::-1]]


def test_a_row_that_is_not_a_number_fails_alone_on_all_ranks(
    model: Callable[[str], Path], late: None, calls: list[LateCalls]
) -> None:
    with captured(model("llama"), calls) as engine:
        assert engine.launch is not None
        first, second = running(engine, 1, 0), running(engine, 2, 3)
        engine.store.v(1)[0, 3] = torch.nan
        batch = batch_of(first, second)
        launched, behind = engine.launch(batch), engine.launch(after(batch))
        assert launched is not None and behind is not None
        assert list(launched.result().errors) == [0] and list(behind.result().errors) == [0]
        engine.store.v(1)[0, 3] = 0


def test_what_graphs_do_not_sample_runs_without_and_leaves_the_ranks_in_step(
    model: Callable[[str], Path], late: None, calls: list[LateCalls]
) -> None:
    with captured(model("llama"), calls) as engine:
        assert engine.launch is not None
        rows = [running(engine, number, 3 * number) for number in range(ROWS + 1)]
        assert engine.launch(batch_of(*rows)) is None
        expected = [tokens[0] for tokens in engine.step(batch_of(*rows)).tokens]
        launched = engine.launch(batch_of(*rows[:ROWS]))
        assert launched is not None and [tokens[0] for tokens in launched.result().tokens] == expected[:ROWS]


def test_there_is_a_note_and_each_rank_captures_all_graphs(
    model: Callable[[str], Path], late: None, calls: list[LateCalls]
) -> None:
    with captured(model("llama"), calls) as engine:
        assert "decode steps of up to 6 rows run as CUDA graphs, the same on all ranks" in note_of(engine)
        assert calls[0].captured == calls[1].captured == 1 + len(KINDS) * len(sizes_of(ROWS))


# -- what fails on one rank only --------------------------------------------------------------------------------------


def tokens_of(engine: ModelEngine, count: int) -> tuple[list[int], list[int] | None]:
    """Return the tokens of a decode step of ``count`` rows without graphs, and by graphs; None if they are not used."""
    rows = batch_of(*(running(engine, number, 3 * number) for number in range(count)))
    expected = [tokens[0] for tokens in engine.step(rows).tokens]
    launched = None if engine.launch is None else engine.launch(rows)
    return expected, None if launched is None else [tokens[0] for tokens in launched.result().tokens]


@pytest.mark.parametrize(("rank", "fine"), [(0, 2), (1, 0), (1, 8)])
def test_memory_that_is_short_on_one_rank_leaves_graphs_of_fewer_rows_on_all(
    model: Callable[[str], Path], late: None, calls: list[LateCalls], rank: int, fine: int
) -> None:
    answers = itertools.chain([""] * fine, [SHORT], itertools.repeat(""))
    calls[rank].refuses = lambda: next(answers)
    with captured(model("llama"), calls) as engine:
        assert "up to 3 rows" in note_of(engine) and "too little GPU memory" in note_of(engine)
        expected, found = tokens_of(engine, 3)
        assert found == expected
        assert tokens_of(engine, 4)[1] is None
    assert calls[0].replayed == calls[1].replayed != []


@pytest.mark.parametrize(("rank", "fine"), [(0, 0), (1, 0), (1, 5)])
def test_a_capture_that_fails_on_one_rank_leaves_all_without_graphs(
    model: Callable[[str], Path],
    late: None,
    calls: list[LateCalls],
    rank: int,
    fine: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    why = "CUDA error: operation failed due to a previous error during capture"
    answers = iter([""] * fine)
    calls[rank].refuses = lambda: next(answers, why)
    with captured(model("llama"), calls) as engine:
        words = "it is not possible on another rank" if rank else why
        assert note_of(engine).startswith("decode steps run without CUDA graphs: capture fails") and words in note_of(
            engine
        )
        assert (why in caplog.text) == bool(rank), "its own log says why"
        expected, found = tokens_of(engine, 2)
        assert len(expected) == 2 and found is None


def test_a_backend_without_graphs_on_one_rank_leaves_all_without(
    model: Callable[[str], Path], late: None, calls: list[LateCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    unusable = rank_follower.Capture._unusable_here

    def on_rank_1(capture: Any) -> str:
        return "no kernel" if threading.current_thread().name == "rank-1" else unusable(capture)

    monkeypatch.setattr(rank_follower.Capture, "_unusable_here", on_rank_1)
    with captured(model("llama"), calls) as engine:
        assert engine.launch is None and "another rank, whose log says why" in note_of(engine)
        assert not calls[0].captured and not calls[1].captured


def test_each_rank_measures_what_its_graphs_take(
    model: Callable[[str], Path], late: None, calls: list[LateCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 99 * MIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: (150 + 50 * bool(calls[1].captured)) * MIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 * MIB, 1024 * MIB))
    with late_engine(model("llama"), calls) as engine:
        channel, graphs = engine._leader.channel, len(KINDS) * len(sizes_of(ROWS))
        channel.begin_measuring()
        assert engine.measure_graphs(calls[0], lambda: 0, 7).bytes == 7 * graphs
        (use,) = channel.end_measuring()
        assert (use.graphs, use.graph_rows, use.weights) == (7 * graphs, ROWS, 99 * MIB)
        assert use.activations == 50 * MIB, "without what the graphs take"
