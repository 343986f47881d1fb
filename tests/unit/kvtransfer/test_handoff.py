"""Prefill and decode workers on the oracle engine, with the test as their coordinator: every byte of KV arrives."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest
import zmq

from common.core.errors import WireError
from common.core.ids import (
    Incarnation,
    RequestId,
    TransferId,
    WorkerName,
    new_incarnation,
    pack_tokens,
    pack_transfers,
    unpack_tokens,
)
from common.core.request import FinishReason, Request, SamplingParams
from common.core.sequence import Batch, StepResult
from common.kv.layout import ELEMENT_BYTES, KvDtype
from common.net.messages import (
    PROTOCOL,
    Abort,
    Cached,
    Failed,
    FromWorker,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    Measure,
    Measured,
    Message,
    Peer,
    Prefill,
    Renewed,
    Resend,
    Reserve,
    Timing,
    Tokens,
    Welcome,
)
from common.net.sockets import Channels, bind_router, send
from common.net.wire import decode, seal
from common.worker.loop import PUBLISH_S, Worker, WorkerSettings
from common.worker.membership import Membership
from common.worker.output_history import KEPT_S
from decode.role import BUDGET_S, BUDGET_SHARE, MOST_BUDGET_SHARE, DecodeWorker
from kvtransfer.links.faulty import FaultRates, FaultyChannels
from kvtransfer.session import Limits
from prefill.role import PrefillWorker
from tests.fakes.oracle import OracleEngine, oracle_stream
from tests.pace import scaled

DEADLINE_S = 20.0


class Bench:
    """One coordinator socket and some workers, all turned by one thread: nothing happens unless :meth:`turn` runs."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = bind_router(self.context, "tcp://127.0.0.1:*")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.workers: dict[str, Worker] = {}
        self.hellos: dict[str, Hello] = {}
        self.routes: dict[str, bytes] = {}
        self.streams: dict[tuple[bytes, int, int], list[int]] = defaultdict(list)
        self.finished: dict[tuple[bytes, int, int], FinishReason] = {}
        self.failed: dict[tuple[bytes, int], Failed] = {}
        self.timings: list[Timing] = []
        self.measured: list[Measured] = []
        self.cached: list[Cached] = []
        self.goodbyes: list[Incarnation] = []
        self.lease_ms = 60_000
        self.lost_welcomes = self.joins = self.renewed = 0
        self.beats = 0

    def add(
        self, role: str, engine: OracleEngine, host: str = "here", channels: Channels | None = None, **settings: Any
    ) -> Worker:
        name = WorkerName(f"{role}-{len(self.workers)}")
        chosen = {"max_num_seqs": 16, "max_num_batched_tokens": 64, **settings}
        kind = PrefillWorker if role == "prefill" else DecodeWorker
        worker = kind(
            engine,
            WorkerSettings(self.address, f"{host}", **chosen),
            _hello(name, role, engine),
            channels,
        )
        self.workers[name] = worker
        self.until(lambda: name in self.hellos)
        return worker

    def turn(self) -> None:
        for worker in self.workers.values():
            worker.turn()
        while self.socket.poll(0):
            identity, body = self.socket.recv_multipart()
            self._take(identity, decode(body, FromWorker))

    def until(self, done: Any, deadline_s: float = DEADLINE_S) -> None:
        give_up = time.monotonic() + scaled(deadline_s)
        while not done():
            assert time.monotonic() < give_up, "the system does not get there"
            self.turn()

    def _take(self, identity: bytes, message: Any) -> None:
        match message:
            case Hello():
                self.hellos[message.name], self.routes[message.name] = message, identity
                self.joins += 1
                if self.lost_welcomes:
                    self.lost_welcomes -= 1
                else:
                    send(self.socket, Welcome(Incarnation("test"), 500, self.lease_ms, 2000), identity)
            case Heartbeat():
                self.beats += 1
            case Renewed():
                self.renewed += 1
            case Tokens():
                self._spans(message)
            case Failed():
                self.failed[message.request, message.attempt] = message
            case Timing():
                self.timings.append(message)
            case Measured():
                self.measured.append(message)
            case Cached():
                self.cached.append(message)
            case Goodbye():
                self.goodbyes.append(message.incarnation)

    def _spans(self, message: Tokens) -> None:
        ids, at = unpack_tokens(message.ids), 0
        for index, count in enumerate(message.counts):
            key = (message.requests[16 * index : 16 * index + 16], message.attempts[index], message.choices[index])
            span, start = ids[at : at + count], message.starts[index]
            at += count
            stream = self.streams[key]
            assert start <= len(stream), "a gap"
            assert stream[start : start + count] == span[: len(stream) - start], "a repeated token differs"
            stream.extend(span[len(stream) - start :])
            if message.finish[index]:
                self.finished[key] = FinishReason(message.finish[index])

    def tell(self, worker: str, message: Message) -> None:
        assert send(self.socket, message, self.routes[worker])

    def peer(self, worker: str) -> Peer:
        hello = self.hellos[worker]
        return Peer(hello.name, hello.incarnation, hello.data_address, hello.host_id, hello.dtype)

    def place(self, request: Request, prefill: str, decode: str, attempt: int = 1) -> None:
        self.tell(decode, Reserve(request, attempt, self.peer(prefill)))
        self.tell(prefill, Prefill(request, attempt, self.peer(decode)))

    def check(self, request: Request, attempt: int = 1) -> None:
        """Every choice has ended and is exactly the oracle's."""
        for choice in range(request.n):
            key = (request.id, attempt, choice)
            length = len(self.streams[key])
            emitted = request.emitted_tokens(choice)
            stream = oracle_stream(request.prompt_tokens(), request.sampling.seed, choice, request.sampling.max_tokens)
            assert emitted + self.streams[key][len(emitted) :] == stream[:length]
            assert length == request.sampling.max_tokens
            assert self.finished[key] is FinishReason.LENGTH

    def shipped(self, request: Request) -> list[Timing]:
        """What prefill told of the request's hand-offs: it does when decode has accepted, which tokens may overtake."""

        def told() -> list[Timing]:
            return [each for each in self.timings if each.request == request.id and "kv_bytes" in each.values]

        self.until(told)
        return told()

    def done(self, *requests: Request) -> bool:
        return all((r.id, 1, choice) in self.finished for r in requests for choice in range(r.n))

    def quiet(self) -> bool:
        return not any(worker.holdings() for worker in self.workers.values())

    def close(self) -> None:
        self.until(self.quiet)
        while self.workers:
            _, worker = self.workers.popitem()
            assert worker.cache.leaks() == {} and worker.cache.pool.counts.held == 0
            worker.close()
            worker.engine.close()  # type: ignore[attr-defined]
        self.socket.close()
        self.context.term()


