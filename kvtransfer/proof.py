"""How the two ends of a hand-off show each other, in the open, that the coordinator has brought them together.

Both were told the same token over the control channel. It never travels between them: what does is a keyed BLAKE2b hash
(RFC 7693) of it, the transfer and the direction: neither end can be played by somebody who only knows addresses.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Literal

from common.ids import TransferId

PROOF_BYTES = 16


def proof(token: bytes, transfer: TransferId, message: Literal["open", "grant"]) -> bytes:
    """What ``message`` of ``transfer`` carries, 16 bytes. ``token`` has at most 64 bytes."""
    said = transfer.request + struct.pack("<Q", transfer.attempt) + message.encode()
    return hashlib.blake2b(said, key=token, digest_size=PROOF_BYTES).digest()


def proves(shown: bytes, token: bytes, transfer: TransferId, message: Literal["open", "grant"]) -> bool:
    """Whether ``shown`` is that proof; takes the same time for every wrong one."""
    return hmac.compare_digest(shown, proof(token, transfer, message))
