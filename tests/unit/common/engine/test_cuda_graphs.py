"""Decode steps as graphs, launched ahead of the tokens, on a device that computes late: the tokens are those of eager
steps, whatever comes, leaves, waits for blocks, ends early, or needs a step without a graph."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint.files import open_checkpoint
from common.core.errors import DeviceLost, InvariantBroken
from common.core.ids import BlockId, RequestId, pack_tokens
from common.core.request import Request, SamplingParams
from common.core.sequence import Batch, Segment, Sequence
from common.engine.cuda_graphs import KINDS, MAX_ROWS, UNREAD, sizes_of
from common.engine.graph_capture import GraphUse
from common.engine.loading import load_engine
from common.engine.runner import ModelEngine
from common.net.messages import Abort, Generate
from tests.fakes.late_graphs import LateAttention, LateCalls, PaddedStore
from tests.models import VOCAB
from tests.reference import Reference
from tests.unit.workers import Bench

pytestmark = pytest.mark.usefixtures("one_thread")
MAX_LEN = 128


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def load(path: Path, blocks: int = 24, **options: Any) -> ModelEngine:
    fields = {
        "dtype": "float32",
        "max_batched_tokens": 64,
        "max_num_seqs": 6,
        "batch_hint": 4,
        "max_model_len": MAX_LEN,
    }
    return load_engine(open_checkpoint(str(path)), **(fields | options))


def on_late_device(engine: ModelEngine, calls: LateCalls) -> ModelEngine:
    """Let ``engine`` attend as on the late device, on which graphs can be captured."""
    attention, engine.decoder = engine._attention, None
    attention.store = PaddedStore(engine.store)  # type: ignore[assignment]
    attention.backend = LateAttention(engine.store, calls)
    return engine


def captured(engine: ModelEngine, calls: LateCalls) -> ModelEngine:
    """Let ``engine`` run its decode steps as graphs on the late device."""
    told: list[tuple[int, int]] = []
    on_late_device(engine, calls).capture_graphs(calls, lambda done, total: told.append((done, total)))
    if engine.launch is not None:  # the last attempt has told each size; those before it ran out of memory
        last = max(at for at, (done, _) in enumerate(told) if not done)
        assert told[last:] == [(done, told[-1][1]) for done in range(told[-1][1] + 1)]
    return engine


def random_request(rng: random.Random, number: int) -> Request:
    def maybe(value: Any, default: Any, chance: float = 0.3) -> Any:
        return value if rng.random() < chance else default

    sampling = SamplingParams(
        max_tokens=rng.choice([1, 2, 20, 50]),
        seed=rng.getrandbits(63),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
        top_k=maybe(rng.choice([1, 20, VOCAB]), 0),
        top_p=maybe(rng.choice([0.5, 0.95]), 1.0),
        min_p=maybe(0.02, 0.0),
        repetition_penalty=maybe(1.2, 1.0, 0.04),
        frequency_penalty=maybe(0.4, 0.0, 0.04),
        logit_bias=maybe({7: 3.0, 9: -100.0}, {}, 0.04),
        min_tokens=maybe(5, 0, 0.1),
        stop_token_ids=tuple(rng.sample(range(VOCAB), 8)),
        logprobs=maybe(2, None, 0.06),
    )
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 16, 40]))]
    return Request(RequestId(number.to_bytes(16, "big")), pack_tokens(prompt), sampling, n=rng.choice([1, 1, 1, 2]))


def serve(bench: Bench, engine: ModelEngine, seed: int, count: int) -> list[Request]:
    """Serve random requests that come at random times, some of which are aborted, and then a long one alone, whose
    steps are launched whenever the others came; return those that were not aborted."""
    rng = random.Random(seed)
    bench.add("colocated", engine, max_num_seqs=6)  # type: ignore[arg-type]
    kept = []
    for number in range(1, count + 1):
        request = random_request(rng, number)
        bench.deliver("colocated-0", Generate(request, 1))
        for _ in range(rng.randrange(8)):
            bench.turn()
        if rng.random() < 0.2:
            bench.send("colocated-0", Abort(request.id, 1))
        else:
            kept.append(request)
    bench.until(lambda: bench.done(*kept))
    kept.append(Request(RequestId(bytes(16)), pack_tokens([1, 2, 3]), SamplingParams(50, seed, temperature=0.0)))
    bench.send("colocated-0", Generate(kept[-1], 1))
    bench.until(lambda: bench.done(*kept))
    bench.until(bench.quiet)
    assert not bench.failed, bench.failed
    return kept


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral"])
def test_tokens_are_those_of_eager_steps(bench: Bench, checkpoint: Callable[[str], Path], kind: str) -> None:
    seed = len(kind)
    rng = random.Random(seed)
    calls = LateCalls(eager=lambda: rng.random() < 0.2)
    requests = serve(bench, captured(load(checkpoint(kind)), calls), seed, 16)
    assert calls.replays > 8
    other = Bench()
    assert serve(other, load(checkpoint(kind)), seed, 16) == requests
    reference = Reference(checkpoint(kind), MAX_LEN)
    try:
        for request in requests:
            for choice in range(request.n):
                key = request.id, 1, choice
                assert bench.streams[key] == other.streams[key], request
                assert bench.finished[key] == other.finished[key]
                reference.check(request.prompt_tokens(), bench.streams[key], request.sampling, choice=choice)
    finally:
        other.close()


# -- single steps -----------------------------------------------------------------------------------------------------


@pytest.fixture
def calls() -> LateCalls:
    return LateCalls()


@pytest.fixture
def engine(checkpoint: Callable[[str], Path], calls: LateCalls) -> Iterator[ModelEngine]:
    made = captured(load(checkpoint("llama")), calls)
    yield made
    made.close()


def running(engine: ModelEngine, number: int, blocks: int, sampling: SamplingParams | None = None) -> Batch:
    """Return a decode step of a sequence whose prompt has been computed."""
    prompt = [(7 * number + 5 * at) % VOCAB for at in range(20)]
    request = Request(RequestId(number.to_bytes(16, "big")), pack_tokens(prompt), sampling or SamplingParams(50, 1))
    sequence, table = Sequence(request, 1), [BlockId(blocks), BlockId(blocks + 1), BlockId(blocks + 2)]
    result = engine.step(Batch((Segment(sequence, 0, 20),), (table,)))
    sequence.computed = 20
    sequence.append(result.tokens[0][0])
    return Batch((Segment(sequence, 20, 1),), (table,))


def together(*batches: Batch) -> Batch:
    return Batch(sum((b.segments for b in batches), ()), sum((b.tables for b in batches), ()))


def after(batch: Batch) -> Batch:
    """Return the step behind ``batch``."""
    return Batch(tuple(Segment(s.sequence, s.end, 1) for s in batch.segments), batch.tables)


def test_nothing_is_computed_until_it_is_needed(engine: ModelEngine, calls: LateCalls) -> None:
    """Two steps are launched before the first is read, and rows may change their places between them."""
    assert engine.launch is not None
    first = together(*(running(engine, number, 3 * number) for number in range(3)))
    batch = after(together(*(Batch((s,), (t,)) for s, t in zip(first.segments[::-1], first.tables[::-1], strict=True))))
    expected = [engine.step(Batch((s,), (t,))).tokens[0][0] for s, t in zip(first.segments, first.tables, strict=True)]
    one = engine.launch(first)
    two = engine.launch(batch)
    assert one is not None and two is not None and calls.replays == 2 and calls.queue
    assert [tokens[0] for tokens in one.result().tokens] == expected
    for segment, token in zip(first.segments, expected, strict=True):
        segment.sequence.append(token)
    later = [tokens[0] for tokens in two.result().tokens]
    assert not calls.queue
    assert later == [
        engine.step(Batch((s,), (t,))).tokens[0][0] for s, t in zip(batch.segments, batch.tables, strict=True)
    ]


def test_no_more_than_two_steps_are_unread(engine: ModelEngine) -> None:
    assert engine.launch is not None
    batch = running(engine, 1, 0)
    for _ in range(UNREAD):
        assert engine.launch(batch) is not None
        batch = after(batch)
    with pytest.raises(InvariantBroken, match="none of them is read"):
        engine.launch(batch)


def test_an_input_that_no_step_samples_is_a_broken_invariant(engine: ModelEngine) -> None:
    assert engine.launch is not None
    with pytest.raises(InvariantBroken, match="continues with"):
        engine.launch(after(running(engine, 1, 0)))


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": 0}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"logit_bias": {1: 2.0}},
        {"min_tokens": 3}, {"grammar": "start: /a+/"},
    ],
)  # fmt: skip
def test_rows_that_graphs_do_not_sample_run_without(engine: ModelEngine, change: dict[str, Any]) -> None:
    assert engine.launch is not None
    plain, other = running(engine, 1, 0), running(engine, 2, 3, SamplingParams(50, 1, **change))
    assert engine.launch(together(plain, other)) is None
    assert engine.launch(plain) is not None


def test_prompts_and_too_many_rows_run_without(engine: ModelEngine) -> None:
    assert engine.launch is not None
    row = running(engine, 1, 0)
    prompt = Sequence(Request(RequestId(bytes(16)), pack_tokens([1, 2, 3]), SamplingParams(5, 1)), 1)
    for batch in (
        Batch((), ()),
        together(row, Batch((Segment(prompt, 0, 3),), ([BlockId(9)],))),
        Batch((Segment(prompt, 0, 1),), ([BlockId(9)],)),
        together(*[row] * 7),
    ):
        assert engine.launch(batch) is None
    several = Sequence(Request(RequestId(bytes(16)), pack_tokens([1]), SamplingParams(5, 1), n=2), 1)
    assert engine.launch(Batch((Segment(several, 0, 1),), ([BlockId(9)],))) is None


def test_a_row_that_is_not_a_number_fails_alone_and_its_next_input_is_an_id(engine: ModelEngine) -> None:
    assert engine.launch is not None
    first, second = running(engine, 1, 0), running(engine, 2, 3)
    engine.store.v(1)[0, 3] = torch.nan
    batch = together(first, second)
    launched, behind = engine.launch(batch), engine.launch(after(batch))
    assert launched is not None and behind is not None
    result = launched.result()
    assert list(result.errors) == [0] and "not finite" in result.errors[0]
    assert result.tokens[0] == [] and len(result.tokens[1]) == 1
    assert list(behind.result().errors) == [0]
    engine.store.v(1)[0, 3] = 0


def test_padding_writes_nothing(engine: ModelEngine) -> None:
    assert engine.launch is not None
    batch = together(*(running(engine, number + 1, 3 * number) for number in range(3)))
    before = engine.store.k(0).clone()
    launched = engine.launch(batch)
    assert launched is not None
    launched.result()
    changed = (engine.store.k(0) != before).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert changed == [1, 4, 7], "the second block of each sequence holds position 20"


def test_one_graph_per_size_and_kind_and_a_note(engine: ModelEngine, calls: LateCalls) -> None:
    assert calls.captured == 1 + len(KINDS) * len(sizes_of(6)), "the trial, and each size and kind"
    assert any("CUDA graphs" in note and "6 rows" in note for note in engine.notes)


def test_a_model_that_cannot_be_captured_runs_eagerly_and_says_why(
    checkpoint: Callable[[str], Path], calls: LateCalls
) -> None:
    calls.refuses = lambda: "CUDA error: operation not permitted when stream is capturing\nmore words"
    engine = captured(load(checkpoint("mixtral")), calls)
    assert engine.launch is None
    (note,) = [note for note in engine.notes if "CUDA graphs" in note]
    assert note.endswith("capture fails: CUDA error: operation not permitted when stream is capturing")
    engine.close()


@pytest.mark.parametrize("fine", [1, 2, 8])
def test_without_a_capture_of_many_rows_steps_run_eagerly_and_say_why(
    checkpoint: Callable[[str], Path], calls: LateCalls, fine: int
) -> None:
    """The trial, of the smallest step, succeeds: for more rows a library may choose a kernel that waits."""
    answers = iter([""] * fine)
    calls.refuses = lambda: next(answers, "CUDA error: operation not permitted when stream is capturing\nmore words")
    engine = captured(load(checkpoint("llama")), calls)
    assert engine.launch is None
    assert note_of(engine).endswith("capture fails: CUDA error: operation not permitted when stream is capturing")
    engine.close()


def test_graphs_that_cannot_be_captured_take_no_memory(checkpoint: Callable[[str], Path], calls: LateCalls) -> None:
    engine = on_late_device(load(checkpoint("llama")), calls)
    answers = iter([""] * (1 + len(KINDS)))
    calls.refuses = lambda: next(answers, "CUDA error: operation not permitted when stream is capturing")
    assert engine.measure_graphs(calls, lambda: 0, 7) == GraphUse()
    engine.close()


def note_of(engine: ModelEngine) -> str:
    (note,) = [note for note in engine.notes if "CUDA graphs" in note]
    return note


SHORT = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"


@pytest.mark.parametrize("fine", [0, 2, 8])
def test_graphs_for_which_memory_is_short_leave_those_of_fewer_rows(
    checkpoint: Callable[[str], Path], calls: LateCalls, fine: int
) -> None:
    """Memory is short once, after ``fine`` captures."""
    answers = iter([""] * fine + [SHORT])
    calls.refuses = lambda: next(answers, "")
    engine = captured(load(checkpoint("llama")), calls)
    assert "up to 3 rows" in note_of(engine) and "for larger ones there is too little GPU memory" in note_of(engine)
    assert engine.launch is not None
    rows = [running(engine, number, 3 * number) for number in range(4)]
    assert engine.launch(together(*rows)) is None
    launched = engine.launch(together(*rows[:3]))
    assert launched is not None
    expected = [engine.step(row).tokens for row in rows[:3]]
    assert [[tokens] for tokens in launched.result().tokens] == expected
    engine.close()


def test_without_memory_for_any_graph_steps_run_eagerly_and_say_why(
    checkpoint: Callable[[str], Path], calls: LateCalls
) -> None:
    calls.refuses = lambda: SHORT
    engine = captured(load(checkpoint("llama")), calls)
    assert engine.launch is None and note_of(engine).startswith("decode steps run without CUDA graphs: too little GPU")
    assert "--gpu-memory-utilization" in note_of(engine)
    engine.close()


def test_a_device_that_is_lost_while_graphs_are_captured_is_reported(
    checkpoint: Callable[[str], Path], calls: LateCalls
) -> None:
    answers = iter(["", "", "CUDA error: an illegal memory access was encountered"])
    calls.refuses = lambda: next(answers, "")
    engine = load(checkpoint("llama"))
    with pytest.raises(DeviceLost, match="illegal memory access"):
        captured(engine, calls)
    engine.close()


def test_the_memory_of_all_graphs_follows_from_the_two_largest_sizes(
    checkpoint: Callable[[str], Path], calls: LateCalls
) -> None:
    engine = load(checkpoint("llama"))
    assert engine.measure_graphs(calls, lambda: 0, 7) == GraphUse(), "this backend has no graphs"
    on_late_device(engine, calls)
    after_one, after_two = 1 + len(KINDS), 1 + 2 * len(KINDS)

    def taken() -> int:
        return 1000 + 500 * (calls.captured >= after_one) + 20 * (calls.captured >= after_two)

    assert engine.measure_graphs(calls, taken, 0) == GraphUse(500 + 20 * (len(sizes_of(6)) - 1), 6)
    assert calls.captured == after_two and engine.launch is None
    assert engine.measure_graphs(calls, lambda: 0, 7) == GraphUse(7 * len(KINDS) * len(sizes_of(6)), 6)
    engine.max_num_seqs = 1
    assert engine.measure_graphs(calls, lambda: 0, 7) == GraphUse(7 * len(KINDS), 1)
    engine.close()


def test_experts_are_computed_in_the_way_that_can_be_captured(
    checkpoint: Callable[[str], Path], calls: LateCalls
) -> None:
    engine = load(checkpoint("mixtral"))
    config = engine.model.config
    calls.refuses = lambda: "" if config._experts_implementation == "batched_mm" else "no kernel"
    captured(engine, calls)
    assert engine.launch is not None and config._experts_implementation == "batched_mm"
    engine.close()


def test_sizes() -> None:
    assert sizes_of(1) == [1] and sizes_of(6) == [1, 2, 4, 6] and sizes_of(64)[-2:] == [56, 64]
    most = sizes_of(10**6)
    assert most[-1] == MAX_ROWS and len(most) < 40
    assert all(after / before <= 7 / 6 for before, after in itertools.pairwise(most) if before >= 48)
