"""The parts of :mod:`bench.micro.handoff_cost`: each mechanism of fault detection and verification, run alone.

A part is measured many times in its own code. Messages travel between two real sockets, so the figures include libzmq's
threads. Counts are those of one request of a given :class:`RequestShape` among others, rounded up where they vary.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from common.core.ids import (
    Incarnation,
    RequestId,
    TransferId,
    WorkerName,
    new_request_id,
    pack_transfers,
    unpack_transfers,
)
from common.core.request import FinishReason, Request, SamplingParams
from common.core.timeouts import FailureTimes
from common.engine.scheduler import Planner
from common.kv.cache import KvCache
from common.kv.layout import KvLayout
from common.net.messages import (
    PROTOCOL,
    Accept,
    Ack,
    Commit,
    FromWorker,
    Grant,
    Heard,
    Heartbeat,
    Hello,
    Lease,
    LeaseAck,
    Message,
    Open,
    Peer,
    Prefill,
    Released,
    Reserve,
    Timing,
    ToDecode,
    Tokens,
    ToPrefill,
    ToWorker,
)
from common.net.sockets import Channels, receive, send
from common.net.wire import encode, seal, unseal
from common.worker.loop import TIMER_S, Worker
from common.worker.report import HandoffCounts, WorkerReport
from common.worker.step_times import StepTimeEstimator
from coordinator.cluster.gateway import Gateway
from coordinator.cluster.registry import JoinRefused, Registry
from coordinator.metrics import Metrics
from coordinator.requests.admission import Admission
from coordinator.requests.dispatcher import Dispatcher
from coordinator.requests.record import Client, RequestRecord
from coordinator.requests.state import RequestState, State
from coordinator.routing.router import Router
from kvtransfer.flow_control import CreditBook
from kvtransfer.frames import FrameHeader, Rectangle, checksum_of, fold
from kvtransfer.peer_proof import proof, proves
from kvtransfer.plan import SendPlan
from kvtransfer.session import ReceiverSession, SenderSession, TransferLimits

BLOCK_SIZE, CHUNK = 16, 512
TIMES = FailureTimes()
COUNTERS = {f"counter_{number}": float(number) for number in range(16)}
PREFILL, DECODE = Incarnation("p" * 16), Incarnation("d" * 16)


@dataclass(frozen=True)
class RequestShape:
    """A request of ``prompt`` and ``output`` tokens whose KV has ``layout``, among ``live`` at a time."""

    prompt: int
    output: int
    live: int
    layout: KvLayout

    def frames(self) -> list[Rectangle]:
        """Return the cells of each frame of the hand-off."""
        plan = SendPlan(self.layout, 0, self.prompt)
        steps = itertools.product(range(0, self.prompt, CHUNK), range(1, len(self.layout.layers) + 1))
        found = []
        for first, layers in steps:
            plan.computed(min(first + CHUNK, self.prompt), layers)
            found += list(iter(plan.next, None))
        return found


def microseconds(action: Callable[[], object], rounds: int = 7, seconds: float = 0.05) -> float:
    """Return the CPU microseconds of one call in all threads: the median of ``rounds`` rounds of about ``seconds``."""
    action()
    count, began = 1, time.process_time()
    while time.process_time() - began < seconds / 10:
        action()
        count += 1
    count = max(1, int(count * 10))
    found = []
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(count):
            action()
        found.append((time.process_time() - began) / count * 1e6)
    return statistics.median(found)


def transfers(count: int) -> list[TransferId]:
    """Return ``count`` transfer ids: the first attempts of as many new requests."""
    return [TransferId(new_request_id(), 0) for _ in range(count)]


# -- between coordinator and workers ----------------------------------------------------------------------------------


class Wire:
    """A ROUTER and a DEALER socket that are connected over loopback."""

    def __init__(self) -> None:
        self._channels = Channels()
        self._router, address = self._channels.router("tcp://127.0.0.1:*")
        self._dealer = self._channels.dealer(address, b"dealer")
        send(self._dealer, Released(RequestId(bytes(16)), 0))
        self._router.recv_multipart()
        self._channels.register(self._dealer)

    def there(self, message: Message, kind: Any) -> Any:
        """Send ``message`` and return it as received."""
        assert send(self._router, message, b"dealer")
        while (got := receive(self._dealer, kind)) is None:
            self._channels.poll(1.0)
        return got

    def close(self) -> None:
        """Close both sockets."""
        self._channels.close()


def lease(wire: Wire, live: int) -> float:
    """Measure one lease (packed, sent, read and compared) and its answer."""
    there = transfers(live)
    held = set(there)

    def once() -> None:
        message = wire.there(Lease(pack_transfers(there), 1000), ToWorker)
        assert not held - set(unpack_transfers(message.live))
        assert wire.there(LeaseAck(DECODE), FromWorker)

    return microseconds(once)


class Watch:
    """The coordinator's side of one worker with ``live`` streams: its heartbeats and periodic checks."""

    def __init__(self, live: int) -> None:
        self._loop = asyncio.new_event_loop()
        registry = Registry(None)
        self.gateway = Gateway(registry, "127.0.0.1", 0)
        router = Router(registry)
        self.dispatcher = Dispatcher(self.gateway, router, Admission(100, 1 << 20), Metrics("", registry), self._loop)
        joined = registry.join(_hello(), self.gateway.clock())
        assert not isinstance(joined, JoinRefused)
        self.worker = joined
        registry.welcome(self.worker)
        records = {}
        for transfer in transfers(live):
            now = self.gateway.clock()
            sampling, client = SamplingParams(max_tokens=64, seed=1), cast(Client, None)
            record = RequestRecord(transfer.request, b"", sampling, 1, "", 0, {}, client, now, now, now + 600)
            record.progress.place("disagg", PREFILL, DECODE)
            record.progress.move(State.PREFILLING)
            record.progress.decoding()
            records[record.id] = record
            self.dispatcher.records[record.id] = record
        self.records = self.dispatcher._assignments._on[DECODE] = records
        self._beat = Heartbeat(DECODE, 9, b"".join(records), 9, 9, 9, 9, 9, 9, -1, False, COUNTERS, 40)

    def heartbeat(self, wire: Wire) -> float:
        """Measure one heartbeat: sent, decoded, and compared with what the worker should have."""
        registry = self.gateway.registry

        def once() -> None:
            self.gateway.times_emptied += 1  # else the check would be skipped
            registry.beat(self.worker, wire.there(self._beat, FromWorker), self.gateway.clock())
            assert not registry.hangs(self.worker)
            self.dispatcher.beat(self.worker)

        return microseconds(once)

    def look(self) -> float:
        """Measure one check for silence and stalls, and one whether a breaker's cool-down has ended."""

        def once() -> None:
            now = self.gateway.clock()
            self.worker.heard_at = now
            for record in self.records.values():
                record.heard_at = now
            self.gateway.registry.sweep(now)
            self.dispatcher.breakers.tick(now)
            self.dispatcher._silence.look_for_stalls(self.worker, now)

        return microseconds(once)

    def close(self) -> None:
        """Close the gateway and the event loop."""
        self.gateway.close()
        self._loop.close()


