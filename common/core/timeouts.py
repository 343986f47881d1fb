"""How soon the parts of a system give each other up: all of it follows from one time, ``--failure-timeout``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FailureTimes:
    """In seconds. ``timeout_s``: who shows no life, or no progress where some is due, for so long is given up (a silent
    worker, a turn of its loop or a stream that goes on for ever, the other end of a hand-off).

    Only the coordinator is told it; workers learn what follows from it in Welcome.
    """

    timeout_s: float = 2.0

    @property
    def heartbeat_s(self) -> float:
        """Between two heartbeats of a worker, and two leases for it. Routing lives on what heartbeats tell, so more
        patience makes them no rarer."""
        return min(0.5, self.timeout_s / 4)

    @property
    def sweep_s(self) -> float:
        """Between two looks at who was silent; what is later than that is the coordinator's own lag, not silence."""
        return self.heartbeat_s / 2

    @property
    def silence_s(self) -> float:
        """A worker not heard of for so long is gone; with the time between two looks that makes the timeout."""
        return self.timeout_s - self.sweep_s

    @property
    def lease_s(self) -> float:
        """How long anything is held for who is not heard of: by then nobody can still mean to use it."""
        return 4 * self.timeout_s
