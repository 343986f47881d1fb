"""A model whose layers are all fused, run without the modelling code around them.

A decode step is so short that Python code between two kernels is a noticeable part of it, since the weights displace
that code from the CPU's caches. So everything from token ids to logits is one call into C, which stops in the middle of
a layer only if an ``on_layer`` hook waits for the layer's keys and values.
:meth:`common.engine.runner.ModelEngine.shorten` checks that the logits are bit-identical to the model's.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from common.attention.native import NativeAttention, NativePlan
from common.engine.batch import FlatStep
from common.kernels import cpu
from common.model.compact import CompactEmbedding, CompactLinear
from common.model.layers import FusedLayer, NativeNorm
from common.model.linears import NativeLinear

_LEAST_POSITIONS = 1024
"""Rotary angles are computed for at least so many positions."""
_CACHE_LINE = 64


class FusedDecoder:
    """Embedding, ``layers``, final norm and output layer of ``model``, with attention by ``backend``."""

    def __init__(self, model: Any, layers: Sequence[FusedLayer], backend: NativeAttention) -> None:
        library = cpu.library()
        assert library is not None
        self._library = library
        self._rotary, self._norm, self._head = model.model.rotary_emb, model.model.norm, model.lm_head
        self._looks_up, table = model.model.embed_tokens, None
        self._vocabulary, self._hidden = self._looks_up.weight.shape
        groups = self._looks_up.address if isinstance(self._looks_up, CompactEmbedding) else None
        if groups is None:
            self._table = self._looks_up.weight.detach().contiguous()
            table = self._table.data_ptr()
        self._like = torch.empty(0, dtype=self._looks_up.weight.dtype)
        self._shapes = [backend.shape(each.layer_idx, each.query_heads, each.params) for each in layers]
        described = (layer.described(shape) for layer, shape in zip(layers, self._shapes, strict=True))
        self._layers = (cpu.DecoderLayer * len(layers))(*described)
        self._decoder = cpu.Decoder(
            ctypes.addressof(self._layers), len(layers), table, groups, self._vocabulary, None, None,
            self._norm.address, self._head.address,
        )  # fmt: skip
        self._address = ctypes.addressof(self._decoder)
        normed, projected, attended, gated = layers[0].widths
        gated += _CACHE_LINE // self._like.element_size()  # rows must not begin whole pages apart
        self._widths = (self._hidden, normed, projected, attended, gated, layers[0].dim, layers[0].dim)
        self._angles: tuple[torch.Tensor, ...] = ()
        self._positions = 0
        self._rooms: list[torch.Tensor] = []
        self._pointers: list[int] = []
        self._rows = 0
        self._all_logits = self._logits = self._like.new_empty(0, self._head.out_features)
        self._kept = self._most_kept = 0
        self._logits_at = self._all_logits.data_ptr()

    def __call__(
        self, step: FlatStep, plan: NativePlan, on_layer: Callable[[int], None] | None
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the logits [len(kept), vocab] of ``step``, in the model's dtype and valid until the next call, and
        their :func:`common.engine.sampler.peaks`. ``on_layer`` gets the index of each layer whose keys and values are
        in the pool.

        MemoryError if a buffer cannot be allocated, IndexError for a token id outside the vocabulary.
        """
        rows, kept = len(step.ids), len(step.kept)
        self._make_room(rows, max(step.positions) + 1)
        if kept != self._kept:  # avoid torch otherwise: the weights have evicted its code from the caches
            self._keep(kept)
        best = array("q", step.kept)
        columns = (step.ids, step.positions, step.blocks, step.offsets, step.kept)
        step_pass = cpu.Pass(
            *(column.buffer_info()[0] for column in columns), ctypes.addressof(plan.spans), self._logits_at,
            best.buffer_info()[0], *self._pointers, rows, kept, torch.get_num_threads(),
        )  # fmt: skip
        self._run(ctypes.addressof(step_pass), on_layer)
        return self._logits, best.tolist()

    def _keep(self, rows: int) -> None:
        """Make the logits ``rows`` rows long, in memory that grows with the largest step."""
        if rows > self._most_kept:
            self._all_logits = self._like.new_empty(rows, self._head.out_features)
            self._logits_at, self._most_kept = self._all_logits.data_ptr(), rows
        self._kept, self._logits = rows, self._all_logits[:rows]

    def _make_room(self, rows: int, positions: int) -> None:
        """Allocate the buffers between a layer's kernels for ``rows`` rows, and the rotary angles of positions below
        ``positions``. Both are kept, and grow with the largest step. Their size is recorded last, so that a step for
        which memory is short fails alone."""
        if rows > self._rows:
            rooms = [self._like.new_empty(rows, width) for width in self._widths]
            self._rooms, self._pointers, self._rows = rooms, [room.data_ptr() for room in rooms], rows
        if positions > self._positions:
            most = max(_LEAST_POSITIONS, 1 << (positions - 1).bit_length())
            angles = self._rotary(self._like, torch.arange(most)[None])
            self._angles = tuple(each[0].contiguous() for each in angles)
            self._decoder.cos, self._decoder.sin = (each.data_ptr() for each in self._angles)
            self._positions = most

    def _run(self, step_pass: int, on_layer: Callable[[int], None] | None) -> None:
        """Run both halves of all layers (up to the pool write, and from there on): in one call, or, with ``on_layer``,
        in one call per pool write."""
        done, last = 0, 2 * len(self._layers)
        while done < last:
            until = last if on_layer is None else min(done + (2 if done else 1), last)
            match self._library.decode(self._address, step_pass, done, until):
                case -1:
                    raise MemoryError("no memory for the buffers between a layer's kernels")
                case -2:
                    raise IndexError(f"a token outside the vocabulary of {self._vocabulary}")
            if on_layer is not None and until < last:
                on_layer(until // 2)
            done = until


def find_decoder(model: nn.Module, backend: object) -> FusedDecoder | None:
    """Return ``model`` as a :class:`FusedDecoder`; None if it has other parts or ``backend`` is not the native one."""
    decoder: Any = getattr(model, "model", None)
    layers = list(getattr(decoder, "layers", ()))
    if not isinstance(backend, NativeAttention) or not layers or not all(type(each) is FusedLayer for each in layers):
        return None
    parts = getattr(decoder, "embed_tokens", None), getattr(decoder, "norm", None), getattr(model, "lm_head", None)
    looks_up, norm, head = map(type, parts)
    if looks_up not in (nn.Embedding, CompactEmbedding) or head not in (NativeLinear, CompactLinear):
        return None
    if norm is not NativeNorm or not hasattr(decoder, "rotary_emb"):
        return None
    if not all(getattr(part, "address", True) for part in parts):  # torch computes it
        return None
    if any(each.widths != layers[0].widths for each in layers):
        return None
    return FusedDecoder(model, layers, backend)
