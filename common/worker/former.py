"""Sessions with coordinators that are leaving, while another one takes over.

A coordinator that stops sends Leaving. From then on the worker dials its address again, where the next coordinator is,
and keeps the old connection only for the requests that came over it: their tokens go there until the old coordinator
has ended them or is gone. A request belongs to the coordinator that sent it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from common.core.errors import WireError
from common.core.ids import REQUEST_ID_BYTES, TOKEN_ID_BYTES
from common.net.messages import (
    Lease,
    Logprobs,
    Message,
    NameTaken,
    PromptLogprobs,
    Rejected,
    Rejoin,
    RequestFailed,
    Timing,
    Tokens,
    ToWorker,
)
from common.net.socket_monitor import Handshakes
from common.net.sockets import Channels, HeartbeatThread, receive, send

if TYPE_CHECKING:
    from common.worker.membership import Snapshot

log = logging.getLogger("tandem.worker")

MOST_FORMER = 4
"""Coordinators that leave at the same time. Further ones keep their workers until they are gone."""


class FormerCoordinator:
    """The connection to a coordinator that is leaving. ``requests`` are the ids of the requests that it has placed
    here, as long as it is connected: finished ones stay, since their tokens may be requested again. ``snapshot`` is
    what heartbeats to it report. Times in seconds."""

    def __init__(
        self,
        channels: Channels,
        socket: zmq.Socket[Any],
        handshakes: Handshakes,
        heartbeat_thread: HeartbeatThread | None,
        snapshot: Snapshot,
        acted_on: int,
        requests: Iterable[bytes],
        lease_s: float,
    ) -> None:
        self._channels, self._socket, self._handshakes = channels, socket, handshakes
        self._heartbeat_thread, self.snapshot, self.acted_on = heartbeat_thread, snapshot, acted_on
        self.requests = set(requests)
        self._lease_s, self._leased_until = lease_s, channels.clock() + lease_s
        self._over = False
        if heartbeat_thread is not None:
            heartbeat_thread.end_with_connection()

    def publish(self, snapshot: Snapshot) -> None:
        """Replace what heartbeats to this coordinator report by ``snapshot``."""
        self.snapshot = msgspec.structs.replace(snapshot, acted_on=self.acted_on)

    def receive(self) -> Iterator[Any]:
        """Yield every message about requests that has arrived. A Lease is yielded, too, and is answered by the
        caller."""
        while not self._over and self._channels.readable(self._socket):
            try:
                message = receive(self._socket, ToWorker)
            except WireError as error:
                self.acted_on += 1
                log.warning("dropped an invalid message of a leaving coordinator: %s", error)
                continue
            if message is None:
                return
            if isinstance(message, Rejoin | NameTaken | Rejected):  # another process answers at its address by now
                self._over = True
                return
            self.acted_on += 1
            if isinstance(message, Lease):
                self.acted_on = message.sent
                self._leased_until = self._channels.clock() + self._lease_s
            elif request := getattr(message, "request", None):
                self.requests.add(request if isinstance(request, bytes) else request.id)
            yield message

    def send(self, message: Message) -> None:
        """Send to this coordinator."""
        send(self._socket, message)

    def is_gone(self) -> bool:
        """Return whether the coordinator has closed the connection, or is silent for longer than a lease."""
        reconnected = self._handshakes.look()  # to the next coordinator, which does not know this session
        self._over |= reconnected or not self._handshakes.connected
        return self._over or self._channels.clock() > self._leased_until

    def close(self, goodbye: Message | None = None) -> None:
        """Stop heartbeats, send ``goodbye`` if given, and close the socket within half a second."""
        if self._heartbeat_thread is not None:
            self._heartbeat_thread.stop()
        if goodbye is not None and not self._over:
            send(self._socket, goodbye)
        self._channels.unregister(self._socket)
        self._handshakes.close()
        self._socket.close(linger=500)

    # -- messages of several coordinators' requests -------------------------------------------------------------------

    def share(self, message: Message) -> tuple[Message | None, Message | None]:
        """Split ``message`` into what belongs to requests of this coordinator and the rest; None for nothing."""
        match message:
            case Tokens(requests=joined):
                size = REQUEST_ID_BYTES
                mine = [joined[at : at + size] in self.requests for at in range(0, len(joined), size)]
                if all(mine):
                    return message, None
                if not any(mine):
                    return None, message
                return _spans(message, mine, True), _spans(message, mine, False)
            case PromptLogprobs(request=request) | Timing(request=request) | RequestFailed(request=request):
                return (message, None) if request in self.requests else (None, message)
            case _:
                return None, message


def _spans(message: Tokens, mine: list[bool], which: bool) -> Tokens:
    """Return the spans of ``message`` for which ``mine`` is ``which``."""
    all_columns = message.choices, message.attempts, message.starts, message.counts, message.finish, message.stop_ids
    kept = [at for at, each in enumerate(mine) if each is which]
    choices, attempts, starts, counts, finish, stop_ids = (tuple(each[at] for at in kept) for each in all_columns)
    requests, ids = list[bytes](), list[bytes]()
    logprobs = list[Logprobs | None]()
    first = 0
    for at, count in enumerate(message.counts):
        if mine[at] is which:
            requests.append(message.requests[at * REQUEST_ID_BYTES : (at + 1) * REQUEST_ID_BYTES])
            ids.append(message.ids[first * TOKEN_ID_BYTES : (first + count) * TOKEN_ID_BYTES])
            logprobs += message.logprobs[first : first + count]
        first += count
    wanted = tuple(logprobs) if any(logprobs) else ()
    return Tokens(b"".join(requests), choices, attempts, starts, counts, finish, stop_ids, b"".join(ids), wanted)
