"""Fused decoder layers: layers of the common shape (Llama, Mistral, Qwen 2 and 3) replaced by a few calls into C.

Norm, rotary embedding and gated activation of transformers are dozens of small operators, which cost a decode step as
much as its weights do. A layer is replaced only if its parts are exactly the expected ones and a trial gives the same
numbers as before. A model that differs in a way unknown to us keeps the modelling code of transformers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from common.attention.interface import LayerAttention, Params, Rotation, bind
from common.attention.torch_reference import attend_one
from common.kernels import cpu
from common.model.compact import MOST_PARTS, CompactLinear
from common.model.linears import ACTIVATIONS, NativeLinear, gather, native_pays

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_TRIAL_ROWS = 5
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest accepted difference of a layer's change to the residual stream: its root mean square relative to that of the
change. The largest element may be off by twice as much of the largest change: in bfloat16 some are, in deep layers of
published models."""


class NativeNorm(nn.Module):
    """RMS norm over the last dimension, ``x / rms(x) * weight``, computed in float32 for ``x`` [..., dim] of float32 or
    bfloat16."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        library = cpu.library()
        assert library is not None
        self._library = library
        self._weight = weight.detach().float().contiguous()
        self.norm = cpu.Norm(self._weight.data_ptr(), weight.shape[0], epsilon)
        self.address = ctypes.addressof(self.norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        self._library.norm(self.address, x.data_ptr(), out.data_ptr(), x.numel() // x.shape[-1], cpu.TYPES[x.dtype])
        return out


class FusedLayer(nn.Module):
    """One decoder layer in C. ``hidden_states`` [1, T, hidden], float32 or bfloat16, are changed in place and returned;
    ``position_embeddings`` are cosines and sines [1, T, head_dim] in the same dtype."""

    def __init__(self, layer: Any, activation: str, params: Params) -> None:
        super().__init__()
        library = cpu.library()
        assert library is not None
        self._library = library
        attention, mlp = layer.self_attn, layer.mlp
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        self.layer_idx: int = attention.layer_idx
        self.dim: int = attention.head_dim
        self.query_heads, self.key_heads = (p.out_features // self.dim for p in projections[:2])
        self.params = params
        self.input_norm = _norm(layer.input_layernorm)
        self.mlp_norm = _norm(layer.post_attention_layernorm)
        self.qkv = _joined(projections)
        self.out = _joined([attention.o_proj])
        self.gate_up = _joined([mlp.gate_proj, mlp.up_proj], activation)
        self.down = _joined([mlp.down_proj])
        none = cpu.Norm()
        self.head_norms = [_norm(getattr(attention, name)) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        self._rotary = cpu.Rotary(
            self.qkv.out_features, self.query_heads, self.key_heads, self.dim, self.dim,
            *([norm.norm for norm in self.head_norms] or [none, none]),
        )  # fmt: skip
        self._rotary_address = ctypes.addressof(self._rotary)
        self._type = cpu.TYPES[attention.q_proj.weight.dtype]

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Elements per row of the buffers that the C decoder needs: normed, projected (q, k, v), attended, gated."""
        return (self.qkv.in_features, self.qkv.out_features, self.out.in_features, self.down.in_features)

    def described(self, attention: cpu.Layer) -> cpu.DecoderLayer:
        """Return this layer as a C struct with ``attention``; it points into memory that both objects own."""
        norms, linears = (self.input_norm, self.mlp_norm), (self.qkv, self.out, self.gate_up, self.down)
        return cpu.DecoderLayer(
            *(each.address for each in (*norms, *linears)), self._rotary_address, ctypes.addressof(attention)
        )

    def forward(
        self, hidden_states: torch.Tensor, *_: Any, position_embeddings: tuple[torch.Tensor, torch.Tensor], **__: Any
    ) -> torch.Tensor:
        hidden = hidden_states[0]
        rows = hidden.shape[0]
        qkv = self.qkv.rows(self.input_norm(hidden))
        cos, sin = position_embeddings
        self._library.rotate(self._rotary_address, qkv.data_ptr(), rows, cos.data_ptr(), sin.data_ptr(), self._type)
        heads = qkv.view(rows, -1, self.dim)
        keys, values = self.query_heads, self.query_heads + self.key_heads
        attention: LayerAttention = self.__dict__["tandem_attention"]
        attended = attention(self.layer_idx, heads[:, :keys], heads[:, keys:values], heads[:, values:], self.params)
        self.out.add_to(hidden, attended.reshape(rows, -1))
        self.down.add_to(hidden, self.gate_up.rows(self.mlp_norm(hidden)))
        return hidden_states


