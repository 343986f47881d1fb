"""Landing buffers in a GPU's memory, where cells are hashed before they are sent or written into blocks."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from common.kv.storage.base import Table
from common.kv.storage.cuda import CudaBlocks, CudaMemory
from common.kv.storage.device_calls import HASH_WORD_BYTES, DeviceBuffer, DeviceCalls, Event, word_of
from kvtransfer.links.stages import Staging, ended, writing_ended


@dataclass(slots=True)
class Landing:
    """A lent buffer of device memory, with a pinned word for the hash of what is in it. ``running`` is an event behind
    the last work on either, None once it has ended."""

    buffer: DeviceBuffer
    word: DeviceBuffer
    running: Event | None = None


class LandingBuffers:
    """The landing buffers of one worker."""

    def __init__(self, calls: DeviceCalls) -> None:
        self.calls = calls
        self._buffers = Staging(calls, calls.allocate)
        self._words = Staging(calls, calls.host_pin, HASH_WORD_BYTES)

    def __len__(self) -> int:
        return len(self._buffers)

    def lent(self, size: int) -> Generator[None, None, Landing]:
        """Yield until there is a buffer of at least ``size`` bytes, and return it. Raises DeviceFailed."""
        while (landing := self.lend(size)) is None:
            yield
        return landing

    def lend(self, size: int) -> Landing | None:
        """Return a buffer of at least ``size`` bytes, or None if too many are lent. Raises DeviceFailed."""
        if (buffer := self._buffers.lend(size)) is None:
            return None
        word = self._words.lend(HASH_WORD_BYTES)
        assert word is not None, "as many words as buffers are lent, and each is tiny"
        return Landing(buffer, word)

    def give_back(self, landing: Landing) -> None:
        """Take a buffer back; it is used again once its last work has ended."""
        self._buffers.give_back(landing.buffer, landing.running)
        self._words.give_back(landing.word, landing.running)

    def gathered(
        self, landing: Landing, source: CudaBlocks, table: Table, tokens: range, layers: range
    ) -> Generator[None, None, int]:
        """Copy these cells of ``source`` to ``landing`` in canonical form and return the hash of the copy. Raises
        DeviceFailed."""
        source.gather(table, tokens, layers, landing.buffer)
        size = source.layout.range_bytes(layers.start, layers.stop, len(tokens))
        self.calls.hash_async(landing.buffer, size, landing.word)
        landing.running = source.last_read = self.calls.record_event()
        return (yield from self._hash(landing))

    def scattered(
        self, landing: Landing, memory: CudaMemory, table: Table, tokens: range, layers: range, after: Event | None
    ) -> Generator[None]:
        """Copy verified cells from ``landing`` to the blocks of ``table``, once ``after`` has ended. Ends, or is
        closed, when the copy has ended. Raises DeviceFailed."""
        memory.scatter(table, tokens, layers, landing.buffer, after)
        landing.running = self.calls.record_event()
        yield from writing_ended(self.calls, landing.running)
        landing.running = None

    def hashed(self, landing: Landing, size: int) -> Generator[None, None, int]:
        """Return the hash of the first ``size`` bytes of ``landing``. Raises DeviceFailed."""
        self.calls.hash_async(landing.buffer, size, landing.word)
        landing.running = self.calls.record_event()
        return (yield from self._hash(landing))

    def _hash(self, landing: Landing) -> Generator[None, None, int]:
        yield from ended(self.calls, landing.running)
        landing.running = None
        return word_of(landing.word)

    def close(self) -> None:
        """Free all buffers, after waiting for work on them. Raises DeviceFailed if it does not end."""
        self._buffers.close()
        self._words.close()
