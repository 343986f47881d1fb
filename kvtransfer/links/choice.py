"""Which links a worker has, and which one a receiver chooses for a hand-off, by the devices and hosts of both ends.

    sender's pool   receiver's pool   one host                                       two hosts
    host            host              shm (mapped)                                   zmq
    GPU             GPU               cuda-ipc (mapped), if the element types match  zmq, through pinned memory
    host            GPU               shm, through pinned memory                     zmq, through pinned memory
    GPU             host              zmq, through pinned memory                     zmq, through pinned memory

That is ``auto``, which takes zmq as well if a pool cannot be mapped. ``nixl`` and ``nccl`` are used on request only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from common.core.errors import StartError, WireError
from common.core.ids import Incarnation, TransferId
from common.kv.layout import KvLayout
from common.kv.storage.cuda import AttachedCudaBlocks, CudaMemory, Memory
from common.kv.storage.device_calls import DeviceFailed, Event
from common.kv.storage.host import KvMemory
from common.net.messages import Open
from kvtransfer.links import cuda_ipc, nccl, nixl, pull, shm, zeromq
from kvtransfer.links.base import ReceiveLink, SendLink
from kvtransfer.links.landings import LandingBuffers
from kvtransfer.links.pinned import PinnedReceiveLink, PinnedSendLink
from kvtransfer.links.pull import PullReceiveLink, PullSendLink
from kvtransfer.links.stages import DeviceWriter, Staging
from kvtransfer.source_pools import Connecting, Sources

log = logging.getLogger("tandem.kv")

_LOGGED = 256
"""Most reasons for a fallback that are remembered, so that each is logged once."""


def links_of(transport: str, kind: Literal["host", "cuda"]) -> tuple[str, ...]:
    """Return the links that a worker with this ``--kv-transport`` and this kind of memory supports, best first."""
    match transport:
        case "auto":
            return (shm.NAME, zeromq.NAME) if kind == "host" else (cuda_ipc.NAME, shm.NAME, zeromq.NAME)
        case nccl.NAME:
            return (nccl.NAME, zeromq.NAME)
        case _:
            return (transport,)


def require_transport(transport: str, kind: Literal["host", "cuda"], ranks: int, *, sends: bool) -> None:
    """Raise StartError if ``transport`` cannot carry KV to or from the pool of a worker with this number of ranks,
    which is in this kind of memory."""
    if kind == "host" and transport in (cuda_ipc.NAME, nccl.NAME):
        raise StartError(
            f"--kv-transport {transport} needs a GPU",
            "this worker computes on the CPU, and its KV is in host memory",
            "use auto (shared memory on one host, else ZeroMQ), or see why there is no GPU with --device cuda",
        )
    if kind == "cuda" and (transport == nixl.NAME or (transport == shm.NAME and sends)):
        raise StartError(
            f"--kv-transport {transport} cannot carry this worker's KV",
            "it is in the memory of a GPU",
            "use auto, cuda-ipc, zmq or nccl",
        )
    if kind == "cuda" and ranks > 1 and transport == nccl.NAME:
        raise StartError(
            "--kv-transport nccl cannot carry the KV of a tensor-parallel worker",
            "its ranks use NCCL in every layer, and two groups on one GPU can wait for each other for ever",
            "use auto, cuda-ipc or zmq",
        )


def _require(transport: str, memory: Memory, *, sends: bool) -> None:
    ranks = memory.ranks if isinstance(memory, CudaMemory) else 1
    require_transport(transport, memory.kind, ranks, sends=sends)


class SendLinks:
    """The sending halves of one worker's links (``by_name``), and how its pool is reached: ``pool`` is the address of
    its endpoint ("" for none), :meth:`agent` the data in Open for links that connect by themselves."""

    def __init__(self, memory: Memory, incarnation: Incarnation, transport: str, host: str) -> None:
        _require(transport, memory, sends=True)
        self.allowed = links_of(transport, memory.kind)
        self.by_name: dict[str, SendLink] = {}
        self._closing: list[Callable[[], object]] = []
        self._nixl: nixl.NixlPoolEndpoint | None = None
        self.groups: nccl.SenderGroups | None = None
        self._calls = None if isinstance(memory, KvMemory) else memory.calls
        self.pool = self._endpoint(memory, incarnation)
        if isinstance(memory, KvMemory):
            self.by_name[zeromq.NAME] = zeromq.ZmqSendLink(memory)
            grain = shm.ONE_PASS_GRAIN if memory.takes(memory) else pull.GRAIN
            self.by_name[shm.NAME] = PullSendLink(shm.NAME, memory, grain, sums_later=True)
            if transport == nixl.NAME:
                self._nixl = nixl.NixlPoolEndpoint(memory, incarnation)
                self._closing.append(self._nixl.close)
                self.by_name[nixl.NAME] = PullSendLink(nixl.NAME, memory)
            return
        pinned, landings = Staging(memory.calls, memory.calls.host_pin), LandingBuffers(memory.calls)
        self._closing += [pinned.close, landings.close]
        self.by_name[zeromq.NAME] = PinnedSendLink(memory, pinned)
        self.by_name[cuda_ipc.NAME] = cuda_ipc.CudaIpcSendLink(memory, landings)
        if transport == nccl.NAME:
            self.groups = nccl.SenderGroups(memory.calls, landings, host)
            self._closing.insert(0, self.groups.close)
            self.by_name[nccl.NAME] = nccl.NcclSendLink(memory, landings, self.groups)

    def _endpoint(self, memory: Memory, incarnation: Incarnation) -> str:
        if not {shm.NAME, cuda_ipc.NAME} & set(self.allowed):
            return ""
        try:
            endpoint = shm.PoolEndpoint(memory, incarnation)
        except DeviceFailed as error:
            log.warning("KV goes through host memory: other processes cannot map this GPU's: %s", error)
            return ""
        self._closing.append(endpoint.close)
        return str(endpoint.address)

    def agent(self, transfer: TransferId, peer: Incarnation, now: float) -> bytes:
        """Return what the Open of ``transfer`` to ``peer`` carries as ``agent``."""
        if self.groups is not None:
            return self.groups.bind(transfer, peer, now)
        return self._nixl.announcement if self._nixl is not None else b""

    def ended(self, event: Event) -> bool:
        """Return whether an event of the pool has ended. Raises DeviceFailed."""
        assert self._calls is not None, "host memory has no events"
        return self._calls.query(event)

    def close(self) -> None:
        """Close the endpoints, groups and buffers of links. Raises DeviceFailed if work on a buffer does not end."""
        for close in self._closing:
            close()


class ReceiveLinks:
    """Chooses the receiving half of a link for each hand-off into ``memory``. ``sources`` are the mapped pools."""

    def __init__(self, memory: Memory, transport: str, host_id: str, sources: Sources) -> None:
        _require(transport, memory, sends=False)
        self._memory, self._transport, self._host_id, self._sources = memory, transport, host_id, sources
        self._allowed = links_of(transport, memory.kind)
        self._logged: set[tuple[Incarnation, str]] = set()
        self.groups: nccl.ReceiverGroups | None = None
        self._closing: list[Callable[[], object]] = []
        if isinstance(memory, CudaMemory):
            self._pinned, self._landings = Staging(memory.calls, memory.calls.host_pin), LandingBuffers(memory.calls)
            self._closing += [self._pinned.close, self._landings.close]
            if transport == nccl.NAME:
                self.groups = nccl.ReceiverGroups(memory.calls, self._landings)
                self._closing.insert(0, self.groups.close)

    def choose(self, said: Open, travels: KvLayout, after: Event | None, now: float) -> ReceiveLink | Connecting | None:
        """Return the best link for KV of layout ``travels`` from the sender of the Open ``said``; Connecting while its
        pool is being connected, None if no link is allowed. ``after`` is an event behind the engine's earlier work on
        the blocks."""
        found: ReceiveLink | Connecting | None = None
        if self.groups is not None and said.agent:
            found = self._by_group(said, travels, after, now)
        elif self._maps(said):
            found = self._by_pool(said, travels, after, now)
        if found is None and zeromq.NAME in self._allowed:
            if isinstance(self._memory, CudaMemory):
                return PinnedReceiveLink(DeviceWriter(self._memory, self._pinned, after), travels.dtype)
            return zeromq.ZmqReceiveLink(self._memory, travels.dtype)
        return found

    def _maps(self, said: Open) -> bool:
        near = {shm.NAME, cuda_ipc.NAME} & set(self._allowed) and said.pool and said.host_id == self._host_id
        return bool(near or (self._transport == nixl.NAME and said.agent))

    def _by_pool(self, said: Open, travels: KvLayout, after: Event | None, now: float) -> Any:
        pool = self._sources.reach(said, travels, now)
        memory = self._memory
        if pool is None or isinstance(pool, Connecting):
            return pool
        if isinstance(pool, AttachedCudaBlocks):
            assert isinstance(memory, CudaMemory), "only a worker with a GPU attaches the pool of one"
            if cuda_ipc.NAME not in self._allowed:
                return self._without(said, f"its pool is in a GPU's memory, and --kv-transport is {self._transport}")
            if travels.dtype != memory.layout.dtype:
                return self._without(said, f"its KV is {travels.dtype}, ours {memory.layout.dtype}")
            return cuda_ipc.CudaIpcReceiveLink(memory, pool, self._landings, after)
        if self._transport == nixl.NAME:
            assert isinstance(memory, KvMemory)
            return PullReceiveLink(nixl.NAME, memory, pool)
        if shm.NAME not in self._allowed:
            return self._without(said, f"its pool is in host memory, and --kv-transport is {self._transport}")
        if isinstance(memory, CudaMemory):
            return PullReceiveLink(shm.NAME, None, pool, DeviceWriter(memory, self._pinned, after))
        return PullReceiveLink(shm.NAME, memory, pool)

    def _by_group(self, said: Open, travels: KvLayout, after: Event | None, now: float) -> Any:
        assert self.groups is not None and isinstance(self._memory, CudaMemory)
        if travels.dtype != self._memory.layout.dtype:
            return self._without(said, f"its KV is {travels.dtype}, ours {self._memory.layout.dtype}")
        try:
            group = self.groups.reach(said.sender, said.agent, now)
        except WireError as error:
            return self._without(said, str(error))
        if group is None:
            return Connecting()
        transfer = TransferId(said.request, said.attempt)
        return nccl.NcclReceiveLink(self._memory, transfer, group, self._landings, after)

    def _without(self, said: Open, why: str) -> None:
        """Log, once, why the preferred link to this sender is not used."""
        if (said.sender, why) not in self._logged and len(self._logged) < _LOGGED:
            self._logged.add((said.sender, why))
            log.info("KV of %s does not come by the best link: %s", said.sender, why)

    def close(self) -> None:
        """Close the groups and buffers of all links. Raises DeviceFailed if work on a buffer does not end."""
        for close in self._closing:
            close()
