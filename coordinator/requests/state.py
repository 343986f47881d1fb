"""The state machine of one request in the coordinator.

Pure: events in, verdicts out; no clock, no sockets. Owns the states, the accepted output tokens of each choice (the
authoritative record of what was sent to the client) and the retry budget of the request. Does not know text, HTTP or
how workers are chosen.

    QUEUED ──► PLACED ──► PREFILLING ──► SHIPPING ──► DECODING ──► DONE
      ▲           │            │             │            │    └──► ABORTED, FAILED (from every state)
      └───────────┴────────────┴─────────────┴────────────┘  a retry: attempt + 1

Tokens arrive as spans ``(attempt, start, ids)``. Only spans of the current attempt count, only their new part is
accepted, and a gap is filled by a Resend of the missing part. So retries can neither lose nor repeat a token.
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
"""Maximum number of new attempts before the first token has been accepted."""
MAX_MIGRATIONS = 3
"""Maximum number of new attempts after the first token has been accepted."""
MAX_CRASHES = 2
"""A request that was being computed on this many workers when they crashed is suspected to be the cause."""
MAX_BREAKS = 8
"""Number of broken connections to workers that stay alive which a request survives without using its retry budget. With
more, the request itself may be the cause: something on the network path may reject its message."""
CLEARED_TOKENS = 16
"""A suspected request is cleared after this many output tokens from workers that stay alive."""

RetryVerdict = Literal["retry", "spent"]


class State(Enum):
    """The states of a request; MOVES lists the transitions."""

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
    """The new part of a span: ``ids`` are its tokens from index ``skip`` on; ``finish`` is not RUNNING if the choice
    ends with them."""

    skip: int
    ids: list[int]
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class Gap:
    """The verdict on a span that starts too late: output tokens from position ``start`` on are missing."""

    start: int


class Unscored:
    """The verdict on output that arrives before all log-probabilities of the prompt: these are missing. A message was
    lost, or decode's output, on another connection, has overtaken those of prefill."""


class Contradiction:
    """The verdict on a span that differs from tokens accepted before at the same positions: its worker is faulty."""


