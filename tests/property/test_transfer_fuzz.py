"""A real sender and a real receiver, with an attacker that repeats, mutates, truncates, delays and forges their
messages.

Whatever arrives from any peer: nothing is raised, no block is written that its transfer does not hold, accepted data is
right, and no hand-off, credit or hold is left in the end.
"""

from __future__ import annotations

import os
import select
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.core.ids import BlockId, Incarnation, RequestId, TransferId, WorkerName
from common.kv.layout import KvLayout, LayerLayout
from common.kv.storage.host import KvMemory
from common.net.messages import Peer
from common.net.peer_ban_list import PeerBanList
from common.net.wire import DIGEST_BYTES, seal
from kvtransfer.flow_control import CreditBook
from kvtransfer.frames import HEADER_BYTES
from kvtransfer.links.faulty import FaultRates, FaultyLink
from kvtransfer.receiver import Landed, Receiver
from kvtransfer.sender import FirstTokens, Sender, SendFailed
from kvtransfer.session import TransferLimits
from tests.simulation.clock import SimulatedProcess, VirtualClock
from tests.simulation.network import Rates, SimulatedChannels, SimulatedNetwork

LAYERS = (LayerLayout(2, 4, 4), LayerLayout(1, 8, 2))
FRAME_BYTES, TOKENS, SLOTS = 2048, 90, 4
LEASE_S = 0.5
LIMITS = TransferLimits(frame_bytes=FRAME_BYTES)
HELD_S = 10.0
"""The longest time for which anything is held for a peer that is dead or has given up."""
TURN_S = 0.1
FIRST = FirstTokens(b"\1\0\0\0", (0,), (-1,), (None,))


class Recorded(SimulatedChannels):
    """Records every message that arrived at its sockets, for replay."""

    def __init__(self, network: SimulatedNetwork, process: SimulatedProcess) -> None:
        super().__init__(network, process)
        self.heard: list[tuple[Any, list[bytes]]] = []

    def register(self, what: Any) -> None:
        # a pool connection: the thread at its other end runs in real time, not on the virtual clock
        if isinstance(what, int):
            select.select([what], [], [], 10)
            return
        super().register(what)
        deliver = what.deliver

        def recorded(connection: Any, parts: list[bytes]) -> None:
            deliver(connection, parts)
            self.heard.append((what, what.inbox[-1]))

        what.deliver = recorded

    def unregister(self, what: Any) -> None:
        if not isinstance(what, int):
            super().unregister(what)