def _hello() -> Hello:
    return Hello(
        PROTOCOL, WorkerName("decode-0"), DECODE, "decode", "m", "f", "l", 1, "here", "here", "tcp://127.0.0.1:1",
        ("shm",), 1000, BLOCK_SIZE, 4096, 1000, 64, 512, "cpu", "float32",
    )  # fmt: skip


def snapshot(live: int) -> float:
    """Measure the status that a worker publishes for its heartbeat thread in every turn of its loop."""
    cache = KvCache(1000, BLOCK_SIZE, model_fingerprint="", kv_dtype="float32")
    there = set(transfers(live))
    worker = SimpleNamespace(
        cache=cache,
        planner=Planner(cache, max_tokens=512, max_sequences=64),
        step_times=StepTimeEstimator(),
        steps=SimpleNamespace(cores=None),
        membership=SimpleNamespace(bad_messages=0, acted_on=9, publish=lambda snapshot: None),
        handoff_counts=lambda: HandoffCounts(0, 0, 0, 0),
        holdings=lambda: there,
        draining_until=None,
    )
    report = WorkerReport(cast(Worker, worker))
    report.counters |= COUNTERS
    return microseconds(report.publish)


def digests(shape: RequestShape) -> float:
    """Measure the digest in front of each message between coordinator and workers: computed once and compared once. The
    tokens of a step travel in one message for all streams."""
    request = Request(RequestId(bytes(16)), bytes(4 * shape.prompt), SamplingParams(max_tokens=shape.output, seed=1))
    peer = Peer(WorkerName("decode-0"), DECODE, "tcp://127.0.0.1:12345", "host" * 8, "float32", bytes(16))
    ones = (1,) * shape.live
    columns = (ones, ones, ones, ones, ones, ones)
    spans = Tokens(bytes(16 * shape.live), *columns, bytes(4 * shape.live))
    timing = Timing(request.id, 0, {"queue_ms": 1.5, "prefill_ms": 1.5, "cached_tokens": 0.0}, "shm")
    messages = [(Reserve(request, 0, peer), 1.0), (Prefill(request, 0, peer), 1.0), (timing, 3.0)]
    messages.append((spans, 1 + shape.output / shape.live))  # the first token comes from prefill
    return sum(count * _digest(message) for message, count in messages)


