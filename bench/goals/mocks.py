"""Mock workers around a coordinator whose own cost is measured, and a bare server to compare it with.

The workers speak the control protocol as real ones do (Hello, heartbeats, one message of spans per step) and hold
nothing. Prefill returns the first token of the prompt as the first output token as soon as it has the prompt; decode
repeats it, once per step for all streams. A request of one token goes to prefill alone. No KV is transferred.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import uvloop
from aiohttp import web

from bench.load.processes import die_with_parent
from common.checkpoint.files import open_checkpoint
from common.core.ids import SequenceId, TransferId, WorkerName, new_incarnation, unpack_tokens
from common.core.request import FinishReason, Request
from common.kv.layout import KvLayout, LayerLayout
from common.net.hosts import host_id
from common.net.messages import PROTOCOL, Abort, Generate, Hello, Lease, LeaseAck, Prefill, Reserve, Role, Timing
from common.net.sockets import Channels
from common.worker.membership import Membership, Snapshot
from common.worker.token_spans import TokenSpanEncoder

LAYOUT = KvLayout((LayerLayout(1, 16, 16),), "float32", 16)
POOL_BLOCKS, LONGEST = 1 << 13, 8192
SEQUENCES, BUDGET = 64, 8192
IDLE_S = 0.25


def hello_of(model: str, role: Role) -> Hello:
    """Return the Hello of a worker that can hold every request of this measurement."""
    checkpoint = open_checkpoint(model)
    return Hello(
        PROTOCOL, WorkerName(role), new_incarnation(), role, model, checkpoint.fingerprint, LAYOUT.fingerprint,
        os.getpid(), "localhost", host_id(), "tcp://127.0.0.1:1" if role == "decode" else "", ("zmq",), POOL_BLOCKS,
        LAYOUT.block_size, LONGEST, checkpoint.vocab_size, SEQUENCES, BUDGET, "none", LAYOUT.dtype,
    )  # fmt: skip


@dataclass(slots=True)
class _Stream:
    """One request on the decode worker, with its output so far."""

    request: Request
    attempt: int
    token: int
    output: list[int] = field(default_factory=list)

    def step(self, writer: TokenSpanEncoder) -> bool:
        """Add one token; return whether it was the last. The first repeats prefill's token, as decode does."""
        start = len(self.output)
        self.output += [self.token] * (1 if start else 2)
        ended = len(self.output) >= self.request.sampling.max_tokens
        finish = FinishReason.LENGTH if ended else FinishReason.RUNNING
        writer.again(SequenceId(self.request.id, 0, self.attempt), start, self.output, finish, -1, ())
        return ended


class MockWorker:
    """A prefill or decode worker of the coordinator at ``address``; a decode step takes ``step_s`` seconds."""

    def __init__(self, hello: Hello, address: str, step_s: float) -> None:
        self._role, self._step_s = hello.role, step_s
        self._channels = Channels()
        self._membership = Membership(self._channels, address, hello)
        self._streams: dict[TransferId, _Stream] = {}
        self._step_at = 0.0

    def run(self) -> None:
        """Serve until the process is killed."""
        while True:
            self._turn(time.monotonic())
            left = self._step_at - time.monotonic() if self._streams else IDLE_S
            self._channels.poll(max(0.0, left))

    def _turn(self, now: float) -> None:
        waited = bool(self._streams)
        for message in self._membership.receive():
            match message:
                case Lease():
                    self._membership.send(LeaseAck(self._membership.hello.incarnation))
                case Prefill() | Generate():
                    self._prefill(message)
                case Reserve(request=request, attempt=attempt):
                    token = unpack_tokens(request.prompt[:4])[0]
                    self._streams[TransferId(request.id, attempt)] = _Stream(request, attempt, token)
                case Abort(request=request, attempt=attempt):
                    self._streams.pop(TransferId(request, attempt), None)
        if self._streams and not waited:
            self._step_at = now + self._step_s
        elif self._streams and now >= self._step_at:
            self._step_at += self._step_s
            self._step()
        live = b"".join(transfer.request for transfer in self._streams)
        self._membership.snapshot = Snapshot(live, self._membership.acted_on, POOL_BLOCKS, running=len(self._streams))

    def _prefill(self, message: Prefill | Generate) -> None:
        request, writer = message.request, TokenSpanEncoder()
        token = unpack_tokens(request.prompt[:4])[0]
        finish = FinishReason.LENGTH if request.sampling.max_tokens == 1 else FinishReason.RUNNING
        writer.again(SequenceId(request.id, 0, message.attempt), 0, [token], finish, -1, ())
        self._membership.send(Timing(request.id, message.attempt, {"queue_ms": 0.0, "prefill_ms": 0.0}))
        self._send(writer)

    def _step(self) -> None:
        writer = TokenSpanEncoder()
        for transfer, stream in list(self._streams.items()):
            if stream.step(writer):
                del self._streams[transfer]
        self._send(writer)

    def _send(self, writer: TokenSpanEncoder) -> None:
        for message in writer.messages():
            self._membership.send(message)


def work(model: str, role: Role, coordinator: str, step_s: float) -> None:
    """Run a mock worker as a process."""
    die_with_parent()
    MockWorker(hello_of(model, role), coordinator, step_s).run()


def replay(events: Sequence[bytes], step_s: float, pipe: Connection) -> None:
    """Run a bare server as a process, and send its URL to ``pipe``. It reads each request's body and sends ``events``,
    the first at once and the others ``step_s`` apart."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        due = time.monotonic()
        for event in events:
            await response.write(event)
            due += step_s
            await asyncio.sleep(due - time.monotonic())
        await response.write_eof()
        return response

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        pipe.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
        await asyncio.Event().wait()

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    uvloop.run(serve())
