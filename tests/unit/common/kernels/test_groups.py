"""Products with weights in groups, in C, on every instruction set: against float64 and the definition of a weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from common.kernels import cpu
from common.model.compact import ACTIVATIONS, CompactEmbedding, CompactLinear, round_activations
from common.quantization.packing import unpack_nibbles
from common.quantization.weight import QuantizedWeight
from tests.unit.common.quantization.test_weight import random_weight

library = cpu.library()
VARIANTS = library.variants if library else ()
KINDS = ("int4", "zeros", "minima", "two levels", "e4m3", "table", "int8", "int7", "int6", "zeros8")
GROUPS = (16, 32, 64, 128)
COLUMNS = 256


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    assert library is not None
    library.use(request.param)
    yield request.param
    library.use(VARIANTS[0])


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def some(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(kind: str, out: int, group: int = 32, columns: int = COLUMNS, seed: int = 0) -> QuantizedWeight:
    """Return a random weight; "int7" and "int6" have codes below 128 and 64, "zeros8" a zero per group of 8 bits."""
    groups = columns // group
    match kind:
        case "int7" | "int6":
            most = 127 if kind == "int7" else 63
            weight = random_weight("int8", out, groups, group, seed)
            return replace(weight, codes=weight.codes & most, zero=32, most=most)
        case "zeros8":
            weight = random_weight("int8", out, groups, group, seed)
            zeros = torch.randint(0, 256, (out, groups), generator=torch.Generator().manual_seed(seed))
            return replace(weight, zeros=zeros.to(torch.uint8))
        case "int8":
            return replace(random_weight("int8", out, groups, group, seed), zero=128)
    return random_weight(kind, out, groups, group, seed)


def dequantized(weight: QuantizedWeight) -> torch.Tensor:
    """The weight [out, in] by its definition, in float64."""
    codes = unpack_nibbles(weight.codes, weight.group) if weight.bits == 4 else weight.codes
    grouped = codes.double().view(weight.shape[0], -1, weight.group)
    zero = weight.zero if weight.zeros is None else weight.zeros.double()[:, :, None]
    values = grouped - zero
    if weight.coding == "e4m3":
        values = codes.view(torch.float8_e4m3fn).double().view_as(grouped)
    if weight.table is not None:
        values = weight.table.double()[codes.long()].view_as(grouped)
    scales = weight.scales.double().repeat_interleave(weight.span, 1)
    scales = scales if weight.sub_scales is None else scales * weight.sub_scales
    values = values * scales[:, :, None]
    if weight.minima is not None:
        minima = weight.minima.double().repeat_interleave(weight.span, 1)
        values = values + (minima if weight.sub_minima is None else minima * weight.sub_minima)[:, :, None]
    flat = values.reshape(weight.shape[0], -1)
    if weight.order is not None:
        flat = torch.empty_like(flat).index_copy_(1, weight.order.long(), flat)
    return flat[:, : weight.shape[1]]


def product(weight: QuantizedWeight, x: torch.Tensor, exact: bool, terms: int = 1) -> torch.Tensor:
    """The product in float64, with the activations as the kernel rounds them."""
    if not exact and weight.coding == "int":
        x = round_activations(x, weight, terms)
    return x.double() @ dequantized(weight).t()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest number."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows", [1, 7, 70])
@pytest.mark.parametrize("out", [8, 33])
@pytest.mark.parametrize("exact", [True, False])
def test_a_product(variant: str, kind: str, group: int, rows: int, out: int, exact: bool) -> None:
    weight = weight_of(kind, out, group, 512)
    x, offset = some(rows, weight.shape[1]), some(out) * 100 if out == 33 else None
    linear = CompactLinear(weight, offset, torch.float32, exact=exact)
    assert linear.address
    expected = product(weight, x, exact) + (0 if offset is None else offset.double())
    assert error(linear(x), expected) < 2e-6
    total = some(rows, out, seed=3)
    expected = total.double() + expected
    linear.add_to(total, x)
    assert error(total, expected) < 2e-6


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("columns", [COLUMNS, COLUMNS - 13])
def test_columns_in_an_order_of_their_own(variant: str, kind: str, exact: bool, columns: int) -> None:
    weight = weight_of(kind, 20)
    if weight.minima is not None and columns < COLUMNS:
        columns = COLUMNS  # such a weight has no padding
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(4)).int()
    weight = replace(weight, order=order, shape=(20, columns))
    x = some(3, columns)
    assert error(CompactLinear(weight, None, torch.float32, exact=exact)(x), product(weight, x, exact)) < 2e-6


@pytest.mark.parametrize("kind", ["int4", "int8", "two levels"])
@pytest.mark.parametrize("exact", [True, False])
def test_bfloat16(variant: str, kind: str, exact: bool) -> None:
    weight, x, bias = weight_of(kind, 40), some(6, COLUMNS).bfloat16(), some(40)
    found = CompactLinear(weight, bias, torch.bfloat16, exact=exact)(x)
    expected = product(weight, x.float(), exact) + bias.bfloat16().double()
    assert found.dtype == torch.bfloat16
    assert bool((found.double() - expected).abs().le(expected.abs() / 256 + 1e-4).all())  # rounded once


@pytest.mark.parametrize("kind", ["int4", "int6", "int7", "int8", "zeros8"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_codes_do_not_overflow(variant: str, kind: str, sign: int) -> None:
    weight = weight_of(kind, 16, 128)
    codes = torch.full_like(weight.codes, 255 if weight.bits == 4 else weight.most)
    codes[::2] = 0
    weight = replace(weight, codes=codes)
    x = torch.full((2, COLUMNS), float(sign))
    linear = CompactLinear(weight, None, torch.float32, exact=False)
    assert error(linear(x), x.double() @ dequantized(weight).t()) < 1e-6


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("e4m3", "table")])
@pytest.mark.parametrize("rows", [1, 3, 8, 37])  # 24 and more are multiplied by two panels at a time
@pytest.mark.parametrize("group", [16, 64])
def test_activations_in_16_bits(variant: str, kind: str, rows: int, group: int) -> None:
    """Two terms are nearly exact, and a row's result depends on no other."""
    weight, x = weight_of(kind, 33, group), some(rows, COLUMNS)
    x[:, 5] *= 100  # the others of its group have few of the first 8 bits
    linear = CompactLinear(weight, None, torch.float32, exact=False).changed(terms=2)
    found = linear(x)
    assert error(found, product(weight, x, False, terms=2)) < 2e-6
    exact, coarse = product(weight, x, True), CompactLinear(weight, None, torch.float32, exact=False)(x)
    assert error(found, exact) < 3e-4 and error(found, exact) < error(coarse, exact) / 20
    assert torch.equal(torch.cat([linear(row[None]) for row in x]), found)


