"""Work on a GPU that ends late, out of order, with an error, or not at all: nothing wrong is accepted, nothing leaks.

The GPU is a fake whose copies run when a test says so.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest

from common.core.errors import Damaged, StartError, WireError
from common.core.ids import RequestId, TransferId, new_incarnation
from common.kv.layout import KvLayout, LayerLayout
from common.kv.storage.cuda import AttachedCudaBlocks
from common.kv.storage.device_calls import DeviceFailed
from common.kv.storage.host import KvMemory
from common.worker.loop import TIMER_S
from decode.role import READING_S
from kvtransfer.frames import FrameHeader, Rectangle
from kvtransfer.links import cuda_ipc, stages
from kvtransfer.links.base import LinkLost
from kvtransfer.links.choice import SendLinks, links_of
from kvtransfer.receiver import Landed, TransferFailed
from kvtransfer.sender import FirstTokens, SendFailed, Shipped
from kvtransfer.session import TransferLimits
from tests.fakes.device_calls import FAILS, LOST, FakeDevice, FakeGpuMemory, Job
from tests.fakes.oracle import OracleEngine
from tests.pace import scaled
from tests.unit.kvtransfer.links.test_links import (
    LAYERS,
    TARGET_TABLES,
    TRANSFER,
    Halves,
    Handoff,
    halves,
    limits_of,
    pool,
)
from tests.unit.workers import Bench, make_request

LAYOUT = KvLayout(LAYERS, "float32", 16)
OTHER = TransferId(RequestId(b"o" * 16), 1)
CELLS = Rectangle(0, 3, 0, 32)
TABLE = TARGET_TABLES[16]


@pytest.fixture(autouse=True)
def _no_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "SPIN_S", 0.0)


class End:
    """One half of a link, with its pool on a GPU that does only what it is told to."""

    def __init__(self, link: str, closing: contextlib.ExitStack) -> None:
        self.source, self.target = (FakeGpuMemory(LAYOUT, 8, FakeDevice(eager=False)) for _ in range(2))
        for memory in (self.source, self.target):
            closing.callback(memory.close)
        self.source.raw[:] = np.random.default_rng(7).integers(0, 256, self.source.raw.shape, np.uint8)
        self.target.raw[:] = 0xEE
        self.sending, self.receiving = halves(link, self.source, self.target, closing)

    def made(self, transfer: TransferId = TRANSFER) -> Any:
        return self.sending.payload(transfer, TABLE, CELLS)

    def place(self, payload: Any, size: int, checksum: int) -> int | None:
        header = FrameHeader(TRANSFER, 0, CELLS, size, checksum)
        return self.receiving.place(header, memoryview(bytes(payload)), TABLE)

    def sent(self) -> tuple[Any, int, int]:
        """Return a payload, with all of the sender's work done."""
        while (made := self.made()) is None:
            run(self.source.device)
        payload, size, checksum = made
        return payload, size, checksum

    def arrived(self) -> bool:
        wanted, got = (memory.read(TABLE, CELLS.tokens, CELLS.layers) for memory in (self.source, self.target))
        return bool((wanted == got).all())

    def untouched(self) -> bool:
        return bool((self.target.raw == 0xEE).all())


def run(device: FakeDevice) -> None:
    """Complete all work that has been started."""
    for job in device.pending:
        job.run()


@pytest.fixture
def closing() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as closing:
        yield closing


@pytest.fixture(params=["pinned", "cuda-ipc"])
def end(request: pytest.FixtureRequest, closing: contextlib.ExitStack) -> End:
    return End(request.param, closing)


def test_what_a_gpu_has_not_copied_yet_is_neither_sent_nor_counted_as_placed(end: End) -> None:
    if end.sending.name != cuda_ipc.NAME:
        assert end.made() is None and end.made() is None
        [copy] = end.source.device.pending
        assert not copy.done
    payload, size, checksum = end.sent()
    steps = 0
    while end.place(payload, size, checksum) is None:
        assert end.place(payload, size, checksum) is None, "it is not placed before the GPU has placed it"
        run(end.target.device)
        steps += 1
    assert steps >= 1 and end.arrived()


