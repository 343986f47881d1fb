"""What a decoder layer computes around its matrix products: norms with the residual sum before them, rotary embeddings
with the norms of heads, and gated activations. Rounding follows transformers' modelling code, except that the rotary
embedding is rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.kernels.triton.blocks import FUSED, power_of_two

ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
"""Activations of the gate that :func:`gate` knows."""
COLUMNS = 1024
"""Columns of one program of :func:`gate`."""


@triton.jit
def normed_row(x, Weight, column, D: tl.constexpr, epsilon):
    """Return the RMS norm of the float32 row ``x``, rounded as the elements of ``Weight`` are, times ``Weight``."""
    mean = tl.sum(x * x, 0) / D
    x = (x * (1.0 / tl.sqrt(mean + epsilon))).to(Weight.dtype.element_ty)
    weight = tl.load(Weight + column, mask=column < D, other=0.0)
    return x.to(tl.float32) * weight.to(tl.float32)


@triton.jit
def add_norm_row(
    X, Delta, Weight, Out, x_row, delta_row, out_row, epsilon, D: tl.constexpr, P: tl.constexpr, ADD: tl.constexpr
):
    """One program: one row. With ``ADD`` the row of ``Delta`` is added to that of ``X`` first, which keeps the sum."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    mask = column < D
    x = tl.load(X + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(Delta + row * delta_row + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(X + row * x_row + column, x.to(X.dtype.element_ty), mask=mask)
        x = x.to(X.dtype.element_ty).to(tl.float32)
    out = normed_row(x, Weight, column, D, epsilon)
    tl.store(Out + row * out_row + column, out.to(Out.dtype.element_ty), mask=mask)


@triton.jit
def turn_head(X, at, Weight, Cos, Sin, angle, epsilon, HALF: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr):
    """Norm one head of 2 * ``HALF`` elements if ``NORM``, and rotate its halves."""
    column = tl.arange(0, P)
    mask = column < HALF
    one = tl.load(X + at + column, mask=mask, other=0.0).to(tl.float32)
    two = tl.load(X + at + HALF + column, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(one * one, 0) + tl.sum(two * two, 0)) / (2 * HALF)
        scale = 1.0 / tl.sqrt(mean + epsilon)
        kind = X.dtype.element_ty
        one = (one * scale).to(kind).to(tl.float32) * tl.load(Weight + column, mask=mask, other=0.0).to(tl.float32)
        two = (two * scale).to(kind).to(tl.float32) * tl.load(Weight + HALF + column, mask=mask, other=0.0).to(
            tl.float32
        )
        one, two = one.to(kind).to(tl.float32), two.to(kind).to(tl.float32)
    cos = tl.load(Cos + angle + column, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(Sin + angle + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(X + at + column, (one * cos - two * sin).to(X.dtype.element_ty), mask=mask)
    tl.store(X + at + HALF + column, (two * cos + one * sin).to(X.dtype.element_ty), mask=mask)


@triton.jit
def turn_heads(
    Query, Key, QueryNorm, KeyNorm, Cos, Sin, query_row, query_head, key_row, key_head, angle_row, query_heads, epsilon,
    HALF: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One program: one head of one row, of the queries or of the keys, in place."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angle = row * angle_row
    if head < query_heads:
        turn_head(Query, row * query_row + head * query_head, QueryNorm, Cos, Sin, angle, epsilon, HALF, P, NORM)
    else:
        at = row * key_row + (head - query_heads) * key_head
        turn_head(Key, at, KeyNorm, Cos, Sin, angle, epsilon, HALF, P, NORM)


@triton.jit
def gate_row(Gate, Up, Out, g_row, u_row, out_row, width, KIND: tl.constexpr, C: tl.constexpr):
    """One program: C columns of one row."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C)
    mask = column < width
    gate = tl.load(Gate + row * g_row + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(Up + row * u_row + column, mask=mask, other=0.0).to(tl.float32)
    if KIND == 0:
        active = gate / (1.0 + tl.exp(-gate))
    else:  # the tanh is made of exp: libdevice's has no interpreter
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp(-2.0 * inner))
    active = active.to(Out.dtype.element_ty).to(tl.float32)
    tl.store(Out + row * out_row + column, (active * up).to(Out.dtype.element_ty), mask=mask)


def add_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Add ``delta`` [T, dim] to ``x`` [T, dim] in place, if it is given, and return the RMS norm of ``x`` times
    ``weight`` [dim]. Rows are contiguous."""
    rows, dim = x.shape
    out = torch.empty_like(x)
    other = x if delta is None else delta
    add_norm_row[(rows,)](
        x, other, weight, out, x.stride(0), other.stride(0), out.stride(0), epsilon,
        D=dim, P=power_of_two(dim), ADD=delta is not None, **FUSED,
    )  # fmt: skip
    return out


def rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> None:
    """Rotate ``query`` [T, heads, dim] and ``key`` [T, kv_heads, dim] in place by ``angles``: cosines and sines [T,
    dim]. ``norms``: weights [dim] of the RMS norms of queries and keys before that, and their epsilon."""
    cos, sin = angles
    rows, query_heads, dim = query.shape
    query_norm, key_norm, epsilon = (query, key, 0.0) if norms is None else norms
    turn_heads[(rows, query_heads + key.shape[1])](
        query, key, query_norm, key_norm, cos, sin, *query.stride()[:2], *key.stride()[:2], cos.stride(0), query_heads,
        epsilon, HALF=dim // 2, P=power_of_two(dim // 2), NORM=norms is not None, **FUSED,
    )  # fmt: skip


def gate(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up`` for two tensors [T, width] whose rows are contiguous."""
    rows, width = gate.shape
    out = gate.new_empty(rows, width)
    gate_row[(rows, triton.cdiv(width, COLUMNS))](
        gate,
        up,
        out,
        gate.stride(0),
        up.stride(0),
        out.stride(0),
        width,
        KIND=ACTIVATIONS[activation],
        C=COLUMNS,
        **FUSED,
    )
    return out
