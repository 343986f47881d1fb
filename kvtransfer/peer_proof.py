"""How the two ends of a hand-off show each other, in the open, that the coordinator has brought them together.

Both were told the same token over the control channel. It never travels between them: what does is a keyed BLAKE2b hash
(RFC 7693) of it, the transfer and the direction: neither end can be played by somebody who only knows addresses. The
hash in a Commit is over all that it says, so that what somebody says who has only read the others' messages is not
accepted.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Literal

import msgspec

from common.core.ids import TransferId
from common.net.messages import Commit
from common.net.wire import encode

PROOF_BYTES = 16
_Shown = Literal["open", "grant", "commit"]


def proof(token: bytes, transfer: TransferId, message: _Shown, said: bytes = b"") -> bytes:
    """What ``message`` of ``transfer`` carries, which says ``said`` besides; 16 bytes. ``token`` has at most 64."""
    hashed = transfer.request + struct.pack("<Q", transfer.attempt) + message.encode() + said
    return hashlib.blake2b(hashed, key=token, digest_size=PROOF_BYTES).digest()


def proves(shown: bytes, token: bytes, transfer: TransferId, message: _Shown, said: bytes = b"") -> bool:
    """Whether ``shown`` is that proof; takes the same time for every wrong one."""
    return hmac.compare_digest(shown, proof(token, transfer, message, said))


def proven(commit: Commit, token: bytes) -> Commit:
    """``commit`` with the proof that it comes from who holds ``token``, and says what it said there."""
    shown = proof(token, TransferId(commit.request, commit.attempt), "commit", _said(commit))
    return msgspec.structs.replace(commit, proof=shown)


def is_proven(commit: Commit, token: bytes) -> bool:
    """Whether ``commit`` carries that proof."""
    return proves(commit.proof, token, TransferId(commit.request, commit.attempt), "commit", _said(commit))


def _said(commit: Commit) -> bytes:
    return encode(msgspec.structs.replace(commit, proof=b""))