def _hello(name: WorkerName, role: str, engine: OracleEngine) -> Hello:
    return Hello(
        PROTOCOL,
        name,
        new_incarnation(),
        role,  # type: ignore[arg-type]
        "oracle",
        engine.fingerprint,
        engine.layout.fingerprint,
        1,
        "localhost",
        "host",
        "",
        ("shm", "zmq"),
        engine.memory.blocks,
        engine.layout.block_size,
        engine.max_model_len,
        engine.vocab_size,
        16,
        64,
        "cpu",
        engine.layout.dtype,
    )


_numbers = itertools.count(1)


def make_request(prompt: int, output: int, seed: int = 0, **fields: Any) -> Request:
    number = next(_numbers)
    tokens = random.Random(seed or number).choices(range(1000), k=prompt)
    sampling = SamplingParams(max_tokens=output, seed=seed or number, logprobs=fields.pop("logprobs", None))
    return Request(RequestId(number.to_bytes(16, "big")), pack_tokens(tokens), sampling, **fields)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


@pytest.fixture(
    params=[
        "shm",
        "zmq",
        pytest.param(
            "nixl",
            marks=[
                pytest.mark.skipif(find_spec("nixl") is None, reason="the extra nixl is not installed"),
                pytest.mark.torch,
            ],
        ),
    ]
)
def pair(request: pytest.FixtureRequest, bench: Bench) -> Bench:
    """A prefill worker with blocks of 16 tokens and a decode worker with blocks of 32."""
    bench.add("prefill", OracleEngine(256, 16), kv_transport=request.param)
    bench.add("decode", OracleEngine(128, 32), kv_transport=request.param)
    return bench


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 500])
def test_every_length_arrives(pair: Bench, length: int) -> None:
    request = make_request(length, 6)
    pair.place(request, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(request))
    pair.check(request)


@pytest.mark.parametrize("link", ["shm", "zmq"])
def test_a_network_that_loses_repeats_and_reorders_frames_changes_no_token(bench: Bench, link: str) -> None:
    channels = FaultyChannels(FaultRates(drop=0.2, duplicate=0.2, delay=0.2), random.Random(11))
    bench.add("prefill", OracleEngine(256, 16), channels=channels, kv_transport=link)
    bench.add("decode", OracleEngine(128, 32), kv_transport=link)
    requests = [make_request(length, 8) for length in (1, 33, 80, 500) for _ in range(6)]
    for request in requests:
        bench.place(request, "prefill-0", "decode-1")
    bench.until(lambda: bench.done(*requests))
    for request in requests:
        bench.check(request)
    assert all(channels.happened[fault] for fault in ("drop", "duplicate", "delay")) and not bench.failed


@pytest.mark.parametrize("link", ["shm", "zmq"])
@pytest.mark.parametrize("dtypes", list(itertools.permutations(ELEMENT_BYTES, 2)), ids=" to ".join)
def test_kv_of_one_element_type_is_placed_as_another(bench: Bench, dtypes: tuple[KvDtype, KvDtype], link: str) -> None:
    """The oracle's numbers are the same in every type, so every token is the same too."""
    for role, dtype, block_size in zip(("prefill", "decode"), dtypes, (32, 16), strict=True):
        bench.add(role, OracleEngine(128, block_size, dtype=dtype), kv_transport=link)
    for length in (1, 40, 200):
        request = make_request(length, 20)
        bench.place(request, "prefill-0", "decode-1")
        bench.until(lambda request=request: bench.done(request))
        bench.check(request)
        sent = bench.shipped(request)[0]
        assert sent.link == link
        assert sent.values["kv_bytes"] == length * bench.workers["prefill-0"].engine.layout.token_bytes


@pytest.mark.parametrize("link", ["shm", "zmq"])
@pytest.mark.parametrize("shards", [(1, 2), (2, 1), (2, 2)], ids=lambda shards: f"{shards[0]} to {shards[1]}")
def test_kv_in_shards_of_heads_is_placed_in_another_number_of_them(
    bench: Bench, shards: tuple[int, int], link: str
) -> None:
    """And from blocks of one size into blocks of another."""
    for role, head_shards, block_size in zip(("prefill", "decode"), shards, (32, 16), strict=True):
        bench.add(role, OracleEngine(128, block_size, head_shards=head_shards), kv_transport=link)
    for length in (1, 40, 200):
        request = make_request(length, 20)
        bench.place(request, "prefill-0", "decode-1")
        bench.until(lambda request=request: bench.done(request))
        bench.check(request)
        assert bench.shipped(request)[0].link == link


def test_kv_is_found_again_only_where_it_was_computed_in_the_same_type(bench: Bench) -> None:
    """What a float32 worker computed and what was widened from bfloat16 are different KV, in one and the same pool."""
    bench.add("prefill", OracleEngine(128))
    bench.add("prefill", OracleEngine(128, dtype="bfloat16"))
    decode = bench.add("decode", OracleEngine(128))
    prompt = make_request(100, 1).prompt
    for prefill, travels in (("prefill-0", 100), ("prefill-1", 100), ("prefill-0", 4), ("prefill-1", 4)):
        request = make_request(1, 5)
        request = Request(request.id, prompt, request.sampling)
        bench.place(request, prefill, "decode-2")
        bench.until(lambda request=request: bench.done(request))
        bench.check(request)
        told = bench.shipped(request)
        assert told[0].values["kv_bytes"] == travels * bench.workers[prefill].engine.layout.token_bytes
    local = make_request(1, 5)
    local = Request(local.id, prompt, local.sampling)
    bench.tell("decode-2", Generate(local, 1))
    bench.until(lambda: bench.done(local))
    bench.check(local)
    assert decode.planner.hit_tokens == 96, "what others computed is found here, too, but not in place of computing it"


