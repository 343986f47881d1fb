"""Groups of quantized weights: rows, columns, joints and orders are exact, and rounding keeps its bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.quantization.packing import pack_nibbles, unpack_int32, unpack_nibbles, unpack_padded
from common.quantization.weight import QuantizedWeight, concatenate, group_for, quantize, requantize

KINDS = ("int4", "int8", "zeros", "minima", "two levels", "e4m3", "table")


def random_weight(kind: str, out: int = 6, groups: int = 8, group: int = 32, seed: int = 0) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)

    def numbers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=torch.uint8)

    bits: Literal[4, 8] = 8 if kind in ("int8", "two levels", "e4m3") else 4
    codes = numbers(120 if kind == "e4m3" else 256, out, groups * group * bits // 8)
    span = 4 if kind == "two levels" else 1
    more: dict[str, Any] = {"zero": 8}
    scales = torch.rand(out, groups // span, generator=generator).half()
    match kind:
        case "zeros":
            more = {"zeros": numbers(16, out, groups)}
        case "minima":
            more = {"minima": -scales}
        case "two levels":
            more = {"minima": -scales, "sub_scales": numbers(64, out, groups).view(torch.int8) - 32, "span": span,
                    "sub_minima": numbers(64, out, groups)}  # fmt: skip
        case "e4m3":
            more = {"coding": "e4m3"}
        case "table":
            more = {"coding": "table", "table": torch.randn(16, generator=generator)}
    return QuantizedWeight((out, groups * group), bits, group, codes, scales, **more)


def element(weight: QuantizedWeight, row: int, column: int) -> float:
    """The definition, for one element."""
    at, group = column // weight.group, weight.group
    if weight.bits == 8:
        code = int(weight.codes[row, column])
    else:
        inside = column % group
        byte = int(weight.codes[row, at * group // 2 + inside % (group // 2)])
        code = byte >> 4 if inside >= group // 2 else byte & 15
    value: float = code - (weight.zero if weight.zeros is None else int(weight.zeros[row, at]))
    if weight.coding == "e4m3":
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        value = (-1) ** sign * (2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8)
    elif weight.table is not None:
        value = float(weight.table[code])
    scale = float(weight.scales[row, at // weight.span])
    scale *= 1 if weight.sub_scales is None else int(weight.sub_scales[row, at])
    minimum = 0.0 if weight.minima is None else float(weight.minima[row, at // weight.span])
    minimum *= 1 if weight.sub_minima is None else int(weight.sub_minima[row, at])
    return value * scale + minimum


@pytest.mark.parametrize("kind", KINDS)
def test_elements_are_as_defined(kind: str) -> None:
    weight = random_weight(kind)
    found = weight.dequantize()
    expected = torch.tensor([[element(weight, n, k) for k in range(0, 256, 7)] for n in range(6)])
    torch.testing.assert_close(found[:, ::7], expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_columns_are_exact(kind: str) -> None:
    weight = random_weight(kind)
    whole = weight.dequantize()
    index = torch.tensor([5, 0, 0, 3])
    assert torch.equal(weight.rows(index).dequantize(), whole[index])
    assert torch.equal(weight.rows(slice(1, 4)).dequantize(), whole[1:4])
    for first, last in ((0, 128), (32, 64), (128, 256), (96, 256)):
        assert torch.equal(weight.columns(first, last).dequantize(), whole[:, first:last]), (first, last)
    joined = concatenate([weight, weight.rows(index)])
    assert joined is not None and torch.equal(joined.dequantize(), torch.cat([whole, whole[index]]))


def test_a_cut_inside_a_group_is_an_error() -> None:
    with pytest.raises(ValueError, match="not whole groups of 32"):
        random_weight("int4").columns(0, 40)


def test_weights_of_other_formats_are_not_joined() -> None:
    weight = random_weight("int4")
    others = [random_weight(kind) for kind in KINDS if kind != "int4"]
    others += [replace(weight, zero=7), random_weight("int4", groups=4), random_weight("int4", groups=4, group=64)]
    others += [replace(weight, scales=weight.scales.float())]
    assert all(concatenate([weight, other]) is None for other in others)


def test_an_order_of_columns_is_undone() -> None:
    weight = random_weight("int8")
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1)).int()
    ordered = replace(weight, order=order)
    found, plain = ordered.dequantize(), weight.dequantize()
    assert torch.equal(found[:, order.long()], plain)
    x = torch.randn(3, 256)
    torch.testing.assert_close(x @ found.T, x[:, order.long()] @ plain.T, rtol=1e-4, atol=1e-2)
    assert torch.equal(ordered.rows(slice(2, 3)).dequantize(), found[2:3])
    with pytest.raises(ValueError, match="order of their own"):
        ordered.columns(0, 32)
    joined = concatenate([ordered, ordered])
    assert joined is not None and torch.equal(joined.dequantize(), torch.cat([found, found]))
    assert concatenate([ordered, replace(weight, order=order.flip(0))]) is None


def test_shapes_that_do_not_fit_are_errors() -> None:
    weight = random_weight("minima")
    for wrong in ({"scales": weight.scales[:, :4]}, {"shape": (6, 255)}, {"shape": (5, 256)}, {"group": 24}):
        with pytest.raises(ValueError, match=r"scales|codes"):
            replace(weight, **wrong)


@given(st.integers(1, 5), st.integers(1, 300), st.sampled_from([4, 8]), st.sampled_from([16, 32, 64, 128]),
       st.sampled_from([1e-6, 1e-3, 1.0, 100.0]), st.integers(0, 99))  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_rounding_is_to_the_nearest(
    out: int, columns: int, bits: Literal[4, 8], group: int, size: float, seed: int
) -> None:
    values = torch.randn(out, columns, generator=torch.Generator().manual_seed(seed)) * size
    weight = quantize(values, bits, group)
    assert weight.shape == (out, columns) and weight.scales.dtype == torch.float16
    scales = weight.scales.float().repeat_interleave(group, 1)[:, :columns]
    # half a step, and half a step more at the ends of the range, as zeros are integers
    bound = scales * (0.51 if bits == 8 else 1.02)
    assert bool(((weight.dequantize() - values).abs() <= bound + 1e-12).all())
    step = values.abs().amax() * (1 / 127 if bits == 8 else 2 / 15)
    assert float(scales.max()) <= float(step) * 1.01 + 6e-8


def test_zeros_stay_zeros() -> None:
    for bits in (4, 8):
        weight = quantize(torch.zeros(3, 100), bits, 64)  # type: ignore[arg-type]
        assert torch.equal(weight.dequantize(), torch.zeros(3, 100))
    values = torch.randn(4, 64) + 5  # all above 0: 0 must stay representable for the padding
    padded = torch.nn.functional.pad(values, (0, 36))
    assert torch.equal(quantize(padded, 4, 64).dequantize()[:, 64:], padded[:, 64:])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_values_beyond_the_scales_are_errors(value: float) -> None:
    values = torch.ones(2, 64)
    values[1, 3] = value
    for bits in (4, 8):
        with pytest.raises(ValueError, match="finite"):
            quantize(values, bits)  # type: ignore[arg-type]


def test_requantized_weights_say_so() -> None:
    weight = requantize(torch.randn(4, 70), "IQ3_S")
    assert (weight.bits, weight.group, weight.source) == (8, 32, "IQ3_S, expanded to 8 bits")


def test_sizes() -> None:
    weight = quantize(torch.randn(8, 128), 4, 64)
    assert weight.nbytes == 8 * 64 + 8 * 2 * 2 + 8 * 2
    assert [group_for(columns) for columns in (256, 576, 96, 48, 100)] == [128, 64, 32, 16, 16]
    assert group_for(256, 32) == 32


@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_nibbles_round_trip(group: int) -> None:
    codes = torch.randint(0, 16, (3, 256), dtype=torch.uint8)
    packed = pack_nibbles(codes, group)
    assert int(packed[0, 1]) == int(codes[0, 1]) + 16 * int(codes[0, 1 + group // 2])
    assert torch.equal(unpack_nibbles(packed, group), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("along", [0, 1])
def test_words_are_streams_of_bits(bits: int, along: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 64)).tolist()
    rows = []
    for row in codes:
        stream = sum(code << at * bits for at, code in enumerate(row))
        rows.append([stream >> 32 * at & 0xFFFFFFFF for at in range(2 * bits)])
    words = torch.tensor(rows, dtype=torch.int64).to(torch.int32)
    found = unpack_int32(words if along else words.t(), bits, along)
    assert torch.equal(found if along else found.t(), torch.tensor(codes, dtype=torch.uint8))


def test_words_with_padding() -> None:
    codes = torch.randint(0, 8, (3, 20))
    rows = [[sum(int(c) << 3 * i for i, c in enumerate(row[at : at + 10])) for at in (0, 10)] for row in codes]
    assert torch.equal(unpack_padded(torch.tensor(rows, dtype=torch.int32), 3), codes.to(torch.uint8))
