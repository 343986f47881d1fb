"""Tells systemd how a service is doing (the protocol of sd_notify(3)). Does nothing where systemd did not start us."""

from __future__ import annotations

import os
import socket

_VARIABLE = "NOTIFY_SOCKET"
_MAX_BYTES = 4096


def ready(status: str) -> None:
    """Report that this service serves, with a line for ``systemctl status``."""
    _notify("READY=1", f"STATUS={status}")


def progress(status: str) -> None:
    """Report what this service does, a line for ``systemctl status``."""
    _notify(f"STATUS={status}")


def stopping() -> None:
    """Report that this service has begun to drain."""
    _notify("STOPPING=1", "STATUS=draining")


def _notify(*assignments: str) -> None:
    """Send one datagram. It is lost if systemd does not listen any more, which is no reason to stop serving."""
    address = os.environ.get(_VARIABLE, "")
    if address[:1] not in ("/", "@"):
        return
    lines = "\n".join(" ".join(each.split()) for each in assignments)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.sendto(lines.encode()[:_MAX_BYTES], address.replace("@", "\0", 1) if address[0] == "@" else address)
    except OSError:
        pass
