"""Sender pools that are out of reach for a while: connecting never blocks the receiver, and it is tried again."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from common.core.ids import BlockId, Incarnation, RequestId, TransferId, new_incarnation
from common.kv.layout import KvLayout, LayerLayout
from common.kv.storage.host import KvMemory
from common.net.messages import Cancel, Grant, Heard, Open, Peer, ToPrefill
from common.net.sockets import Channels, receive, send
from kvtransfer.links import shm
from kvtransfer.links.shm import PoolEndpoint
from kvtransfer.peer_proof import proof
from kvtransfer.receiver import Landed, Receiver, TransferFailed
from kvtransfer.session import TransferLimits
from kvtransfer.source_pools import LONGEST_PAUSE_S, PAUSE_S, POOL_CONNECT_S
from tests.pace import scaled

LAYOUT = KvLayout((LayerLayout(1, 4, 4),), "float32", 16)
TOKEN = b"known to both ends"


class ReceiverSetup:
    """A receiver on a test clock, and a sender that is only a socket and, for some tests, a pool endpoint."""

    def __init__(self, transport: str) -> None:
        self.transport, self.channels, self.now = transport, Channels(), 100.0
        self.memory, self.pool = KvMemory(LAYOUT, 8), KvMemory(LAYOUT, 8)
        self.receiver = Receiver(self.channels, self.memory, "here", "tcp://127.0.0.1:*", transport=transport)
        self.sender = new_incarnation()
        self.line = self.channels.dealer(self.receiver.address, b"sender", to="decode")
        self.endpoint: Any = None
        self.transfers = 0
        self.ended: list[Landed | TransferFailed] = []

    def stand_still(self) -> None:
        """Open an endpoint whose owner is stopped: the kernel accepts connections and nothing answers."""
        self.endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.endpoint.bind(f"\0{self._address}")
        self.endpoint.listen(16)

    def go_on(self) -> None:
        """Let the stopped owner continue and serve one connection."""
        visitor, _ = self.endpoint.accept()
        with visitor:
            socket.send_fds(visitor, [b"pool"], [self.pool.fd])

    def open_endpoint(self) -> None:
        self.close_endpoint()
        self.endpoint = PoolEndpoint(self.pool, Incarnation(self.sender))

    def close_endpoint(self) -> None:
        if self.endpoint is not None:
            self.endpoint.close()
        self.endpoint = None

    @property
    def _address(self) -> str:
        return f"tandem-kv-{self.sender}"

    def announce(self) -> TransferId:
        """Expect and announce a new hand-off."""
        self.transfers += 1
        transfer = TransferId(RequestId(self.transfers.to_bytes(16, "big")), 0)
        peer = Peer("sender", self.sender, "", "here", "float32", TOKEN)
        self.receiver.expect(transfer, 16, 0, [BlockId(self.transfers)], peer, self.now)
        self.repeat(transfer)
        return transfer

    def repeat(self, transfer: TransferId) -> None:
        layout = LAYOUT.fingerprint
        shown = proof(TOKEN, transfer, "open")
        message = Open(*transfer, self.sender, 16, layout, "float32", "here", self._address, 8, 16, 1, shown)
        assert send(self.line, message)

    def answer(self, transfer: TransferId) -> Any:
        """Return the next message about ``transfer`` while the receiver's clock stands still."""
        give_up = time.monotonic() + scaled(20.0)
        while time.monotonic() < give_up:
            self.ended += self.receiver.pump(self._clock, 1.0)
            while (message := receive(self.line, ToPrefill)) is not None:
                if (message.request, message.attempt) == transfer:
                    return message
            self.channels.poll(0.01)
        raise AssertionError("no answer")

    def _clock(self) -> float:
        return self.now

    def close(self) -> None:
        self.close_endpoint()
        self.receiver.close()
        self.line.close(linger=0)
        self.channels.close()
        self.memory.close()
        self.pool.close()


@pytest.fixture(params=["shm", "auto"])
def meeting(request: pytest.FixtureRequest) -> Iterator[ReceiverSetup]:
    meeting = ReceiverSetup(request.param)
    yield meeting
    meeting.close()


def out_of_reach(meeting: ReceiverSetup, message: Any) -> bool:
    """Return whether ``message`` reports an unreachable pool: auto falls back to ZeroMQ, shm fails."""
    if meeting.transport == "auto":
        return isinstance(message, Grant) and message.link == "zmq"
    return isinstance(message, Cancel) and "out of reach" in message.reason


