"""What the gateway reports about workers, and the interface that receives it."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from common.core.ids import Incarnation
from common.net.messages import Measured, PromptLogprobs, RequestFailed, Timing, Tokens
from coordinator.cluster.registry import WorkerHandle


class Loss(Enum):
    """How a worker was lost. MISSING is followed by ``on_worker_died`` or ``on_worker_reconnected``."""

    MISSING = "its connection broke; it may have died"
    RECONNECTED = "its connection broke, and it is back"
    GIVEN_UP = "it was silent, hung, or sent bad messages"


class GatewayEvents(Protocol):
    """Receives the events of the gateway: changes of workers and their messages."""

    def on_worker_joined(self, worker: WorkerHandle) -> None:
        """Called when a worker has joined and its Welcome was sent: it may get requests."""

    def on_worker_lost(self, worker: WorkerHandle, how: Loss) -> None:
        """Called when a worker is lost without a Goodbye. After ``Loss.MISSING``, ``on_worker_died`` or
        ``on_worker_reconnected`` follows."""

    def on_worker_died(self, worker: Incarnation) -> None:
        """Called when a missing worker is taken to be dead, because nothing has arrived from it since its connection
        closed."""

    def on_worker_reconnected(self, worker: Incarnation) -> None:
        """Called when something has arrived from a missing worker: it is alive. ``on_worker_joined`` follows if its new
        Hello is accepted."""

    def on_worker_left(self, worker: WorkerHandle) -> None:
        """Called when a worker leaves with a Goodbye. It may have left requests unfinished."""

    def tokens(self, worker: WorkerHandle, message: Tokens) -> None:
        """Deliver the tokens of one step. Raises WireError if the columns of the message do not fit together."""

    def prompt_logprobs(self, worker: WorkerHandle, message: PromptLogprobs) -> None:
        """Deliver log-probabilities of a prompt. Raises WireError if the message contradicts itself or its request."""

    def timing(self, worker: WorkerHandle, message: Timing) -> None:
        """Deliver figures of one request; the suffix of each name is its unit."""

    def failed(self, worker: WorkerHandle, message: RequestFailed) -> None:
        """Report that a worker has given up a request."""

    def measured(self, worker: WorkerHandle, message: Measured) -> None:
        """Deliver the result of a trial hand-off, from its prefill worker."""

    def beat(self, worker: WorkerHandle) -> None:
        """Report that a heartbeat has arrived, which is ``worker.beat`` by now. Not called if it shows that the worker
        hangs."""
