"""The coordinator's control port, polled by the test, and peers that connect to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from common.core.ids import Incarnation
from common.net import keys
from common.net.keys import Party
from common.net.messages import ToWorker
from common.net.sockets import Channels, receive
from coordinator.cluster.gateway import Gateway
from coordinator.cluster.registry import Registry
from tests.fakes.worker import FakeWorker
from tests.pace import scaled

WAIT_S = scaled(10.0)
QUIET_S = 0.3
"""Long enough for a handshake on this machine: a peer that is not connected by then was rejected."""


def until(condition: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, what
        time.sleep(0.005)


class GatewayHarness:
    """The coordinator's gateway, which reads only when the test calls :meth:`answer`, and dealers with various keys."""

    def __init__(self, cluster_key: Path | None, port: int = 0) -> None:
        self.cluster_key = cluster_key
        self.registry = Registry(None)
        channels = Channels(cluster_key and keys.load(cluster_key, "coordinator"))
        self.gateway = Gateway(self.registry, "127.0.0.1", port, channels=channels)
        self.gateway._events = self  # type: ignore[assignment]
        self.lost_workers: list[str] = []
        self.channels: list[Channels] = []
        self.sockets: list[zmq.Socket[Any]] = []

    @property
    def port(self) -> int:
        return int(self.gateway.address.rpartition(":")[2])

    def on_worker_joined(self, worker: Any) -> None:
        self.joins += 1

    def beat(self, worker: Any) -> None:
        self.beats += 1

    def on_worker_lost(self, worker: Any, how: Any) -> None:
        self.lost_workers.append(worker.hello.name)

    def on_worker_died(self, worker: Incarnation) -> None: ...

    def on_worker_reconnected(self, worker: Incarnation) -> None: ...

    def dial(self, party: Party | None, name: bytes, cluster_key: Path | None = None) -> zmq.Socket[Any]:
        path = cluster_key or self.cluster_key
        self.channels.append(Channels(party and path and keys.load(path, party)))
        self.sockets.append(self.channels[-1].dealer(self.gateway.address, name))
        return self.sockets[-1]

    def answer(self, socket: zmq.Socket[Any]) -> Any:
        """Return the next message to ``socket``, or None if none arrives in time: ``WAIT_S``, or ``QUIET_S`` if none is
        expected."""
        give_up = time.monotonic() + (WAIT_S if self.expected else QUIET_S)
        while time.monotonic() < give_up:
            self.gateway._read()
            if socket.poll(5):
                return receive(socket, ToWorker)
        return None

    expected = True
    beats = joins = 0

    def close(self) -> None:
        for socket in self.sockets:
            socket.close(0)
        for channels in self.channels:
            channels.close()
        self.gateway.close()


def hello_of(role: Party) -> Any:
    fake = FakeWorker(role, "tcp://127.0.0.1:1", "f", name=f"{role}-0")  # type: ignore[arg-type]
    return fake.hello