@pytest.mark.parametrize("terms", [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("rows", [21, 37])
def test_parts_with_8_and_16_bits_per_activation(variant: str, terms: tuple[int, int], rows: int, threads: int) -> None:
    """Joined products have the bits of their parts alone, and a gate and its values depend on no other row."""
    weights, x = [weight_of("minima", 48), weight_of("two levels", 48)], some(rows, COLUMNS)
    alone = [CompactLinear(weight, None, torch.float32, exact=False) for weight in weights]
    parts = [layer.changed(terms=each)(x) for layer, each in zip(alone, terms, strict=True)]
    joined = CompactLinear.joined(weights, [None] * 2, torch.float32, exact=False, terms=terms)
    assert torch.equal(joined(x), torch.cat(parts, 1))
    gated = CompactLinear.joined(weights, [None] * 2, torch.float32, exact=False, activation="silu", terms=terms)
    assert error(gated(x), ACTIVATIONS["silu"](parts[0].double()) * parts[1]) < 1e-5
    assert torch.equal(torch.cat([gated(row[None]) for row in x]), gated(x))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("out", [16, 37])
@pytest.mark.parametrize("exact", [True, False])
def test_a_gate_and_values_of_two_formats(variant: str, activation: str, out: int, exact: bool) -> None:
    gate, up = weight_of("minima", out), weight_of("two levels", out, 16)
    biases, x = [some(out), some(out, seed=2)], some(9, COLUMNS) / 100
    linear = CompactLinear.joined([gate, up], biases, torch.float32, exact=exact, activation=activation)
    parts = [product(weight, x, exact) + bias for weight, bias in zip((gate, up), biases, strict=True)]
    assert linear.out_features == out
    assert error(linear(x), ACTIVATIONS[activation](parts[0]) * parts[1]) < 1e-5


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_parts_of_several_formats(variant: str, threads: int, exact: bool, rows: int) -> None:
    """Which cannot share packed activations: columns in an order of their own, minima that need sums, other groups."""
    weights = [weight_of("int4", 40), weight_of("zeros", 24), weight_of("minima", 17), weight_of("two levels", 8, 16)]
    weights[1] = replace(weights[1], order=torch.arange(COLUMNS - 1, -1, -1).int())
    biases, x = [None, some(24), None, None], some(rows, COLUMNS)
    linear = CompactLinear.joined(weights, biases, torch.float32, exact=exact)
    expected = torch.cat([product(weight, x, exact) for weight in weights], 1)
    expected[:, 40:64] += some(24)
    found = linear(x)
    for first, last in ((0, 40), (40, 64), (64, 81), (81, 89)):
        assert error(found[:, first:last], expected[:, first:last]) < 2e-6


@pytest.mark.parametrize("exact", [True, False])
def test_parts_that_share_packed_activations(variant: str, exact: bool) -> None:
    """A joined product has the bits of its parts alone."""
    weights = [weight_of("minima", 40), weight_of("two levels", 33), weight_of("minima", 17, seed=3)]
    x = some(21, COLUMNS)
    alone = [CompactLinear(weight, None, torch.float32, exact=exact)(x) for weight in weights]
    joined = CompactLinear.joined(weights, [None] * 3, torch.float32, exact=exact)
    assert torch.equal(joined(x), torch.cat(alone, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exact", [True, False])
def test_a_row_depends_neither_on_others_nor_on_threads(variant: str, kind: str, exact: bool) -> None:
    """With so many columns that only some of the rows are packed at a time."""
    columns = 24576
    linear = CompactLinear(weight_of(kind, 20, 128, columns), None, torch.float32, exact=exact)
    x, before = some(37, columns), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = linear(x)
        torch.set_num_threads(1)
        assert torch.equal(linear(x), together)
        alone = torch.cat([linear(row[None]) for row in x])
        assert torch.equal(alone, together)
        assert torch.equal(linear(x[5:11]), together[5:11])
    finally:
        torch.set_num_threads(before)


def test_rows_that_are_not_contiguous(variant: str) -> None:
    weight, x = weight_of("int4", 20), some(5, 300)
    linear = CompactLinear(weight, None, torch.float32, exact=True)
    inside = x[:, 7 : 7 + COLUMNS]
    assert torch.equal(linear(inside), linear(inside.contiguous()))
    turned = x[:, :COLUMNS].t().contiguous().t()
    assert torch.equal(linear(turned), linear(turned.contiguous()))


@pytest.mark.parametrize(("exact", "terms"), [(True, 1), (False, 1), (False, 2)])
def test_what_is_not_a_number_stays_so(variant: str, exact: bool, terms: int) -> None:
    """In its row: others have the bits that they have without it."""
    x, bad = some(30, COLUMNS), [1, 7, 29]
    linear = CompactLinear(weight_of("int8", 40), None, torch.float32, exact=exact).changed(exact=exact, terms=terms)
    good = [row for row in range(len(x)) if row not in bad]
    expected = linear(x)[good]
    x[1, 5], x[7, 9], x[29, 7] = float("nan"), float("-inf"), float("inf")
    found = linear(x)
    assert torch.equal(found[good], expected) and not bool(found[bad].isfinite().any())


@pytest.mark.parametrize("terms", [1, 2])
def test_groups_of_tiny_activations_count_as_zeros(variant: str, terms: int) -> None:
    """By C and by torch: 127 divided by the largest of them is infinite."""
    weight, x = weight_of("minima", 16), some(2, COLUMNS)
    x[0, :32] = 0
    x[0, 3], x[0, 4] = 1e-38, -1e-42
    rounded = round_activations(x, weight, terms)
    assert bool((rounded[0, :32] == 0).all()) and bool((rounded[1] != 0).any())
    linear = CompactLinear(weight, None, torch.float32, exact=False).changed(terms=terms)
    assert error(linear(x), product(weight, x, False, terms)) < 2e-6
    zeros = x.clone()
    zeros[0, :32] = 0
    assert torch.equal(linear(x), linear(zeros))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_an_embedding(kind: str, dtype: torch.dtype) -> None:
    weight = weight_of(kind, 40)
    scale = float(dequantized(weight).abs().max())
    weight = replace(weight, scales=(weight.scales.float() / scale).to(weight.scales.dtype))
    ids = torch.tensor([[3, 39], [0, 17]])
    layer = CompactEmbedding(weight, dtype)
    assert layer.address
    torch.testing.assert_close(layer(ids), dequantized(weight).to(dtype)[ids], rtol=1e-6, atol=1e-6)
