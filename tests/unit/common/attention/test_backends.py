"""The fast attention paths equal the oracle on random block tables, head counts and options."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.attention import cpu
from common.attention.cpu import CpuAttention
from common.attention.interface import AttentionBackend, Params, Span
from common.attention.native import NativeAttention
from common.attention.registry import Wanted, select_backend
from common.attention.torch_reference import TorchReference, attend_one
from common.core.errors import StartError
from common.kernels import cpu as native
from common.kv.cache import BlockCopy
from common.kv.layout import KvLayout, LayerLayout
from common.kv.storage.host import KvMemory
from common.kv.storage.tensors import KvStore

BLOCK = 16


MakeStore = Callable[..., KvStore]


@pytest.fixture
def make_store() -> Iterator[MakeStore]:
    stores: list[KvStore] = []

    def make(layer: LayerLayout, blocks: int, dtype: str = "float32") -> KvStore:
        store = KvStore(KvMemory(KvLayout((layer, layer), dtype, BLOCK), blocks))
        stores.append(store)
        for part in (store.k(0), store.v(0), store.k(1), store.v(1)):
            part.copy_(torch.randn(part.shape))
        return store

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make
    torch.set_num_threads(threads)
    for store in stores:
        store.close()


def random_spans(rng: random.Random, blocks: int, shapes: list[tuple[int, int]]) -> list[Span]:
    """Return spans over disjoint random blocks for ``shapes`` of (start, length)."""
    free = list(range(blocks))
    rng.shuffle(free)
    spans, row = [], 0
    for start, length in shapes:
        spans.append(Span(row, length, start, [free.pop() for _ in range(-(-(start + length) // BLOCK))]))
        row += length
    return spans


SHAPES = {
    "decode": [(0, 1), (15, 1), (16, 1), (100, 1), (31, 1)],
    "decode-long-and-short": [(1900, 1), (3, 1), (1800, 1), (17, 1), (2, 1), (1, 1)],
    "prefill": [(0, 7), (0, 200), (0, 16)],
    "chunks": [(16, 33), (100, 120), (5, 2)],
    "mixed": [(40, 1), (0, 50), (500, 1), (130, 64), (0, 1)],
}
OPTIONS = {
    "plain": {},
    "window": {"window": 24},
    "window-one": {"window": 1},
    "softcap": {"softcap": 5.0},
    "window-softcap": {"window": 40, "softcap": 3.0},
    "sinks": {"sinks": True},
    "window-sinks": {"window": 33, "sinks": True},
}
HEADS = {
    "gqa": (LayerLayout(2, 16, 16), 6),
    "mha": (LayerLayout(3, 8, 8), 3),
    "k!=v": (LayerLayout(2, 24, 12), 4),
    "wide": (LayerLayout(1, 96, 64), 20),
    "odd": (LayerLayout(2, 5, 7), 4),
}
VARIANTS = library.variants if (library := native.library()) else ()
FAST = ["cpu", *VARIANTS]
"""The torch path, and the C kernels for every instruction set of this machine."""
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}


@pytest.fixture
def fast(request: pytest.FixtureRequest) -> Iterator[Callable[[KvStore], AttentionBackend]]:
    """Return the backend class that the test's parameter names."""
    if request.param == "cpu":
        yield CpuAttention
        return
    assert library is not None
    library.use(request.param)
    yield NativeAttention
    library.use(VARIANTS[0])


def test_the_kernels_were_compiled() -> None:
    assert library is not None, "no compiled kernels: `make install` compiles them, with a C compiler"
    assert VARIANTS[-1] == "portable"
    with pytest.raises(ValueError, match="do not run here"):
        library.use("of another machine")
    assert library.variant == VARIANTS[0]


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("fast", FAST, indirect=True)
def test_equals_the_oracle(
    shape: str,
    option: str,
    heads: str,
    fast: Callable[[KvStore], AttentionBackend],
    make_store: MakeStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "TILE_SCORES", 2000)
    monkeypatch.setattr(cpu, "TILE_ROWS", (4, 48))
    monkeypatch.setattr(cpu, "GROUP_WASTE", 100)
    torch.manual_seed(0)
    rng = random.Random(f"{shape}{option}{heads}")
    layer, query_heads = HEADS[heads]
    fields = dict(OPTIONS[option])
    sinks = torch.randn(query_heads) if fields.pop("sinks", False) else None
    params = Params(0.3, sinks=sinks, **fields)
    store = make_store(layer, 300)
    spans = random_spans(rng, 300, SHAPES[shape])
    query = torch.randn(sum(span.length for span in spans), query_heads, layer.k_dim)
    backend, oracle = fast(store), TorchReference(store)
    for index in range(2):
        got = backend.attend(backend.plan(spans), index, query, params)
        expected = oracle.attend(oracle.plan(spans), index, query, params)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("dims", [(64, 64), (32, 96), (160, 32)], ids=str)
