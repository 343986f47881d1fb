"""Compare what surrounds attention with plain torch: writes, rotary embedding, copies of pieces, padding, splits.

``TRITON_INTERPRET=1 python -m tests.triton.parts``, or on a GPU ``python -m tests.triton.parts --device cuda``
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable

import torch

from common.attention.interface import Params, Span
from common.attention.triton import TritonAttention
from common.kernels.triton import decode, pieces
from common.kernels.triton.rotary import rotate
from common.kernels.triton.spans import DecodeRows
from common.kv.layout import KvLayout, LayerLayout
from common.kv.storage.cuda_driver import _tried_kernel
from common.kv.storage.slab import SlabStore
from tests.triton.cases import Setup, filled
from tests.triton.grid import LEAST_SPLIT
from tests.triton.interpreter import patch_language_once

EPSILON = 1e-6
CLOSE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
"""Accepted difference of rotated numbers."""


def slots_of(count: int, size: int, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return distinct random slots of ``count`` rows, of which every third is padding."""
    places = torch.tensor(random.Random(count).sample(range(8 * size), count), device=where)
    blocks = places // size
    blocks[::3] = -1
    return blocks, places % size


def written(pool: SlabStore, key: torch.Tensor, value: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Return whether layer 1 of ``pool`` (zero before) has exactly the rows that are not padding."""
    expected = SlabStore(pool.layout, pool.blocks, pool.device)
    real = slots[0] >= 0
    places = (slots[0][real], slots[1][real])
    expected.k(1)[places], expected.v(1)[places] = key[real], value[real]
    return torch.equal(expected.slab, pool.slab)


def writes(where: torch.device) -> None:
    """Rows go into their slots and nowhere else."""
    for layer, dtype in ((LayerLayout(2, 24, 12), "float32"), (LayerLayout(3, 5, 7), "bfloat16")):
        pool = SlabStore(KvLayout((layer, layer), dtype, 16), 8, where)
        key = torch.randn(layer.kv_heads, 37, layer.k_dim).to(where, pool.dtype).transpose(0, 1)
        value = torch.randn(37, layer.kv_heads, layer.v_dim).to(where, pool.dtype)
        slots = slots_of(37, 16, where)
        pool.write(1, key, value, slots)
        assert written(pool, key, value, slots), layer


def turned(x: torch.Tensor, weight: torch.Tensor | None, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return heads ``x`` [T, heads, dim] normed with ``weight`` and rotated as transformers does it."""
    if weight is not None:
        scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPSILON)
        x = weight * scaled.to(x.dtype)
    cos, sin = (angle.float().unsqueeze(1) for angle in angles)
    one, two = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-two, one), -1) * sin).to(x.dtype)


