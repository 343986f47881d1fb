"""A wire between two network namespaces that delays every packet by MS milliseconds.

    python -m tests.e2e.relay MS NAMESPACE NAMESPACE

It replaces netem on kernels that have none. The wire is a device named ``wire`` in each namespace. The process prints
"ready" when the devices exist, and ends, removing them, when its standard input is closed.

The devices are taps (kernel.org, Documentation/networking/tuntap.rst).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_PACKET_BYTES = 1 << 16


def enter(namespace: str) -> None:
    """Move this thread into ``namespace`` for the sockets and devices it creates from now on; OSError if that fails."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def tap(namespace: str) -> int:
    """Create the tap device in ``namespace`` and return its descriptor: writes arrive at the device, reads return what
    it sends."""
    enter(namespace)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", b"wire", _IFF_TAP | _IFF_NO_PI))
    return descriptor


def main() -> None:
    delay_s, ends = float(sys.argv[1]) / 1000, [tap(namespace) for namespace in sys.argv[2:4]]
    across = dict(zip(ends, reversed(ends), strict=True))
    under_way: deque[tuple[float, int, bytes]] = deque()
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select([sys.stdin, *ends], [], [], wait_s)
        if sys.stdin in ready:
            return
        for end in ready:
            with contextlib.suppress(OSError):  # no more packets, or the link is down
                while True:
                    packet = os.read(end, _PACKET_BYTES)
                    under_way.append((time.monotonic() + delay_s, across[end], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, packet = under_way.popleft()
            with contextlib.suppress(OSError):  # packets may be lost, as on any wire
                os.write(end, packet)


if __name__ == "__main__":
    main()
