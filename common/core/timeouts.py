"""Failure detection times, all derived from ``--failure-timeout``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FailureTimes:
    """All times in seconds. After ``timeout_s`` without a sign of life, or without progress where progress is due, a
    party is given up: a silent worker, a hung turn of its loop, a stalled stream, the other end of a hand-off.

    Only the coordinator has the option; workers get the derived times in Welcome.
    """

    timeout_s: float = 2.0

    @property
    def heartbeat_s(self) -> float:
        """Interval between heartbeats of a worker, and between the Lease messages to it. At most 0.5 s, since routing
        uses the figures in heartbeats."""
        return min(0.5, self.timeout_s / 4)

    @property
    def sweep_s(self) -> float:
        """Interval of the coordinator's checks for silent workers. A check that comes later shows that the coordinator
        itself lagged, which does not count as a worker's silence."""
        return self.heartbeat_s / 2

    @property
    def silence_s(self) -> float:
        """Silence after which a check declares a worker lost; with one check interval on top it is ``timeout_s``."""
        return self.timeout_s - self.sweep_s

    @property
    def lease_s(self) -> float:
        """How long anything is held for a silent party. Long enough that no party can still intend to use it."""
        return 4 * self.timeout_s
