"""Canonical reads and writes of the paged pool, checked against a slow definition of where each byte lies."""

from __future__ import annotations

import os
from math import lcm
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from common.core.ids import BlockId
from common.kv import pieces
from common.kv.convert import converted
from common.kv.layout import KvDtype, KvLayout, LayerLayout, converts
from common.kv.storage import host
from common.kv.storage.host import KvMemory
from tests.fakes.system import needs_populate

BLOCKS = 6
DTYPES: tuple[KvDtype, ...] = ("float32", "bfloat16", "float16", "fp8")
SHARDS = (1, 2, 3)


def layer_lists(shards: int = 1) -> st.SearchStrategy[tuple[LayerLayout, ...]]:
    """Generate layers whose heads can be split into ``shards``."""
    heads = st.integers(1, 3).map(lambda count: count * shards)
    layer = st.builds(LayerLayout, heads, st.integers(1, 4), st.integers(1, 4))
    return st.lists(layer, min_size=1, max_size=3).map(tuple)


layouts = st.sampled_from(SHARDS).flatmap(
    lambda shards: st.builds(
        KvLayout, layer_lists(shards), st.sampled_from(DTYPES), st.sampled_from([16, 32]), st.just(shards)
    )
)


@st.composite
def slices(draw: st.DrawFn, layout: KvLayout) -> tuple[list[BlockId], range, range]:
    """Generate a block table, a token range within it, and a layer range (each range may be empty)."""
    table = draw(st.permutations(range(BLOCKS)))[: draw(st.integers(1, BLOCKS))]
    limit = len(table) * layout.block_size
    # off-by-one errors show at ends near block boundaries
    edge = st.integers(0, len(table)).flatmap(lambda b: st.integers(-1, 1).map(lambda d: b * layout.block_size + d))
    position = st.one_of(st.integers(0, limit), edge).map(lambda p: min(max(p, 0), limit))
    first, last = sorted((draw(position), draw(position)))
    low, high = sorted(draw(st.tuples(*[st.integers(0, len(layout.layers))] * 2)))
    return [BlockId(b) for b in table], range(first, last), range(low, high)


