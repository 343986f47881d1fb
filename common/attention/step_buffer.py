"""The step's block tables and lengths on the device, at fixed addresses, filled by one upload per step.

All parts lie in one int32 buffer. A part for n rows has a stride of n rounded up to 4, so that parts are aligned to 16
bytes. Tables are stored block by block, so that the part of them that a step needs is a prefix, and only that prefix
is uploaded. The part of the decode rows comes first: for a given number of rows its addresses never change, which is
what a captured CUDA graph needs.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from common.attention.interface import Span
from common.kernels.triton.spans import DecodeRows, PrefillSpans

Ints = npt.NDArray[np.int32]
_LEAST = 1 << 12
"""Integers of the first buffer."""


class StepBuffer:
    """The buffer of one backend on ``device``; blocks have ``block_size`` tokens. What :meth:`fill` returns is valid
    until the next call."""

    def __init__(self, device: torch.device, block_size: int) -> None:
        self._device, self._block_size = device, block_size
        self._capacity, self._is_fixed = 0, False
        self._make(_LEAST)

    def reserve(self, rows: int, blocks: int) -> None:
        """Make room for ``rows`` decode rows of ``blocks`` blocks each. From then on the buffer never moves: a step
        that needs more room is a ValueError."""
        self._make(_stride(rows) * (2 + blocks))
        self._is_fixed = True

    def fill(
        self, decode: Sequence[Span], prefill: Sequence[Span], rows: int | None = None
    ) -> tuple[DecodeRows | None, PrefillSpans | None]:
        """Upload both parts and return them, None for an empty one. With ``rows`` the decode part has so many rows:
        those behind the spans are padding of length 0 that belongs to the step's row of the same index. Raises
        ValueError if ``rows`` is less than the number of decode spans."""
        count = len(decode) if rows is None else rows
        if not count >= len(decode):
            raise ValueError(f"{len(decode)} decode rows do not fit into {count}")
        decode_tables, prefill_tables = self._tables(decode), self._tables(prefill)
        used = _stride(count) * (2 + _widest(decode_tables)) if count else 0
        start, stride = used, _stride(len(prefill) + 1)
        used += stride * (3 + _widest(prefill_tables)) if prefill else 0
        self._make(used)
        host = self._next_host()
        if count:
            self._fill_decode(host, decode, decode_tables, count)
        if prefill:
            self._fill_prefill(host[start:], prefill, prefill_tables)
        self._upload(used)
        buffer = self._buffer
        return (
            _decode_part(buffer, count, _widest(decode_tables)) if count else None,
            _prefill_part(buffer[start:], prefill, _widest(prefill_tables)) if prefill else None,
        )

    def _tables(self, spans: Sequence[Span]) -> list[Ints]:
        """Return the block ids that each span attends to."""
        size = self._block_size
        return [_as_ints(span.blocks)[: -(-span.end // size)] for span in spans]

    def _fill_decode(self, host: Ints, spans: Sequence[Span], tables: Sequence[Ints], count: int) -> None:
        stride, here = _stride(count), len(spans)
        host[:here] = [span.row for span in spans]
        host[here:count] = range(here, count)
        host[stride : stride + here] = [span.end for span in spans]
        host[stride + here : stride + count] = 0
        _fill_tables(host[2 * stride :], stride, tables)

    def _fill_prefill(self, host: Ints, spans: Sequence[Span], tables: Sequence[Ints]) -> None:
        count, stride = len(spans), _stride(len(spans) + 1)
        host[0] = 0
        np.cumsum([span.length for span in spans], out=host[1 : count + 1])
        host[stride : stride + count] = [span.row for span in spans]
        host[2 * stride : 2 * stride + count] = [span.start for span in spans]
        _fill_tables(host[3 * stride :], stride, tables)

    # -- memory -------------------------------------------------------------------------------------------------------

    def _make(self, capacity: int) -> None:
        """Replace the buffers if they have room for fewer than ``capacity`` integers."""
        if capacity <= self._capacity:
            return
        if self._is_fixed:
            raise ValueError(f"a step of {capacity} integers does not fit into the {self._capacity} that graphs have")
        self._capacity = max(capacity, 2 * self._capacity)
        self._buffer = torch.zeros(self._capacity, dtype=torch.int32, device=self._device)
        if self._device.type == "cpu":
            self._hosts = [self._buffer]
        else:
            self._hosts = [torch.zeros(self._capacity, dtype=torch.int32, pin_memory=True) for _ in range(2)]
            self._read = [torch.cuda.Event() for _ in self._hosts]
        self._arrays: list[Ints] = [host.numpy() for host in self._hosts]
        self._turn = 0

    def _next_host(self) -> Ints:
        """Return the host's buffer that is not being uploaded."""
        self._turn = (self._turn + 1) % len(self._hosts)
        if self._device.type != "cpu":
            self._read[self._turn].synchronize()
        return self._arrays[self._turn]

    def _upload(self, used: int) -> None:
        if self._device.type != "cpu":
            self._buffer[:used].copy_(self._hosts[self._turn][:used], non_blocking=True)
            self._read[self._turn].record()


def _stride(rows: int) -> int:
    return -(-rows // 4) * 4


def _as_ints(blocks: Sequence[int]) -> Ints:
    """Return block ids as an array: a view of those that are packed already."""
    if isinstance(blocks, array) and blocks.typecode == "i":
        return np.frombuffer(blocks, np.int32)
    return np.array(blocks, np.int32)


def _widest(tables: Sequence[Ints]) -> int:
    """Return the most blocks of a table; at least 1, because an empty tensor has no address."""
    return max((len(table) for table in tables), default=1)


def _fill_tables(host: Ints, stride: int, tables: Sequence[Ints]) -> None:
    by_block = host[: stride * _widest(tables)].reshape(-1, stride)
    for index, table in enumerate(tables):
        by_block[: len(table), index] = table


def _decode_part(buffer: torch.Tensor, count: int, blocks: int) -> DecodeRows:
    stride = _stride(count)
    tables = buffer[2 * stride : (2 + blocks) * stride].view(blocks, stride)
    return DecodeRows(buffer[:count], buffer[stride : stride + count], tables)


def _prefill_part(buffer: torch.Tensor, spans: Sequence[Span], blocks: int) -> PrefillSpans:
    count, stride = len(spans), _stride(len(spans) + 1)
    lengths = [span.length for span in spans]
    return PrefillSpans(
        buffer[: count + 1],
        buffer[stride : stride + count],
        buffer[2 * stride : 2 * stride + count],
        buffer[3 * stride : (3 + blocks) * stride].view(blocks, stride),
        sum(lengths),
        max(lengths),
    )
