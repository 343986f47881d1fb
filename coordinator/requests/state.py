"""The life of one request, as the coordinator sees it.

Pure: events in, verdicts out; no clock, no sockets. Owns the states, the accepted output tokens of each choice (the one
truth about what the client has been told) and the budget of retries. Does not know text, HTTP, or how to pick workers.

    QUEUED ──► PLACED ──► PREFILLING ──► SHIPPING ──► DECODING ──► DONE
      ▲           │            │             │            │    └──► ABORTED, FAILED (from every state)
      └───────────┴────────────┴─────────────┴────────────┘  a retry: attempt + 1

Tokens come as spans ``(attempt, start, ids)``. Only those of the current attempt count, only the part not seen yet is
taken, and a gap is answered by asking for the missing part: retries can neither lose nor repeat a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from common.core.errors import InvariantBroken
from common.core.ids import Incarnation, pack_tokens
from common.core.request import FinishReason
from coordinator.routing.paths import Path

MAX_RETRIES = 2
"""New attempts before the first token has been accepted."""
MAX_MIGRATIONS = 3
"""New attempts after it."""
MAX_CRASHES = 2
"""A request that computed on this many workers when they crashed is suspected to be the reason."""
MAX_BREAKS = 8
"""So many broken connections to workers that live on cost a request nothing. One that breaks more may be the reason
itself, if something between here and there does not like its message."""
CLEARED_TOKENS = 16
"""Output that a request gets from workers that live on clears it."""

RetryVerdict = Literal["retry", "spent"]


class State(Enum):
    QUEUED = "queued"
    PLACED = "placed"
    PREFILLING = "prefilling"
    SHIPPING = "shipping"
    DECODING = "decoding"
    DONE = "done"
    ABORTED = "aborted"
    FAILED = "failed"


TERMINAL = frozenset({State.DONE, State.ABORTED, State.FAILED})
_ENDS = frozenset({State.ABORTED, State.FAILED})
MOVES: dict[State, frozenset[State]] = {
    State.QUEUED: _ENDS | {State.PLACED},
    State.PLACED: _ENDS | {State.PREFILLING, State.QUEUED},
    State.PREFILLING: _ENDS | {State.SHIPPING, State.DECODING, State.DONE, State.QUEUED},
    State.SHIPPING: _ENDS | {State.DECODING, State.DONE, State.QUEUED},
    State.DECODING: _ENDS | {State.DONE, State.QUEUED},
    State.DONE: frozenset(),
    State.ABORTED: frozenset(),
    State.FAILED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Accepted:
    """What is new in a span: ``ids`` are its tokens from index ``skip`` on; ``finish`` if the choice ends with them."""

    skip: int
    ids: list[int]
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class Gap:
    """The span starts too late: output tokens from position ``start`` on are missing."""

    start: int


class Contradiction:
    """The span repeats tokens otherwise than they were told before: who says so has gone astray."""


class RequestState:
    """State, workers, accepted tokens and setbacks of one request with ``choices`` choices.

    ``prefill`` and ``decode`` are the incarnations that work on the current attempt; on the paths ``local`` and
    ``colocated`` there is only ``decode``.
    """

    __slots__ = (
        "attempt",
        "breaks",
        "crashes",
        "decode",
        "finish",
        "migrations",
        "output",
        "path",
        "prefill",
        "retries",
        "state",
        "survived",
        "uncharged",
    )

    def __init__(self, choices: int) -> None:
        self.state = State.QUEUED
        self.attempt = 0
        self.path: Path = "disagg"
        self.prefill: Incarnation | None = None
        self.decode: Incarnation | None = None
        self.output: list[list[int]] = [[] for _ in range(choices)]
        self.finish = [FinishReason.RUNNING] * choices
        self.retries = self.migrations = 0
        self.crashes: set[Incarnation] = set()
        """Workers that were lost without a word while they computed the request, and have not come back."""
        self.survived = 0
        """Tokens of this attempt; counted while there are such workers."""
        self.breaks = 0
        self.uncharged: dict[Incarnation, bool] = {}
        """Workers whose connection broke in an attempt, and whether that had any token by then: it costs the budget
        something once it is known that they died."""

    def move(self, to: State) -> None:
        """The only door between states; InvariantBroken for a move that is not in the table."""
        if to not in MOVES[self.state]:
            raise InvariantBroken(f"a request cannot go from {self.state.name} to {to.name}")
        self.state = to

    @property
    def over(self) -> bool:
        return self.state in TERMINAL

    @property
    def started(self) -> bool:
        """Whether any output token has been accepted."""
        return any(self.output)

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(self.finish)

    @property
    def workers(self) -> tuple[Incarnation, ...]:
        """Everybody who may hold something of the current attempt."""
        return tuple(worker for worker in (self.prefill, self.decode) if worker is not None)

    def place(self, path: Path, prefill: Incarnation | None, decode: Incarnation) -> None:
        """Workers have been chosen for the current attempt."""
        self.move(State.PLACED)
        self.path, self.prefill, self.decode = path, prefill, decode
        self.survived = 0

    def accept(
        self, choice: int, attempt: int, start: int, ids: list[int], finish: FinishReason
    ) -> Accepted | Gap | Contradiction | None:
        """One span of output tokens. None if it holds nothing new or is not of this attempt."""
        if attempt != self.attempt or self.state in TERMINAL or self.state is State.QUEUED:
            return None
        if not 0 <= choice < len(self.output) or self.finish[choice]:
            return None
        output = self.output[choice]
        skip = len(output) - start
        if skip < 0:
            return Gap(len(output))
        if skip and ids[:skip] != output[start : start + len(ids)]:
            return Contradiction()
        fresh = ids[skip:] if skip else ids
        if not fresh and (not finish or skip > len(ids)):
            return None
        output += fresh
        self.finish[choice] = finish
        return Accepted(skip, fresh, finish)

    @property
    def suspect(self) -> bool:
        """Whether it computed on so many workers that crashed that it is tried where no other suspect is."""
        return len(self.crashes) >= MAX_CRASHES

    def on_worker_lost(self, worker: Incarnation) -> bool:
        """``worker`` may have crashed; whether the request computed there and on others that did."""
        if not self._computed_by(worker):
            return False
        self.crashes.add(worker)
        return self.suspect

    def disconnected(self) -> bool:
        """The connection to a worker broke that lives on; whether that is free."""
        self.breaks += 1
        return self.breaks <= MAX_BREAKS

    def on_worker_unconfirmed(self, worker: Incarnation) -> bool:
        """The connection to ``worker`` broke, and whether it died will be told; whether that is free until then."""
        if self.breaks + len(self.uncharged) >= MAX_BREAKS:
            return False
        self.uncharged[worker] = self.started
        return True

    def on_worker_died(self, worker: Incarnation) -> None:
        """``worker`` does not come back: what it cost is charged. An attempt that goes on elsewhere does."""
        if (started := self.uncharged.pop(worker, None)) is not None:
            self._charge(started)

    def on_worker_reconnected(self, worker: Incarnation) -> None:
        """``worker`` had lost its connection, and nothing else."""
        self.crashes.discard(worker)
        if self.uncharged.pop(worker, None) is not None:
            self.breaks += 1

    def survives(self, tokens: int) -> bool:
        """So many more tokens came from workers that live; whether that clears it of the crashes that it was in."""
        self.survived += tokens
        if self.survived < CLEARED_TOKENS or not self.crashes:
            return False
        self.crashes.clear()
        return True

    def spoke(self, worker: Incarnation) -> None:
        """Tokens of the current attempt came from ``worker``: the state follows."""
        if worker == self.decode:
            self.decoding()
        elif self.state is State.PREFILLING:
            self.move(State.SHIPPING)

    def decoding(self) -> None:
        """The decoding worker has the KV."""
        if self.state in (State.PREFILLING, State.SHIPPING):
            self.move(State.DECODING)

    def end_choice(self, choice: int) -> None:
        """The coordinator itself ends a choice: a stop string is complete."""
        self.finish[choice] = FinishReason.STOP

    def needs(self, worker: Incarnation) -> bool:
        """Whether the request cannot go on without ``worker``."""
        if self.over or self.state is State.QUEUED:
            return False
        return worker == self.decode or (worker == self.prefill and self.state is not State.DECODING)

    @property
    def spent(self) -> bool:
        """Whether it has lost more attempts than it may."""
        return self.retries > MAX_RETRIES or self.migrations > MAX_MIGRATIONS

    def retry(self, *, on_trial: bool = False, free: bool = False) -> RetryVerdict:
        """The attempt is lost. ``retry``: the request is QUEUED again as the next attempt, and what its workers hold of
        the old one is void; ``spent``: it must fail. ``on_trial``: whether it is refused for the crash of a worker is
        not known yet; it waits, and whether it is spent is asked then. ``free``: it costs nothing of the budget, or not
        so far, for a reason that each worker gives once, or a bounded number of times."""
        if not free:
            self._charge(self.started)
        if self.spent and not on_trial:
            return "spent"
        self.move(State.QUEUED)
        self.attempt += 1
        self.prefill = self.decode = None
        return "retry"

    def _charge(self, started: bool) -> None:
        if started:
            self.migrations += 1
        else:
            self.retries += 1

    def _computed_by(self, worker: Incarnation) -> bool:
        """Whether ``worker`` was at work on the request, rather than holding memory or sending for it: only then may
        the request be what killed it."""
        if worker == self.prefill:
            return self.state is State.PREFILLING
        return self.prefill is None or self.state in (State.SHIPPING, State.DECODING)

    def emitted(self) -> tuple[bytes, ...]:
        """The accepted tokens as ``Request.emitted`` wants them."""
        return tuple(pack_tokens(output) for output in self.output) if self.started else ()
