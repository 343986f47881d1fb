"""Workers whose connection was closed: when they count as dead, and who may return."""

from __future__ import annotations

from coordinator.cluster.lost_workers import REJOIN_LOOKS, LostWorkers
from coordinator.cluster.registry import WorkerHandle
from tests.unit.gateway_harness import hello_of


def worker_of(role: str) -> WorkerHandle:
    return WorkerHandle(hello_of(role), 0.0, 0.0)  # type: ignore[arg-type]


def test_a_missing_worker_is_dead_after_some_sweeps() -> None:
    lost, worker = LostWorkers(), worker_of("decode")
    lost.miss(worker)
    for _ in range(REJOIN_LOOKS - 1):
        assert not lost.look() and lost.get(worker.id) is worker
    assert lost.look() == [worker.id] and lost.get(worker.id) is None and not lost.look()


def test_a_missing_worker_that_has_sent_something_is_not_dead() -> None:
    lost, worker = LostWorkers(), worker_of("decode")
    lost.miss(worker)
    lost.look()
    missing = lost.missing_worker(worker.id)
    assert missing is not None and lost.away(worker.hello.name) is None
    assert missing.speaks() and not missing.speaks(), "only the first time is news"
    assert lost.away(worker.hello.name) is worker
    assert not any(lost.look() for _ in range(REJOIN_LOOKS)), "it is forgotten, not dead"
    assert lost.missing_worker(worker.id) is None and lost.away(worker.hello.name) is None


def test_losing_and_missing_workers_may_return() -> None:
    lost, prefill, decode = LostWorkers(), worker_of("prefill"), worker_of("decode")
    assert not lost.may_return("prefill")
    lost.lose(prefill)
    assert lost.may_return("prefill") and not lost.may_return("decode")
    assert lost.losing_worker(prefill.id) is prefill and lost.missing_worker(prefill.id) is None
    assert lost.not_losing(prefill.id) is prefill and lost.not_losing(prefill.id) is None
    lost.miss(decode)
    assert lost.may_return("decode") and not lost.may_return("prefill")
    assert lost.not_missing(decode.id) is not None and not lost.may_return("decode")
