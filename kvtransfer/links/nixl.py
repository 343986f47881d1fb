"""The link over NIXL and UCX: the receiver reads the sender's pool one-sidedly, on this host or over a network.

As on one host the message says which blocks, and the receiver pulls as :mod:`kvtransfer.links.pull` says: generations
before and after, checksum over its own copy. What it reads lands in a buffer of its own that UCX has registered, never
in its pool. NIXL is optional (the extra ``nixl``). UCX neither encrypts nor limits its peers to reading, so this link
is for networks and workers that trust each other.
"""

from __future__ import annotations

import importlib
import struct
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import StartError, WireError
from common.ids import Incarnation
from common.kv.convert import Bytes
from common.kv.layout import KvLayout
from common.kv.memory import BlockArray, KvMemory

NAME = "nixl"
CONNECT_S, READ_S = 2.0, 0.5
"""A read that takes longer will never end: the first one, which connects, and all others, which take about a ms."""
_LANDING_BYTES = 4 << 20
_ADDRESSES = struct.Struct("<QQ")
"""Where the sender's process has its blocks and its generation words."""
_BACKEND = "UCX"


def _agent(name: str) -> Any:
    """A NIXL agent with UCX, and a thread (not Python's) that serves its peers meanwhile; StartError without NIXL."""
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        raise StartError(
            "KV cannot travel over NIXL", f"its Python package is missing ({error})", "pip install 'tandem[nixl]'"
        ) from error
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=[_BACKEND]))
    if _BACKEND not in agent.backends:
        raise StartError("KV cannot travel over NIXL", "it has no UCX plugin", "use another --kv-transport")
    return agent


def _registered(agent: Any, *arrays: npt.NDArray[Any]) -> Any:
    return agent.register_memory([(each.ctypes.data, each.nbytes, 0, "") for each in arrays], "DRAM", [_BACKEND])


class NixlDoor:
    """The sending side: ``memory`` is registered, and ``announcement`` lets a receiver read it."""

    def __init__(self, memory: KvMemory, owner: Incarnation) -> None:
        self._agent = _agent(owner)
        self._registration = _registered(self._agent, memory.raw, memory.generations)
        addresses = _ADDRESSES.pack(memory.raw.ctypes.data, memory.generations.ctypes.data)
        self.announcement: bytes = addresses + self._agent.get_agent_metadata()

    def close(self) -> None:
        self._agent.deregister_memory(self._registration, [_BACKEND])
        del self._agent