def rotations(where: torch.device) -> None:
    """Queries and keys are normed and rotated as transformers does it, and stored as by a write of their own."""
    rows, heads, dim = 7, 3, 24
    for dtype, normed in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        layer = LayerLayout(2, dim, 12)
        pool = SlabStore(KvLayout((layer, layer), "float32" if dtype == torch.float32 else "bfloat16", 16), 8, where)
        merged = torch.randn(rows, (heads + 2) * dim).to(where, dtype)
        query, key = merged[:, : heads * dim].unflatten(1, (-1, dim)), merged[:, heads * dim :].unflatten(1, (-1, dim))
        value, slots = torch.randn(rows, 2, 12).to(where, dtype), slots_of(rows, 16, where)
        angles = torch.randn(rows, dim // 2).repeat(1, 2).to(where)
        turns = angles.cos().to(dtype), angles.sin().to(dtype)
        weights = (1 + torch.randn(2, dim) / 4).to(where, dtype).unbind() if normed else (None, None)
        expected = [turned(each, weight, turns) for each, weight in zip((query, key), weights, strict=True)]
        norms = (*weights, EPSILON) if normed else None
        again, apart = query.clone(), rotate(query.clone(), key.clone(), turns, norms)
        pool.write_rotated(1, query, key, value, turns, norms, slots)
        off = CLOSE[dtype]
        torch.testing.assert_close(query, expected[0], atol=off, rtol=off)
        torch.testing.assert_close(apart, expected[1], atol=off, rtol=off)
        assert written(pool, apart, value, slots), "it is not stored as by a write of its own"
        rotate(again, key, turns, norms)
        assert torch.equal(again, query), "a row depends on whether it is stored"


def copies(where: torch.device) -> None:
    """Pieces of all lengths go where they belong, and nothing else is written."""
    assert _tried_kernel(where) is pieces.copy
    chooser, least = random.Random(5), 16
    for count in (1, 16, 37):
        sizes = [least * chooser.choice([1, 3, 64, 600]) for _ in range(count)]
        source = torch.randint(1, 256, (sum(sizes) + least,), dtype=torch.uint8).to(where)
        target = torch.zeros(2 * sum(sizes) + least, dtype=torch.uint8, device=where)
        expected, bases = target.clone(), [-each.data_ptr() % least for each in (source, target)]
        rows, at = [], 0
        for index in chooser.sample(range(count), count):
            size, begin, end = sizes[index], bases[0] + sum(sizes[:index]), bases[1] + 2 * at
            rows.append((source.data_ptr() + begin, target.data_ptr() + end, size))
            expected[end : end + size] = source[begin : begin + size]
            at += size
        pieces.copy(torch.tensor(rows).T.contiguous().to(where), max(sizes))
        assert torch.equal(target, expected)


def padding(where: torch.device) -> None:
    """Rows behind the spans are zero, and a row that is left out is not written."""
    with filled(LayerLayout(2, 16, 16), Setup("float32", 16, 2), [(200, 1), (3, 1), (64, 1)], str(where)) as (
        pool,
        spans,
    ):
        backend, params = TritonAttention(pool, 2), Params(0.25)
        query = torch.randn(5, 4, 16).to(where)
        alone = backend.attend(backend.plan(spans), 1, query[:3], params)
        plan = backend.plan(spans, 5)
        padded = backend.attend(plan, 1, query, params)
        assert torch.equal(padded[:3], alone) and not padded[3:].any()
        assert plan.decode is not None
        left_out = torch.tensor([0, -1, 2], dtype=torch.int32, device=where)
        rows = DecodeRows(left_out, plan.decode.lengths[:3], plan.decode.tables)
        out = torch.full((5, 4, 16), 7.0, device=where)
        scratch = (torch.empty(1 << 12, device=where), torch.empty(1 << 12, device=where))
        for splits in (1, 2):
            decode.attend_decode(query, pool.k(1), pool.v(1), out, rows, splits, scratch, params)
        torch.testing.assert_close(out[[0, 2]], alone[[0, 2]])
        assert bool((out[[1, 3, 4]] == 7).all())


def splits(where: torch.device) -> None:
    """With a fixed number of splits a row's bits do not depend on the rows beside it, nor do a chunk's on its
    neighbours."""
    shapes = [(290, 1), (3, 1), (127, 1), (200, 1)]
    with filled(LayerLayout(2, 16, 16), Setup("bfloat16", 16, 3), shapes, str(where)) as (pool, spans):
        backend, params = TritonAttention(pool, 3), Params(0.25, window=250)
        query = torch.randn(4, 4, 16).to(where, pool.dtype)
        together = backend.attend(backend.plan(spans), 1, query, params)
        for row, span in enumerate(spans):
            own = Span(0, 1, span.start, span.blocks)
            assert torch.equal(backend.attend(backend.plan([own]), 1, query[row : row + 1], params)[0], together[row])


def addresses(where: torch.device) -> None:
    """A decode step's part of the buffer stays where it is, however long the sequences and whatever comes with it, and
    however large steps outside graphs are."""
    shapes = [(900, 1), (3, 1), (0, 40)]
    with filled(LayerLayout(1, 16, 16), Setup("float32", 16, 1), shapes, str(where)) as (pool, spans):
        eager = TritonAttention(pool)
        backend = eager.for_graphs()
        backend.reserve(4, 64, 4)

        def seen(some: list[Span]) -> tuple[int, ...]:
            rows = backend.plan(some, None if len(some) > 2 else 4).decode
            assert rows is not None and rows.tables.stride(0) == 4
            return rows.row_at.data_ptr(), rows.lengths.data_ptr(), rows.tables.data_ptr()

        assert all(seen([])), "a captured graph would hold a null pointer"
        assert seen(spans[:2]) == seen(spans[1:2] * 2) == seen(spans) == seen([spans[0]]) == seen([])
        before, many = seen([]), [span._replace(row=row) for row, span in enumerate(spans[:1] * 200)]
        eager.plan(many)
        assert seen([]) == before
        for too_large in (lambda: backend.plan(many), lambda: backend._scratch_for(1 << 20, 16)):
            try:
                too_large()
            except ValueError:
                continue
            raise AssertionError("a buffer that graphs have captured has moved")


CHECKS: tuple[Callable[[torch.device], None], ...] = (writes, rotations, copies, padding, splits, addresses)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    where = torch.device(parser.parse_args().device)
    torch.set_num_threads(1)
    patch_language_once()
    decode.LEAST_SPLIT = LEAST_SPLIT
    for check in CHECKS:
        torch.manual_seed(0)
        check(where)
        print(f"{check.__name__}: right")
    print(f"{len(CHECKS)} cases, 0 wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
