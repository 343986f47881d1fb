"""The descriptions that the two workers of a KV hand-off receive of each other."""

from __future__ import annotations

import secrets

from common.net.messages import Peer
from coordinator.cluster.registry import WorkerHandle

TOKEN_BYTES = 16
"""Bytes of the secret that both ends of a hand-off receive, with which they authenticate each other."""


def introduce(prefill: WorkerHandle, decode: WorkerHandle) -> tuple[Peer, Peer]:
    """Return the descriptions of ``prefill`` (for decode) and of ``decode`` (for prefill) for one hand-off, with a new
    common secret."""
    token = secrets.token_bytes(TOKEN_BYTES)
    return _peer(prefill, token), _peer(decode, token)


def _peer(worker: WorkerHandle, token: bytes) -> Peer:
    hello = worker.hello
    return Peer(hello.name, hello.incarnation, hello.data_address, hello.host_id, hello.dtype, token)