def test_copies_that_end_in_another_order_keep_to_their_hand_offs(closing: contextlib.ExitStack) -> None:
    end = End("pinned", closing)
    assert end.made() is None and end.made(OTHER) is None
    first, second = end.source.device.pending
    second.run()
    assert end.made() is None
    made = end.made(OTHER)
    assert made is not None and bytes(made[0]) == end.source.read(TABLE, CELLS.tokens, CELLS.layers).tobytes()
    first.run()
    assert bytes(end.made()[0]) == bytes(made[0])


def test_a_copy_that_fails_fails_the_hand_off_in_words(end: End) -> None:
    payload, size, checksum = end.sent()
    end.target.device.fault = FAILS
    with pytest.raises(WireError, match="illegal memory access"):
        end.place(payload, size, checksum)
    assert end.receiving.lost and end.untouched()
    end.target.device.fault = ""
    for job in end.target.device.jobs:
        job.fault = ""  # so that the test can close what is left
    end.source.device.fault = FAILS
    with pytest.raises(LinkLost, match="illegal memory access"):  # noqa: PT012
        while end.sending.name == cuda_ipc.NAME or end.made() is None:
            end.sending.checksum(TRANSFER, TABLE, CELLS)
    for job in end.source.device.jobs:
        job.fault = ""


def test_a_refused_call_fails_the_hand_off_in_words(end: End) -> None:
    payload, size, checksum = end.sent()
    end.target.device.refuses = "invalid argument"
    with pytest.raises(WireError, match="invalid argument"):
        end.place(payload, size, checksum)
    assert end.receiving.lost and end.untouched()


def test_blocks_are_not_reused_before_a_copy_into_them_has_ended(end: End) -> None:
    """The hand-off is cancelled in the middle of the copy, and its blocks go to another request."""
    payload, size, checksum = end.sent()
    while end.place(payload, size, checksum) is None and not writes_blocks(end):
        run(end.target.device)
    [writing] = end.target.device.pending
    end.receiving.close()
    assert writing.waited and writing.done, "nothing is left that could write the blocks later"


def writes_blocks(end: End) -> bool:
    """Return whether the job that is under way writes the blocks: the last of a frame."""
    jobs = len(end.target.device.jobs)
    return jobs == (2 if end.receiving.name == cuda_ipc.NAME else 1)


def test_a_copy_into_blocks_that_never_ends_ends_the_worker(end: End) -> None:
    payload, size, checksum = end.sent()
    while end.place(payload, size, checksum) is None and not writes_blocks(end):
        run(end.target.device)
    [writing] = end.target.device.pending
    writing.fault = LOST
    with pytest.raises(DeviceFailed, match="lost"):
        end.receiving.close()
    writing.fault = ""


def test_blocks_are_written_after_the_engines_earlier_work_on_them(closing: contextlib.ExitStack) -> None:
    source = FakeGpuMemory(LAYOUT, 8)
    closing.callback(source.close)
    target = FakeGpuMemory(LAYOUT, 8)
    closing.callback(target.close)
    order = list[str]()
    target.device.engine = Job([lambda: order.append("engine")])
    after = target.mark()
    target.device.engine = None
    writer = stages.DeviceWriter(target, Halves(target, closing).pinned_buffers(), after)
    data = source.read(TABLE, CELLS.tokens, CELLS.layers)
    header = FrameHeader(TRANSFER, 0, CELLS, data.nbytes, 0)
    for _ in writer.write(header, data, "float32", TABLE):
        pass
    assert order == ["engine"]


def test_a_block_reused_between_the_copy_and_the_check_is_not_used(closing: contextlib.ExitStack) -> None:
    end = End("cuda-ipc", closing)
    payload, size, checksum = end.sent()
    assert end.place(payload, size, checksum) is None
    run(end.target.device)
    end.source.generations[TABLE[1]] += 1
    with pytest.raises(Damaged, match="reused"):
        end.place(payload, size, checksum)
    assert end.untouched() and not end.receiving.lost


