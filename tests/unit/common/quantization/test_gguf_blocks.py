"""Blocks of GGUF tensors, exactly as the gguf package dequantizes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from common.quantization.floats import power_of_two
from common.quantization.gguf_blocks import READERS, is_expanded, numbers_of, size_of, weight_of

HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
    "IQ3_S": (0,), "IQ2_XXS": (0,), "IQ1_S": (0,), "TQ2_0": (64,),
}  # fmt: skip
"""Where the blocks of a type have float16 numbers, which must be finite."""
COMPACT = {
    "Q4_0": 4.5, "Q4_1": 5, "Q5_0": 8.5, "Q5_1": 9, "Q8_0": 8.5, "Q2_K": 5.125, "Q3_K": 4.5625, "Q4_K": 4.625,
    "Q5_K": 8.625, "Q6_K": 8.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "MXFP4": 4.5,
}  # fmt: skip
"""Bits per weight that a type takes in memory."""


def blocks_of(name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return random blocks, uint8 [rows, bytes per row]."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for at in HALVES[name]:
        halves = (random.standard_normal((rows, columns // block)) * 0.01).astype(np.float16)
        blocks[:, :, at : at + 2] = halves[..., None].view(np.uint8)
    if name == "MXFP4":
        blocks[:, :, 0] = random.integers(90, 140, (rows, columns // block))  # exponents, not to overflow
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("columns", [256, 768])
def test_weights_are_exact(name: str, columns: int) -> None:
    kind = GGMLQuantizationType[name]
    blocks = blocks_of(name, 5, columns, columns)
    weight = weight_of(int(kind), torch.from_numpy(blocks).flatten(), (5, columns))
    assert weight.shape == (5, columns) and weight.source == name
    assert torch.equal(weight.dequantize(), torch.from_numpy(dequantize(blocks, kind)).view(5, columns))
    assert weight.nbytes - (64 if weight.table is not None else 0) == COMPACT[name] * 5 * columns / 8
    assert size_of(int(kind), (5, columns)) == blocks.nbytes
    assert torch.equal(numbers_of(int(kind), torch.from_numpy(blocks), (5, columns)), weight.dequantize())


@pytest.mark.parametrize("name", READERS)
def test_no_code_is_above_the_bound(name: str) -> None:
    weight = weight_of(int(GGMLQuantizationType[name]), torch.from_numpy(blocks_of(name, 64, 256)).flatten(), (64, 256))
    high = int(weight.codes.max()) if weight.bits == 8 else int((weight.codes >> 4).max())
    assert high <= weight.most <= {"Q2_K": 3, "Q3_K": 7}.get(name, high)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_values_that_the_package_rounds(name: str) -> None:
    kind = GGMLQuantizationType[name]
    values = np.random.default_rng(3).standard_normal((7, 96)).astype(np.float32)
    blocks = quantize(values, kind)
    found = weight_of(int(kind), torch.from_numpy(blocks).flatten(), (7, 96)).dequantize().numpy()
    assert np.array_equal(found, dequantize(blocks, kind))
    assert np.abs(found - values).max() < np.abs(values).max() / (100 if name == "Q8_0" else 7)


@pytest.mark.parametrize("name", ["IQ3_S", "IQ2_XXS", "IQ1_S", "TQ2_0"])
def test_other_types_are_rounded_to_8_bits(name: str) -> None:
    kind = GGMLQuantizationType[name]
    blocks = blocks_of(name, 4, 512)
    weight = weight_of(int(kind), torch.from_numpy(blocks).flatten(), (4, 512))
    assert is_expanded(int(kind)) and weight.bits == 8 and weight.source == f"{name}, expanded to 8 bits"
    exact = torch.from_numpy(dequantize(blocks, kind)).view(4, 16, 32)
    step = exact.abs().amax(2, keepdim=True) / 127
    assert bool(((weight.dequantize().view_as(exact) - exact).abs() <= step * 0.51 + 1e-7).all())


def test_all_scales_of_mxfp4() -> None:
    exponents = torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor([2.0 ** (at - 128) for at in range(256)], dtype=torch.float64)
    assert torch.equal(power_of_two(exponents).double(), expected)


def test_scales_that_are_no_numbers_are_errors() -> None:
    blocks = blocks_of("Q4_K", 2, 256)
    blocks[1, 2:4] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="not finite"):
        weight_of(int(GGMLQuantizationType.Q4_K), torch.from_numpy(blocks).flatten(), (2, 256))


def test_types_of_intermediate_results_are_errors() -> None:
    kind = int(GGMLQuantizationType.Q8_K)
    with pytest.raises(ValueError, match="Q8_K are not read"):
        weight_of(kind, torch.zeros(292, dtype=torch.uint8), (1, 256))
    with pytest.raises(ValueError, match="Q8_K are not read"):
        numbers_of(kind, torch.zeros(292, dtype=torch.uint8), (1, 256))


def test_plain_numbers_keep_their_type() -> None:
    for kind, dtype in ((0, torch.float32), (1, torch.float16), (30, torch.bfloat16)):
        values = torch.randn(3, 4).to(dtype)
        found = numbers_of(kind, values.view(torch.uint8).flatten(), (3, 4))
        assert found.dtype == dtype and torch.equal(found, values)
