"""The coordinator's control port, turned by hand, and whoever dials it."""

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

WAIT_S = 10.0
QUIET_S = 0.3
"""Long enough for a handshake on this machine: who has not come in by then was turned away."""


def until(condition: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + scaled(WAIT_S)
    while not condition():
        assert time.monotonic() < give_up, what
        time.sleep(0.005)


class Door:
    """The coordinator's gateway, turned by hand, and dealers with keys of their own."""

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
        """The next message to ``socket``, or None after QUIET_S without one."""
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
