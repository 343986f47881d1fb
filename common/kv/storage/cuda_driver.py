"""The driver of NVIDIA GPUs for KV pools and hand-offs: the only module that calls CUDA for them.

Calls libcuda (the CUDA driver API) through ctypes, in the primary context that torch uses too. Memory comes from the
virtual memory management API, whose allocations can be exported as POSIX file descriptors and mapped read-only by
another process; ``cudaIpcMemHandle``, which always maps writable, is not used. Torch is imported only for hashes and
for tensors over the memory. Must not know blocks, layouts or links.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from common.kernels import triton as triton_kernels
from common.kv.device_hash import FIRST, PLACE, SECOND, SHIFTS, WORD_BYTES
from common.kv.pieces import Numbers
from common.kv.storage.device_calls import WAIT_S, DeviceBuffer, DeviceFailed, Event

log = logging.getLogger("tandem.kv")

# from cuda.h
_NOT_READY = 600
_PINNED, _ON_DEVICE, _POSIX_FD = 1, 1, 1
_READ, _READ_WRITE = 1, 3
_NON_BLOCKING, _NO_TIMING = 1, 2
_IN_STREAM_ORDER = 1
_HAS_VMM, _HAS_POSIX_FD = 102, 103
_COPY_PRIORITY = -1
"""Above torch's streams: a copy is short, and a hand-off waits for it."""
_POLL_S = 0.0001
_FEW_PIECES = 8
"""Copies of fewer pieces are left to the copy engines, which take microseconds for each."""
_ALIGNED = 16
"""Addresses and sizes of pieces that a kernel copies are multiples of this."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class _AccessDesc(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class _DeviceArray:
    """Device bytes in the form of the CUDA Array Interface (version 3), which torch wraps without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def _libcuda() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceFailed(f"no CUDA driver: {error}") from error


