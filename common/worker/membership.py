"""A worker's membership in a running system: it says Hello, keeps a heart beating, and exchanges control messages.

The heartbeat has a thread and a socket of its own, so that neither a long engine step nor a queue of messages can delay
it; it sends the last snapshot that the worker published, and how long the running turn of its loop has taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from common.core.errors import WireError
from common.net.messages import Heartbeat, Hello, Lease, Message, NameTaken, Rejoin, ToWorker, Welcome
from common.net.sockets import Channels, HeartbeatThread, identity, receive, send

REJOIN_S = 1.0
"""A coordinator that restarted answers every message with Rejoin until it has our Hello; one Hello is enough."""
RETRY_S = 1.0
"""Between two Hellos under a name that another worker has."""
RECONNECT_S = 2.0
"""A Hello that is not answered for so long over a connection was lost, with an earlier one or since this one carries
nothing any more. Where none is made, since our key is not let in, this may have been corrected by then."""


class Snapshot(msgspec.Struct, frozen=True):
    """What a worker tells about itself; immutable, swapped whole. ``live`` and ``resting`` are request ids, joined."""

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


class Membership:
    """The control socket of one worker incarnation. Used from one thread; only the heart has its own."""

    def __init__(self, channels: Channels, address: str, hello: Hello) -> None:
        self._channels, self._address, self._clock = channels, address, channels.clock
        self.hello = hello
        self._secret = channels.secret()
        self.snapshot = Snapshot()
        self.turning_since: float | None = None
        """When the running turn of the worker's loop began; None while it waits."""
        self.stood_still_before_s = 0.0
        """What :meth:`stood_still_s` was when that began: a process that is stopped in a turn does not hang in it."""
        self.expected_s = 0.0
        """How long the running step, if there is one, is expected to take."""
        self.acted_on = 0
        self.bad_messages = 0
        self._welcome: Welcome | None = None
        self._heart: HeartbeatThread | None = None
        self._name_taken = ""
        """Why this worker has not been welcomed so far, if another one has its name."""
        self._said_hello_at = 0.0
        self._unanswered_since: float | None = None
        """Since when a Hello has not been answered, or the connection is there that it was sent over."""
        self._heard_at = self._clock()
        """When the coordinator last said something, or could not."""
        self._dial()
        self._say_hello()

    @property
    def joined(self) -> bool:
        return self._welcome is not None

    @property
    def connected(self) -> bool:
        """Whether what is said now can leave now, as far as it is known."""
        return self._handshakes.connected

    @property
    def refusal(self) -> str:
        """Why the coordinator does not let this worker connect, in words; "" if nothing is known to be wrong."""
        return self._handshakes.refusal or self._name_taken

    def stood_still_s(self) -> float:
        """For how long, in all, not even the heart could beat."""
        return self._heart.stood_still_s() if self._heart is not None else 0.0

    def reconnect(self) -> None:
        """Dials again when libzmq does not: when it was turned away, or a connection carries nothing, which is known of
        one that leaves a Hello unanswered or brings no Lease for as long as one lasts."""
        connected_anew, now = self._handshakes.look(), self._clock()
        if self._handshakes.final:
            if now - self._said_hello_at > RECONNECT_S:
                self._dial_again()
        elif connected_anew or not self._handshakes.connected:
            self._heard_at = now
            if self._unanswered_since is not None:  # one Hello waits in the socket: more would each be a new join
                self._unanswered_since = now
        elif self._unanswered_since is not None:
            if now - self._unanswered_since > RECONNECT_S:
                self._dial_again()
        elif self._name_taken:
            if now - self._said_hello_at > RETRY_S:
                self._say_hello()
        elif self._welcome is not None and now - self._heard_at > self._welcome.lease_ms / 1000:
            self._dial_again()

    def _dial_again(self) -> None:
        self._hang_up()
        self._welcome = None  # whoever welcomed us is gone, or has given us up
        self._dial()
        self._say_hello()

    def _dial(self) -> None:
        name = identity(self.hello.name, self.hello.incarnation, self._secret)
        self._socket, self._handshakes = self._channels.watched_dealer(self._address, name)
        self._channels.register(self._socket)

    def _hang_up(self, goodbye: Message | None = None) -> None:
        self._stop_heart()  # its socket is turned away as this one is
        if goodbye is not None:
            send(self._socket, goodbye)
        self._channels.unregister(self._socket)
        self._handshakes.close()
        self._socket.close(linger=500)  # lets the goodbye leave

    def _say_hello(self) -> None:
        self.acted_on = 0
        self._said_hello_at = self._clock()
        if self._unanswered_since is None:
            self._unanswered_since = self._said_hello_at
        send(self._socket, self.hello)

    def send(self, message: Message) -> None:
        """To the coordinator; when it is gone the message waits in the socket or is lost with it."""
        send(self._socket, message)

    def receive(self) -> Iterator[Any]:
        """Every control message that has arrived. Welcome starts the heart, NameTaken stops it, Rejoin says Hello; all
        are passed on."""
        while self._channels.readable(self._socket):
            try:
                message = receive(self._socket, ToWorker)
            except WireError:
                self.bad_messages += 1
                self.acted_on += 1
                continue
            if message is None:
                return
            self._heard_at = self._clock()
            if not isinstance(message, Rejoin | NameTaken):  # those are not counted by the coordinator
                self.acted_on += 1
            if isinstance(message, Lease):
                self.acted_on = message.sent
            elif isinstance(message, Welcome):
                self._welcome, self._unanswered_since, self._name_taken = message, None, ""
                self._start_heart(message.heartbeat_ms / 1000)
            elif isinstance(message, NameTaken):
                self._welcome, self._unanswered_since, self._name_taken = None, None, message.reason
                self._stop_heart()
            elif isinstance(message, Rejoin):
                if self._unanswered_since is not None and self._clock() - self._said_hello_at < REJOIN_S:
                    continue  # an answer to something we said before our Hello arrived there
                self._say_hello()
            yield message

    def close(self, goodbye: Message | None = None) -> None:
        self._hang_up(goodbye)

    # -- the heart ----------------------------------------------------------------------------------------------------

    def _start_heart(self, interval_s: float) -> None:
        """With every Welcome another one: we may have been given up because the connection of the last carries nothing,
        and another coordinator has times of its own."""
        self._stop_heart()
        name = identity(self.hello.name, self.hello.incarnation, self._secret, beats=True)
        self._heart = self._channels.heart(self._address, name, interval_s, self._heartbeat)

    def _stop_heart(self) -> None:
        """Once: whatever keeps the next one from starting."""
        if self._heart is not None:
            self._heart.stop()
            self._heart = None

    def _heartbeat(self, asked: int) -> Heartbeat:
        now, since, shot = self._clock(), self.turning_since, self.snapshot
        stood_still_s = max(0.0, self.stood_still_s() - self.stood_still_before_s)  # another heart begins at nothing
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
        )
