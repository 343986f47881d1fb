"""A model all of whose layers are fused, run without the modelling code around them.

A decode step is short: what Python does between two kernels, on caches that the weights have just swept, took a tenth
of it. So all layers are one call into C, which stops between the halves of a layer only where somebody waits for its
keys and values. What stands before and behind the layers is called as transformers does it, and
:meth:`common.engine.runner.Engine.shorten` tries whether the logits are the same ones, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from common import native
from common.attention.native import NativeAttention, NativePlan
from common.engine.batch import FlatStep
from common.model.layers import FusedLayer, NativeNorm


class FusedDecoder:
    """Embedding, ``layers``, norm and output layer of ``model``, attending with ``backend``."""

    def __init__(self, model: Any, layers: Sequence[FusedLayer], backend: NativeAttention) -> None:
        library = native.library()
        assert library is not None
        self._library = library
        self._embedding, self._rotary, self._norm = model.model.embed_tokens, model.model.rotary_emb, model.model.norm
        self._head = model.lm_head
        self._widths = layers[0].widths
        self._count = len(layers)
        self._shapes = [backend.shape(each.layer_idx, each.query_heads, each.params) for each in layers]
        described = (layer.decoder(shape) for layer, shape in zip(layers, self._shapes, strict=True))
        self._layers = (native.Decoder * len(layers))(*described)
        self._address = ctypes.addressof(self._layers)

    def __call__(
        self, step: FlatStep, plan: NativePlan, keep: torch.Tensor, on_layer: Callable[[int], None] | None
    ) -> torch.Tensor:
        """Logits [len(keep), vocab] of rows ``keep`` of ``step``; ``on_layer`` as for :class:`PagedAttention`."""
        hidden = self._embedding(step.input_ids)
        cos, sin = self._rotary(hidden, step.position_ids)
        hidden = hidden[0]
        rooms = [hidden.new_empty(hidden.shape[0], width) for width in self._widths]
        step_pass = native.Pass(
            hidden.data_ptr(), *(room.data_ptr() for room in rooms), cos.data_ptr(), sin.data_ptr(),
            step.slots[0].data_ptr(), step.slots[1].data_ptr(), ctypes.addressof(plan.spans),
            hidden.shape[0], torch.get_num_threads(),
        )  # fmt: skip
        self._run(step_pass, on_layer)
        # a decode step keeps all of its rows, and they are there in order
        kept = hidden if keep.shape[0] == hidden.shape[0] else hidden[keep]
        logits: torch.Tensor = self._head(self._norm(kept))
        return logits

    def _run(self, step_pass: native.Pass, on_layer: Callable[[int], None] | None) -> None:
        """All halves of all layers, at once or up to each pool write that is announced."""
        done, last = 0, 2 * self._count
        while done < last:
            until = last if on_layer is None else min(done + (2 if done else 1), last)
            if self._library.layers(self._address, ctypes.addressof(step_pass), done, until):
                raise MemoryError("no memory for attention")
            if on_layer is not None and until < last:
                on_layer(until // 2)
            done = until


def find_decoder(model: nn.Module, backend: object) -> FusedDecoder | None:
    """``model`` as a :class:`FusedDecoder`, if it has the parts of one and attention is ours."""
    decoder: Any = getattr(model, "model", None)
    layers = list(getattr(decoder, "layers", ()))
    if not isinstance(backend, NativeAttention) or not layers or not all(type(each) is FusedLayer for each in layers):
        return None
    parts = ("embed_tokens", "rotary_emb", "norm")
    if not all(hasattr(decoder, part) for part in parts) or not hasattr(model, "lm_head"):
        return None
    if type(decoder.norm) is not NativeNorm or any(each.widths != layers[0].widths for each in layers):
        return None
    return FusedDecoder(model, layers, backend)
