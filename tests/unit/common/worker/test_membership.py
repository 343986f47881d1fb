"""Leases, Welcomes and silences between a worker and its coordinator."""

from __future__ import annotations

import time

import pytest

from common.core.ids import Incarnation, RequestId, TransferId, pack_transfers
from common.core.sequence import Batch, StepResult
from common.net.messages import Generate, Lease, Reserve, Welcome
from common.worker.membership import Membership
from kvtransfer.session import TransferLimits
from tests.fakes.oracle import OracleEngine
from tests.unit.workers import Bench, make_request


def test_worker_drops_requests_missing_from_lease(pair: Bench) -> None:
    """Both Aborts of the first request are lost; of the second request, one attempt is void and one is valid."""
    lost, kept = make_request(100, 400), make_request(90, 400)
    pair.place(lost, "prefill-0", "decode-1")
    pair.send("decode-1", Reserve(kept, 1, pair.peer("prefill-0")))
    pair.place(kept, "prefill-0", "decode-1", attempt=2)
    pair.until(lambda: len(pair.streams[lost.id, 1, 0]) > 3 and len(pair.streams[kept.id, 2, 0]) > 3)
    for name in pair.workers:
        pair.send(name, Lease(b"torn", 0))
        pair.send(name, Lease(pack_transfers([TransferId(kept.id, 2), TransferId(RequestId(bytes(16)), 9)]), 0))
    decode = pair.workers["decode-1"]
    pair.until(lambda: decode.holdings() == {TransferId(kept.id, 2)})
    assert decode.report.counters["reaped_requests"] == 2
    assert decode.membership.bad_messages == 1
    for name in pair.workers:
        pair.send(name, Lease(b"", 0))
    pair.until(pair.quiet)


def test_workers_adopt_times_of_latest_welcome(pair: Bench) -> None:
    """A second coordinator's Welcome, with other times, also takes effect."""
    for name in pair.workers:
        pair.send(name, Welcome(Incarnation("other"), 20, 400_000, 50_000))
    pair.until(lambda: pair.beats >= 40, deadline_s=4)  # at the default of two a second, two workers would send 16
    prefill, decode = pair.workers["prefill-0"], pair.workers["decode-1"]
    reported = TransferLimits(no_progress_s=50.0, renew_s=0.02, lease_s=400.0)
    assert prefill.sender._limits == decode.receiver._limits == reported  # type: ignore[attr-defined]
    assert decode.receiver._sources.lease_s == 400.0  # type: ignore[attr-defined]
    request = make_request(50, 4)
    pair.place(request, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(request))
    pair.check(request)


