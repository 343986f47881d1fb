"""The link over process groups between two processes, one of which is killed. The groups are those of gloo."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from common.core.errors import WireError
from common.core.ids import BlockId, RequestId, TransferId, WorkerName, new_incarnation
from common.kv.layout import KvLayout, LayerLayout
from common.net.messages import Peer
from common.net.sockets import Channels
from kvtransfer.links import groups, nccl
from kvtransfer.links.nccl import PAUSE_S, _Ledger
from kvtransfer.receiver import Landed, Receiver, TransferFailed
from kvtransfer.sender import FirstTokens, Sender
from kvtransfer.session import TransferLimits
from tests.fakes.device_calls import FakeGpuMemory
from tests.pace import scaled

pytestmark = [pytest.mark.torch, pytest.mark.processes]

LAYOUT = KvLayout((LayerLayout(2, 4, 4),) * 4, "float32", 16)
TOKENS, BLOCKS = 64, 4
TABLE = [BlockId(block) for block in range(BLOCKS)]
TOKEN = b"known to both ends"
LIMITS = TransferLimits(no_progress_s=60.0, lease_s=240.0, frame_bytes=512)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first group imports torch.distributed, which takes seconds on a busy machine; an engine has imported it."""
    for module in (nccl, groups):
        monkeypatch.setattr(module, "JOIN_S", scaled(15.0))


def transfer(number: int) -> TransferId:
    return TransferId(RequestId(number.to_bytes(16, "big")), 1)


def send_until_killed(address: str) -> None:
    """Run a prefill worker in this process: it sends whole hand-offs, of the third one only the first layer."""
    channels, memory = Channels(), FakeGpuMemory(LAYOUT, BLOCKS)
    sender = Sender(channels, memory, new_incarnation(), "host", transport="nccl", limits=LIMITS)
    print(sender._incarnation, flush=True)
    for line in sys.stdin:
        number, layers, decode = line.split()
        memory.raw[:] = int(number)
        peer = Peer(WorkerName("decode"), decode, address, "host", "float32", TOKEN)  # type: ignore[arg-type]
        id, ended = transfer(int(number)), list[Any]()
        sender.open(id, peer, TOKENS, TABLE, time.monotonic())
        sender.computed(id, TABLE, TOKENS, int(layers), time.monotonic())
        if int(layers) == len(LAYOUT.layers):
            sender.finish(id, FirstTokens(b"\1\0\0\0", (0,), (-1,), (None,)), time.monotonic())
        while not ended:
            ended += sender.pump(time.monotonic())
            channels.poll(0.002)
        print(getattr(ended[0], "link", "failed"), flush=True)


class Decode:
    """A decode worker in the test's process, and a prefill worker in another one."""

    def __init__(self) -> None:
        self.channels, self.memory = Channels(), FakeGpuMemory(LAYOUT, BLOCKS)
        self.receiver = Receiver(
            self.channels, self.memory, "host", "tcp://127.0.0.1:*", transport="nccl", limits=LIMITS
        )
        self.incarnation = new_incarnation()
        self.ended: list[Landed | TransferFailed] = []
        self.start()

    def start(self) -> None:
        program = f"from {__name__} import send_until_killed; send_until_killed({self.receiver.address!r})"
        self.prefill = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.prefill.stdout is not None
        self.sender = self.prefill.stdout.readline().strip()

    def kill(self) -> None:
        self.prefill.kill()
        self.prefill.communicate()

    def order(self, number: int, layers: int = len(LAYOUT.layers)) -> None:
        """Expect a hand-off, and let the other process send ``layers`` of it."""
        peer = Peer(WorkerName("prefill"), self.sender, "", "host", "float32", TOKEN)  # type: ignore[arg-type]
        self.receiver.expect(transfer(number), TOKENS, 0, TABLE, peer, time.monotonic())
        assert self.prefill.stdin is not None
        print(number, layers, self.incarnation, file=self.prefill.stdin, flush=True)

    def pump(self, until: Callable[[], object], seconds: float = 40.0) -> float:
        """Receive until ``until`` is true; return how long that took."""
        began = time.monotonic()
        while not until():
            assert time.monotonic() < began + scaled(seconds), "it is not noticed"
            self.ended += self.receiver.pump(time.monotonic, 0.005)
            self.channels.poll(0.002)
        return time.monotonic() - began

    def link(self) -> str:
        """Return the link of the hand-off that has just landed, as the sender names it."""
        assert self.prefill.stdout is not None
        self.pump(lambda: self.ended)
        assert isinstance(self.ended.pop(), Landed)
        return self.prefill.stdout.readline().strip()

    def close(self) -> None:
        if self.prefill.poll() is None:
            self.kill()
        for each in (self.receiver, self.channels, self.memory):
            each.close()


def test_a_killed_prefill_worker_is_noticed_and_the_next_one_has_a_group_of_its_own() -> None:
    """The killed one has sent a frame whose message has not arrived; the receive of the next one never ends."""
    decode = Decode()
    try:
        decode.order(1)
        assert decode.link() == "nccl" and (decode.memory.raw == 1).all()
        decode.order(2, layers=2)
        session = decode.receiver._incoming[transfer(2)].session
        decode.pump(lambda: session.frames)
        known = decode.receiver._links.groups
        assert known is not None
        end = next(iter(known._known.values())).end
        decode.kill()
        with contextlib.suppress(WireError):  # if the connection is known to be broken already
            end.announced(_Ledger(end._next, (512,)))  # a send that the dead process has not made
        assert decode.pump(lambda: end.group.lost, 10.0) < scaled(2.0), "noticed by the broken connection"
        decode.receiver.cancel(transfer(2), "its sender has died")
        decode.start()
        decode.order(3)
        assert decode.link() == "nccl" and (decode.memory.raw == 3).all()
    finally:
        decode.close()  # fails if memory of the device is not freed


def test_a_hand_off_falls_back_while_there_is_no_group() -> None:
    decode = Decode()
    try:
        decode.order(1)
        assert decode.link() == "nccl"
        known = decode.receiver._links.groups
        assert known is not None
        next(iter(known._known.values())).end.group.lose("the test says so")
        decode.order(2)
        assert decode.link() == "zmq" and (decode.memory.raw == 2).all()
        time.sleep(PAUSE_S)  # until the next group may be made
        decode.order(3)
        assert decode.link() == "nccl" and (decode.memory.raw == 3).all()
    finally:
        decode.close()
