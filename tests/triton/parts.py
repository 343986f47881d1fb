"""Compare what surrounds attention with plain torch: writes, rotary embedding, canonical copies, padding, splits.

``TRITON_INTERPRET=1 python -m tests.triton.parts``
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import torch
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as rotate_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves

from common.attention.interface import Params, Span
from common.attention.triton import TritonAttention
from common.kernels.triton import decode, store
from common.kernels.triton.spans import DecodeRows
from common.kv.layout import KvLayout, LayerLayout
from common.kv.storage.canonical import CanonicalCopies
from common.kv.storage.host import KvMemory
from common.kv.storage.slab import SlabStore
from tests.triton.cases import filled
from tests.triton.grid import LEAST_SPLIT

CPU = torch.device("cpu")


def slots_of(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return distinct random slots of ``count`` rows, of which every third is padding."""
    places = torch.tensor(random.Random(count).sample(range(8 * size), count))
    blocks = places // size
    blocks[::3] = -1
    return blocks, places % size


def written(pool: SlabStore, key: torch.Tensor, value: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Return whether layer 1 of ``pool`` (zero before) has exactly the rows that are not padding."""
    expected = SlabStore(pool.layout, pool.blocks, CPU)
    real = slots[0] >= 0
    places = (slots[0][real], slots[1][real])
    expected.k(1)[places], expected.v(1)[places] = key[real], value[real]
    return torch.equal(expected.slab, pool.slab)


def writes() -> None:
    """Rows go into their slots and nowhere else."""
    for layer, dtype in ((LayerLayout(2, 24, 12), "float32"), (LayerLayout(3, 5, 7), "bfloat16")):
        pool = SlabStore(KvLayout((layer, layer), dtype, 16), 8, CPU)
        key = torch.randn(layer.kv_heads, 37, layer.k_dim).to(pool.dtype).transpose(0, 1)
        value = torch.randn(37, layer.kv_heads, layer.v_dim).to(pool.dtype)
        slots = slots_of(37, 16)
        pool.write(1, key, value, slots)
        assert written(pool, key, value, slots), layer


def rotations() -> None:
    """Queries and keys are rotated as transformers rotates them, in halves and interleaved, whole and in part."""
    for interleaved, rotate, rotated in (
        (False, rotate_halves, 24),
        (True, rotate_interleaved, 24),
        (False, rotate_halves, 10),
    ):
        layer, heads, rows = LayerLayout(2, 24, 12), 6, 21
        pool = SlabStore(KvLayout((layer, layer), "float32", 16), 8, CPU)
        query, key = torch.randn(rows, heads, 24), torch.randn(rows, 2, 24)
        value, slots = torch.randn(rows, 2, 12), slots_of(rows, 16)
        half = torch.randn(rows, rotated // 2)
        angles = half.repeat_interleave(2, -1) if interleaved else torch.cat([half, half], -1)
        cos, sin = angles.cos(), angles.sin()
        turned = rotate(query[..., :rotated], key[..., :rotated], cos, sin, unsqueeze_dim=1)
        want_query = torch.cat([turned[0], query[..., rotated:]], -1)
        want_key = torch.cat([turned[1], key[..., rotated:]], -1)
        store.rotate_write(query, key, value, (cos, sin), pool.k(1), pool.v(1), slots, interleaved)
        torch.testing.assert_close(query, want_query, atol=1e-6, rtol=1e-6)
        real = slots[0] >= 0
        got = pool.k(1)[slots[0][real], slots[1][real]]
        torch.testing.assert_close(got, want_key[real], atol=1e-6, rtol=1e-6)
        pool.k(1)[slots[0][real], slots[1][real]] = want_key[real]
        assert written(pool, want_key, value, slots), "a value is wrong, or something else was written"


def copies() -> None:
    """Canonical bytes are those of the pool in host memory, and go back to where they came from."""
    chooser = random.Random(5)
    for layers, dtype, size, shards in (
        ((LayerLayout(2, 16, 8), LayerLayout(4, 6, 10)), "float32", 16, 2),
        ((LayerLayout(1, 5, 7), LayerLayout(3, 5, 7), LayerLayout(1, 130, 2)), "bfloat16", 48, 1),
    ):
        layout = KvLayout(layers, dtype, size, head_shards=shards)
        memory = KvMemory(layout, 7)
        memory.raw[:] = torch.randint(0, 256, memory.raw.shape, dtype=torch.uint8).numpy()
        raw = torch.from_numpy(memory.raw.copy())
        table = chooser.sample(range(7), 5)
        for tokens in (range(1), range(3, 4 * size + 5), range(size, 2 * size), range(size + 1, size + 9)):
            for some in (range(len(layers)), range(1, 2)):
                expected = torch.from_numpy(memory.read(table, tokens, some))
                assert torch.equal(CanonicalCopies(layout, raw).read(table, tokens, some), expected)
                empty = torch.zeros_like(raw)
                CanonicalCopies(layout, empty).write(table, tokens, some, expected)
                target = KvMemory(layout, 7)
                target.write(table, tokens, some, expected.numpy())
                assert torch.equal(empty, torch.from_numpy(target.raw))
                target.close()
        memory.close()


def padding() -> None:
    """Rows behind the spans are zero, and a row that is left out is not written."""
    with filled(LayerLayout(2, 16, 16), "float32", 16, [(200, 1), (3, 1), (64, 1)]) as (pool, spans):
        backend, params = TritonAttention(pool, 2), Params(0.25)
        query = torch.randn(5, 4, 16)
        alone = backend.attend(backend.plan(spans), 1, query[:3], params)
        plan = backend.plan(spans, 5)
        padded = backend.attend(plan, 1, query, params)
        assert torch.equal(padded[:3], alone) and not padded[3:].any()
        assert plan.decode is not None
        rows = DecodeRows(torch.tensor([0, -1, 2], dtype=torch.int32), plan.decode.lengths[:3], plan.decode.tables)
        out = torch.full((5, 4, 16), 7.0)
        scratch = (torch.empty(1 << 12), torch.empty(1 << 12))
        for splits in (1, 2):
            decode.attend_decode(query, pool.k(1), pool.v(1), out, rows, splits, scratch, params)
        torch.testing.assert_close(out[[0, 2]], alone[[0, 2]])
        assert bool((out[[1, 3, 4]] == 7).all())


def splits() -> None:
    """With a fixed number of splits a row's bits do not depend on the rows beside it, nor do a chunk's on its
    neighbours."""
    shapes = [(290, 1), (3, 1), (127, 1), (200, 1)]
    with filled(LayerLayout(2, 16, 16), "bfloat16", 16, shapes) as (pool, spans):
        backend, params = TritonAttention(pool, 3), Params(0.25, window=250)
        query = torch.randn(4, 4, 16).to(pool.dtype)
        together = backend.attend(backend.plan(spans), 1, query, params)
        for row, span in enumerate(spans):
            own = Span(0, 1, span.start, span.blocks)
            assert torch.equal(backend.attend(backend.plan([own]), 1, query[row : row + 1], params)[0], together[row])


def addresses() -> None:
    """A decode step's part of the buffer stays where it is, however long the sequences and whatever comes with it."""
    with filled(LayerLayout(1, 16, 16), "float32", 16, [(900, 1), (3, 1), (0, 40)]) as (pool, spans):
        backend = TritonAttention(pool)
        backend.reserve(4, 64, 4)

        def seen(some: list[Span]) -> tuple[int, ...]:
            rows = backend.plan(some, None if len(some) > 2 else 4).decode
            assert rows is not None and rows.tables.stride(0) == 4
            return rows.row_at.data_ptr(), rows.lengths.data_ptr(), rows.tables.data_ptr()

        assert all(seen([])), "a captured graph would hold a null pointer"
        assert seen(spans[:2]) == seen(spans[1:2] * 2) == seen(spans) == seen([spans[0]]) == seen([])


CHECKS: tuple[Callable[[], None], ...] = (writes, rotations, copies, padding, splits, addresses)


def main() -> int:
    torch.set_num_threads(1)
    decode.LEAST_SPLIT = LEAST_SPLIT
    for check in CHECKS:
        torch.manual_seed(0)
        check()
        print(f"{check.__name__}: right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
