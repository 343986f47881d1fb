"""The prefix index: maps prefixes of tokens to the computed blocks that hold their KV.

Pure. A prefix is identified by a chain of BLAKE2b hashes over fixed steps of 16 tokens. Its root contains the cache
salt, the model's fingerprint and the element type in which the KV was computed (not the one in which it is stored).
Equal keys mean equal tokens up to there, for the same user and model, with KV of the same arithmetic. The step does not
depend on the block size, so workers with different block sizes announce comparable keys. The hash is cryptographic
because a collision would expose one user's KV to another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from common.core.ids import BlockId, pack_tokens
from common.kv.layout import CHAIN_STEP, KvDtype

ChainKey = bytes
KEY_BYTES = 16
_STEP_BYTES = 4 * CHAIN_STEP


def chain_root(cache_salt: str, model_fingerprint: str, computed_in: KvDtype) -> ChainKey:
    """Return the key before the first token. Its parts are length-prefixed, so that different parts never give the
    same bytes."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (cache_salt, model_fingerprint, computed_in)]
    text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(text, digest_size=KEY_BYTES).digest()


def extend_chain(root: ChainKey, chain: list[ChainKey], tokens: Sequence[int]) -> list[ChainKey]:
    """Append to ``chain`` the keys of all further full steps of ``tokens`` (the whole sequence); return ``chain``."""
    previous = chain[-1] if chain else root
    packed = pack_tokens(tokens[len(chain) * CHAIN_STEP : len(tokens) // CHAIN_STEP * CHAIN_STEP])
    for at in range(0, len(packed), _STEP_BYTES):
        previous = _next_key(previous, packed[at : at + _STEP_BYTES])
        chain.append(previous)
    return chain


def _next_key(previous: ChainKey, packed: bytes) -> ChainKey:
    return hashlib.blake2b(packed, digest_size=KEY_BYTES, key=previous).digest()


class Chain(Sequence[ChainKey]):
    """The chain of all full steps of ``packed`` tokens (little-endian uint32).

    Keys are computed on first access: a cache lookup stops at the first unknown key, which for most prompts is the
    first.
    """

    __slots__ = ("_keys", "_packed", "_root")

    def __init__(self, root: ChainKey, packed: bytes) -> None:
        self._root, self._packed = root, packed
        self._keys: list[ChainKey] = []

    def __len__(self) -> int:
        return len(self._packed) // _STEP_BYTES

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        wanted, keys = range(len(self))[index], self._keys  # IndexError beyond the last
        while (at := len(keys)) <= wanted:
            step = self._packed[at * _STEP_BYTES : (at + 1) * _STEP_BYTES]
            keys.append(_next_key(keys[-1] if keys else self._root, step))
        return keys[wanted]


class PrefixIndex:
    """Maps the chain key at the end of a full block to the block. The pool's ``cache`` holder keeps the block alive,
    not the index.

    Changes are collected for announcements to the coordinator (:meth:`take_changes`).
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._steps = block_size // CHAIN_STEP
        self._block_of: dict[ChainKey, BlockId] = {}
        self._key_of: dict[BlockId, ChainKey] = {}
        self._added: list[ChainKey] = []
        self._removed: list[ChainKey] = []

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, chain: Sequence[ChainKey], limit_tokens: int) -> list[BlockId]:
        """Return the blocks of the longest known prefix with at most ``limit_tokens`` tokens (rounded down to
        blocks)."""
        blocks: list[BlockId] = []
        for end in range(self._steps, len(chain) + 1, self._steps):
            block = self._block_of.get(chain[end - 1])
            if block is None or end * CHAIN_STEP > limit_tokens:
                break
            blocks.append(block)
        return blocks

    def add(self, chain: Sequence[ChainKey], blocks: Sequence[BlockId], first: int, last: int) -> list[BlockId]:
        """Add full blocks ``[first, last)`` of a sequence to the index; return those whose prefix was not yet known."""
        fresh: list[BlockId] = []
        for index in range(first, last):
            key, block = chain[(index + 1) * self._steps - 1], blocks[index]
            if key not in self._block_of and block not in self._key_of:
                self._block_of[key], self._key_of[block] = block, key
                self._added.append(key)
                fresh.append(block)
        return fresh

    def forget(self, block: BlockId) -> None:
        """Remove ``block``, which the pool evicts."""
        key = self._key_of.pop(block)
        del self._block_of[key]
        self._removed.append(key)

    def take_changes(self) -> tuple[list[ChainKey], list[ChainKey]]:
        """Return the keys added and the keys removed since the last call; a key appears once, by its final state."""
        if not self._added and not self._removed:  # the usual case; called after each turn of a worker's loop
            return [], []
        added = [key for key in dict.fromkeys(self._added) if key in self._block_of]
        removed = [key for key in dict.fromkeys(self._removed) if key not in self._block_of]
        self._added, self._removed = [], []
        return added, removed

    def announce_all(self) -> None:
        """Make the next :meth:`take_changes` return every key, for a coordinator that knows none."""
        self._added, self._removed = list(self._block_of), []
