"""Telling a long silence from a failure: step time estimates, sender timeouts, heartbeats over a hung engine."""

from __future__ import annotations

import random

import pytest

from common.core.ids import RequestId, TransferId
from common.core.timeouts import FailureTimes
from common.kv.layout import KvLayout, LayerLayout
from common.net.messages import Heartbeat
from common.worker.step_times import FIRST_STEP_S, REMEMBERED, StepTimeEstimator
from coordinator.cluster.registry import HANG_STEPS, Registry
from coordinator.requests.admission import MIN_RETRIES, RETRY_SHARE, RetryBudget
from kvtransfer.session import SenderSession, TransferLimits, TransferState
from tests.unit.coordinator.cluster.test_registry import join

LAYOUT = KvLayout((LayerLayout(1, 4, 4),), "float32", 16)
LIMITS = TransferLimits(no_progress_s=2.0, busy_steps=4.0, lag_s=0.1)


def test_estimator_expects_time_of_similar_steps() -> None:
    estimator = StepTimeEstimator()
    assert estimator.expect(1, 1) == FIRST_STEP_S and estimator.longest == 0
    estimator.took(1, 64, 0.01)
    estimator.took(1, 64, 0.03)
    assert estimator.expect(1, 64) == 0.03
    assert estimator.expect(64, 64 * 64) == 0.03 * 2**6, "a size without a measurement"
    estimator.took(64, 64 * 64, 0.2)
    assert estimator.expect(64, 64 * 64) == estimator.expect(100, 64 * 64) == estimator.longest == 0.2
    assert estimator.expect(8, 64 * 8) == 0.2, "no more than a larger one took"
    assert estimator.expect(1, 64) == 0.03
    for _ in range(40):
        estimator.took(64, 64 * 64, 0.1)
    assert estimator.expect(64, 64 * 64) == estimator.longest == 0.1, "what was long ago is forgotten"


def test_the_longest_of_the_last_steps_is_forgotten_after_as_many_more() -> None:
    estimator, rng, seconds = StepTimeEstimator(), random.Random(1), list[float]()
    for step in range(20 * REMEMBERED):
        seconds.append(rng.choice((0.001, 0.002, 0.003, rng.random() * 0.1 * (step % 7 == 0))))
        estimator.took(1, 1, seconds[-1])
        assert estimator.longest == estimator.expect(1, 1) == max(seconds[-REMEMBERED:])
        assert estimator.last == seconds[-1]


def test_few_tokens_over_a_long_context_are_expected_to_take_long() -> None:
    estimator = StepTimeEstimator()
    estimator.took(32, 32 * 32, 0.16)
    assert estimator.expect(32, 32 * 3000) >= 0.16 * 64
    estimator.took(32, 32 * 3000, 3.0)
    assert estimator.expect(32, 32 * 3000) == 3.0 and estimator.expect(32, 32 * 32) == 0.16


def test_one_long_step_does_not_excuse_short_ones() -> None:
    estimator = StepTimeEstimator()
    estimator.took(512, 512 * 512, 15.0)
    for _ in range(REMEMBERED):
        estimator.took(1, 600, 0.004)
    assert estimator.expect(1, 601) == estimator.longest == 0.004


def test_a_small_step_before_any_small_one_is_expected_like_the_smallest() -> None:
    estimator = StepTimeEstimator()
    estimator.took(512, 512 * 512, 1.0)
    assert estimator.expect(1, 600) == 1.0


def test_all_times_of_failures_follow_from_one() -> None:
    usual, quick, patient = FailureTimes(), FailureTimes(0.5), FailureTimes(60.0)
    assert (usual.heartbeat_s, usual.sweep_s, usual.silence_s, usual.lease_s) == (0.5, 0.25, 1.75, 8.0)
    assert (quick.heartbeat_s, quick.sweep_s, quick.silence_s, quick.lease_s) == (0.125, 0.0625, 0.4375, 2.0)
    assert patient.heartbeat_s == usual.heartbeat_s, "routing needs the figures in heartbeats"
    assert patient.silence_s + patient.sweep_s == 60.0
    limits = TransferLimits()
    assert (limits.no_progress_s, limits.renew_s, limits.lease_s) == (2.0, 0.5, 8.0)


