"""Steps launched before the last one is read: the tokens are those of a loop that waits, and no block is reused early.

The engine's next token depends on all KV bytes of a sequence, and it computes launched steps late, so a block that goes
to a hand-off while a launched step may still write it changes a token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from common.core.errors import InvariantBroken
from common.core.ids import RequestId, pack_tokens
from common.core.request import FinishReason, Request, SamplingParams
from common.core.sequence import Batch, Sequence, StepResult
from common.engine.launched import LaunchedBlocks
from common.engine.scheduler import Planner
from common.kv.cache import KvCache
from common.net.messages import Abort, Generate
from decode.role import DecodeWorker
from tests.fakes.oracle import VOCABULARY, OracleEngine, oracle_stream
from tests.fakes.overlapped import OverlappedOracle
from tests.property.test_scheduler import adopt, simple
from tests.unit.workers import Bench, make_request


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def stopping(number: int, prompt: int, output: int, n: int = 1, logprobs: int | None = None) -> Request:
    """Return a request that ends by a stop token after some tokens, or after ``output``."""
    rng = random.Random(number)
    sampling = SamplingParams(
        output, number, stop_token_ids=tuple(rng.sample(range(VOCABULARY), 40)), logprobs=logprobs
    )
    tokens = rng.choices(range(VOCABULARY), k=prompt)
    return Request(RequestId(number.to_bytes(16, "big")), pack_tokens(tokens), sampling, n=n)


def expected(request: Request, choice: int) -> list[int]:
    sampling = request.sampling
    stream = oracle_stream(request.prompt_tokens(), sampling.seed, choice, sampling.max_tokens)
    ends = [at for at, token in enumerate(stream) if token in sampling.stop_token_ids]
    return stream[: ends[0] + 1] if ends else stream


def check(bench: Bench, request: Request) -> None:
    for choice in range(request.n):
        stream = bench.streams[request.id, 1, choice]
        assert stream == expected(request, choice)
        stopped = stream[-1] in request.sampling.stop_token_ids
        assert bench.finished[request.id, 1, choice] is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def play(bench: Bench, engine: OverlappedOracle, seed: int, requests: int = 16) -> None:
    """Serve requests that arrive, end, are aborted and wait for blocks at random, half of them through hand-offs."""
    rng = random.Random(seed)
    decode = bench.add("decode", engine, max_num_seqs=6)
    bench.add("prefill", OracleEngine(64))
    served, aborted = [], []
    for number in range(1, requests + 1):
        shape = rng.choice([1, 5, 17, 40]), rng.choice([1, 3, 20, 60])
        request = stopping(1000 * seed + number, *shape, rng.choice([1, 1, 1, 3]), rng.choice([None] * 5 + [1]))
        if rng.random() < 0.5:
            bench.place(request, "prefill-1", "decode-0")
        else:
            bench.send("decode-0", Generate(request, 1))
        (aborted if rng.random() < 0.2 else served).append(request)
        for _ in range(rng.randrange(8)):
            bench.turn()
        for each in aborted:
            for worker in ("decode-0", "prefill-1"):
                bench.send(worker, Abort(each.id, 1))
    bench.until(lambda: bench.done(*served))
    identity = RequestId((1000 * seed + requests + 1).to_bytes(16, "big"))
    alone = Request(identity, pack_tokens([1, 2, 3]), SamplingParams(60, seed))
    bench.send("decode-0", Generate(alone, 1))  # most of its steps are launched, whenever the others came
    served.append(alone)
    bench.until(lambda: bench.done(alone))
    for request in served:  # as the coordinator does: decode waits for a prompt that has ended by its first token
        bench.send("decode-0", Abort(request.id, 1))
    bench.until(bench.quiet)
    for request in served:
        check(bench, request)
    assert not bench.failed, bench.failed
    bench.until(lambda: decode._overlap._flight is None)  # type: ignore[union-attr]
    assert engine.launched > 10


@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_right_whatever_comes_and_goes_meanwhile(bench: Bench, seed: int) -> None:
    rng = random.Random(seed)
    play(bench, OverlappedOracle(20, eager=lambda: rng.random() < 0.3), seed)


def test_blocks_that_are_returned_at_once_are_caught(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is needed: without it a hand-off lands in blocks that a launched step still writes."""
    monkeypatch.setattr(LaunchedBlocks, "release", lambda self, table: self._cache.close(table))
    wrong = 0
    for seed in range(6):
        try:
            play(bench, OverlappedOracle(20), seed)
        except AssertionError:
            wrong += 1
    assert wrong


def test_a_step_is_launched_before_the_last_one_is_read(bench: Bench) -> None:
    engine = OverlappedOracle(64)
    worker = bench.add("decode", engine)
    assert isinstance(worker, DecodeWorker)
    bench.send("decode-0", Generate(request := make_request(20, 30), 1))
    bench.until(lambda: engine.launched == 1)
    (sequence,) = worker.planner.sequences()
    assert sequence.output_length == 1, "that of the prompt, which was waited for"
    for launched in range(2, 30):
        bench.turn()
        assert engine.launched == launched and len(engine.queue) == 1
    bench.turn()
    assert engine.launched == 29, "the last token ends the request, and this is known before it is sampled"
    bench.until(lambda: bench.done(request))
    bench.check(request)


