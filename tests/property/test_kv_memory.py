"""Canonical reads and writes of the paged pool against numpy arrays indexed token by token."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.ids import BlockId
from common.kv.layout import KvLayout, LayerLayout
from common.kv.memory import KvMemory

BLOCKS = 6
layers = st.builds(LayerLayout, st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
layouts = st.builds(
    KvLayout,
    st.lists(layers, min_size=1, max_size=3).map(tuple),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([16, 32]),
)


@st.composite
def slices(draw: st.DrawFn, layout: KvLayout) -> tuple[list[BlockId], range, range]:
    """A table, a token range within it, and a layer range (each may be empty)."""
    table = draw(st.permutations(range(BLOCKS)))[: draw(st.integers(1, BLOCKS))]
    limit = len(table) * layout.block_size
    # ends near block boundaries are where it can go wrong
    edge = st.integers(0, len(table)).flatmap(lambda b: st.integers(-1, 1).map(lambda d: b * layout.block_size + d))
    position = st.one_of(st.integers(0, limit), edge).map(lambda p: min(max(p, 0), limit))
    first, last = sorted((draw(position), draw(position)))
    low, high = sorted(draw(st.tuples(*[st.integers(0, len(layout.layers))] * 2)))
    return [BlockId(b) for b in table], range(first, last), range(low, high)


def naive_offsets(layout: KvLayout, table: list[BlockId], tokens: range, layers: range) -> list[int]:
    """Where each canonical byte lies in the flat pool, from the definition: [block][layer][k, then v][token][row]."""
    offsets: list[int] = []
    for index in layers:
        layer = layout.layers[index]
        for part, width in enumerate((layer.k_dim, layer.v_dim)):
            row = layer.kv_heads * width * layout.element_bytes
            inside = sum(other.elements for other in layout.layers[:index]) * layout.element_bytes * layout.block_size
            inside += part * layer.kv_heads * layer.k_dim * layout.element_bytes * layout.block_size
            for token in tokens:
                block, place = divmod(token, layout.block_size)
                start = table[block] * layout.block_bytes + inside + place * row
                offsets += range(start, start + row)
    return offsets


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_read_and_write_agree_with_the_definition(data: st.DataObject) -> None:
    layout = data.draw(layouts)
    table, tokens, chosen = data.draw(slices(layout))
    memory = KvMemory(layout, BLOCKS)
    try:
        flat = memory.raw.reshape(-1)
        flat[:] = np.random.default_rng(0).integers(0, 256, flat.size, np.uint8)
        before = flat.copy()
        where = naive_offsets(layout, table, tokens, chosen)
        assert layout.range_bytes(chosen.start, chosen.stop, len(tokens)) == len(where)

        canonical = memory.read(table, tokens, chosen)
        assert np.array_equal(canonical, before[where])
        out = np.zeros(len(where), np.uint8)
        assert memory.read(table, tokens, chosen, out) is out
        assert np.array_equal(out, canonical)

        fresh = np.random.default_rng(1).integers(0, 256, len(where), np.uint8)
        memory.write(table, tokens, chosen, fresh)
        expected = before.copy()
        expected[where] = fresh
        assert np.array_equal(flat, expected), "wrote elsewhere, or not everywhere"
        assert np.array_equal(memory.read(table, tokens, chosen), fresh)
    finally:
        del flat
        memory.close()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_canonical_bytes_do_not_depend_on_the_block_size(data: st.DataObject) -> None:
    """What one side reads with blocks of 16, the other may write into blocks of 32 and the reverse."""
    shape = data.draw(st.lists(layers, min_size=1, max_size=3).map(tuple))
    sender, receiver = (KvMemory(KvLayout(shape, "float32", size), BLOCKS) for size in (16, 32))
    try:
        assert sender.layout.fingerprint == receiver.layout.fingerprint
        sender.raw[:] = np.random.default_rng(2).integers(0, 256, sender.raw.shape, np.uint8)
        first, last = sorted(data.draw(st.tuples(*[st.integers(0, BLOCKS * 16)] * 2)))
        source = [BlockId(b) for b in data.draw(st.permutations(range(BLOCKS)))]
        target = [BlockId(b) for b in data.draw(st.permutations(range(BLOCKS)))]
        everything = range(len(shape))
        data_bytes = sender.read(source, range(first, last), everything)
        receiver.write(target, range(first, last), everything, data_bytes)
        assert np.array_equal(receiver.read(target, range(first, last), everything), data_bytes)
    finally:
        sender.close()
        receiver.close()


LAYOUT = KvLayout((LayerLayout(2, 4, 4),), "float32", 16)


def test_another_process_sees_the_bytes_and_cannot_write_them() -> None:
    memory = KvMemory(LAYOUT, 2)
    reader = KvMemory.attach(os.dup(memory.fd), LAYOUT, 2)
    try:
        memory.raw[1, 5] = 42
        memory.generations[1] = 7
        assert reader.raw[1, 5] == 42
        assert reader.generations[1] == 7
        with pytest.raises(ValueError, match="read-only"):
            reader.raw[1, 5] = 1
        with pytest.raises(OSError):
            os.pwrite(reader.fd, b"x", 0)
        with pytest.raises(OSError):
            os.ftruncate(reader.fd, 0)
    finally:
        reader.close()
        memory.close()


def test_a_pool_of_another_size_is_refused_and_its_descriptor_closed() -> None:
    memory = KvMemory(LAYOUT, 2)
    copy = os.dup(memory.fd)
    try:
        with pytest.raises(ValueError, match="size"):
            KvMemory.attach(copy, LAYOUT, 2000)
        with pytest.raises(OSError):
            os.fstat(copy)
    finally:
        memory.close()


@pytest.mark.parametrize(("dtype", "block_size"), [("int4", 16), ("float32", 0), ("float32", 24), ("float32", -16)])
def test_an_impossible_layout_is_refused(dtype: str, block_size: int) -> None:
    with pytest.raises(ValueError, match=r"KV dtype|block size"):
        KvLayout(LAYOUT.layers, dtype, block_size)


def test_the_fingerprint_names_what_the_bytes_mean() -> None:
    base = KvLayout((LayerLayout(2, 4, 4), LayerLayout(2, 4, 4)), "float32", 16)
    assert base.fingerprint == KvLayout(base.layers, "float32", 32).fingerprint
    others = [
        KvLayout(base.layers, "bfloat16", 16),
        KvLayout(base.layers[:1], "float32", 16),
        KvLayout((LayerLayout(2, 4, 4), LayerLayout(2, 4, 5)), "float32", 16),
        KvLayout((LayerLayout(2, 4, 4), LayerLayout(4, 2, 2)), "float32", 16),
    ]
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)
