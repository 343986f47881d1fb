"""Messages to bytes and back, strictly.

MessagePack on the wire, never pickle; no class names, no module paths. Before it stands its XXH3-64: a flipped bit in
a prompt or a token would be a wrong answer that nobody notices, and TCP's sum misses some. Bytes from a socket become
one of the message types of :mod:`common.net.messages` in one go, strictly: what does not fit a field's type is refused
where it stands, so nesting, extension types and timestamps get nowhere, and what a message costs is bounded by its size
and its type. Whatever is wrong raises :class:`~common.core.errors.WireError`.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import xxhash

from common.core.errors import Damaged, WireError

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message to a worker: a prompt of a million tokens is 4 MB, so this is generous."""
MAX_REPORT_BYTES = 1 << 20
"""Largest message of a worker to the coordinator: MAX_SPANS tokens with 20 log-probabilities each come to 0.6 MB, what
two lists of MAX_HELD requests in a heartbeat come to is 0.5 MB; whoever has more to tell makes several of it."""
MAX_HANDOFF_BYTES = 256 << 10
"""Largest message between prefill and decode: an Open with what NIXL needs comes to 67 KB; a Commit of 16 choices, each
with 20 log-probabilities, to 5 KB."""
DIGEST_BYTES = 8
_encoder = msgspec.msgpack.Encoder()


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, strict=True)


def encode(message: msgspec.Struct) -> bytes:
    """One message: the digest of what follows, and MessagePack."""
    return seal(_encoder.encode(message))


def seal(data: bytes) -> bytes:
    """``data`` behind its digest."""
    return xxhash.xxh3_64_digest(data) + data


def unseal(data: bytes | memoryview) -> memoryview:
    """What stands behind its digest; Damaged if that is another's."""
    packed = memoryview(data)[DIGEST_BYTES:]
    if data[:DIGEST_BYTES] != xxhash.xxh3_64_digest(packed):
        raise Damaged("a message fails its checksum")
    return packed


def decode(data: bytes | memoryview, kind: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> Any:
    """One message of type ``kind`` (a Struct or a union of tagged Structs); WireError if it is anything else or larger
    than ``max_bytes``, Damaged if it is not what anybody has sent."""
    packed = unseal(data)  # first: what the line has made of a message may be of any size
    if len(data) > max_bytes:
        raise WireError(f"a message of {len(data)} bytes, {max_bytes} allowed")
    try:
        return _decoder(kind).decode(packed)
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise WireError(f"not a valid message: {error}") from error