def test_nothing_is_taken_before_a_welcome(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the Welcome, the worker does not know how long it may hold a request without a lease."""
    monkeypatch.setattr("common.worker.membership.RECONNECT_S", 0.2)
    bench.lost_welcomes = 1
    worker = bench.add("decode", OracleEngine(512))
    request = make_request(40, 4)
    bench.send("decode-0", Generate(request, 1))
    bench.send("decode-0", Lease(pack_transfers([TransferId(request.id, 1)]), 0))
    bench.until(lambda: worker.membership.joined)
    assert not worker.holdings() and not bench.streams
    bench.send("decode-0", Generate(request, 1))
    bench.until(lambda: bench.done(request))
    bench.check(request)


def test_worker_reconnects_after_lease_without_renewal(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection may be dead without any error."""
    worker = bench.add("decode", OracleEngine(64))
    bench.until(lambda: worker.membership.joined and worker.membership.connected)
    first, lease_s, ahead_s = worker.membership._socket, bench.lease_ms / 1000, [0.0]
    monkeypatch.setattr(worker.membership, "_clock", lambda: time.monotonic() + ahead_s[0])
    for number in range(100, 112):  # three leases
        ahead_s[0] += lease_s / 4
        bench.deliver("decode-0", Lease(b"", number))
    assert worker.membership._socket is first and bench.joins == 1
    bench.until(lambda: bench.renewed == 12)  # each is answered
    ahead_s[0] += lease_s
    bench.until(lambda: bench.joins == 2 and worker.membership.joined)
    assert worker.membership._socket is not first and first.closed
    request = make_request(40, 4)
    bench.send("decode-0", Generate(request, 1))
    bench.until(lambda: bench.done(request))
    bench.check(request)


def test_a_step_in_which_the_process_was_stopped_is_not_expected_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a hung worker would be waited for just as long."""
    engine = OracleEngine(64)
    worker = bench.add("decode", engine)
    monkeypatch.setattr(worker, "clock", lambda: time.monotonic() + 31.0 * engine.steps)
    monkeypatch.setattr(worker.membership, "stood_still_s", lambda: 30.0 * engine.steps)
    request = make_request(40, 1)
    bench.send("decode-0", Generate(request, 1))
    bench.until(lambda: bench.done(request))
    assert 1.0 <= worker.step_times.longest <= 5.0


def test_a_turn_in_which_the_process_was_stopped_is_no_hang(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat thread was stopped too, and a coordinator stopped at the same time must see no hang."""
    bench.lease_ms = 100_000
    engine = OracleEngine(64)
    worker = bench.add("decode", engine)
    bench.until(lambda: worker.membership.joined)
    step, stood_still_s, reported = engine.step, [0.0], []

    def stopped(batch: Batch) -> StepResult:
        stood_still_s[0] += 3.0
        reported.append(worker.membership._heartbeat(0).turn_ms)
        return step(batch)

    for part, clock in ((worker, "clock"), (worker.membership, "_clock")):
        monkeypatch.setattr(part, clock, lambda: time.monotonic() + 1.1 * stood_still_s[0])
    monkeypatch.setattr(worker.membership, "stood_still_s", lambda: stood_still_s[0])
    monkeypatch.setattr(engine, "step", stopped)
    request = make_request(40, 3)
    bench.send("decode-0", Generate(request, 1))
    bench.until(lambda: bench.done(request))
    assert len(reported) >= 3 and all(300 <= turn_ms <= 2000 for turn_ms in reported)


def test_without_a_coordinator_everything_is_freed_at_the_end_of_the_lease(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.add("prefill", OracleEngine(512))
    decode = bench.add("decode", OracleEngine(512, max_model_len=8192))
    lease_s, ahead_s = bench.lease_ms / 1000, [0.0]
    monkeypatch.setattr(decode, "clock", lambda: time.monotonic() + ahead_s[0])
    running, reserved = make_request(100, 8000), make_request(90, 4)
    bench.place(running, "prefill-0", "decode-1")
    bench.until(lambda: len(bench.streams[running.id, 1, 0]) > 1)  # the hand-off is over
    for number in range(100, 112):  # three leases
        ahead_s[0] += lease_s / 4
        bench.deliver("decode-1", Lease(pack_transfers([TransferId(running.id, 1)]), number))
        assert len(decode.holdings()) == 1
    bench.deliver("decode-1", Reserve(reserved, 1, bench.peer("prefill-0")))
    assert len(decode.holdings()) == 2
    ahead_s[0] += lease_s
    bench.until(lambda: not decode.holdings())
    assert decode.cache.pool.counts.held == 0


def test_a_worker_without_work_says_that_its_coordinator_is_silent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("common.worker.connection_log.LONELY_S", 0.2)
    bench.lease_ms = 300
    bench.add("decode", OracleEngine(64))
    bench.until(lambda: "127.0.0.1" in caplog.text and "has been silent for" in caplog.text)
    assert "dropping" not in caplog.text


def test_refused_worker_logs_reason_at_intervals(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After each new connection the refusal is unknown for a moment."""
    worker, why = bench.add("decode", OracleEngine(64)), "it requires a key"
    now = worker.clock()
    for tick in range(1, 100):  # tenths of a second
        refusal = why if tick % 20 else ""
        monkeypatch.setattr(Membership, "refusal", property(lambda _, refusal=refusal: refusal))
        worker._connection_log.check(now + tick / 10)
        assert tick > 50 or caplog.text.count(why) == 1
    assert caplog.text.count(why) == 2 and "is it started?" not in caplog.text
    monkeypatch.setattr(Membership, "refusal", "")
    worker._connection_log.check(now + 100)
    assert "has not let this worker in so far" in caplog.text
