"""Rounding to float8 e4m3, against the definition of the format in exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from common.kernels.e4m3 import E4M3, LARGEST, to_e4m3


def meaning(code: int) -> Fraction | None:
    """Return the value of a code by the format's definition: sign, 4 bits of exponent with bias 7, 3 of mantissa; None
    for NaN, which has all bits but the sign set."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return None
    scaled = Fraction(mantissa + 8, 8) * Fraction(2) ** (exponent - 7) if exponent else Fraction(mantissa, 8 * 64)
    return -scaled if code & 128 else scaled


POSITIVE = [value for code in range(127) if (value := meaning(code)) is not None]
"""The values of codes 0 to 126, in rising order."""


def nearest(value: float) -> int:
    """Return the code nearest to a finite ``value``, the even one of two; 448 for what is larger."""
    size = min(abs(Fraction(value)), POSITIVE[-1])
    code = min(range(127), key=lambda each: (abs(POSITIVE[each] - size), each % 2))
    return code | (128 if math.copysign(1.0, value) < 0 else 0)


def code_of(values: list[float]) -> list[int]:
    return to_e4m3(torch.tensor(values, dtype=torch.float32)).view(torch.uint8).tolist()


def test_all_256_codes_mean_what_the_format_says() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(E4M3).double().tolist()
    for code, number in enumerate(numbers):
        value = meaning(code)
        assert math.isnan(number) if value is None else Fraction(number) == value
    assert POSITIVE[-1] == LARGEST and POSITIVE[1] == Fraction(1, 512) and sorted(POSITIVE) == POSITIVE


def test_every_number_of_the_type_is_its_own_rounding() -> None:
    codes = [code for code in range(256) if code & 127 != 127]
    assert code_of([float(torch.tensor(code, dtype=torch.uint8).view(E4M3)) for code in codes]) == codes


def test_every_midpoint_goes_to_the_even_code_and_its_neighbours_to_their_own() -> None:
    for low in range(126):
        middle = float((POSITIVE[low] + POSITIVE[low + 1]) / 2)  # exact in float32
        below, above = (float(torch.tensor(middle).nextafter(torch.tensor(end))) for end in (0.0, 1e9))
        assert code_of([below, middle, above]) == [low, low + low % 2, low + 1]
        assert code_of([-below, -middle, -above]) == [128 + low, 128 + low + low % 2, 129 + low]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=64))
@example([0.0, -0.0, 448.0, 464.0, 480.0, 1e30, -1e30])
@example([2**-9, 2**-10, 2**-10 * 1.0001, 2**-11, 2**-126, -(2**-10)])
def test_a_number_becomes_the_nearest_and_a_large_one_the_largest(values: list[float]) -> None:
    assert code_of(values) == [nearest(value) for value in values]


@given(st.lists(st.floats(-500, 500, width=32), min_size=1, max_size=64))
def test_in_the_range_of_the_type_it_is_torchs_own_conversion(values: list[float]) -> None:
    inside = torch.tensor(values).clamp(-LARGEST, LARGEST)
    assert torch.equal(to_e4m3(torch.tensor(values)).view(torch.uint8), inside.to(E4M3).view(torch.uint8))


def test_infinity_becomes_the_largest_and_nan_stays() -> None:
    found = to_e4m3(torch.tensor([math.inf, -math.inf, math.nan])).float()
    assert found[:2].tolist() == [448.0, -448.0] and bool(found[2].isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_round_as_the_same_numbers_in_float32(dtype: torch.dtype) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    wide, narrow = to_e4m3(x.float()).view(torch.uint8), to_e4m3(x).view(torch.uint8)
    numbers = ~x.isnan()
    assert torch.equal(wide[numbers], narrow[numbers])