@pytest.mark.parametrize("fast", VARIANTS[:2], indirect=True)
def test_few_rows_of_bfloat16_in_whole_vectors(
    option: str,
    group: int,
    dims: tuple[int, int],
    fast: Callable[[KvStore], AttentionBackend],
    make_store: MakeStore,
) -> None:
    """Model shapes for which a decode row's keys are multiplied in place, with tiles and with vectors. Slots that were
    never written in the last block may hold anything."""
    torch.manual_seed(group)
    store = make_store(LayerLayout(2, *dims), 300, "bfloat16")
    spans = random_spans(random.Random(group), 300, [*SHAPES["decode-long-and-short"], (62, 2), (63, 4), (127, 1)])
    for span in spans:
        store.k(0)[span.blocks[-1], (span.end - 1) % BLOCK + 1 :] = torch.nan
        store.v(0)[span.blocks[-1], (span.end - 1) % BLOCK + 1 :] = torch.nan
    fields = dict(OPTIONS[option])
    sinks = torch.randn(2 * group) if fields.pop("sinks", False) else None
    params = Params(0.3, sinks=sinks, **fields)
    query = torch.randn(sum(span.length for span in spans), 2 * group, dims[0]).to(store.dtype)
    backend, oracle = fast(store), TorchReference(store)
    got = backend.attend(backend.plan(spans), 0, query, params)
    expected = oracle.attend(oracle.plan(spans), 0, query, params)
    torch.testing.assert_close(got.float(), expected.float(), atol=TOLERANCE["bfloat16"], rtol=TOLERANCE["bfloat16"])