class TransferPair:
    """One sender and one receiver, with a block table per transfer. Blocks that no transfer holds are checked for
    writes."""

    def __init__(self, transport: str, seed: int) -> None:
        self.rng, self.clock = Random(seed), VirtualClock()
        self.network = SimulatedNetwork(self.clock, self.rng)
        self.there, self.here = (
            Recorded(self.network, SimulatedProcess(self.clock, name)) for name in ("prefill", "decode")
        )
        self.source = KvMemory(KvLayout(LAYERS, "float32", 16), SLOTS * 6)
        self.target = KvMemory(KvLayout(LAYERS, "float32", 32), SLOTS * 3)
        self.source.raw[:] = np.random.default_rng(seed).integers(0, 256, self.source.raw.shape, np.uint8)
        self.credit = CreditBook(6 * FRAME_BYTES, 4 * FRAME_BYTES, 2 * FRAME_BYTES)
        self.receiver = Receiver(
            self.here, self.target, "host", "tcp://d:*", transport=transport, limits=LIMITS, credit=self.credit
        )
        # tests running beside this one may use this seed, and the name of a pool's endpoint contains the incarnation
        incarnation = Incarnation(f"{self.rng.randbytes(8).hex()}-{os.getpid()}")
        self.sender = Sender(
            self.there,
            self.source,
            incarnation,
            "host",
            transport=transport,
            limits=LIMITS,
            queue_bytes=8 * FRAME_BYTES,
        )
        self.peer = Peer(WorkerName("decode"), Incarnation("decode"), self.receiver.address, "host", "float32")
        self.held: dict[TransferId, int] = {}
        self.attempts = [0] * SLOTS
        self.landed = self.lost = 0
        self.before = self.target.raw.copy()

    def table(self, slot: int, blocks: int) -> list[BlockId]:
        return [BlockId(slot * blocks + index) for index in range(blocks)]

    def begin(self, slot: int) -> None:
        """Begin a hand-off in a slot that is free on both sides; announcement and reservation come in either order."""
        if slot in self.held.values() or self.sender.ban_list.out(self.peer.incarnation):
            return
        self.attempts[slot] += 1
        transfer = TransferId(RequestId(bytes([slot]) * 16), self.attempts[slot])
        if transfer in self.sender:
            return
        have = self.rng.choice((0, 0, 32))
        if have:
            self.target.write(
                self.table(slot, 3), range(have), range(2), self.source.read(self.table(slot, 6), range(have), range(2))
            )
        self.held[transfer] = slot
        now = self.clock.now
        reserve = lambda: self.receiver.expect(transfer, TOKENS, have, self.table(slot, 3), self.peer, now)  # noqa: E731
        announce = lambda: self.sender.open(transfer, self.peer, TOKENS, self.table(slot, 6), now)  # noqa: E731
        for each in self.rng.sample((reserve, announce), 2):
            each()
        self.sender.computed(transfer, self.table(slot, 6), TOKENS, 2, now)
        self.sender.finish(transfer, FIRST, now)

    def cancel(self, slot: int) -> None:
        for transfer, used in list(self.held.items()):
            if used == slot:
                self.receiver.cancel(transfer, "no longer wanted")
                self.give_up(transfer)

    def give_up(self, transfer: TransferId) -> None:
        """Give up a hand-off as the coordinator does: the receiver's blocks are free at once, and the sender cancels
        ``LEASE_S`` later, when it receives the list of live hand-offs."""
        self.free(transfer)
        self.clock.after(LEASE_S, self.sender.cancel, transfer, "not in the list")

    def free(self, transfer: TransferId) -> None:
        slot = self.held.pop(transfer)
        rows = slice(3 * slot, 3 * slot + 3)
        self.before[rows] = self.target.raw[rows]

    def travel(self, seconds: float) -> None:
        """Deliver messages in flight for ``seconds``, without reading them."""
        until = self.clock.now + seconds
        self.clock.at(until, lambda: None)
        while self.clock.now < until and self.clock.step():
            pass

    def turn(self, seconds: float = 0.02) -> None:
        self.travel(seconds)
        self.sender.pump(self.clock.now)
        self.receive()
        self.check()

    def receive(self) -> None:
        """Pump the receiver, and check each hand-off that landed."""
        times = iter(range(1000))
        for ended in self.receiver.pump(lambda: self.clock.now + 1e-6 * next(times), 5e-4):
            if isinstance(ended, Landed):
                slot = self.held[ended.transfer]
                wanted = self.source.read(self.table(slot, 6), range(TOKENS), range(2))
                assert (self.target.read(self.table(slot, 3), range(TOKENS), range(2)) == wanted).all()
                self.landed += 1
                self.free(ended.transfer)
            else:
                self.lost += 1
                self.give_up(ended.transfer)

    def settle(self) -> None:
        """Take turns until every hand-off is over. A hand-off may go on as long as one frame after the other lands,
        each within the sender's patience. Once the sender has given up, the blocks must be freed within ``HELD_S``."""
        began, sending = self.clock.now, [each.session for each in self.sender._outgoing.values()]
        given_up: dict[TransferId, float] = {}
        while self.held:
            self.turn(TURN_S)
            now = self.clock.now
            for session in sending:
                waits = 2 + session.frames  # the grant, each frame, and the answer to the commit
                assert session.over or now - began <= waits * (LIMITS.no_progress_s + LIMITS.lag_s), session.transfer
            for transfer in self.held:
                if transfer not in self.sender:
                    assert now - given_up.setdefault(transfer, now) < HELD_S, transfer

    def check(self) -> None:
        busy = {3 * slot + index for slot in self.held.values() for index in range(3)}
        for block in set(range(self.target.blocks)) - busy:
            assert (self.target.raw[block] == self.before[block]).all(), (
                f"block {block} was written by no known transfer"
            )
        assert self.credit.held() <= self.credit.total_bytes

    def meddle(self, side: str, what: str) -> None:
        """Change a message that one side has not read yet, or replay one that it has."""
        self.travel(0.002)
        heard = (self.here if side == "decode" else self.there).heard
        if not heard:
            return
        socket, parts = self.rng.choice(heard[-40:])
        if socket.closed:
            return
        unread = bool(socket.inbox) and self.rng.random() < 0.7
        at = self.rng.randrange(len(socket.inbox)) if unread else 0
        parts = list(socket.inbox[at] if unread else parts)
        first = 1 if side == "decode" else 0  # a router socket puts the peer's identity first
        if len(parts) == first:
            return
        chosen = self.rng.randrange(first, len(parts))
        match what:
            case "mutate":
                changed = bytearray(parts[chosen])
                for _ in range(self.rng.randint(1, 3) if changed else 0):
                    changed[self.rng.randrange(len(changed))] = self.rng.randrange(256)
                parts[chosen] = bytes(changed)
                # a malicious peer seals its change; a damaged line does not
                if len(parts) == first + 1 and self.rng.random() < 0.7:
                    parts[chosen] = seal(parts[chosen][DIGEST_BYTES:])
            case "truncate":
                parts[chosen] = parts[chosen][: self.rng.randrange(len(parts[chosen]) + 1)]
            case "forge" if first:
                parts[0] = b"somebody else"
            case "lose":
                if socket.inbox:
                    del socket.inbox[self.rng.randrange(len(socket.inbox))]
                return
            case "shuffle":
                self.rng.shuffle(socket.inbox)
                return
            case "parts":
                parts = parts[:first] + [self.rng.randbytes(self.rng.choice((0, 5, HEADER_BYTES)))] * self.rng.randint(
                    0, 4
                )
        if unread:
            socket.inbox[at] = parts
        else:
            socket.inbox.append(parts)

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()
        self.source.close()
        self.target.close()


