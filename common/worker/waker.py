"""Wakes a worker's loop, which sleeps in a poll, for signals, for masks that were late, and for a failure of its
device."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Collection, Iterator

from common.net.sockets import Channels

DEVICE_FAILED, MASK_READY = 0, 255
"""The bytes that stand for a failure of the device, and for the mask of a row that was late. A signal's byte is its
number, from 1 to 64."""


class LoopWaker:
    """A socket that the loop polls. Within :meth:`attached` it gets a byte for each SIGTERM, each Ctrl-C, each late
    mask, and for a failure of the device."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self.device_fault = ""
        """Why the device cannot be used any more; "" while it can."""
        self._reader: socket.socket | None = None
        self._writer: socket.socket | None = None

    def device_failed(self, why: str) -> None:
        """Record why the device cannot be used any more, and wake the loop. May be called from any thread, and before
        the waker is attached."""
        self.device_fault = why
        if self._writer is not None:
            self._writer.send(bytes([DEVICE_FAILED]))

    def mask_ready(self) -> None:
        """Wake the loop. May be called from any thread."""
        writer = self._writer
        if writer is not None:
            with contextlib.suppress(OSError):  # it is full, so the loop wakes anyway, or the loop has just ended
                writer.send(bytes([MASK_READY]))

    def read(self, ready: Collection[object]) -> bytes:
        """Return the bytes that have arrived, if the socket is among the ``ready`` descriptors of a poll."""
        if self._reader is None or self._reader.fileno() not in ready:
            return b""
        return self._reader.recv(64)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Handle SIGTERM and Ctrl-C within the block.

        A signal only wakes the poll and is acted on there, since a handler may run in the middle of anything. Under a
        launcher SIGINT is already ignored and stays ignored: a terminal sends it to all processes, and only the
        launcher knows in which order to stop them.
        """
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._channels.register(reader.fileno())
        alone = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        numbers = (signal.SIGTERM, signal.SIGINT) if alone else (signal.SIGTERM,)
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._reader, self._writer = reader, writer
        if self.device_fault:  # reported before there was a socket
            writer.send(bytes([DEVICE_FAILED]))
        try:
            yield
        finally:
            self._reader = self._writer = None
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)
            reader.close()
            writer.close()
