"""Prefill and decode workers on the oracle engine, with the test as their coordinator: every byte of KV arrives."""

from __future__ import annotations

import itertools
import random
import time

import msgspec
import pytest

from common.core.ids import Incarnation, RequestId, TransferId, WorkerName, pack_tokens
from common.core.request import Request
from common.kv.layout import ELEMENT_BYTES, KvDtype, converts
from common.net.messages import Abort, Generate, Lease, Measure, Peer, Prefill, Reserve
from decode.role import DecodeWorker
from kvtransfer.links.faulty import FaultRates, FaultyChannels
from prefill.role import PrefillWorker
from tests.fakes.oracle import OracleEngine, oracle_stream
from tests.pace import scaled
from tests.unit.workers import Bench, make_request


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
@pytest.mark.parametrize(
    "dtypes", [pair for pair in itertools.permutations(ELEMENT_BYTES, 2) if converts(*pair)], ids=" to ".join
)
def test_kv_of_one_element_type_is_placed_as_another(bench: Bench, dtypes: tuple[KvDtype, KvDtype], link: str) -> None:
    """The oracle's values are exact in every type, so the tokens are the same as well."""
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
    """The two sides also differ in block size."""
    for role, head_shards, block_size in zip(("prefill", "decode"), shards, (32, 16), strict=True):
        bench.add(role, OracleEngine(128, block_size, head_shards=head_shards), kv_transport=link)
    for length in (1, 40, 200):
        request = make_request(length, 20)
        bench.place(request, "prefill-0", "decode-1")
        bench.until(lambda request=request: bench.done(request))
        bench.check(request)
        assert bench.shipped(request)[0].link == link


def test_kv_is_found_again_only_where_it_was_computed_in_the_same_type(bench: Bench) -> None:
    """KV computed in float32 and KV widened from bfloat16 are different cache entries, though one pool holds both."""
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
        reported = bench.shipped(request)
        assert reported[0].values["kv_bytes"] == travels * bench.workers[prefill].engine.layout.token_bytes
    local = make_request(1, 5)
    local = Request(local.id, prompt, local.sampling)
    bench.send("decode-2", Generate(local, 1))
    bench.until(lambda: bench.done(local))
    bench.check(local)
    assert decode.planner.hit_tokens == 96, "what others computed is found here, too, but not in place of computing it"


def test_a_sender_that_says_another_element_type_than_the_coordinator_is_refused(pair: Bench) -> None:
    request = make_request(40, 4)
    liar = msgspec.structs.replace(pair.peer("prefill-0"), dtype="float16")
    pair.send("decode-1", Reserve(request, 1, liar))
    pair.send("prefill-0", Prefill(request, 1, pair.peer("decode-1")))
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
    assert shipped[0].values["kv_bytes"] == (130 - 96) * token_bytes  # decode has cached three blocks of 32 tokens


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
    pair.send("decode-1", Abort(request.id, 1))  # as the coordinator does
    pair.until(pair.quiet)
    pair.check(request)


def test_retry_continues_after_emitted_tokens(pair: Bench) -> None:
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
    pair.send("prefill-0", Abort(request.id, 1))
    pair.send("decode-1", Abort(request.id, 1))
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
    bench.send("decode-1", Generate(large, 1))
    placed = len(small)
    while not bench.done(large):
        bench.turn()
        for index, request in enumerate(small):
            if bench.done(request):  # a new request follows at once, so 13 of the 20 blocks are never free together
                small[index] = make_request(30, 40)
                bench.place(small[index], "prefill-0", "decode-1")
                placed += 1
        assert placed < 30, "it waits for ever"
    bench.until(lambda: bench.done(*small))
    for request in (large, *small):
        bench.check(request)


def compute_without_blocks_at_decode(bench: Bench, request: Request) -> None:
    """Send ``request`` to prefill and not yet to decode; return when the prompt is computed and holds its blocks."""
    bench.send("prefill-0", Prefill(request, 1, bench.peer("decode-1")))
    bench.until(lambda: bench.workers["prefill-0"].holdings() and bench.streams[request.id, 1, 0])


@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_without_blocks_at_decode_makes_way_for_one_that_has_them(bench: Bench, caching: bool) -> None:
    """Otherwise the pools of prefill and decode could each hold the blocks that the other's prompts wait for."""
    prefill = bench.add("prefill", OracleEngine(14, 16), prefix_caching=caching)
    bench.add("decode", OracleEngine(64, 16), prefix_caching=caching)
    early, urgent = make_request(150, 9, n=2), make_request(150, 5, priority=5)
    compute_without_blocks_at_decode(bench, early)
    bench.place(urgent, "prefill-0", "decode-1")
    bench.until(lambda: bench.done(urgent))
    assert prefill.report.counters["set_aside_prompts"] == 1
    assert not bench.done(early) and TransferId(early.id, 1) in prefill.holdings()
    bench.send("decode-1", Reserve(early, 1, bench.peer("prefill-0")))
    bench.until(lambda: bench.done(early))
    bench.check(urgent)
    bench.check(early)
    assert not bench.failed
    reported = [each.values for each in bench.timings if each.request == early.id and "prefill_ms" in each.values]
    assert [values.get("decode_wait_ms") is None for values in reported] == [True, False], "once, and once by decode"


