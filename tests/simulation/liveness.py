"""Liveness rules: how long requests may wait and why they may fail, given the faults and the attempts of a history.

A pause of a request (between two tokens, before the first, before its end) is excused until the end of the last fault
that touched it, plus the time for detection and recovery. A fault touches an attempt if it strikes one of its workers,
or the line between two of them or between one of them and the coordinator. In a history about a single fault, requests
can always move to another worker, so there the time counts from the beginning of the fault.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from coordinator.requests.state import MAX_CRASHES, MAX_RETRIES

COORDINATOR = "coordinator"
SHORT_S = 0.4
"""Shorter pauses are not recorded."""
CALM_S, CALM_STEPS = 0.75, 4
"""The longest pause of a stream without a fault: ``CALM_S`` plus so many of the longest steps, which include chunks of
other prompts."""
NOTICED_S = 3.5
"""Time to recover from a fault: silence, a hang, a stall and a sender without answers are detected after 2 s, plus a
heartbeat (0.5 s) and a sweep (0.25 s); a retry waits 0.1 s, and the prompt is computed again."""
LOST_S, RESENT_S = 2.75, 1.0
"""Time to recover from a lost message: three heartbeats, a retry and the prompt again (``LOST_S``); for a message that
is requested again, or repeated until it is acknowledged (``RESENT_S``)."""
LEASE_ANSWERED_S = 3.5
"""Time to detect unanswered leases: a lease (every 0.5 s) is unanswered for 1.75 s, a heartbeat reports that (0.5 s),
another 0.5 s for its answer, and a sweep (0.25 s)."""
LEASE_S = 8.0
"""How long a receiver waits without a message from the sender before it gives up."""
NOISE_S = 8.0
"""Additional time on lines that lose up to every tenth message: messages that would reveal a loss are lost too, up to
about three in a row."""
LINGERS_S = 3.0
"""How long after its end a fault may still make an attempt fail."""
RECOVERED_S = 30.0
"""No sequence of faults delays a request for longer; one with a later deadline that still times out has hung."""
REJOINS_S = 1.25
"""Time in which a worker whose connection broke joins again or sends a heartbeat, unless another fault prevents it."""
DIES_S = 0.5
"""Time in which a request is moved away from a worker that died."""
DYING_S = 0.4
"""The longest time for which a killed process's sockets stay open, so that it seems alive."""


class Strike(NamedTuple):
    """A fault of one process, or of the line between two, from ``began`` to ``ended``. ``deadly``: a process died."""

    ends: frozenset[str]
    began: float
    ended: float
    deadly: bool = False


@dataclass(slots=True)
class Attempt:
    """One placement of a request: its workers, and its beginning and end in seconds."""

    workers: frozenset[str]
    began: float
    ended: float = math.inf

    def touched_by(self, strike: Strike) -> bool:
        met = strike.began <= self.ended and self.began <= strike.ended + LINGERS_S
        return met and strike.ends <= self.workers | {COORDINATOR}

    def bereft_by(self, strike: Strike, strikes: Iterable[Strike]) -> bool:
        """Whether the attempt lost a worker by ``strike``.

        A worker died (maybe just before the attempt began, while its sockets were still open), or its line to the
        coordinator broke while another of ``strikes`` kept it from joining again."""
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
    """A period without tokens. ``started``: whether the first token had arrived before it.

    ``crowded_out`` holds, in order, the periods of steps in which the request's worker had no room for it or, while it
    waited to be placed again, no worker had."""

    began: float
    ended: float
    started: bool
    crowded_out: tuple[tuple[float, float], ...] = ()

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def crowded_out_s(self, since: float) -> float:
        """Return how many seconds of the pause, from ``since`` on, fall into such steps."""
        seconds = 0.0
        for began, ended in self.crowded_out:
            seconds += max(0.0, min(ended, self.ended) - max(began, since))
            since = max(since, ended)
        return seconds


@dataclass
class RequestTimeline:
    """The attempts and pauses of one request. ``timeout_s``: from its arrival to its deadline."""

    timeout_s: float = math.inf
    attempts: list[Attempt] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)


@dataclass(frozen=True)
class Patience:
    """How long requests of a history may wait, from these times in seconds.

    ``slowest_s`` is its longest step, ``work_s`` what one worker alone would take for all requests, ``noticed_s`` the
    time to recover from a fault, ``noise_s`` an allowance for noisy lines."""

    slowest_s: float
    work_s: float
    noticed_s: float = NOTICED_S
    noise_s: float = 0.0

    def overdue(self, record: RequestTimeline, strikes: Sequence[Strike]) -> Iterator[str]:
        """Yield descriptions of pauses that are too long.

        Before its first token a request may wait for what other requests hold, so all work and any fault excuse it. A
        stream is excused only by faults that touch it, and by steps in which others take precedence because of their
        priority or of earlier blocks or promises."""
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


def _touching(record: RequestTimeline, pause: Pause, strikes: Iterable[Strike]) -> list[Strike]:
    met = [each for each in record.attempts if each.began <= pause.ended and each.ended >= pause.began]
    return [
        strike
        for strike in strikes
        if strike.ends == {COORDINATOR} or any(attempt.touched_by(strike) for attempt in met)
    ]


def unjustified(record: RequestTimeline, code: str, strikes: Sequence[Strike]) -> str:
    """Return why a failure with ``code`` is not justified, or "" if it is.

    ``worker_lost`` needs more attempts touched by faults than there are retries; stalls of the coordinator do not
    count. ``request_quarantined`` needs enough workers that died with the request. One that joins again did not die,
    and one that was dead already does not count, except for those that seemed alive: the first one, and one that died
    after it had answered a ping, while the request waited. ``request_timeout`` needs a deadline too near for recovery.
    """
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
    """Return whether each of ``workers`` had a reason to be absent at the time ``at``."""
    near = [each.ends - {COORDINATOR} for each in strikes if each.began <= at <= each.ended + LINGERS_S]
    return all(any(ends <= {worker} for ends in near) for worker in workers)
