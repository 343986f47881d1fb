"""One turn of a worker: its limits, its work between long steps, and its messages."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from common.core.ids import RequestId, TransferId
from common.net.messages import Generate, Measure, Prefill, Reserve
from common.worker.loop import PUBLISH_S
from decode.role import BUDGET_S, BUDGET_SHARE, MOST_BUDGET_SHARE, DecodeWorker
from prefill.role import PrefillWorker
from tests.fakes.oracle import OracleEngine
from tests.unit.workers import Bench, make_request


def test_frames_without_end_do_not_keep_a_worker_from_its_control_messages(
    pair: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker stops when its time for moving KV is over, and starts the next turn at once: no message will wake
    it."""
    monkeypatch.setattr("prefill.role.BUDGET_S", 0.0)
    prefill = pair.workers["prefill-0"]
    for name, other in (("decode-1", "prefill-0"), ("prefill-0", "decode-1")):
        pair.send(name, Measure(RequestId(b"measure the link"), 0, pair.peer(other), 100))
    pair.until(prefill.more_to_move)
    assert prefill.turn() == 0.0
    monkeypatch.setattr("prefill.role.BUDGET_S", 1.0)
    pair.until(lambda: pair.measured)
    pair.until(pair.quiet)
    assert not prefill.more_to_move() and prefill.turn() > 0


def test_long_step_publishes_heartbeat_snapshot(bench: Bench) -> None:
    """Short steps publish the snapshot for heartbeats now and then; a step longer than that interval publishes it at
    its end."""
    worker = bench.add("decode", OracleEngine(64))
    request = make_request(40, 3)
    step = worker.engine.step

    def slow(batch: Any) -> Any:
        time.sleep(2 * PUBLISH_S)
        return step(batch)

    worker.engine.step = slow  # type: ignore[method-assign]
    bench.send("decode-0", Generate(request, 1))
    bench.until(lambda: worker.holdings())  # one turn has computed the first chunk
    assert worker.membership.snapshot.live == request.id
    bench.until(lambda: bench.done(request))


def test_beside_streams_a_worker_takes_in_less_the_fewer_hand_offs_there_are(bench: Bench) -> None:
    decode, _ = bench.add("decode", OracleEngine(64)), bench.add("prefill", OracleEngine(64))
    assert isinstance(decode, DecodeWorker) and decode._budget_s() == BUDGET_S
    bench.send("decode-0", Generate(request := make_request(40, 60), 1))
    bench.until(lambda: decode.planner.running)
    decode.step_times.took(512, 512, 2.0)
    decode.step_times.took(1, 1, 0.01)
    assert decode._budget_s() == pytest.approx(BUDGET_SHARE * 0.01), "the long step is over"
    transfers = [TransferId(RequestId(bytes([count] * 16)), 1) for count in range(8)]
    for count, transfer in enumerate(transfers, 1):
        decode.receiver.expect(transfer, 16, 0, [], bench.peer("prefill-1"), decode.clock())
        assert decode._budget_s() == pytest.approx(min(MOST_BUDGET_SHARE, BUDGET_SHARE * count) * 0.01)
    for transfer in transfers:
        decode.receiver.cancel(transfer, "it was none")
    bench.until(lambda: bench.done(request))


def test_many_that_announce_themselves_beside_long_steps_are_answered_within_a_few(bench: Bench) -> None:
    """Also while no blocks can be reserved for them: a sender that gets no answer gives its hand-off up after a
    while."""
    decode, prefill = bench.add("decode", OracleEngine(64)), bench.add("prefill", OracleEngine(64))
    assert isinstance(decode, DecodeWorker) and isinstance(prefill, PrefillWorker)
    bench.send("decode-0", Generate(stream := make_request(40, 60), 1))
    bench.until(lambda: decode.planner.running)
    step, steps = decode.engine.step, itertools.count()

    def slow(batch: Any) -> Any:
        next(steps)
        time.sleep(0.05)  # the length of a step
        return step(batch)

    decode.engine.step = slow  # type: ignore[method-assign]
    bench.turn()
    requests = [make_request(16, 3) for _ in range(20)]
    for request in requests:
        bench.send("prefill-1", Prefill(request, 1, bench.peer("decode-0")))
    while len(prefill.sender) < len(requests):
        prefill.turn()
    before = next(steps)
    bench.until(lambda: decode.receiver.waited_for == len(requests))
    assert next(steps) - before < len(requests) / 3
    decode.engine.step = step  # type: ignore[method-assign]
    for request in requests:
        bench.send("decode-0", Reserve(request, 1, bench.peer("prefill-1")))
    bench.until(lambda: bench.done(stream, *requests))
    for request in requests:
        bench.check(request)


def test_all_cached_prefixes_are_announced_in_messages_that_are_taken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.worker.report.MAX_KEYS", 3)
    worker = bench.add("colocated", OracleEngine(64))
    request = make_request(16 * 7, 1)
    bench.send("colocated-0", Generate(request, 1))
    bench.until(lambda: bench.done(request))
    bench.until(lambda: sum(len(each.added) for each in bench.cached) == 16 * 7)
    worker.cache.prefix.announce_all()
    bench.until(lambda: sum(len(each.added) for each in bench.cached) == 2 * 16 * 7)
    assert max(len(each.added) for each in bench.cached) == 16 * 3


def test_worker_refuses_more_requests_than_heartbeat_lists(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.worker.held_requests.MAX_HELD", 2)
    bench.add("colocated", OracleEngine(64))
    requests = [make_request(20, 30) for _ in range(3)]
    for request in requests:
        bench.send("colocated-0", Generate(request, 1))
    bench.until(lambda: bench.done(*requests[:2]))
    assert (failed := bench.failed[requests[2].id, 1]).code == "no_memory" and failed.retriable
    again = make_request(20, 3)
    bench.send("colocated-0", Generate(again, 1))
    bench.until(lambda: bench.done(again))