def test_prompts_waiting_for_decode_keep_their_blocks(bench: Bench) -> None:
    prefill = bench.add("prefill", OracleEngine(14, 16))
    bench.add("decode", OracleEngine(64, 16))
    first, second = make_request(150, 5), make_request(150, 5)
    compute_without_blocks_at_decode(bench, first)
    bench.send("prefill-0", Prefill(second, 1, bench.peer("decode-1")))
    bench.until(lambda: prefill.planner.in_need)
    held = prefill.cache.pool.counts.held
    for _ in range(20):
        bench.turn()
    assert prefill.cache.pool.counts.held == held and "set_aside_prompts" not in prefill.report.counters
    for request in (second, first):  # the first prompt must make room for the second
        bench.send("decode-1", Reserve(request, 1, bench.peer("prefill-0")))
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
    bench.send("prefill-0", Abort(early.id, 1))
    bench.until(lambda: not prefill.holdings())
    assert len(prefill.sender) == 0  # type: ignore[attr-defined]


def test_an_address_that_is_none_fails_that_request_only(pair: Bench) -> None:
    bad, good = make_request(40, 3), make_request(40, 3)
    nowhere = Peer(WorkerName("decode-9"), Incarnation("nine"), "nonsense", "host", "float32")
    pair.send("prefill-0", Measure(RequestId(b"measure nonsense"), 0, nowhere, 100))
    pair.send("prefill-0", Prefill(bad, 1, nowhere))
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
    bench.place(second, "prefill-0", "decode-1")  # waits until the first request has gone
    bench.until(lambda: bench.done(first, second))
    assert decode.planner.preemptions == 0
    assert (prefill.planner.queried_tokens, decode.planner.queried_tokens) == (190, 0)


def test_decode_reports_cached_tokens_of_prefill(pair: Bench) -> None:
    """Decode's whole answer may overtake prefill's messages, and the answer's usage counts these tokens."""
    first = make_request(100, 4)
    again = msgspec.structs.replace(first, id=make_request(100, 4).id)
    for request, cached in ((first, 0), (again, 96)):
        pair.place(request, "prefill-0", "decode-1")
        pair.until(lambda request=request: pair.done(request))
        [reported] = [
            each.values for each in pair.timings if each.request == request.id and "decode_wait_ms" in each.values
        ]
        assert reported["cached_tokens"] == cached and reported["prefill_ms"] > 0 and "queue_ms" in reported


def test_two_hosts_take_zeromq_by_themselves(bench: Bench) -> None:
    bench.add("prefill", OracleEngine(64), host="one")
    bench.add("decode", OracleEngine(64), host="two")
    request = make_request(100, 4)
    bench.place(request, "prefill-0", "decode-1")
    bench.until(lambda: bench.done(request))
    bench.check(request)
    assert [each.link for each in bench.shipped(request)] == ["zmq"]


def test_unrepeated_announcement_expires_after_lease(bench: Bench) -> None:
    """The sender died and the coordinator aborted the request while the announcement was unread. After the lease the
    receiver waits for no sender, and streams need not leave time for transfers."""
    bench.lease_ms = 300
    decode, prefill = bench.add("decode", OracleEngine(64)), bench.add("prefill", OracleEngine(64))
    assert isinstance(decode, DecodeWorker) and isinstance(prefill, PrefillWorker)
    request = make_request(40, 4)
    bench.send("prefill-1", Prefill(request, 1, bench.peer("decode-0")))
    while not prefill.sender:
        prefill.turn()
    while not decode.receiver._socket.poll(0):  # the announcement has arrived and is not read yet
        pass
    bench.workers.pop("prefill-1")  # killed: no Cancel follows
    bench.send("decode-0", Abort(request.id, 1))
    try:
        bench.until(lambda: decode.receiver.waited_for)
        until = time.monotonic() + scaled(5.0)
        while time.monotonic() < until and decode.receiver.waited_for:
            bench.send("decode-0", Lease(b"", 0))
            decode.turn()
        assert not decode.receiver.waited_for
    finally:
        prefill.close()
        prefill.engine.close()  # type: ignore[attr-defined]
