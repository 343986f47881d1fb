"""What the gateway reports about workers, and the interface that receives it."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from common.core.ids import Incarnation
from common.net.messages import Measured, RequestFailed, Timing, Tokens
from coordinator.cluster.registry import WorkerHandle


class Loss(Enum):
    """How a worker was lost. MISSING is followed by ``on_worker_died`` or ``on_worker_reconnected``."""

    MISSING = "its connection broke; it may have died"
    RECONNECTED = "its connection broke, and it is back"
    GIVEN_UP = "it was silent, hung, or sent bad messages"


class GatewayEvents(Protocol):
    """Receives the events of the gateway: changes of workers and their messages."""

    def on_worker_joined(self, worker: WorkerHandle) -> None: ...

    def on_worker_lost(self, worker: WorkerHandle, how: Loss) -> None:
        """Called when a worker is lost without a Goodbye. After ``Loss.MISSING``, ``on_worker_died`` or
        ``on_worker_reconnected`` follows."""

    def on_worker_died(self, worker: Incarnation) -> None: ...

    def on_worker_reconnected(self, worker: Incarnation) -> None: ...

    def on_worker_left(self, worker: WorkerHandle) -> None: ...

    def tokens(self, worker: WorkerHandle, message: Tokens) -> None: ...

    def timing(self, worker: WorkerHandle, message: Timing) -> None: ...

    def failed(self, worker: WorkerHandle, message: RequestFailed) -> None: ...

    def measured(self, worker: WorkerHandle, message: Measured) -> None: ...

    def beat(self, worker: WorkerHandle) -> None: ...
