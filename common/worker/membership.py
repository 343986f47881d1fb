"""A worker's membership of a cluster: sends Hello, runs the heartbeat thread, and exchanges control messages.

Heartbeats have a thread and a socket of their own, so that neither a long engine step nor a queue of messages can delay
them. Each reports the last snapshot that the worker published, and how long the current turn of its loop has taken.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import zmq

from common.core.errors import WireError
from common.net.messages import (
    Gpus,
    Heartbeat,
    Hello,
    Lease,
    Leaving,
    Message,
    Moved,
    NameTaken,
    Rejoin,
    ToWorker,
    Welcome,
)
from common.net.socket_monitor import Handshakes
from common.net.sockets import Channels, HeartbeatThread, identity, receive, send
from common.platform.gpu_monitor import GpuMonitor
from common.worker.former import MOST_FORMER, FormerCoordinator

log = logging.getLogger("tandem.worker")

REJOIN_S = 1.0
"""Seconds after a Hello in which Rejoin is ignored: a restarted coordinator answers every message with Rejoin until our
Hello arrives, and one Hello is enough."""
RETRY_S = 1.0
"""Seconds between two Hellos while another worker has this worker's name."""
REDIAL_S = 0.25
"""Seconds after which to dial again where a coordinator answered that is leaving."""
RECONNECT_S = 2.0
"""Seconds without an answer to Hello after which to connect again. If there is a connection, the Hello was lost, with
an earlier connection or because this one no longer carries anything. If our key was refused, the coordinator's list of
keys may have been corrected by then."""


class Snapshot(msgspec.Struct, frozen=True):
    """A worker's state as heartbeats report it (the fields are those of :class:`common.net.messages.Heartbeat`).

    Immutable and swapped whole, since the heartbeat thread reads it. ``free``, ``cached`` and ``held`` count blocks,
    ``running`` and ``waiting`` sequences; ``live`` and ``resting`` are 16-byte request ids, joined.
    """

    live: bytes = b""
    acted_on: int = 0
    free: int = 0
    cached: int = 0
    held: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    draining: bool = False
    counters: dict[str, float] = {}
    longest_step_s: float = 0.0
    resting: bytes = b""


class _Beats:
    """To whom a heartbeat thread reports: to the coordinator, or from a hand-over on to ``former``."""

    former: FormerCoordinator | None = None