def fuse_layers(model: nn.Module) -> int:
    """Replace the decoder layers, and the norm behind them, where that is faster and a trial gives the same numbers
    (with exact products); return the number of layers replaced."""
    decoder: Any = getattr(model, "model", None)
    layers, rotary = getattr(decoder, "layers", None), getattr(decoder, "rotary_emb", None)
    if not isinstance(layers, nn.ModuleList) or rotary is None:
        return 0
    count = 0
    for index, layer in enumerate(layers):
        activation = _fits(layer)
        if activation is None:
            continue
        with _exact_products(layer) as changed:
            fused = _try(layer, activation, rotary)
        if fused is not None:
            layers[index] = fused = FusedLayer(layer, activation, fused.params) if changed else fused
            every = fused.qkv, fused.out, fused.gate_up, fused.down
            gather([linear for linear in every if isinstance(linear, NativeLinear)])
            count += 1
    if count == len(layers) and is_rms_norm(getattr(decoder, "norm", None)):
        decoder.norm = _norm(decoder.norm)
    return count


# -- eligibility ------------------------------------------------------------------------------------------------------


def _fits(layer: Any) -> str | None:
    """Return the activation's name if the layer has exactly the expected parts, in a dtype for which our kernels are
    faster; else None."""
    if not has_usual_parts(layer, (nn.Linear, CompactLinear)):
        return None
    attention, mlp, library = layer.self_attn, layer.mlp, cpu.library()
    config = getattr(attention, "config", None)
    groups = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
    if library is None or attention.q_proj.weight.dtype not in _TOLERANCE:
        return None
    if not all(_can_join(each) for each in (*groups, (attention.o_proj,), (mlp.down_proj,))):
        return None
    if type(mlp.gate_proj) is nn.Linear and mlp.gate_proj.out_features % library.lanes():
        return None
    activation = getattr(config, "hidden_act", None)
    return activation if activation in ACTIVATIONS else None


def has_usual_parts(layer: Any, kinds: Sequence[type] = (nn.Linear,)) -> bool:
    """Return whether the layer has exactly the parts of a Llama's, linears of ``kinds`` and RMS norms, with or without
    norms of heads."""
    if {name for name, _ in layer.named_children()} != _PARTS:
        return False
    attention = {name for name, _ in layer.self_attn.named_children()}
    if attention not in (_ATTENTION_PARTS, _ATTENTION_PARTS | _HEAD_NORMS):
        return False
    if {name for name, _ in layer.mlp.named_children()} != _MLP_PARTS:
        return False
    norms = [m for name, m in layer.named_modules() if name.endswith(("norm", "layernorm"))]
    return sum(type(m) in kinds for m in layer.modules()) == 7 and all(map(is_rms_norm, norms))


def is_rms_norm(module: Any) -> bool:
    """Return whether ``module`` is an RMS norm without bias whose weight is a plain factor."""
    return hasattr(module, "variance_epsilon") and getattr(module, "bias", None) is None


def _norm(module: Any) -> NativeNorm:
    return NativeNorm(module.weight, module.variance_epsilon)


