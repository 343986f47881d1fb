"""Groups of any size, with the columns in any order, become groups of ours: exactly, or rounded and said so."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from common.quantization.groups import Grouped, regroup
from common.quantization.weight import EXPANDED, GROUPS


@st.composite
def weights(draw: st.DrawFn) -> Grouped:
    columns = draw(st.sampled_from([1, 7, 16, 24, 40, 48, 64, 96, 100, 128, 160, 192, 256]))
    size = draw(st.sampled_from([1, 8, 16, 24, 32, 48, 64, 96, 100, 128, columns]))
    out, bits = draw(st.integers(1, 5)), draw(st.sampled_from([2, 3, 4, 5, 8]))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    groups = -(-columns // size)
    order = draw(st.sampled_from(["", "", "permuted", "uneven", "in order"]))
    group_of = np.arange(columns) // size
    if order == "permuted":
        group_of = random.permutation(group_of)
    elif order == "uneven":
        group_of = random.integers(0, groups, columns)
    zeros = draw(st.sampled_from(["", "equal", "each"]))
    coding = draw(st.sampled_from(["int", "int", "e4m3"])) if bits == 8 and not zeros else "int"
    codes = random.integers(0, 127 if coding == "e4m3" else 1 << bits, (out, columns))
    each = random.integers(0, (1 << bits) + 1, (out, groups))
    return Grouped(
        torch.from_numpy(codes.astype(np.uint8)),
        torch.from_numpy(random.random((out, groups)).astype(np.float16)),
        size, bits, "test", zero=0 if coding == "e4m3" else 1 << bits - 1, coding=coding,
        zeros=None if not zeros else torch.from_numpy(each if zeros == "each" else np.full((out, groups), 3)),
        group_of=torch.from_numpy(group_of) if order else None,
    )  # fmt: skip


def values(weight: Grouped) -> np.ndarray:  # type: ignore[type-arg]
    """The definition, element by element."""
    out, columns = weight.codes.shape
    found = np.zeros((out, columns), np.float32)
    for n in range(out):
        for k in range(columns):
            group = k // weight.size if weight.group_of is None else int(weight.group_of[k])
            code = int(weight.codes[n, k])
            number: float = code - (weight.zero if weight.zeros is None else int(weight.zeros[n, group]))
            if weight.coding == "e4m3":
                exponent, mantissa = code >> 3, code & 7
                number = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8
            found[n, k] = np.float32(weight.scales[n, group]) * np.float32(number)
    return found


@settings(deadline=None, max_examples=200)
@given(weights())
def test_regrouped_weights_are_exact_or_rounded(weight: Grouped) -> None:
    found, expected = regroup(weight), values(weight)
    columns = weight.codes.shape[1]
    rounded = found.source.endswith(EXPANDED)
    event("rounded" if rounded else f"exact, {'ordered' if found.order is not None else 'in order'}")
    result = found.dequantize().numpy()
    assert result.shape == expected.shape and found.group in GROUPS
    if rounded:
        step = np.abs(expected).max(1, keepdims=True) / 127
        assert (np.abs(result - expected) <= step * 0.52 + 1e-7).all()
        counts = [] if weight.group_of is None else torch.bincount(weight.group_of).tolist()
        regular = not counts or counts == torch.bincount(torch.arange(columns) // weight.size).tolist()
        fits = weight.size % 16 == 0 or weight.scales.shape[1] == 1
        large = weight.zeros is not None and int(weight.zeros.max()) >= 1 << (4 if weight.bits <= 4 else 8)
        assert not (regular and fits and not large), "this has an exact form"
    else:
        assert np.array_equal(result, expected)
        assert found.bits == (4 if weight.bits <= 4 else 8) and int(found.codes.numel() * 8 / found.bits) >= columns
        if found.bits == 8:
            assert int(found.codes[:, :columns].max()) <= max(found.most, int(weight.codes.max()))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_scales_that_are_no_numbers(wrong: float) -> None:
    scales = torch.ones(2, 2)
    scales[1, 1] = wrong
    with pytest.raises(ValueError, match="not finite"):
        Grouped(torch.zeros(2, 64, dtype=torch.uint8), scales, 32, 4, "test")


def test_shapes_that_do_not_fit() -> None:
    codes = torch.zeros(2, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"it has \[2, 3\] scales, not \[2, 2\]"):
        Grouped(codes, torch.ones(2, 3), 32, 4, "test")
    with pytest.raises(ValueError, match="zero points"):
        Grouped(codes, torch.ones(2, 2), 32, 4, "test", torch.ones(2, 1))