class RequestState:
    """State, workers, accepted tokens and retry counts of one request with ``choices`` choices, for which the
    log-probabilities of ``to_score`` prompt tokens are requested.

    ``prefill`` and ``decode`` are the incarnations that serve the current attempt; on the paths ``local`` and
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
        "scored",
        "state",
        "survived",
        "to_score",
        "uncharged",
    )

    def __init__(self, choices: int, to_score: int = 0) -> None:
        self.state = State.QUEUED
        self.to_score = to_score
        """Prompt tokens whose log-probabilities are requested. Output is accepted only after all of them."""
        self.scored = 0
        """How many of these are accepted: those of positions up to this one."""
        self.attempt = 0
        self.path: Path = "disagg"
        self.prefill: Incarnation | None = None
        self.decode: Incarnation | None = None
        self.output: list[list[int]] = [[] for _ in range(choices)]
        self.finish = [FinishReason.RUNNING] * choices
        self.retries = self.migrations = 0
        self.crashes: set[Incarnation] = set()
        """Workers that may have crashed while they computed the request: their connection broke and they have not
        reconnected."""
        self.survived = 0
        """Tokens accepted in this attempt, compared with CLEARED_TOKENS; counted only while ``crashes`` is not
        empty."""
        self.breaks = 0
        self.uncharged: dict[Incarnation, bool] = {}
        """Workers whose connection broke during an attempt, and whether any output had been accepted by then. The lost
        attempt is charged to the retry budget once the worker's death is confirmed."""

    def move(self, to: State) -> None:
        """Change the state; raises InvariantBroken for a transition that MOVES does not list."""
        if to not in MOVES[self.state]:
            raise InvariantBroken(f"a request cannot go from {self.state.name} to {to.name}")
        self.state = to

    @property
    def over(self) -> bool:
        """Whether the state is terminal."""
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
        """The workers that may hold blocks or state of the current attempt."""
        return tuple(worker for worker in (self.prefill, self.decode) if worker is not None)

    def place(self, path: Path, prefill: Incarnation | None, decode: Incarnation) -> None:
        """Record the workers chosen for the current attempt."""
        self.move(State.PLACED)
        self.path, self.prefill, self.decode = path, prefill, decode
        self.survived = 0

    @property
    def all_scored(self) -> bool:
        """Whether no log-probabilities of the prompt are missing."""
        return self.scored >= self.to_score

    def accept_prompt(self, attempt: int, start: int, end: int) -> int | Gap | None:
        """Accept the log-probabilities of prompt positions ``[start, end)``. Return the first position that is new, or
        None if none is or they are not of the current attempt."""
        if attempt != self.attempt or self.state in TERMINAL or self.state is State.QUEUED:
            return None
        first = self.scored + 1
        if start > first:
            return Gap(first)
        if end <= first:
            return None
        self.scored = end - 1
        return first

    def accept(
        self, choice: int, attempt: int, start: int, ids: list[int], finish: FinishReason
    ) -> Accepted | Gap | Contradiction | Unscored | None:
        """Accept one span of output tokens; None if it contains nothing new or is not of the current attempt."""
        if attempt != self.attempt or self.state in TERMINAL or self.state is State.QUEUED:
            return None
        if not 0 <= choice < len(self.output) or self.finish[choice]:
            return None
        if self.scored < self.to_score:
            return Unscored()
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
        """Whether the request was being computed on MAX_CRASHES workers when they crashed. A suspect is placed only on
        workers that serve no other suspect."""
        return len(self.crashes) >= MAX_CRASHES

    def on_worker_lost(self, worker: Incarnation) -> bool:
        """Note that ``worker`` may have crashed; return whether the request was being computed there and is now a
        suspect."""
        if not self._computed_by(worker):
            return False
        self.crashes.add(worker)
        return self.suspect

    def disconnected(self) -> bool:
        """Note a broken connection to a worker that is alive; return whether the lost attempt is free of charge."""
        self.breaks += 1
        return self.breaks <= MAX_BREAKS

    def on_worker_unconfirmed(self, worker: Incarnation) -> bool:
        """Note a broken connection to ``worker``, whose death is not confirmed yet; return whether the lost attempt is
        free of charge until then. :meth:`on_worker_died` or :meth:`on_worker_reconnected` follows."""
        if self.breaks + len(self.uncharged) >= MAX_BREAKS:
            return False
        self.uncharged[worker] = self.started
        return True

    def on_worker_died(self, worker: Incarnation) -> None:
        """Charge the attempt that was lost with ``worker``, whose death is now confirmed. The current attempt, on other
        workers, goes on."""
        if (started := self.uncharged.pop(worker, None)) is not None:
            self._charge(started)

    def on_worker_reconnected(self, worker: Incarnation) -> None:
        """Note that ``worker`` is alive and only its connection had broken."""
        self.crashes.discard(worker)
        if self.uncharged.pop(worker, None) is not None:
            self.breaks += 1

    def survives(self, tokens: int) -> bool:
        """Count ``tokens`` more accepted from workers that are alive; return whether they clear the request of the
        crashes that it was suspected of."""
        self.survived += tokens
        if self.survived < CLEARED_TOKENS or not self.crashes:
            return False
        self.crashes.clear()
        return True

    def on_tokens(self, worker: Incarnation) -> None:
        """Update the state after tokens of the current attempt arrived from ``worker``."""
        if worker == self.decode:
            self.decoding()
        elif self.state is State.PREFILLING:
            self.move(State.SHIPPING)

    def decoding(self) -> None:
        """Update the state after the decode worker accepted the KV."""
        if self.state in (State.PREFILLING, State.SHIPPING):
            self.move(State.DECODING)

    def end_choice(self, choice: int) -> None:
        """End a choice from the coordinator's side, because a stop string is complete."""
        self.finish[choice] = FinishReason.STOP

    def needs(self, worker: Incarnation) -> bool:
        """Return whether the current attempt is lost without ``worker``."""
        if self.over or self.state is State.QUEUED:
            return False
        return worker == self.decode or (worker == self.prefill and self.computes_prompt)

    @property
    def computes_prompt(self) -> bool:
        """Whether something is missing that only the prefill worker of the attempt has: the KV, or log-probabilities of
        the prompt."""
        return self.state is not State.DECODING or not self.all_scored

    @property
    def spent(self) -> bool:
        """Whether the retry budget is exceeded."""
        return self.retries > MAX_RETRIES or self.migrations > MAX_MIGRATIONS

    def retry(self, *, on_trial: bool = False, free: bool = False) -> RetryVerdict:
        """Give up the current attempt.

        Returns ``retry`` if the request is QUEUED again as the next attempt, which makes everything void that its
        workers hold of the old one, or ``spent`` if it must fail. ``on_trial`` means that a worker may have crashed
        because of this request and its death is not confirmed yet: the request is queued in any case, and the caller
        checks ``spent`` after the verdict. ``free`` charges nothing to the retry budget, at least not yet; callers pass
        it only for causes that occur once, or a bounded number of times, per worker.
        """
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
        """Return whether ``worker`` was computing the request, rather than holding its memory or sending its KV. Only
        then can the request be what crashed it."""
        if worker == self.prefill:
            return self.state is State.PREFILLING
        return self.prefill is None or self.state in (State.SHIPPING, State.DECODING)

    def emitted(self) -> tuple[bytes, ...]:
        """Return the accepted tokens of each choice packed for ``Request.emitted``, () if there are none."""
        return tuple(pack_tokens(output) for output in self.output) if self.started else ()
