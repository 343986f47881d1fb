"""Prefill and decode workers around the oracle engine, with the test as their coordinator."""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from typing import Any

import zmq

from common.core.ids import Incarnation, RequestId, WorkerName, new_incarnation, pack_tokens, unpack_tokens
from common.core.prompt_span import PromptSpan
from common.core.request import FinishReason, Request, SamplingParams
from common.net.messages import (
    PROTOCOL,
    Cached,
    FromWorker,
    Goodbye,
    Heartbeat,
    Hello,
    LeaseAck,
    Measured,
    Message,
    Moved,
    Peer,
    Prefill,
    PromptLogprobs,
    RequestFailed,
    Reserve,
    Timing,
    Tokens,
    Welcome,
)
from common.net.prompt_columns import from_message
from common.net.sockets import Channels, bind_router, send
from common.net.wire import decode
from common.worker.loop import Worker, WorkerSettings
from decode.role import DecodeWorker
from prefill.role import PrefillWorker
from tests.fakes.oracle import OracleEngine, oracle_prompt, oracle_stream
from tests.pace import scaled

DEADLINE_S = 20.0


class Bench:
    """One coordinator socket and some workers in the test's thread: nothing happens unless :meth:`turn` runs."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = bind_router(self.context, "tcp://127.0.0.1:*")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.workers: dict[str, Worker] = {}
        self.hellos: dict[str, Hello] = {}
        self.routes: dict[str, bytes] = {}
        self.streams: dict[tuple[bytes, int, int], list[int]] = defaultdict(list)
        self.begun: set[tuple[bytes, bytes, int]] = set()
        """Which worker has sent tokens of which (request, attempt)."""
        self.finished: dict[tuple[bytes, int, int], FinishReason] = {}
        self.failed: dict[tuple[bytes, int], RequestFailed] = {}
        self.prompts: dict[tuple[bytes, int], list[PromptSpan]] = defaultdict(list)
        self.timings: list[Timing] = []
        self.measured: list[Measured] = []
        self.cached: list[Cached] = []
        self.goodbyes: list[Incarnation] = []
        self.moved: set[bytes] = set()
        """The sessions over which workers have said that another coordinator has welcomed them."""
        self.lease_ms, self.failure_ms = 60_000, 60_000  # so long that load is never taken for a failure
        self.lost_welcomes = self.joins = self.renewed = 0
        self.beats = 0

    def add(
        self, role: str, engine: OracleEngine, host: str = "here", channels: Channels | None = None, **settings: Any
    ) -> Worker:
        name = WorkerName(f"{role}-{len(self.workers)}")
        chosen = {"max_num_seqs": 16, "max_num_batched_tokens": 64, **settings}
        kind = PrefillWorker if role == "prefill" else DecodeWorker
        worker = kind(
            engine,
            WorkerSettings(self.address, f"{host}", **chosen),
            _hello(name, role, engine),
            channels,
        )
        self.workers[name] = worker
        self.until(lambda: name in self.hellos)
        return worker

    def turn(self) -> None:
        for worker in self.workers.values():
            worker.turn()
        while self.socket.poll(0):
            identity, body = self.socket.recv_multipart()
            self._take(identity, decode(body, FromWorker))

    def until(self, done: Any, deadline_s: float = DEADLINE_S) -> None:
        give_up = time.monotonic() + scaled(deadline_s)
        while not done():
            assert time.monotonic() < give_up, "the system does not get there"
            self.turn()

    def _take(self, identity: bytes, message: Any) -> None:
        match message:
            case Hello():
                self.hellos[message.name], self.routes[message.name] = message, identity
                self.joins += 1
                if self.lost_welcomes:
                    self.lost_welcomes -= 1
                else:
                    send(self.socket, Welcome(Incarnation("test"), 500, self.lease_ms, self.failure_ms), identity)
            case Heartbeat():
                self.beats += 1
            case LeaseAck():
                self.renewed += 1
            case Tokens():
                self._spans(message)
                requests, attempts = message.requests, message.attempts
                self.begun |= {(identity, requests[16 * i : 16 * i + 16], at) for i, at in enumerate(attempts)}
            case PromptLogprobs():
                assert (identity, message.request, message.attempt) not in self.begun, "after the first token"
                self.prompts[message.request, message.attempt].append(from_message(message))
            case RequestFailed():
                self.failed[message.request, message.attempt] = message
            case Timing():
                self.timings.append(message)
            case Measured():
                self.measured.append(message)
            case Cached():
                self.cached.append(message)
            case Moved():
                self.moved.add(identity)
            case Goodbye():
                self.goodbyes.append(message.incarnation)

    def _spans(self, message: Tokens) -> None:
        ids, at = unpack_tokens(message.ids), 0
        for index, count in enumerate(message.counts):
            key = (message.requests[16 * index : 16 * index + 16], message.attempts[index], message.choices[index])
            span, start = ids[at : at + count], message.starts[index]
            at += count
            stream = self.streams[key]
            assert start <= len(stream), "a gap"
            assert stream[start : start + count] == span[: len(stream) - start], "a repeated token differs"
            stream.extend(span[len(stream) - start :])
            if message.finish[index]:
                self.finished[key] = FinishReason(message.finish[index])

    def send(self, worker: str, message: Message) -> None:
        assert send(self.socket, message, self.routes[worker])

    def deliver(self, worker: str, message: Message) -> None:
        """Send ``message`` and return when the worker has read it. No worker computes while it is on its way."""
        membership = self.workers[worker].membership
        self.until(lambda: membership.joined)  # so no Welcome is on its way
        read = membership.acted_on
        self.send(worker, message)
        while membership.acted_on == read:
            assert membership._socket.poll(int(1000 * scaled(DEADLINE_S))), "the message does not arrive"
            self.turn()

    def check_prompt(self, request: Request, attempt: int = 1) -> None:
        """Check that the log-probabilities of the prompt came once each, in order, and equal the oracle's."""
        tops, at = request.sampling.prompt_logprobs or 0, request.scored + 1
        for span in self.prompts[request.id, attempt]:
            assert span.start == at, "a gap, or a position twice"
            assert span == oracle_prompt(request.prompt_tokens(), at, span.end, tops)
            at = span.end
        assert at == request.prompt_length

    def peer(self, worker: str) -> Peer:
        hello = self.hellos[worker]
        return Peer(hello.name, hello.incarnation, hello.data_address, hello.host_id, hello.dtype)

    def place(self, request: Request, prefill: str, decode: str, attempt: int = 1) -> None:
        self.send(decode, Reserve(request, attempt, self.peer(prefill)))
        self.send(prefill, Prefill(request, attempt, self.peer(decode)))

    def check(self, request: Request, attempt: int = 1) -> None:
        """Check that every choice has ended and equals the oracle's."""
        for choice in range(request.n):
            key = (request.id, attempt, choice)
            length = len(self.streams[key])
            emitted = request.emitted_tokens(choice)
            stream = oracle_stream(request.prompt_tokens(), request.sampling.seed, choice, request.sampling.max_tokens)
            assert emitted + self.streams[key][len(emitted) :] == stream[:length]
            assert length == request.sampling.max_tokens
            assert self.finished[key] is FinishReason.LENGTH

    def shipped(self, request: Request) -> list[Timing]:
        """Wait for prefill's timings of the request's hand-offs, and return them. Prefill sends them when decode has
        accepted, so tokens may arrive before."""

        def reported() -> list[Timing]:
            return [each for each in self.timings if each.request == request.id and "kv_bytes" in each.values]

        self.until(reported)
        return reported()

    def done(self, *requests: Request) -> bool:
        return all((r.id, 1, choice) in self.finished for r in requests for choice in range(r.n))

    def quiet(self) -> bool:
        return not any(worker.holdings() for worker in self.workers.values())

    def close(self) -> None:
        self.until(self.quiet)
        while self.workers:
            _, worker = self.workers.popitem()
            assert worker.cache.leaks() == {} and worker.cache.pool.counts.held == 0
            worker.close()
            # A view would keep the pool's memory, and the worker is in cycles: only a garbage collection would free it.
            worker.cache.pool.generations = worker.cache.pool.generations.copy()
            worker.engine.close()  # type: ignore[attr-defined]
        self.socket.close()
        self.context.term()


def _hello(name: WorkerName, role: str, engine: OracleEngine) -> Hello:
    return Hello(
        PROTOCOL,
        name,
        new_incarnation(),
        role,  # type: ignore[arg-type]
        "oracle",
        engine.fingerprint,
        engine.layout.fingerprint,
        1,
        "localhost",
        "host",
        "",
        ("shm", "zmq"),
        engine.memory.blocks,
        engine.layout.block_size,
        engine.max_model_len,
        engine.vocab_size,
        16,
        64,
        "cpu",
        engine.layout.dtype,
    )


_numbers = itertools.count(1)


def make_request(prompt: int, output: int, seed: int = 0, **fields: Any) -> Request:
    number = next(_numbers)
    tokens = random.Random(seed or number).choices(range(1000), k=prompt)
    reported = {name: fields.pop(name, None) for name in ("logprobs", "prompt_logprobs")}
    sampling = SamplingParams(max_tokens=output, seed=seed or number, **reported)
    return Request(RequestId(number.to_bytes(16, "big")), pack_tokens(tokens), sampling, **fields)
