"""A trial of an attention backend against the reference, with a model's own shapes, before it serves.

A backend that comes from another package, or is compiled for the device at hand, is used only if it passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from common.attention.interface import AttentionBackend, LayerCall, Span
from common.attention.torch_reference import TorchReference
from common.kv.storage.interface import KvStorage, computed_dtype

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest accepted error of an output, relative to the largest output, by the type in which the model computes."""


@torch.inference_mode()
def find_fault(backend: AttentionBackend, store: KvStorage, calls: Sequence[LayerCall], prefill: bool) -> str | None:
    """Compare ``backend`` with the reference, over random blocks of ``store`` and all distinct layers of ``calls``, on
    chunks of prompts if ``prefill``, else on single rows. Return what is wrong, in words; None if nothing is. Only
    before serving: it overwrites the pool's last blocks and zeroes them. Raises torch.OutOfMemoryError."""
    spans = _spans(store, prefill)
    blocks = sorted({block for span in spans for block in span.blocks})
    if not blocks:
        return "the KV pool is too small for its trial"
    if not calls:
        return "it cannot be tried, since how the model calls it is not known"
    oracle = TorchReference(store)
    noise = torch.Generator().manual_seed(0)
    try:
        for layer, call in _distinct(store, calls):
            _fill(store, layer, blocks, noise)
            rows = spans[-1].row + spans[-1].length
            query, unit = _query(store, layer, (rows, call.heads), noise)
            expected = oracle.attend(oracle.plan(spans), layer, query, call.params).float() / unit
            got = backend.attend(backend.plan(spans), layer, query, call.params).float() / unit
            off = float((got - expected).abs().max() / expected.abs().max())
            if not off <= TOLERANCE[query.dtype]:
                return f"its trial gives wrong numbers (off by {off:.2g} in layer {layer})"
    except torch.OutOfMemoryError:  # the fault of none
        raise
    except Exception as error:  # another package's code may raise anything
        return f"its trial fails with {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        store.clear(blocks)
    return None


def _spans(store: KvStorage, prefill: bool) -> list[Span]:
    """Return spans next to block boundaries, in the pool's last blocks: chunks of prompts, or single rows. Empty if the
    pool is too small for them."""
    size = store.layout.block_size
    shapes = [(0, 7), (size + 3, 21), (size - 1, 2)] if prefill else [(2 * size + 5, 1), (0, 1), (size, 1)]
    counts = [-(-(start + length) // size) for start, length in shapes]
    if sum(counts) > store.blocks:
        return []
    spans: list[Span] = []
    free, row = list(range(store.blocks)), 0
    for (start, length), count in zip(shapes, counts, strict=True):
        spans.append(Span(row, length, start, [free.pop() for _ in range(count)]))
        row += length
    return spans


def _fill(store: KvStorage, layer: int, blocks: list[int], noise: torch.Generator) -> None:
    """Store random keys and values in all slots of ``blocks``, in a pool in fp8 in units of their head's scale."""
    size, parts = store.layout.block_size, (store.k(layer), store.v(layer))
    where, dtype = parts[0].device, computed_dtype(store)
    one = torch.ones(1, device=where)
    scales = (one, one) if store.codec is None else store.codec.scales_of(layer)
    key, value = (
        (torch.randn(len(blocks) * size, *part.shape[2:], generator=noise).to(where) * scale).to(dtype)
        for part, scale in zip(parts, scales, strict=True)
    )
    slots = torch.tensor(blocks).repeat_interleave(size), torch.arange(size).repeat(len(blocks))
    store.write(layer, key, value, (slots[0].to(where), slots[1].to(where)))


def _query(
    store: KvStorage, layer: int, rows_heads: tuple[int, int], noise: torch.Generator
) -> tuple[torch.Tensor, float | torch.Tensor]:
    """Return random queries [rows, heads, k_dim] for what :func:`_fill` stores, and the unit of each head's outputs."""
    keys = store.k(layer)
    query = torch.randn(*rows_heads, keys.shape[3], generator=noise).to(keys.device)
    if store.codec is None:
        return query.to(store.dtype), 1.0
    k, v = (each.repeat_interleave(rows_heads[1] // keys.shape[2], 0) for each in store.codec.scales_of(layer))
    return (query / k).to(store.codec.computed), v


def _distinct(store: KvStorage, calls: Sequence[LayerCall]) -> Iterable[tuple[int, LayerCall]]:
    """Yield one layer of each kind. Layers whose sinks alone differ are of one kind."""
    seen = set()
    for layer, (shape, call) in enumerate(zip(store.layout.layers, calls, strict=True)):
        params = call.params
        kind = (shape, call.heads, params.scaling, params.window, params.softcap, params.sinks is None)
        if kind not in seen:
            seen.add(kind)
            yield layer, call
