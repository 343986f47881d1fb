"""Admission of workers: handles Hellos, and messages of senders that are not registered.

Admits a worker, refuses it with a reason, or asks it to join anew. A refused worker gets the reason only if it has
proved that it holds a key of the cluster; without cluster keys the reason is only logged. Owns how many messages of
other versions are tolerated. Knows no request, and does not read sockets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from common.core.errors import WireError
from common.core.ids import Incarnation
from common.net.keys import Party
from common.net.messages import (
    AnyHello,
    AnyMessage,
    FromWorker,
    Goodbye,
    Heartbeat,
    Hello,
    Leaving,
    NameTaken,
    Rejected,
    Rejoin,
    Welcome,
)
from common.net.peer_ban_list import PeerBanList
from common.net.wire import MAX_REPORT_BYTES, decode
from coordinator.cluster.complaints import Complaints
from coordinator.cluster.events import GatewayEvents, Loss
from coordinator.cluster.identities import control_identity, parse_identity, printable, shown
from coordinator.cluster.lost_workers import LostWorkers, Missing
from coordinator.cluster.outbox import Outbox
from coordinator.cluster.registry import JoinRefused, Registry, name_taken, other_protocol

log = logging.getLogger("tandem.gateway")

MOST_ASKED = 1000
"""Number of messages from an unregistered worker of another version that are dropped without a strike: it goes on
sending, for instance the tokens of each step, until it has read the Rejoin."""
UNSAID = "see the coordinator's log (without cluster keys the reason is not sent)"


class Reception:
    """Handles what arrives from senders that have not joined. ``incarnation`` is the coordinator's; ``keyed``: peers
    have proved that they hold a key of the cluster."""

    def __init__(
        self,
        registry: Registry,
        outbox: Outbox,
        lost: LostWorkers,
        complaints: Complaints,
        incarnation: Incarnation,
        clock: Callable[[], float],
        *,
        keyed: bool,
    ) -> None:
        self._registry, self._outbox, self._lost, self._complaints = registry, outbox, lost, complaints
        self._incarnation, self._clock, self._keyed = incarnation, clock, keyed
        self._asked = PeerBanList(MOST_ASKED)
        self.leaving = False
        """Whether new connections of workers are sent to the next coordinator. Those of before stay."""

    def hello(self, party: Party | None, frame: bytes, hello: Hello, now_s: float, events: GatewayEvents) -> None:
        """Admit or refuse the sender of a Hello; raises WireError if the Hello does not match the identity or the key
        of its sender."""
        if self.leaving and self.is_elsewhere(frame, hello.incarnation):
            self._outbox.reply(frame, Leaving())
            return
        self._check_identity(party, frame, hello)
        if (losing := self._lost.not_losing(hello.incarnation)) is not None:
            events.on_worker_lost(losing, Loss.RECONNECTED)
        if (missing := self._lost.not_missing(hello.incarnation)) is not None:
            self._note_alive(missing, events)
        before = self._registry.get(hello.incarnation)
        self._check_holder(hello)
        if (away := self._lost.away(hello.name)) is not None:
            self._refuse(frame, JoinRefused(name_taken(away), for_now=True))
            return
        worker = self._registry.join(hello, now_s, frame)
        if isinstance(worker, JoinRefused):
            self._refuse(frame, worker)
            return
        if before is not None:
            events.on_worker_lost(before, Loss.RECONNECTED)
        self._outbox.joined(worker)
        times = self._registry.times
        timeouts_ms = (int(1000 * each_s) for each_s in (times.heartbeat_s, times.lease_s, times.timeout_s))
        if self._outbox.send(worker, Welcome(self._incarnation, *timeouts_ms)):
            self._registry.welcome(worker)
            log.info(
                "worker %s joins: %s, %d KV blocks of %d tokens",
                hello.name, hello.role, hello.kv_blocks, hello.block_size,
            )  # fmt: skip
            events.on_worker_joined(worker)

    def is_elsewhere(self, frame: bytes, incarnation: Incarnation) -> bool:
        """Return whether ``frame`` is not the identity of the session that this coordinator has with that worker."""
        known = self._lost.get(incarnation) or self._registry.get(incarnation)
        return known is None or known.route != control_identity(frame)

    def stranger(self, frame: bytes, incarnation: Incarnation, message: FromWorker, events: GatewayEvents) -> None:
        """Handle a message of an incarnation that is not registered: note that a missing worker is alive, and send a
        Rejoin unless it says Goodbye."""
        control = control_identity(frame)
        missing = self._lost.missing_worker(incarnation)
        if missing is not None and missing.worker.route != control:
            missing = None  # the message comes from another process
        if missing is not None and (missing.alive or missing.looks or isinstance(message, Goodbye)):
            self._note_alive(missing, events)  # before the first sweep it may be a last message from before its death
            if isinstance(message, Heartbeat) and self._registry.endless(message):
                name, turn_ms = missing.worker.hello.name, message.turn_ms
                log.warning("worker %s does not come back: one turn of its loop has taken %d ms so far", name, turn_ms)
                self._lost.not_missing(incarnation)
        if isinstance(message, Goodbye):
            if missing is not None:
                self._lost.not_missing(incarnation)
            return
        self._outbox.reply(control, Rejoin())

    def other_version(self, frame: bytes, data: bytes) -> bool:
        """Handle data that is no message of this version; return whether it is one of another version."""
        return self._turns_away(frame, data) or self._asks_back(frame, data)

    def _check_identity(self, party: Party | None, frame: bytes, hello: Hello) -> None:
        if frame != control_identity(frame) or parse_identity(frame) != (hello.name, hello.incarnation):
            raise WireError("a Hello whose name and incarnation are not those of its identity")
        known = self._lost.get(hello.incarnation) or self._registry.get(hello.incarnation)
        if known is not None and known.route != frame:
            raise WireError(f"a Hello as {known.hello.name}, which is connected under another identity")
        if party not in (None, hello.role):
            self._outbox.reply(frame, Rejected(f"its key is that of {party}, not of {hello.role}"))
            raise WireError(f"a Hello of a {hello.role} worker with the key of {party}")

    def _refuse(self, frame: bytes, refused: JoinRefused, *, disclose: bool = False) -> None:
        """Refuse a worker and note the reason for the log. With ``disclose`` the reason is sent also without cluster
        keys, since it reveals nothing about what is served here."""
        self._complaints.refusal(f"worker {shown(frame)} is refused: {printable(refused.reason)}")
        self._complaints.log_due(self._clock())
        reason = refused.reason if disclose or self._keyed else UNSAID
        self._outbox.reply(frame, NameTaken(reason) if refused.for_now else Rejected(reason))

    def _turns_away(self, frame: bytes, data: bytes) -> bool:
        """Return whether ``data``, which is no message of this version, is a Hello of another version. Its sender is
        refused with that reason."""
        try:
            hello = decode(data, AnyHello, MAX_REPORT_BYTES)
        except WireError:
            return False
        if reason := other_protocol(hello.protocol):
            self._refuse(frame, JoinRefused(reason), disclose=True)
        return reason is not None

    def _asks_back(self, frame: bytes, data: bytes) -> bool:
        """Return whether ``data``, which is no message of this version, may come from a worker of another version that
        takes this coordinator for its previous one. It gets a Rejoin, and its Hello then shows its version. From a
        worker that has joined here, and as a Hello, such data is just a bad message."""
        _, incarnation = parse_identity(frame)
        if self._lost.losing_worker(incarnation) is not None or self._registry.get(incarnation) is not None:
            return False
        try:
            message = decode(data, AnyMessage, MAX_REPORT_BYTES)
        except WireError:
            return False
        if message.kind == AnyHello.__struct_config__.tag or self._asked.out(incarnation):
            return False
        self._asked.strike(incarnation)
        self._complaints.bad_message(f"from {shown(frame)}: it has another version and is asked to join anew")
        self._outbox.reply(control_identity(frame), Rejoin())
        return True

    def _check_holder(self, hello: Hello) -> None:
        """Probe the connection of the worker that holds the name of ``hello``: its process may just have died without
        the monitor having reported the closed connection yet."""
        holder = self._registry.named(hello.name)
        if holder is not None and holder.id != hello.incarnation:
            self._outbox.probe(holder)

    @staticmethod
    def _note_alive(missing: Missing, events: GatewayEvents) -> None:
        """Note that a missing worker has sent something and is alive."""
        if missing.speaks():
            events.on_worker_reconnected(missing.worker.id)