class CudaDriver:
    """The :class:`DeviceCalls` of GPU ``index`` (as torch counts them, after CUDA_VISIBLE_DEVICES). ``library`` is
    libcuda. ``engine_stream`` returns the handle of the stream on which the engine computes. ``copy_kernel`` is
    :func:`common.kernels.triton.pieces.copy`; None if Triton is not installed. Raises DeviceFailed without a usable
    GPU."""

    group_backend = "nccl"

    def __init__(
        self,
        index: int,
        engine_stream: Callable[[], int],
        library: Any = None,
        copy_kernel: Callable[[Any, int], None] | None = None,
    ) -> None:
        self.name = f"cuda:{index}"
        self._copy_kernel = copy_kernel
        self._pinned: set[tuple[int, int]] = set()
        """First and last address of each piece of pinned memory."""
        self._cuda = library or _libcuda()
        self._engine_stream = engine_stream
        self._call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._device = device.value
        for attribute in (_HAS_VMM, _HAS_POSIX_FD):
            if not self._attribute(attribute):
                raise DeviceFailed(f"{self.name} cannot share memory between processes (device attribute {attribute})")
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._context = context
        self._call("cuCtxSetCurrent", context)
        stream = ctypes.c_void_p()
        self._call("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, _COPY_PRIORITY)
        self._stream = stream
        self._batch = getattr(self._cuda, "cuMemcpyBatchAsync_v2", None)  # since CUDA 13.0
        prop, granularity = self._prop(), ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(prop), 0)
        self._granularity = granularity.value

    # -- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, size: int) -> DeviceBuffer:
        whole = -(-size // self._granularity) * self._granularity
        handle, prop = ctypes.c_ulonglong(), self._prop()
        self._call(
            "cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(whole), ctypes.byref(prop), ctypes.c_ulonglong()
        )
        return self._mapped(handle, whole, _READ_WRITE)

    def export(self, memory: DeviceBuffer) -> int:
        descriptor = ctypes.c_int(-1)
        self._call(
            "cuMemExportToShareableHandle", ctypes.byref(descriptor), memory.handle, _POSIX_FD, ctypes.c_ulonglong()
        )
        return descriptor.value

    def attach(self, descriptor: int, size: int, *, writable: bool = False) -> DeviceBuffer:
        handle = ctypes.c_ulonglong()
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), _POSIX_FD)
        return self._mapped(handle, size, _READ_WRITE if writable else _READ)

    def host_pin(self, size: int) -> DeviceBuffer:
        address = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), 0)
        assert address.value is not None
        array = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address.value))
        self._pinned.add((address.value, address.value + size))
        return DeviceBuffer(address.value, size, array)

    def free(self, memory: DeviceBuffer) -> None:
        if memory.array is not None:
            self._pinned.discard((memory.address, memory.address + memory.size))
            self._call("cuMemFreeHost", ctypes.c_void_p(memory.address))
        else:
            self._call("cuMemUnmap", ctypes.c_ulonglong(memory.address), ctypes.c_size_t(memory.size))
            self._call("cuMemAddressFree", ctypes.c_ulonglong(memory.address), ctypes.c_size_t(memory.size))
            self._call("cuMemRelease", memory.handle)

    def _mapped(self, handle: Any, size: int, access: int) -> DeviceBuffer:
        """Map an allocation that this process may use as ``access`` says. On failure the allocation is released."""
        with contextlib.ExitStack() as undo:
            undo.callback(self._cuda.cuMemRelease, handle)
            address, none, length = ctypes.c_ulonglong(), ctypes.c_ulonglong(), ctypes.c_size_t(size)
            self._call("cuMemAddressReserve", ctypes.byref(address), length, ctypes.c_size_t(), none, none)
            undo.callback(self._cuda.cuMemAddressFree, address, length)
            self._call("cuMemMap", address, length, ctypes.c_size_t(), handle, none)
            undo.callback(self._cuda.cuMemUnmap, address, length)
            grant = _AccessDesc(_Location(_ON_DEVICE, self._device), access)
            self._call("cuMemSetAccess", address, length, ctypes.byref(grant), ctypes.c_size_t(1))
            undo.pop_all()
        return DeviceBuffer(address.value, size, handle=handle)

    def _prop(self) -> _AllocationProp:
        return _AllocationProp(_PINNED, _POSIX_FD, _Location(_ON_DEVICE, self._device))

    # -- work ---------------------------------------------------------------------------------------------------------

    def mark(self) -> Event:
        return self._recorded(ctypes.c_void_p(self._engine_stream()))

    def record_event(self) -> Event:
        return self._recorded(self._stream)

    def copy_async(self, sources: Numbers, targets: Numbers, sizes: Numbers, after: Event | None = None) -> None:
        if after is not None:
            self._call("cuStreamWaitEvent", self._stream, after.handle, 0)
        if self._suits_kernel(sources, targets, sizes):
            self._copy_by_kernel(sources, targets, sizes)
            return
        if self._batch is not None and len(sizes) > 1 and self._copy_at_once(self._batch, sources, targets, sizes):
            return
        copy, stream = self._cuda.cuMemcpyAsync, self._stream
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            if status := copy(ctypes.c_ulonglong(target), ctypes.c_ulonglong(source), ctypes.c_size_t(size), stream):
                raise self._failed("cuMemcpyAsync", status)

    def _copy_at_once(self, batch: Any, sources: Numbers, targets: Numbers, sizes: Numbers) -> bool:
        """Copy all pieces by one call of the driver. If it refuses, return False, and do without it from then on."""
        attributes = _CopyAttributes(_IN_STREAM_ORDER, _Location(), _Location(), 0)
        first = ctypes.c_size_t(0)  # from piece 0 on, these attributes hold
        columns = [np.ascontiguousarray(each, np.uint64) for each in (targets, sources, sizes)]
        pointers = [each.ctypes.data_as(ctypes.c_void_p) for each in columns]
        status = batch(
            *pointers, ctypes.c_size_t(len(sizes)), ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1),
            self._stream,
        )  # fmt: skip
        if status:
            log.warning("pieces of KV are copied one by one: %s", self._failed("cuMemcpyBatchAsync_v2", status))
            self._batch = None
        return not status

    def _suits_kernel(self, sources: Numbers, targets: Numbers, sizes: Numbers) -> bool:
        """Return whether these pieces are copied by a kernel: many aligned ones within device memory. For host memory
        the copy engines are better, since a kernel would wait for the bus."""
        if len(sizes) < _FEW_PIECES or self._copy_kernel is None:
            return False
        if int(np.bitwise_or.reduce([sources, targets, sizes], axis=None)) % _ALIGNED:
            return False
        return not any(low <= int(side[0]) < high for low, high in self._pinned for side in (sources, targets))

    def _copy_by_kernel(self, sources: Numbers, targets: Numbers, sizes: Numbers) -> None:
        import torch

        assert self._copy_kernel is not None
        try:
            with torch.cuda.stream(torch.cuda.ExternalStream(self._stream.value or 0, device=self.name)):
                columns = torch.from_numpy(np.stack([sources, targets, sizes]))
                pieces = columns.pin_memory().to(self.name, non_blocking=True)
                self._copy_kernel(pieces, int(sizes.max()))
        except RuntimeError as error:
            raise DeviceFailed(f"copy of {len(sizes)} pieces: {error}") from error

    def hash_async(self, memory: DeviceBuffer, size: int, word: DeviceBuffer) -> None:
        import torch

        assert word.array is not None
        try:
            with torch.cuda.stream(torch.cuda.ExternalStream(self._stream.value or 0, device=self.name)):
                total = hashed(self.tensor(memory, size))
                torch.from_numpy(word.array[:WORD_BYTES].view(np.int64)).copy_(total.reshape(1), non_blocking=True)
        except RuntimeError as error:  # such as a lack of memory, which costs the hand-off and not the worker
            raise DeviceFailed(f"hash of {size} bytes: {error}") from error

    def query(self, event: Event) -> bool:
        status = self._cuda.cuEventQuery(event.handle)
        if status not in (0, _NOT_READY):
            raise self._failed("cuEventQuery", status)
        return bool(status == 0)

    def wait(self, event: Event) -> None:
        until = time.monotonic() + WAIT_S
        while not self.query(event):
            if time.monotonic() > until:
                raise DeviceFailed(f"work of {self.name} has not ended within {WAIT_S:g} s")
            time.sleep(_POLL_S)  # the driver's own wait has no time limit

    def tensor(self, memory: DeviceBuffer, size: int) -> Any:
        import torch

        if memory.array is not None:
            return torch.from_numpy(memory.array[:size])
        return torch.as_tensor(_DeviceArray(memory.address, size), device=self.name)

    def close(self) -> None:
        self._call("cuStreamDestroy_v2", self._stream)
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _recorded(self, stream: Any) -> Event:
        event = _CudaEvent(self._cuda)
        self._call("cuEventCreate", ctypes.byref(event.handle), _NO_TIMING)
        self._call("cuEventRecord", event.handle, stream)
        return event

    # -- errors -------------------------------------------------------------------------------------------------------

    def _attribute(self, attribute: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device)
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._cuda, name)(*arguments):
            raise self._failed(name, status)

    def _failed(self, name: str, status: int) -> DeviceFailed:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(status, ctypes.byref(text))
        return DeviceFailed(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


class _CudaEvent:
    """An event that is destroyed with its last reference; the driver waits for pending work by itself."""

    def __init__(self, library: Any) -> None:
        self.handle = ctypes.c_void_p()
        self._cuda = library

    def __del__(self) -> None:
        if self.handle:
            self._cuda.cuEventDestroy_v2(self.handle)


def hashed(data: Any) -> Any:
    """Return :func:`common.kv.device_hash.device_hash` of ``data`` (a tensor of uint8 [n], of any device) as a tensor
    of int64 [], without a synchronization."""
    import torch

    size = data.numel()
    if padding := -size % WORD_BYTES:
        data = torch.cat((data, data.new_zeros(padding)))
    words = data.view(torch.int64) if data.data_ptr() % WORD_BYTES == 0 else data.clone().view(torch.int64)
    places = torch.arange(1, len(words) + 1, dtype=torch.int64, device=data.device)
    mixed = words ^ (places * _signed(PLACE))
    for shift, factor in zip(SHIFTS, (FIRST, SECOND, 1), strict=True):
        upper = (mixed >> shift) & ((1 << (64 - shift)) - 1)  # the shift of int64 repeats the sign
        mixed = (mixed ^ upper) * _signed(factor)
    total = mixed.sum() + _signed(size * PLACE % (1 << 64))
    return torch.where(total == 0, torch.ones_like(total), total)


def _signed(word: int) -> int:
    """Return the int64 with the bits of ``word``."""
    return word - (1 << 64) if word >> 63 else word


def torch_driver(index: int) -> CudaDriver:
    """Open GPU ``index`` with torch's current stream as the engine's. Raises DeviceFailed."""
    import torch

    def engine_stream() -> int:
        return int(torch.cuda.current_stream(index).cuda_stream)

    return CudaDriver(index, engine_stream, copy_kernel=_tried_kernel(torch.device("cuda", index)))


def _tried_kernel(device: Any) -> Callable[[Any, int], None] | None:
    """Return the kernel that copies pieces, compiled here rather than in the first hand-off; None if it does not
    work."""
    import torch

    if triton_kernels.unusable(device.type) is not None:
        return None
    try:
        from common.kernels.triton import pieces

        ends = torch.arange(2 * _ALIGNED, dtype=torch.uint8, device=device)
        columns = [[ends.data_ptr()], [ends.data_ptr() + _ALIGNED], [_ALIGNED]]
        pieces.copy(torch.tensor(columns, device=device), _ALIGNED)
        works = torch.equal(ends[:_ALIGNED], ends[_ALIGNED:])
    except Exception as error:  # the compiler may raise anything
        log.warning("KV is copied without a kernel: %s", error)
        return None
    return pieces.copy if works else None