def test_a_sender_that_says_another_element_type_than_the_coordinator_is_refused(pair: Bench) -> None:
    request = make_request(40, 4)
    liar = msgspec.structs.replace(pair.peer("prefill-0"), dtype="float16")
    pair.tell("decode-1", Reserve(request, 1, liar))
    pair.tell("prefill-0", Prefill(request, 1, pair.peer("decode-1")))
    pair.until(lambda: (request.id, 1) in pair.failed)
    failed = pair.failed[request.id, 1]
    assert failed.retriable and "of float32" in failed.detail and "expected 40 tokens of float16" in failed.detail


def test_many_at_once_and_prefix_hits_on_both_sides(pair: Bench) -> None:
    shared = make_request(100, 1).prompt
    requests = [make_request(length, 5) for length in (1, 40, 200, 77, 128, 16)]
    requests += [Request(r.id, shared + r.prompt, r.sampling) for r in (make_request(30, 5) for _ in range(4))]
    for request in requests:
        pair.place(request, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(*requests))
    again = make_request(30, 5)
    again = Request(again.id, shared + again.prompt, again.sampling)
    pair.place(again, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(again))
    for request in (*requests, again):
        pair.check(request)
    shipped = pair.shipped(again)
    token_bytes = pair.workers["prefill-0"].engine.layout.token_bytes
    assert shipped[0].values["kv_bytes"] == (130 - 96) * token_bytes  # decode had three blocks of 32 tokens itself


def test_several_choices_travel_once_and_fork(pair: Bench) -> None:
    request = make_request(37, 9, n=4, logprobs=0)
    pair.place(request, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(request))
    pair.check(request)
    shipped = pair.shipped(request)
    assert [each.values["kv_bytes"] for each in shipped] == [37 * pair.workers["prefill-0"].engine.layout.token_bytes]


def test_a_first_token_that_ends_the_request_ships_nothing(pair: Bench) -> None:
    request = make_request(50, 1)
    pair.place(request, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(request))
    pair.tell("decode-1", Abort(request.id, 1))  # what the coordinator does
    pair.until(pair.quiet)
    pair.check(request)


def test_a_retry_continues_after_what_was_emitted(pair: Bench) -> None:
    request = make_request(50, 12)
    emitted = oracle_stream(request.prompt_tokens(), request.sampling.seed, 0, 7)
    retry = Request(request.id, request.prompt, request.sampling, emitted=(pack_tokens(emitted),))
    pair.streams[request.id, 1, 0] = list(emitted)
    pair.place(retry, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(retry))
    pair.check(retry)


@pytest.mark.parametrize("turns", range(0, 14, 2))
def test_an_abort_at_any_moment_frees_everything(pair: Bench, turns: int) -> None:
    request, other = make_request(300, 40), make_request(120, 10)
    pair.place(request, "prefill-0", "decode-1")
    pair.place(other, "prefill-0", "decode-1")
    for _ in range(turns):
        pair.turn()
    pair.tell("prefill-0", Abort(request.id, 1))
    pair.tell("decode-1", Abort(request.id, 1))
    pair.until(lambda: pair.done(other))
    pair.check(other)


def test_a_small_decode_pool_parks_and_resumes(bench: Bench) -> None:
    bench.add("prefill", OracleEngine(64))
    decode = bench.add("decode", OracleEngine(24))
    requests = [make_request(60, 90) for _ in range(6)]
    for request in requests:
        bench.place(request, "prefill-0", "decode-1")
    bench.until(lambda: bench.done(*requests), 60)
    for request in requests:
        bench.check(request)
    assert decode.planner.preemptions > 0


def test_hand_offs_do_not_keep_a_large_prompt_from_its_blocks(bench: Bench) -> None:
    bench.add("prefill", OracleEngine(64))
    bench.add("decode", OracleEngine(20))
    small = [make_request(30, output) for output in (20, 30, 40)]
    for request in small:
        bench.place(request, "prefill-0", "decode-1")
    bench.until(lambda: all(bench.streams[request.id, 1, 0] for request in small))
    large = make_request(200, 5)
    bench.tell("decode-1", Generate(large, 1))
    placed = len(small)
    while not bench.done(large):
        bench.turn()
        for index, request in enumerate(small):
            if bench.done(request):  # the next one comes at once: there are never 13 of 20 blocks free
                small[index] = make_request(30, 40)
                bench.place(small[index], "prefill-0", "decode-1")
                placed += 1
        assert placed < 30, "it waits for ever"
    bench.until(lambda: bench.done(*small))
    for request in (large, *small):
        bench.check(request)


def compute_without_blocks_at_decode(bench: Bench, request: Request) -> None:
    """Prefill is told of ``request`` and decode is not yet: the prompt is computed and keeps its blocks."""
    bench.tell("prefill-0", Prefill(request, 1, bench.peer("decode-1")))
    bench.until(lambda: bench.workers["prefill-0"].holdings() and bench.streams[request.id, 1, 0])


@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_without_blocks_at_decode_makes_way_for_one_that_has_them(bench: Bench, caching: bool) -> None:
    """Else each of two pools could hold what the other one's prompts wait for."""
    prefill = bench.add("prefill", OracleEngine(14, 16), prefix_caching=caching)
    bench.add("decode", OracleEngine(64, 16), prefix_caching=caching)
    early, urgent = make_request(150, 9, n=2), make_request(150, 5, priority=5)
    compute_without_blocks_at_decode(bench, early)
    bench.place(urgent, "prefill-0", "decode-1")
    bench.until(lambda: bench.done(urgent))
    assert prefill.counters["set_aside_prompts"] == 1
    assert not bench.done(early) and TransferId(early.id, 1) in prefill.holdings()
    bench.tell("decode-1", Reserve(early, 1, bench.peer("prefill-0")))
    bench.until(lambda: bench.done(early))
    bench.check(urgent)
    bench.check(early)
    assert not bench.failed
    told = [each.values for each in bench.timings if each.request == early.id and "prefill_ms" in each.values]
    assert [values.get("decode_wait_ms") is None for values in told] == [True, False], "once, and once by decode"


