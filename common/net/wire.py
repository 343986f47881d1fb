"""Encodes messages to bytes and decodes them strictly.

A message is MessagePack, never pickle, and carries no class names or module paths. Its XXH3-64 digest comes first: a
flipped bit in a prompt or a token would be an unnoticed wrong answer, and TCP's checksum misses some. The package
msgpack unpacks bytes under the limits below, and msgspec converts the result strictly into a type of
:mod:`common.net.messages`. Extension types and timestamps are refused. Arrays are allocated by their headers, so a
message is refused before anything is built from it if it ends before all that its headers announce. Its reader then
allocates at most a small multiple of the message's size, and at most MAX_CONTAINERS arrays and maps. Every defect
raises :class:`~common.core.errors.WireError`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import msgpack
import msgspec
import xxhash

from common.core.errors import Damaged, WireError
from common.core.request import MAX_GRAMMAR

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message to a worker. A prompt of a million tokens takes 4 MB."""
MAX_REPORT_BYTES = 1 << 20
"""Largest message from a worker to the coordinator; larger reports are split. MAX_SPANS tokens with 20 logprobs each
take 0.6 MB, a heartbeat's two lists of MAX_HELD requests 0.5 MB."""
MAX_HANDOFF_BYTES = 256 << 10
"""Largest message between prefill and decode. An Open with NIXL's agent data takes 67 KB, a Commit of 16 choices with
20 logprobs each 5 KB."""
DIGEST_BYTES = 8
MAX_ARRAY_ITEMS = 1 << 12
"""Longest array in a message; columns have at most MAX_SPANS items."""
MAX_MAP_ITEMS = 1 << 12
"""Largest map in a message; the largest are logit biases."""
MAX_STRING_BYTES = 4 * MAX_GRAMMAR
"""Longest string in a message, in UTF-8; the longest are grammars."""
MAX_CONTAINERS = 1 << 13
"""Most arrays and maps in a message of more than UNCOUNTED_BYTES. An empty one takes one byte of a message and 64 bytes
of memory. A report of MAX_SPANS tokens with logprobs has two for each token."""
UNCOUNTED_BYTES = 64 << 10
"""Smaller messages are not counted: counting costs a Python call per container."""
_NATIVE_TYPES = (bytes,)
"""Types that msgpack packs itself."""


def encode(message: msgspec.Struct) -> bytes:
    """Encode one message: its digest, then MessagePack."""
    plain = msgspec.to_builtins(message, builtin_types=_NATIVE_TYPES)
    return seal(msgpack.packb(plain))


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
    count = _container_count() if len(packed) > UNCOUNTED_BYTES else None
    try:
        _require_complete(packed)
        plain = msgpack.unpackb(
            packed,
            strict_map_key=False,  # logit biases are keyed by token id; convert checks the type of every key
            list_hook=count,
            object_hook=count,
            ext_hook=_refuse_extension,
            max_array_len=MAX_ARRAY_ITEMS,
            max_map_len=MAX_MAP_ITEMS,
            max_str_len=MAX_STRING_BYTES,
            max_bin_len=max_bytes,
            max_ext_len=0,
        )
        return msgspec.convert((plain,), _box(kind), builtin_types=_NATIVE_TYPES).message
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError, msgpack.OutOfData) as error:
        raise WireError(f"not a valid message: {error or type(error).__name__}") from error


def _require_complete(packed: memoryview) -> None:
    """Walk over a message without building anything of it; raises OutOfData if it ends too early, StackError if it is
    nested too deeply."""
    reader = msgpack.Unpacker(max_buffer_size=max(len(packed), 1))
    reader.feed(packed)
    reader.skip()


@cache
def _box(kind: Any) -> type[Any]:
    """Return an array of one ``kind``. msgspec prepares a Struct for conversion once, but a union each time."""
    return msgspec.defstruct("Box", [("message", kind)], array_like=True)


def _container_count() -> Callable[[Any], Any]:
    """Return a hook that passes MAX_CONTAINERS containers on and raises ValueError at the next."""
    left = MAX_CONTAINERS

    def count(container: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {MAX_CONTAINERS} arrays and maps")
        return container

    return count


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code}")
