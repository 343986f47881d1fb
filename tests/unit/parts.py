"""Messages with too many parts, and a counter of the parts that are read."""

from __future__ import annotations

from typing import Any

import pytest

from common.net.sockets import BoundedSocket


def many(parts: int) -> list[bytes]:
    """Return a malicious message of ``parts`` parts."""
    return [b"%d" % number for number in range(parts)]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by one element for every part that is read from now on."""
    received: list[int] = []
    receive = BoundedSocket.recv

    def count(socket: BoundedSocket, *args: Any, **options: Any) -> Any:
        part = receive(socket, *args, **options)
        received.append(1)
        return part

    monkeypatch.setattr(BoundedSocket, "recv", count)
    return received
