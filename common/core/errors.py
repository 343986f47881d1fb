"""The base classes of all errors that Tandem raises on purpose.

TandemError
├── StartError        a process cannot start: what failed, why, and what to do (at most five lines on the screen)
├── RequestError      one request is refused or fails: HTTP status and OpenAI's error fields
├── WireError         bytes from another process are not a valid message; only the sender is at fault
│   └── Damaged       the bytes changed on the way: their checksum does not match
├── DeviceLost        a GPU failed in a way that no later call on it survives; ends the process, and another is started
├── OutOfBlocks       the KV pool has too few blocks: which holder wanted how many, and which holders have them
└── InvariantBroken   our own bookkeeping is wrong; ends the process
"""

from __future__ import annotations

import os
from collections.abc import Mapping

NOT_OURS = "give an address of this machine (ip addr lists them)"
"""Advice for a StartError when a socket cannot be bound because no interface of this machine has its address."""


def reason(error: BaseException) -> str:
    """Return the cause of ``error`` in few words; for an operating system error, without its number and path."""
    error = getattr(error, "os_error", error)  # aiohttp wraps the OSError in an error of its own
    own = type(error).__module__ == "builtins"  # the errno of ssl and resolver errors is not one of the system's
    if own and isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


class TandemError(Exception):
    """Base of all errors raised on purpose."""


class StartError(TandemError):
    """A process cannot start. Printed without a traceback as ``what``, ``why`` and ``todo``, one line each."""

    def __init__(self, what: str, why: str, todo: str) -> None:
        super().__init__(f"{what}: {why}")
        self.what, self.why, self.todo = what, why, todo


class RequestError(TandemError):
    """One request cannot be served. Carries the HTTP status and the fields of OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.type, self.param, self.code = message, status, type, param, code
        self.retry_after_s = retry_after_s


class WireError(TandemError):
    """Bytes from another process that are not a valid message. The reader counts and drops them."""


class Damaged(WireError):
    """Bytes that fail their checksum: they changed on the way, so the peer is not at fault."""


class OutOfBlocks(TandemError):
    """The pool cannot give ``wanted`` blocks to ``holder``: ``free`` are free and ``evictable`` could be evicted.

    ``held`` are the blocks per holder; the message names the four largest.
    """

    def __init__(self, holder: str, wanted: int, free: int, evictable: int, held: Mapping[str, int]) -> None:
        top = ", ".join(f"{name} {count}" for name, count in sorted(held.items(), key=lambda kv: -kv[1])[:4])
        super().__init__(
            f"{holder} wants {wanted} blocks, {free} free, {evictable} evictable; held by: {top or 'no holder'}"
        )
        self.holder, self.wanted, self.free, self.evictable = holder, wanted, free, evictable


class DeviceLost(TandemError):
    """The GPU that this process computes on has failed for good: every later call on it would fail, too. The text is
    what CUDA said, in one line."""


class InvariantBroken(TandemError):
    """Our own bookkeeping contradicts itself. Never caught: a wrong answer is worse than a dead worker."""