def test_overlapped_step_discards_row_after_late_stop(bench: Bench) -> None:
    engine = OverlappedOracle(64)
    worker = bench.add("decode", engine)
    stream = oracle_stream(list(range(20)), 7, 0, 40)
    request = Request(
        RequestId(b"one that stops.."), pack_tokens(range(20)), SamplingParams(40, 7, stop_token_ids=(stream[9],))
    )
    first = stream.index(stream[9])
    bench.send("decode-0", Generate(request, 1))
    bench.until(worker.holdings)
    while worker.holdings():
        worker.turn()
    assert engine.launched == first + 1, "a row behind the last one"
    assert worker.cache.pool.counts.held > 0, "its blocks wait for that row"
    worker.turn()
    assert worker.cache.pool.counts.held == 0 and not engine.queue
    bench.until(lambda: bench.done(request))
    assert bench.streams[request.id, 1, 0] == stream[: first + 1]


def test_leaving_worker_settles_launched_steps(bench: Bench) -> None:
    engine = OverlappedOracle(64)
    worker = bench.add("decode", engine)
    bench.send("decode-0", Generate(make_request(20, 30), 1))
    bench.until(lambda: engine.launched == 3)
    worker.requests.drop_all()
    assert worker.cache.pool.counts.held > 0 and worker.cache.leaks() == {}
    worker._overlap.settle()  # type: ignore[union-attr]
    assert worker.cache.pool.counts.held == 0 and not engine.queue


def test_a_prefill_worker_waits_for_each_step(bench: Bench) -> None:
    engine = OverlappedOracle(64)
    bench.add("decode", OracleEngine(64))
    bench.add("prefill", engine)
    bench.place(request := make_request(20, 3), "prefill-1", "decode-0")
    bench.until(lambda: bench.done(request))
    assert engine.launched == 0 and engine.steps > 0
    bench.check(request)


# -- the planner's part -----------------------------------------------------------------------------------------------


@pytest.fixture
def planner() -> Planner:
    cache = KvCache(12, 16, model_fingerprint="m", kv_dtype="float32", prefix_caching=False)
    return Planner(cache, max_tokens=64, max_sequences=4)


def started(planner: Planner, *requests: Request) -> Batch:
    """Compute the prompts of ``requests`` and return the plan of their first decode step."""
    for request in requests:
        planner.add(Sequence(request, 1))
    batch = planner.plan()
    assert batch is not None
    tokens = [[1] for _ in batch.segments]
    for sample in planner.complete(batch, StepResult(tokens, [[] for _ in tokens], 0.0)):
        sample.sequence.append(1)
    batch = planner.plan()
    assert batch is not None
    return batch


def rows(batch: Batch | None) -> list[tuple[int, int]]:
    """Return the number of each segment's request, and the position at which it starts."""
    assert batch is not None
    return [(int.from_bytes(s.sequence.request.id, "big"), s.start) for s in batch.segments]


@pytest.mark.parametrize(
    "why", ["a prompt waits", "a prompt is computed", "blocks are short", "each has its last token in flight"]
)
def test_planner_plans_nothing_ahead_that_needs_sampled_tokens(planner: Planner, why: str) -> None:
    output = 2 if why.startswith("each") else 40
    prompt = 15 if why.startswith("blocks") else 8
    batch = started(planner, *(stopping(number, prompt, output) for number in (1, 2)))
    assert why.startswith("each") or rows(planner.plan_ahead(batch)) == [(1, prompt + 1), (2, prompt + 1)]
    if why.startswith("a prompt"):
        planner.add(Sequence(stopping(3, 100, 5), 1))
        if why.endswith("computed"):
            assert planner.plan() is not None and planner.waiting == 0
    elif why.startswith("blocks"):
        planner.cache.pool.take(planner.cache.pool.available, "someone")  # type: ignore[arg-type]
        batch = Batch(tuple(type(s)(s.sequence, s.start + 16, 1) for s in batch.segments), batch.tables)
    running = planner.running
    assert planner.plan_ahead(batch) is None
    assert (planner.running, planner.preemptions) == (running, 0), "no sequence is parked: its blocks are in use"


def test_plan_ahead_handles_sequences_that_left_or_joined(planner: Planner) -> None:
    batch = started(planner, *(stopping(number, 8, 40) for number in (1, 2)))
    planner.finish(batch.segments[0].sequence)
    adopt(planner, simple(8, 40, index=1))
    ahead = planner.plan_ahead(batch)
    assert ahead is not None and [(s.start, s.wants_token) for s in ahead.segments] == [(9, False), (8, True)]


def test_blocks_wait_for_the_steps_launched_before(planner: Planner) -> None:
    cache = planner.cache
    held: Callable[[], int] = lambda: cache.pool.counts.held  # noqa: E731
    blocks = LaunchedBlocks(cache)
    planner.release = blocks.release
    batch = started(planner, *(stopping(number, 8, 40) for number in (1, 2, 3)))
    first, second, third = (segment.sequence for segment in batch.segments)
    planner.finish(third)
    assert held() == 2, "no step is launched"
    blocks.launched()
    planner.finish(first)
    blocks.launched()
    planner.finish(second)
    assert held() == 2 and cache.leaks() == {}
    blocks.read()
    assert held() == 1
    blocks.read()
    assert held() == 0
    with pytest.raises(InvariantBroken):
        blocks.read()
