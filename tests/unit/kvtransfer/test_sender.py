"""Limits on the memory that a hung peer can make a sender hold, and its release."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import msgspec
import pytest
import zmq

from common.core.ids import BlockId, TransferId, new_incarnation, new_request_id
from common.kv.layout import KvLayout, LayerLayout
from common.kv.storage.host import KvMemory
from common.net.messages import Ack, Cancel, Commit, Grant, Heard, Open, Peer, Released, ToDecode
from common.net.sockets import Channels
from common.net.wire import decode, encode
from kvtransfer import sender as sending
from kvtransfer.frames import FrameHeader, Rectangle
from kvtransfer.links import zeromq
from kvtransfer.links.base import Made, SendLink
from kvtransfer.links.faulty import FaultRates, FaultyLink
from kvtransfer.peer_proof import proof
from kvtransfer.sender import Sender, SendFailed
from kvtransfer.session import TransferLimits
from tests.pace import scaled

LAYOUT = KvLayout(tuple(LayerLayout(2, 16, 16) for _ in range(4)), "float32", 16)
TOKENS, FRAME_BYTES = 256, 16384
KV_BYTES = LAYOUT.range_bytes(0, 4, TOKENS)
QUEUE_BYTES, ASKING_BYTES = 2 * KV_BYTES, 4 * FRAME_BYTES
TOKEN = b"known to both ends"
TURN_S = 0.05


class Counting(FaultyLink):
    """A link that counts the payload bytes it hands over."""

    def __init__(self, inner: SendLink) -> None:
        super().__init__(inner, FaultRates(), Random(0))
        self.handed_bytes = 0

    def payload(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> Made | None:
        made = self.inner.payload(transfer, table, cells)
        assert made is not None
        self.handed_bytes += memoryview(made[0]).nbytes
        return made


class SenderSetup:
    """A sender on a test clock, and a decode worker that is only a socket."""

    def __init__(self) -> None:
        self.now, self.here, self.there = 100.0, Channels(), Channels()
        self.memory = KvMemory(LAYOUT, 16)
        self.sender = Sender(
            self.here,
            self.memory,
            new_incarnation(),
            "elsewhere",
            transport="zmq",
            limits=TransferLimits(frame_bytes=FRAME_BYTES),
            queue_bytes=2 * QUEUE_BYTES,  # one peer may use half
        )
        self.router, address = self.there.router("tcp://127.0.0.1:*")
        self.peer = Peer("decode", new_incarnation(), address, "here", "float32", TOKEN)  # type: ignore[arg-type]
        self.table = [BlockId(block) for block in range(16)]
        self.link = Counting(zeromq.ZmqSendLink(self.memory))
        self.sender._links[zeromq.NAME] = self.link

    def wait(self) -> TransferId:
        """Open a hand-off of a prompt that is not computed yet."""
        transfer = TransferId(new_request_id(), 1)
        self.sender.open(transfer, self.peer, TOKENS, self.table, self.now)
        return transfer

    def ship(self) -> TransferId:
        """Open a hand-off of a computed prompt."""
        transfer = self.wait()
        self.sender.computed(transfer, self.table, TOKENS, 4, self.now)
        return transfer

    def turn(self) -> list[Any]:
        self.now += TURN_S
        return self.sender.pump(self.now)

    def read(self) -> tuple[bytes, Any]:
        """Return the sender's identity and the next message or frame header that reaches the peer."""
        give_up = time.monotonic() + scaled(20.0)
        while time.monotonic() < give_up:
            self.sender.pump(self.now)
            if self.router.poll(10):
                identity, first, *rest = self.router.recv_multipart()
                return identity, FrameHeader.unpack(first) if rest else decode(first, ToDecode)
        raise AssertionError("nothing arrives")

    def hear(self, transfer: TransferId) -> bytes:
        """Read until the announcement of ``transfer``; return the identity it came from."""
        while True:
            identity, message = self.read()
            if isinstance(message, Open) and (message.request, message.attempt) == transfer:
                return identity

    def grant(self, transfer: TransferId) -> None:
        """Read until the announcement of ``transfer`` and grant it; repeat if the announcement's connection has
        ended."""
        grant = encode(Grant(*transfer, 0, "zmq", 1 << 30, 0, proof(TOKEN, transfer, "grant")))
        give_up = time.monotonic() + scaled(20.0)
        while True:
            with contextlib.suppress(zmq.ZMQError):  # the connection has been closed
                self.router.send_multipart([self.hear(transfer), grant])
            soon = time.monotonic() + 0.5
            while not self.sender.granted(transfer) and time.monotonic() < soon:
                self.sender.pump(self.now)
            if self.sender.granted(transfer):
                return
            assert time.monotonic() < give_up, "the grant does not arrive"

    def close(self) -> None:
        self.sender.close()
        self.router.close(linger=0)
        self.here.close()
        self.there.close()
        self.memory.close()


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Iterator[SenderSetup]:
    monkeypatch.setattr(sending, "ASKING_BYTES", ASKING_BYTES)
    meeting = SenderSetup()
    yield meeting
    meeting.close()


