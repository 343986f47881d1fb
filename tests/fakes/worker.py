"""A worker without an engine: it sends the real messages over a real socket and computes tokens by a formula.

It runs in a thread, so that the coordinator can run in the test's event loop. Prefill, decode and colocated workers
compute the same tokens from (prompt, choice, position), so a hand-off, retry or migration must not change the output.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from common.core.ids import TransferId, WorkerName, new_incarnation
from common.core.request import FinishReason, Request
from common.core.sequence import Sequence, TokenLogprobs
from common.net.messages import (
    PROTOCOL,
    Abort,
    Drain,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    LeaseAck,
    Measure,
    Measured,
    Message,
    NameTaken,
    Prefill,
    Rejected,
    Rejoin,
    RequestFailed,
    Resend,
    ResendPrompt,
    Reserve,
    Role,
    Timing,
    ToHeartbeatThread,
    ToWorker,
    Welcome,
)
from common.net.prompt_columns import to_messages
from common.net.sockets import connect_dealer, identity, receive, send
from common.worker.token_spans import TokenSpanEncoder
from tests.fakes.oracle import oracle_prompt

Script = Callable[[Request, int, int], int]
FIRST_TEXT_TOKEN, TEXT_TOKENS = 40, 200


def formula(request: Request, choice: int, position: int) -> int:
    """Return the output token at ``position``: printable, never a special token, dependent on the prompt."""
    return FIRST_TEXT_TOKEN + (sum(request.prompt) + 7 * choice + 13 * position) % TEXT_TOKENS


@dataclass
class Job:
    """One (request, attempt) on the fake: its sequences. ``start`` is the output position at which the attempt begins,
    ``due`` the time of the next token; with ``only_first`` the job ends after the first one, as in prefill. With
    ``reserved`` it waits for the hand-off."""

    transfer: TransferId
    sequences: list[Sequence]
    start: int
    due: float
    only_first: bool
    reserved: bool = False
    spoken: bool = False


@dataclass
class FakeWorker:
    """A scripted worker. Tokens are ``step_s`` apart, the first comes after ``delay_s``, and ``script`` chooses them.

    Outgoing messages of the types in ``drop`` are lost. With ``deaf``, all incoming messages on the control connection
    are lost. With ``refuse``, every request is answered with that failure.

    ``handed_off`` holds the attempts whose first token prefill has sent, and is shared by the workers of a cluster: as
    with real KV, no reserved attempt goes on before. Without it, none waits."""

    role: Role
    address: str
    fingerprint: str
    name: str = ""
    script: Script = formula
    delay_s: float = 0.0
    step_s: float = 0.002
    beat_s: float = 0.1
    answers: bool = True
    """Whether it answers a Ping with a heartbeat; otherwise Pings are lost."""
    rejoins: bool = True
    """Whether it answers Rejoin with Hello; otherwise it ignores Rejoin, as a hung worker does."""
    turn_ms: int = -1
    drop: set[type[Message]] = field(default_factory=set)
    deaf: bool = False
    refuse: RequestFailed | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    dropped: int = 0
    handed_off: set[TransferId] | None = None
    received: list[Any] = field(default_factory=list)
    turned: str = ""
    joined: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        hello = Hello(
            protocol=PROTOCOL,
            name=WorkerName(self.name or f"{self.role}-fake"),
            incarnation=new_incarnation(),
            role=self.role,
            model="fake",
            fingerprint=self.fingerprint,
            layout="layout",
            pid=1,
            host="here",
            host_id="here",
            data_address="tcp://127.0.0.1:1" if self.role == "decode" else "",
            links=("shm", "zmq"),
            kv_blocks=256,
            block_size=16,
            max_model_len=2048,
            vocab_size=512,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            device="cpu",
            dtype="float32",
        )
        self.hello = msgspec.structs.replace(hello, **self.changes)
        self._jobs: dict[TransferId, Job] = {}
        self._done: deque[Job] = deque(maxlen=64)
        self._stop, self._silent = threading.Event(), threading.Event()
        self._outbox: deque[Message] = deque()
        self._acted_on = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    # -- for tests ----------------------------------------------------------------------------------------------------

    def start(self) -> FakeWorker:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Close the connections without a Goodbye, as when the process dies."""
        self._stop.set()
        self._thread.join()

    def fall_silent(self) -> None:
        """Stop sending and receiving but stay connected, as a hung process does."""
        self._silent.set()

    def say(self, message: Message) -> None:
        self._outbox.append(message)

    def got(self, kind: type[Message]) -> list[Any]:
        return [message for message in list(self.received) if isinstance(message, kind)]

    @property
    def alive(self) -> bool:
        return not (self._stop.is_set() or self._silent.is_set())

    @property
    def busy(self) -> int:
        """Number of requests on this worker."""
        return len(self._jobs)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with zmq.Context() as context:
            control = connect_dealer(context, self.address, identity(self.hello.name, self.hello.incarnation))
            beats = connect_dealer(context, self.address, identity(self.hello.name, self.hello.incarnation, beats=True))
            with control, beats:
                self._serve(control, beats)

    def _serve(self, control: zmq.Socket[Any], beats: zmq.Socket[Any]) -> None:
        send(control, self.hello)
        beat_at = 0.0
        while not self._stop.is_set():
            if self._silent.is_set():
                self._stop.wait(0.05)
                continue
            if control.poll(1):
                while (message := receive(control, ToWorker)) is not None:
                    if not self.deaf:
                        self._take(control, message)
            while (ping := receive(beats, ToHeartbeatThread)) is not None:
                if self.answers:
                    send(beats, self.beat(ping.number))
            now = time.monotonic()
            while self._outbox:
                send(control, self._outbox.popleft())
            self._step(control, now)
            if self.joined.is_set() and now >= beat_at:
                send(beats, self.beat())
                beat_at = now + self.beat_s

    def _say(self, control: zmq.Socket[Any], message: Message) -> None:
        if type(message) not in self.drop:
            send(control, message)
        else:
            self.dropped += 1

    def _take(self, control: zmq.Socket[Any], message: Any) -> None:
        self.received.append(message)
        self._acted_on += 1
        match message:
            case Welcome():
                self.joined.set()
            case Rejected(reason=reason) | NameTaken(reason=reason):
                self.turned = reason
                self.joined.set()
            case Rejoin() if self.rejoins:
                self._acted_on = 0
                self._jobs.clear()
                send(control, self.hello)
            case Prefill(request=request, attempt=attempt):
                self._begin(control, request, attempt, only_first=True)
            case Reserve(request=request, attempt=attempt):
                self._begin(control, request, attempt, only_first=False, computes=False)
            case Generate(request=request, attempt=attempt):
                self._begin(control, request, attempt, only_first=False)
            case Abort(request=request, attempt=attempt):
                self._jobs.pop(TransferId(request, attempt), None)
            case Resend(request=request, attempt=attempt, choice=choice, start=start):
                self._resend(control, TransferId(request, attempt), choice, start)
            case ResendPrompt(request=request, attempt=attempt, start=start):
                self._resend_prompt(control, TransferId(request, attempt), start)
            case Measure(peer=peer, tokens=tokens) if self.role == "prefill":
                self._say(control, Measured(peer.incarnation, "shm", tokens * 1000, 0.001))
            case Lease():
                self._say(control, LeaseAck(self.hello.incarnation))
            case Drain():
                send(control, Goodbye(self.hello.incarnation, "drained"))

    def _begin(
        self, control: zmq.Socket[Any], request: Request, attempt: int, *, only_first: bool, computes: bool = True
    ) -> None:
        if self.refuse is not None:
            send(control, msgspec.structs.replace(self.refuse, request=request.id, attempt=attempt))
            return
        transfer = TransferId(request.id, attempt)
        sequences = [Sequence(request, attempt, choice) for choice in range(request.n)]
        start = max(sequence.output_length for sequence in sequences)
        self._jobs[transfer] = Job(
            transfer, sequences, start, time.monotonic() + self.delay_s, only_first, reserved=not computes
        )
        if computes:
            self._say_prompt(control, self._jobs[transfer], request.scored + 1)

    def _say_prompt(self, control: zmq.Socket[Any], job: Job, start: int) -> None:
        """Send the log-probabilities of the prompt from position ``start`` on, if they are requested."""
        request = job.sequences[0].request
        if request.to_score >= start:
            tops = request.sampling.prompt_logprobs or 0
            span = oracle_prompt(request.prompt_tokens(), start, request.prompt_length, tops)
            for message in to_messages(job.transfer, span):
                self._say(control, message)

    def _step(self, control: zmq.Socket[Any], now: float) -> None:
        """Send one token for every choice of every job that is due, in one message."""
        due = [job for job in self._jobs.values() if job.due <= now and self._has_kv(job)]
        spans = TokenSpanEncoder()
        for job in due:
            if not job.spoken:
                job.spoken = True
                self._say(control, Timing(job.transfer.request, job.transfer.attempt, self._timings(), "shm"))
            self._advance(job, spans)
            job.due = now + self.step_s
        for said in spans.messages():
            self._say(control, said)
        for job in due:
            if job.only_first and self.handed_off is not None:
                self.handed_off.add(job.transfer)
            if job.only_first or all(sequence.finish for sequence in job.sequences):
                self._done.append(self._jobs.pop(job.transfer))

    def _has_kv(self, job: Job) -> bool:
        return not job.reserved or self.handed_off is None or job.transfer in self.handed_off

    def _advance(self, job: Job, spans: TokenSpanEncoder) -> None:
        for sequence in job.sequences:
            if sequence.finish:
                continue
            start = sequence.output_length
            if sequence.end_unsampled():
                spans.add(sequence, start)
                continue
            token, wanted = self.script(sequence.request, sequence.choice, start), sequence.request.sampling.logprobs
            sequence.append(token, None if wanted is None else _logprobs(token, wanted))
            spans.add(sequence, start)

    def _resend(self, control: zmq.Socket[Any], transfer: TransferId, choice: int, start: int) -> None:
        job = self._jobs.get(transfer) or next((job for job in self._done if job.transfer == transfer), None)
        if job is not None:
            spans = TokenSpanEncoder()
            spans.add(job.sequences[choice], start)
            for said in spans.messages():
                self._say(control, said)

    def _resend_prompt(self, control: zmq.Socket[Any], transfer: TransferId, start: int) -> None:
        job = self._jobs.get(transfer) or next((job for job in self._done if job.transfer == transfer), None)
        if job is not None:
            self._say_prompt(control, job, start)

    def _timings(self) -> dict[str, float]:
        if self.role == "decode":
            return {"transfer_ms": 1.0, "transfer_exposed_ms": 0.5, "kv_bytes": 4096.0, "decode_wait_ms": 0.1}
        return {"queue_ms": 0.1, "prefill_ms": 1.0, "cached_tokens": 0.0}

    def beat(self, asked: int = 0) -> Heartbeat:
        held = min(len(self._jobs), self.hello.kv_blocks)
        live = b"".join(transfer.request for transfer in self._jobs)
        free = self.hello.kv_blocks - held
        counters = {
            "prefix_cache_queries": 10.0,
            "prefix_cache_hits": 4.0,
            "num_preemptions": 1.0,
            "bad_messages": 2,
            "cut_off_peers": 1.0,
            "stale_frames": 3.0,
            "reaped_requests": 5.0,
            "borrowed_core_seconds": 1.5,
            "leaked_blocks": 1.0,
            "steps": 8.0,
            "step_seconds": 2.5,
            "step_tokens": 120.0,
            "steps_of_1": 2.0,
            "steps_of_16": 3.0,
            "steps_of_more": 3.0,
        }
        return Heartbeat(
            self.hello.incarnation, self._acted_on, live, free, 0, held, len(self._jobs), 0, 7, self.turn_ms, False,
            counters,
            asked=asked,
        )  # fmt: skip


def _logprobs(token: int, top: int) -> TokenLogprobs:
    return TokenLogprobs(-0.5, tuple(token + at for at in range(top)), tuple(-0.5 - at for at in range(top)))


__all__ = ["FakeWorker", "FinishReason", "formula"]
