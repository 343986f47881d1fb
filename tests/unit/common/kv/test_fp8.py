"""A KV pool in float8: the choice of scales, what is stored and read back, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.attention.registry import Wanted, select_backend
from common.core.errors import StartError
from common.kv.convert import converted
from common.kv.layout import ELEMENT_BYTES, KvLayout, LayerLayout, converts
from common.kv.scales import LEAST_PEAK, MOST_PEAK, KvScales, LayerScales, scale_for
from common.kv.storage.fp8 import Fp8Codec
from common.kv.storage.host import KvMemory
from common.kv.storage.slab import SlabStore
from common.kv.storage.tensors import KvStore

LAYERS = (LayerLayout(2, 4, 3), LayerLayout(3, 5, 5))
SCALES = KvScales((LayerScales((1.0, 0.25), (8.0, 1.0)), LayerScales((2.0, 1.0, 1.0), (1.0, 1.0, 0.5))))
LAYOUT = KvLayout(LAYERS, "fp8", 16)
CPU = torch.device("cpu")
WIDE = torch.tensor([float(code) for code in torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)])


def slowly(value: float, scale: float) -> float:
    """Round one number by a search over all magnitudes of the type."""
    size = abs(value) / scale
    best = min(range(127), key=lambda code: (abs(float(WIDE[code]) - size), code % 2))
    return math.copysign(float(WIDE[best]) * scale, value)


@given(st.floats(1e-30, 1e30))
def test_a_scale_is_one_or_a_power_of_two_that_leaves_room(peak: float) -> None:
    scale = scale_for(peak)
    assert math.frexp(scale)[0] == 0.5
    if LEAST_PEAK <= peak <= MOST_PEAK:
        assert scale == 1.0
    else:
        assert 8 <= peak / scale < 16
    assert peak / scale * 8 <= 448, "it may grow eight times"


@given(st.floats(1e-3, 1e3), st.floats(-0.004, 0.004))
def test_workers_whose_sums_round_differently_find_the_same_scales(peak: float, difference: float) -> None:
    """bfloat16 rounds by up to 0.4 %: away from the edges of the choice that changes nothing."""
    other = peak * (1 + difference)
    edges = [LEAST_PEAK, MOST_PEAK, *(2.0**power for power in range(-11, 11))]
    if not any(min(peak, other) <= edge <= max(peak, other) for edge in edges):
        assert scale_for(peak) == scale_for(other)


@pytest.mark.parametrize("peak", [0.0, math.inf, math.nan])
def test_a_head_that_shows_nothing_has_scale_one(peak: float) -> None:
    assert scale_for(peak) == 1.0


def test_other_scales_are_another_fingerprint() -> None:
    same = KvScales.for_peaks([([3.0, 40.0], [0.5, 700.0])])
    assert same.fingerprint == KvScales.for_peaks([([2.9, 41.0], [0.51, 701.0])]).fingerprint
    assert same.fingerprint != KvScales.for_peaks([([3.0, 40.0], [0.5, 3000.0])]).fingerprint
    assert same.scaled_heads == 2


def test_a_shard_has_the_scales_of_its_heads() -> None:
    scales = KvScales((LayerScales((1.0, 2.0, 4.0, 8.0), (0.5, 1.0, 2.0, 4.0)),))
    assert scales.shard(0, 1) == scales
    assert scales.shard(1, 2) == KvScales((LayerScales((4.0, 8.0), (2.0, 4.0)),))


@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_host", [True, False])
def test_numbers_come_back_rounded_with_the_scale_of_their_head(computed: torch.dtype, on_host: bool) -> None:
    codec = Fp8Codec(SCALES, computed, CPU)
    memory = KvMemory(LAYOUT, 3) if on_host else None
    store = KvStore(memory, codec=codec) if memory is not None else SlabStore(LAYOUT, 3, CPU, codec=codec)
    generator = torch.Generator().manual_seed(7)
    slots = torch.tensor([2, 0, 2, 1]), torch.tensor([5, 15, 0, 7])
    for layer, shape in enumerate(LAYERS):
        rows = [
            (torch.randn(4, shape.kv_heads, dim, generator=generator) * 10.0 ** torch.arange(-3, 1)[:, None, None]).to(
                computed
            )
            for dim in (shape.k_dim, shape.v_dim)
        ]
        rows[0][3] *= 1000  # more than the type holds
        store.write(layer, *rows, slots)
        scales = SCALES.layers[layer]
        for part, wanted, by_head in zip(store.gather(layer, torch.arange(3)), rows, (scales.k, scales.v), strict=True):
            assert part.dtype == computed
            placed = part.view(3, 16, *part.shape[1:])[slots]
            for row, head in ((row, head) for row in range(4) for head in range(shape.kv_heads)):
                expected = [slowly(float(each), by_head[head]) for each in wanted[row, head]]
                assert placed[row, head].tolist() == expected
    store.close()


def test_kernels_that_do_not_know_fp8_are_refused_in_words() -> None:
    memory = KvMemory(LAYOUT, 3)
    store = KvStore(memory, codec=Fp8Codec(SCALES, torch.float32, CPU))
    chosen = select_backend(store)
    assert chosen.backend.name == "cpu"
    assert chosen.notes == ("attention cpu: the kernels in C do not know KV in fp8, which makes decoding slower",)
    for name in ("native", "flash"):
        with pytest.raises(StartError, match="fp8") as refused:
            select_backend(store, Wanted(name))
        assert "compiler" not in refused.value.todo
    assert select_backend(store, Wanted("torch")).backend.name == "torch"
    store.close()


def test_a_head_beyond_its_range_saturates_and_nan_stays_visible() -> None:
    codec = Fp8Codec(SCALES, torch.float32, CPU)
    key = torch.full((1, 2, 4), 1e9)
    key[0, 1, 0] = math.nan
    back = codec.decode(0, *codec.encode(0, key, torch.zeros(1, 2, 3)))[0]
    assert back[0, 0].tolist() == [448.0] * 4 and back[0, 1, 1:].tolist() == [112.0] * 3 and back[0, 1, 0].isnan()


def test_a_pool_takes_the_memory_of_one_byte_per_element() -> None:
    assert LAYOUT.token_bytes * 2 == KvLayout(LAYERS, "bfloat16", 16).token_bytes
    assert LAYOUT.fingerprint == KvLayout(LAYERS, "bfloat16", 16).fingerprint, "it describes shapes"


def test_fp8_and_other_types_are_not_converted() -> None:
    data = torch.zeros(16, dtype=torch.uint8).numpy()
    for other in ELEMENT_BYTES:
        assert converts("fp8", other) == converts(other, "fp8") == (other == "fp8")
        if other != "fp8":
            with pytest.raises(ValueError, match="scales"):
                converted(data, "fp8", other)
            with pytest.raises(ValueError, match="scales"):
                converted(data, other, "fp8")
    assert converted(data, "fp8", "fp8") is data