actions = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, SLOTS - 1), st.just("")),
    st.tuples(st.just("cancel"), st.integers(0, SLOTS - 1), st.just("")),
    st.tuples(st.just("turn"), st.integers(1, 3), st.just("")),
    st.tuples(
        st.sampled_from(["decode", "prefill"]),
        st.integers(1, 4),
        st.sampled_from(["repeat", "mutate", "truncate", "forge", "lose", "shuffle", "parts"]),
    ),
)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["zmq", "shm"]), st.integers(0, 2**32), st.lists(actions, max_size=60))
def test_whatever_arrives_nothing_breaks_and_nothing_is_left(
    transport: str, seed: int, story: list[tuple[str, int, str]]
) -> None:
    pair = TransferPair(transport, seed)
    try:
        for what, number, how in story:
            match what:
                case "begin":
                    pair.begin(number)
                case "cancel":
                    pair.cancel(number)
                case "turn":
                    for _ in range(number):
                        pair.turn()
                case side:
                    for _ in range(number):
                        pair.meddle(side, how)
        for _ in range(200):  # long enough for the no-progress limit and the leases to expire
            pair.turn(0.1)
        assert not pair.held and len(pair.sender) == 0 and len(pair.receiver) == 0
        assert len(pair.credit) == 0 and pair.credit.held() == 0
        pair.sender.ban_list, pair.receiver.ban_list = (
            PeerBanList(),
            PeerBanList(),
        )  # a new incarnation has no strikes
        pair.begin(0)  # a new hand-off still works
        landed = pair.landed
        for _ in range(30):
            pair.turn(0.1)
        assert pair.landed == landed + 1
    finally:
        pair.close()


def test_frames_that_were_lost_while_the_peers_share_was_full_are_repeated() -> None:
    pair = TransferPair("zmq", 0)
    rates = pair.network.line(pair.there.process, pair.here.process).rates
    try:
        for slot in range(SLOTS):
            pair.begin(slot)
        pair.turn()
        pair.travel(0.002)
        rates.drop = 1.0  # the grants have arrived; the frames that they allow are lost
        pair.turn()
        pair.turn()
        rates.drop = 0.0
        assert sum(each.session.unacked_bytes for each in pair.sender._outgoing.values()) >= 4 * FRAME_BYTES
        for _ in range(100):
            pair.turn()
        assert pair.landed == SLOTS
    finally:
        pair.close()


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(["zmq", "shm"]), st.integers(0, 2**32), st.sampled_from([0.02, 0.1]))
@example("zmq", 115, 0.02)
@example("zmq", 95001, 0.1)
@example("zmq", 8633, 0.1)  # all answers to one frame are lost, and then the Cancel
@example("shm", 567, 0.02)
def test_damaged_frames_delay_transfers_without_ban(transport: str, seed: int, rate: float) -> None:
    """At a total damage rate of 0.3, all repeats of one frame may be damaged until the sender's patience ends. Its
    hand-off is then given up, as on a dead line. If the Cancel is damaged too, the receiver's lease ends the
    hand-off."""
    pair = TransferPair(transport, seed)
    try:
        pair.network.line(pair.there.process, pair.here.process).rates = Rates(corrupt=rate, truncate=rate)
        swaps = FaultyLink(pair.sender._links[transport], FaultRates(swap=rate), Random(seed))
        pair.sender._links[transport] = swaps
        rounds = 4
        for over in range(SLOTS, (rounds + 1) * SLOTS, SLOTS):
            for slot in range(SLOTS):
                pair.begin(slot)
            pair.settle()
            assert pair.landed + pair.lost == over, "every frame has come in the end, or its hand-off is over"
        assert pair.lost <= (SLOTS if rate == 0.1 else 0)
        damaged = sum(pair.network.happened.get(how, 0) for how in ("corrupted", "truncated")) + swaps.happened["swap"]
        assert pair.receiver.bad_messages <= damaged, "nothing else was bad"
        assert rate < 0.1 or pair.receiver.bad_messages
        for ban_list in (pair.receiver.ban_list, pair.sender.ban_list):
            assert not ban_list._counts
    finally:
        pair.close()


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["zmq", "shm"]),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.1]),
    st.integers(0, 20),
    st.sampled_from(["prefill", "decode"]),
    st.booleans(),
)
def test_nothing_is_held_longer_than_promised_for_a_peer_that_is_dead(
    transport: str, seed: int, rate: float, turns: int, dead: str, cut: bool
) -> None:
    """A peer may die in any phase of the hand-offs; its last messages still arrive, or are lost (``cut``)."""
    pair = TransferPair(transport, seed)
    try:
        line = pair.network.line(pair.there.process, pair.here.process)
        line.rates = Rates(corrupt=rate, truncate=rate)
        for slot in range(SLOTS):
            pair.begin(slot)
        for _ in range(turns):
            pair.turn(pair.rng.choice((0.001, 0.02, TURN_S)))
        line.cut = cut
        died_at = pair.clock.now
        while len(pair.receiver if dead == "prefill" else pair.sender):
            pair.travel(TURN_S)
            if dead == "prefill":
                pair.receive()
            else:
                pair.sender.pump(pair.clock.now)
            pair.check()
            assert pair.clock.now - died_at < HELD_S
        if dead == "prefill":
            assert not pair.held and len(pair.credit) == 0 and pair.credit.held() == 0
    finally:
        pair.close()


