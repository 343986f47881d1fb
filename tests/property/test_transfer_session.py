"""Both state machines of a hand-off over a link that loses, repeats and reorders messages."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from common.core.ids import RequestId, TransferId
from common.kv.layout import KvLayout, LayerLayout
from common.net.messages import Accept, Ack, Commit
from kvtransfer.frames import UNSAID, FrameHeader, Rectangle
from kvtransfer.plan import SendPlan
from kvtransfer.session import FrameVerdict, ReceiverSession, SenderSession, TransferLimits, TransferState

TRANSFER = TransferId(RequestId(b"r" * 16), 1)
LIMITS = TransferLimits(no_progress_s=5.0, frame_bytes=1000)


def make_layout(layers: int, block_size: int = 16) -> KvLayout:
    return KvLayout(tuple(LayerLayout(1 + i % 2, 2, 1 + i % 3) for i in range(layers)), "float32", block_size)


@st.composite
def progress(draw: st.DrawFn) -> tuple[int, int, int, list[int], int]:
    """Generate layers, have, total, the ends of the chunks that prefill computes, and how many chunks end before the
    grant."""
    layers = draw(st.integers(1, 5))
    total = draw(st.integers(1, 200))
    have = draw(st.integers(0, total - 1))
    ends = sorted({*draw(st.lists(st.integers(1, total), max_size=5)), total})
    return layers, have, total, ends, draw(st.integers(0, len(ends)))


@given(progress(), st.integers(1, 4000))
def test_the_outbox_hands_out_every_cell_once_and_in_order(
    case: tuple[int, int, int, list[int], int], target: int
) -> None:
    layers, have, total, ends, _ = case
    layout = make_layout(layers)
    most = max(layout.range_bytes(layer, layer + 1, 1) for layer in range(layers))
    plan = SendPlan(layout, have, total, target)
    upto = [have] * layers
    for end in ends:
        for layer in range(1, layers + 1):
            plan.computed(end, layer)
            while (cells := plan.next()) is not None:
                assert cells.last_layer <= layer or cells.last_token < end, "a cell leaves before it is computed"
                assert all(upto[each] == cells.first_token for each in cells.layers)
                size = layout.range_bytes(cells.first_layer, cells.last_layer, len(cells.tokens))
                assert size < 2 * max(target, most), "a frame larger than a socket may take"
                for each in cells.layers:
                    upto[each] = cells.last_token
    assert upto == [total] * layers and plan.complete


class LossyChannel:
    """Messages in flight in one direction, some of them lost, repeated or reordered at random."""

    def __init__(self, dice: random.Random, trouble: float) -> None:
        self.dice, self.trouble, self.flying = dice, trouble, []

    def send(self, message: object) -> None:
        fate = self.dice.random() if self.dice.random() < self.trouble else 1.0
        copies = 0 if fate < 0.5 else 2 if fate < 0.8 else 1
        for _ in range(copies):
            self.flying.append(message)
        if fate < 0.9 and self.flying:
            self.dice.shuffle(self.flying)

    def arrive(self) -> list[object]:
        arrived, self.flying = self.flying, []
        return arrived


@settings(deadline=None)
@given(progress(), st.integers(0, 2**32), st.floats(0, 0.6), st.integers(0, 5000))
def test_a_lossy_link_delays_but_never_corrupts(
    case: tuple[int, int, int, list[int], int], seed: int, trouble: float, credit: int
) -> None:
    layers, have, total, ends, early = case
    layout = make_layout(layers)
    dice = random.Random(seed)
    forth, back = LossyChannel(dice, trouble), LossyChannel(dice, trouble)
    sender = SenderSession(TRANSFER, layout, total, 0.0, LIMITS)
    receiver = ReceiverSession(TRANSFER, layout, total, have, 0.0, LIMITS)
    received: dict[tuple[int, int], int] = {}
    now, done = 0.0, 0
    for end in ends[:early]:
        sender.computed(end, layers)
    sender.granted(have, "zmq", credit, now)
    for _ in range(4000):
        now += 0.05
        if early + done < len(ends):
            sender.computed(ends[early + done], layers)
            done += 1
        commit_again = sender.tick(now)
        if sender.state is TransferState.EXPIRED:
            break
        push(sender, layout, forth)
        if sender.may_commit() and early + done >= len(ends):
            commit_of(sender, layout)  # completes the checksum
            sender.committed(now)
            commit_again = True
        if commit_again:
            forth.send(commit_of(sender, layout))
        for message in forth.arrive():
            deliver(message, receiver, back, received, now, credit)
        for answer in back.arrive():
            match answer:
                case Ack():
                    sender.acked(answer.frame, answer.bytes + answer.credit_bytes, now)
                case Accept(bytes=size):
                    sender.accepted(size, now)
        if sender.state is TransferState.ACCEPTED:
            break
    # at most three of ten messages are lost, and a sender gives up only after 25 vain repetitions
    assert sender.state is receiver.state is TransferState.ACCEPTED, sender.why_ended
    wanted = {(layer, token): 1 for layer in range(layers) for token in range(have, total)}
    assert received == wanted, "a cell is missing or was written twice"


def push(sender: SenderSession, layout: KvLayout, forth: LossyChannel) -> None:
    while (what := sender.next_cells()) is not None:
        if isinstance(what, FrameHeader):
            forth.send(what)
            continue
        size = layout.range_bytes(what.first_layer, what.last_layer, len(what.tokens))
        said = UNSAID if what.first_token % 2 else hash(what) & 0xFFFF | 1
        while sender.unsummed and said:  # checksums are added in frame order
            sender.summed(hash(sender.unsummed[0].cells) & 0xFFFF | 1)
        forth.send(sender.sent(what, size, said))


def commit_of(sender: SenderSession, layout: KvLayout) -> Commit:
    while sender.unsummed:
        sender.summed(hash(sender.unsummed[0].cells) & 0xFFFF | 1)
    counts = (sender.tokens, sender.have, sender.frames, sender.bytes, sender.checksum)
    return Commit(*TRANSFER, *counts, layout.fingerprint, b"\0\0\0\0", (0,), (-1,))


def deliver(
    message: object,
    receiver: ReceiverSession,
    back: LossyChannel,
    received: dict[tuple[int, int], int],
    now: float,
    credit: int = 0,
) -> None:
    """Do what :class:`kvtransfer.receiver.Receiver` does with a message, without sockets and bytes."""
    if isinstance(message, FrameHeader):
        verdict = receiver.judge(message, now)
        assert verdict is not FrameVerdict.STRANGE
        if verdict is FrameVerdict.TAKE:
            receiver.took(message, hash(message.cells) & 0xFFFF | 1, now)
            for layer in message.cells.layers:
                for token in message.cells.tokens:
                    received[layer, token] = received.get((layer, token), 0) + 1
        if receiver.frames:
            back.send(Ack(*TRANSFER, receiver.frames - 1, receiver.bytes, credit))
    elif isinstance(message, Commit) and not receiver.over:
        if receiver.state is not TransferState.ACCEPTED:
            if receiver.behind(message):
                return
            assert receiver.objection(message) == ""
            receiver.accept(now)
        back.send(Accept(*TRANSFER, receiver.bytes))


@given(progress(), st.sampled_from(["tokens", "have", "frames", "bytes", "checksum", "layout"]))
def test_a_commit_with_one_wrong_figure_is_refused(case: tuple[int, int, int, list[int], int], field: str) -> None:
    layers, have, total, _, _ = case
    layout = make_layout(layers)
    sender = SenderSession(TRANSFER, layout, total, 0.0, LIMITS)
    receiver = ReceiverSession(TRANSFER, layout, total, have, 0.0, LIMITS)
    sender.granted(have, "zmq", 1 << 30, 0.0)
    sender.computed(total, layers)
    network = LossyChannel(random.Random(0), 0.0)
    push(sender, layout, network)
    for header in network.arrive():
        deliver(header, receiver, network, {}, 0.0)
    right = commit_of(sender, layout)
    assert receiver.objection(right) == ""
    wrong = {name: getattr(right, name) for name in right.__struct_fields__}
    wrong[field] = "other" if field == "layout" else wrong[field] + 1
    assert field in receiver.objection(Commit(**wrong))


def test_sender_retransmits_all_frames_once_then_oldest_frame_only() -> None:
    layout = make_layout(1)
    size = layout.range_bytes(0, 1, 1)
    sender = SenderSession(TRANSFER, layout, 8, 0.0, TransferLimits(frame_bytes=size))
    sender.granted(0, "zmq", 1 << 20, 0.0)
    for token in range(8):
        sender.computed(token + 1, 1)
        while isinstance(cells := sender.next_cells(), Rectangle):
            sender.sent(cells, size, 0)

    def repeated(now: float) -> list[int]:
        sender.tick(now)
        numbers = []
        while isinstance(frame := sender.next_cells(), FrameHeader):
            numbers.append(frame.number)
        return numbers

    assert [repeated(now) for now in (0.25, 0.5, 0.75)] == [[*range(8)], [0], [0]]
    sender.acked(2, 0, 0.8)
    assert [repeated(now) for now in (0.9, 1.05, 1.3)] == [[], [3, 4, 5, 6, 7], [3]]
