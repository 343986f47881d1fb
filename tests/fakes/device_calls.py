"""A GPU for tests, in this process's memory: its work ends only when a test, or ``eager``, says so.

Copies are recorded as jobs (all copies and hashes up to an event) and run when they complete, so that an early reader
sees stale bytes. Jobs may complete in any order, fail, or never complete. Memory is a memfd, so that another process
can attach it as it would attach a GPU's.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.kv.convert import Bytes
from common.kv.device_hash import device_hash
from common.kv.layout import KvLayout
from common.kv.pieces import Numbers
from common.kv.storage.base import Table
from common.kv.storage.cuda import CudaMemory
from common.kv.storage.device_calls import HASH_WORD_BYTES, DeviceBuffer, DeviceFailed
from common.kv.storage.host import BlockArray

LOST, FAILS = "lost", "fails"


@dataclass(eq=False)
class Job:
    """Work up to an event. ``done`` once it has run; ``fault``: it never completes (LOST), or fails (FAILS). Only a
    test completes the engine's ``kernels``."""

    work: list[Callable[[], None]] = field(default_factory=list)
    done: bool = False
    fault: str = ""
    waited: bool = False
    kernels: bool = False

    def run(self) -> None:
        if not self.done:
            for each in self.work:
                each()
            self.done, self.work = True, []


class FakeDevice:
    """The :class:`common.kv.storage.device_calls.DeviceCalls` of a fake GPU. With ``eager``, a job completes when it is
    first queried. ``engine`` is the event of the engine's work that has not ended; None if all has."""

    name, group_backend = "cuda:fake", "gloo"

    def __init__(self, *, eager: bool = True) -> None:
        self.eager = eager
        self.jobs: list[Job] = []
        self.engine: Job | None = None
        self.refuses = ""
        """A reason for which every further copy is refused."""
        self.fault = ""
        """The fault of every further job."""
        self._work: list[Callable[[], None]] = []
        self._memory: dict[int, tuple[mmap.mmap, int]] = {}

    # -- for tests ----------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> list[Job]:
        """The jobs that have not completed, oldest first."""
        return [job for job in self.jobs if not job.done]

    @property
    def allocated(self) -> int:
        """How many pieces of memory have not been freed."""
        return len(self._memory)

    # -- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, size: int) -> DeviceBuffer:
        fd = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return self._mapped(fd, size, mmap.PROT_READ | mmap.PROT_WRITE)[0]

    def export(self, memory: DeviceBuffer) -> int:
        return os.dup(self._memory[memory.address][1])

    def attach(self, descriptor: int, size: int, *, writable: bool = False) -> DeviceBuffer:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            if os.fstat(descriptor).st_size != size:
                raise DeviceFailed("the allocation has another size")
            return self._mapped(os.dup(descriptor), size, protection)[0]
        except OSError as error:
            raise DeviceFailed(str(error)) from error

    def host_pin(self, size: int) -> DeviceBuffer:
        fd = os.memfd_create("fake-pinned", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        buffer, array = self._mapped(fd, size, mmap.PROT_READ | mmap.PROT_WRITE)
        return DeviceBuffer(buffer.address, size, array)

    def free(self, memory: DeviceBuffer) -> None:
        mapping, fd = self._memory.pop(memory.address)
        os.close(fd)
        with contextlib.suppress(BufferError):  # an array over it is still alive, and unmaps it with its end
            mapping.close()

    def _mapped(self, fd: int, size: int, protection: int) -> tuple[DeviceBuffer, Bytes]:
        mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
        array = np.frombuffer(mapping, np.uint8)
        self._memory[array.ctypes.data] = mapping, fd
        return DeviceBuffer(array.ctypes.data, size), array

    def array(self, memory: DeviceBuffer) -> Bytes:
        """Return device memory as uint8 [size], as only a fake can."""
        return np.frombuffer(self._memory[memory.address][0], np.uint8)

    # -- work ---------------------------------------------------------------------------------------------------------

    def mark(self) -> Job:
        return self.engine or Job(done=True)

    def copy_async(self, sources: Numbers, targets: Numbers, sizes: Numbers, after: Any = None) -> None:
        if self.refuses:
            raise DeviceFailed(self.refuses)
        pieces = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))

        def copy() -> None:
            if after is not None:
                assert after.done or self.eager, "a copy runs before the work that it must follow"
                after.run()
            for target, source, size in pieces:
                ctypes.memmove(target, source, size)

        self._work.append(copy)

    def hash_async(self, memory: DeviceBuffer, size: int, word: DeviceBuffer) -> None:
        def write() -> None:
            hashed = device_hash(self.array(memory)[:size])
            ctypes.memmove(word.address, hashed.to_bytes(HASH_WORD_BYTES, "little"), HASH_WORD_BYTES)

        self._work.append(write)

    def record_event(self) -> Job:
        job = Job(self._work, fault=self.fault)
        self._work = []
        self.jobs.append(job)
        return job

    def query(self, event: Job) -> bool:
        if event.fault == FAILS:
            raise DeviceFailed("an illegal memory access was encountered")
        if self.eager and not event.fault and not event.kernels:
            event.run()
        return event.done

    def wait(self, event: Job) -> None:
        event.waited = True
        if event.fault:
            raise DeviceFailed(f"the work {event.fault}")
        event.run()

    def tensor(self, memory: DeviceBuffer, size: int) -> Any:
        import torch

        return torch.from_numpy(self.array(memory)[:size])

    def close(self) -> None: ...


class FakeGpuMemory(CudaMemory):
    """A pool in the memory of a fake GPU, which tests can also read and write at once, as a pool in host memory."""

    def __init__(self, layout: KvLayout, blocks: int, device: FakeDevice | None = None) -> None:
        self.device = device or FakeDevice()
        super().__init__(layout, blocks, self.device)
        whole = self.device.array(self.slab)[: blocks * layout.block_bytes]
        self._array = BlockArray(layout, whole.reshape(blocks, layout.block_bytes))
        self.raw = self._array.raw

    def read(self, table: Table, tokens: range, layers: range) -> Bytes:
        return self._array.read(table, tokens, layers)

    def write(self, table: Table, tokens: range, layers: range, data: Bytes) -> None:
        self._array.write(table, tokens, layers, data)

    def close(self) -> None:
        del self.raw, self._array
        super().close()
        assert not self.device.allocated, "memory of the device, pinned or attached, was not freed"