class Membership:
    """The control socket of one worker incarnation. Used from one thread; only heartbeats have their own."""

    _socket: zmq.Socket[Any]
    _handshakes: Handshakes

    def __init__(self, channels: Channels, address: str, hello: Hello) -> None:
        self._channels, self._address, self._clock = channels, address, channels.clock
        self.hello = hello
        self._secret = channels.secret()
        self.snapshot = Snapshot()
        self.turning_since: float | None = None
        """When the current turn of the worker's loop began; None while the loop sleeps."""
        self.stood_still_before_s = 0.0
        """:meth:`stood_still_s` when that turn began. Seconds added since are no hang: the process was stopped."""
        self.expected_s = 0.0
        """Expected duration of the running step; 0 outside a step."""
        self.acted_on = 0
        """Control messages since Welcome whose effect is complete, as the coordinator counts them."""
        self.bad_messages = 0
        self.gpus: GpuMonitor | None = None
        """The monitor whose readings follow heartbeats; None for a worker without a GPU. To be set before Welcome."""
        self._gpus_sent = 0
        self._welcome: Welcome | None = None
        self._heartbeat_thread: HeartbeatThread | None = None
        self._beats = _Beats()
        self.former: list[FormerCoordinator] = []
        """The coordinators that are leaving and still have requests here, or may have."""
        self._redial_at: float | None = None
        """When to dial again, after a coordinator that is leaving has answered; else None."""
        self._name_taken = ""
        """Why this worker has not been welcomed so far, if another worker has its name; else ""."""
        self._hello_sent_at = 0.0
        self._unanswered_since: float | None = None
        """When the unanswered Hello was sent or, if later, its connection was made; None if Hello was answered."""
        self._heard_at = self._clock()
        """When the last message arrived or, if later, when the connection was last seen down or was made anew."""
        self._dial()
        self._send_hello()

    @property
    def joined(self) -> bool:
        """Whether the coordinator has sent Welcome and has not given this worker up since, as far as is known."""
        return self._welcome is not None

    @property
    def connected(self) -> bool:
        """Whether the connection is up, so that a message sent now leaves at once, as far as is known."""
        return self._handshakes.connected

    @property
    def refusal(self) -> str:
        """Why the coordinator does not let this worker connect or join, in words; "" if no reason is known."""
        return self._handshakes.refusal or self._name_taken

    def stood_still_s(self) -> float:
        """Return for how many seconds, in all, not even heartbeats could be sent: the process was stopped."""
        return self._heartbeat_thread.stood_still_s() if self._heartbeat_thread is not None else 0.0

    def reconnect(self) -> None:
        """Connect again where libzmq does not: after a refusal, and when a connection carries nothing, that is, when a
        Hello stays unanswered or no message arrives for the duration of a lease."""
        reconnected, now = self._handshakes.look(), self._clock()
        if self._redial_at is not None:
            if now >= self._redial_at:
                self._dial_again()
        elif self._handshakes.final:
            if now - self._hello_sent_at > RECONNECT_S:
                self._dial_again()
        elif reconnected or not self._handshakes.connected:
            self._heard_at = now
            if self._unanswered_since is not None:  # the Hello waits in the socket; each further one would join anew
                self._unanswered_since = now
        elif self._unanswered_since is not None:
            if now - self._unanswered_since > RECONNECT_S:
                self._dial_again()
        elif self._name_taken:
            if now - self._hello_sent_at > RETRY_S:
                self._send_hello()
        elif self._welcome is not None and now - self._heard_at > self._welcome.lease_ms / 1000:
            self._dial_again()

    def _dial_again(self) -> None:
        self._hang_up()
        self._welcome = None  # the coordinator that sent it is gone, or has given us up
        self._dial()
        self._send_hello()

    def hand_over(self, requests: Iterable[bytes]) -> bool:
        """Keep the session of a coordinator that is leaving for its ``requests`` (ids), and dial its address for the
        next one. False if too many coordinators are leaving: this one then keeps its worker until it is gone."""
        if self._welcome is None or len(self.former) == MOST_FORMER:
            return False
        secret = self._channels.secret()  # so another identity: the old connection must not take it away
        name = identity(self.hello.name, self.hello.incarnation, secret)
        try:
            socket, handshakes = self._channels.watched_dealer(self._address, name)
        except WireError as error:  # no file descriptor is free
            log.warning("cannot dial the next coordinator before this one is gone: %s", error)
            return False
        self._handshakes.look()  # so that from here on a connection that is made is another one
        former = FormerCoordinator(
            self._channels,
            self._socket,
            self._handshakes,
            self._heartbeat_thread,
            self.snapshot,
            self.acted_on,
            requests,
            self._welcome.lease_ms / 1000,
        )
        self.former.append(former)
        self._beats.former, self._beats = former, _Beats()
        self._heartbeat_thread = self._welcome = self._unanswered_since = None
        self._secret, self._socket, self._handshakes = secret, socket, handshakes
        self._channels.register(socket)
        self._heard_at = self._clock()
        self._send_hello()
        return True

    def take_gone(self) -> list[FormerCoordinator]:
        """Close the sessions of former coordinators that are gone, and return them."""
        gone = [each for each in self.former if each.is_gone()]
        for each in gone:
            self.former.remove(each)
            each.close()
        return gone

    def is_former(self, request: bytes) -> bool:
        """Return whether the request of that id came from a coordinator that is leaving."""
        return any(request in each.requests for each in self.former)

    def _dial(self) -> None:
        self._redial_at = None
        name = identity(self.hello.name, self.hello.incarnation, self._secret)
        self._socket, self._handshakes = self._channels.watched_dealer(self._address, name)
        self._channels.register(self._socket)

    def _hang_up(self, goodbye: Message | None = None) -> None:
        self._stop_heartbeats()  # its socket is refused like this one
        if goodbye is not None:
            send(self._socket, goodbye)
        self._channels.unregister(self._socket)
        self._handshakes.close()
        self._socket.close(linger=500)  # time for the Goodbye to leave

    def _send_hello(self) -> None:
        self.acted_on = 0
        self._hello_sent_at = self._clock()
        if self._unanswered_since is None:
            self._unanswered_since = self._hello_sent_at
        send(self._socket, self.hello)

    def send(self, message: Message) -> None:
        """Send to the coordinator, or to the former one whose request it is about. If it is gone, the message waits in
        the socket, or is lost with it."""
        rest: Message | None = message
        for former in self.former:
            part, rest = former.share(message)
            if part is not None:
                former.send(part)
            if rest is None:
                return
            message = rest
        send(self._socket, message)

    def publish(self, snapshot: Snapshot) -> None:
        """Replace the snapshot that heartbeats report."""
        self.snapshot = snapshot
        for former in self.former:
            former.publish(snapshot)

    def receive(self) -> Iterator[Any]:
        """Yield every control message that has arrived. Welcome starts heartbeats, NameTaken stops them, and Rejoin
        sends Hello; these three are yielded, too."""
        while self._channels.readable(self._socket):
            try:
                message = receive(self._socket, ToWorker)
            except WireError as error:
                self.bad_messages += 1
                self.acted_on += 1
                if self.bad_messages & (self.bad_messages - 1) == 0:  # the first, second, fourth...
                    log.warning("dropped invalid message %d of the coordinator: %s", self.bad_messages, error)
                continue
            if message is None:
                return
            self._heard_at = self._clock()
            if isinstance(message, Leaving) and self._welcome is None:
                if self._redial_at is None:
                    self._redial_at = self._heard_at + REDIAL_S
                continue
            if not isinstance(message, Rejoin | NameTaken):  # the coordinator does not count these
                self.acted_on += 1
            if isinstance(message, Lease):
                self.acted_on = message.sent
            elif isinstance(message, Welcome):
                self._welcome, self._unanswered_since, self._name_taken = message, None, ""
                self._start_heartbeats(message.heartbeat_ms / 1000)
                for former in self.former:
                    former.send(Moved(self.hello.incarnation))
            elif isinstance(message, NameTaken):
                self._welcome, self._unanswered_since, self._name_taken = None, None, message.reason
                self._stop_heartbeats()
            elif isinstance(message, Rejoin):
                if self._unanswered_since is not None and self._clock() - self._hello_sent_at < REJOIN_S:
                    continue  # answers a message that arrived there before our Hello
                self._send_hello()
            yield message

    def close(self, goodbye: Message | None = None) -> None:
        """Stop heartbeats, send ``goodbye`` if given, and close the sockets within half a second each."""
        while self.former:
            self.former.pop().close(goodbye)
        self._hang_up(goodbye)

    # -- heartbeats ---------------------------------------------------------------------------------------------------

    def _start_heartbeats(self, interval_s: float) -> None:
        """Start a new heartbeat thread at every Welcome. The coordinator may have given us up because the last thread's
        connection carries nothing, and another coordinator may use another interval."""
        self._stop_heartbeats()
        name = identity(self.hello.name, self.hello.incarnation, self._secret, beats=True)
        self._gpus_sent = 0
        beats = self._beats = _Beats()
        also = None if self.gpus is None else lambda: self._gpu_report() if beats.former is None else None
        self._heartbeat_thread = self._channels.heartbeat_thread(
            self._address, name, interval_s, lambda asked: self._heartbeat(asked, beats.former), also
        )

    def _stop_heartbeats(self) -> None:
        """Stop the heartbeat thread and forget it, so that it is stopped once even if starting the next one fails."""
        if self._heartbeat_thread is not None:
            self._heartbeat_thread.stop()
            self._heartbeat_thread = None

    def _heartbeat(self, asked: int, former: FormerCoordinator | None = None) -> Heartbeat:
        now, since, shot = self._clock(), self.turning_since, (former or self).snapshot
        stood_still_s = max(0.0, self.stood_still_s() - self.stood_still_before_s)  # a new thread counts from 0
        return Heartbeat(
            self.hello.incarnation,
            shot.acted_on,
            shot.live,
            shot.free,
            shot.cached,
            shot.held,
            shot.running,
            shot.waiting,
            shot.waiting_tokens,
            -1 if since is None else max(0, int((now - since - stood_still_s) * 1000)),
            shot.draining,
            shot.counters,
            int(1000 * (self.expected_s or shot.longest_step_s)),
            shot.resting,
            int(1000 * max(self.expected_s, shot.longest_step_s)),
            asked,
            self._channels.unix_ms(),
        )

    def _gpu_report(self) -> Gpus | None:
        """Return the state of the GPUs if there is a reading that has not been sent yet."""
        if self.gpus is None or self.gpus.readings == self._gpus_sent:
            return None
        self._gpus_sent = self.gpus.readings
        return Gpus(self.gpus.states, self.gpus.fault)
