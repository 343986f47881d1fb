"""The identities under which workers' sockets are known: ``name|incarnation|secret``, with a suffix for heartbeats."""

from __future__ import annotations

import functools

from common.core.errors import WireError
from common.core.ids import Incarnation
from common.net.sockets import BEAT_SUFFIX

_BEATS = BEAT_SUFFIX.encode()


def control_identity(frame: bytes) -> bytes:
    """Return the identity of the control socket of the worker whose control or heartbeat socket has that of
    ``frame``."""
    return frame.removesuffix(_BEATS)


def heartbeat_identity(route: bytes) -> bytes:
    """Return the identity of the heartbeat socket of the worker whose control socket has that of ``route``."""
    return route + _BEATS


@functools.lru_cache(maxsize=4096)
def parse_identity(frame: bytes) -> tuple[str, Incarnation]:
    """Parse name and incarnation from an identity; raises WireError if it has another form."""
    try:
        parts = frame.decode().removesuffix(BEAT_SUFFIX).rsplit("|", 2)
    except UnicodeDecodeError as error:
        raise WireError("an identity that is not text") from error
    if len(parts) != 3:
        raise WireError("an identity without an incarnation or a secret")
    return parts[0], Incarnation(parts[1])


def shown(frame: bytes) -> str:
    """Return an identity in the form that is logged, without its secret."""
    text = frame[:255].decode(errors="replace").removesuffix(BEAT_SUFFIX)
    return printable(text.rpartition("|")[0] or text)


def printable(text: str) -> str:
    """Return a peer's text without characters that would break the log line, at most 1,000 characters."""
    return "".join(each if each.isprintable() else "?" for each in text)[:1000]
