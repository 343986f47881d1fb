"""The fast attention path equals the oracle on random block tables, head counts and options."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from common.attention import cpu
from common.attention.cpu import CpuAttention
from common.attention.interface import Params, Span
from common.attention.select import select_backend
from common.attention.torch_ref import TorchReference, attend_one
from common.errors import StartError
from common.kv.cache import BlockCopy
from common.kv.layout import KvLayout, LayerLayout
from common.kv.memory import KvMemory
from common.kv.store import KvStore

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
    """Spans of (start, length) over disjoint random blocks."""
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
HEADS = {"gqa": (LayerLayout(2, 16, 16), 6), "mha": (LayerLayout(3, 8, 8), 3), "k!=v": (LayerLayout(2, 24, 12), 4)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("heads", HEADS)
def test_equals_the_oracle(
    shape: str, option: str, heads: str, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
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
    fast, oracle = CpuAttention(store), TorchReference(store)
    for index in range(2):
        got = fast.attend(fast.plan(spans), index, query, params)
        expected = oracle.attend(oracle.plan(spans), index, query, params)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(dtype: str, make_store: MakeStore) -> None:
    torch.manual_seed(1)
    store = make_store(LayerLayout(2, 32, 32), 100, dtype)
    spans = random_spans(random.Random(1), 100, SHAPES["mixed"])
    query = torch.randn(sum(span.length for span in spans), 8, 32).to(store.dtype)
    fast, oracle = CpuAttention(store), TorchReference(store)
    got = fast.attend(fast.plan(spans), 1, query, Params(32**-0.5))
    expected = oracle.attend(oracle.plan(spans), 1, query, Params(32**-0.5))
    torch.testing.assert_close(got.float(), expected.float(), atol=2e-2, rtol=2e-2)


def test_rubbish_behind_a_sequence_is_never_read(make_store: MakeStore) -> None:
    store = make_store(LayerLayout(2, 16, 16), 40)
    spans = random_spans(random.Random(2), 40, [(20, 1), (100, 1), (3, 6), (0, 1)])
    query = torch.randn(9, 4, 16)
    fast = CpuAttention(store)
    before = fast.attend(fast.plan(spans), 0, query, Params(0.25))
    for span in spans:
        store.k(0)[span.blocks[-1], (span.end - 1) % BLOCK + 1 :] = torch.nan
        store.v(0)[span.blocks[-1], (span.end - 1) % BLOCK + 1 :] = torch.nan
    assert torch.equal(fast.attend(fast.plan(spans), 0, query, Params(0.25)), before)


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
    assert select_backend("cpu", store).name == "cpu"
    assert select_backend("cpu", store, "torch_ref").name == "torch_ref"
    with pytest.raises(StartError, match="no attention backend"):
        select_backend("cpu", store, "warp")


@pytest.mark.parametrize("shards", [1, 2])
def test_the_stores_of_the_shards_agree_with_the_canonical_bytes(shards: int) -> None:
    """Each rank of tensor parallelism writes its heads into its shard; whoever reads the pool gets all of them."""
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