def test_a_pool_whose_owner_has_died_can_still_be_read_and_let_go(closing: contextlib.ExitStack) -> None:
    source, target = FakeGpuMemory(LAYOUT, 8), FakeGpuMemory(LAYOUT, 8)
    closing.callback(target.close)
    source.raw[:] = 5
    landings = Halves(target, closing).landings()
    there = AttachedCudaBlocks(source.descriptors(), LAYOUT, 8, target.device)
    payload, size, _ = cuda_ipc.CudaIpcSendLink(source, landings).payload(TRANSFER, TABLE, CELLS)
    source.close()
    link = cuda_ipc.CudaIpcReceiveLink(target, there, landings, None)
    header = FrameHeader(TRANSFER, 0, CELLS, size, 0)
    while link.place(header, memoryview(payload), TABLE) is None:
        pass
    assert (target.read(TABLE, CELLS.tokens, CELLS.layers) == 5).all()
    link.close()
    there.close()


def test_an_attached_pool_is_unmapped_only_when_no_copy_reads_it(closing: contextlib.ExitStack) -> None:
    source, target = FakeGpuMemory(LAYOUT, 8), FakeGpuMemory(LAYOUT, 8, FakeDevice(eager=False))
    closing.callback(target.close)
    closing.callback(source.close)
    landings = Halves(target, closing).landings()
    there = AttachedCudaBlocks(source.descriptors(), LAYOUT, 8, target.device)
    link = cuda_ipc.CudaIpcReceiveLink(target, there, landings, None)
    payload, size, _ = cuda_ipc.CudaIpcSendLink(source, landings).payload(TRANSFER, TABLE, CELLS)
    assert link.place(FrameHeader(TRANSFER, 0, CELLS, size, 0), memoryview(payload), TABLE) is None
    link.close()
    [reading] = target.device.pending
    there.close()
    assert reading.waited and reading.done


# -- whole hand-offs --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["pinned", "cuda-ipc"])
def handoff(request: pytest.FixtureRequest) -> Iterator[Handoff]:
    limits = TransferLimits(no_progress_s=30.0, renew_s=6.0, resend_s=3.0, lease_s=300.0, frame_bytes=2048)
    handoff = Handoff(request.param, LAYOUT, 96, limits)
    yield handoff
    for memory in (handoff.source, handoff.target):
        for job in memory.device.jobs:
            job.fault = ""
    handoff.close()


def pump(handoff: Handoff, until: Callable[[], object]) -> None:
    give_up = time.monotonic() + scaled(20.0)
    while not until():
        assert time.monotonic() < give_up
        handoff.sent += handoff.sender.pump(handoff.clock())
        handoff.received += handoff.receiver.pump(handoff.clock, 0.005)
        handoff.here.poll(0.002)


def test_layers_are_sent_only_when_their_kernels_have_ended(handoff: Handoff) -> None:
    """The engine's calls return before its kernels have written anything."""
    source = handoff.source
    assert isinstance(source, FakeGpuMemory)
    data = np.random.default_rng(3).integers(0, 256, source.raw.shape, np.uint8)
    pump(handoff, lambda: handoff.sender.granted(handoff.transfer))
    kernels = [Job([lambda: source.raw.__setitem__(slice(None), data)], kernels=True), Job(kernels=True)]
    for layers, kernel in zip((2, 3), kernels, strict=True):
        source.device.engine = kernel
        event = source.mark()
        handoff.sender.computed(handoff.transfer, handoff.table, 96, layers, handoff.clock(), event)
    for _ in range(20):
        handoff.sender.pump(handoff.clock())
    session = handoff.sender._outgoing[handoff.transfer].session
    assert session.frames == 0, "a frame of layers that no kernel has written was sent"
    kernels[0].run()
    pump(handoff, lambda: session.frames)
    assert not session.may_commit()
    source.device.engine = kernels[1]
    handoff.sender.finish(handoff.transfer, FirstTokens(b"\1\0\0\0", (0,), (-1,), (None,)), handoff.clock())
    kernels[1].run()
    source.device.engine = None
    pump(handoff, lambda: handoff.sent and handoff.received)
    assert isinstance(handoff.sent[0], Shipped) and isinstance(handoff.received[0], Landed)
    assert (handoff.target.raw[: len(handoff.table)] == data[: len(handoff.table)]).all()


