"""What a decoder layer computes around its matrix products and its attention: norms with the residual sum before them,
and gated activations. Rounding follows transformers' modelling code."""

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
    """Each program normalizes one row. With ``ADD`` it first adds the row of ``Delta`` to that of ``X``."""
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
def gate_row(Gate, Up, Out, g_row, u_row, out_row, width, KIND: tl.constexpr, C: tl.constexpr):
    """Each program computes C columns of one row."""
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