def test_prompts_that_all_wait_for_decode_keep_what_they_have(bench: Bench) -> None:
    prefill = bench.add("prefill", OracleEngine(14, 16))
    bench.add("decode", OracleEngine(64, 16))
    first, second = make_request(150, 5), make_request(150, 5)
    compute_without_blocks_at_decode(bench, first)
    bench.tell("prefill-0", Prefill(second, 1, bench.peer("decode-1")))
    bench.until(lambda: prefill.planner.in_need)
    held = prefill.cache.pool.counts.held
    for _ in range(20):
        bench.turn()
    assert prefill.cache.pool.counts.held == held and "set_aside_prompts" not in prefill.counters
    for request in (second, first):  # the second is granted, and the first one in its way makes room
        bench.tell("decode-1", Reserve(request, 1, bench.peer("prefill-0")))
    bench.until(lambda: bench.done(first, second))
    bench.check(first)
    bench.check(second)


def test_a_prompt_that_has_made_way_can_be_aborted(bench: Bench) -> None:
    prefill = bench.add("prefill", OracleEngine(14, 16))
    bench.add("decode", OracleEngine(64, 16))
    early, urgent = make_request(150, 9), make_request(150, 5)
    compute_without_blocks_at_decode(bench, early)
    bench.place(urgent, "prefill-0", "decode-1")
    bench.until(lambda: bench.done(urgent))
    bench.tell("prefill-0", Abort(early.id, 1))
    bench.until(lambda: not prefill.holdings())
    assert len(prefill.sender) == 0  # type: ignore[attr-defined]


def test_whole_requests_on_one_worker(bench: Bench) -> None:
    bench.add("colocated", OracleEngine(64))
    requests = [make_request(length, 20, n=n) for length, n in ((1, 1), (200, 1), (33, 3), (90, 2))]
    for request in requests:
        bench.tell("colocated-0", Generate(request, 1))
    bench.until(lambda: bench.done(*requests))
    for request in requests:
        bench.check(request)


@pytest.mark.parametrize(("role", "most"), [("decode", 64), ("colocated", 255)])
def test_a_decode_worker_computes_of_a_prompt_what_its_streams_bear(bench: Bench, role: str, most: int) -> None:
    """A colocated one computes as much as fits into a step: that is what it is for."""
    worker = bench.add(role, OracleEngine(64), max_num_batched_tokens=256)
    assert isinstance(worker, DecodeWorker)
    stream, prompt = make_request(1, 60), make_request(600, 5)
    bench.tell(f"{role}-0", Generate(stream, 1))
    bench.until(lambda: worker.planner.running)
    step, chunks = worker.engine.step, list[int]()

    def seen(batch: Any) -> Any:
        if (tokens := batch.length - (len(batch.segments) - 1)) > 1 and len(batch.segments) > 1:
            chunks.append(tokens)
        return step(batch)

    worker.engine.step = seen  # type: ignore[method-assign]
    bench.tell(f"{role}-0", Generate(prompt, 1))
    bench.until(lambda: bench.done(stream, prompt))
    assert chunks[0] == most
    bench.check(stream)
    bench.check(prompt)


def test_choices_that_move_go_on_where_each_was(bench: Bench) -> None:
    bench.add("colocated", OracleEngine(64))
    request = make_request(40, 10, n=3)
    streams = [oracle_stream(request.prompt_tokens(), request.sampling.seed, c, 10) for c in range(3)]
    emitted = tuple(pack_tokens(stream[:length]) for stream, length in zip(streams, (4, 10, 1), strict=True))
    moved = Request(request.id, request.prompt, request.sampling, n=3, emitted=emitted, ended=(1,))
    for choice in (0, 2):
        bench.streams[request.id, 1, choice] = moved.emitted_tokens(choice)
    bench.tell("colocated-0", Generate(moved, 1))
    bench.until(lambda: {(request.id, 1, 0), (request.id, 1, 2)} <= bench.finished.keys())
    assert bench.streams[request.id, 1, 0] == streams[0]
    assert bench.streams[request.id, 1, 2] == streams[2]
    assert (request.id, 1, 1) not in bench.streams


def test_a_trial_measures_the_link_and_leaves_nothing(pair: Bench) -> None:
    identifier = RequestId(b"measure the link")
    pair.tell("decode-1", Measure(identifier, 0, pair.peer("prefill-0"), 100))
    pair.tell("prefill-0", Measure(identifier, 0, pair.peer("decode-1"), 100))
    pair.until(lambda: pair.measured)
    layout = pair.workers["prefill-0"].engine.layout
    assert [each.bytes for each in pair.measured] == [100 * layout.token_bytes]
    assert pair.measured[0].seconds > 0
    pair.until(pair.quiet)
    assert pair.workers["decode-1"].cache.pool.counts.cached == 0  # meaningless blocks are never offered to anybody


