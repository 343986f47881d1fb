"""Rounding to float8 e4m3 (4 bits of exponent, 3 of mantissa, no infinity), the 8-bit type of weights and KV.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), and the OCP 8-bit floating point specification.
"""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest finite number of the type."""

FIRST_WITH_UNITS = (8, 9)
"""Compute capability from which on GPUs convert and multiply float8."""


def lacks_units(device: torch.device) -> str | None:
    """Return why ``device`` is a GPU whose kernels cannot convert float8, in words; None for any other device."""
    if device.type != "cuda" or (found := torch.cuda.get_device_capability(device)) >= FIRST_WITH_UNITS:
        return None
    needed, has = (f"{major}.{minor}" for major, minor in (FIRST_WITH_UNITS, found))
    return f"float8 needs a GPU of compute capability {needed} or later, and this one has {has}"


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` (any shape and float type) rounded to the nearest float8 e4m3, ties to even. What is larger than 448
    in magnitude becomes 448, as on Hopper's converters, whatever torch's own conversion does with it; NaN stays NaN."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)
