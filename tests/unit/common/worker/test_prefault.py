"""The memory of KV blocks that an idle worker pre-faults."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from common.core.ids import new_request_id, pack_tokens
from common.core.request import Request, SamplingParams
from common.net.messages import Generate
from common.worker.loop import IDLE_S, WorkerSettings
from common.worker.prefault import POPULATED_BYTES
from decode.role import DecodeWorker
from tests.fakes.oracle import OracleEngine, hello_of, oracle_layout
from tests.fakes.system import needs_populate

BLOCKS = 1 << 13
SLACK = 1 << 14
"""Bytes allowed for partial pages at both ends and for the blocks' generation counters."""


@pytest.fixture
def worker_of() -> Iterator[Callable[..., DecodeWorker]]:
    made: list[DecodeWorker] = []

    def make(**settings: int) -> DecodeWorker:
        engine = OracleEngine(blocks=BLOCKS)
        settled = WorkerSettings("tcp://127.0.0.1:1", "h", 4, 64, **settings)
        made.append(DecodeWorker(engine, settled, hello_of(engine)))
        return made[-1]

    yield make
    while made:
        worker = made.pop()
        worker.requests.drop_all()
        worker.close()
        worker.engine.memory.close()
        del worker  # a reference to the worker would keep its generation counters mapped


def in_memory(worker: DecodeWorker) -> int:
    """Return how many bytes of the worker's pool are in memory."""
    return os.fstat(worker.engine.memory.fd).st_blocks * 512  # type: ignore[attr-defined]


@needs_populate
def test_a_worker_that_rests_has_memory_made_ready_for_blocks_to_come(worker_of: Callable[..., DecodeWorker]) -> None:
    size, ahead = oracle_layout(16).block_bytes, 3 * POPULATED_BYTES // 2
    assert size * BLOCKS > 3 * ahead, "so that the pool is larger than what is made ready"
    worker = worker_of(ahead_bytes=ahead)
    assert in_memory(worker) == 0
    assert worker.turn() == 0.0, "it looks for messages between two parts of it"
    assert POPULATED_BYTES <= in_memory(worker) < ahead
    assert [worker.turn() for _ in range(2)] == [0.0, IDLE_S]
    assert ahead <= in_memory(worker) < ahead + SLACK

    request = Request(new_request_id(), pack_tokens(range(1000)), SamplingParams(3, 0, ignore_eos=True))
    worker._generate(Generate(request, 0), worker.clock())
    while worker.holdings():
        worker.turn()
        assert in_memory(worker) < ahead + SLACK, "a request waits"
    peak = worker.cache.pool.peak * size
    assert peak >= 1000 // 16 * size > 2 * SLACK
    assert worker.turn() == 0.0
    assert ahead + peak <= in_memory(worker) < ahead + peak + SLACK
    assert worker.turn() == IDLE_S


def test_where_the_system_cannot_do_that_blocks_get_their_memory_when_they_are_used(
    worker_of: Callable[..., DecodeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(ahead_bytes=1 << 30)
    asked: list[int] = []

    def refuse(first: int, last: int) -> None:
        asked.append(first)
        raise OSError("no such call")

    monkeypatch.setattr(worker.engine.memory, "populate", refuse)
    assert [worker.turn() for _ in range(3)] == [0.0, IDLE_S, IDLE_S]
    assert asked == [0] and in_memory(worker) == 0


def test_worker_populates_no_memory_by_default(worker_of: Callable[..., DecodeWorker]) -> None:
    worker = worker_of()
    assert worker.turn() == IDLE_S and in_memory(worker) == 0