def test_kernels_that_fail_fail_the_hand_off(handoff: Handoff) -> None:
    pump(handoff, lambda: handoff.sender.granted(handoff.transfer))
    event = Job(fault=FAILS)
    handoff.sender.computed(handoff.transfer, handoff.table, 96, 3, handoff.clock(), event)
    pump(handoff, lambda: handoff.sent and handoff.received)
    assert isinstance(handoff.sent[0], SendFailed) and "not computed" in handoff.sent[0].reason
    assert isinstance(handoff.received[0], TransferFailed) and handoff.received[0].cancelled_by_peer


@pytest.mark.parametrize("side", ["source", "target"])
def test_work_that_never_ends_is_noticed_on_either_side(handoff: Handoff, side: str) -> None:
    memory = getattr(handoff, side)
    assert isinstance(memory, FakeGpuMemory)
    memory.device.fault = LOST
    handoff.computed()
    until = time.monotonic() + scaled(10.0)
    with contextlib.suppress(DeviceFailed):  # a copy into blocks that never ends ends the worker
        while not (handoff.sent and handoff.received):
            assert time.monotonic() < until
            handoff.sent += handoff.sender.pump(handoff.clock())
            handoff.received += handoff.receiver.pump(handoff.clock, 0.005)
            handoff.here.poll(0.002)
            handoff.ahead_s += 0.5
    assert isinstance(handoff.sent[0], SendFailed)
    assert not any(isinstance(each, Landed) for each in handoff.received)
    if side == "source":
        assert "GPU has not" in handoff.sent[0].reason


def test_kernels_of_a_withdrawn_prompt_are_forgotten(handoff: Handoff) -> None:
    """Its blocks were taken, and the layers that its kernels have written are not those of its next try."""
    event = Job(kernels=True)
    handoff.sender.computed(handoff.transfer, handoff.table, 96, 3, handoff.clock(), event)
    handoff.sender.withdraw(handoff.transfer, handoff.clock())
    event.run()
    pump(handoff, lambda: handoff.sender.granted(handoff.transfer))
    handoff.sender.pump(handoff.clock())
    assert handoff.sender._outgoing[handoff.transfer].session.frames == 0
    handoff.go()
    assert isinstance(handoff.received[0], Landed)