@pytest.mark.sampled
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("group", [1, 3, 16])
@pytest.mark.parametrize("dims", [(64, 64), (32, 96), (40, 24)], ids=str)
@pytest.mark.parametrize(("growth", "first"), [(1.0, 1.0), (30.0, 1.0), (1.0, 60.0)])
@pytest.mark.parametrize("fast", VARIANTS[:2], indirect=True)
def test_many_rows_of_bfloat16_over_many_positions(
    option: str,
    group: int,
    dims: tuple[int, int],
    growth: float,
    first: float,
    fast: Callable[[KvStore], AttentionBackend],
    make_store: MakeStore,
) -> None:
    """Chunks of prompts. If scores grow with the position, weights relative to an earlier maximum would overflow; so
    would weights relative to the first score if that is far below the others. If it is far above, it alone counts. A
    chunk of one row more than a whole run leaves a task with few rows of one head."""
    torch.manual_seed(group)
    store = make_store(LayerLayout(2, *dims), 200, "bfloat16")
    spans = random_spans(random.Random(group), 200, [(700, 70), (0, 385), (250, 33), (520, 9)])
    for span in spans:
        last = span.end - 1
        for place, block in enumerate(span.blocks):
            store.k(0)[block] *= 1 + (growth - 1) * place * BLOCK / last
        store.k(0)[span.blocks[0], 0] *= first
        store.k(0)[span.blocks[-1], last % BLOCK + 1 :] = torch.nan
        store.v(0)[span.blocks[-1], last % BLOCK + 1 :] = torch.nan
    fields = dict(OPTIONS[option])
    if "window" in fields:
        fields["window"] *= 9
    sinks = torch.randn(2 * group) if fields.pop("sinks", False) else None
    params = Params(dims[0] ** -0.5, sinks=sinks, **fields)
    query = torch.randn(sum(span.length for span in spans), 2 * group, dims[0]).to(store.dtype)
    backend, oracle = fast(store), TorchReference(store)
    got = backend.attend(backend.plan(spans), 0, query, params)
    expected = oracle.attend(oracle.plan(spans), 0, query, params)
    torch.testing.assert_close(got.float(), expected.float(), atol=TOLERANCE["bfloat16"], rtol=TOLERANCE["bfloat16"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("growth", [1, 30])
@pytest.mark.parametrize("fast", VARIANTS, indirect=True)
def test_a_row_does_not_depend_on_those_beside_it(
    dtype: str, growth: int, fast: Callable[[KvStore], AttentionBackend], make_store: MakeStore
) -> None:
    torch.manual_seed(7)
    store = make_store(LayerLayout(2, 64, 64), 60, dtype)
    (span,) = random_spans(random.Random(7), 60, [(700, 200)])
    query = torch.randn(200, 6, 64).to(store.dtype)
    query[100:] *= growth
    backend, params = fast(store), Params(0.125)
    together = backend.attend(backend.plan([span]), 0, query, params)
    for start, end in ((0, 37), (5, 70), (101, 200), (190, 200)):
        some = Span(0, end - start, span.start + start, span.blocks)
        assert torch.equal(backend.attend(backend.plan([some]), 0, query[start:end], params), together[start:end])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", ["gqa", "wide", "odd"])
@pytest.mark.parametrize("shape", ["mixed", "chunks", "decode-long-and-short"])
@pytest.mark.parametrize("fast", FAST, indirect=True)
def test_half_precision_is_close(
    dtype: str, heads: str, shape: str, fast: Callable[[KvStore], AttentionBackend], make_store: MakeStore
) -> None:
    torch.manual_seed(1)
    layer, query_heads = HEADS[heads]
    store = make_store(layer, 300, dtype)
    spans = random_spans(random.Random(1), 300, SHAPES[shape])
    query = torch.randn(sum(span.length for span in spans), query_heads, layer.k_dim).to(store.dtype)
    backend, oracle = fast(store), TorchReference(store)
    got = backend.attend(backend.plan(spans), 1, query, Params(layer.k_dim**-0.5))
    expected = oracle.attend(oracle.plan(spans), 1, query, Params(layer.k_dim**-0.5))
    torch.testing.assert_close(got.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("fast", FAST, indirect=True)
def test_rubbish_behind_a_sequence_is_never_read(
    dtype: str, window: int | None, fast: Callable[[KvStore], AttentionBackend], make_store: MakeStore
) -> None:
    store = make_store(LayerLayout(2, 32, 32), 40, dtype)
    spans = random_spans(random.Random(2), 40, [(20, 1), (100, 1), (3, 6), (0, 1)])
    query = torch.randn(9, 4, 32).to(store.dtype)
    backend = fast(store)
    before = backend.attend(backend.plan(spans), 0, query, Params(0.25, window))
    for span in spans:
        store.k(0)[span.blocks[-1], (span.end - 1) % BLOCK + 1 :] = torch.nan
        store.v(0)[span.blocks[-1], (span.end - 1) % BLOCK + 1 :] = torch.nan
    assert torch.equal(backend.attend(backend.plan(spans), 0, query, Params(0.25, window)), before)


@pytest.mark.parametrize("fast", FAST, indirect=True)
def test_numbers_that_are_none_are_not_hidden(
    fast: Callable[[KvStore], AttentionBackend], make_store: MakeStore
) -> None:
    """NaN must reach the output, because the engine fails a request when it finds NaN there."""
    store = make_store(LayerLayout(1, 16, 16), 20)
    spans = random_spans(random.Random(4), 20, [(70, 1), (70, 1)])
    query = torch.randn(2, 2, 16)
    store.k(0)[spans[0].blocks[1], 3] = torch.nan
    out = fast(store).attend(fast(store).plan(spans), 0, query, Params(0.25))
    assert out[0].isnan().all() and out[1].isfinite().all()


@pytest.mark.skipif(not VARIANTS, reason="no compiled kernels")
@given(data=st.data())
def test_the_kernels_equal_the_oracle_on_whatever(data: st.DataObject) -> None:
    """The output is the same for any mix of spans, heads, sizes, block sizes, types, options and threads."""
    draw = data.draw
    group, kv_heads = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(1, 4))
    layer = LayerLayout(kv_heads, draw(st.integers(1, 80)), draw(st.integers(1, 80)))
    dtype, block = draw(st.sampled_from(["float32", "bfloat16", "float16"])), draw(st.sampled_from([16, 32, 48]))
    shapes = draw(
        st.lists(st.tuples(st.integers(0, 1500), st.sampled_from([1, 1, 1, 2, 5, 40])), min_size=1, max_size=5)
    )
    torch.manual_seed(draw(st.integers(0, 1000)))
    blocks = sum(-(-(start + length) // block) for start, length in shapes)
    store = KvStore(KvMemory(KvLayout((layer,), dtype, block), blocks))
    threads = torch.get_num_threads()
    try:
        for part in (store.k(0), store.v(0)):
            part.copy_(torch.randn(part.shape))
        spans, row, free = [], 0, draw(st.permutations(range(blocks)))
        for start, length in shapes:
            count = -(-(start + length) // block)
            spans.append(Span(row, length, start, free[:count]))
            row, free = row + length, free[count:]
        params = Params(
            layer.k_dim**-0.5,
            draw(st.none() | st.integers(1, 700)),
            draw(st.none() | st.just(4.0)),
            torch.randn(group * kv_heads) if draw(st.booleans()) else None,
        )
        query = torch.randn(group * kv_heads, row, layer.k_dim).to(store.dtype).transpose(0, 1)
        torch.set_num_threads(draw(st.integers(1, 3)))
        assert library is not None
        library.use(draw(st.sampled_from(VARIANTS)))
        backend, oracle = NativeAttention(store), TorchReference(store)
        got = backend.attend(backend.plan(spans), 0, query, params)
        expected = oracle.attend(oracle.plan(spans), 0, query, params)
        torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    finally:
        torch.set_num_threads(threads)
        library.use(VARIANTS[0])  # type: ignore[union-attr]
        store.close()


def test_one_long_sequence_does_not_pad_the_short_ones(make_store: MakeStore) -> None:
    store = make_store(LayerLayout(1, 8, 8), 400)
    spans = random_spans(random.Random(3), 400, [(4000, 1), *((30, 1) for _ in range(20))])
    plan = CpuAttention(store).plan(spans)
    groups = CpuAttention(store)._plan_window(plan, None, 0, 4).decode
    gathered = sum(len(group.blocks) for group in groups)
    assert gathered * BLOCK <= sum(span.end for span in spans) + cpu.GROUP_WASTE * len(groups) + BLOCK * len(spans)


def test_the_oracle_is_causal_attention() -> None:
    query, key, value = torch.randn(10, 4, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None],
        is_causal=True, enable_gqa=True, scale=0.4,
    )[0].transpose(0, 1)  # fmt: skip
    torch.testing.assert_close(attend_one(query, key, value, 0, Params(0.4)), expected, atol=1e-5, rtol=1e-4)


def test_an_unknown_backend_is_refused_in_words(make_store: MakeStore) -> None:
    store = make_store(LayerLayout(1, 8, 8), 2)
    assert select_backend(store).backend.name == ("native" if VARIANTS else "cpu")
    assert select_backend(store, Wanted("torch")).backend.name == "torch"
    with pytest.raises(StartError, match="no attention backend"):
        select_backend(store, Wanted("warp"))


def test_without_compiled_kernels_torch_attends(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(LayerLayout(1, 8, 8), 2)
    monkeypatch.setattr(native, "library", lambda: None)
    assert select_backend(store).backend.name == "cpu"
    with pytest.raises(StartError, match="not compiled") as refused:
        select_backend(store, Wanted("native"))
    assert "compiler" in refused.value.todo


@pytest.mark.parametrize("shards", [1, 2])
def test_the_stores_of_the_shards_agree_with_the_canonical_bytes(shards: int) -> None:
    """Each tensor-parallel rank writes its heads into its own shard, and a read of the pool returns all heads."""
    layout = KvLayout((LayerLayout(4, 4, 2), LayerLayout(2, 6, 2)), "float32", BLOCK, head_shards=shards)
    memory = KvMemory(layout, 5)
    stores = [KvStore(memory, rank) for rank in range(shards)]
    table, tokens = [3, 1], 20
    rows = torch.arange(tokens)
    slots = (torch.tensor(table)[rows // BLOCK], rows % BLOCK)
    written = []
    for index, layer in enumerate(layout.layers):
        key = torch.randn(tokens, layer.kv_heads, layer.k_dim)
        value = torch.randn(tokens, layer.kv_heads, layer.v_dim)
        for store, keys, values in zip(stores, key.chunk(shards, 1), value.chunk(shards, 1), strict=True):
            store.write(index, keys, values, slots)
        written += [key.flatten(), value.flatten()]
    canonical = memory.read(table, range(tokens), range(2))  # type: ignore[arg-type]
    assert torch.equal(torch.from_numpy(canonical).view(torch.float32), torch.cat(written))
    for store in stores:
        store.copy_blocks([BlockCopy(3, 0)])  # type: ignore[arg-type]
        assert torch.equal(store.k(1)[0], store.k(1)[3])
        store.clear([0])
        assert not store.k(0)[0].any() and not store.v(1)[0].any()
    memory.close()
