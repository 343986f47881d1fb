"""``tandem bench kernels``: attention and linear layers beside their limits.

Decode attention, for batches and contexts: bytes of KV per second, their share of what a plain loop reads per second
from memory of that size, and torch's path on the same pool. Linear layers, with unquantized and int8 weights: their
share of the rate at which many rows are multiplied or weights are read, and the speed relative to torch's plain layers
or oneDNN's packed ones, whichever are faster. Blocks lie in random order, values are random, and kernels that are
compared run in alternation. The figures are of the kernels that a worker would use; the last line names those that are
slower than torch. float32 weights are measured in two ways: kept as bfloat16, as most checkpoints have them, or whole.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.commands.roofline import (
    MIB,
    LinearShape,
    Product,
    best_s,
    on_threads,
    product,
    rate_of,
    read_rates,
    shapes,
    square_rate,
)
from bench.load import neighbours, results
from common.attention.cpu import CpuAttention
from common.attention.interface import AttentionBackend, Params, Span
from common.attention.registry import select_backend
from common.config.bench.kernels import BenchKernelsConfig
from common.core.errors import StartError
from common.kernels import cpu
from common.kv.layout import KvDtype, KvLayout, LayerLayout
from common.kv.storage.host import KvMemory
from common.kv.storage.tensors import KvStore
from common.platform import device

BATCHES, CONTEXTS = (1, 4, 16, 64), (128, 512, 2048, 8192)
ROWS = (1, 4, 16, 64, 512)
BLOCK = 16
TORCH = ("torch", "onednn")
"""Ways that need no kernels of ours."""
EQUAL = 0.98
"""Ratios above this do not count as slower than torch: two measurements of one kernel differ by as much."""
_POOL_BYTES = 512 * MIB
_LAYERS = 12
"""Layers that are attended to in turn, as in a step; fewer if their KV would not fit in memory."""


@dataclass(frozen=True)
class Heads:
    """Shape of attention: ``query`` heads over ``kv`` heads of ``dim`` elements."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True)
class Attended:
    """Attention of one layer in one decode step: seconds by backend, the worker's own first, and the limit."""

    batch: int
    context: int
    kv_bytes: int
    seconds: dict[str, float]
    limit_bytes_per_s: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes of KV per second that the worker's own backend reads."""
        return self.kv_bytes / next(iter(self.seconds.values()))

    @property
    def share(self) -> float:
        """Fraction of ``limit_bytes_per_s`` that the worker's own backend reaches."""
        return self.bytes_per_s / self.limit_bytes_per_s

    @property
    def gain(self) -> float:
        """How many times as fast as torch's path."""
        return self.seconds["cpu"] / next(iter(self.seconds.values()))


@contextmanager
def filled_store(heads: Heads, dtype: KvDtype, layers: int, blocks: int) -> Iterator[KvStore]:
    """Make a pool of ``blocks`` blocks with random keys and values."""
    store = KvStore(KvMemory(KvLayout((LayerLayout(heads.kv, heads.dim, heads.dim),) * layers, dtype, BLOCK), blocks))
    try:
        noise = torch.randn(blocks, BLOCK, heads.kv, heads.dim)
        for layer in range(layers):
            store.k(layer).copy_(noise)
            store.v(layer).copy_(noise.flip(0))
        yield store
    finally:
        store.close()


