"""What a worker logs about its connection to the coordinator."""

from __future__ import annotations

import logging
from typing import Any

from common.worker.held_requests import HeldRequests
from common.worker.membership import Membership

log = logging.getLogger("tandem.worker")

LONELY_S = 5.0
"""Interval in seconds between log lines of a worker that has not joined a coordinator."""


class ConnectionLog:
    """Logs when the worker of ``membership`` joins the coordinator at ``address``, and why it is without one. Under a
    launcher (``supervised``) the coordinator's log beside this one reports joins and losses, so they are not logged
    here above DEBUG."""

    def __init__(
        self, membership: Membership, requests: HeldRequests, address: str, *, supervised: bool, now: float
    ) -> None:
        self._membership, self._requests, self._address, self._supervised = membership, requests, address, supervised
        self._lonely_since = now
        """When the last line about a missing coordinator was logged, or the worker started."""
        self._logged_refusals: set[str] = set()
        self._logged_lost = False

    def unless_supervised(self, text: str, *arguments: Any) -> None:
        """Log at INFO; under a launcher at DEBUG, since the coordinator's log beside this one reports the same."""
        log.log(logging.DEBUG if self._supervised else logging.INFO, text, *arguments)

    def joined(self) -> None:
        """Log that the coordinator has sent Welcome."""
        self._logged_refusals.clear()
        self.unless_supervised("joined the coordinator at %s", self._address)

    def check(self, now: float) -> None:
        """Log why this worker is without a coordinator: at once for a new reason of refusal, and again every LONELY_S.
        One refused connection can show several reasons, since its two ends do not always see the same one first."""
        refusal, joined = self._membership.refusal, self._membership.joined
        logged = not refusal or refusal in self._logged_refusals
        silent_s = self._requests.silent_s(now)
        lost = joined and not self._membership.connected
        if lost and not self._logged_lost:
            self.unless_supervised("the connection to the coordinator at %s is lost: dialling again", self._address)
        self._logged_lost = lost
        if joined and not (refusal or silent_s):
            return
        if logged and now - self._lonely_since <= LONELY_S:
            return
        self._lonely_since = now
        if refusal:
            self._logged_refusals.add(refusal)
            words = "the coordinator at %s does not let this worker in: %s (trying again)"
            log.warning(words, self._address, refusal)
        elif silent_s:
            words = "the coordinator at %s has been silent for %.1f s: waiting for it"
            log.warning(words, self._address, silent_s)
        elif self._logged_refusals:
            log.warning("the coordinator at %s has not let this worker in so far: trying again", self._address)
        else:
            log.warning("still waiting for the coordinator at %s: is it started?", self._address)
