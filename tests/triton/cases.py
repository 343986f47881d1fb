"""Compare the Triton backend with the reference, one case of a grid at a time. On a CPU it needs TRITON_INTERPRET=1.

Every slot of the pool that a sequence does not own holds NaN, so a read beyond its end shows. In fp8 each head has
another scale.
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
from common.kernels.e4m3 import E4M3
from common.kv.layout import KvDtype, KvLayout, LayerLayout
from common.kv.scales import KvScales, LayerScales
from common.kv.storage.fp8 import Fp8Codec
from common.kv.storage.host import KvMemory
from common.kv.storage.interface import KvStorage, computed_dtype
from common.kv.storage.slab import SlabStore
from common.kv.storage.tensors import DTYPES, KvStore
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


class Setup(NamedTuple):
    """The type in which the model computes, tokens per block, most splits of a sequence, and whether KV is in fp8."""

    dtype: KvDtype
    size: int
    splits: int
    is_fp8: bool = False

    @property
    def stored(self) -> KvDtype:
        return "fp8" if self.is_fp8 else self.dtype


SETUPS = {
    "float32, blocks of 16": Setup("float32", 16, 1),
    "float32, blocks of 48, 3 splits": Setup("float32", 48, 3),
    "float32, blocks of 256, 2 splits": Setup("float32", 256, 2),
    "bfloat16, blocks of 16, 4 splits": Setup("bfloat16", 16, 4),
    "bfloat16, blocks of 64": Setup("bfloat16", 64, 1),
    "float16, blocks of 32, 2 splits": Setup("float16", 32, 2),
    "float16, blocks of 128": Setup("float16", 128, 1),
}
FP8_SETUPS = {
    "fp8 of float32, blocks of 16, 3 splits": Setup("float32", 16, 3, is_fp8=True),
    "fp8 of bfloat16, blocks of 16": Setup("bfloat16", 16, 1, is_fp8=True),
    "fp8 of bfloat16, blocks of 64, 2 splits": Setup("bfloat16", 64, 2, is_fp8=True),
    "fp8 of float16, blocks of 48": Setup("float16", 48, 1, is_fp8=True),
}
NAN_CODE = 0x7F
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}


class Case(NamedTuple):
    """One point of the grid: keys of the tables above."""

    shape: str
    option: str
    heads: str
    setup: str


Make = Callable[[KvStorage, int], AttentionBackend]
"""Makes the backend under test, with a number of splits."""


FP8_SAMPLE = (
    Case("mixed", "plain", "grouped", "fp8 of float32, blocks of 16, 3 splits"),
    Case("long", "window and sinks", "single", "fp8 of bfloat16, blocks of 64, 2 splits"),
    Case("chunks", "window and softcap", "odd", "fp8 of float16, blocks of 48"),
    Case("mixed", "softcap", "latent", "fp8 of bfloat16, blocks of 16"),
)


def grid(with_fp8: bool = True) -> list[Case]:
    setups = {**FP8_SETUPS, **SETUPS} if with_fp8 else SETUPS
    return [Case(*each) for each in itertools.product(SHAPES, OPTIONS, HEADS, setups)]


def sampled(with_fp8: bool = True) -> list[Case]:
    """Return a few cases of KV in fp8, and cases of the rest of the grid in which every pair of values of two
    parameters occurs."""
    cases = grid(with_fp8=False)
    tables = [list(table) for table in (SHAPES, OPTIONS, HEADS, SETUPS)]
    places = [dict(zip(Case._fields, map(list.index, tables, case), strict=True)) for case in cases]
    return [*(FP8_SAMPLE if with_fp8 else ()), *(cases[index] for index in covering(places))]


def error_of(case: Case, make: Make, device: str = "cpu") -> float:
    """Return the largest error of the backend's outputs on ``device`` in units of the tolerance: above 1, or NaN, it is
    wrong."""
    layer, query_heads = HEADS[case.heads]
    setup = (FP8_SETUPS | SETUPS)[case.setup]
    torch.manual_seed(0)
    fields = dict(OPTIONS[case.option])
    sinks = torch.randn(query_heads).to(device) if fields.pop("sinks", False) else None
    params = Params(layer.k_dim**-0.5, sinks=sinks, **fields)
    with filled(layer, setup, SHAPES[case.shape], device) as (store, spans):
        rows = spans[-1].row + spans[-1].length
        query = torch.randn(query_heads, rows, layer.k_dim).to(device, computed_dtype(store)).transpose(0, 1)
        oracle, backend = TorchReference(store), make(store, setup.splits)
        expected = oracle.attend(oracle.plan(spans), 1, query, params).float()
        got = backend.attend(backend.plan(spans), 1, query, params).float()
        worst = float((got - expected).abs().max())
    return worst / (TOLERANCE[setup.dtype] * max(1.0, float(expected.abs().max())))


def scales_of(layer: LayerLayout) -> KvScales:
    """Return scales for two layers; those of neighbouring heads differ by a factor of 4 or 8."""
    each = LayerScales(
        tuple((0.5, 2.0, 0.25)[head % 3] for head in range(layer.kv_heads)),
        tuple((1.0, 0.25, 2.0)[head % 3] for head in range(layer.kv_heads)),
    )
    return KvScales((each, each))


def movable(part: torch.Tensor) -> torch.Tensor:
    """Return ``part``, float8 as bytes, for which torch has all operators."""
    return part.view(torch.uint8) if part.dtype == E4M3 else part


@contextmanager
def filled(
    layer: LayerLayout, setup: Setup, shapes: list[tuple[int, int]], device: str = "cpu"
) -> Iterator[tuple[KvStorage, list[Span]]]:
    """Yield a pool of two layers, and spans over random disjoint blocks of it."""
    size = setup.size
    counts = [-(-(start + length) // size) for start, length in shapes]
    layout, blocks = KvLayout((layer, layer), setup.stored, size), sum(counts) + 3
    where = torch.device(device)
    codec = Fp8Codec(scales_of(layer), DTYPES[setup.dtype], where) if setup.is_fp8 else None
    store: KvStorage
    if device == "cpu":
        store = KvStore(KvMemory(layout, blocks), codec=codec)
    else:
        store = SlabStore(layout, blocks, where, codec=codec)
    free = list(range(store.blocks))
    random.Random(len(free)).shuffle(free)
    spans, row = [], 0
    parts = [movable(part) for part in (store.k(1), store.v(1))]
    for part in parts:
        part.fill_(NAN_CODE if setup.is_fp8 else torch.nan)
    for (start, length), count in zip(shapes, counts, strict=True):
        span = Span(row, length, start, [free.pop() for _ in range(count)])
        for part in parts:
            own = part[span.blocks].flatten(0, 1)
            own[: span.end] = movable(torch.randn(own[: span.end].shape).to(store.dtype)).to(own.device)
            part[span.blocks] = own.view(count, size, *own.shape[1:])
        spans.append(span)
        row += length
    try:
        yield store, spans
    finally:
        store.close()