def test_a_peer_that_hangs_is_queued_no_more_than_is_said_and_nothing_is_kept(meeting: SenderSetup) -> None:
    transfers = [meeting.ship() for _ in range(4)]  # twice as much as fits into the queue
    for transfer in transfers:
        meeting.grant(transfer)
    connection = meeting.sender._connections[meeting.peer.incarnation]
    lost: list[SendFailed] = []
    while len(lost) < len(transfers):
        lost += meeting.turn()
        assert meeting.now < 110
    most = QUEUE_BYTES + ASKING_BYTES + (len(transfers) + 2) * FRAME_BYTES
    assert QUEUE_BYTES <= meeting.link.handed_bytes <= most
    assert connection.socket.closed
    assert {each.transfer for each in lost} == set(transfers) and not any(each.cancelled_by_peer for each in lost)


def test_peers_that_hang_share_one_bound_and_leave_something_for_the_next(meeting: SenderSetup) -> None:
    """Each new peer may use half of what is free: a half, a quarter, an eighth of the whole."""
    queued, homes = [], [meeting.router]
    try:
        for _ in range(3):
            meeting.router, address = meeting.there.router("tcp://127.0.0.1:*")
            homes.append(meeting.router)
            meeting.peer = msgspec.structs.replace(meeting.peer, incarnation=new_incarnation(), address=address)
            for transfer in [meeting.ship() for _ in range(6)]:  # more than the whole
                meeting.grant(transfer)
            meeting.sender.pump(meeting.now)
            queued.append(meeting.sender._connections[meeting.peer.incarnation].queued)
            meeting.now += TURN_S
    finally:
        for router in homes[:-1]:
            router.close(linger=0)
    slack = 6 * FRAME_BYTES  # a hand-off with nothing in flight may always send
    for peers, bytes_ in enumerate(queued, 1):
        share = 2 * QUEUE_BYTES >> peers
        assert share - FRAME_BYTES <= bytes_ <= share + slack, peers
    assert sum(queued) <= 2 * QUEUE_BYTES + len(queued) * slack


def test_sender_frees_queue_of_dead_peer_within_lease(meeting: SenderSetup) -> None:
    """The coordinator aborts the hand-offs before the sender notices the death."""
    transfers = [meeting.ship() for _ in range(4)]
    for transfer in transfers:
        meeting.grant(transfer)
    connection = meeting.sender._connections[meeting.peer.incarnation]
    assert connection.queued >= QUEUE_BYTES - FRAME_BYTES
    meeting.router.close(linger=0)
    for transfer in transfers:
        meeting.sender.cancel(transfer, "aborted")
    died_at = meeting.now
    while not connection.socket.closed:
        assert meeting.turn() == []
        assert meeting.now - died_at < 10.0, "the longest that anything is held for a dead peer"


def test_younger_transfer_continues_over_new_connection(meeting: SenderSetup) -> None:
    early = meeting.ship()
    meeting.grant(early)
    for _ in range(int(1.7 / TURN_S)):
        assert meeting.turn() == []
    late = meeting.ship()
    meeting.hear(late)  # the only message over the old connection
    while not (ended := meeting.turn()):
        assert meeting.now < 110
    assert [each.transfer for each in ended] == [early]
    for _ in range(int(0.6 / TURN_S)):
        assert meeting.turn() == []
    meeting.grant(late)
    frames = set()
    while len(frames) * FRAME_BYTES < KV_BYTES:
        _, message = meeting.read()
        if isinstance(message, FrameHeader) and message.transfer == late:
            frames.add(message.number)
        assert not isinstance(message, Commit | Released)


def test_a_peer_that_answers_others_keeps_its_connection(meeting: SenderSetup) -> None:
    """One hand-off gets no answers; the answers to another show that the peer lives."""
    stuck = meeting.ship()
    meeting.grant(stuck)
    busy = meeting.wait()
    connection = meeting.sender._connections[meeting.peer.incarnation]
    ended: list[Any] = []
    while not ended:
        meeting.grant(busy)  # at each announcement
        for _ in range(int(0.5 / TURN_S) + 1):
            ended += meeting.turn()
        assert meeting.now < 110
    assert [each.transfer for each in ended] == [stuck]
    assert meeting.sender._connections[meeting.peer.incarnation] is connection and not connection.socket.closed
    meeting.sender.cancel(busy, "the test is over")
    while True:
        _, message = meeting.read()
        if isinstance(message, Cancel) and message.request == busy.request:
            break


