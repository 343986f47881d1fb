"""Decoder layers of the common shape (Llama, Mistral, Qwen 2 and 3) for GPUs: merged matrix products, and own kernels
for what is between them.

In transformers' code a layer is some forty small kernels around seven matrix products. Here q, k and v are one product,
gate and up another; the residual sum is part of the norm behind it, also across layers; the norms of heads, the rotary
embedding and the write into the KV pool are one kernel, and so is the gated activation. What each saves has not been
measured on a GPU: each part can be left out. A layer is replaced only if its parts are exactly the expected ones and a
trial gives the same numbers.

A tensor-parallel rank fuses what it has: its slices of q, k and v are one product, its heads one kernel. The products
behind attention and gate sum over the ranks (:class:`common.model.parallel_layers.SummedLinear`), so what a norm adds
to the residual stream is the same on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from common.attention.interface import Params, RotatingAttention, Rotation, bind
from common.model.collective import Collective
from common.model.layers import DenseAttention, has_usual_parts, is_rms_norm
from common.model.parallel_layers import SummedLinear

log = logging.getLogger("tandem.load")

PARTS = ("linears", "norms", "rotary", "activation")
"""What can be fused, each by itself. All but the linears need Triton."""
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_TRIAL_ROWS = 5
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest accepted difference of a layer's change to the residual stream, relative to the largest number in it."""


class Residual:
    """The last layer's output that has not been added to the residual stream yet: ``delta`` [T, hidden], or None."""

    def __init__(self) -> None:
        self.delta: torch.Tensor | None = None

    def take(self) -> torch.Tensor | None:
        """Return ``delta``, which counts as added from then on."""
        delta, self.delta = self.delta, None
        return delta


