"""Every error that Tandem raises on purpose.

TandemError
├── StartError        a process cannot start: what, why, what to do (at most five lines on the screen)
├── RequestError      one request is refused or fails: HTTP status and OpenAI's error fields
├── WireError         bytes from another process are not a valid message; the sender is at fault, nothing else is
├── OutOfBlocks       the KV pool cannot give what was asked; who wanted what, who holds it
└── InvariantBroken   our own bookkeeping is wrong; ends the process, loudly
"""

from __future__ import annotations

import os
from collections.abc import Mapping

NOT_OURS = "give an address of this machine (ip addr lists them)"
"""What to do when a socket cannot be bound because its address belongs to nobody here."""


def reason(error: BaseException) -> str:
    """Why something failed, in as few words as tell it: of an error of the system no number, and no path again."""
    error = getattr(error, "os_error", error)  # of which aiohttp has made one of its own
    own = type(error).__module__ == "builtins"  # the numbers of TLS and of the resolver are not the system's
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
    """One request cannot be served; carries what OpenAI's error object shows."""

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
    """Bytes from another process that are not a valid message. Counted and dropped by whoever reads."""


class Damaged(WireError):
    """Bytes that are not those that were sent, as their checksum shows: the line's fault, not the peer's."""


class OutOfBlocks(TandemError):
    """The pool cannot give ``wanted`` blocks: ``free`` are free and ``evictable`` could be evicted."""

    def __init__(self, holder: str, wanted: int, free: int, evictable: int, held: Mapping[str, int]) -> None:
        top = ", ".join(f"{name} {count}" for name, count in sorted(held.items(), key=lambda kv: -kv[1])[:4])
        super().__init__(
            f"{holder} wants {wanted} blocks, {free} free, {evictable} evictable; held by: {top or 'nobody'}"
        )
        self.holder, self.wanted, self.free, self.evictable = holder, wanted, free, evictable


class InvariantBroken(TandemError):
    """Our own bookkeeping contradicts itself. Never caught: a wrong answer would be worse than a dead worker."""