def naive_offsets(layout: KvLayout, table: list[BlockId], tokens: range, layers: range) -> list[int]:
    """Return where each canonical byte lies in the flat pool, by definition. The canonical order is [layer][k, then
    v][token][kv head][element]; the pool's is [block][shard][layer][k, then v][token][kv head of the
    shard][element]."""
    offsets: list[int] = []
    for index in layers:
        layer = layout.layers[index]
        heads = layer.kv_heads // layout.head_shards
        for part, dim in enumerate((layer.k_dim, layer.v_dim)):
            width = dim * layout.element_bytes
            inside = sum(other.elements for other in layout.layers[:index]) * layout.element_bytes * layout.block_size
            inside //= layout.head_shards
            inside += part * heads * layer.k_dim * layout.element_bytes * layout.block_size
            for token in tokens:
                block, place = divmod(token, layout.block_size)
                for head in range(layer.kv_heads):
                    shard, place_in_shard = divmod(head, heads)
                    start = table[block] * layout.block_bytes + shard * layout.block_bytes // layout.head_shards
                    start += inside + (place * heads + place_in_shard) * width
                    offsets += range(start, start + width)
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
        assert memory.checksum(table, tokens, chosen) == xxhash.xxh3_64_intdigest(canonical.data)

        fresh = np.random.default_rng(1).integers(0, 256, len(where), np.uint8)
        memory.write(table, tokens, chosen, fresh)
        expected = before.copy()
        expected[where] = fresh
        assert np.array_equal(flat, expected), "wrote elsewhere, or not everywhere"
        assert np.array_equal(memory.read(table, tokens, chosen), fresh)
    finally:
        del flat
        memory.close()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_pool_writes_ranges_of_any_other_layout(data: st.DataObject) -> None:
    """The two pools may differ in block size, head split and, but for fp8, element type; each element lands in its
    place."""
    shards = [data.draw(st.sampled_from(SHARDS)) for _ in range(2)]
    shape = data.draw(layer_lists(lcm(*shards)))
    sends = data.draw(st.sampled_from(DTYPES))
    takes = data.draw(st.sampled_from([dtype for dtype in DTYPES if converts(sends, dtype)]))
    sender, receiver = (
        KvMemory(KvLayout(shape, dtype, data.draw(st.sampled_from([16, 32])), each), BLOCKS)
        for dtype, each in zip((sends, takes), shards, strict=True)
    )
    try:
        assert sender.layout.fingerprint == receiver.layout.fingerprint
        sender.raw[:] = np.random.default_rng(2).integers(0, 256, sender.raw.shape, np.uint8)
        first, last = sorted(data.draw(st.tuples(*[st.integers(0, BLOCKS * 16)] * 2)))
        low, high = sorted(data.draw(st.tuples(*[st.integers(0, len(shape))] * 2)))
        source = [BlockId(b) for b in data.draw(st.permutations(range(BLOCKS)))]
        target = [BlockId(b) for b in data.draw(st.permutations(range(BLOCKS)))]
        tokens, chosen = range(first, last), range(low, high)
        sent = sender.read(source, tokens, chosen)
        expected = receiver.raw.reshape(-1).copy()
        receiver.write(target, tokens, chosen, sent, sender.layout.dtype)
        right = sender.raw.reshape(-1)[naive_offsets(sender.layout, source, tokens, chosen)]
        assert np.array_equal(sent, right)
        places = naive_offsets(receiver.layout, target, tokens, chosen)
        expected[places] = converted(right, sender.layout.dtype, receiver.layout.dtype)
        assert np.array_equal(receiver.raw.reshape(-1), expected), "wrote elsewhere, or not everywhere"
    finally:
        sender.close()
        receiver.close()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_take_equals_read_then_write(data: st.DataObject) -> None:
    """A direct take between pools with byte-identical rows equals a read and a write, whatever their block sizes."""
    shape, dtype = data.draw(layer_lists()), data.draw(st.sampled_from(DTYPES))
    sender, receiver = (
        KvMemory(KvLayout(shape, dtype, data.draw(st.sampled_from([16, 32, 48, 80]))), BLOCKS) for _ in range(2)
    )
    try:
        sender.raw[:] = np.random.default_rng(2).integers(0, 256, sender.raw.shape, np.uint8)
        size, most = sender.layout.block_size, BLOCKS * min(sender.layout.block_size, receiver.layout.block_size)
        first = data.draw(st.integers(0, most - 1))
        tokens = range(first, data.draw(st.integers(first + 1, most)))
        low = data.draw(st.integers(0, len(shape) - 1))
        chosen = range(low, data.draw(st.integers(low + 1, len(shape))))
        source = [BlockId(b) for b in data.draw(st.permutations(range(BLOCKS)))]
        target = [BlockId(b) for b in data.draw(st.permutations(range(BLOCKS)))]
        assert receiver.takes(sender)
        digest = receiver.take(target, tokens, chosen, sender, source[first // size : -(-tokens.stop // size)])
        sent, taken = sender.read(source, tokens, chosen), receiver.raw.copy()
        assert digest == xxhash.xxh3_64_intdigest(sent.data)
        receiver.raw[:] = 0
        receiver.write(target, tokens, chosen, sent)
        assert np.array_equal(taken, receiver.raw), "took it elsewhere, or not everywhere"
    finally:
        sender.close()
        receiver.close()


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (("float32", 16, 1), ("bfloat16", 16, 1)),
        (("float32", 16, 2), ("float32", 16, 1)),
        (("float32", 16, 1), ("float32", 16, 2)),
        (("float32", 16, 2), ("float32", 16, 2)),
    ],
)
def test_rows_that_are_not_the_same_bytes_in_one_place_are_not_taken(
    here: tuple[KvDtype, int, int], there: tuple[KvDtype, int, int]
) -> None:
    layers = (LayerLayout(2, 4, 4),)
    one, other = KvMemory(KvLayout(layers, *here), 2), KvMemory(KvLayout(layers, *there), 2)
    assert not one.takes(other)
    one.close()
    other.close()


def test_a_library_that_is_left_over_or_broken_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, other = tmp_path / "broken.so", tmp_path / "other.so"
    broken.write_bytes(b"\x7fELF, and no more")
    compiled = next(Path(pieces.__file__).parent.glob("_pieces*"))
    other.write_bytes(compiled.read_bytes().replace(b"tandem_pieces_interface", b"tandem_pieces_of_before"))
    assert pieces._loaded([broken]) is pieces._loaded([other]) is pieces._loaded([tmp_path / "none.so"]) is None
    assert pieces._loaded([tmp_path / "none.so", compiled]) is not None
    monkeypatch.setattr(pieces, "INTERFACE", pieces.INTERFACE + 1)
    assert pieces._loaded([compiled]) is None, "it is what older sources call"


def test_the_copy_in_one_pass_was_compiled() -> None:
    assert pieces.are_compiled(), "no compiled function: `make install` compiles it, with a C compiler"


