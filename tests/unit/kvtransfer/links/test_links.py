"""The contract of every link: the cells arrive unchanged, or nothing is written and an error is raised."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zmq
from zmq.utils import garbage

from common.core.errors import Damaged, StartError, WireError
from common.core.ids import BlockId, Incarnation, RequestId, TransferId, WorkerName, new_incarnation
from common.kv import pieces
from common.kv.convert import converted
from common.kv.layout import KvDtype, KvLayout, LayerLayout
from common.kv.storage.cuda import AttachedCudaBlocks
from common.kv.storage.host import KvMemory
from common.net.messages import Accept, Ack, Open, Peer, ToDecode
from common.net.sockets import MAX_FRAME_BYTES, Channels
from common.net.wire import MAX_HANDOFF_BYTES, decode
from kvtransfer import receiver, sender
from kvtransfer.flow_control import TRANSFER_BYTES
from kvtransfer.frames import FrameHeader, Rectangle
from kvtransfer.links import cuda_ipc, memory, nccl, nixl, shm, zeromq
from kvtransfer.links.base import Made, Payload, ReceiveLink, SendLink
from kvtransfer.links.faulty import FaultRates, FaultyChannels, FaultyLink
from kvtransfer.links.landings import LandingBuffers
from kvtransfer.links.pinned import PinnedReceiveLink, PinnedSendLink
from kvtransfer.links.pull import PullReceiveLink, PullSendLink, Reading, T, signed
from kvtransfer.links.stages import DeviceWriter, Staging
from kvtransfer.receiver import Landed, Receiver, TransferFailed
from kvtransfer.sender import FirstTokens, Sender, SendFailed, Shipped
from kvtransfer.session import TransferLimits
from kvtransfer.source_pools import PAUSE_S
from tests.fakes.device_calls import FakeGpuMemory
from tests.pace import scaled

LAYERS = (LayerLayout(2, 4, 4), LayerLayout(6, 3, 2), LayerLayout(4, 2, 6))
TRANSFER = TransferId(RequestId(b"t" * 16), 1)
SOURCE_TABLE = [BlockId(b) for b in (5, 1, 6, 3, 7, 0)]
TARGET_TABLES = {32: [BlockId(b) for b in (2, 4, 0)], 16: [BlockId(b) for b in (2, 4, 0, 6, 1, 7)]}
"""The receiver's blocks of the same tokens, by block size."""


@dataclass
class LinkedPools:
    """The pools of a sender and a receiver, mostly with different layouts, and a link between them."""

    source: KvMemory | FakeGpuMemory
    target: KvMemory | FakeGpuMemory
    sending: SendLink
    receiving: ReceiveLink

    def payload(self, cells: Rectangle) -> Made:
        while (made := self.sending.payload(TRANSFER, SOURCE_TABLE, cells)) is None:
            pass
        return made

    def carry(self, cells: Rectangle, payload: bytes | None = None) -> None:
        """Carry one frame from the sender to the receiver; ``payload`` replaces the correct one."""
        right, size, checksum = self.payload(cells)
        header = FrameHeader(TRANSFER, 0, cells, size, checksum)
        self.place(header, bytes(right) if payload is None else payload)

    def place(self, header: FrameHeader, payload: bytes) -> None:
        while self.receiving.place(header, memoryview(payload), self.table) is None:
            pass

    @property
    def table(self) -> list[BlockId]:
        return TARGET_TABLES[self.target.layout.block_size]

    def written(self) -> bool:
        return bool((self.target.raw != 0xEE).any())

    def wipe(self, cells: Rectangle) -> None:
        """Mark these cells as not written."""
        size = self.target.layout.range_bytes(cells.first_layer, cells.last_layer, len(cells.tokens))
        self.target.write(self.table, cells.tokens, cells.layers, np.full(size, 0xEE, np.uint8))


POOLS = {
    "same": (KvLayout(LAYERS, "float32", 16), KvLayout(LAYERS, "float32", 16)),
    "uncompiled": (KvLayout(LAYERS, "float32", 16), KvLayout(LAYERS, "float32", 32)),
    "alike": (KvLayout(LAYERS, "float32", 16), KvLayout(LAYERS, "float32", 32)),
    "wider": (KvLayout(LAYERS, "bfloat16", 16, head_shards=2), KvLayout(LAYERS, "float32", 32)),
    "narrower": (KvLayout(LAYERS, "float32", 16), KvLayout(LAYERS, "float16", 32, head_shards=2)),
}
"""The layouts of the sender's pool and of the receiver's."""
NIXL_POOLS = ("same", "wider")


needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="the extra nixl is not installed")


def pairs(*links: str) -> list[Any]:
    """Return each link with each pair of pools as test parameters. Agents of NIXL take long to start, so ``--sample``
    keeps them for :data:`NIXL_POOLS` only: their cells are placed by the same code as those of shm."""
    marks = {"nixl": [needs_nixl, pytest.mark.torch], "nccl": [pytest.mark.torch]}
    return [
        pytest.param(
            (link, pools),
            marks=[*marks.get(link, ()), *([pytest.mark.whole] if link == "nixl" and pools not in NIXL_POOLS else [])],
            id=f"{link}-{pools}",
        )
        for link in links
        for pools, (source, target) in POOLS.items()
        if source.dtype == target.dtype or link not in ("cuda-ipc", "nccl")
    ]


