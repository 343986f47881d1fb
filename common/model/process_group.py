"""Sums and gathers over the ranks of one tensor-parallel worker by torch.distributed: NCCL between GPUs, gloo in tests.

The ranks find each other in a store in an anonymous file, whose descriptor they inherit: there is no port for it, and
no other user can open it. NCCL connects over loopback and moves tensors through the memory of the GPUs or of this
machine. Importing this module imports no NCCL: a CPU build of torch has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from common.model.collective import Collective, SharedMemoryCollective
from common.platform.device import Device
from common.platform.wiring import Wiring

TIMEOUT_S = 600.0
"""Timeout of one exchange inside torch.distributed, for which a rank may wait while another still loads its weights. A
rank that dies or hangs is noticed much earlier (:mod:`deploy.ranks.group`)."""


def connect(rank: int, size: int, wiring: Wiring, machine: Device) -> Collective:
    """Return the exchange of rank ``rank``, which computes on ``machine``. With gloo it returns once all ``size`` ranks
    have called this, with NCCL the first exchange does. Raises RuntimeError if they do not within TIMEOUT_S."""
    if machine.gpu is None:
        return SharedMemoryCollective(rank, size, wiring)
    where = torch.device(machine.address)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    return ProcessGroupCollective(rank, size, wiring.memory, "nccl" if where.type == "cuda" else "gloo")


class ProcessGroupCollective(Collective):
    """The exchange in a process group of torch.distributed with this ``backend``; ``store`` is the descriptor of the
    file in which the ranks meet, which is empty at first.

    With NCCL a call only enqueues the exchange: the current stream waits for it, the host does not.
    """

    def __init__(self, rank: int, size: int, store: int, backend: str) -> None:
        super().__init__(rank, size)
        import torch.distributed as dist

        self._dist, self._group = dist, _made(dist, rank, size, store, backend)

    def _sum(self, x: torch.Tensor) -> None:
        whole = x.contiguous()
        self._group.allreduce([whole], self._dist.AllreduceOptions()).wait()
        if whole.data_ptr() != x.data_ptr():
            x.copy_(whole)

    def gather(self, x: torch.Tensor, widths: Sequence[int], *, root_only: bool = False) -> torch.Tensor:
        rows, most = x.reshape(-1, widths[self.rank]), max(widths)
        here = not root_only or self.rank == 0
        part = rows.contiguous() if widths[self.rank] == most else _widened(rows, most)
        parts = [rows.new_empty(len(rows), most) for _ in widths] if here else []
        if root_only:
            options = self._dist.GatherOptions()
            options.rootRank = 0
            self._group.gather([parts] if here else [], [part], options).wait()
        else:
            self._group.allgather([parts], [part]).wait()
        if not here:
            return x
        columns = [each[:, :width] for each, width in zip(parts, widths, strict=True)]
        return torch.cat(columns, dim=-1).view(*x.shape[:-1], -1)

    def _close(self) -> None:
        """Give the group up without waiting for the other ranks, which may have gone."""
        self._group.abort()
        self._group = None


def _widened(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``rows`` [n, less] with zeros behind them, [n, width]: all ranks gather pieces of one size."""
    wide = rows.new_zeros(len(rows), width)
    wide[:, : rows.shape[1]] = rows
    return wide


def _made(dist: Any, rank: int, size: int, store: int, backend: str) -> Any:
    timeout = timedelta(seconds=TIMEOUT_S)
    meeting = dist.FileStore(f"/proc/self/fd/{store}", size)
    meeting.set_timeout(timeout)
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._threads = timeout, 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return dist.ProcessGroupGloo(meeting, rank, size, options)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(meeting, rank, size, options)