@pytest.mark.parametrize("says", ["grant", "heard"])
def test_sender_gives_up_peer_that_repeats_first_answer(meeting: SenderSetup, says: str) -> None:
    """A peer does so if every frame reaches it damaged: it knows the hand-off, but makes no progress."""
    transfer = meeting.ship()
    meeting.grant(transfer)
    began, ended = meeting.now, []
    answer: Any = Grant(*transfer, 0, "zmq", 1 << 30, 0, proof(TOKEN, transfer, "grant"))
    if says == "heard":
        answer = Heard(*transfer, 0)
    connection = meeting.sender._connections[meeting.peer.incarnation]
    while not ended:
        for _ in range(int(0.5 / TURN_S) + 1):
            ended += meeting.turn()
        assert meeting.now < began + 3
        if not ended:
            meeting.router.send_multipart([meeting.hear(transfer), encode(answer)])
            assert connection.socket.poll(20_000)
    assert [each.transfer for each in ended] == [transfer] and not ended[0].cancelled_by_peer
    assert meeting.now - began >= 2.0


def test_a_hand_off_waits_for_the_frames_before_it_on_the_line_and_no_longer(meeting: SenderSetup) -> None:
    """On a slow connection, the first hand-off's frames take 4 s to arrive, one after the other."""
    first, second = meeting.ship(), meeting.ship()
    meeting.grant(first)
    meeting.grant(second)
    frames = KV_BYTES // FRAME_BYTES
    identity, _ = meeting.read()
    connection = meeting.sender._connections[meeting.peer.incarnation]
    began, step_s = meeting.now, 4.0 / frames
    for frame in range(frames):
        meeting.router.send_multipart([identity, encode(Ack(*first, frame, (frame + 1) * FRAME_BYTES, 1 << 20))])
        assert connection.socket.poll(20_000)
        for _ in range(int(step_s / TURN_S)):
            assert meeting.turn() == []
    last_at = meeting.now
    assert last_at - began > 3
    while not (ended := meeting.turn()):
        assert meeting.now < last_at + 3
    assert [each.transfer for each in ended] == [second]


def test_idle_sender_is_not_behind(meeting: SenderSetup) -> None:
    for _ in range(20):
        meeting.wait()
    meeting.sender.pump(meeting.now, 0.0)
    assert not meeting.sender.behind
    busy = meeting.ship()
    meeting.grant(busy)
    sent = meeting.link.handed_bytes
    meeting.now += 0.25
    meeting.sender.pump(meeting.now, 0.0)
    assert meeting.sender.behind and meeting.link.handed_bytes == sent, "its repetitions are due"
    meeting.sender.pump(meeting.now)
    assert not meeting.sender.behind and meeting.link.handed_bytes == sent + KV_BYTES


def test_when_time_is_short_every_hand_off_has_its_turn(meeting: SenderSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn has time for one frame. All three transfers repeat lost frames in turn, not only the oldest one."""
    meeting.sender._queue_bytes = 32 * KV_BYTES
    transfers = [meeting.ship() for _ in range(2)]
    for _ in range(20):
        meeting.wait()
    transfers.append(meeting.ship())
    for transfer in transfers:
        meeting.grant(transfer)
    left: list[TransferId] = []
    send_cells = meeting.sender._send_cells

    def sends(outgoing: Any, what: Any) -> None:
        left.append(outgoing.session.transfer)
        send_cells(outgoing, what)

    monkeypatch.setattr(meeting.sender, "_send_cells", sends)
    frames = iter(range(1 << 20))
    monkeypatch.setattr(meeting.here, "clock", lambda: float(next(frames)))
    meeting.now += 0.25
    for _ in range(6):
        meeting.sender.pump(meeting.now, 1.5)  # the second look at the clock is in time, the third is not
        assert meeting.sender.behind
    assert left == transfers * 2


def test_frames_behind_others_on_the_line_are_not_repeated(meeting: SenderSetup) -> None:
    """A peer beside streams takes one frame per step. Frames in the queue are not lost, however long they wait."""
    meeting.sender._queue_bytes = 1 << 30
    transfers = [meeting.ship() for _ in range(6)]
    for identity, transfer in [(meeting.hear(transfer), transfer) for transfer in transfers]:
        grant = Grant(*transfer, 0, "zmq", 1 << 30, 0, proof(TOKEN, transfer, "grant"))
        meeting.router.send_multipart([identity, encode(grant)])
    connection = meeting.sender._connections[meeting.peer.incarnation]
    waiting, landed = deque[FrameHeader](), dict.fromkeys(transfers, 0)
    began = meeting.now
    while sum(landed.values()) < len(transfers) * KV_BYTES:
        assert connection.socket.poll(20_000)
        meeting.turn()
        while meeting.router.poll(0 if waiting else 20_000):
            identity, first, *rest = meeting.router.recv_multipart()
            if rest:
                waiting.append(FrameHeader.unpack(first))
        if waiting:
            header = waiting.popleft()
            landed[header.transfer] += header.size_bytes
            ack = Ack(*header.transfer, header.number, landed[header.transfer], 1 << 30)
            meeting.router.send_multipart([identity, encode(ack)])
    assert meeting.now - began > 10 * TransferLimits().resend_s
    assert meeting.link.handed_bytes == len(transfers) * KV_BYTES, "each frame left once"
