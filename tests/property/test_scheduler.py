"""The planner with a fake engine: it keeps budgets, starves no sequence, returns blocks and produces the right tokens.

The fake engine remembers which tokens each block holds, and refuses to compute on anything but the sequence's own past.
The next token is a function of all tokens before it. So a sequence that resumes after preemption with a stale or
missing block, or at a wrong position, produces another output than :func:`expected_output`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from common.core.errors import InvariantBroken, OutOfBlocks
from common.core.ids import CACHE, BlockId, Holder, RequestId, pack_tokens, sequence_holder
from common.core.request import FinishReason, Request, SamplingParams
from common.core.sequence import Batch, Sequence, StepResult
from common.engine.scheduler import Planner
from common.kv.cache import BlockCopy, KvCache

BLOCK_SIZE = 16
VOCABULARY = 50


def next_token(tokens: tuple[int, ...], choice: int) -> int:
    digest = hashlib.blake2b(pack_tokens([choice, *tokens]), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def expected_output(request: Request, choice: int) -> list[int]:
    tokens = tuple(request.prompt_tokens())
    output: list[int] = []
    while len(output) < request.sampling.max_tokens:
        output.append(next_token(tokens, choice))
        tokens += (output[-1],)
    return output


@dataclass
class FakeEngine:
    """Computes batches over ``contents``: for each block, all tokens of its sequence up to the last one in the
    block."""

    cache: KvCache
    contents: dict[BlockId, tuple[int, ...]] = field(default_factory=dict)

    def write(self, sequence: Sequence, blocks: list[BlockId], start: int, end: int) -> None:
        """Write the KV of tokens ``[start, end)``, after checking the KV that must already be there."""
        for index in range(-(-end // BLOCK_SIZE)):
            first, last = index * BLOCK_SIZE, min(end, (index + 1) * BLOCK_SIZE)
            if first < start:
                past = min(start, last)
                known = self.contents.get(blocks[index], ())
                assert known[:past] == tuple(sequence.tokens[:past]), f"{sequence} finds someone else's KV"
            if last > start:
                others = self.cache.pool.holders(blocks[index]) - {CACHE, sequence_holder(sequence.id)}
                assert not others, f"{sequence} writes into a block of {others}"
                self.contents[blocks[index]] = tuple(sequence.tokens[:last])

    def run(self, batch: Batch) -> StepResult:
        tokens: list[list[int]] = []
        for segment, blocks in zip(batch.segments, batch.tables, strict=True):
            sequence = segment.sequence
            assert segment.start == sequence.computed
            self.write(sequence, list(blocks), segment.start, segment.end)
            context = tuple(sequence.tokens[: segment.end])
            tokens.append([next_token(context, c) for c in sequence.choices] if segment.wants_token else [])
        return StepResult(tokens, [[] for _ in tokens], 0.0)

    def copy(self, copies: list[BlockCopy]) -> None:
        for copy in copies:
            self.contents[copy.target] = self.contents[copy.source]


@dataclass(frozen=True)
class Plan:
    """One request of a scenario and its events."""

    arrives: int
    steps: tuple[int, ...]  # kinds of 16-token runs, so that prompts share prefixes
    tail: int
    max_tokens: int
    n: int
    priority: int
    aborted_at: int | None
    fate: str  # "run" from its prompt, "adopt" computed KV, or "detach" after its first token
    forces: int = 0  # tokens that follow each sampled one at once, as a grammar forces them


plans = st.builds(
    Plan,
    arrives=st.integers(0, 30),
    steps=st.lists(st.integers(0, 1), max_size=4).map(tuple),
    tail=st.integers(1, 16),
    max_tokens=st.integers(1, 40),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    priority=st.integers(-1, 1),
    aborted_at=st.one_of(st.none(), st.none(), st.integers(0, 60)),
    fate=st.sampled_from(["run", "run", "adopt", "detach"]),
    forces=st.sampled_from([0, 0, 1, 20]),
)


def to_request(index: int, plan: Plan) -> Request:
    prompt = [token for kind in plan.steps for token in [kind] * 16] + [40 + index % 5] * plan.tail
    return Request(
        RequestId(index.to_bytes(16, "little")),
        pack_tokens(prompt),
        SamplingParams(max_tokens=plan.max_tokens, seed=0, ignore_eos=True),
        n=1 if plan.fate == "adopt" else plan.n,
        priority=plan.priority,
    )


class Scenario:
    """Drives a planner the way a worker does, and checks every step."""

    def __init__(self, cache: KvCache, planner: Planner, requests: list[tuple[Plan, Request]]) -> None:
        self.cache, self.planner, self.requests = cache, planner, requests
        self.engine = FakeEngine(cache)
        self.finished: dict[tuple[int, int], list[int]] = {}
        self.detached: dict[int, list[int]] = {}
        self.aborted: set[int] = set()
        self.overtaken: dict[Sequence, list[Sequence]] = {}
        self.step = 0

    def index(self, sequence: Sequence) -> int:
        return int.from_bytes(sequence.request.id, "little")

    def run(self) -> None:
        work = sum(len(r.prompt) // 4 + r.n * r.sampling.max_tokens for _, r in self.requests)
        while self.planner or any(plan.arrives >= self.step for plan, _ in self.requests):
            self.arrivals_and_aborts()
            if self.planner:
                self.one_step()
            self.step += 1
            assert self.step < 100 + 10 * work, "a sequence starves"

    def arrivals_and_aborts(self) -> None:
        for index, (plan, request) in enumerate(self.requests):
            if plan.arrives == self.step:
                self.arrive(plan, request)
            if plan.aborted_at is not None and plan.aborted_at == self.step:
                for sequence in [s for s in self.planner.sequences() if self.index(s) == index]:
                    self.planner.finish(sequence)
                    self.aborted.add(index)

    def arrive(self, plan: Plan, request: Request) -> None:
        sequence = Sequence(request, attempt=1)
        if plan.fate != "adopt":
            self.planner.add(sequence)
            return
        table = self.cache.open(sequence_holder(sequence.id), sequence.tokens, request.cache_salt)
        try:
            self.cache.grow(table, len(sequence.tokens))
        except OutOfBlocks:
            self.cache.close(table)
            self.planner.add(sequence)
            return
        self.engine.write(sequence, table.blocks, table.cached_tokens, len(sequence.tokens))
        sequence.computed = len(sequence.tokens)
        self.cache.publish(table, sequence.tokens, sequence.computed)
        sequence.append(next_token(tuple(sequence.tokens), 0))
        if sequence.finish:
            self.finished[self.index(sequence), 0] = sequence.output
            self.cache.close(table)
        else:
            self.planner.adopt(sequence, table)

    def one_step(self) -> None:
        batch = self.planner.plan()
        assert batch is not None, "there is work, and no other sequence holds blocks, but nothing is planned"
        assert 0 < batch.length <= self.planner.max_tokens, "token budget"
        assert len(batch.segments) <= self.planner.max_sequences, "sequence limit"
        classes = len({plan.priority for plan, _ in self.requests})
        most = self.planner.max_sequences * classes + self.uninvited()
        assert self.planner.running <= most, "admitted beyond the limit"
        ids = [segment.sequence.id for segment in batch.segments]
        assert len(set(ids)) == len(ids), "a sequence is in the batch twice"
        assert all(segment.length > 0 for segment in batch.segments)
        self.check_turns([segment.sequence for segment in batch.segments])
        result = self.engine.run(batch)
        for sampled in self.planner.complete(batch, result):
            self.take(sampled.sequence, sampled.tokens)
        assert self.cache.leaks() == {}

    def check_turns(self, served: list[Sequence]) -> None:
        """Check that a sequence with blocks and one missing token waits for at most one turn of each of its
        priority."""
        ready = {s for s in self.planner.sequences() if s.streams and sequence_holder(s.id) in self.cache.tables}
        self.overtaken = {each: self.overtaken.get(each, []) for each in ready.difference(served)}
        for waiting, before in self.overtaken.items():
            equals = [each for each in served if each.request.priority == waiting.request.priority]
            assert not set(equals).intersection(before), f"{waiting} waits while others have two turns"
            before += [each for each in equals if each.streams]

    def uninvited(self) -> int:
        """Count the sequences that may run without being admitted: forked from an admitted one, or adopted with their
        KV."""
        return sum(request.n - (plan.fate != "adopt") for plan, request in self.requests)

    def take(self, sequence: Sequence, tokens: list[int]) -> None:
        plan = self.requests[self.index(sequence)][0]
        if plan.fate == "detach" and not sequence.output_length:
            self.detached[self.index(sequence)] = tokens
            holder = Holder(f"xfer:{sequence.id.transfer}")
            table = self.planner.detach(sequence, holder)
            assert self.cache.pool.held_by(holder) == len(table.blocks) >= 1
            self.cache.close(table)
            return
        if sequence.siblings:
            started = self.planner.start(sequence, tokens, [None] * len(tokens))
            self.engine.copy(started.copies)
            ended = started.sequences
        else:
            sequence.append(tokens[0])
            ended = [sequence]
        for each in ended:
            for _ in range(plan.forces):
                if each.finish is FinishReason.RUNNING:
                    each.force(next_token(tuple(each.tokens), each.choice))
            if each.finish is not FinishReason.RUNNING:
                self.finished[self.index(each), each.choice] = each.output
                self.planner.finish(each)

    def check(self) -> None:
        for index, (plan, request) in enumerate(self.requests):
            for choice in range(request.n):
                expected = expected_output(request, choice)
                if index in self.detached:
                    assert self.detached[index][choice] == expected[0]
                elif index not in self.aborted:
                    assert self.finished[index, choice] == expected, f"{plan}, choice {choice}"
        assert not self.cache.tables
        counts = self.cache.pool.counts
        assert counts.held == 0
        assert counts.free + counts.cached == counts.total
        assert (self.planner.running, self.planner.waiting, self.planner.waiting_tokens) == (0, 0, 0)


@settings(max_examples=120, deadline=None)
@given(
    requests=st.lists(plans, min_size=1, max_size=10),
    spare_blocks=st.sampled_from([0, 0, 1, 2, 4, 12]),
    max_sequences=st.integers(1, 6),
    extra_tokens=st.integers(0, 60),
    caching=st.booleans(),
)
def test_budgets_progress_and_tokens(
    requests: list[Plan], spare_blocks: int, max_sequences: int, extra_tokens: int, caching: bool
) -> None:
    made = [(plan, to_request(index, plan)) for index, plan in enumerate(requests)]
    # the longest request fits into the pool alone: every worker checks that before it accepts one
    longest = max(request.prompt_length + request.sampling.max_tokens for _, request in made)
    blocks = -(-longest // BLOCK_SIZE) + spare_blocks
    cache = KvCache(blocks, BLOCK_SIZE, model_fingerprint="m", kv_dtype="float32", prefix_caching=caching)
    planner = Planner(cache, max_tokens=max_sequences + extra_tokens, max_sequences=max_sequences)
    scenario = Scenario(cache, planner, made)
    scenario.run()
    scenario.check()
    event(f"preempted: {planner.preemptions > 0}")


def simple(
    prompt: int, max_tokens: int, index: int = 0, n: int = 1, priority: int = 0, emitted: Collection[int] = ()
) -> Sequence:
    request = Request(
        RequestId(index.to_bytes(16, "little")),
        pack_tokens(range(100 * index, 100 * index + prompt)),
        SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True),
        n=n,
        emitted=(pack_tokens(emitted),) if emitted else (),
        priority=priority,
    )
    return Sequence(request, attempt=1)


def small(blocks: int, max_tokens: int = 64, max_sequences: int = 4) -> Planner:
    cache = KvCache(blocks, BLOCK_SIZE, model_fingerprint="m", kv_dtype="float32", prefix_caching=False)
    return Planner(cache, max_tokens=max_tokens, max_sequences=max_sequences)


def adopt(planner: Planner, sequence: Sequence) -> None:
    """Adopt ``sequence`` with its KV and its first token."""
    table = planner.cache.open(sequence_holder(sequence.id), sequence.tokens, "")
    planner.cache.grow(table, len(sequence.tokens))
    sequence.computed = len(sequence.tokens)
    sequence.append(1)
    planner.adopt(sequence, table)


def advance(planner: Planner) -> Batch:
    batch = planner.plan()
    assert batch is not None
    tokens = [[1] * len(s.sequence.choices) if s.wants_token else [] for s in batch.segments]
    for sampled in planner.complete(batch, StepResult(tokens, [[] for _ in tokens], 0.0)):
        sampled.sequence.append(sampled.tokens[0])
    return batch


def test_a_stream_is_not_stalled_by_a_prompt() -> None:
    planner = small(blocks=20, max_tokens=32)
    stream, prompt = simple(8, 50), simple(100, 5, index=1)
    planner.add(stream)
    advance(planner)
    planner.add(prompt)
    shapes = [[(s.sequence is stream, s.length) for s in advance(planner).segments] for _ in range(4)]
    assert shapes == [[(True, 1), (False, 31)]] * 3 + [[(True, 1), (False, 7)]]


def test_more_streams_than_fit_into_a_step_take_turns() -> None:
    planner = small(blocks=60)
    streams = [simple(8, 50, index=index) for index in range(6)]
    for stream in streams[:4]:
        planner.add(stream)
    advance(planner)
    for stream in streams[4:]:
        adopt(planner, stream)
    prompt = simple(40, 5, index=6)
    before = [stream.output_length for stream in streams]
    for _ in range(12):
        advance(planner)
        assert not planner.resting()
    assert [stream.output_length - had for stream, had in zip(streams, before, strict=True)] == [8] * 6
    planner.finish(streams[0])
    planner.finish(streams[1])
    planner.finish(streams[2])
    planner.add(prompt)
    while not prompt.computed:
        advance(planner)
    assert prompt.computed == 40, "a prompt has its place beside the three"


def test_a_prompt_that_has_begun_gets_its_place_though_the_streams_alone_fill_the_step() -> None:
    planner = small(blocks=60, max_tokens=8)
    planner.add(prompt := simple(40, 5))
    advance(planner)
    streams = [simple(8, 50, index=index) for index in range(1, 7)]
    for stream in streams:
        adopt(planner, stream)
    steps = 0
    while not prompt.output_length:
        advance(planner)
        steps += 1
        assert steps < 20
    assert all(stream.output_length > steps // 4 for stream in streams)


def test_lower_priorities_rest_while_higher_ones_fill_every_step() -> None:
    planner = small(blocks=60)
    low = simple(8, 50, priority=1)
    adopt(planner, low)
    advance(planner)
    high = [simple(8, 50, index=index) for index in range(1, 6)]
    for stream in high:
        adopt(planner, stream)
    had = low.output_length
    for _ in range(8):
        advance(planner)
    assert low.output_length == had
    assert planner.resting() == {low.request.id}
    planner.finish(high[0])
    planner.finish(high[1])
    assert planner.resting() == {low.request.id}, "until it has its next token"
    advance(planner)
    assert (low.output_length, planner.resting()) == (had + 1, set())


def test_a_stream_that_lost_its_worker_goes_before_prompts_that_begin() -> None:
    planner = small(blocks=60, max_tokens=8)
    first, second = simple(40, 5), simple(8, 5, index=1)
    moved, urgent = simple(8, 5, index=2, emitted=[7, 8]), simple(8, 5, index=3, priority=-1)
    planner.add(first)
    advance(planner)
    for sequence in (second, moved, urgent):
        planner.add(sequence)
    order = []
    while planner:
        for segment in advance(planner).segments:
            if segment.sequence not in order:
                order.append(segment.sequence)
        for sequence in list(planner.sequences()):
            if sequence.output_length > len(sequence.request.emitted_tokens(0)):
                planner.finish(sequence)
    assert order == [first, urgent, moved, second]


def test_the_newest_is_parked_when_blocks_run_out_and_comes_back_first() -> None:
    planner = small(blocks=3)
    old, new = simple(16, 30), simple(15, 20, index=1)
    planner.add(old)
    planner.add(new)
    while planner.preemptions == 0:
        advance(planner)
    assert planner.parked
    assert (planner.running, planner.waiting) == (1, 1)
    assert new.computed == 0
    third = simple(1, 1, index=2)
    planner.add(third)
    while old.finish is FinishReason.RUNNING:
        assert {s.sequence for s in advance(planner).segments} == {old}, "no sequence overtakes a parked one"
    planner.finish(old)
    assert advance(planner).segments[0].sequence is new
    assert not planner.parked


def test_planner_does_not_count_waiting_retry_as_parked() -> None:
    planner = small(blocks=2)
    planner.add(simple(8, 5))
    advance(planner)
    planner.add(simple(8, 5, index=1, emitted=[7, 8]))
    advance(planner)
    assert (planner.waiting, planner.parked) == (1, False)


def test_those_whose_kv_is_handed_over_do_not_keep_a_prompt_from_its_place() -> None:
    """The step is always full: each time a running sequence ends, another one is adopted with its KV."""
    planner = small(blocks=60)
    streams = [simple(8, 50, index=index) for index in range(6)]
    for stream in streams:
        adopt(planner, stream)
    advance(planner)
    planner.add(prompt := simple(40, 5, index=50))
    for index in range(6, 30):
        planner.finish(streams.pop(0))
        streams.append(simple(8, 50, index=index))
        adopt(planner, streams[-1])
        for _ in range(4):
            advance(planner)
        if prompt.computed:
            break
    assert index == 8, "when three of the four that the step has places for are still of those that came before"


def test_a_stream_that_lost_its_worker_is_not_kept_waiting_by_as_many_as_a_step_has_places() -> None:
    planner = small(blocks=60)
    streams = [simple(8, 50, index=index) for index in range(6)]
    for stream in streams:
        adopt(planner, stream)
    planner.add(moved := simple(8, 50, index=6, emitted=[7, 8]))
    for _ in range(12):
        advance(planner)
    assert moved.output_length >= 6, "it takes turns with them"


@pytest.mark.parametrize("kind", ["of a better priority", "a stream that lost its worker"])
def test_planner_serves_higher_ranked_sequence_beside_full_batch(kind: str) -> None:
    """The running sequences were all admitted from their prompts, as many as a step has places."""
    planner = small(blocks=60)
    for index in range(4):
        planner.add(simple(8, 200, index=index, priority=1))
    for _ in range(5):
        advance(planner)
    better = kind == "of a better priority"
    planner.add(late := simple(8, 50, index=9, priority=0 if better else 1, emitted=[] if better else [7, 8]))
    for _ in range(12):
        advance(planner)
    assert late.output_length >= (11 if better else 2 + 7), "at once, or in turn with them"
    assert planner.running == 5


def test_a_failed_segment_is_not_counted_as_computed() -> None:
    planner = small(blocks=4)
    planner.add(sequence := simple(8, 4))
    batch = planner.plan()
    assert batch is not None
    assert planner.complete(batch, StepResult([[1]], [[]], 0.0, {0: "no"})) == []
    assert sequence.computed == 0
    planner.finish(sequence)
    assert not planner


def test_complete_ignores_sequence_finished_during_step() -> None:
    planner = small(blocks=4)
    planner.add(sequence := simple(8, 4))
    batch = planner.plan()
    assert batch is not None
    planner.finish(sequence)
    assert planner.complete(batch, StepResult([[1]], [[]], 0.0)) == []
    assert planner.cache.pool.counts.free == 4


def test_misuse_is_an_invariant_broken() -> None:
    planner = small(blocks=4)
    planner.add(sequence := simple(8, 4))
    with pytest.raises(InvariantBroken, match="already here"):
        planner.add(sequence)
    with pytest.raises(InvariantBroken, match="no blocks"):
        planner.table(sequence)
    table = planner.cache.open(Holder("seq:x"), [1, 2], "")
    with pytest.raises(InvariantBroken, match="adopted"):
        planner.adopt(simple(4, 4, index=3), table)
    with pytest.raises(InvariantBroken, match="choices"):
        planner.start(sequence, [1, 2], [None, None])
    with pytest.raises(ValueError, match="budget"):
        small(blocks=4, max_tokens=2, max_sequences=3)
