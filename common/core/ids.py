"""Identifiers that cross a process boundary, their packed form on the wire, and the names of block holders."""

from __future__ import annotations

import secrets
import struct
import sys
from array import array
from collections.abc import Iterable
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", bytes)
"""128 random bits, drawn by the coordinator."""
WorkerName = NewType("WorkerName", str)
Incarnation = NewType("Incarnation", str)
"""A random id that a process draws at its start; distinguishes a restarted worker from the process that died."""
BlockId = NewType("BlockId", int)
Holder = NewType("Holder", str)
"""The name under which a KV block is held. It contains the attempt, so a late message of attempt 1 cannot free blocks
of attempt 2."""

REQUEST_ID_BYTES = 16
TOKEN_ID_BYTES = 4
MAX_ATTEMPT = (1 << 32) - 1
"""Largest attempt number that fits into the four bytes of a packed transfer id."""
MAX_NAME_BYTES, MAX_INCARNATION_BYTES = 128, 64
"""Limits that keep a ZeroMQ identity, which contains both and a secret, within its maximum of 255 bytes."""
CACHE = Holder("cache")


class TransferId(NamedTuple):
    """The id of one hand-off. It contains no choice, because with ``n > 1`` the prompt's KV travels once."""

    request: RequestId
    attempt: int

    def __str__(self) -> str:
        return f"{self.request.hex()}/{self.attempt}"


class SequenceId(NamedTuple):
    """The id of a sequence: one choice of one request in one attempt."""

    request: RequestId
    choice: int
    attempt: int

    @property
    def transfer(self) -> TransferId:
        """The id of the hand-off to which the sequence belongs, one for all choices of an attempt."""
        return TransferId(self.request, self.attempt)

    def __str__(self) -> str:
        return f"{self.request.hex()}/{self.choice}/{self.attempt}"


_TRANSFER = struct.Struct(f"<{REQUEST_ID_BYTES}sI")


def pack_transfers(transfers: Iterable[TransferId]) -> bytes:
    """Pack ids for the wire: 16-byte request id and attempt (little-endian uint32) of each, concatenated."""
    return b"".join(_TRANSFER.pack(*transfer) for transfer in transfers)


def unpack_transfers(data: bytes) -> list[TransferId]:
    """Return the ids packed by :func:`pack_transfers`; raises ValueError if ``data`` is not a whole number of ids."""
    if len(data) % _TRANSFER.size:
        raise ValueError(f"{len(data)} bytes are not a whole number of transfer ids")
    return [TransferId(RequestId(request), attempt) for request, attempt in _TRANSFER.iter_unpack(data)]


def new_request_id() -> RequestId:
    """Return 16 random bytes."""
    return RequestId(secrets.token_bytes(REQUEST_ID_BYTES))


def new_incarnation() -> Incarnation:
    """Return 64 random bits as 16 hexadecimal digits."""
    return Incarnation(secrets.token_hex(8))


def sequence_holder(sequence: SequenceId) -> Holder:
    """Return the holder of the blocks of a sequence in the planner."""
    return Holder(f"seq:{sequence}")


def transfer_holder(transfer: TransferId) -> Holder:
    """Return the holder of blocks that a hand-off (or a link trial) reads or writes."""
    return Holder(f"xfer:{transfer}")


def step_holder(number: int) -> Holder:
    """The holder of blocks whose sequence has left while launched steps may still touch them."""
    return Holder(f"step:{number}")


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Pack token ids for the wire, as little-endian uint32."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """Return the ids packed by :func:`pack_tokens`; raises ValueError if ``data`` is not a whole number of tokens."""
    return _unpacked(data).tolist()


def max_token(*packed: bytes) -> int:
    """Return the largest token id in these packed arrays, -1 if all are empty. Raises ValueError if one of them is not
    a whole number of tokens."""
    return max((max(_unpacked(tokens)) for tokens in packed if tokens), default=-1)


def _unpacked(data: bytes) -> array[int]:
    unpacked = array("I")
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked
