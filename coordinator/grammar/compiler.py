"""Screening of grammars from the coordinator's side: one child process, a queue, and a cache by content.

A task that several requests wait for is screened once. Verdicts are kept: grammars until the cache is full, errors for
20 s. A task that takes long gives its slot up and goes on beside the others; where too many do, the oldest is refused
with 429. So grammars that take long, however many clients send them, do not hold up ordinary ones. The child
(:mod:`coordinator.grammar.screening`) is started by the first task, and started again if it dies.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from common.core.errors import RequestError
from coordinator.grammar.child import ScreeningProcess
from coordinator.grammar.errors import CROWDED_OUT
from coordinator.grammar.task import Done, EncodedTask, Job, Setup, Verdict, frame
from coordinator.requests.errors import internal, overloaded

log = logging.getLogger("tandem.grammar")

SECONDS = 2.0
"""Processor time that one grammar may take."""
WAIT_S = 5.0
"""Time that one grammar may take on a machine on which others compute, too; then the request is refused with 429."""
MEMORY = 256 << 20
"""Bytes that one grammar may take beyond those of the screening process."""
SLOTS = 4
"""Grammars that are screened at the same time, without those that take long."""
SLOT_S = 0.2
"""Seconds after which a grammar gives its slot up."""
MAX_WAITING = 64
"""Grammars that may wait for a slot; more are refused with 429."""
GRACE_S = 8.0
"""Seconds beyond WAIT_S after which a screening process that has not answered is taken to hang."""
CACHE_BYTES, CACHE_ENTRIES = 32 << 20, 1024
ERROR_S = 20.0
"""Seconds for which an error is kept."""


def unavailable() -> RequestError:
    """Return the error for a grammar that cannot be screened because the process does not run."""
    return RequestError(
        "The process that compiles grammars could not be started. Try again later.",
        status=503,
        type="server_error",
        code="grammar_compiler_unavailable",
        retry_after_s=1.0,
    )


class ObeyedGrammar(NamedTuple):
    """The text of a grammar, "" for none. ``left_out``: paths in the request of keywords that it does not obey."""

    text: str = ""
    left_out: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class _Pending:
    """A task that is being screened or waits for it. ``tries``: processes that died with it. ``has_slot``: it is being
    screened and has not taken long yet."""

    number: int
    task: EncodedTask
    verdict: asyncio.Future[Verdict]
    waiters: int = 0
    tries: int = 0
    has_slot: bool = False
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def stop_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()


class VerdictCache:
    """Verdicts by the digest of their task, least recently used first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, tuple[Verdict, float]] = OrderedDict()
        self._bytes = 0

    def get(self, digest: bytes) -> Verdict | None:
        """Return the verdict kept for ``digest``, None if there is none or it is an error that is too old."""
        verdict, kept_at = self._kept.get(digest, (None, 0.0))
        if verdict is not None and verdict.error and time.monotonic() - kept_at > ERROR_S:
            self._drop(digest)
            return None
        if verdict is not None:
            self._kept.move_to_end(digest)
        return verdict

    def put(self, digest: bytes, verdict: Verdict) -> None:
        """Keep ``verdict`` unless it depends on other tasks, and drop others if there are too many."""
        if verdict.code == CROWDED_OUT:
            return
        self._kept[digest] = (verdict, time.monotonic())
        self._bytes += len(verdict.grammar)
        while self._bytes > CACHE_BYTES or len(self._kept) > CACHE_ENTRIES:
            self._drop(next(iter(self._kept)))

    def _drop(self, digest: bytes) -> None:
        verdict, _ = self._kept.pop(digest)
        self._bytes -= len(verdict.grammar)


