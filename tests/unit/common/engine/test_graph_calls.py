"""CUDA's calls for graphs, over a stand-in for torch's graphs and the rules of its allocator."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from common.engine.graph_calls import CudaCalls

INVALIDATED = "CUDA error: operation failed due to a previous error during capture"


class Allocator:
    """The part of torch's caching allocator that graphs meet: pools by their number of graphs, and the pool of the
    capture that is under way."""

    def __init__(self) -> None:
        self.users: Counter[int] = Counter()
        self.handles = 0
        self.recording: list[int] = []

    def handle(self) -> int:
        self.handles += 1
        return self.handles

    def begin(self, pool: int) -> None:
        assert pool not in self.users or self.users[pool] > 0, "it->second->use_count > 0 INTERNAL ASSERT FAILED"
        self.users[pool] += 1
        self.recording.append(pool)

    def end(self, device: int, pool: int) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def release(self, device: int, pool: int) -> None:
        self.users[pool] -= 1
        assert self.users[pool] >= 0


class Calls:
    """A stand-in for ``torch.cuda.CUDAGraph`` per allocator. ``invalid``: CUDA has invalidated the capture."""

    def __init__(self, allocator: Allocator) -> None:
        self.invalid = False
        calls = self

        class Graph:
            pool = 0
            ended = False

            def capture_begin(self, pool: int, capture_error_mode: str) -> None:
                allocator.begin(pool)
                self.pool = pool

            def capture_end(self) -> None:
                if calls.invalid or self.ended:
                    raise RuntimeError(INVALIDATED)
                allocator.end(0, self.pool)
                self.ended = True

            def replay(self) -> None: ...

            def __del__(self) -> None:
                if self.ended:
                    allocator.release(0, self.pool)

        self.graph = Graph


@pytest.fixture
def allocator() -> Allocator:
    return Allocator()


@pytest.fixture
def calls(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls(allocator)
    stream = type("Stream", (), {"device_index": 0})
    for name, value in {
        "CUDAGraph": calls.graph, "graph_pool_handle": allocator.handle, "Stream": lambda _: stream(),
        "stream": lambda _: contextlib.nullcontext(), "synchronize": lambda _: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", allocator.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", allocator.release, raising=False)
    return calls


def capture(made: CudaCalls, run: Callable[[], None] = lambda: None) -> Any:
    return made.capture(run)


def test_graphs_share_a_pool_while_one_of_them_lives(allocator: Allocator, calls: Calls) -> None:
    """A graph that was captured as a trial, and dropped, takes its pool along."""
    made = CudaCalls(torch.device("cpu"))
    capture(made)
    gc.collect()
    assert not +allocator.users, "the trial is gone"
    replays = [capture(made) for _ in range(3)]
    assert sorted((+allocator.users).values()) == [3]
    del replays[0]
    replays.append(capture(made))
    assert sorted((+allocator.users).values()) == [3]
    replays.clear()
    capture(made)
    assert not allocator.recording and not +allocator.users


@pytest.mark.parametrize("where", ["within", "at the end"])
def test_a_capture_that_cuda_has_invalidated_is_ended_in_the_allocator_too(
    allocator: Allocator, calls: Calls, where: str
) -> None:
    made, kept = CudaCalls(torch.device("cpu")), list[Any]()

    def run() -> None:
        calls.invalid = True
        if where == "within":
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    kept.append(capture(made))
    why = "not permitted" if where == "within" else "previous error"
    with pytest.raises(RuntimeError, match=why):
        capture(made, run)
    assert not allocator.recording and sum(allocator.users.values()) == 1
    calls.invalid = False
    kept += [capture(made), capture(made)]
    assert sorted((+allocator.users).values()) == [1, 2], "later graphs share a pool, which is not that of the capture"


def test_a_capture_that_lacks_memory_ends_as_usual(allocator: Allocator, calls: Calls) -> None:
    def run() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        capture(CudaCalls(torch.device("cpu")), run)
    gc.collect()
    assert not allocator.recording and not +allocator.users