# -- choice -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "dtypes", "link"),
    [
        (("gpu", "gpu"), ("float32", "float32"), "cuda-ipc"),
        (("gpu", "gpu"), ("bfloat16", "float32"), "zmq"),
        (("gpu", "host"), ("float32", "float32"), "zmq"),
        (("host", "gpu"), ("float32", "bfloat16"), "shm"),
        (("host", "host"), ("float32", "float32"), "shm"),
    ],
)
def test_auto_chooses_by_the_devices_of_both_ends(
    ends: tuple[str, str], dtypes: tuple[Any, Any], link: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tandem.kv")
    layouts = [KvLayout(LAYERS, dtype, 16) for dtype in dtypes]
    kinds = {("gpu", "gpu"): "pinned", ("gpu", "host"): "from-gpu", ("host", "gpu"): "to-gpu", ("host", "host"): "shm"}
    memories = [pool(kinds[ends], end, layout, 6) for end, layout in zip(("source", "target"), layouts, strict=True)]
    handoff = Handoff("auto", layouts[0], 96, limits_of(), memories=(memories[0], memories[1]))
    try:
        handoff.source.raw[:] = 0
        handoff.go()
        assert isinstance(handoff.sent[0], Shipped) and isinstance(handoff.received[0], Landed)
        assert handoff.sent[0].link == link
        fallback = link == "zmq"
        assert fallback == any("reached" in text or "best link" in text for text in caplog.messages)
    finally:
        handoff.close()


def test_a_transport_that_the_pools_memory_excludes_is_refused_at_start() -> None:
    for transport, link, words in (("cuda-ipc", "zmq", "GPU"), ("nccl", "zmq", "GPU"), ("shm", "pinned", "memory")):
        memory = pool(link, "source", LAYOUT, 2)
        with pytest.raises(StartError, match=words):
            SendLinks(memory, new_incarnation(), transport, "127.0.0.1")
        memory.close()


def test_every_worker_can_fall_back_to_zeromq_or_says_that_it_cannot() -> None:
    assert links_of("auto", "host") == ("shm", "zmq") and links_of("auto", "cuda") == ("cuda-ipc", "shm", "zmq")
    assert links_of("nccl", "cuda") == ("nccl", "zmq") and links_of("nixl", "host") == ("nixl",)


def test_a_gpu_whose_memory_cannot_be_exported_sends_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise DeviceFailed("not supported")

    monkeypatch.setattr(FakeDevice, "export", refused)
    memories = FakeGpuMemory(LAYOUT, 6), FakeGpuMemory(LAYOUT, 6)
    handoff = Handoff("auto", LAYOUT, 96, limits_of(), memories=memories)
    try:
        handoff.go()
        assert isinstance(handoff.sent[0], Shipped) and handoff.sent[0].link == "zmq"
    finally:
        handoff.close()


def test_host_memory_is_not_asked_for_events() -> None:
    memory = KvMemory(KvLayout((LayerLayout(1, 4, 4),), "float32", 16), 2)
    assert memory.mark() is None
    memory.close()


# -- whole workers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["cuda-ipc", "zmq"])
def test_workers_on_gpus_hand_over_while_kernels_run(bench: Bench, link: str) -> None:
    """The kernels of a layer end only when the prefill worker looks for it, after it has launched all layers."""
    for role, block_size in (("prefill", 16), ("decode", 32)):
        engine = OracleEngine(128, block_size)
        engine.memory.close()
        engine.memory = KernelMemory(engine.layout, 128)  # type: ignore[assignment]
        bench.add(role, engine, kv_transport=link)
    requests = [make_request(length, 8) for length in (1, 40, 200)]
    for request in requests:
        bench.place(request, "prefill-0", "decode-1")
    bench.until(lambda: bench.done(*requests))
    for request in requests:
        bench.check(request)
        assert [each.link for each in bench.shipped(request)] == [link]


@pytest.mark.parametrize("link", ["cuda-ipc", "zmq"])
def test_workers_look_often_for_the_end_of_copies_which_no_message_reports(bench: Bench, link: str) -> None:
    devices = []
    for role in ("prefill", "decode"):
        engine = OracleEngine(128, 16)
        engine.memory.close()
        devices.append(FakeDevice(eager=False))
        engine.memory = FakeGpuMemory(engine.layout, 128, devices[-1])  # type: ignore[assignment]
        bench.add(role, engine, kv_transport=link)
    request = make_request(40, 8)
    bench.place(request, "prefill-0", "decode-1")
    rests = {name: list[float]() for name in bench.workers}
    give_up = time.monotonic() + scaled(20.0)
    while not bench.done(request):
        assert time.monotonic() < give_up
        bench.turn()
        for (name, worker), device in zip(bench.workers.items(), devices, strict=True):
            if device.pending:
                rests[name].append(worker.rest_s())
                run(device)
    assert all(rests.values()) and max(chain(*rests.values())) <= READING_S
    assert all(worker.rest_s() == TIMER_S for worker in bench.workers.values())


class KernelMemory(FakeGpuMemory):
    """A pool whose engine's work ends at the second look at its event."""

    def mark(self) -> Job:
        return SlowJob(kernels=True)


class SlowJob(Job):
    looks = 0

    @property
    def done(self) -> bool:
        self.looks += 1
        return self.looks > 1

    @done.setter
    def done(self, value: bool) -> None: ...