def reached(reader: nixl.NixlReader, owner: Incarnation, announcement: bytes, source: KvMemory) -> nixl.NixlPool:
    connection = nixl.NixlPoolConnection(reader.reach(owner, announcement, source.layout, source.blocks))
    while (pool := connection.answer()) is None:
        pass
    connection.close()
    return pool


def connected(pools: memory.Pools, source: KvMemory) -> int:
    """Return a pool's file descriptor, as its endpoint sends it."""
    endpoint = pools.endpoint(source, new_incarnation())
    connection = pools.connect(endpoint.address)
    descriptor = connection.answer()
    assert descriptor is not None
    connection.close()
    return descriptor


def had(reading: Reading[T]) -> T:
    """Wait for ``reading`` and return its result."""
    while (what := reading.landed()) is None:
        pass
    return what


ON_GPUS = {"cuda-ipc": "both", "nccl": "both", "pinned": "both", "from-gpu": "source", "to-gpu": "target"}
ON_GPUS["shm-to-gpu"] = "target"
"""Which pools of a link are in the memory of a (fake) GPU."""


def pool(link: str, end: str, layout: KvLayout, blocks: int) -> KvMemory | FakeGpuMemory:
    return FakeGpuMemory(layout, blocks) if ON_GPUS.get(link) in ("both", end) else KvMemory(layout, blocks)


@pytest.fixture(params=pairs("zmq", "shm", "memory", "nixl", *ON_GPUS))
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LinkedPools]:
    link, pools = request.param
    if pools == "uncompiled":
        monkeypatch.setattr(pieces, "_compiled", lambda: None)
    source, target = pool(link, "source", POOLS[pools][0], 8), pool(link, "target", POOLS[pools][1], 8)
    source.raw[:] = np.random.default_rng(7).integers(0, 256, source.raw.shape, np.uint8)
    source.generations[:] = np.arange(8) + 100
    target.raw[:] = 0xEE
    with contextlib.ExitStack() as closing:
        closing.callback(target.close)
        closing.callback(source.close)
        yield LinkedPools(source, target, *halves(link, source, target, closing))


def halves(link: str, source: Any, target: Any, closing: contextlib.ExitStack) -> tuple[SendLink, ReceiveLink]:
    """Return both halves of ``link``; ``closing`` closes what they use."""
    sends, receives = Halves(source, closing), Halves(target, closing)
    match link:
        case "zmq":
            return zeromq.ZmqSendLink(source), zeromq.ZmqReceiveLink(target, source.layout.dtype)
        case "pinned":
            return sends.pinned(), receives.pinned_receiver(source.layout.dtype)
        case "from-gpu":
            return sends.pinned(), zeromq.ZmqReceiveLink(target, source.layout.dtype)
        case "to-gpu":
            return zeromq.ZmqSendLink(source), receives.pinned_receiver(source.layout.dtype)
        case "nixl":
            owner = new_incarnation()
            endpoint, reader = nixl.NixlPoolEndpoint(source, owner), nixl.NixlReader(new_incarnation())
            closing.callback(endpoint.close)
            closing.callback(reader.close)
            read = reached(reader, owner, endpoint.announcement, source)
            closing.callback(read.close)
            return PullSendLink(nixl.NAME, source), PullReceiveLink(nixl.NAME, target, read)
        case "cuda-ipc":
            there = AttachedCudaBlocks(source.descriptors(), source.layout, source.blocks, target.device)
            closing.callback(there.close)
            return (
                cuda_ipc.CudaIpcSendLink(source, sends.landings()),
                cuda_ipc.CudaIpcReceiveLink(target, there, receives.landings(), None),
            )
        case "nccl":
            return grouped(source, target, sends, receives, closing)
        case _:
            descriptor = connected(memory.Pools(), source) if link == "memory" else os.dup(source.fd)
            mapped = KvMemory.attach(descriptor, source.layout, source.blocks)
            closing.callback(mapped.close)
            if link == "shm-to-gpu":
                writer = DeviceWriter(target, receives.pinned_buffers(), None)
                return PullSendLink(shm.NAME, source), PullReceiveLink(shm.NAME, None, mapped, writer)
            return PullSendLink(shm.NAME, source), PullReceiveLink(shm.NAME, target, mapped)


class Halves:
    """The buffers of one end of a link to or from a GPU, which ``closing`` closes."""

    def __init__(self, memory: Any, closing: contextlib.ExitStack) -> None:
        self.memory, self.closing = memory, closing

    def pinned_buffers(self) -> Staging:
        pinned = Staging(self.memory.device, self.memory.device.host_pin)
        self.closing.callback(pinned.close)
        return pinned

    def pinned(self) -> PinnedSendLink:
        return PinnedSendLink(self.memory, self.pinned_buffers())

    def pinned_receiver(self, dtype: KvDtype) -> PinnedReceiveLink:
        return PinnedReceiveLink(DeviceWriter(self.memory, self.pinned_buffers(), None), dtype)

    def landings(self) -> LandingBuffers:
        landings = LandingBuffers(self.memory.device)
        self.closing.callback(landings.close)
        return landings


def grouped(
    source: Any, target: Any, sends: Halves, receives: Halves, closing: contextlib.ExitStack
) -> tuple[SendLink, ReceiveLink]:
    there, here = sends.landings(), receives.landings()
    sending = nccl.SenderGroups(source.device, there, "127.0.0.1")
    receiving = nccl.ReceiverGroups(target.device, here)
    closing.callback(sending.close)
    closing.callback(receiving.close)
    agent, until = sending.bind(TRANSFER, Incarnation("decode"), 0.0), time.monotonic() + scaled(20.0)
    while (end := receiving.reach(Incarnation("prefill"), agent, 0.0)) is None:
        assert time.monotonic() < until
        time.sleep(0.001)
    return nccl.NcclSendLink(source, there, sending), nccl.NcclReceiveLink(target, TRANSFER, end, here, None)