def test_frames_without_end_do_not_keep_a_worker_from_its_control_messages(
    pair: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops when its time for moving KV is over, and comes back at once: no message will come that wakes it."""
    monkeypatch.setattr("prefill.role.BUDGET_S", 0.0)
    prefill = pair.workers["prefill-0"]
    for name, other in (("decode-1", "prefill-0"), ("prefill-0", "decode-1")):
        pair.tell(name, Measure(RequestId(b"measure the link"), 0, pair.peer(other), 100))
    pair.until(prefill.more_to_move)
    assert prefill.turn() == 0.0
    monkeypatch.setattr("prefill.role.BUDGET_S", 1.0)
    pair.until(lambda: pair.measured)
    pair.until(pair.quiet)
    assert not prefill.more_to_move() and prefill.turn() > 0


def test_what_the_heart_tells_is_as_young_as_the_last_long_step(bench: Bench) -> None:
    """Short steps are noted now and then, one that is longer than that when it ends."""
    worker = bench.add("decode", OracleEngine(64))
    request = make_request(40, 3)
    step = worker.engine.step

    def slow(batch: Any) -> Any:
        time.sleep(2 * PUBLISH_S)
        return step(batch)

    worker.engine.step = slow  # type: ignore[method-assign]
    bench.tell("decode-0", Generate(request, 1))
    bench.until(lambda: worker.holdings())  # whose turn has computed its first chunk
    assert worker.membership.snapshot.live == request.id
    bench.until(lambda: bench.done(request))


def test_beside_streams_a_worker_takes_in_less_the_fewer_hand_offs_there_are(bench: Bench) -> None:
    decode, _ = bench.add("decode", OracleEngine(64)), bench.add("prefill", OracleEngine(64))
    assert isinstance(decode, DecodeWorker) and decode._budget_s() == BUDGET_S
    bench.tell("decode-0", Generate(request := make_request(40, 60), 1))
    bench.until(lambda: decode.planner.running)
    decode.pace.took(512, 512, 2.0)
    decode.pace.took(1, 1, 0.01)
    assert decode._budget_s() == pytest.approx(BUDGET_SHARE * 0.01), "the long step is over"
    transfers = [TransferId(RequestId(bytes([count] * 16)), 1) for count in range(8)]
    for count, transfer in enumerate(transfers, 1):
        decode.receiver.expect(transfer, 16, 0, [], bench.peer("prefill-1"), decode.clock())
        assert decode._budget_s() == pytest.approx(min(MOST_BUDGET_SHARE, BUDGET_SHARE * count) * 0.01)
    for transfer in transfers:
        decode.receiver.cancel(transfer, "it was none")
    bench.until(lambda: bench.done(request))


def test_many_that_announce_themselves_beside_long_steps_are_answered_within_a_few(bench: Bench) -> None:
    """Also while nothing can be reserved for any of them: who is not answered gives the hand-off up after a while."""
    decode, prefill = bench.add("decode", OracleEngine(64)), bench.add("prefill", OracleEngine(64))
    assert isinstance(decode, DecodeWorker) and isinstance(prefill, PrefillWorker)
    bench.tell("decode-0", Generate(stream := make_request(40, 60), 1))
    bench.until(lambda: decode.planner.running)
    step, steps = decode.engine.step, itertools.count()

    def slow(batch: Any) -> Any:
        next(steps)
        time.sleep(0.05)  # the step's length
        return step(batch)

    decode.engine.step = slow  # type: ignore[method-assign]
    bench.turn()
    requests = [make_request(16, 3) for _ in range(20)]
    for request in requests:
        bench.tell("prefill-1", Prefill(request, 1, bench.peer("decode-0")))
    while len(prefill.sender) < len(requests):
        prefill.turn()
    before = next(steps)
    bench.until(lambda: decode.receiver.waited_for == len(requests))
    assert next(steps) - before < len(requests) / 3
    decode.engine.step = step  # type: ignore[method-assign]
    for request in requests:
        bench.tell("decode-0", Reserve(request, 1, bench.peer("prefill-1")))
    bench.until(lambda: bench.done(stream, *requests))
    for request in requests:
        bench.check(request)


def test_a_trial_too_large_for_the_pool_is_not_made(pair: Bench) -> None:
    for name, other in (("decode-1", "prefill-0"), ("prefill-0", "decode-1")):
        pair.tell(name, Measure(RequestId(b"measure too much"), 0, pair.peer(other), 1_000_000))
    request = make_request(40, 3)
    pair.place(request, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(request))
    pair.check(request)


def test_a_trial_that_only_one_side_has_room_for_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.worker.loop.TRIAL_S", 0.2)
    prefill, _ = bench.add("prefill", OracleEngine(64)), bench.add("decode", OracleEngine(4))
    bench.tell("decode-1", Measure(RequestId(b"measure one side"), 0, bench.peer("prefill-0"), 500))
    bench.tell("prefill-0", Measure(RequestId(b"measure one side"), 0, bench.peer("decode-1"), 500))
    bench.until(lambda: prefill.cache.pool.counts.held)
    bench.until(bench.quiet, 5)
    assert prefill.cache.pool.counts.held == 0
    assert not bench.measured


def test_a_trial_does_not_hold_up_a_drain(bench: Bench) -> None:
    prefill, _ = bench.add("prefill", OracleEngine(64)), bench.add("decode", OracleEngine(64))
    bench.tell("prefill-0", Measure(RequestId(b"measure no decod"), 0, bench.peer("decode-1"), 100))
    bench.until(lambda: prefill.cache.pool.counts.held)
    prefill.drain(30)
    assert bench.quiet()


def test_a_signal_between_a_trials_landing_and_its_end_drains_afterwards(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.add("prefill", OracleEngine(64))
    leaving = bench.add("decode", OracleEngine(64))
    assert isinstance(leaving, DecodeWorker)
    pump, struck = leaving.receiver.pump, []

    def pump_and_strike(*arguments: Any) -> list[Any]:
        if (ended := pump(*arguments)) and not struck:
            struck.append(ended)
            os.kill(os.getpid(), signal.SIGTERM)
        return ended

    monkeypatch.setattr(leaving.receiver, "pump", pump_and_strike)
    for name, other in (("decode-1", "prefill-0"), ("prefill-0", "decode-1")):
        bench.tell(name, Measure(RequestId(b"measure a signal"), 0, bench.peer(other), 100))
    with leaving._signals() as waker:
        bench.until(lambda: struck)
        assert leaving.draining_until is None
        leaving._wait(0.0, waker)
    assert leaving.finished()
    bench.until(bench.quiet)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_second_signal_stops_what_would_go_on(bench: Bench, role: str) -> None:
    """Prefill waits for a grant that does not come, decode for the end of a long answer: draining would last."""
    bench.add("prefill", OracleEngine(64))
    bench.add("decode", OracleEngine(64))
    request = make_request(40, 800)
    if role == "decode":
        bench.place(request, "prefill-0", "decode-1")
        bench.until(lambda: len(bench.streams[request.id, 1, 0]) > 3)
    else:
        bench.tell("prefill-0", Prefill(request, 1, bench.peer("decode-1")))
        bench.until(lambda: bench.streams[request.id, 1, 0])
    leaving = bench.workers["prefill-0" if role == "prefill" else "decode-1"]
    with leaving._signals() as waker:
        for asked in (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
            leaving._wait(1.0, waker)
            assert leaving.draining_until is not None and leaving.finished() == (asked == 2)
            bench.turn()
            assert leaving.holdings(), "there is something to wait for"
    leaving.close()
    assert leaving.cache.leaks() == {} and leaving.cache.pool.counts.held == 0
    leaving.engine.close()  # type: ignore[attr-defined]
    del bench.workers[leaving.membership.hello.name]
    bench.until(lambda: leaving.incarnation in bench.goodbyes)
    for name in bench.workers:
        bench.tell(name, Abort(request.id, 1))


def test_all_cached_prefixes_are_announced_in_messages_that_are_taken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.worker.loop.MAX_KEYS", 3)
    worker = bench.add("colocated", OracleEngine(64))
    request = make_request(16 * 7, 1)
    bench.tell("colocated-0", Generate(request, 1))
    bench.until(lambda: bench.done(request))
    bench.until(lambda: sum(len(each.added) for each in bench.cached) == 16 * 7)
    worker.cache.prefix.announce_all()
    bench.until(lambda: sum(len(each.added) for each in bench.cached) == 2 * 16 * 7)
    assert max(len(each.added) for each in bench.cached) == 16 * 3


def test_more_requests_than_a_heartbeat_can_tell_of_are_turned_away(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.worker.loop.MAX_HELD", 2)
    bench.add("colocated", OracleEngine(64))
    requests = [make_request(20, 30) for _ in range(3)]
    for request in requests:
        bench.tell("colocated-0", Generate(request, 1))
    bench.until(lambda: bench.done(*requests[:2]))
    assert (failed := bench.failed[requests[2].id, 1]).code == "no_memory" and failed.retriable
    again = make_request(20, 3)
    bench.tell("colocated-0", Generate(again, 1))
    bench.until(lambda: bench.done(again))


def test_an_address_that_is_none_fails_that_request_only(pair: Bench) -> None:
    bad, good = make_request(40, 3), make_request(40, 3)
    nowhere = Peer(WorkerName("decode-9"), Incarnation("nine"), "nonsense", "host", "float32")
    pair.tell("prefill-0", Measure(RequestId(b"measure nonsense"), 0, nowhere, 100))
    pair.tell("prefill-0", Prefill(bad, 1, nowhere))
    pair.until(lambda: (bad.id, 1) in pair.failed)
    assert pair.failed[bad.id, 1].code == "transfer_failed"
    pair.place(good, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(good))
    pair.check(good)


def test_the_prefix_cache_is_asked_once_per_request_where_it_is_computed(bench: Bench) -> None:
    prefill = bench.add("prefill", OracleEngine(64))
    decode = bench.add("decode", OracleEngine(12))
    first, second = make_request(100, 40), make_request(90, 4)
    bench.place(first, "prefill-0", "decode-1")
    bench.place(second, "prefill-0", "decode-1")  # waits until the first has gone
    bench.until(lambda: bench.done(first, second))
    assert decode.planner.preemptions == 0
    assert (prefill.planner.queried_tokens, decode.planner.queried_tokens) == (190, 0)


def test_decode_tells_what_prefill_had_cached(pair: Bench) -> None:
    """Its whole answer may overtake what prefill says, and usage names these tokens."""
    first = make_request(100, 4)
    again = msgspec.structs.replace(first, id=make_request(100, 4).id)
    for request, cached in ((first, 0), (again, 96)):
        pair.place(request, "prefill-0", "decode-1")
        pair.until(lambda request=request: pair.done(request))
        [told] = [
            each.values for each in pair.timings if each.request == request.id and "decode_wait_ms" in each.values
        ]
        assert told["cached_tokens"] == cached and told["prefill_ms"] > 0 and "queue_ms" in told


def test_two_hosts_take_zeromq_by_themselves(bench: Bench) -> None:
    bench.add("prefill", OracleEngine(64), host="one")
    bench.add("decode", OracleEngine(64), host="two")
    request = make_request(100, 4)
    bench.place(request, "prefill-0", "decode-1")
    bench.until(lambda: bench.done(request))
    bench.check(request)
    assert [each.link for each in bench.shipped(request)] == ["zmq"]


def test_what_a_lease_does_not_list_is_dropped(pair: Bench) -> None:
    """Both Aborts of the first are lost; of the second one attempt is void and one is not."""
    lost, kept = make_request(100, 400), make_request(90, 400)
    pair.place(lost, "prefill-0", "decode-1")
    pair.tell("decode-1", Reserve(kept, 1, pair.peer("prefill-0")))
    pair.place(kept, "prefill-0", "decode-1", attempt=2)
    pair.until(lambda: len(pair.streams[lost.id, 1, 0]) > 3 and len(pair.streams[kept.id, 2, 0]) > 3)
    for name in pair.workers:
        pair.tell(name, Lease(b"torn", 0))
        pair.tell(name, Lease(pack_transfers([TransferId(kept.id, 2), TransferId(RequestId(bytes(16)), 9)]), 0))
    decode = pair.workers["decode-1"]
    pair.until(lambda: decode.holdings() == {TransferId(kept.id, 2)})
    assert decode.counters["reaped_requests"] == 2
    assert decode.membership.bad_messages == 1
    for name in pair.workers:
        pair.tell(name, Lease(b"", 0))
    pair.until(pair.quiet)


def test_workers_take_their_times_from_whoever_welcomes_them(pair: Bench) -> None:
    """Also from a second coordinator, which has others."""
    for name in pair.workers:
        pair.tell(name, Welcome(Incarnation("other"), 20, 4_000, 500))
    pair.until(lambda: pair.beats >= 40, deadline_s=4)  # of two hearts that beat twice a second: 16
    prefill, decode = pair.workers["prefill-0"], pair.workers["decode-1"]
    told = Limits(no_progress_s=0.5, renew_s=0.02, lease_s=4.0)
    assert prefill.sender._limits == decode.receiver._limits == told  # type: ignore[attr-defined]
    assert decode.receiver._sources.lease_s == 4.0  # type: ignore[attr-defined]
    request = make_request(50, 4)
    pair.place(request, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(request))
    pair.check(request)


def test_nothing_is_taken_before_a_welcome(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """When that was lost nobody has said how long anything may be held without a word."""
    monkeypatch.setattr("common.worker.membership.KNOCK_S", 0.2)
    bench.lost_welcomes = 1
    worker = bench.add("decode", OracleEngine(512))
    request = make_request(40, 4)
    bench.tell("decode-0", Generate(request, 1))
    bench.tell("decode-0", Lease(pack_transfers([TransferId(request.id, 1)]), 0))
    bench.until(lambda: worker.membership.joined)
    assert not worker.holdings() and not bench.streams
    bench.tell("decode-0", Generate(request, 1))
    bench.until(lambda: bench.done(request))
    bench.check(request)


def test_a_worker_that_hears_no_lease_for_as_long_as_one_lasts_dials_anew(bench: Bench) -> None:
    """The connection may carry nothing any more, of which nobody is told."""
    bench.lease_ms = 400
    worker = bench.add("decode", OracleEngine(64))
    bench.until(lambda: worker.membership.joined)
    first, leased_at = worker.membership._socket, time.monotonic()
    while time.monotonic() < leased_at + 1.0:
        bench.tell("decode-0", Lease(b"", 0))
        bench.turn()
    assert worker.membership._socket is first and bench.joins == 1
    assert bench.renewed > 10, "each is answered"
    bench.until(lambda: bench.joins == 2 and worker.membership.joined)
    assert worker.membership._socket is not first and first.closed
    request = make_request(40, 4)
    bench.tell("decode-0", Generate(request, 1))
    bench.until(lambda: bench.done(request))
    bench.check(request)


def test_a_step_in_which_the_process_was_stopped_is_not_expected_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever waits for this worker would wait as long for one that hangs."""
    engine = OracleEngine(64)
    worker = bench.add("decode", engine)
    monkeypatch.setattr(worker, "clock", lambda: time.monotonic() + 31.0 * engine.steps)
    monkeypatch.setattr(worker.membership, "stood_still_s", lambda: 30.0 * engine.steps)
    request = make_request(40, 1)
    bench.tell("decode-0", Generate(request, 1))
    bench.until(lambda: bench.done(request))
    assert 1.0 <= worker.pace.longest <= 5.0


def test_a_turn_in_which_the_process_was_stopped_is_no_hang(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heart stood still as well, and whoever was stopped together with it has not missed that."""
    bench.lease_ms = 100_000
    engine = OracleEngine(64)
    worker = bench.add("decode", engine)
    bench.until(lambda: worker.membership.joined)
    step, stood_still_s, told = engine.step, [0.0], []

    def stopped(batch: Batch) -> StepResult:
        stood_still_s[0] += 3.0
        told.append(worker.membership._heartbeat(0).turn_ms)
        return step(batch)

    for part, clock in ((worker, "clock"), (worker.membership, "_clock")):
        monkeypatch.setattr(part, clock, lambda: time.monotonic() + 1.1 * stood_still_s[0])
    monkeypatch.setattr(worker.membership, "stood_still_s", lambda: stood_still_s[0])
    monkeypatch.setattr(engine, "step", stopped)
    request = make_request(40, 3)
    bench.tell("decode-0", Generate(request, 1))
    bench.until(lambda: bench.done(request))
    assert len(told) >= 3 and all(300 <= turn_ms <= 2000 for turn_ms in told)


def test_without_a_coordinator_everything_is_freed_at_the_end_of_the_lease(bench: Bench) -> None:
    bench.lease_ms = 300
    bench.add("prefill", OracleEngine(512))
    decode = bench.add("decode", OracleEngine(512, max_model_len=8192))
    running, reserved = make_request(100, 8000), make_request(90, 4)
    bench.place(running, "prefill-0", "decode-1")
    bench.until(lambda: len(decode.holdings()) == 1)
    renewed_until = time.monotonic() + 0.6  # twice as long as without
    while time.monotonic() < renewed_until:
        bench.tell("decode-1", Lease(pack_transfers([TransferId(running.id, 1)]), 0))
        bench.turn()
        assert len(decode.holdings()) == 1
    bench.tell("decode-1", Reserve(reserved, 1, bench.peer("prefill-0")))
    bench.until(lambda: len(decode.holdings()) == 2)
    bench.until(lambda: not decode.holdings(), deadline_s=2)
    assert decode.cache.pool.counts.held == 0


def test_a_worker_without_work_says_that_its_coordinator_is_silent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("common.worker.loop.LONELY_S", 0.2)
    bench.lease_ms = 300
    bench.add("decode", OracleEngine(64))
    bench.until(lambda: "127.0.0.1" in caplog.text and "has said nothing for" in caplog.text)
    assert "requests are dropped" not in caplog.text


def test_a_worker_that_is_turned_away_says_so_at_once_and_then_now_and_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each time that it dials anew nothing is known for a moment."""
    worker, why = bench.add("decode", OracleEngine(64)), "it asks for a key"
    now = worker.clock()
    for tick in range(1, 100):  # tenths of a second
        refusal = why if tick % 20 else ""
        monkeypatch.setattr(Membership, "refusal", property(lambda _, refusal=refusal: refusal))
        worker._complain(now + tick / 10)
        assert tick > 50 or caplog.text.count(why) == 1
    assert caplog.text.count(why) == 2 and "is it started?" not in caplog.text
    monkeypatch.setattr(Membership, "refusal", "")
    worker._complain(now + 100)
    assert "has not let this worker in so far" in caplog.text


def test_a_request_that_can_never_fit_is_refused_in_words(bench: Bench) -> None:
    bench.add("colocated", OracleEngine(8))
    request = make_request(100, 100)
    bench.tell("colocated-0", Generate(request, 1))
    bench.until(lambda: (request.id, 1) in bench.failed)
    failed = bench.failed[request.id, 1]
    assert failed.code == "too_long" and "200 tokens" in failed.detail and not failed.retriable


@pytest.mark.parametrize("logprobs", [None, 1])
def test_what_has_finished_can_be_told_again_for_a_while_and_keeps_no_prompt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logprobs: int | None
) -> None:
    worker = bench.add("colocated", OracleEngine(64))
    request = make_request(90, 6, n=2, logprobs=logprobs)
    bench.tell("colocated-0", Generate(request, 1))
    bench.until(lambda: bench.done(request))
    told = {key: (stream, bench.finished[key]) for key, stream in bench.streams.items()}
    bench.finished.clear()
    for choice in range(2):
        bench.streams[request.id, 1, choice] = told[request.id, 1, choice][0][:2]
        bench.tell("colocated-0", Resend(request.id, 1, choice, 2))
    bench.until(lambda: len(bench.finished) == 2)
    assert {key: (stream, bench.finished[key]) for key, stream in bench.streams.items()} == told
    kept = worker._finished._outputs  # type: ignore[attr-defined]
    assert [len(each.tokens) for each in kept.values()] == [4 * 6, 4 * 6]
    assert [len(each.logprobs) for each in kept.values()] == [6 if logprobs else 0] * 2
    now = worker.clock() + KEPT_S + 1
    monkeypatch.setattr(worker, "clock", lambda: now)
    bench.turn()
    assert not kept


def test_first_tokens_that_ended_a_request_can_be_told_again(pair: Bench) -> None:
    """Decode has never heard of them, and prefill holds nothing of the request any more."""
    request = make_request(50, 1, n=2)
    pair.place(request, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(request) and pair.quiet())
    pair.streams.clear()
    pair.finished.clear()
    for choice in range(2):
        for name in pair.workers:
            pair.tell(name, Resend(request.id, 1, choice, 0))
    pair.until(lambda: pair.done(request))
    pair.check(request)


_SENSE: dict[str, Any] = {"prompt": pack_tokens([1, 2, 3]), "sampling": [8, 1], "n": 2, "emitted": [], "ended": []}
_NONSENSE: dict[str, dict[str, Any]] = {
    "no whole tokens": {"prompt": b"abc"},
    "no prompt": {"prompt": b""},
    "a strange token": {"prompt": pack_tokens([1, 1 << 31])},
    "no output": {"sampling": [0, 1]},
    "no choice": {"n": 0},
    "choices without end": {"n": 1 << 40},
    "no whole tokens of output": {"emitted": [b"", b"abc"]},
    "a strange token of output": {"emitted": [b"", pack_tokens([1 << 31])]},
    "output of too many": {"emitted": [b"", b"", b""]},
    "output of too few": {"emitted": [b""]},
    "ended without output": {"ended": [0]},
    "nobody has ended": {"emitted": [b"", b""], "ended": [2]},
    "all have ended": {"emitted": [b"", b""], "ended": [0, 1]},
    "an attempt without end": {"attempt": 1 << 40},
}


@pytest.mark.parametrize("wrong", _NONSENSE.values(), ids=_NONSENSE)
def test_a_request_that_makes_no_sense_harms_nobody(pair: Bench, wrong: dict[str, Any]) -> None:
    """Messages of the right type with wrong content: each is counted, and the next one is served."""
    said = {**_SENSE, **wrong}
    fields = [bytes(16), said["prompt"], said["sampling"], said["n"], said["emitted"], "", 0, 1000, said["ended"]]
    attempt = said.get("attempt", 1)
    peers = {name: msgspec.to_builtins(pair.peer(name), builtin_types=(bytes,)) for name in pair.hellos}
    for worker, message in (
        ("decode-1", ["reserve", fields, attempt, peers["prefill-0"]]),
        ("decode-1", ["generate", fields, attempt]),
        ("prefill-0", ["prefill", fields, attempt, peers["decode-1"]]),
    ):
        before = pair.workers[worker].membership.bad_messages
        pair.socket.send_multipart([pair.routes[worker], seal(msgspec.msgpack.encode(message))])
        pair.until(lambda: pair.workers[worker].membership.bad_messages > before)  # noqa: B023
    request = make_request(20, 3)
    pair.place(request, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(request))
    pair.check(request)


def test_nonsense_on_the_wire_harms_nobody(pair: Bench) -> None:
    request = make_request(80, 5)
    stranger = pair.context.socket(zmq.DEALER)
    stranger.connect(pair.peer("decode-1").address)
    for parts in ([b""], [b"x" * 68, b"y"], [b"TKV1" + b"\0" * 60, b""], [b"\xc1"], [b"a"] * 6):
        stranger.send_multipart(parts)
    pair.place(request, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(request))
    pair.until(lambda: pair.workers["decode-1"].receiver.bad_messages >= 4)  # type: ignore[attr-defined]
    stranger.close(0)
    pair.check(request)
    with pytest.raises(WireError):
        decode(b"\xc1", FromWorker)


def test_an_announcement_that_nobody_repeats_is_forgotten_after_the_lease(bench: Bench) -> None:
    """It was still unread when the coordinator took its request back, since its sender had died: nobody is waited for,
    and streams need not leave time for it."""
    bench.lease_ms = 300
    decode, prefill = bench.add("decode", OracleEngine(64)), bench.add("prefill", OracleEngine(64))
    assert isinstance(decode, DecodeWorker) and isinstance(prefill, PrefillWorker)
    request = make_request(40, 4)
    bench.tell("prefill-1", Prefill(request, 1, bench.peer("decode-0")))
    while not prefill.sender:
        prefill.turn()
    while not decode.receiver._socket.poll(0):  # the announcement is there, and not read yet
        pass
    bench.workers.pop("prefill-1")  # killed: no Cancel follows
    bench.tell("decode-0", Abort(request.id, 1))
    try:
        bench.until(lambda: decode.receiver.waited_for, 2.0)
        until = time.monotonic() + 1.0
        while time.monotonic() < until and decode.receiver.waited_for:
            bench.tell("decode-0", Lease(b"", 0))
            decode.turn()
        assert not decode.receiver.waited_for
    finally:
        prefill.close()
        prefill.engine.close()  # type: ignore[attr-defined]
