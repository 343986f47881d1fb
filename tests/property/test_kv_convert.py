"""Conversion of KV elements, checked with exact arithmetic and on every 16-bit pattern."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.kv.convert import converted
from common.kv.layout import ELEMENT_BYTES, KvDtype

DTYPES: tuple[KvDtype, ...] = ("float32", "bfloat16", "float16")
SHAPE = {"float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10)}
"""Bits of the exponent and of the mantissa."""
every_16_bits = np.arange(1 << 16, dtype=np.uint16)


def parts(bits: int, dtype: KvDtype) -> tuple[int, int, int]:
    exponent, mantissa = SHAPE[dtype]
    return bits >> exponent + mantissa, bits >> mantissa & (1 << exponent) - 1, bits & (1 << mantissa) - 1


def value(bits: int, dtype: KvDtype) -> Fraction | float:
    """Return the value of a bit pattern: an exact fraction, an infinity or NaN."""
    sign, power, digits = parts(bits, dtype)
    exponent, mantissa = SHAPE[dtype]
    bias = (1 << exponent - 1) - 1
    if power == (1 << exponent) - 1:
        return math.nan if digits else math.inf * (-1) ** sign
    scaled = Fraction(digits + (1 << mantissa if power else 0)) * Fraction(2) ** (max(power, 1) - bias - mantissa)
    return -scaled if sign else scaled


def nearest(bits: int, source: KvDtype, target: KvDtype) -> int:
    """Return the pattern in ``target`` nearest to a finite one in ``source``, by binary search over patterns of one
    sign."""
    exponent, mantissa = SHAPE[target]
    sign = parts(bits, source)[0]
    wanted = value(bits, source)
    assert isinstance(wanted, Fraction)
    wanted = abs(wanted)
    infinity = (1 << exponent) - 1 << mantissa

    def size(pattern: int) -> Fraction:  # infinity counts as the next finite number, so ties round to even there too
        if pattern < infinity:
            return Fraction(value(pattern, target))
        return 2 * Fraction(value(infinity - 1, target)) - Fraction(value(infinity - 2, target))

    low, high = 0, infinity
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= wanted else (low, middle)
    below, above = wanted - size(low), size(high) - wanted
    chosen = low if below < above or (below == above and low % 2 == 0) else high
    return chosen | sign << exponent + mantissa


def one(bits: int, source: KvDtype, target: KvDtype) -> int:
    formats = {4: "<I", 2: "<H"}
    data = np.frombuffer(struct.pack(formats[ELEMENT_BYTES[source]], bits), np.uint8)
    return int(struct.unpack(formats[ELEMENT_BYTES[target]], converted(data, source, target).tobytes())[0])


@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(0, 2**32 - 1))
@example("float32", "bfloat16", 0x7F80_0001)  # a NaN whose upper half is the pattern of infinity
@example("float32", "bfloat16", 0xFFFF_FFFF)
@example("float32", "bfloat16", 0x7F7F_FFFF)  # rounds up to infinity
@example("float32", "bfloat16", 0x3F80_8000)  # ties
@example("float32", "bfloat16", 0x3F81_8000)
@example("float32", "float16", 0x477F_EFFF)  # the last pattern below the midpoint to infinity
@example("float32", "float16", 0x477F_F000)
@example("float32", "float16", 0x3300_0000)  # half of the smallest subnormal
@example("float32", "float16", 0x3300_0001)
def test_a_value_becomes_the_nearest(source: KvDtype, target: KvDtype, bits: int) -> None:
    bits &= (1 << 8 * ELEMENT_BYTES[source]) - 1
    result, meant = one(bits, source, target), value(bits, source)
    if isinstance(meant, Fraction):
        assert result == nearest(bits, source, target)
    elif math.isnan(meant):
        assert math.isnan(value(result, target)) and parts(result, target)[0] == parts(bits, source)[0]
    else:
        assert value(result, target) == meant


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_every_16_bits_survive_the_way_through_float32(narrow: KvDtype) -> None:
    data = every_16_bits.view(np.uint8)
    wide = converted(data, narrow, "float32")
    back = converted(wide, "float32", narrow).view(np.uint16)
    with np.errstate(invalid="ignore"):
        nan = np.isnan(wide.view(np.float32))
    assert wide.nbytes == 2 * data.nbytes and nan.sum() == 2 * ((1 << SHAPE[narrow][1]) - 1)
    assert (back[~nan] == every_16_bits[~nan]).all()
    assert np.isnan(converted(back.view(np.uint8), narrow, "float32").view(np.float32)[nan]).all()


def test_the_same_dtype_is_the_same_bytes() -> None:
    data = np.arange(64, dtype=np.uint8)
    assert all(converted(data, dtype, dtype) is data for dtype in DTYPES)


def test_bytes_that_lie_anywhere_and_may_not_be_written_are_taken() -> None:
    """A frame is a read-only view into a message, at any alignment."""
    values = np.array([1.5, -2.0, 65504.0], np.float32)
    data = np.frombuffer(b"x" + values.tobytes(), np.uint8, offset=1)
    assert converted(data, "float32", "float16").view(np.float16).tolist() == values.tolist()
    assert converted(data, "float32", "bfloat16").view(np.uint16).tolist() == [0x3FC0, 0xC000, 0x4780]
