"""Compare what kernels store in a pool in fp8, and what they read from it, with torch, for numbers of all sizes."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from common.attention.interface import Params, Span
from common.kernels import triton as package
from common.kernels.e4m3 import E4M3
from common.kv.layout import KvLayout, LayerLayout
from common.kv.scales import KvScales, LayerScales
from common.kv.storage.fp8 import Fp8Codec
from common.kv.storage.slab import SlabStore
from tests.triton.cases import Make, movable

LAYER = LayerLayout(3, 16, 12)
SCALES = KvScales((LayerScales((1.0, 0.25, 8.0), (2.0, 1.0, 0.5)),))
SIZE, FEWER = 16, 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def numbers() -> torch.Tensor:
    """Return every number of the type, the midpoints between them with their neighbours in float32, numbers beyond the
    range, tiny ones and NaN, with both signs: float32."""
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    middles = (codes[1:] + codes[:-1]) / 2
    above, below = (middles.nextafter(torch.tensor(end)) for end in (1e9, 0.0))
    special = torch.tensor([449, 463.9, 464, 464.1, 480, 1e6, 1e30, 2**-11, 2**-126, 1e-40, torch.inf, torch.nan])
    found = torch.cat([codes, middles, above, below, special])
    return torch.cat([found, -found])


def wrongly_stored(device: str = "cpu", dtypes: Sequence[torch.dtype] = DTYPES) -> int:
    """Return how many numbers of the types ``dtypes`` the writing kernel stores in another code than torch does."""
    where = torch.device(device)
    wrong = 0
    for dtype in dtypes:
        codec = Fp8Codec(SCALES, dtype, where)
        rows = [
            _as_rows(numbers(), LAYER.kv_heads, dim).to(where) * scale
            for dim, scale in ((LAYER.k_dim, codec.k[0]), (LAYER.v_dim, codec.v[0]))
        ]
        key, value = (each.to(dtype) for each in _of_one_length(rows))
        wrong += _wrong(key, value, codec, where, rotated=False)
        key = key.nan_to_num(1.0, 2.0, -2.0)  # rotation adds up pairs
        wrong += _wrong(key[::FEWER], value[::FEWER], codec, where, rotated=True)
    return wrong


def _wrong(key: torch.Tensor, value: torch.Tensor, codec: Fp8Codec, where: torch.device, rotated: bool) -> int:
    kernels: Any = importlib.import_module(f"{package.__name__}.{'rotary' if rotated else 'store'}")
    count = key.shape[0]
    pool = SlabStore(KvLayout((LAYER,), "fp8", SIZE), -(-count // SIZE), where, codec=codec)
    slots = torch.arange(count, device=where) // SIZE, torch.arange(count, device=where) % SIZE
    inverses = codec.inverses_of(0)
    if rotated:  # by an angle of 0, which leaves every number but the sign of a zero as it is
        query = key.new_zeros(count, 2, LAYER.k_dim)
        angles = key.new_ones(key.shape[::2]), key.new_zeros(key.shape[::2])
        kernels.rotate_write(query, key, value, angles, None, pool.k(0), pool.v(0), slots, inverses)
    else:
        kernels.write(key, value, pool.k(0), pool.v(0), slots, inverses)
    wrong = 0
    for part, wanted in zip((pool.k(0), pool.v(0)), codec.encode(0, key, value), strict=True):
        codes, expected = movable(part)[slots], movable(wanted)
        differ = codes != expected
        differ &= (codes & 0x7F != 0x7F) | (expected & 0x7F != 0x7F)  # NaN has two codes
        if rotated:
            differ &= (codes & 0x7F != 0) | (expected & 0x7F != 0)
        wrong += int(differ.sum())
    return wrong


def _as_rows(x: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """Return the numbers of ``x`` and zeros behind them, [rows, heads, dim], each number in every head."""
    short = -len(x) % dim
    return torch.cat([x, x.new_zeros(short)]).view(-1, 1, dim).expand(-1, heads, dim)


def _of_one_length(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    most = max(len(each) for each in rows)
    return [torch.cat([each, each.new_zeros(most - len(each), *each.shape[1:])]) for each in rows]


def wrongly_read(make: Make, device: str = "cpu") -> int:
    """Return how many of the 256 codes the backend reads as another number than torch does: each is a value of a
    sequence of one token."""
    where, layer = torch.device(device), LayerLayout(1, 16, 16)
    scales = KvScales((LayerScales((1.0,), (1.0,)),))
    pool = SlabStore(KvLayout((layer,), "fp8", SIZE), 16, where, codec=Fp8Codec(scales, torch.float32, where))
    codes = torch.arange(256, dtype=torch.uint8)
    movable(pool.v(0))[:, 0, 0] = codes.view(16, 16).to(where)
    backend, spans = make(pool, 1), [Span(row, 1, 0, [row]) for row in range(16)]
    query = torch.zeros(16, 1, layer.k_dim, device=where)
    found = backend.attend(backend.plan(spans), 0, query, Params(1.0)).flatten().cpu()
    expected = codes.view(E4M3).float()
    return int((~((found == expected) | (found.isnan() & expected.isnan()))).sum())