class GpuLayer(nn.Module):
    """A decoder layer. It changes ``hidden_states`` [1, T, hidden] in place and returns them, without the output of its
    MLP, which ``residual`` keeps for the next layer or the last norm. ``position_embeddings`` are cosines and sines
    [1, T, head_dim]."""

    def __init__(self, layer: Any, params: Params, residual: Residual, first: bool, parts: Collection[str]) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attention.layer_idx
        self.dim: int = attention.head_dim
        self.params, self._residual, self._first = params, residual, first
        self._norms = nn.ModuleList([layer.input_layernorm, layer.post_attention_layernorm])
        self._fused = frozenset(parts)
        self._qkv = _Products((attention.q_proj, attention.k_proj, attention.v_proj), "linears" in parts)
        self._gate_up = _Products((mlp.gate_proj, mlp.up_proj), "linears" in parts)
        self._out, self._down = attention.o_proj, mlp.down_proj
        self._act, self._activation = mlp.act_fn, attention.config.hidden_act
        head_norms = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        self._head_norms = nn.ModuleList(head_norms)

    def forward(
        self, hidden_states: torch.Tensor, *_: Any, position_embeddings: tuple[torch.Tensor, torch.Tensor], **__: Any
    ) -> torch.Tensor:
        x, delta = hidden_states[0], self._residual.take()
        normed = self._norm(0, x, None if self._first else delta)  # a step that failed may have left something
        query, key, value = (part.unflatten(1, (-1, self.dim)) for part in self._qkv(normed))
        attended = self._attend(query, key, value, (position_embeddings[0][0], position_embeddings[1][0]))
        normed = self._norm(1, x, self._out(attended.flatten(1)))
        gate, up = self._gate_up(normed)
        self._residual.delta = self._down(self._gate(gate, up))
        return hidden_states

    def _norm(self, which: int, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        norm = self._norms[which]
        return _add_norm(norm, x, delta, "norms" in self._fused)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        attention: RotatingAttention = self.__dict__["tandem_attention"]
        norms: Any = self._head_norms
        if "rotary" in self._fused:
            weights = (norms[0].weight, norms[1].weight, norms[0].variance_epsilon) if norms else None
            return attention.rotated(self.layer_idx, query, key, value, Rotation(angles, weights), self.params)
        if norms:
            query, key = norms[0](query), norms[1](key)
        cos, sin = (angle[:, None] for angle in angles)
        query, key = (each * cos + _turned(each) * sin for each in (query, key))
        return attention(self.layer_idx, query, key, value, self.params)

    def _gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if "activation" in self._fused:
            from common.kernels.triton.layers import gate as fused

            return fused(gate, up, self._activation)
        return self._act(gate) * up


class LastNorm(nn.Module):
    """The norm behind the layers. It first adds the output that the last layer left in ``residual``."""

    def __init__(self, norm: Any, residual: Residual, fused: bool) -> None:
        super().__init__()
        self._norm, self._residual, self._fused = norm, residual, fused

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the norm, [1, T, hidden], for ``hidden_states`` [1, T, hidden], to which the output is added in
        place."""
        return _add_norm(self._norm, hidden_states[0], self._residual.take(), self._fused)[None]


class _Products(nn.Module):
    """Linear layers of the same input; merged, they are one product whose columns are divided."""

    def __init__(self, linears: tuple[nn.Linear, ...], merged: bool) -> None:
        super().__init__()
        self._widths = [linear.out_features for linear in linears]
        self._linears = nn.ModuleList([_merge(linears)] if merged else linears)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if len(self._linears) > 1:
            return tuple(linear(x) for linear in self._linears)
        return self._linears[0](x).split(self._widths, dim=1)


def _merge(linears: tuple[nn.Linear, ...]) -> nn.Linear:
    """Return one layer with the outputs of ``linears`` side by side. Their weights become parts of its weight, so that
    nothing is held twice."""
    weight = torch.cat([linear.weight.data for linear in linears])
    merged = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    merged.weight = nn.Parameter(weight, requires_grad=False)
    if any(linear.bias is not None for linear in linears):
        zeros = [weight.new_zeros(linear.out_features) for linear in linears]
        biases = [zero if each.bias is None else each.bias.data for each, zero in zip(linears, zeros, strict=True)]
        merged.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    at = 0
    for linear in linears:
        linear.weight.data = weight[at : at + linear.out_features]
        at += linear.out_features
    return merged


def _add_norm(norm: Any, x: torch.Tensor, delta: torch.Tensor | None, fused: bool) -> torch.Tensor:
    """Add ``delta`` to ``x`` in place, if it is given, and return the norm of ``x``."""
    if fused:
        from common.kernels.triton.layers import add_norm

        return add_norm(x, delta, norm.weight, norm.variance_epsilon)
    if delta is not None:
        x += delta
    normed: torch.Tensor = norm(x)
    return normed


def _turned(x: torch.Tensor) -> torch.Tensor:
    one, two = x.chunk(2, dim=-1)
    return torch.cat([-two, one], dim=-1)


# -- replacing a model's layers ---------------------------------------------------------------------------------------


@torch.no_grad()
def fuse_gpu_layers(model: Any, parts: Collection[str] = PARTS, collective: Collective | None = None) -> int:
    """Replace all decoder layers of ``model``, and the norm behind them, if each fits and gives the same numbers in a
    trial; return their number, 0 if the model keeps its own. ``parts``: which of :data:`PARTS` to fuse.
    ``collective``: of a rank's share of a model, the exchange with the other ranks, which must call this, too; all of
    them replace their layers, or none."""
    decoder = getattr(model, "model", None)
    layers, rotary = getattr(decoder, "layers", None), getattr(decoder, "rotary_emb", None)
    if not isinstance(layers, nn.ModuleList) or rotary is None or not parts:
        return 0
    if not (is_rms_norm(getattr(decoder, "norm", None)) and all(map(_fits, layers))):
        return 0
    residual = Residual()
    trials = [_Trial(layer, rotary) for layer in layers]
    if not all(trial.expected is not None for trial in trials):
        return 0
    fused = [
        GpuLayer(layer, trial.params, residual, index == 0, parts)
        for index, (layer, trial) in enumerate(zip(layers, trials, strict=True))
    ]
    try:
        met = [
            trial.is_met_by(layer, residual) for trial, layer in zip(trials, fused, strict=True)
        ]  # as many on all ranks
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the compiler may raise anything
        if collective is not None:
            raise  # other ranks wait in the middle of a layer
        log.warning("layers are not fused: %s: %s", type(error).__name__, " ".join(str(error).split())[:200])
        return 0
    if not _agreed(all(met), collective, decoder.norm.weight.device):  # type: ignore[union-attr]
        return 0
    for index, layer in enumerate(fused):
        layers[index] = layer
    decoder.norm = LastNorm(decoder.norm, residual, "norms" in parts)  # type: ignore[union-attr]
    return len(fused)


def _fits(layer: Any) -> bool:
    """Return whether the layer has exactly the expected parts, and its activation a kernel."""
    config = getattr(getattr(layer, "self_attn", None), "config", None)
    if not has_usual_parts(layer) or getattr(config, "hidden_act", None) not in _ACTIVATIONS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    inner = attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj
    outer = attention.o_proj, mlp.down_proj
    return all(type(each) is nn.Linear for each in inner) and all(
        type(each) in (nn.Linear, SummedLinear) for each in outer
    )


@torch.inference_mode()  # as everything that the ranks exchange
def _agreed(met: bool, collective: Collective | None, where: torch.device) -> bool:
    """Return whether ``met`` holds, on every rank if there are several; they exchange it on ``where``."""
    if collective is None:
        return met
    return int(collective.sum(torch.tensor([float(met)], device=where))) == collective.size


class _Trial:
    """The output of one of the model's layers for random rows at positions far apart (``expected``); None if the
    layer's code fails when called in this way."""

    @torch.inference_mode()
    def __init__(self, layer: Any, rotary: Any) -> None:
        weight, dense = layer.self_attn.q_proj.weight, DenseAttention()
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(1, _TRIAL_ROWS, weight.shape[1], generator=generator)
        self._hidden = rows.to(weight.device, weight.dtype)
        positions = torch.arange(_TRIAL_ROWS, device=weight.device)[None] * 37
        self.expected: torch.Tensor | None = None
        try:
            self._angles = rotary(self._hidden, positions)
            bind(layer, dense)
            out = layer(
                self._hidden.clone(), attention_mask=None, position_ids=positions, position_embeddings=self._angles
            )
            (self.params,) = dense.params
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a model's own code may raise anything when called in this way: keep its layers
            return
        self.expected = out if isinstance(out, torch.Tensor) else None

    @torch.inference_mode()
    def is_met_by(self, fused: GpuLayer, residual: Residual) -> bool:
        """Return whether ``fused`` changes the rows by the same numbers."""
        assert self.expected is not None
        bind(fused, DenseAttention())
        got = fused(self._hidden.clone(), position_embeddings=self._angles)
        got = got + residual.take()
        change = (self.expected - self._hidden).float().abs().max()
        return bool((got - self.expected).float().abs().max() <= _TOLERANCE[self._hidden.dtype] * change)
