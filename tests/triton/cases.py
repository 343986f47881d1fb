"""Compare the Triton backend with the reference, one case of a grid at a time. On a CPU it needs TRITON_INTERPRET=1.

Every slot of the pool that a sequence does not own holds NaN, so a read beyond its end shows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from common.attention.interface import AttentionBackend, Params, Span
from common.attention.torch_reference import TorchReference
from common.kv.layout import KvDtype, KvLayout, LayerLayout
from common.kv.storage.host import KvMemory
from common.kv.storage.interface import KvStorage
from common.kv.storage.slab import SlabStore
from common.kv.storage.tensors import KvStore
from tests.selection import covering

SHAPES = {
    "decode": [(0, 1), (63, 1), (64, 1), (100, 1), (31, 1)],
    "long": [(290, 1), (3, 1), (127, 1)],
    "prompts": [(0, 7), (0, 70), (0, 16)],
    "chunks": [(16, 33), (100, 30), (5, 2)],
    "mixed": [(40, 1), (0, 25), (150, 1), (130, 20), (0, 1)],
}
"""(start, length) of each span."""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 24},
    "window of one": {"window": 1},
    "softcap": {"softcap": 5.0},
    "window and softcap": {"window": 40, "softcap": 3.0},
    "sinks": {"sinks": True},
    "window and sinks": {"window": 100, "sinks": True},
}
HEADS = {
    "grouped": (LayerLayout(2, 64, 64), 6),
    "single": (LayerLayout(3, 16, 16), 3),
    "latent": (LayerLayout(1, 192, 128), 2),
    "wide": (LayerLayout(1, 256, 256), 4),
    "many": (LayerLayout(1, 80, 96), 20),
    "odd": (LayerLayout(2, 5, 7), 4),
}
"""KV shape of a layer, and its query heads."""
SETUPS: dict[str, tuple[KvDtype, int, int]] = {
    "float32, blocks of 16": ("float32", 16, 1),
    "float32, blocks of 48, 3 splits": ("float32", 48, 3),
    "float32, blocks of 256, 2 splits": ("float32", 256, 2),
    "bfloat16, blocks of 16, 4 splits": ("bfloat16", 16, 4),
    "bfloat16, blocks of 64": ("bfloat16", 64, 1),
    "float16, blocks of 32, 2 splits": ("float16", 32, 2),
    "float16, blocks of 128": ("float16", 128, 1),
}
"""Element type, tokens per block, most splits of a sequence."""
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}


class Case(NamedTuple):
    """One point of the grid: keys of the tables above."""

    shape: str
    option: str
    heads: str
    setup: str


Make = Callable[[KvStorage, int], AttentionBackend]
"""Makes the backend under test, with a number of splits."""


def grid() -> list[Case]:
    return [Case(*each) for each in itertools.product(SHAPES, OPTIONS, HEADS, SETUPS)]


def sampled() -> list[Case]:
    """Return cases of the grid in which every pair of values of two parameters occurs."""
    cases = grid()
    tables = [list(table) for table in (SHAPES, OPTIONS, HEADS, SETUPS)]
    places = [dict(zip(Case._fields, map(list.index, tables, case), strict=True)) for case in cases]
    return [cases[index] for index in covering(places)]


def error_of(case: Case, make: Make, device: str = "cpu") -> float:
    """Return the largest error of the backend's outputs on ``device`` in units of the tolerance: above 1, or NaN, it is
    wrong."""
    layer, query_heads = HEADS[case.heads]
    dtype, size, splits = SETUPS[case.setup]
    torch.manual_seed(0)
    fields = dict(OPTIONS[case.option])
    sinks = torch.randn(query_heads).to(device) if fields.pop("sinks", False) else None
    params = Params(layer.k_dim**-0.5, sinks=sinks, **fields)
    with filled(layer, dtype, size, SHAPES[case.shape], device) as (store, spans):
        rows = spans[-1].row + spans[-1].length
        query = torch.randn(query_heads, rows, layer.k_dim).to(device, store.dtype).transpose(0, 1)
        oracle, backend = TorchReference(store), make(store, splits)
        expected = oracle.attend(oracle.plan(spans), 1, query, params).float()
        got = backend.attend(backend.plan(spans), 1, query, params).float()
        worst = float((got - expected).abs().max())
    return worst / (TOLERANCE[dtype] * max(1.0, float(expected.abs().max())))


@contextmanager
def filled(
    layer: LayerLayout, dtype: KvDtype, size: int, shapes: list[tuple[int, int]], device: str = "cpu"
) -> Iterator[tuple[KvStorage, list[Span]]]:
    """Yield a pool of two layers, and spans over random disjoint blocks of it."""
    counts = [-(-(start + length) // size) for start, length in shapes]
    layout, blocks = KvLayout((layer, layer), dtype, size), sum(counts) + 3
    store: KvStorage
    if device == "cpu":
        store = KvStore(KvMemory(layout, blocks))
    else:
        store = SlabStore(layout, blocks, torch.device(device))
    free = list(range(store.blocks))
    random.Random(len(free)).shuffle(free)
    spans, row = [], 0
    for part in (store.k(1), store.v(1)):
        part.fill_(torch.nan)
    for (start, length), count in zip(shapes, counts, strict=True):
        span = Span(row, length, start, [free.pop() for _ in range(count)])
        for part in (store.k(1), store.v(1)):
            own = part[span.blocks].flatten(0, 1)
            own[: span.end] = torch.randn(own[: span.end].shape).to(own)
            part[span.blocks] = own.view(count, size, *own.shape[1:])
        spans.append(span)
        row += length
    try:
        yield store, spans
    finally:
        store.close()
