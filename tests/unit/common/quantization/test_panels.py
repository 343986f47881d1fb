"""Panels hold exactly the weight they were made of."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from common.platform import memory
from common.quantization.panels import Panels
from common.quantization.weight import QuantizedWeight
from tests.unit.common.quantization.test_weight import KINDS, random_weight


def assert_same(one: QuantizedWeight, other: QuantizedWeight) -> None:
    assert one.shape == other.shape and one.tensors().keys() == other.tensors().keys()
    assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in one.tensors().items())
    assert all(
        getattr(one, name) == getattr(other, name) for name in ("bits", "group", "coding", "zero", "span", "most")
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out", [1, 16, 37])
def test_packing_is_undone(kind: str, out: int) -> None:
    weight = replace(random_weight(kind, out), source="Q", order=torch.arange(255, -1, -1).int())
    panels = Panels.of(weight)
    assert_same(panels.weight(), weight)
    assert panels.weight().source == panels.source == "Q" and panels.padded == 256
    again = Panels.of_state(panels.shape, panels.stated, panels.state())
    assert_same(again.weight(), weight)
    assert weight.nbytes <= panels.nbytes <= weight.nbytes * 16


def test_an_element_is_where_the_kernels_look_for_it() -> None:
    four, eight = random_weight("int4", 20), random_weight("int8", 20)
    row, column = 18, 3 * 32 + 21
    words = Panels.of(eight).tensors["codes"][row // 16, column // 4, row % 16].item()
    assert int(words) >> 8 * (column % 4) & 255 == int(eight.codes[row, column])
    word = Panels.of(four).tensors["codes"][row // 16, 3 * 4 + (21 - 16) // 4, row % 16].item()
    assert int(word) >> 8 * (21 % 4) + 4 & 15 == int(four.codes[row, 3 * 16 + 21 - 16]) >> 4


def test_rows_of_whole_panels() -> None:
    weight = random_weight("two levels", 50)
    panels = Panels.of(weight)
    assert_same(panels.rows(16, 50).weight(), weight.rows(slice(16, 50)))
    assert panels.rows(16, 32).tensors["codes"].data_ptr() != panels.tensors["codes"].data_ptr()
    for first, last in ((8, 32), (16, 40), (16, 16), (0, 64)):
        with pytest.raises(ValueError, match="no whole panels"):
            panels.rows(first, last)


def test_a_large_weight_lies_in_large_pages() -> None:
    weight = random_weight("two levels", 600, 256, 32)
    panels = Panels.of(weight)
    assert panels.nbytes > memory.LARGE_PAGE
    assert_same(panels.weight(), weight)
    starts = [(tensor.data_ptr(), tensor.nbytes) for tensor in panels.tensors.values()]
    assert starts[0][0] % memory.LARGE_PAGE == 0
    for (start, size), (following, _) in pairwise(starts):
        assert 0 <= following - start - size < 64