@pytest.mark.parametrize("seed", range(5))
def test_receiver_rereads_reassigned_blocks_without_ban(seed: int) -> None:
    pair, rng = TransferPair("shm", seed), Random(seed)
    try:
        for landed in range(SLOTS, 5 * SLOTS, SLOTS):
            for slot in range(SLOTS):
                pair.begin(slot)
            for _ in range(100):
                if pair.landed == landed:
                    break
                pair.source.generations[rng.randrange(pair.source.blocks)] += 1
                pair.turn(0.1)
            assert pair.landed == landed
        assert pair.receiver.bad_messages, "some were"
        assert not pair.receiver.ban_list._counts and not pair.sender.ban_list._counts
    finally:
        pair.close()


@pytest.mark.parametrize(("step_s", "waits_s"), [(0.1, 2.0), (3.0, 12.0)])
def test_sender_waits_through_announced_long_step(step_s: float, waits_s: float) -> None:
    pair = TransferPair("zmq", 1)
    pair.begin(0)
    pair.turn()
    assert len(pair.sender) == 1
    pair.receiver.away(step_s)
    began, ended = pair.clock.now, []
    while not ended:
        pair.travel(0.05)
        ended = pair.sender.pump(pair.clock.now)
    assert isinstance(ended[0], SendFailed) and waits_s <= pair.clock.now - began < waits_s + 0.5
    pair.close()


@pytest.mark.parametrize("granted", [True, False])
def test_receiver_announces_longer_step_to_every_sender(granted: bool) -> None:
    """The receiver has just had an unannounced step of 3 s, so its ``step_s`` is already 3 s. Senders that it answered
    before know a shorter one, and must still be sent the long one."""
    pair = TransferPair("zmq", 1)
    transfer, now = TransferId(RequestId(bytes(16)), 1), pair.clock.now
    pair.sender.open(transfer, pair.peer, TOKENS, pair.table(0, 6), now)
    if granted:
        pair.held[transfer] = 0
        pair.receiver.expect(transfer, TOKENS, 0, pair.table(0, 3), pair.peer, now)
        pair.sender.computed(transfer, pair.table(0, 6), TOKENS // 2, 2, now)
    for _ in range(5):
        pair.turn()
    assert pair.sender.granted(transfer) is granted
    pair.receiver.step_s = 3.0
    if granted:
        pair.sender.computed(transfer, pair.table(0, 6), TOKENS, 2, pair.clock.now)
    pair.receiver.away(3.0)
    began, ended = pair.clock.now, []
    while not ended:
        pair.travel(0.05)
        ended = pair.sender.pump(pair.clock.now)
    assert isinstance(ended[0], SendFailed) and 12.0 <= pair.clock.now - began < 12.5
    pair.close()
