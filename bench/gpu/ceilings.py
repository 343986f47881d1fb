"""Limits of the card, measured in the same run as what is compared with them.

Values are random: a GPU multiplies and moves zeros with less power, therefore faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.gpu.timing import seconds_per_call

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Ceilings:
    """``copy_bytes_per_s``: bytes read and written by a copy within the device's memory. ``flops_per_s``: operations of
    a large product of bfloat16 matrices (float32 on a CPU). ``to_host_bytes_per_s`` and ``from_host_bytes_per_s``: the
    link to pinned host memory."""

    copy_bytes_per_s: float
    flops_per_s: float
    to_host_bytes_per_s: float
    from_host_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is copied and multiplied."""

    copy_bytes: int = 4096 * MIB
    square: int = 8192
    link_bytes: int = 512 * MIB


TINY = Sizes(4 * MIB, 128, MIB)


def measure(device: torch.device, sizes: Sizes) -> Ceilings:
    """Measure ``device``; medians of several calls."""
    source = _random_bytes(sizes.copy_bytes, device)
    target = torch.empty_like(source)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(sizes.square, sizes.square, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    link = source[: sizes.link_bytes]
    host = torch.empty(link.shape, dtype=link.dtype, pin_memory=device.type == "cuda")
    host.copy_(link)

    def rate(work: float, call: Callable[[], object]) -> float:
        return work / statistics.median(seconds_per_call(call, device))

    return Ceilings(
        copy_bytes_per_s=rate(2 * source.nbytes, lambda: target.copy_(source)),
        flops_per_s=rate(2.0 * sizes.square**3, lambda: torch.mm(left, right, out=product)),
        to_host_bytes_per_s=rate(link.nbytes, lambda: host.copy_(link, non_blocking=True)),
        from_host_bytes_per_s=rate(link.nbytes, lambda: link.copy_(host, non_blocking=True)),
    )


def _random_bytes(count: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)