def test_take_refuses_blocks_outside_pool() -> None:
    layout = KvLayout((LayerLayout(2, 4, 4),) * 2, "float32", 16)
    sender, receiver = KvMemory(layout, 3), KvMemory(layout, 3)
    reader = KvMemory.attach(os.dup(receiver.fd), layout, 3)
    table, tokens, both = [BlockId(2), BlockId(0)], range(3, 20), range(2)
    try:
        receiver.raw[:] = 0xEE
        with pytest.raises(IndexError, match="of 3"):
            receiver.take(table, tokens, both, sender, [BlockId(0), BlockId(3)])
        with pytest.raises(IndexError, match="of 3"):
            receiver.take([BlockId(2), BlockId(-1)], tokens, both, sender, table)
        with pytest.raises(IndexError):
            receiver.take(table[:1], tokens, both, sender, table)
        with pytest.raises(IndexError):
            receiver.take(table, tokens, both, sender, table[:1])
        with pytest.raises(IndexError, match="layers 1 to 3 of 2"):
            receiver.take(table, tokens, range(1, 3), sender, table)
        with pytest.raises(ValueError, match="belongs to another process"):
            reader.take(table, tokens, both, sender, table)
        assert (receiver.raw == 0xEE).all()
    finally:
        for memory in (reader, sender, receiver):
            memory.close()


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(
        st.one_of(st.integers(0, 200), st.integers(0, 40).map(lambda stripes: 64 * stripes), st.integers(900, 3000)),
        min_size=1,
        max_size=30,
    ),
    wide=st.booleans(),
    aligned=st.booleans(),
    chance=st.randoms(use_true_random=False),
)
def test_pieces_are_hashed_and_copied_as_if_they_were_one(
    sizes: list[int], wide: bool, aligned: bool, chance: Random
) -> None:
    gaps = [64 * chance.randrange(3) if aligned else chance.randrange(100) for _ in sizes]
    ends = np.cumsum(np.array(sizes) + gaps)
    source = np.frombuffer(chance.randbytes(int(ends[-1]) + 64), np.uint8)
    begin = -source.ctypes.data % 64 if aligned else 0
    places = begin + ends - sizes
    target = np.zeros(len(source) + 128, np.uint8)
    # same alignment modulo 64 as the source, but not always 0
    shift = (source.ctypes.data - target.ctypes.data) % 64
    whole = b"".join(source[at : at + size].tobytes() for at, size in zip(places, sizes, strict=True))
    sources, lengths = source.ctypes.data + places, np.array(sizes, np.int64)
    digest = xxhash.xxh3_64_intdigest(whole)
    assert pieces.digest(sources, lengths, wide=wide) == digest
    assert pieces.digest(sources, lengths, target.ctypes.data + shift + places, wide=wide) == digest
    expected = np.zeros_like(target)
    for at, size in zip(places, sizes, strict=True):
        expected[shift + at : shift + at + size] = source[at : at + size]
    assert np.array_equal(target, expected), "copied elsewhere, or not everything"


def test_heads_that_cannot_be_split_evenly_are_refused() -> None:
    for shards in (3, 4, 0, -1):
        with pytest.raises(ValueError, match="shards"):
            KvLayout((LayerLayout(2, 4, 4), LayerLayout(4, 4, 4)), "float32", 16, shards)


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


def test_a_pool_that_its_owner_could_still_shrink_is_refused_and_its_descriptor_closed(tmp_path: Path) -> None:
    """A process that reads beyond the end of a mapped file is killed by SIGBUS."""
    memory = KvMemory(LAYOUT, 2)
    size = os.fstat(memory.fd).st_size
    memory.close()
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    on_disk = os.open(tmp_path / "pool", os.O_RDWR | os.O_CREAT)
    for descriptor, error in ((unsealed, ValueError), (on_disk, OSError)):
        os.ftruncate(descriptor, size)
        with pytest.raises(error):
            KvMemory.attach(descriptor, LAYOUT, 2)
        with pytest.raises(OSError):
            os.fstat(descriptor)


def test_a_descriptor_that_cannot_be_mapped_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = KvMemory(LAYOUT, 2)
    copy = os.dup(memory.fd)

    def refuse(*_: Any) -> None:
        raise OSError("no address space")

    monkeypatch.setattr(host.mmap, "mmap", refuse)
    with pytest.raises(OSError, match="address space"):
        KvMemory.attach(copy, LAYOUT, 2)
    with pytest.raises(OSError):
        os.fstat(copy)
    memory.close()


@pytest.mark.parametrize(("dtype", "block_size"), [("int4", 16), ("float32", 0), ("float32", 24), ("float32", -16)])
def test_an_impossible_layout_is_refused(dtype: Any, block_size: int) -> None:
    with pytest.raises(ValueError, match=r"KV dtype|block size"):
        KvLayout(LAYOUT.layers, dtype, block_size)


def test_layout_fingerprint_depends_on_layer_shapes_only() -> None:
    base = KvLayout((LayerLayout(2, 4, 4), LayerLayout(2, 4, 4)), "float32", 16)
    assert base.fingerprint == KvLayout(base.layers, "bfloat16", 32, 2).fingerprint
    others = [
        KvLayout(base.layers[:1], "float32", 16),
        KvLayout((LayerLayout(2, 4, 4), LayerLayout(2, 4, 5)), "float32", 16),
        KvLayout((LayerLayout(2, 4, 4), LayerLayout(4, 2, 2)), "float32", 16),
    ]
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)


@needs_populate
def test_populate_allocates_memory_and_keeps_contents() -> None:
    layout = KvLayout((LayerLayout(2, 64, 64),), "bfloat16", 16)
    memory = KvMemory(layout, 64)
    size = layout.block_bytes * 64
    assert os.fstat(memory.fd).st_blocks == 0, "a pool that is not used takes no memory"
    memory.raw[3] = 7
    memory.populate(100, size // 2)
    assert size // 2 <= os.fstat(memory.fd).st_blocks * 512 < size
    assert (memory.raw[3] == 7).all() and not memory.raw[4:].any()
    memory.close()
