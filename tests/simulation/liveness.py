"""What must happen, and how soon: faults with their times, attempts with their workers, and the verdict on both.

A pause of a request (between two tokens, before the first, before its end) is excused up to the end of the last fault
that touched it, and for what noticing and recovering take after that. A fault touches an attempt if it strikes one of
its workers, or a line between two of them, or between one of them and the coordinator. In a history that is about one
fault, whatever that hits has somewhere else to go: there the clock starts when the fault does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from coordinator.requests.state import MAX_CRASHES, MAX_RETRIES

COORDINATOR = "coordinator"
SHORT_S = 0.4
"""Shorter pauses are not remembered."""
CALM_S, CALM_STEPS = 0.75, 4
"""A stream that no fault touched: its batch's steps, and chunks of prompts between them."""
NOTICED_S = 3.5
"""After a fault: silence, a hang, a stall and a sender's lack of answers are noticed within 2 s, of which the heartbeat
(0.5 s) and the sweep (0.25 s) tell; a retry waits 0.1 s, and the prompt is computed again."""
LOST_S, RESENT_S = 2.75, 1.0
"""After one message was lost: three heartbeats, a retry and the prompt again; after one that is asked for again, or
repeated when nothing acknowledges it."""
LEASE_ANSWERED_S = 3.5
"""A lease (0.5 s) that should have been answered for 1.75 s, the heartbeat that tells so (0.5 s), another such time for
the answer, and the sweep (0.25 s)."""
LEASE_S = 8.0
"""A receiver hears nothing of a sender for so long before it gives up."""
NOISE_S = 8.0
"""Where lines lose up to every tenth message what says so is lost, too: about three in a row."""
LINGERS_S = 3.0
"""After its end a fault may still be what an attempt fails for."""
RECOVERED_S = 30.0
"""No fault, nor several in a row, keep a request for so long: who has more time and misses its deadline hung."""
REJOINS_S = 1.25
"""A worker whose connection broke has joined again, or its heart was heard, unless something else keeps it away."""
DIES_S = 0.5
"""A request is moved on from a worker that dies within so long."""
DYING_S = 0.4
"""So long at most the sockets of a process that was killed are still open: who has not asked takes it for alive."""


class Strike(NamedTuple):
    """A fault of one part or of the line between two, from ``began`` to ``ended``. ``deadly``: a process died."""

    ends: frozenset[str]
    began: float
    ended: float
    deadly: bool = False


@dataclass(slots=True)
class Attempt:
    """One placement of a request: on whom and when."""

    workers: frozenset[str]
    began: float
    ended: float = math.inf

    def touched_by(self, strike: Strike) -> bool:
        met = strike.began <= self.ended and self.began <= strike.ended + LINGERS_S
        return met and strike.ends <= self.workers | {COORDINATOR}

    def bereft_by(self, strike: Strike, strikes: Iterable[Strike]) -> bool:
        """A worker of it died, perhaps so shortly before it began that its sockets were still open, or the line to one
        broke while another of ``strikes`` kept it from joining again."""
        lost = strike.ends - {COORDINATOR}
        met = self.began - DYING_S <= strike.began <= self.ended + DIES_S
        if not lost or not lost <= self.workers or not met:
            return False
        return strike.deadly or any(
            each is not strike
            and lost <= each.ends
            and each.began <= strike.began + REJOINS_S
            and each.ended >= strike.began
            for each in strikes
        )


class Pause(NamedTuple):
    """Nothing came from ``began`` to ``ended``; ``started``: after a first token had come. ``crowded_out``: the times
    of steps in which its worker had no place for it or, as it was lost and waits, none had room; in order."""

    began: float
    ended: float
    started: bool
    crowded_out: tuple[tuple[float, float], ...] = ()

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def crowded_out_s(self, since: float) -> float:
        """How much of the time from ``since`` on it had no place in steps that were made."""
        seconds = 0.0
        for began, ended in self.crowded_out:
            seconds += max(0.0, min(ended, self.ended) - max(began, since))
            since = max(since, ended)
        return seconds


@dataclass
class Record:
    """What became of one request. ``timeout_s``: from its arrival to its deadline."""

    timeout_s: float = math.inf
    attempts: list[Attempt] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)


@dataclass(frozen=True)
class Patience:
    """How long a history lets its requests wait. ``noticed_s``: for recovery from a fault; ``slowest_s``: its longest
    step; ``work_s``: what a worker alone would take for all that was asked; ``noise_s``: more, because of noise."""

    slowest_s: float
    work_s: float
    noticed_s: float = NOTICED_S
    noise_s: float = 0.0

    def overdue(self, record: Record, strikes: Sequence[Strike]) -> Iterator[str]:
        """Pauses that are too long, in words. Before its first token a request may wait for what others hold, so any
        fault excuses that, and all work; a stream is excused by faults that touch it, and by each step that others took
        from it by right, as they rank higher or had blocks or promises before."""
        for pause in record.pauses:
            before = [strike for strike in strikes if strike.began <= pause.ended]
            if pause.started:
                before = _touching(record, pause, before)
            since = max([pause.began, *(strike.ended for strike in before)])
            if pause.started:
                limit = self.noticed_s if before else CALM_S
                limit += CALM_STEPS * self.slowest_s + pause.crowded_out_s(since)
            else:
                limit = self.noticed_s + self.work_s
            limit += self.noise_s
            if pause.ended - since > limit:
                what = "the next token" if pause.started else "the first token"
                yield f"waits {pause.ended - since:.2f} s for {what} (from {pause.began:.2f} s), {limit:.2f} s allowed"


def _touching(record: Record, pause: Pause, strikes: Iterable[Strike]) -> list[Strike]:
    met = [each for each in record.attempts if each.began <= pause.ended and each.ended >= pause.began]
    return [
        strike
        for strike in strikes
        if strike.ends == {COORDINATOR} or any(attempt.touched_by(strike) for attempt in met)
    ]


def unjustified(record: Record, code: str, strikes: Sequence[Strike]) -> str:
    """Why a request must not have failed with ``code``, or "": its retries are spent by faults that touched them,
    it is suspected for workers that died with it, which one that joins again did not, nor one that was dead before, but
    for those of which nobody could know: the first, and one that died while the request waited for room, after it had
    answered that it lives; and its deadline was too near for recovery. A coordinator that stalls is no reason."""
    if code == "worker_lost":
        real = [strike for strike in strikes if strike.ends != {COORDINATOR}]
        touched = sum(any(attempt.touched_by(strike) for strike in real) for attempt in record.attempts)
        return "" if touched > MAX_RETRIES else f"{touched} of its {len(record.attempts)} attempts met a fault"
    if code == "request_quarantined":
        losses, asked_at = 0, 0.0
        for attempt in record.attempts:
            later = [strike for strike in strikes if strike.began >= asked_at]
            if any(attempt.bereft_by(strike, strikes) for strike in later):
                losses, asked_at = losses + 1, attempt.ended
        return "" if losses >= MAX_CRASHES else f"workers were lost in {losses} of its {len(record.attempts)} attempts"
    if code == "request_timeout":
        return "" if record.timeout_s <= RECOVERED_S else f"there were {record.timeout_s:g} s"
    return "" if code in ("no_prefill_workers", "no_decode_workers") else "nothing may fail so"


def absent(workers: Iterable[str], at: float, strikes: Sequence[Strike]) -> bool:
    """Whether each of ``workers`` had a reason not to be there."""
    near = [each.ends - {COORDINATOR} for each in strikes if each.began <= at <= each.ended + LINGERS_S]
    return all(any(ends <= {worker} for ends in near) for worker in workers)