class GrammarCompiler:
    """Screens tasks for one model. ``directory`` holds its tokenizer.json; ``end_ids`` are its end-of-sequence
    tokens."""

    def __init__(self, directory: Path, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        self._setup = Setup(str(directory), vocab_size, end_ids, SECONDS, WAIT_S, MEMORY)
        self._cache = VerdictCache()
        self._pending: dict[bytes, _Pending] = {}
        self._waiting: deque[_Pending] = deque()
        self._running: dict[int, _Pending] = {}
        self._child: ScreeningProcess | None = None
        self._numbers = 0
        self._closed = False
        self._impossible: Verdict | None = None
        """The error of every task, if the model's tokenizer cannot be constrained."""

    @property
    def pid(self) -> int | None:
        """Process id of the screening process, None while there is none."""
        return self._child.process.pid if self._child is not None else None

    def close(self) -> None:
        """End the screening process. Tasks that still wait fail."""
        self._closed = True
        if self._child is not None:
            self._child.end()
            self._child = None
        self._fail_all()

    async def compile(self, task: EncodedTask, params: Mapping[int | None, str]) -> ObeyedGrammar:
        """Return the grammar of ``task``. Raises RequestError 400 if it cannot be obeyed, 429 if too many wait, 503 if
        the process cannot be started. ``params``: for error messages, the fields of the request by the ``subject`` of
        :class:`~coordinator.grammar.task.Verdict`."""
        verdict = self._impossible or self._cache.get(task.digest)
        if verdict is None:
            verdict = await self._screened(task)
        if verdict.error:
            raise _refusal(verdict, params)
        return ObeyedGrammar(verdict.grammar, tuple(params.get(index, "") + path for index, path in verdict.left_out))

    async def _screened(self, task: EncodedTask) -> Verdict:
        pending = self._pending.get(task.digest)
        if pending is None:
            pending = self._queued(task)
        pending.waiters += 1
        self._pump()
        try:
            return await asyncio.shield(pending.verdict)  # a client that leaves does not cancel it for the others
        finally:
            pending.waiters -= 1
            if not pending.waiters and pending in self._waiting:
                self._waiting.remove(pending)
                self._settle(pending, None)

    def _queued(self, task: EncodedTask) -> _Pending:
        """Put a new task into the queue."""
        if self._closed:
            raise unavailable()
        if len(self._waiting) >= MAX_WAITING:
            waits = SLOT_S * len(self._waiting) / SLOTS
            raise overloaded(f"{len(self._waiting)} grammars are waiting to be compiled", waits)
        self._numbers += 1
        pending = _Pending(self._numbers, task, asyncio.get_running_loop().create_future())
        self._pending[task.digest] = pending
        self._waiting.append(pending)
        return pending

    # -- the child ------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Give waiting tasks to the child while it has free slots, and start it if it does not run."""
        if not self._waiting or self._closed:
            return
        if self._child is None:
            try:
                self._child = ScreeningProcess(self, self._setup)
            except OSError as error:
                log.error("the process that compiles grammars cannot be started: %s", error)
                self._fail_all()
                return
        loop = asyncio.get_running_loop()
        while self._child.ready and self._waiting and sum(each.has_slot for each in self._running.values()) < SLOTS:
            pending = self._waiting.popleft()
            pending.has_slot = True
            self._running[pending.number] = pending
            self._child.send(frame(Job(pending.number, msgspec.Raw(pending.task.data))))
            pending.timers = [
                loop.call_later(SLOT_S, self._free_slot, pending),
                loop.call_later(WAIT_S + GRACE_S, self._child.hang, "it does not answer"),
            ]

    def _free_slot(self, pending: _Pending) -> None:
        pending.has_slot = False
        self._pump()

    def on_ready(self, verdict: Verdict) -> None:
        """The child has loaded the tokenizer, or ``verdict`` says why it cannot."""
        if not verdict.error:
            self._pump()
            return
        self._impossible = verdict
        for pending in self._waiting:
            self._settle(pending, verdict)
        self._waiting.clear()

    def on_done(self, done: Done) -> None:
        """The child has screened a task."""
        if (pending := self._running.pop(done.number, None)) is not None:
            self._settle(pending, done.verdict)
        self._pump()

    def on_lost(self, was_ready: bool) -> None:
        """The child has died. Its tasks are tried once more with another one; if it died while it was starting, they
        fail."""
        self._child = None
        if self._closed:
            return
        if not was_ready:
            self._fail_all()
            return
        for pending in reversed(self._running.values()):
            pending.tries += 1
            pending.stop_timers()
            if pending.tries > 1:
                self._settle(pending, None)
            else:
                self._waiting.appendleft(pending)
        self._running.clear()
        self._pump()

    def _fail_all(self) -> None:
        for pending in [*self._running.values(), *self._waiting]:
            self._settle(pending, None)
        self._running.clear()
        self._waiting.clear()

    def _settle(self, pending: _Pending, verdict: Verdict | None) -> None:
        """Give ``verdict`` to the requests that wait for it; None: there is none, because there is no process."""
        pending.stop_timers()
        if self._pending.pop(pending.task.digest, None) is None:
            return  # it is settled
        if verdict is not None:
            self._cache.put(pending.task.digest, verdict)
            pending.verdict.set_result(verdict)
        elif pending.waiters:
            pending.verdict.set_exception(unavailable())
        else:
            pending.verdict.cancel()


def _refusal(verdict: Verdict, params: Mapping[int | None, str]) -> RequestError:
    """Return the error for a task that cannot be obeyed."""
    if verdict.code == "internal_error":
        return internal()
    if verdict.code == CROWDED_OUT:
        return overloaded("grammars take long to compile while others are being compiled", SECONDS)
    param = (params.get(verdict.subject) or "") + verdict.path
    param = param if len(param) <= 256 else f"{param[:253]}..."
    return RequestError(f"{param!r} {verdict.error}", param=param, code=verdict.code)
