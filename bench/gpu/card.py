"""The first stage: what the card is and what it can do at best."""

from __future__ import annotations

from dataclasses import asdict

import torch

from bench.goals.figures import Row
from bench.gpu.ceilings import TINY, Sizes, measure
from bench.gpu.stages import Setting


def ceilings(setting: Setting) -> list[Row]:
    """Return the limits as rows without targets; the first row's ``detail`` holds them for later stages."""
    found = measure(torch.device(setting.device), TINY if setting.dry else Sizes())
    return [
        Row("", "copy within device memory, bytes read and written", "GB/s", found.copy_bytes_per_s / 1e9, (),
            detail=asdict(found)),
        Row("", "product of large matrices", "TFLOP/s", found.flops_per_s / 1e12, ()),
        Row("", "copy to pinned host memory", "GB/s", found.to_host_bytes_per_s / 1e9, ()),
        Row("", "copy from pinned host memory", "GB/s", found.from_host_bytes_per_s / 1e9, ()),
    ]  # fmt: skip
