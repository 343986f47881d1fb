"""Encodes messages to bytes and decodes them strictly.

A message is MessagePack, never pickle, and carries no class names or module paths. Its XXH3-64 digest comes first: a
flipped bit in a prompt or a token would be an unnoticed wrong answer, and TCP's checksum misses some. Bytes are decoded
straight into a type of :mod:`common.net.messages`, and a value that does not fit its field's type is refused at that
point. So deep nesting, extension types and timestamps are never built, and the cost of decoding is bounded by the size
and the type of the message. Every defect raises :class:`~common.core.errors.WireError`.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import xxhash

from common.core.errors import Damaged, WireError

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message to a worker. A prompt of a million tokens takes 4 MB."""
MAX_REPORT_BYTES = 1 << 20
"""Largest message from a worker to the coordinator; larger reports are split. MAX_SPANS tokens with 20 logprobs each
take 0.6 MB, a heartbeat's two lists of MAX_HELD requests 0.5 MB."""
MAX_HANDOFF_BYTES = 256 << 10
"""Largest message between prefill and decode. An Open with NIXL's agent data takes 67 KB, a Commit of 16 choices with
20 logprobs each 5 KB."""
DIGEST_BYTES = 8
_encoder = msgspec.msgpack.Encoder()


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, strict=True)


def encode(message: msgspec.Struct) -> bytes:
    """Encode one message: its digest, then MessagePack."""
    return seal(_encoder.encode(message))


def seal(data: bytes) -> bytes:
    """Return ``data`` with its digest in front."""
    return xxhash.xxh3_64_digest(data) + data


def unseal(data: bytes | memoryview) -> memoryview:
    """Check the digest in front of ``data`` and return the rest; raises Damaged if it does not match."""
    packed = memoryview(data)[DIGEST_BYTES:]
    if data[:DIGEST_BYTES] != xxhash.xxh3_64_digest(packed):
        raise Damaged("a message fails its checksum")
    return packed


def decode(data: bytes | memoryview, kind: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> Any:
    """Decode one message of type ``kind`` (a Struct or a union of tagged Structs). Raises Damaged if it fails its
    checksum, WireError if it is anything else or larger than ``max_bytes``."""
    packed = unseal(data)  # before the size check: damage, which is not the sender's fault, can change the size too
    if len(data) > max_bytes:
        raise WireError(f"a message has {len(data)} bytes, {max_bytes} are allowed")
    try:
        return _decoder(kind).decode(packed)
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise WireError(f"not a valid message: {error}") from error