def _can_join(linears: Sequence[Any]) -> bool:
    """Return whether our kernels can compute ``linears`` as one product, and fast: either all are compact, or none."""
    if all(type(linear) is CompactLinear for linear in linears):
        in_c = all(linear.address and linear.activation is None for linear in linears)
        alike = len({linear.exact for linear in linears}) == 1
        return in_c and alike and sum(len(linear.parts) for linear in linears) <= MOST_PARTS
    weights = [linear.weight for linear in linears if type(linear) is nn.Linear]
    if len(weights) < len(linears) or any(weight.device.type != "cpu" for weight in weights):
        return False
    return native_pays(weights[0].dtype) and all(weight.shape[1] % 2 == 0 for weight in weights)


@contextmanager
def _exact_products(layer: Any) -> Iterator[bool]:
    """Make all products of ``layer`` exact for a while, and yield whether that changes any."""
    found = [
        (parent, name, child)
        for parent in list(layer.modules())
        for name, child in list(parent.named_children())
        if type(child) is CompactLinear and not child.exact
    ]
    for parent, name, child in found:
        setattr(parent, name, child.changed(exact=True))
    try:
        yield bool(found)
    finally:
        for parent, name, child in found:
            setattr(parent, name, child)


def _joined(linears: Sequence[Any], activation: str | None = None) -> NativeLinear | CompactLinear:
    """Return one layer of all rows of ``linears``; with an ``activation``, of a gate and the values. Compact ones keep
    their weights."""
    if type(linears[0]) is not CompactLinear:
        weights = [linear.weight for linear in linears]
        return NativeLinear(torch.cat(weights) if len(weights) > 1 else weights[0], _bias(linears), activation)
    if len(linears) == 1:
        return linears[0]
    parts = [part for linear in linears for part in linear.parts]
    biases = [bias for linear in linears for bias in linear.biases]
    terms = [each for linear in linears for each in linear.terms]
    dtype, exact = linears[0].weight.dtype, linears[0].exact
    return CompactLinear.joined(parts, biases, dtype, exact=exact, activation=activation, terms=terms)


def _bias(linears: Sequence[Any]) -> torch.Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    zero = [torch.zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
    return torch.cat([bias.float() for bias in zero])


class DenseAttention:
    """Dense attention over the rows of the trial; records the parameters of each call."""

    def __init__(self) -> None:
        self.params: list[Params] = []

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: Params
    ) -> torch.Tensor:
        self.params.append(params)
        return attend_one(query, key, value, 0, params).to(query.dtype)

    def rotated(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        params: Params,
    ) -> torch.Tensor:
        """See :class:`common.attention.interface.RotatingAttention`. Needs Triton."""
        from common.kernels.triton.rotary import rotate

        return self(layer, query, rotate(query, key, *rotation), value, params)


@torch.inference_mode()
def _try(layer: Any, activation: str, rotary: Any) -> FusedLayer | None:
    """Return the fused layer if it changes random rows, at positions far apart, by the same numbers as ``layer``; else
    None."""
    dtype, dense = layer.self_attn.q_proj.weight.dtype, DenseAttention()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _TRIAL_ROWS, layer.self_attn.q_proj.in_features, generator=generator).to(dtype)
    positions = torch.arange(_TRIAL_ROWS)[None] * 37
    try:
        angles = rotary(hidden, positions)
        bind(layer, dense)
        expected = layer(hidden.clone(), attention_mask=None, position_ids=positions, position_embeddings=angles)
        (params,) = dense.params
        fused = FusedLayer(layer, activation, params)
        bind(fused, dense)
        got = fused(hidden.clone(), position_embeddings=angles)
    except Exception:  # a model's own code may raise anything when called in this way: keep the layer as it is
        return None
    if not isinstance(expected, torch.Tensor):
        return None
    change, error = (expected - hidden).float(), (got - expected).float()
    rms = error.pow(2).mean().sqrt() <= _TOLERANCE[dtype] * change.pow(2).mean().sqrt()
    largest = error.abs().max() <= 2 * _TOLERANCE[dtype] * change.abs().max()
    return fused if bool(rms & largest) else None
