"""Sums and gathers in a process group of torch.distributed, whose ranks are threads here and use gloo."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any, TypeVar

import pytest
import torch

from common.model import process_group
from common.model.collective import SharedMemoryCollective
from common.model.process_group import ProcessGroupCollective, connect
from common.platform.device import probe_cpu
from common.platform.wiring import Wiring
from tests.fakes.stand_in_gpu import stand_in

T = TypeVar("T")


def on_all(size: int, work: Callable[[int], T]) -> list[T]:
    """Run ``work`` for every rank at the same time; return the results in the order of ranks."""
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        results[rank] = work(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(size)]


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[ProcessGroupCollective]]:
    with ExitStack() as stack:
        wiring = Wiring.create_store()
        stack.callback(wiring.close)
        found = on_all(request.param, lambda rank: connect(rank, request.param, wiring, stand_in()))
        for each in found:
            stack.enter_context(closing(each))
        assert all(type(each) is ProcessGroupCollective for each in found)
        yield found  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 5), (1, 7, 33), (3, 16)], ids=str)
def test_a_sum(ranks: list[ProcessGroupCollective], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(each.rank)).to(dtype) for each in ranks]
    expected = torch.stack(parts).float().sum(dim=0)
    sums = on_all(len(ranks), lambda rank: ranks[rank].sum(parts[rank].clone()))
    assert all(torch.equal(got, sums[0]) for got in sums), "every rank gets the same bits"
    assert torch.allclose(sums[0].float(), expected, atol=1e-6 if dtype == torch.float32 else 0.05)


def test_a_sum_is_written_where_the_tensor_lies(ranks: list[ProcessGroupCollective]) -> None:
    """Also into a tensor whose elements are not adjacent."""
    wholes = [torch.full((4, 10), float(each.rank + 1)) for each in ranks]
    on_all(len(ranks), lambda rank: ranks[rank].sum(wholes[rank][:, 2:5]))
    total = float(sum(each.rank + 1 for each in ranks))
    for rank, whole in enumerate(wholes):
        assert bool((whole[:, 2:5] == total).all()) and bool((whole[:, :2] == rank + 1).all())


@pytest.mark.parametrize("root_only", [False, True])
@pytest.mark.parametrize("rows", [1, 9])
def test_a_gather_of_unequal_widths(ranks: list[ProcessGroupCollective], rows: int, root_only: bool) -> None:
    widths = [5, 3, 2][: len(ranks)]
    whole = torch.randn(1, rows, sum(widths))
    parts = whole.split(widths, dim=-1)
    got = on_all(len(ranks), lambda rank: ranks[rank].gather(parts[rank], widths, root_only=root_only))
    for rank, each in enumerate(got):
        assert torch.equal(each, parts[rank] if root_only and rank else whole)


def test_after_a_sum_every_rank_has_done_what_comes_before_it(ranks: list[ProcessGroupCollective]) -> None:
    done, seen = [0] * len(ranks), list[list[int]]()
    late = threading.Event()

    def step(rank: int) -> None:
        for turn in range(1, 4):
            if rank:
                late.wait(0.02)  # nothing sets it: rank 0 could run ahead
            done[rank] = turn
            ranks[rank].sum(torch.ones(40))

    ranks[0].after_sum = lambda: seen.append([*done])
    on_all(len(ranks), step)
    assert [min(each) for each in seen] == [1, 2, 3]


def test_a_rank_that_leaves_ends_the_exchange_of_the_others() -> None:
    wiring = Wiring.create_store()
    one, other = on_all(2, lambda rank: ProcessGroupCollective(rank, 2, wiring.memory, "gloo"))
    other.close()
    with pytest.raises(RuntimeError):
        one.sum(torch.ones(4))
    one.close()
    wiring.close()


def test_the_ranks_meet_where_no_other_user_can_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is a file without a name, and gloo listens on loopback."""
    hosts: list[str] = []
    import torch.distributed as dist

    real = dist.ProcessGroupGloo.create_device

    def create(**options: Any) -> Any:
        hosts.append(options["hostname"])
        return real(**options)

    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", create)
    wiring = Wiring.create_store()
    assert wiring.descriptors == (wiring.memory,)
    assert os.readlink(f"/proc/self/fd/{wiring.memory}").startswith("/memfd:")
    for each in on_all(2, lambda rank: ProcessGroupCollective(rank, 2, wiring.memory, "gloo")):
        each.close()
    assert hosts == ["127.0.0.1"] * 2
    wiring.close()


def test_a_rank_that_does_not_come_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "TIMEOUT_S", 0.2)
    wiring = Wiring.create_store()
    with pytest.raises(RuntimeError):
        ProcessGroupCollective(0, 2, wiring.memory, "gloo")
    wiring.close()


def test_ranks_on_a_cpu_use_shared_memory() -> None:
    wiring = Wiring.create(2)
    with closing(connect(0, 2, wiring, probe_cpu())) as collective:
        assert type(collective) is SharedMemoryCollective
    wiring.close()
