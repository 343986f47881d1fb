"""Trial hand-offs that measure a link, and the work that they must not delay."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from common.core.ids import RequestId
from common.net.messages import Abort, Measure, Prefill
from decode.role import DecodeWorker
from tests.fakes.oracle import OracleEngine
from tests.unit.workers import Bench, make_request


def test_a_trial_measures_the_link_and_leaves_nothing(pair: Bench) -> None:
    identifier = RequestId(b"measure the link")
    pair.send("decode-1", Measure(identifier, 0, pair.peer("prefill-0"), 100))
    pair.send("prefill-0", Measure(identifier, 0, pair.peer("decode-1"), 100))
    pair.until(lambda: pair.measured)
    layout = pair.workers["prefill-0"].engine.layout
    assert [each.bytes for each in pair.measured] == [100 * layout.token_bytes]
    assert pair.measured[0].seconds > 0
    pair.until(pair.quiet)
    assert pair.workers["decode-1"].cache.pool.counts.cached == 0  # trial blocks never enter the prefix cache


def test_a_trial_too_large_for_the_pool_is_not_made(pair: Bench) -> None:
    for name, other in (("decode-1", "prefill-0"), ("prefill-0", "decode-1")):
        pair.send(name, Measure(RequestId(b"measure too much"), 0, pair.peer(other), 1_000_000))
    request = make_request(40, 3)
    pair.place(request, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(request))
    pair.check(request)


def test_a_trial_that_only_one_side_has_room_for_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.worker.held_requests.TRIAL_S", 0.2)
    prefill, _ = bench.add("prefill", OracleEngine(64)), bench.add("decode", OracleEngine(4))
    bench.send("decode-1", Measure(RequestId(b"measure one side"), 0, bench.peer("prefill-0"), 500))
    bench.send("prefill-0", Measure(RequestId(b"measure one side"), 0, bench.peer("decode-1"), 500))
    bench.until(lambda: prefill.cache.pool.counts.held)
    bench.until(bench.quiet, 5)
    assert prefill.cache.pool.counts.held == 0
    assert not bench.measured


def test_a_trial_does_not_hold_up_a_drain(bench: Bench) -> None:
    prefill, _ = bench.add("prefill", OracleEngine(64)), bench.add("decode", OracleEngine(64))
    bench.send("prefill-0", Measure(RequestId(b"measure no decod"), 0, bench.peer("decode-1"), 100))
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
        bench.send(name, Measure(RequestId(b"measure a signal"), 0, bench.peer(other), 100))
    with leaving._waker.attached():
        bench.until(lambda: struck)
        assert leaving.draining_until is None
        leaving._wait(0.0)
    assert leaving.finished()
    bench.until(bench.quiet)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_second_signal_stops_draining_worker(bench: Bench, role: str) -> None:
    """Prefill waits for a grant that never comes, decode for the end of a long answer: draining would take long."""
    bench.add("prefill", OracleEngine(64))
    bench.add("decode", OracleEngine(64))
    request = make_request(40, 800)
    if role == "decode":
        bench.place(request, "prefill-0", "decode-1")
        bench.until(lambda: len(bench.streams[request.id, 1, 0]) > 3)
    else:
        bench.send("prefill-0", Prefill(request, 1, bench.peer("decode-1")))
        bench.until(lambda: bench.streams[request.id, 1, 0])
    leaving = bench.workers["prefill-0" if role == "prefill" else "decode-1"]
    with leaving._waker.attached():
        for asked in (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
            leaving._wait(1.0)
            assert leaving.draining_until is not None and leaving.finished() == (asked == 2)
            bench.turn()
            assert leaving.holdings(), "there is something to wait for"
    leaving.close()
    assert leaving.cache.leaks() == {} and leaving.cache.pool.counts.held == 0
    leaving.engine.close()  # type: ignore[attr-defined]
    del bench.workers[leaving.membership.hello.name]
    bench.until(lambda: leaving.incarnation in bench.goodbyes)
    for name in bench.workers:
        bench.send(name, Abort(request.id, 1))
