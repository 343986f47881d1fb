"""Rate-limited log lines about bad messages, failed handshakes and refused workers at the control socket.

Owns their counts, and logs each kind at most every COMPLAIN_EVERY_S, so that a peer cannot fill the log. Does not
decide which messages are bad, or what happens to their sender.
"""

from __future__ import annotations

import logging
from collections import Counter

log = logging.getLogger("tandem.gateway")

COMPLAIN_EVERY_S = 10.0
"""Minimum interval between two log lines of one kind."""
MOST_REASONS = 8
"""Maximum number of different refusals that are logged at a time."""


class Complaints:
    """Collects complaints and logs them when they are due. ``bad_messages`` counts since the start."""

    def __init__(self) -> None:
        self.bad_messages = 0
        self._last_bad = ""
        self._logged_of, self._bad_logged_at = 0, -COMPLAIN_EVERY_S
        self._failed_handshakes, self._handshakes_logged_at = 0, -COMPLAIN_EVERY_S
        self._refusals: Counter[str] = Counter()
        """Refusals since the last time that they were logged, by log line."""
        self._refusals_logged_at = -COMPLAIN_EVERY_S

    def bad_message(self, what: str | None = None) -> None:
        """Count a message that is dropped; ``what`` names its sender and the reason, for the log."""
        self.bad_messages += 1
        if what is not None:
            self._last_bad = what

    def failed_handshake(self) -> None:
        """Count a peer that could not connect because its keys are wrong."""
        self._failed_handshakes += 1

    def refusal(self, line: str) -> None:
        """Count the refusal of a worker; ``line`` is the text to log."""
        if line in self._refusals or len(self._refusals) < MOST_REASONS:
            self._refusals[line] += 1

    def log_due(self, now_s: float) -> None:
        """Log what was counted since the last time, unless that was less than COMPLAIN_EVERY_S ago."""
        count = self.bad_messages - self._logged_of
        if count and now_s - self._bad_logged_at >= COMPLAIN_EVERY_S:
            self._logged_of, self._bad_logged_at = self.bad_messages, now_s
            log.warning("dropped %d bad messages, the last one %s", count, self._last_bad)
        if self._failed_handshakes and now_s - self._handshakes_logged_at >= COMPLAIN_EVERY_S:
            why = "unknown peers, or workers with other keys; all need the key file of the same tandem keygen"
            log.warning("handshakes that failed at the control port: %d; %s", self._failed_handshakes, why)
            self._failed_handshakes, self._handshakes_logged_at = 0, now_s
        if self._refusals and now_s - self._refusals_logged_at >= COMPLAIN_EVERY_S:
            for line, times in self._refusals.items():
                log.warning("%s%s", line, f" ({times} times)" if times > 1 else "")
            self._refusals_logged_at = now_s
            self._refusals.clear()
