"""Messages to workers.

Owns the count of control messages per worker and the number of the last Ping. Does not know what the messages mean to
requests, or what follows when a worker cannot be reached.
"""

from __future__ import annotations

from collections.abc import Callable

from common.core.ids import REQUEST_ID_BYTES, Incarnation, RequestId
from common.net.messages import Abort, Message, Ping
from common.net.sockets import BoundedSocket, send
from coordinator.cluster.identities import heartbeat_identity
from coordinator.cluster.registry import Registry, WorkerHandle, WorkerState

_NOBODY = Abort(RequestId(bytes(REQUEST_ID_BYTES)), 0)
"""Names no request: sent to probe a connection, because workers ignore an Abort of an unknown request."""


class Outbox:
    """Sends through ``socket``. Calls ``unreachable`` with a worker whose connection is closed, and ``used`` after each
    public use of the socket."""

    def __init__(
        self,
        socket: BoundedSocket,
        registry: Registry,
        unreachable: Callable[[WorkerHandle], None],
        used: Callable[[], None],
    ) -> None:
        self.sent: dict[Incarnation, int] = {}
        """Number of control messages sent to each worker since its Hello; ``Heartbeat.acted_on`` counts the same
        messages."""
        self._socket, self._registry = socket, registry
        self._unreachable, self._used = unreachable, used
        self._pings = 0

    def send(self, worker: WorkerHandle, message: Message) -> bool:
        """Send a message; return False if the worker cannot be reached."""
        if worker.state is WorkerState.GONE:
            return False
        reached = send(self._socket, message, worker.route)
        if reached:
            self.sent[worker.id] = self.sent.get(worker.id, 0) + 1
        else:
            self._unreachable(worker)
        self._used()
        return reached

    def probe(self, worker: WorkerHandle) -> None:
        """Send a meaningless message, which detects a worker that cannot be reached."""
        self.send(worker, _NOBODY)

    def reply(self, frame: bytes, message: Message) -> None:
        """Send a message to an identity that may be no worker's."""
        send(self._socket, message, frame)

    def ping_all(self) -> int:
        """Send a Ping to the heartbeat thread of every worker and return its number. ``WorkerHandle.answered`` is at
        least that number once the worker has answered."""
        self._pings += 1
        for worker in self._registry:
            self._ping(worker)
        self._used()
        return self._pings

    def answered(self, worker: WorkerHandle, number: int) -> None:
        """Note the number of the last Ping that a heartbeat answers. If that is not the last Ping, send it again,
        because a Ping is lost while the worker's heartbeat connection is reconnecting."""
        if number <= self._pings:  # else it answers a Ping of an earlier coordinator
            worker.answered = max(worker.answered, number)
        if worker.answered < self._pings:
            self._ping(worker)

    def joined(self, worker: WorkerHandle) -> None:
        """Begin to count the messages to a worker. Its Hello answers every earlier Ping: it is alive."""
        self.sent[worker.id], worker.answered = 0, self._pings

    def forget(self, worker: Incarnation) -> None:
        """Forget a worker that is gone."""
        self.sent.pop(worker, None)

    def _ping(self, worker: WorkerHandle) -> None:
        send(self._socket, Ping(self._pings), heartbeat_identity(worker.route))
