"""A worker's real loop around an engine, turn by turn: how long each turn takes, and how much of it the model takes.

The worker joins a stand-in for the coordinator. The stand-in is a process of its own that keeps off the worker's cores,
as the coordinator of ``tandem up`` does; it requests several answers at once, renews leases and reads the worker's
messages. Turn and model are measured in one process at the same time, so the remainder is not a difference of two runs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import zmq

from bench.load.processes import die_with_parent
from common.core.ids import TransferId, WorkerName, new_incarnation, new_request_id, pack_tokens, pack_transfers
from common.core.request import Request, SamplingParams
from common.core.timeouts import FailureTimes
from common.net.hosts import host_id
from common.net.messages import PROTOCOL, FromWorker, Generate, Hello, Lease, Message, Welcome
from common.net.sockets import Channels, nearby, send
from common.net.wire import MAX_REPORT_BYTES, decode
from common.worker.loop import WorkerSettings
from decode.role import DecodeWorker

DEADLINE_MS = 600_000
TOKEN = 7


class Turn(NamedTuple):
    """A turn in which each stream got a token: seconds from its start to that of the next turn, and seconds of the
    model."""

    seconds: float
    model: float


def coordinate(answers: Sequence[tuple[int, int]], pipe: Connection, cores: set[int]) -> None:
    """Run the stand-in's process: send its address to ``pipe`` and request all ``answers`` (prompt tokens, output
    tokens) at once of the worker that says Hello. ``cores`` are the worker's."""
    die_with_parent()
    with contextlib.suppress(OSError):  # no other core is left
        os.sched_setaffinity(0, set(range(os.cpu_count() or 1)) - cores)
    channels, times = Channels(), FailureTimes()
    socket, address = channels.router("tcp://127.0.0.1:*", near=True)
    pipe.send(nearby(f"tcp://127.0.0.1:{address.rpartition(':')[2]}"))
    worker, sent, leased_at = b"", 0, 0.0
    live = b""

    def say(message: Message) -> None:
        nonlocal sent
        sent += send(socket, message, worker)

    while True:
        socket.poll(int(1000 * times.heartbeat_s))
        try:
            while True:
                _, (frame, data) = channels.take(socket)
                if isinstance(decode(data, FromWorker, MAX_REPORT_BYTES), Hello):
                    worker = frame
                    periods_ms = (int(1000 * each_s) for each_s in (times.heartbeat_s, times.lease_s, times.timeout_s))
                    say(Welcome(new_incarnation(), *periods_ms))
                    ids = [new_request_id() for _ in answers]
                    live = pack_transfers(TransferId(each, 0) for each in ids)
                    for each, (prompt, tokens) in zip(ids, answers, strict=True):
                        sampling = SamplingParams(tokens, 0, temperature=0.0, ignore_eos=True)
                        request = Request(each, pack_tokens([TOKEN] * prompt), sampling, deadline_ms=DEADLINE_MS)
                        say(Generate(request, 0))
        except zmq.Again:
            if worker and time.monotonic() - leased_at > times.heartbeat_s:
                leased_at = time.monotonic()
                say(Lease(live, sent + 1))


def hello_of(engine: Any, streams: int, budget: int) -> Hello:
    """Return the Hello of a colocated worker of ``engine`` that runs at most ``streams`` sequences and ``budget``
    tokens in one step."""
    layout = engine.layout
    return Hello(
        PROTOCOL, WorkerName("measured"), new_incarnation(), "colocated", "measured", engine.fingerprint,
        layout.fingerprint, os.getpid(), "localhost", host_id(), "", ("shm", "zmq"), engine.memory.blocks,
        layout.block_size, engine.max_model_len, engine.vocab_size, streams, budget, "cpu", layout.dtype,
    )  # fmt: skip


def measure(engine: Any, forwards: list[float], streams: int, prompt: int, tokens: int, budget: int) -> list[Turn]:
    """Measure the turns of a worker in which ``streams`` answers of ``tokens`` tokens after ``prompt`` all decode.
    ``forwards`` receives the seconds of each pass through the model."""
    with working(engine, [(prompt, tokens)] * streams, streams, budget) as worker:
        return _turns(worker, forwards, streams)


@contextmanager
def working(engine: Any, answers: Sequence[tuple[int, int]], streams: int, budget: int) -> Iterator[DecodeWorker]:
    """Yield a worker of ``engine`` that the stand-in asks for ``answers``; the caller turns its loop. It runs at most
    ``streams`` sequences and ``budget`` tokens in one step."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    given = answers, theirs, os.sched_getaffinity(0)
    other = context.Process(target=coordinate, args=given, daemon=True)
    other.start()
    try:
        settings = WorkerSettings(mine.recv(), host_id(), streams, budget, prefix_caching=False)
        worker = DecodeWorker(engine, settings, hello_of(engine, streams, budget))
        try:
            yield worker
        finally:
            worker.close()
    finally:
        other.kill()
        other.join()


def _turns(worker: DecodeWorker, forwards: list[float], streams: int) -> list[Turn]:
    found: list[Turn] = []
    began, whole, seen = 0.0, False, False
    while worker.holdings() or not seen:
        now = time.perf_counter()
        if whole:
            found.append(Turn(now - began, forwards[-1]))
        began = now
        sequences = list(worker.planner.sequences())
        whole = len(sequences) == streams and all(each.missing == 1 for each in sequences)
        forwards.clear()
        rest_s = worker.turn()
        seen = seen or bool(sequences)
        if rest_s:
            whole = False
            worker.channels.poll(rest_s)
    return found
