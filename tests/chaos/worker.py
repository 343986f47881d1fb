"""A worker process around the oracle engine: the real loop, messages and links, without torch, so that it starts fast.

    python -m tests.chaos.worker --role decode --coordinator 127.0.0.1:8001 --fingerprint F --advertise 127.0.0.1:9001

It reads commands as JSON lines from standard input ({"step_s": 0.05, "token_s": 0.001}) and writes events as JSON lines
to standard output, each with the monotonic time ``at``, which all processes of a machine share:

    {"event": "listening", "address": "tcp://..."}             before it sends Hello; the address is "" for prefill
    {"event": "step", "segments": [[request, attempt, start, end, wants_token], ...]}   before the step is computed
    {"event": "fault", "token": t, "request": r, "attempt": a} before a request fails because of a token in its prompt
    {"event": "stuck", "within": "step"}                       before it hangs in a step, or between steps ("turn")
    {"event": "unstuck"}                                       when it continues
    {"event": "taken", "request": r, "seed": s}                for each accepted attempt; the seed identifies the client
    {"event": "lie", "request": r, "position": p}              after a token was replaced by a wrong one
    {"event": "parked"}                                        after a step for which running sequences lacked blocks
    {"event": "held", "blocks": n, "requests": m, "by": [[request, attempt], ...]}      whenever one of these changes
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from common.core.ids import Holder, TransferId, WorkerName, new_incarnation
from common.core.request import Request
from common.core.sequence import Batch, Segment, Sequence, StepResult
from common.grammar.masks import Grammars
from common.kv.cache import KvCache
from common.net.hosts import host_id
from common.net.keys import load
from common.net.messages import PROTOCOL, Hello
from common.net.sockets import Channels
from common.worker.loop import Worker, WorkerSettings
from decode.role import DecodeWorker
from prefill.role import PrefillWorker
from tests.fakes.checkpoint import EOS
from tests.fakes.constrained import ConstrainedOracle
from tests.fakes.oracle import VOCABULARY

FAILS_ONCE, FAILS, OUT_OF_MEMORY, KILLS, KILLS_LATE, RAISES = 990, 991, 992, 993, 994, 995
"""Tokens in a prompt that make its request fail the first time or always, run out of memory the first time, kill the
worker, kill it when ``LATE`` output tokens are computed, or end it with an exception."""
LATE = 6
FIRST_FAULT = FAILS_ONCE
ONLY_FIRST = {FAILS_ONCE, OUT_OF_MEMORY}


def report_event(event: str, **fields: Any) -> None:
    """Write an event as one line in one system call, so that it is complete even if the process dies afterwards."""
    line = json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n"
    os.write(sys.stdout.fileno(), line.encode())


class ChaosEngine(ConstrainedOracle):
    """The oracle engine with failures: a request can fail alone or with the whole process. With ``lie_at``, the next
    token of any request at that output position is wrong, once."""

    def __init__(self, blocks: int, tokenizer: Path, **knobs: Any) -> None:
        grammars = Grammars(tokenizer, VOCABULARY, (EOS,))
        super().__init__(blocks, grammars=grammars, vocab_size=VOCABULARY, **knobs)
        self.watched = False
        self.keeps = False
        """Whether the worker ignores aborts (a planted bug)."""
        self.lie_at: int | None = None
        self.slows_at: int | None = None
        self.slow_s = 0.0
        """Once ``slows_at`` blocks are held, a step takes ``slow_s`` seconds."""
        self.stuck_s = self.jammed_s = 0.0
        """How much longer, in seconds, the next step takes, or the next turn of the worker loop before its step."""

    def step(self, batch: Batch) -> StepResult:
        if self.stuck_s:
            self.stuck_s = _stuck("step", self.stuck_s)
        if self.watched:
            report_event("step", segments=[
                [segment.sequence.request.id.hex(), segment.sequence.attempt, segment.start, segment.end,
                 segment.wants_token]
                for segment in batch.segments
            ])  # fmt: skip
        errors = {index: why for index, segment in enumerate(batch.segments) if (why := self._fault(segment))}
        good = [index for index in range(len(batch.segments)) if index not in errors]
        part = Batch(tuple(batch.segments[index] for index in good), tuple(batch.tables[index] for index in good))
        done = super().step(part)
        tokens: list[list[int]] = [[] for _ in batch.segments]
        logprobs: list[list[Any]] = [[] for _ in batch.segments]
        for index, ids, entries in zip(good, done.tokens, done.logprobs, strict=True):
            tokens[index], logprobs[index] = self._reported(batch.segments[index].sequence, ids), entries
        refusals = {good[index]: why for index, why in done.refusals.items()}
        late = {good[index] for index in done.late}
        prompts = {good[index]: span for index, span in done.prompts.items()}
        return StepResult(tokens, logprobs, done.seconds, errors, refusals, late, prompts)

    def _reported(self, sequence: Sequence, ids: list[int]) -> list[int]:
        if not ids or sequence.output_length != self.lie_at:
            return ids
        report_event("lie", request=sequence.request.id.hex(), position=self.lie_at)
        self.lie_at = None
        return [(ids[0] + 1) % self.vocab_size, *ids[1:]]

    @staticmethod
    def _fault(segment: Segment) -> str:
        sequence = segment.sequence
        prompt = sequence.tokens[: sequence.request.prompt_length]
        token = next((token for token in prompt if token >= FIRST_FAULT), None)
        if token is None or (token in ONLY_FIRST and sequence.attempt):
            return ""
        if token == KILLS_LATE and segment.start < len(prompt) + LATE:
            return ""
        report_event("fault", token=token, request=sequence.request.id.hex(), attempt=sequence.attempt)
        if token in (KILLS, KILLS_LATE):
            os.kill(os.getpid(), signal.SIGKILL)
        if token == RAISES:
            raise ArithmeticError("an invariant is broken")  # not the failure of one request: the worker ends
        return "MemoryError" if token == OUT_OF_MEMORY else "RuntimeError: impossible numbers"


def _stuck(within: str, seconds: float) -> float:
    """Report, sleep for ``seconds``, and return 0, the new value of the command."""
    report_event("stuck", within=within)
    time.sleep(seconds)
    report_event("unstuck")
    return 0.0


class _Told:
    """A mixin for both roles that reports its address before Hello, accepted requests, and changes of what it holds."""

    advertised = ""
    _last: tuple[int, int, list[tuple[str, int]]] = (0, 0, [])
    _parked = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        worker: Worker = self  # type: ignore[assignment]
        self._accept, self._publish = worker.requests.accept, worker.report.publish
        worker.requests.accept = self._accept_and_report  # type: ignore[method-assign]
        worker.report.publish = self._publish_and_report  # type: ignore[method-assign]

    def introduce(self, hello: Hello) -> Hello:
        hello = super().introduce(hello)  # type: ignore[misc]
        report_event("listening", address=hello.data_address, incarnation=hello.incarnation)
        if not hello.data_address or not self.advertised:
            return hello
        return msgspec.structs.replace(hello, data_address=self.advertised)

    def _accept_and_report(self, request: Request, attempt: int, now: float, tokens: int) -> bool:
        if accepted := self._accept(request, attempt, now, tokens):
            report_event("taken", request=request.id.hex(), seed=request.sampling.seed)
        return accepted

    def abort(self, transfer: TransferId) -> None:
        if not self.engine.keeps:  # type: ignore[attr-defined]
            super().abort(transfer)  # type: ignore[misc]

    def move_kv(self, now: float) -> None:
        engine: ChaosEngine = self.engine  # type: ignore[attr-defined]
        if engine.jammed_s:
            engine.jammed_s = _stuck("turn", engine.jammed_s)
        super().move_kv(now)  # type: ignore[misc]

    def _publish_and_report(self) -> None:
        self._publish()
        parked: int = self.planner.preemptions  # type: ignore[attr-defined]
        if parked > self._parked:
            report_event("parked")
        self._parked = parked
        cache: KvCache = self.cache  # type: ignore[attr-defined]
        listed: set[TransferId] = self.holdings()  # type: ignore[attr-defined]
        by = {(transfer.request.hex(), transfer.attempt) for transfer in listed}
        by |= {_transfer_of(holder) for holder in cache.tables}  # also holders that the worker no longer knows
        now = (cache.pool.counts.held, len(listed), sorted(by))
        if now != self._last:
            self._last = now
            engine: ChaosEngine = self.engine  # type: ignore[attr-defined]
            if engine.slows_at is not None and now[0] >= engine.slows_at:
                engine.slows_at, engine.step_s = None, engine.slow_s
            report_event("held", blocks=now[0], requests=now[1], by=now[2])


def _transfer_of(holder: Holder) -> tuple[str, int]:
    """Return the request in hex and the attempt from the name of a block's holder."""
    request, *_, attempt = holder.partition(":")[2].split("/")
    return request, int(attempt)


