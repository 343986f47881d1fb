"""Proofs by which the two workers of a hand-off authenticate each other over an unencrypted connection.

The coordinator sends both the same token over the control channel. The token itself never travels between them; a
BLAKE2b hash (RFC 7693) keyed with it does, over the transfer and the kind of message. A process that only knows
addresses can impersonate neither of them. The hash in a Commit also covers the whole message, so that a process that
has merely read their messages cannot forge one.
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
    """Return the 16-byte proof for ``message`` of ``transfer`` with content ``said``; ``token`` has at most 64
    bytes."""
    hashed = transfer.request + struct.pack("<Q", transfer.attempt) + message.encode() + said
    return hashlib.blake2b(hashed, key=token, digest_size=PROOF_BYTES).digest()


def proves(shown: bytes, token: bytes, transfer: TransferId, message: _Shown, said: bytes = b"") -> bool:
    """Return whether ``shown`` is that proof, in constant time."""
    return hmac.compare_digest(shown, proof(token, transfer, message, said))


def proven(commit: Commit, token: bytes) -> Commit:
    """Return ``commit`` with its proof: the sender holds ``token`` and sent exactly this content."""
    shown = proof(token, TransferId(commit.request, commit.attempt), "commit", _said(commit))
    return msgspec.structs.replace(commit, proof=shown)


def is_proven(commit: Commit, token: bytes) -> bool:
    """Return whether ``commit`` carries a valid proof."""
    return proves(commit.proof, token, TransferId(commit.request, commit.attempt), "commit", _said(commit))


def _said(commit: Commit) -> bytes:
    return encode(msgspec.structs.replace(commit, proof=b""))
