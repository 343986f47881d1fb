"""Names of things that cross a process boundary.

Owns the identifier types and the spelling of block holders. Knows nothing about what the identifiers stand for.
"""

from __future__ import annotations

import secrets
import struct
import sys
from array import array
from collections.abc import Iterable
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", bytes)
"""128 random bits, minted by the coordinator."""
WorkerName = NewType("WorkerName", str)
Incarnation = NewType("Incarnation", str)
"""Fresh at every start of a process: tells a restarted worker from the one that died."""
BlockId = NewType("BlockId", int)
Holder = NewType("Holder", str)
"""Who keeps a KV block alive. The attempt is part of the name, so a late drop of attempt 1 cannot free attempt 2."""

REQUEST_ID_BYTES = 16
TOKEN_ID_BYTES = 4
MAX_ATTEMPT = (1 << 32) - 1
"""Attempts travel in four bytes where many of them do."""
MAX_NAME_BYTES, MAX_INCARNATION_BYTES = 128, 64
"""libzmq knows peers by at most 255 bytes, in which both stand, and a secret."""
CACHE = Holder("cache")


class TransferId(NamedTuple):
    """One hand-off: with ``n > 1`` the prompt travels once, so the choice is not part of it."""

    request: RequestId
    attempt: int

    def __str__(self) -> str:
        return f"{self.request.hex()}/{self.attempt}"


class SequenceId(NamedTuple):
    """One choice of one request in one attempt."""

    request: RequestId
    choice: int
    attempt: int

    @property
    def transfer(self) -> TransferId:
        return TransferId(self.request, self.attempt)

    def __str__(self) -> str:
        return f"{self.request.hex()}/{self.choice}/{self.attempt}"


_TRANSFER = struct.Struct(f"<{REQUEST_ID_BYTES}sI")


def pack_transfers(transfers: Iterable[TransferId]) -> bytes:
    """(request id, attempt as little-endian uint32) after each other, the form in which many travel."""
    return b"".join(_TRANSFER.pack(*transfer) for transfer in transfers)


def unpack_transfers(data: bytes) -> list[TransferId]:
    """The inverse of :func:`pack_transfers`; ValueError if ``data`` is not a whole number of them."""
    if len(data) % _TRANSFER.size:
        raise ValueError(f"{len(data)} bytes are not whole transfer ids")
    return [TransferId(RequestId(request), attempt) for request, attempt in _TRANSFER.iter_unpack(data)]


def new_request_id() -> RequestId:
    return RequestId(secrets.token_bytes(REQUEST_ID_BYTES))


def new_incarnation() -> Incarnation:
    return Incarnation(secrets.token_hex(8))


def sequence_holder(sequence: SequenceId) -> Holder:
    return Holder(f"seq:{sequence}")


def transfer_holder(transfer: TransferId) -> Holder:
    return Holder(f"xfer:{transfer}")


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian unsigned 32-bit integers, the form in which they travel."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse of :func:`pack_tokens`; ValueError if ``data`` is not a whole number of tokens."""
    return _unpacked(data).tolist()


def max_token(*packed: bytes) -> int:
    """The greatest token id in any of these, -1 if there is none; ValueError as in :func:`unpack_tokens`."""
    return max((max(_unpacked(tokens)) for tokens in packed if tokens), default=-1)


def _unpacked(data: bytes) -> array[int]:
    unpacked = array("I")
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked
