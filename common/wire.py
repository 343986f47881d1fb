"""Messages to bytes and back, strictly.

MessagePack on the wire, never pickle; no class names, no module paths. Before it stands its XXH3-64: a flipped bit in
a prompt or a token would be a wrong answer that nobody notices, and TCP's sum misses some. Bytes from a socket are
unpacked with explicit limits on every length and on nesting, ExtType and timestamps are refused, and the result is
converted strictly to one of the message types of :mod:`common.messages`. Whatever is wrong raises
:class:`~common.errors.WireError`.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import msgpack
import msgspec
import xxhash

from common.errors import Damaged, WireError

T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 << 20
"""Largest control message: a prompt of a million tokens is 4 MB, so this is generous."""
DIGEST_BYTES = 8
_MAX_ITEMS = 1 << 20
_encoder = msgspec.msgpack.Encoder()


def _refuse(*_: object) -> NoReturn:
    raise ValueError("extension types are not allowed")


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


def decode(data: bytes | memoryview, kind: Any) -> Any:
    """One message of type ``kind`` (a Struct or a union of tagged Structs); WireError if it is anything else, Damaged
    if it is not what anybody has sent."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes, {MAX_MESSAGE_BYTES} allowed")
    packed = unseal(data)
    try:
        plain = msgpack.unpackb(
            packed,
            raw=False,
            strict_map_key=False,
            ext_hook=_refuse,
            timestamp=0,
            max_array_len=_MAX_ITEMS,
            max_map_len=_MAX_ITEMS,
            max_str_len=MAX_MESSAGE_BYTES,
            max_bin_len=MAX_MESSAGE_BYTES,
            max_ext_len=0,
        )
        return msgspec.convert(plain, kind, strict=True)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a valid message: {error}") from error
