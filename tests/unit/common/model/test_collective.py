"""Sums and gathers over ranks equal those computed in one place, whatever the sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch

from common.model import collective as module
from common.model.collective import SharedMemoryCollective
from common.platform import wiring as wiring_module
from common.platform.wiring import Wiring

T = TypeVar("T")
SLOT_BYTES = 64


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make most tensors larger than a slot."""
    for each in (module, wiring_module):
        monkeypatch.setattr(each, "SLOT_BYTES", SLOT_BYTES)


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[SharedMemoryCollective]]:
    wiring = Wiring.create(request.param)
    ranks = [SharedMemoryCollective(rank, request.param, wiring) for rank in range(request.param)]
    yield ranks
    for each in ranks:
        each.close()
    wiring.close()


def on_all(ranks: list[SharedMemoryCollective], work: Callable[[SharedMemoryCollective], T]) -> list[T]:
    """Run ``work`` on every rank at the same time; return the results in the order of ranks."""
    results: dict[int, T] = {}

    def run(each: SharedMemoryCollective) -> None:
        results[each.rank] = work(each)

    threads = [threading.Thread(target=run, args=(each,)) for each in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(len(ranks))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 5), (1, 7, 33), (3, 16)], ids=str)
def test_a_sum(ranks: list[SharedMemoryCollective], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(each.rank)).to(dtype) for each in ranks]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    for _ in range(3):  # slots are used in turn
        sums = on_all(ranks, lambda each: each.sum(parts[each.rank].clone()))
        assert all(torch.equal(got, expected) for got in sums), "every rank gets the same bits"


def test_a_sum_is_written_where_the_tensor_lies(ranks: list[SharedMemoryCollective]) -> None:
    """Also into a tensor whose elements are not adjacent."""
    wholes = [torch.full((4, 10), float(each.rank + 1)) for each in ranks]
    on_all(ranks, lambda each: each.sum(wholes[each.rank][:, 2:5]))
    total = float(sum(each.rank + 1 for each in ranks))
    for rank, whole in enumerate(wholes):
        assert bool((whole[:, 2:5] == total).all()) and bool((whole[:, :2] == rank + 1).all())


@pytest.mark.parametrize("root_only", [False, True])
@pytest.mark.parametrize("rows", [1, 9])
def test_a_gather_of_unequal_widths(ranks: list[SharedMemoryCollective], rows: int, root_only: bool) -> None:
    widths = [5, 3, 2][: len(ranks)]
    whole = torch.randn(1, rows, sum(widths))
    parts = whole.split(widths, dim=-1)
    got = on_all(ranks, lambda each: each.gather(parts[each.rank], widths, root_only=root_only))
    for rank, each in enumerate(got):
        assert torch.equal(each, parts[rank] if root_only and rank else whole)


def test_after_a_sum_every_rank_has_done_what_comes_before_it(ranks: list[SharedMemoryCollective]) -> None:
    done, seen = [0] * len(ranks), list[list[int]]()
    late = threading.Event()

    def step(each: SharedMemoryCollective) -> None:
        for turn in range(1, 4):
            if each.rank:
                late.wait(0.02)  # nothing sets it: rank 0 could run ahead
            done[each.rank] = turn
            each.sum(torch.ones(40))

    ranks[0].after_sum = lambda: seen.append([*done])
    on_all(ranks, step)
    assert [min(each) for each in seen] == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_a_copy_from_rank_0(ranks: list[SharedMemoryCollective], dtype: torch.dtype) -> None:
    """The others may have anything there."""
    parts = [torch.full((3, 11), torch.nan).to(dtype) if each.rank else torch.arange(33).view(3, 11) for each in ranks]
    parts[0] = parts[0].to(dtype)
    got = on_all(ranks, lambda each: each.copy_from_root(parts[each.rank].clone()))
    assert all(torch.equal(each, parts[0]) for each in got)


def test_what_needs_the_exchange_is_closed_before_it(
    ranks: list[SharedMemoryCollective], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(ranks[0], "_close", lambda: closed.append("exchange"))
        patch.setattr(ranks[0], "closing", [lambda: closed.append("graphs")])
        ranks[0].close()
    assert closed == ["graphs", "exchange"]