def _digest(message: Message) -> float:
    data = encode(message)[8:]
    sealed = seal(data)
    return microseconds(lambda: seal(data)) + microseconds(lambda: unseal(sealed))


def fencing(output_tokens: int) -> float:
    """Measure the check of every span of a stream for attempts, repeats and gaps (:meth:`RequestState.accept`)."""

    def stream() -> None:
        progress = RequestState(1)
        progress.place("disagg", PREFILL, DECODE)
        progress.move(State.PREFILLING)
        for position in range(output_tokens):
            progress.accept(0, 0, position, [7], FinishReason.RUNNING)

    return microseconds(stream)


# -- between prefill and decode ---------------------------------------------------------------------------------------


def checksums(shape: RequestShape) -> float:
    """Measure the checksums: both sides hash every byte once, fold the frames' checksums, and protect and check each
    header."""
    total = 0.0
    for cells, same in itertools.groupby(shape.frames(), key=lambda cells: (len(cells.layers), len(cells.tokens))):
        frames = list(same)
        size = shape.layout.range_bytes(0, cells[0], cells[1])
        data = np.random.default_rng(3).integers(0, 256, size, np.uint8)
        header = FrameHeader(transfers(1)[0], 1, frames[0], size, 7)
        packed = header.pack()
        hashed = 2 * (microseconds(partial(checksum_of, data)) + microseconds(lambda: fold(1, 2)))
        headed = microseconds(header.pack) + microseconds(partial(FrameHeader.unpack, packed))
        total += len(frames) * (hashed + headed)
    return total


def acks(wire: Wire, shape: RequestShape) -> float:
    """Measure one acknowledgement per frame, with the credit for the next frames: sent and booked."""
    frames, there = len(shape.frames()), transfers(shape.live)
    book, received = CreditBook(), 0
    for transfer in there:
        book.open(transfer, DECODE)
    session = SenderSession(there[0], shape.layout, shape.prompt, 0.0, TransferLimits())

    def once() -> None:
        nonlocal received
        received += 1
        credit = book.landed(there[0], received)
        header = session.sent(Rectangle(0, 1, 0, 1), 1, 1)
        message = wire.there(Ack(there[0].request, 0, header.number, received, credit), ToPrefill)
        session.acked(message.frame, message.bytes + message.credit_bytes, 0.0)

    return frames * microseconds(once)