CELLS = [
    Rectangle(0, 3, 0, 96),
    Rectangle(0, 1, 0, 1),
    Rectangle(1, 3, 15, 17),
    Rectangle(2, 3, 31, 65),
    Rectangle(0, 2, 40, 41),
]


@pytest.mark.parametrize("cells", CELLS, ids=str)
def test_exactly_the_named_cells_arrive(pair: LinkedPools, cells: Rectangle) -> None:
    pair.carry(cells)
    sent = pair.source.read(SOURCE_TABLE, cells.tokens, cells.layers)
    wanted = converted(sent, pair.source.layout.dtype, pair.target.layout.dtype)
    assert (pair.target.read(pair.table, cells.tokens, cells.layers) == wanted).all()
    pair.wipe(cells)
    assert not pair.written(), "something else was written, too"


def test_the_sizes_said_are_canonical(pair: LinkedPools) -> None:
    for cells in CELLS:
        _, size, _ = pair.payload(cells)
        assert size == pair.source.layout.range_bytes(cells.first_layer, cells.last_layer, len(cells.tokens))


@pytest.mark.parametrize("fault", ["corrupt", "truncate", "swap"])
def test_a_spoiled_payload_writes_nothing_and_a_right_one_still_arrives(pair: LinkedPools, fault: str) -> None:
    right = pair.sending
    faulty = FaultyLink(right, FaultRates(**{fault: 1.0}), Random(3))
    pair.sending = faulty
    if fault == "swap":
        pair.payload(Rectangle(0, 3, 48, 96))  # the payload that replaces the next one
    times = 8 if pair.sending.name == "nccl" else 50  # each of its sends keeps a buffer until a frame says that it came
    for _ in range(times if fault != "swap" else 1):
        with pytest.raises(Damaged):
            pair.carry(Rectangle(0, 3, 0, 32))
    assert faulty.happened[fault] and not pair.written()
    pair.sending = right
    pair.carry(Rectangle(0, 3, 0, 32))
    assert pair.written()


def test_payloads_of_any_length_are_survived(pair: LinkedPools) -> None:
    for length in (0, 1, 11, 12, 13, 24, 5000):
        with pytest.raises(Damaged):
            pair.carry(Rectangle(0, 3, 0, 32), os.urandom(length))
    assert not pair.written()


def test_a_link_with_no_faults_to_make_is_the_link_itself(pair: LinkedPools) -> None:
    pair.sending = FaultyLink(pair.sending, FaultRates(), Random(0))
    pair.carry(Rectangle(0, 3, 0, 96))
    assert pair.sending.name == pair.receiving.name
    assert not pair.sending.happened and pair.written()


@pytest.mark.parametrize("pair", pairs("shm", "memory", "nixl", "cuda-ipc"), indirect=True)
def test_a_block_reused_before_it_was_pulled_is_not_read(pair: LinkedPools) -> None:
    cells = Rectangle(0, 3, 0, 32)
    payload, size, checksum = pair.payload(cells)
    pair.source.generations[SOURCE_TABLE[1]] += 1
    with pytest.raises(Damaged, match="reused"):
        pair.place(FrameHeader(TRANSFER, 0, cells, size, checksum), bytes(payload))
    assert not pair.written()