class ChaosPrefill(_Told, PrefillWorker):
    pass


class ChaosDecode(_Told, DecodeWorker):
    pass


def _obey(engine: ChaosEngine) -> None:
    """Apply commands until the harness closes the pipe or dies; then kill this process."""
    for line in sys.stdin:
        for name, value in json.loads(line).items():
            setattr(engine, name, value)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=("prefill", "decode", "colocated"), required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--fingerprint", required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path(), help="tokenizer.json, for grammars")
    parser.add_argument("--advertise", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--cluster-key-file", type=Path)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=64)
    parser.add_argument("--kv-transport", default="auto")
    parser.add_argument("--drain-timeout", type=float, default=30.0)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--watched", action="store_true")
    options = parser.parse_args()
    engine = ChaosEngine(options.blocks, options.tokenizer, max_model_len=options.max_model_len, step_s=options.step_s)
    engine.fingerprint, engine.watched = options.fingerprint, options.watched
    settings = WorkerSettings(
        coordinator=f"tcp://{options.coordinator}",
        host_id=host_id(),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        kv_transport=options.kv_transport,
        data_address=f"tcp://{options.host}:*",
        drain_timeout_s=options.drain_timeout,
    )
    hello = Hello(
        PROTOCOL, WorkerName(options.name), new_incarnation(), options.role, "oracle", engine.fingerprint,
        engine.layout.fingerprint, os.getpid(), platform.node(), settings.host_id, "", ("shm", "zmq"), options.blocks,
        engine.layout.block_size, engine.max_model_len, engine.vocab_size, options.max_num_seqs,
        options.max_num_batched_tokens, "cpu", engine.layout.dtype,
        kv_encryption="curve" if options.cluster_key_file else "none",
    )  # fmt: skip
    role: type[Worker] = ChaosPrefill if options.role == "prefill" else ChaosDecode
    role.advertised = options.advertise and f"tcp://{options.advertise}"  # type: ignore[attr-defined]
    keys = load(options.cluster_key_file, options.role) if options.cluster_key_file else None
    worker = role(engine, settings, hello, Channels(keys))
    threading.Thread(target=_obey, args=(engine,), name="commands", daemon=True).start()
    worker.run()


if __name__ == "__main__":
    main()