def handshake(wire: Wire, shape: RequestShape, seconds: float) -> float:
    """Measure the messages of one hand-off. Its announcement is repeated while the prompt is computed, at most for the
    ``seconds`` that the request takes."""
    id, shown = RequestId(bytes(16)), bytes(16)
    opened = Open(id, 0, PREFILL, shape.prompt, "l" * 16, "float32", "h" * 32, "p" * 32, 1000, BLOCK_SIZE, 1, shown)
    first = bytes(4), (0,), (-1,), (None,), {"queue_ms": 1.5, "prefill_ms": 150.5, "cached_tokens": 0.0}
    once: list[tuple[Message, Any]] = [
        (Grant(id, 0, 0, "shm", 1 << 24, 40, shown), ToPrefill),
        (Commit(id, 0, shape.prompt, 0, 9, 1 << 24, 1 << 60, "l" * 16, *first), ToDecode),
        (Accept(id, 0, 1 << 24), ToPrefill),
        (Released(id, 0), ToDecode),
    ]
    announced: list[tuple[Message, Any]] = [(opened, ToDecode), (Heard(id, 0, 40), ToPrefill)]

    def all_of(messages: list[tuple[Message, Any]]) -> float:
        return sum(microseconds(partial(wire.there, message, kind)) for message, kind in messages)

    return all_of(once) + (1 + seconds / TransferLimits().renew_s) * all_of(announced)


def proofs() -> float:
    """Measure the proofs of an Open and a Grant, each computed and checked."""
    token, transfer = os.urandom(16), transfers(1)[0]
    shown = proof(token, transfer, "open")
    return 2 * (
        microseconds(lambda: proof(token, transfer, "open"))
        + microseconds(lambda: proves(shown, token, transfer, "open"))
    )


def timers(shape: RequestShape, seconds: float) -> float:
    """Measure the timers of both sessions, which are checked in every turn of their workers' loops: after each step and
    message, and every TIMER_S, at most while the request lives."""
    transfer = transfers(1)[0]
    sender = SenderSession(transfer, shape.layout, shape.prompt, 0.0, TransferLimits())
    receiver = ReceiverSession(transfer, shape.layout, shape.prompt, 0, 0.0, TransferLimits())

    def once() -> None:
        sender.tick(0.0)
        sender.renewal_due(0.0)
        receiver.tick(0.0)

    turns = seconds / TIMER_S + shape.output + len(shape.frames()) + 8
    return turns * microseconds(once)


def parts(shape: RequestShape, seconds: float) -> Iterator[tuple[str, float]]:
    """Yield the CPU microseconds that each safeguard costs one request of ``shape`` that is in the system for
    ``seconds``."""
    wire, watch, share = Wire(), Watch(shape.live), 1 / shape.live
    try:
        beats, looks, steps = seconds / TIMES.heartbeat_s, seconds / TIMES.sweep_s, shape.output + shape.prompt / CHUNK
        yield f"leases ({beats:.1f} to each of two workers)", 2 * beats * lease(wire, shape.live) * share
        yield f"heartbeats ({beats:.1f} from each of two workers)", 2 * beats * watch.heartbeat(wire) * share
        yield f"status snapshots ({steps:.0f} steps)", steps * snapshot(shape.live) * share
        yield f"silence and stall checks ({looks:.1f})", 2 * looks * watch.look() * share
        yield "message digests", digests(shape)
        yield f"fencing ({shape.output} spans)", fencing(shape.output)
        size = shape.layout.range_bytes(0, len(shape.layout.layers), shape.prompt)
        yield f"checksums ({size / 2**20:.1f} MiB of {shape.layout.dtype}, both sides)", checksums(shape)
        yield f"acknowledgements ({len(shape.frames())} frames)", acks(wire, shape)
        yield "hand-off messages", handshake(wire, shape, seconds)
        yield "peer proofs (an Open and a Grant)", proofs()
        yield "hand-off timers", timers(shape, seconds)
    finally:
        watch.close()
        wire.close()