@pytest.mark.parametrize("pair", pairs("shm", "memory", "nixl", "cuda-ipc"), indirect=True)
def test_a_block_reused_while_it_is_pulled_is_dropped(pair: LinkedPools, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(pair.receiving, (PullReceiveLink, cuda_ipc.CudaIpcReceiveLink))
    cells, copied = Rectangle(0, 3, 8, 40), pair.receiving.name == "shm" and pair.target.takes(pair.source)
    puller, name = (pair.target, "take") if copied else (pair.receiving.source, "read")
    name = "gather" if pair.receiving.name == "cuda-ipc" else name
    pull = getattr(puller, name)

    def pull_and_reuse(*arguments: object) -> object:
        data = pull(*arguments)
        pair.source.generations[SOURCE_TABLE[0]] += 1
        return data

    monkeypatch.setattr(puller, name, pull_and_reuse)
    with pytest.raises(Damaged, match="reused"):
        pair.carry(cells)
    assert pair.written() is copied
    pair.wipe(cells)
    assert not pair.written(), "what does not count was written elsewhere"


@pytest.mark.parametrize("pair", pairs("shm", "memory", "nixl"), indirect=True)
def test_bytes_that_are_not_those_that_were_hashed_do_not_count(pair: LinkedPools) -> None:
    cells = Rectangle(0, 3, 8, 40)
    payload, size, checksum = pair.payload(cells)
    pair.source.raw[SOURCE_TABLE[1], 11] ^= 1
    header = FrameHeader(TRANSFER, 0, cells, size, checksum)
    with pytest.raises(Damaged, match="checksum"):
        pair.place(header, bytes(payload))
    pair.wipe(cells)
    assert not pair.written(), "what does not count was written elsewhere"
    pair.source.raw[SOURCE_TABLE[1], 11] ^= 1
    pair.place(header, bytes(payload))
    wanted = converted(
        pair.source.read(SOURCE_TABLE, cells.tokens, cells.layers), pair.source.layout.dtype, pair.target.layout.dtype
    )
    assert (pair.target.read(pair.table, cells.tokens, cells.layers) == wanted).all()


@pytest.mark.parametrize("pair", pairs("shm", "memory"), indirect=True)
def test_a_size_that_is_not_that_of_the_cells_is_its_senders_fault(pair: LinkedPools) -> None:
    cells = Rectangle(0, 3, 8, 40)
    payload, size, checksum = pair.payload(cells)
    with pytest.raises(WireError, match="announced") as caught:
        pair.place(FrameHeader(TRANSFER, 0, cells, size + 4, checksum), bytes(payload))
    pair.wipe(cells)
    assert not isinstance(caught.value, Damaged) and not pair.written()


NOWHERE = {
    "a block that is none": lambda blocks: blocks - 1 + [[0], [1 << 20]],
    "too few blocks": lambda blocks: blocks[:, :-1],
    "too many blocks": lambda blocks: np.hstack([blocks, blocks]),
}
"""Invalid changes to the generations and ids of the blocks that a payload refers to."""


def leading(payload: Payload, transfer: TransferId, cells: Rectangle, checksum: int, to: str) -> bytes:
    """Return the block references changed by ``NOWHERE[to]``, signed correctly although they are invalid."""
    count = (len(payload) - 8) // 12
    generations, ids = np.frombuffer(payload, "<u8", count), np.frombuffer(payload, "<u4", count, 8 * count)
    generations, ids = NOWHERE[to](np.stack([generations.astype(np.int64), ids]))
    return signed(generations.astype("<u8").tobytes() + ids.astype("<u4").tobytes(), transfer, cells, checksum)


@pytest.mark.parametrize("to", NOWHERE)
@pytest.mark.parametrize("pair", pairs("shm", "memory", "nixl", "cuda-ipc"), indirect=True)
def test_directions_that_lead_nowhere_are_their_senders_fault(pair: LinkedPools, to: str) -> None:
    cells = Rectangle(0, 3, 0, 32)
    payload, size, checksum = pair.payload(cells)
    with pytest.raises(WireError, match="block") as caught:
        pair.place(FrameHeader(TRANSFER, 0, cells, size, checksum), leading(payload, TRANSFER, cells, checksum, to))
    assert not isinstance(caught.value, Damaged) and not pair.written()
    pair.carry(cells)
    assert pair.written()


class Lying(FaultyLink):
    """A link whose payloads refer to blocks that do not exist."""

    def __init__(self, inner: SendLink, to: str) -> None:
        super().__init__(inner, FaultRates(), Random(0))
        self.to = to

    def payload(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> Made | None:
        made = self.inner.payload(transfer, table, cells)
        assert made is not None
        payload, size, checksum = made
        return leading(payload, transfer, cells, checksum, self.to), size, checksum


class Failing(FaultyLink):
    """A link that delivers ``right`` payloads unchanged and corrupts all later ones."""

    def __init__(self, inner: SendLink, right: int) -> None:
        super().__init__(inner, FaultRates(corrupt=1.0), Random(1))
        self.left = right

    def payload(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> Made | None:
        made = (self.inner if self.left > 0 else super()).payload(transfer, table, cells)
        self.left -= made is not None
        return made


NIXL = pytest.param("nixl", marks=[needs_nixl, pytest.mark.torch])
NCCL = pytest.param("nccl", marks=pytest.mark.torch)
DIRECTED = ["shm", "memory", "cuda-ipc", NIXL]
"""Links whose payloads refer to blocks of the sender."""
LINKS = ["zmq", "pinned", *DIRECTED, NCCL]


def limits_of(**changes: Any) -> TransferLimits:
    """Return limits with which no load is taken for a hand-off that makes no progress."""
    return TransferLimits(**{"no_progress_s": 60.0, "lease_s": 240.0, **changes})


class Handoff:
    """A sender and a receiver on real sockets, with one transfer between them."""

    def __init__(
        self,
        link: str,
        layout: KvLayout,
        tokens: int,
        limits: TransferLimits,
        channels: Channels | None = None,
        memories: tuple[Any, Any] | None = None,
    ) -> None:
        self.link = {"memory": shm.NAME, "pinned": zeromq.NAME}.get(link, link)
        self.endpoints = contextlib.ExitStack()
        if link == "memory":
            pools = memory.Pools()
            self.endpoints.enter_context(
                mock.patch.multiple(shm, PoolEndpoint=pools.endpoint, PoolConnection=pools.connect)
            )
        token, owner, blocks = b"known to both ends", new_incarnation(), layout.blocks_for(tokens)
        self.table, self.tokens, self.layout = [BlockId(block) for block in range(blocks)], tokens, layout
        self.here, self.there = Channels(), channels or Channels()
        ends = ("source", "target")
        self.source, self.target = memories or (pool(link, end, layout, blocks) for end in ends)
        self.receiver = Receiver(
            self.here, self.target, "host", "tcp://127.0.0.1:*", transport=self.link, limits=limits
        )
        self.sender = Sender(self.there, self.source, owner, "host", transport=self.link, limits=limits)
        here = self.receiver.address
        self.peers = _peer(owner, "", token, layout.dtype), _peer(new_incarnation(), here, token, layout.dtype)
        self.ahead_s, self.attempts = 0.0, 0
        self.again()

    def clock(self) -> float:
        return time.monotonic() + self.ahead_s

    def again(self, after_s: float = 0.0) -> None:
        """Announce and expect another attempt, with the clock moved ahead by ``after_s``."""
        self.ahead_s += after_s
        self.attempts += 1
        self.transfer = TransferId(TRANSFER.request, self.attempts)
        self.sent, self.received = list[Shipped | SendFailed](), list[Landed | TransferFailed]()
        prefill, decode = self.peers
        self.receiver.expect(self.transfer, self.tokens, 0, self.table, prefill, self.clock())
        self.sender.open(self.transfer, decode, self.tokens, self.table, self.clock())

    def computed(self, *, committed: bool = True) -> None:
        """Mark the prompt as computed and, if ``committed``, its first token too."""
        self.sender.computed(self.transfer, self.table, self.tokens, len(self.layout.layers), self.clock())
        if committed:
            self.sender.finish(self.transfer, FirstTokens(b"\1\0\0\0", (0,), (-1,), (None,)), self.clock())

    def send(self, *, committed: bool) -> None:
        """Send everything once it is granted; the receiver has read none of it."""
        while not self.sender.granted(self.transfer):
            self.receiver.pump(self.clock, 0.005)
            self.sender.pump(self.clock())
        self.computed(committed=committed)

    def go(self, passes_s: Callable[[], float] = lambda: 0.0) -> None:
        """Run until both sides have reported the end of the transfer, with the clock moved ahead by ``passes_s()`` in
        each turn."""
        give_up = time.monotonic() + scaled(20.0)
        self.computed()
        while not (self.sent and self.received):
            assert time.monotonic() < give_up, f"no end: {self.sent} at the sender, {self.received} at the receiver"
            self.sent += self.sender.pump(self.clock())
            self.received += self.receiver.pump(self.clock, 0.005)
            self.here.poll(0.002)
            self.ahead_s += passes_s()
        assert len(self.sent) == len(self.received) == 1

    def close(self) -> None:
        for each in (self.sender, self.receiver, self.here, self.there, self.source, self.target):
            each.close()
        self.endpoints.close()
        garbage.gc.stop()  # stops pyzmq's thread for buffers that libzmq sends without a copy; all are free now


def _peer(incarnation: Incarnation, address: str, token: bytes, dtype: KvDtype) -> Peer:
    return Peer(WorkerName("peer"), incarnation, address, "host", dtype, token)


class HeldMessages:
    """A receiver's socket that returns nothing until ``count`` messages have arrived, and then all of them.
    Announcements that the sender repeats because a grant is slow are not counted."""

    def __init__(self, socket: zmq.Socket[bytes], count: int) -> None:
        self.socket, self.count, self.there = socket, count, list[list[zmq.Frame]]()

    def getsockopt(self, option: int) -> int:
        assert option == zmq.EVENTS
        while self.count:
            assert self.socket.poll(30_000), f"{self.count} more messages were to come"
            parts = self.socket.recv_multipart(copy=False)
            if len(parts) == 2 and isinstance(decode(parts[1].buffer, ToDecode, MAX_HANDOFF_BYTES), Open):
                continue
            self.there.append(parts)
            self.count -= 1
        return zmq.POLLIN if self.there else 0

    def recv_multipart(self, *_: object, **__: object) -> list[zmq.Frame]:
        return self.there.pop(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.socket, name)


FRAMES = 3


@pytest.mark.parametrize(
    ("committed", "at_once", "answers"),
    [
        (True, 1 << 30, [Accept]),
        (False, 1 << 30, [Ack]),
        (False, 1, [Ack] * FRAMES),
        (True, 1, [*[Ack] * FRAMES, Accept]),
    ],
    ids=[
        "committed in the same turn",
        "to be committed",
        "of so many bytes each",
        "of so many bytes each, and committed",
    ],
)
def test_receiver_combines_acks_of_one_turn(
    committed: bool, at_once: int, answers: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "ACKNOWLEDGED_BYTES", at_once)
    layout = KvLayout((LayerLayout(4, 8, 8),) * FRAMES, "float32", 16)
    handoff = Handoff("shm", layout, 64, limits_of(frame_bytes=layout.range_bytes(0, 1, 64) // shm.ONE_PASS_GRAIN))
    try:
        handoff.send(committed=committed)
        said, held = list[object](), HeldMessages(handoff.receiver._socket, FRAMES + committed)
        with mock.patch.multiple(handoff.receiver, _socket=held, _reply=lambda peer, message: said.append(message)):
            handoff.receiver.pump(handoff.clock, 10.0)
        assert [type(each) for each in said] == answers
        landed = layout.range_bytes(0, FRAMES, 64)
        for number, each in enumerate(said[:FRAMES], 1):
            if isinstance(each, Ack):
                frames = number if at_once == 1 else FRAMES
                assert (each.frame, each.bytes) == (frames - 1, landed * frames // FRAMES)
                assert each.credit_bytes == TRANSFER_BYTES, "what has landed is lent again"
        assert not committed or said[-1] == Accept(*handoff.transfer, landed)
    finally:
        handoff.close()


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("changed", [False, True])
def test_bytes_that_change_after_their_copy_are_noticed_at_the_commit(link: str, changed: bool) -> None:
    """A link whose sender checksums the source at the commit notices a later change; a link that checksums its own copy
    is not affected by one."""
    layout = KvLayout((LayerLayout(4, 8, 8),) * FRAMES, "float32", 16)
    handoff = Handoff(link, layout, 64, limits_of(frame_bytes=layout.range_bytes(0, 1, 64) // shm.ONE_PASS_GRAIN))
    late = handoff.link == shm.NAME
    try:
        handoff.send(committed=False)
        while (landed := handoff.receiver._incoming[handoff.transfer].session.bytes) < layout.range_bytes(
            0, FRAMES, 64
        ):
            assert not handoff.receiver.pump(handoff.clock, 0.005) and not handoff.sender.pump(handoff.clock()), landed
        session = handoff.sender._outgoing[handoff.transfer].session
        assert session.unsummed_bytes == (landed if late else 0)
        if changed:
            handoff.source.raw[handoff.table[1], 100] ^= 1
        handoff.go()
        if late and changed:
            assert isinstance(handoff.received[0], TransferFailed) and "checksum" in handoff.received[0].reason
            assert isinstance(handoff.sent[0], SendFailed) and handoff.sent[0].cancelled_by_peer
        else:
            assert isinstance(handoff.received[0], Landed) and isinstance(handoff.sent[0], Shipped)
            assert session.checksum and not session.unsummed
    finally:
        handoff.close()


def test_no_more_than_some_bytes_wait_for_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KvLayout((LayerLayout(4, 8, 8),) * FRAMES, "float32", 16)
    size = layout.range_bytes(0, 1, 64)
    monkeypatch.setattr(sender, "UNSUMMED_BYTES", size)
    handoff = Handoff("shm", layout, 64, limits_of(frame_bytes=size // shm.ONE_PASS_GRAIN))
    try:
        handoff.send(committed=False)
        session = handoff.sender._outgoing[handoff.transfer].session
        assert [header.number for header in session.unsummed] == [FRAMES - 1]
        handoff.go()
        assert isinstance(handoff.received[0], Landed)
    finally:
        handoff.close()


def test_receiver_repeats_accept_once_per_turn() -> None:
    layout = KvLayout((LayerLayout(4, 8, 8),) * FRAMES, "float32", 16)
    handoff = Handoff("shm", layout, 64, limits_of(frame_bytes=layout.range_bytes(0, 1, 64) // shm.ONE_PASS_GRAIN))
    try:
        handoff.send(committed=True)
        with mock.patch.object(handoff.receiver, "_reply"):  # the answer is lost
            while not handoff.received:
                handoff.received += handoff.receiver.pump(handoff.clock, 0.005)
        handoff.ahead_s += 0.5
        assert not handoff.sender.pump(handoff.clock())
        said, held = list[object](), HeldMessages(handoff.receiver._socket, FRAMES + 1)
        with mock.patch.multiple(handoff.receiver, _socket=held, _reply=lambda peer, message: said.append(message)):
            assert not handoff.receiver.pump(handoff.clock, 10.0), "it has landed once"
        assert said == [Accept(*handoff.transfer, layout.range_bytes(0, FRAMES, 64))]
    finally:
        handoff.close()


@pytest.mark.parametrize("right", [0, 1])
@pytest.mark.parametrize("link", LINKS)
def test_a_hand_off_of_which_nothing_arrives_any_more_is_given_up_on_both_sides(link: str, right: int) -> None:
    """Also if not even the first frame arrives, although grants and announcements go on."""
    limits = TransferLimits(no_progress_s=30.0, renew_s=6.0, resend_s=3.0, lease_s=300.0, frame_bytes=2048)
    handoff = Handoff(link, KvLayout(LAYERS, "float32", 16), 96, limits)
    try:
        failing = handoff.sender._links[handoff.link] = Failing(handoff.sender._links[handoff.link], right)
        handoff.go(lambda: 0.5 if failing.left < 0 else 0.0)
        [sent], [received] = handoff.sent, handoff.received
        assert (
            isinstance(sent, SendFailed)
            and not sent.cancelled_by_peer
            and isinstance(received, TransferFailed)
            and received.cancelled_by_peer
        )
    finally:
        handoff.close()


@pytest.mark.parametrize("to", NOWHERE)
@pytest.mark.parametrize("link", DIRECTED)
def test_a_sender_whose_directions_lead_nowhere_is_cut_off_at_the_third(link: str, to: str) -> None:
    handoff = Handoff(link, KvLayout(LAYERS, "float32", 16), 96, limits_of(resend_s=0.05))
    try:
        handoff.sender._links[handoff.link] = Lying(handoff.sender._links[handoff.link], to)
        handoff.go()
        [sent], [received] = handoff.sent, handoff.received
        assert (
            isinstance(received, TransferFailed)
            and "make no sense" in received.reason
            and not received.cancelled_by_peer
        )
        assert isinstance(sent, SendFailed) and sent.cancelled_by_peer
        assert handoff.receiver.ban_list.cut_off == 1
    finally:
        handoff.close()


@pytest.mark.parametrize("fault", ["drop", "duplicate", "delay"])
@pytest.mark.parametrize("link", LINKS)
def test_frames_that_are_lost_repeated_or_late_arrive_once_and_in_order(link: str, fault: str) -> None:
    channels = FaultyChannels(FaultRates(**{fault: 0.3}), Random(5))
    limits = limits_of(resend_s=0.02, frame_bytes=512)
    handoff = Handoff(link, KvLayout(LAYERS, "float32", 16), 96, limits, channels)
    try:
        handoff.source.raw[:] = np.random.default_rng(7).integers(0, 256, handoff.source.raw.shape, np.uint8)
        handoff.go()
        assert isinstance(handoff.sent[0], Shipped) and isinstance(handoff.received[0], Landed)
        wanted, got = (pool.read(handoff.table, range(96), range(3)) for pool in (handoff.source, handoff.target))
        assert (got == wanted).all() and handoff.received[0].commit.bytes == wanted.nbytes
        assert channels.happened[fault] and not handoff.receiver.bad_messages and not handoff.sender.bad_messages
    finally:
        handoff.close()


@pytest.mark.parametrize("link", LINKS)
def test_a_layer_of_a_block_may_be_larger_than_a_frame(link: str) -> None:
    layout = KvLayout((LayerLayout(64, 256, 256), LayerLayout(1, 16, 16)), "float32", 128)
    assert layout.range_bytes(0, 1, layout.block_size) > MAX_FRAME_BYTES
    handoff = Handoff(link, layout, 200, limits_of())
    try:
        handoff.source.raw[:] = np.random.default_rng(7).integers(0, 256, handoff.source.raw.shape, np.uint8)
        handoff.go()
        assert isinstance(handoff.sent[0], Shipped) and isinstance(handoff.received[0], Landed)
        wanted, got = (pool.read(handoff.table, range(200), range(2)) for pool in (handoff.source, handoff.target))
        assert (got == wanted).all()
    finally:
        handoff.close()


def test_memory_pool_connects_while_owner_answers_and_endpoint_exists() -> None:
    pool, pools, owner = KvMemory(KvLayout(LAYERS, "float32", 16), 2), memory.Pools(), Incarnation("gone")
    endpoint = pools.endpoint(pool, owner)
    os.close(connected(pools, pool))
    endpoint.answers = lambda: False
    connection = pools.connect(endpoint.address)
    assert select.select([connection], [], [], 20)[0]
    assert connection.answer() is None
    connection.close()
    pools.of(owner).close()
    with pytest.raises(OSError, match="gone"):
        pools.connect(endpoint.address)
    pool.close()


def test_pool_endpoint_recovers_from_exhausted_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that runs out of descriptors for a moment must not be unreachable for the rest of its life."""
    refused = threading.Semaphore(0)

    class Exhausted(socket.socket):
        left = 3

        def accept(self) -> Any:
            if self.left:
                self.left -= 1
                refused.release()
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().accept()

    memory = KvMemory(KvLayout(LAYERS, "float32", 16), 2)
    with monkeypatch.context() as patch:
        patch.setattr(shm.socket, "socket", Exhausted)
        endpoint = shm.PoolEndpoint(memory, new_incarnation())
    for _ in range(3):
        assert refused.acquire(timeout=scaled(20))
    connection = shm.PoolConnection(endpoint.address)
    assert select.select([connection], [], [], 20)[0]
    descriptor = connection.answer()
    assert descriptor is not None and os.path.samestat(os.fstat(descriptor), os.fstat(memory.fd))
    os.close(descriptor)
    connection.close()
    endpoint.close()
    memory.close()


def test_pool_endpoint_serves_simultaneous_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """All decode workers of a host may connect at once, before the endpoint's thread runs; all of them are served."""
    opens = threading.Event()
    serve = shm.PoolEndpoint._serve

    def late(endpoint: shm.PoolEndpoint) -> None:
        opens.wait()
        serve(endpoint)

    monkeypatch.setattr(shm.PoolEndpoint, "_serve", late)
    memory = KvMemory(KvLayout(LAYERS, "float32", 16), 2)
    endpoint = shm.PoolEndpoint(memory, new_incarnation())
    try:
        crowd = [shm.PoolConnection(endpoint.address) for _ in range(100)]
        opens.set()
        for connection in crowd:
            assert select.select([connection], [], [], 20)[0]
            descriptor = connection.answer()
            assert descriptor is not None
            os.close(descriptor)
            connection.close()
    finally:
        opens.set()
        endpoint.close()
        memory.close()


@needs_nixl
@pytest.mark.torch
def test_nixl_reader_refuses_invalid_announcement() -> None:
    memory = KvMemory(KvLayout(LAYERS, "float32", 16), 2)
    owner = new_incarnation()
    endpoint, reader = nixl.NixlPoolEndpoint(memory, owner), nixl.NixlReader(new_incarnation())
    other = nixl.NixlPoolEndpoint(memory, new_incarnation())
    for wrong in (b"", os.urandom(16), os.urandom(500), endpoint.announcement[:40], other.announcement[:-7]):
        with pytest.raises(ValueError, match="NIXL agent"):
            reader.reach(owner, wrong, memory.layout, memory.blocks)
    with pytest.raises(ValueError, match="sent by"):
        reader.reach(new_incarnation(), endpoint.announcement, memory.layout, memory.blocks)
    pool = reached(reader, owner, endpoint.announcement, memory)
    assert (had(pool.generations_of(np.arange(2))) == memory.generations).all() and not pool.lost
    for each in (pool, reader, endpoint, other, memory):
        each.close()


@needs_nixl
@pytest.mark.torch
def test_unreadable_nixl_pool_is_lost_until_reconnected() -> None:
    memory = KvMemory(KvLayout(LAYERS, "float32", 16), 2)
    owner = new_incarnation()
    endpoint, reader = nixl.NixlPoolEndpoint(memory, owner), nixl.NixlReader(new_incarnation())
    beyond = reader.reach(owner, endpoint.announcement, memory.layout, 1 << 20)  # more blocks than the pool has
    with pytest.raises(WireError, match="cannot be read"):
        had(beyond.read(np.array([1 << 19]), range(16), range(1)))
    assert beyond.lost
    with pytest.raises(WireError, match="cannot be read"):
        beyond.generations_of(np.arange(2))
    beyond.close()
    again = reached(reader, owner, endpoint.announcement, memory)
    assert (had(again.read(np.arange(2), range(32), range(3))) == memory.read(np.arange(2), range(32), range(3))).all()
    for each in (again, reader, endpoint, memory):
        each.close()


@needs_nixl
@pytest.mark.torch
def test_connection_to_nixl_pool_that_is_lost_meanwhile_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = KvMemory(KvLayout(LAYERS, "float32", 16), 2)
    owner = new_incarnation()
    endpoint, reader = nixl.NixlPoolEndpoint(memory, owner), nixl.NixlReader(new_incarnation())
    pool = reader.reach(owner, endpoint.announcement, memory.layout, 2)
    connection = nixl.NixlPoolConnection(pool)
    connection._word._state = "PROC"  # type: ignore[attr-defined]

    def fails(pool: nixl.NixlPool, handle: object) -> str:
        raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

    monkeypatch.setattr(nixl.NixlPool, "state", fails)
    connection.close()
    assert pool.lost and not pool._landings
    for each in (reader, endpoint, memory):
        each.close()


OWNER = """
import signal
from common.core.ids import new_incarnation
from common.kv.storage.host import KvMemory
from kvtransfer.links.nixl import NixlPoolEndpoint
from tests.unit.kvtransfer.links.test_links import LAYERS, KvLayout
memory, owner = KvMemory(KvLayout(LAYERS, "float32", 16), 8), new_incarnation()
memory.generations[:] = 7
endpoint = NixlPoolEndpoint(memory, owner)
print("announced", owner, endpoint.announcement.hex(), flush=True)
signal.pause()
"""


@pytest.mark.processes
@needs_nixl
@pytest.mark.torch
def test_stopped_nixl_sender_blocks_no_reader_and_leaks_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # otherwise the kernel reads the memory of the stopped process
    layout = KvLayout(LAYERS, "float32", 16)
    reader = nixl.NixlReader(new_incarnation())
    with contextlib.ExitStack() as stack:
        it = stack.enter_context(subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True))
        stack.callback(it.kill)  # a stopped process would not end by itself
        assert it.stdout is not None
        said = next(line.split() for line in it.stdout if line.startswith("announced"))
        owner, announcement = Incarnation(said[1]), bytes.fromhex(said[2])

        def connect() -> tuple[nixl.NixlPoolConnection, nixl.NixlPool]:
            pool = reader.reach(owner, announcement, layout, 8)
            return nixl.NixlPoolConnection(pool), pool

        def answered() -> nixl.NixlPool:
            visit, pool = connect()
            until = time.monotonic() + scaled(20.0)
            while visit.answer() is None:
                assert time.monotonic() < until
            visit.close()
            return pool

        pool = answered()
        it.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, it.pid, os.WSTOPPED | os.WNOWAIT)
        busy = time.thread_time()
        reading = pool.generations_of(np.arange(8))
        looks = 0
        with pytest.raises(WireError, match="cannot be read"):  # noqa: PT012
            while reading.landed() is None:
                looks += 1
                time.sleep(0.01)  # stands for the worker's other work
        assert looks > 5 and pool.lost and time.thread_time() - busy < nixl.READ_S / 2
        reading.close()
        pool.close()
        assert not pool._landings
        for _ in range(3):
            visit, pool = connect()
            assert visit.answer() is None
            visit.close()
            assert not pool._landings
        reader.close()  # before the sender continues: UCX would answer old requests and may abort this process


@needs_nixl
@pytest.mark.torch
def test_handoff_with_lost_pool_fails_at_once_and_next_reconnects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handoff = Handoff("nixl", KvLayout(LAYERS, "float32", 16), 96, limits_of())
    start, starts = nixl.NixlPool.start, []

    def fails_once(pool: nixl.NixlPool, *arguments: Any) -> tuple[Any, str]:
        starts.append(pool)
        handle, state = start(pool, *arguments)
        return handle, "ERR" if len(starts) == 2 else state  # the first start is that of the connection

    monkeypatch.setattr(nixl.NixlPool, "start", fails_once)
    try:
        handoff.go()
        [sent], [received] = handoff.sent, handoff.received
        assert (
            isinstance(received, TransferFailed)
            and "cannot be read" in received.reason
            and not received.cancelled_by_peer
        )
        assert isinstance(sent, SendFailed) and sent.cancelled_by_peer
        handoff.again(after_s=PAUSE_S)
        handoff.go()
        assert isinstance(handoff.sent[0], Shipped) and isinstance(handoff.received[0], Landed)
        assert starts[-1] is not starts[0]
    finally:
        handoff.close()


@pytest.mark.skipif(find_spec("nixl") is not None, reason="the extra nixl is installed")
def test_without_nixl_a_worker_that_should_use_it_says_so() -> None:
    memory = KvMemory(KvLayout(LAYERS, "float32", 16), 2)
    with pytest.raises(StartError) as caught:
        nixl.NixlPoolEndpoint(memory, new_incarnation())
    assert "tandem[nixl]" in caught.value.todo
    memory.close()