@torch.inference_mode()
def attend(heads: Heads, dtype: KvDtype, batch: int, context: int, read: Callable[[int], float]) -> Attended:
    """Time all backends over the same random blocks. ``read`` gives the read rate for a number of bytes."""
    each = -(-context // BLOCK)
    layout = KvLayout((LayerLayout(heads.kv, heads.dim, heads.dim),), dtype, BLOCK)
    kv_bytes = batch * context * layout.token_bytes
    layers = max(1, min(_LAYERS, _POOL_BYTES // kv_bytes))
    ids = random.Random(0).sample(range(batch * each), batch * each)
    spans = [Span(i, 1, context - 1, ids[i * each : (i + 1) * each]) for i in range(batch)]
    params = Params(heads.dim**-0.5)
    with filled_store(heads, dtype, layers, batch * each) as store:
        query = torch.randn(batch, heads.query, heads.dim).to(store.dtype)
        best = select_backend(store).backend
        backends: dict[str, AttentionBackend] = {best.name: best, "cpu": CpuAttention(store)}
        seconds = dict.fromkeys(backends, float("inf"))
        for _ in range(3):
            for name, backend in backends.items():
                seconds[name] = min(seconds[name], _step_s(backend, spans, query, params, layers))
    return Attended(batch, context, kv_bytes, seconds, read(kv_bytes * layers))


def _step_s(backend: AttentionBackend, spans: list[Span], query: torch.Tensor, params: Params, layers: int) -> float:
    """Return the seconds per layer; the plan is made once, as in a step."""
    plan = backend.plan(spans)
    return best_s(lambda: [backend.attend(plan, layer, query, params) for layer in range(layers)], 2) / layers


def served(found: Product) -> list[str]:
    """Return the ways in which a worker computes linear layers, the most usual first: our kernels if there are any."""
    ours = [way for way in reversed(found.seconds) if way not in TORCH]
    return ours or [next(reversed(found.seconds))]


def torch_s(found: Product) -> float:
    """Return the seconds without our kernels: torch's plain layers or oneDNN's packed ones, whichever are faster."""
    return min(seconds for way, seconds in found.seconds.items() if way in TORCH)


def _kind(layers: Product, way: str) -> str:
    if layers.int8:
        return "int8"
    return "linear" if way == served(layers)[0] else "whole"


@dataclass(frozen=True)
class Judged:
    """Linear layers in one of a worker's ways: the share of their limit, and the speed relative to torch (``gain``)."""

    product: Product
    way: str
    bytes_per_s: float
    flops_per_s: float
    share: float
    limit: str
    gain: float

    def __str__(self) -> str:
        return f"{_kind(self.product, self.way)} layers of {self.product.rows} rows ({self.gain:.2f})"


def judge(found: Product, way: str, most: float, read: Callable[[int], float]) -> Judged:
    """Compare one way with its limits: ``most`` operations per second for many rows, and the rate at which memory as
    large as the weights is read, from ``read``."""
    seconds = found.seconds[way]
    flops_per_s, bytes_per_s = found.rates(way)
    reading = read(round(bytes_per_s * seconds))  # the rate for memory as large as these weights
    multiplied, streamed = flops_per_s / most, bytes_per_s / reading
    limit = f"{most / 1e9:.0f} GFLOP/s" if multiplied > streamed else f"{reading / 1e9:.1f} GB/s"
    share = max(multiplied, streamed)
    return Judged(found, way, bytes_per_s, flops_per_s, share, limit, torch_s(found) / seconds)


def most_flops(dtype: torch.dtype, products: list[Product]) -> tuple[float, float]:
    """Return the most operations per second without our kernels: for elements of ``dtype``, and for float32 elements
    that are split into three of bfloat16, as AMX tiles multiply them."""
    rates = [found.rates(way)[0] for found in products for way in found.seconds if way in TORCH]
    most = max(square_rate(dtype), *rates)
    library = cpu.library()
    if dtype == torch.float32 and library is not None and library.variants[0] == "amx_bf16":
        return most, square_rate(torch.bfloat16) / 3
    return most, most


Say = Callable[[str], None]
"""Prints a line of a table as soon as it is measured."""
Read = Callable[[int], float]
"""Returns the bytes per second at which memory of the given number of bytes is read."""


def measure(heads: Heads, layers: list[LinearShape], dtype: KvDtype, threads: int, say: Say) -> dict[str, Any]:
    """Measure all kernels on ``threads`` threads."""
    with on_threads(threads):
        rates = read_rates()
        read = partial(rate_of, rates)
        shown = ", ".join(f"{each.count} of {each.inputs} to {each.outputs}" for each in layers)
        words = f"{dtype}, {heads.query} heads over {heads.kv} of {heads.dim}, linear layers {shown}"
        say(f"{device.cpu_name()}, {threads} thread{'s' if threads > 1 else ''}, {words}")
        attention = _measure_attention(heads, dtype, read, say)
        judged, most = _measure_linear(layers, dtype, read, say)
    behind = [each for each in attention if each.gain < EQUAL]
    slower = [f"attention of batch {each.batch} at {each.context} ({each.gain:.2f})" for each in behind]
    slower += [str(each) for each in judged if each.gain < EQUAL]
    say(f"slower than torch: {', '.join(slower)}" if slower else "nothing of this is slower than torch")
    return {
        "cpu": device.cpu_name(),
        "threads": threads,
        "dtype": dtype,
        "heads": asdict(heads),
        "layers": [asdict(each) for each in layers],
        "read_bytes_per_s": rates,
        "attention": [
            asdict(each) | {"bytes_per_s": each.bytes_per_s, "share": each.share, "times_torch": each.gain}
            for each in attention
        ],
        "most_flops_per_s": most,
        "linear": [
            asdict(each.product)
            | {
                "way": each.way,
                "bytes_per_s": each.bytes_per_s,
                "flops_per_s": each.flops_per_s,
                "share": each.share,
                "times_torch": each.gain,
            }
            for each in judged
        ],
        "slower_than_torch": slower,
    }


def _measure_attention(heads: Heads, dtype: KvDtype, read: Read, say: Say) -> list[Attended]:
    """Measure decode attention for all batches and contexts."""
    attention = []
    for batch, context in itertools.product(BATCHES, CONTEXTS):
        found = attend(heads, dtype, batch, context, read)
        attention.append(found)
        say(
            f"attention  batch {batch:3d}  context {context:5d}  {found.bytes_per_s / 1e9:6.1f} GB/s"
            f"  {found.share:4.0%} of {found.limit_bytes_per_s / 1e9:5.1f}  {found.gain:5.2f} x torch"
            + "".join(f"  {name} {seconds * 1e6:7.0f} us" for name, seconds in found.seconds.items())
        )
    return attention


def _measure_linear(
    layers: list[LinearShape], dtype: KvDtype, read: Read, say: Say
) -> tuple[list[Judged], dict[str, float]]:
    """Measure the linear layers for all rows, unquantized and int8. Also returns the two rates of
    :func:`most_flops`."""
    torch_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    linear = [product(layers, torch_dtype, rows, int8) for int8 in (False, True) for rows in ROWS]
    whole, parts = most_flops(torch_dtype, linear)
    unquantised_s = {each.rows: each.seconds[served(each)[0]] for each in linear if not each.int8}
    judged = []
    for each in linear:
        for way in served(each):
            one = judge(each, way, whole if _kind(each, way) == "whole" else parts, read)
            judged.append(one)
            say(
                f"{_kind(each, way):<10} {each.rows:4d} rows  {one.bytes_per_s / 1e9:6.1f} GB/s"
                f"  {one.flops_per_s / 1e9:5.0f} GFLOP/s  {one.share:4.0%} of {one.limit}"
                f"  {one.gain:5.2f} x torch"
                + (f"  {unquantised_s[each.rows] / each.seconds[way]:5.2f} x {dtype}" if each.int8 else "")
                + "".join(f"  {name} {taken * 1e6:7.0f} us" for name, taken in each.seconds.items())
            )
    return judged, {"whole": whole, "in parts": parts}


def _sizes(option: str, given: str, count: int, what: str, example: str) -> list[int]:
    """Parse ``count`` positive numbers separated by slashes. Raises StartError if there are others."""
    try:
        sizes = [int(part) for part in given.split("/")]
    except ValueError:
        sizes = []
    if len(sizes) != count or min(sizes) < 1:
        why = f"they are {what}, each at least 1"
        raise StartError(f"--{option} {given} cannot be used", why, f"give them as in {example}")
    return sizes


def run(config: BenchKernelsConfig) -> int:
    """Print each line as it is measured; exit code 1 if a kernel is slower than torch. Raises StartError for shapes
    that the kernels cannot take."""
    defaults = BenchKernelsConfig()
    what = "query heads, key-value heads and head size"
    heads = Heads(*_sizes("heads", config.heads, 3, what, defaults.heads))
    if heads.query % heads.kv:
        why = "query heads are a multiple of key-value heads"
        raise StartError(f"--heads {config.heads} cannot be used", why, f"give them as in {defaults.heads}")
    what = "hidden and intermediate size, layers and words of the vocabulary"
    hidden, inner, layers, words = _sizes("layers", config.layers, 4, what, defaults.layers)
    if hidden % 2 or inner % 2 or heads.query * heads.dim % 2:
        why = "the kernels take rows of an even number of elements"
        raise StartError(f"layers of {config.heads} and {config.layers} cannot be used", why, "give even sizes")
    model = {
        "hidden_size": hidden, "num_attention_heads": heads.query, "num_key_value_heads": heads.kv,
        "head_dim": heads.dim, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": words,
    }  # fmt: skip
    if config.dtype == "float16":
        why = "on CPUs linear layers of float16 are torch's own: there is nothing to compare"
        raise StartError("--dtype cannot be float16 here", why, "give bfloat16 or float32")
    dtype, _ = device.choose_dtype(config.dtype, "bfloat16", device.probe_cpu())
    neighbours.note(Console(stderr=True, highlight=False))
    figures = measure(heads, shapes(model), dtype, config.threads, lambda line: print(line, flush=True))
    if config.save:
        results.save(Path(config.save), figures)
    return 1 if figures["slower_than_torch"] else 0