def test_registry_scales_silence_and_hang_with_timeout() -> None:
    for timeout_s in (0.5, 2.0, 8.0):
        registry = Registry(None, times := FailureTimes(timeout_s))
        worker, now = join(registry), 0.0
        registry.beat(worker, beat(int(900 * timeout_s), 1), 0.0)
        assert not registry.hangs(worker)
        registry.beat(worker, beat(int(1100 * timeout_s), 1), 0.0)
        assert registry.hangs(worker)
        while not registry.sweep(now):
            now += times.sweep_s
        assert timeout_s <= now <= timeout_s + times.sweep_s


def waiting(grant_at: float | None = None) -> SenderSession:
    session = SenderSession(TransferId(RequestId(bytes(16)), 0), LAYOUT, 32, 0.0, LIMITS)
    if grant_at is not None:
        session.heard(0.0, grant_at)
        session.granted(0, "zmq", 1 << 20, grant_at)
    return session


def turn(session: SenderSession, since: float, until_s: float, every: float = 0.05) -> float:
    """Tick until the session is over or ``until_s`` is reached; return that time."""
    now = since
    while now < until_s and not session.over:
        now += every
        session.tick(now)
    return now


def test_session_expires_without_answer_to_announcement() -> None:
    session = waiting()
    assert 2.0 < turn(session, 0.0, 10.0) < 2.2 and session.state is TransferState.EXPIRED
    assert "blocks" in session.why_ended


def test_one_that_is_heard_may_wait_for_blocks_as_long_as_it_takes() -> None:
    session = waiting()
    for second in range(60):
        session.heard(0.0, float(second))
        turn(session, float(second), second + 1.0)
    assert session.state is TransferState.RESERVED


def test_waiting_for_our_own_computing_is_no_silence() -> None:
    session = waiting(grant_at=0.5)
    turn(session, 0.5, 60.0)
    assert session.state is TransferState.SENDING


@pytest.mark.parametrize(("step_s", "patience_s"), [(0.0, 2.0), (0.4, 2.0), (2.0, 8.0)])
def test_frames_without_an_answer_wait_for_the_steps_of_the_other_side(step_s: float, patience_s: float) -> None:
    session = waiting(grant_at=0.0)
    session.heard(step_s, 0.0)
    session.computed(32, 1)
    cells = session.next_cells()
    session.sent(cells, 1024, 1)  # type: ignore[arg-type]
    assert patience_s < turn(session, 0.0, 60.0) < patience_s + 0.2 and session.state is TransferState.EXPIRED


def test_the_time_in_which_we_do_not_listen_is_no_silence_of_theirs() -> None:
    session = waiting(grant_at=0.0)
    session.computed(32, 1)
    session.sent(session.next_cells(), 1024, 1)  # type: ignore[arg-type]
    session.tick(0.1)
    session.tick(30.0)  # a step of our own took half a minute
    assert session.state is TransferState.SENDING
    assert turn(session, 30.0, 60.0) < 32.2 and session.state is TransferState.EXPIRED


def test_session_excuses_own_absence_once() -> None:
    session = waiting()
    session.tick(0.1)
    session.heard(0.0, 30.0)  # it was waiting to be read, and is read before the timers run
    session.tick(30.0)
    assert session.progress_at == 30.0
    assert 32.0 < turn(session, 30.0, 90.0) < 32.2 and session.state is TransferState.EXPIRED


def beat(turn_ms: int, expected_ms: int) -> Heartbeat:
    return Heartbeat("d", 0, b"", 1, 0, 0, 1, 0, 0, turn_ms, False, {}, expected_ms)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("turn_ms", "expected_ms", "hangs"),
    [(-1, 0, False), (1900, 1, False), (2100, 1, True), (7900, 2000, False), (8100, 2000, True)],
)
def test_registry_detects_hang_behind_regular_heartbeats(turn_ms: int, expected_ms: int, hangs: bool) -> None:
    assert HANG_STEPS == 4.0
    registry = Registry(None, FailureTimes(2.0))
    worker = join(registry)
    registry.beat(worker, beat(turn_ms, expected_ms), 0.0)
    assert registry.hangs(worker) is hangs


def test_so_many_may_try_again_at_once() -> None:
    budget = RetryBudget()
    ids = [RequestId(number.to_bytes(16, "big")) for number in range(100)]
    for request in ids[:MIN_RETRIES]:
        assert budget.allows(1)
        budget.placed(request)
    assert not budget.allows(1) and budget.allows(int(MIN_RETRIES / RETRY_SHARE) + 1)
    assert budget.settled(ids[0]) and not budget.settled(ids[0])
    assert budget.allows(1)
