"""The last changes of workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from common.core.ids import Incarnation
from coordinator.cluster.worker_log import KEPT, WorkerLog


def worker(name: str, incarnation: str) -> Any:
    return SimpleNamespace(hello=SimpleNamespace(name=name, role="decode", incarnation=incarnation))


def test_a_worker_that_dies_and_comes_back() -> None:
    log, heard = WorkerLog(), list[Any]()
    log.listener = heard.append
    log.joined(worker("decode-0", "a"))
    log.draining(worker("decode-0", "a"))
    log.lost(worker("decode-0", "a"), "its connection broke")
    log.died(Incarnation("a"))
    log.died(Incarnation("of a worker that was never here"))
    log.joined(worker("decode-0", "b"))
    log.joined(worker("decode-1", "c"))
    found = [(change.name, change.state, change.why) for change in log.changes()]
    assert found == [
        ("decode-0", "joined", ""),
        ("decode-0", "draining", ""),
        ("decode-0", "lost", "its connection broke"),
        ("decode-0", "dead", "nothing has arrived from it since its connection closed"),
        ("decode-0", "back", ""),
        ("decode-1", "joined", ""),
    ]
    assert heard == log.changes()


def test_few_changes_are_kept() -> None:
    log = WorkerLog()
    for number in range(3 * KEPT):
        log.left(worker(f"decode-{number}", str(number)), "it has drained")
    assert len(log.changes()) == len(log._gone) == KEPT
    assert log.changes()[-1].name == f"decode-{3 * KEPT - 1}"