def test_receiver_does_not_block_on_late_pool_endpoint(meeting: ReceiverSetup) -> None:
    meeting.stand_still()
    first, second = meeting.announce(), meeting.announce()
    assert isinstance(meeting.answer(first), Heard), "virtual time stands still: it did not wait"
    assert isinstance(meeting.answer(second), Heard)
    meeting.now += POOL_CONNECT_S / 2
    meeting.repeat(first)
    assert isinstance(meeting.answer(first), Heard)
    meeting.go_on()
    for transfer in (first, second):
        granted = meeting.answer(transfer)
        assert isinstance(granted, Grant) and granted.link == "shm"


def test_a_pool_that_was_out_of_reach_is_tried_again(meeting: ReceiverSetup) -> None:
    meeting.stand_still()
    transfer = meeting.announce()
    assert isinstance(meeting.answer(transfer), Heard)
    meeting.now += POOL_CONNECT_S + 0.1
    assert out_of_reach(meeting, meeting.answer(transfer))
    if meeting.transport == "shm":
        assert [end.transfer for end in meeting.ended if isinstance(end, TransferFailed)] == [transfer]
    meeting.open_endpoint()
    meeting.now += PAUSE_S / 2
    assert out_of_reach(meeting, meeting.answer(meeting.announce())), "not at once"
    meeting.now += PAUSE_S
    answers = [meeting.answer(transfer := meeting.announce())]
    if isinstance(answers[0], Heard):  # the endpoint's thread may not have run yet
        answers.append(meeting.answer(transfer))
    assert isinstance(answers[-1], Grant) and answers[-1].link == "shm"


def test_pauses_grow_and_end(meeting: ReceiverSetup) -> None:
    """There is no endpoint at all, so every try fails at once."""
    tries: list[float] = []
    source = meeting.receiver._sources
    attempt = source._try

    def counted(key: Any, entry: Any, now: float) -> None:
        tries.append(now)
        attempt(key, entry, now)

    source._try = counted  # type: ignore[method-assign]
    for _ in range(250):
        assert out_of_reach(meeting, meeting.answer(meeting.announce()))
        meeting.now += 0.5
    pauses = [after - before for before, after in itertools.pairwise(tries)]
    assert pauses[:6] == [1, 2, 4, 8, 16, 30] and set(pauses[6:]) == {LONGEST_PAUSE_S}


def mapped_pools() -> int:
    """Return how many mappings of KV pools this process holds."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:tandem-kv" in line for line in maps)


def granted(meeting: ReceiverSetup) -> TransferId:
    """Open a new hand-off that reads the sender's pool."""
    answer = meeting.answer(transfer := meeting.announce())
    while isinstance(answer, Heard):  # the endpoint's thread may not have run yet
        answer = meeting.answer(transfer)
    assert isinstance(answer, Grant) and answer.link == "shm"
    return transfer


def test_a_pool_whose_owner_has_died_is_held_no_longer_than_its_hand_offs_may_be_silent(meeting: ReceiverSetup) -> None:
    lease_s = TransferLimits().lease_s
    before = mapped_pools()
    meeting.open_endpoint()
    transfer = granted(meeting)
    assert mapped_pools() == before + 1
    meeting.now += lease_s - 0.5
    meeting.repeat(transfer)
    assert isinstance(meeting.answer(transfer), Grant)
    meeting.close_endpoint()
    meeting.now += lease_s - 0.5
    meeting.receiver.pump(meeting._clock, 1.0)
    assert mapped_pools() == before + 1, "it may still send"
    meeting.now += 1.0
    assert isinstance(meeting.answer(transfer), Cancel)
    assert mapped_pools() == before, "less than 10 s after its last sign of life"


def test_a_pool_is_kept_between_two_hand_offs_and_mapped_again_after_a_long_rest(meeting: ReceiverSetup) -> None:
    before = mapped_pools()
    meeting.open_endpoint()
    meeting.receiver.cancel(granted(meeting), "no longer wanted")
    meeting.now += TransferLimits().lease_s / 2
    meeting.receiver.pump(meeting._clock, 1.0)
    assert mapped_pools() == before + 1
    for _ in range(2):
        meeting.receiver.cancel(granted(meeting), "no longer wanted")
        meeting.now += TransferLimits().lease_s + 0.1
        meeting.receiver.pump(meeting._clock, 1.0)
        assert mapped_pools() == before


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_pool_endpoint_of_other_user_is_refused() -> None:
    """Once a pool's owner has died, another user can take its address while the owner's frames are still in flight."""
    address = f"tandem-kv-{new_incarnation()}"
    program = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "pool = socket.socket(socket.AF_UNIX); pool.bind('\\0' + sys.argv[1]); pool.listen(); print(flush=True)\n"
        "while True: socket.send_fds(pool.accept()[0], [b'pool'], [os.memfd_create('pool')])\n"
    )
    with subprocess.Popen([sys.executable, "-S", "-c", program, address], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            with pytest.raises(PermissionError, match="another user"):
                shm.PoolConnection(address)
        finally:
            other.kill()
