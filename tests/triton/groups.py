"""Compare products with weights in groups with torch's, for every kind of group:
``TRITON_INTERPRET=1 python -m tests.triton.groups [--sample] [--device cuda]``."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch

from common.kernels import cpu
from common.kernels.triton.groups import multiply
from common.model import compact
from common.model.compact import CompactLinear
from common.quantization.weight import QuantizedWeight
from tests.triton.interpreter import patch_language_once

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


class Format(NamedTuple):
    """What a weight in groups consists of; ``most`` bounds its codes."""

    bits: Any
    group: int
    coding: Any = "int"
    zero: int = 0
    zeros: bool = False
    minima: bool = False
    subs: bool = False
    span: int = 1
    order: bool = False
    scales: torch.dtype = FLOAT16
    most: int = 255


FORMATS = {
    "Q4_0": Format(4, 32, zero=8),
    "Q4_1": Format(4, 32, minima=True),
    "Q8_0": Format(8, 32, zero=128),
    "Q5_1": Format(8, 32, minima=True, most=31),
    "Q4_K": Format(4, 32, minima=True, subs=True, span=8),
    "Q6_K": Format(8, 16, zero=32, subs=True, span=16, most=63),
    "Q2_K": Format(4, 16, minima=True, subs=True, span=16),
    "GPTQ": Format(4, 128, zeros=True, order=True),
    "AWQ": Format(4, 64, zeros=True),
    "int8": Format(8, 64, zero=128, scales=BFLOAT16),
    "fp8": Format(8, 128, "e4m3", scales=FLOAT32),
    "MXFP4": Format(4, 32, "table", scales=BFLOAT16),
}
ROWS, OUT, IN = (1, 17, 70), (8, 70), 512
PADDED = 500
"""A width that fills no group, for formats without minima."""
TOLERANCE = {FLOAT32: 2e-6, BFLOAT16: 2**-7, FLOAT16: 2**-10}
"""Accepted difference, relative to the sum of the products' magnitudes."""


class Case(NamedTuple):
    name: str
    rows: int
    out: int
    width: int
    dtype: torch.dtype
    bias: bool


def weight_of(form: Format, out: int, width: int, where: str = "cpu") -> QuantizedWeight:
    """Return a random weight [out, width]."""
    padded = -(-width // (form.group * form.span)) * form.group * form.span
    groups = padded // form.group
    codes = torch.randint(0, min(form.most, 2**form.bits - 1) + 1, (out, padded), dtype=torch.uint8)
    if form.bits == 4:
        codes = torch.randint(0, 256, (out, padded // 2), dtype=torch.uint8)
    if form.coding == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    coarse = (out, groups // form.span)
    absent: dict[str, Any] = {}
    if form.zeros:
        absent["zeros"] = torch.randint(0, 16, (out, groups), dtype=torch.uint8)
    if form.subs:
        absent["sub_scales"] = torch.randint(-32, 64, (out, groups), dtype=torch.int8)
    if form.minima:
        absent["minima"] = -torch.rand(coarse).to(form.scales)
    if form.minima and form.subs:
        absent["sub_minima"] = torch.randint(0, 64, (out, groups), dtype=torch.uint8)
    if form.order:
        absent["order"] = torch.randperm(padded, dtype=torch.int32)
    if form.coding == "table":
        absent["table"] = torch.randn(16)
    tensors = {"codes": codes, "scales": (0.05 + torch.rand(coarse)).to(form.scales), **absent}
    return QuantizedWeight(
        (out, width), form.bits, form.group, coding=form.coding, zero=form.zero, span=form.span, most=form.most,
        **{name: tensor.to(where) for name, tensor in tensors.items()},
    )  # fmt: skip


def cases(sample: bool) -> list[Case]:
    """Return all cases, or of each format a few."""
    found = []
    for name, form in FORMATS.items():
        widths = (IN,) if form.minima or form.span > 1 or form.order else (IN, PADDED)
        grid = itertools.product(ROWS, OUT, widths, TOLERANCE, (False, True))
        found += [Case(name, *each) for each in grid]
    return found[::11] if sample else found


def error_of(case: Case, device: str) -> float:
    """Return the largest difference from the product with the dequantized weight, as a part of what is accepted."""
    torch.manual_seed(0)
    weight = weight_of(FORMATS[case.name], case.out, case.width, device)
    x = torch.randn(case.rows, case.width).to(device, case.dtype)
    bias = torch.randn(case.out).to(device, case.dtype) if case.bias else None
    found = multiply(x, weight, bias).double()
    values = weight.dequantize(case.dtype).double()
    expected = x.double() @ values.T
    size = x.double().abs() @ values.abs().T
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    return float(((found - expected).abs() / (TOLERANCE[case.dtype] * size)).max())


def wrong_of(chosen: Sequence[Case], device: str) -> int:
    """Return how many cases are wrong, and print them."""
    wrong = 0
    for case in chosen:
        if not (error := error_of(case, device)) <= 1:
            print(f"{case}: {error:.3g} times the tolerance")
            wrong += 1
    return wrong


def check_layers(device: str) -> int:
    """Return how many layers do not compute with the kernel what they compute with torch."""
    torch.manual_seed(0)
    gate, up = (weight_of(FORMATS[name], 24, IN, device) for name in ("Q4_K", "Q6_K"))
    x = torch.randn(2, 3, IN, device=device) / 64
    with mock.patch.object(cpu, "library", return_value=None):
        layers = (
            CompactLinear(gate, torch.randn(24, device=device), FLOAT32, exact=True),
            CompactLinear.joined([gate, up], [None, None], FLOAT32, exact=True, activation="silu"),
        )
        found = [layer(x) for layer in layers]
        with mock.patch.object(compact, "_has_triton", return_value=False):
            expected = [layer(x) for layer in layers]
    pairs = list(zip(found, expected, strict=True))
    same = sum(torch.equal(one, other) for one, other in pairs)  # torch adds up in another order
    return same + sum(bool((one - other).abs().max() > 1e-5 * other.abs().max()) for one, other in pairs)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.device == "cpu":
        patch_language_once()
    chosen = cases(options.sample)
    if layers := check_layers(options.device):
        print(f"{layers} layers do not use the kernel, or use it wrongly")
    wrong = layers + wrong_of(chosen, options.device)
    print(f"{len(chosen)} cases, {wrong} wrong")
    return 1 if wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