class NixlReader:
    """The receiving side of one process: reads of the pools of any number of senders, one at a time."""

    def __init__(self, owner: Incarnation) -> None:
        self._agent = _agent(owner)
        self._landing: Bytes = np.empty(0, np.uint8)
        self._registration: Any = None
        self._abandoned: list[Bytes] = []
        """Where a read may still write that was given up: never used again."""

    def reach(self, owner: Incarnation, announcement: bytes, layout: KvLayout, blocks: int) -> NixlPool:
        """The pool that ``owner`` has announced; ValueError if that is no announcement of its own."""
        if len(announcement) <= _ADDRESSES.size:
            raise ValueError("no announcement of a NIXL agent")
        raw, generations = _ADDRESSES.unpack_from(announcement)
        try:
            peer = self._agent.add_remote_agent(announcement[_ADDRESSES.size :])
        except Exception as error:  # NIXL has exceptions of its own for each status
            raise ValueError(f"not the metadata of a NIXL agent: {error!r}") from error
        if peer not in (owner, owner.encode()):
            self._agent.remove_remote_agent(peer)
            raise ValueError(f"the metadata of NIXL agent {peer!r}, sent by {owner}")
        return NixlPool(self, peer, layout, blocks, raw, generations)

    def forget(self, peer: Any) -> None:
        self._agent.remove_remote_agent(peer)

    def fetch(self, peer: Any, addresses: npt.NDArray[np.uint64], size: int, patience_s: float) -> Bytes:
        """``size`` bytes from each of the ``addresses`` of ``peer``, uint8 [len(addresses) * size], valid until the
        next call; WireError if they cannot be had."""
        landing = self._room(len(addresses) * size)
        local = self._pieces(landing.ctypes.data + np.arange(len(addresses), dtype=np.uint64) * np.uint64(size), size)
        try:
            read = self._agent.initialize_xfer("READ", local, self._pieces(addresses, size), peer, b"", [_BACKEND])
            state, until = self._agent.transfer(read), time.monotonic() + patience_s
            while state == "PROC" and time.monotonic() < until:
                state = self._agent.check_xfer_state(read)
            if state != "DONE":
                self._abandon()
                raise WireError(f"the sender's pool cannot be read ({state})")
            self._agent.release_xfer_handle(read)
        except WireError:
            raise
        except Exception as error:  # NIXL has exceptions of its own for each status
            self._abandon()
            raise WireError(f"the sender's pool cannot be read: {error!r}") from error
        return landing

    def _pieces(self, addresses: npt.NDArray[np.uint64], size: int) -> Any:
        rows = np.zeros((len(addresses), 3), np.uint64)
        rows[:, 0], rows[:, 1] = addresses, size
        return self._agent.get_xfer_descs(rows, "DRAM")

    def _room(self, size: int) -> Bytes:
        if size > len(self._landing):
            if self._registration is not None:
                self._agent.deregister_memory(self._registration, [_BACKEND])
            self._landing = np.empty(max(_LANDING_BYTES, 1 << (size - 1).bit_length()), np.uint8)
            self._registration = _registered(self._agent, self._landing)
        return self._landing[:size]

    def _abandon(self) -> None:
        self._abandoned.append(self._landing)
        self._landing, self._registration = np.empty(0, np.uint8), None

    def close(self) -> None:
        if self._registration is not None:
            self._agent.deregister_memory(self._registration, [_BACKEND])
        del self._agent


class NixlPool:
    """One sender's pool, read where it lies. After one failed read nothing more is tried: it must be reached anew."""

    def __init__(
        self, reader: NixlReader, peer: Any, layout: KvLayout, blocks: int, raw: int, generations: int
    ) -> None:
        self.layout, self.blocks = layout, blocks
        self._reader, self._peer, self._raw, self._generations = reader, peer, raw, generations
        self._patience_s = CONNECT_S
        self._why_lost = ""

    @property
    def lost(self) -> bool:
        return bool(self._why_lost)

    def generations_of(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        return self._fetch(self._generations, ids.astype(np.uint64) * np.uint64(8), 8).view(np.uint64).copy()

    def read(self, table: npt.NDArray[np.int64], tokens: range, layers: range) -> Bytes:
        """Fetches these layers of the whole blocks, and gives what was asked for of them."""
        layout = self.layout
        part = KvLayout(layout.layers[layers.start : layers.stop], layout.dtype, layout.block_size, layout.head_shards)
        shards = np.arange(layout.head_shards, dtype=np.uint64) * np.uint64(layout.shard_bytes)
        places = (table.astype(np.uint64) * np.uint64(layout.block_bytes))[:, None] + shards
        first = self._raw + layout.layer_offsets[layers.start]
        landed = self._fetch(first, places.reshape(-1), part.shard_bytes)
        blocks = BlockArray(part, landed.reshape(len(table), part.block_bytes))
        return blocks.read(np.arange(len(table)), tokens, range(len(part.layers)))

    def _fetch(self, start: int, offsets: npt.NDArray[np.uint64], size: int) -> Bytes:
        if self._why_lost:
            raise WireError(self._why_lost)
        try:
            landed = self._reader.fetch(self._peer, offsets + np.uint64(start), size, self._patience_s)
        except WireError as error:
            self._why_lost = str(error)
            raise
        self._patience_s = READ_S
        return landed

    def close(self) -> None:
        self._reader.forget(self._peer)
