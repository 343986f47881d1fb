"""Attention by flash-attn, whichever of its versions is installed and fits the GPU, the model and the pool.

Versions 2, 3 and 4 are three packages with interfaces of their own, and not all of them read every page size or know
every option. So a version is a candidate only if its import succeeds and it claims to serve the pool; whether it
computes the right numbers is for the trial of :mod:`common.attention.trial` to say.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from common.attention.interface import Params, Span
from common.kv.storage.interface import KvStorage

PAGE_OF_2 = 256
"""Flash-attn 2 reads pages of a multiple of so many tokens."""
WIDEST_HEAD = 256


class FlashUnusable(Exception):
    """No version of flash-attn serves this pool, for the reason in the text."""


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """One step's spans, as int32 tensors on the device: rows before each span and of all (``row_ends`` [spans + 1]),
    positions that each attends to (``lengths`` [spans]), block ids (``tables`` [spans, blocks]); and the most rows and
    positions of a span."""

    row_ends: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    most_rows: int
    longest: int


class Call(NamedTuple):
    """The arguments of one call: ``query`` [T, heads, dim], the pool's ``keys`` and ``values`` of a layer."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    plan: FlashPlan
    params: Params


@dataclass(frozen=True)
class Version:
    """One version of flash-attn: its module, the compute capabilities (major) that it is made for, whether it knows
    sinks, a reason why it cannot read a pool, and how it is called."""

    name: str
    module: str
    capabilities: range
    has_sinks: bool
    refuses: Callable[[KvStorage], str | None]
    call: Callable[[Any, Call], Any]


class FlashAttention:
    """The backend over one version, whose imported ``module`` it calls. The spans of a step must cover its rows in
    order."""

    def __init__(self, store: KvStorage, version: Version, module: Any) -> None:
        self.store, self._version, self._module = store, version, module
        self.name = version.name

    def plan(self, spans: Sequence[Span]) -> FlashPlan:
        """Return the step's tables and lengths on the device. Raises ValueError if ``spans`` do not cover the rows in
        order."""
        size = self.store.layout.block_size
        tables = [span.blocks[: -(-span.end // size)] for span in spans]
        ends = np.cumsum([0, *(span.length for span in spans)])
        if [span.row for span in spans] != ends[:-1].tolist():
            raise ValueError("the spans of a step do not cover its rows in order")
        padded = np.zeros((len(spans), max(map(len, tables))), np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        device = self.store.k(0).device
        return FlashPlan(
            torch.from_numpy(ends.astype(np.int32)).to(device),
            torch.tensor([span.end for span in spans], dtype=torch.int32).to(device),
            torch.from_numpy(padded).to(device),
            max(span.length for span in spans),
            max(span.end for span in spans),
        )

    def attend(self, plan: FlashPlan, layer: int, query: torch.Tensor, params: Params) -> torch.Tensor:
        """Return [T, heads, v_dim] for ``query`` [T, heads, k_dim]. Raises ValueError for sinks, if this version has
        none."""
        if params.sinks is not None and not self._version.has_sinks:
            raise ValueError(f"{self.name} knows no attention sinks")
        if query.dtype != self.store.dtype or query.stride(2) != 1:
            query = query.to(self.store.dtype).contiguous()
        made = self._version.call(self._module, Call(query, self.store.k(layer), self.store.v(layer), plan, params))
        out: torch.Tensor = made[0] if isinstance(made, tuple) else made
        return out.view(query.shape[0], query.shape[1], -1)


def find_flash(store: KvStorage) -> FlashAttention:
    """Return a backend over the first version that can be imported and serves ``store``. :class:`FlashUnusable` if
    there is none."""
    capability = torch.cuda.get_device_capability(store.device)[0] if store.device.type == "cuda" else None
    reasons = []
    for version in VERSIONS:
        if capability is not None and capability not in version.capabilities:
            continue
        try:
            module = importlib.import_module(version.module)
        except Exception as error:  # a package built for another torch fails in any way
            missing = isinstance(error, ModuleNotFoundError)
            reasons += [] if missing else [f"{version.name} cannot be imported ({type(error).__name__}: {error})"]
            continue
        if (why := version.refuses(store)) is None:
            return FlashAttention(store, version, module)
        reasons.append(f"{version.name} {why}")
    raise FlashUnusable("; ".join(reasons) or "no package of flash-attn for this device is installed")


# -- the versions -----------------------------------------------------------------------------------------------------


def _refuses_all(store: KvStorage) -> str | None:
    if store.dtype == torch.float32:
        return "computes in 16 bits only"
    if any(max(layer.k_dim, layer.v_dim) > WIDEST_HEAD for layer in store.layout.layers):
        return f"serves heads of at most {WIDEST_HEAD} elements"
    return None


def _refuses_2(store: KvStorage) -> str | None:
    if store.layout.block_size % PAGE_OF_2:
        return f"needs a --block-size that is a multiple of {PAGE_OF_2}"
    if any(layer.k_dim != layer.v_dim for layer in store.layout.layers):
        return "needs keys and values of one size"
    return _refuses_all(store)


def _left(params: Params, unlimited: Any) -> tuple[Any, Any]:
    """Return flash-attn's window: how far a row looks to the left and to the right."""
    return (unlimited, unlimited) if params.window is None else (params.window - 1, 0)


def _call_2(module: Any, call: Call) -> Any:
    plan, params = call.plan, call.params
    options = {
        "softmax_scale": params.scaling, "causal": True, "window_size": _left(params, -1),
        "softcap": params.softcap or 0.0, "block_table": plan.tables,
    }  # fmt: skip
    if plan.most_rows == 1:
        return module.flash_attn_with_kvcache(
            call.query.unsqueeze(1), call.keys, call.values, cache_seqlens=plan.lengths, **options
        )
    ends = torch.nn.functional.pad(plan.lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return module.flash_attn_varlen_func(
        call.query, call.keys, call.values, plan.row_ends, ends, plan.most_rows, plan.longest, **options
    )


def _call_3(module: Any, call: Call) -> Any:
    plan, params = call.plan, call.params
    return module.flash_attn_with_kvcache(
        call.query, call.keys, call.values, cache_seqlens=plan.lengths, page_table=plan.tables,
        cu_seqlens_q=plan.row_ends, max_seqlen_q=plan.most_rows, softmax_scale=params.scaling, causal=True,
        window_size=_left(params, -1), softcap=params.softcap or 0.0,
    )  # fmt: skip


def _call_4(module: Any, call: Call) -> Any:
    plan, params = call.plan, call.params
    sinks = None if params.sinks is None else params.sinks.to(torch.bfloat16)
    return module.flash_attn_varlen_func(
        call.query, call.keys, call.values, cu_seqlens_q=plan.row_ends, seqused_k=plan.lengths, page_table=plan.tables,
        max_seqlen_q=plan.most_rows, max_seqlen_k=plan.longest, softmax_scale=params.scaling, causal=True,
        window_size=_left(params, None), softcap=params.softcap or 0.0, learnable_sink=sinks,
    )  # fmt: skip


VERSIONS = (
    Version("flash-attn 3", "flash_attn_interface", range(9, 10), False, _refuses_all, _call_3),
    Version("flash-attn 4", "flash_attn.cute", range(9, 12), True, _refuses_all, _call_4),
    Version("flash-attn 2", "flash_attn", range(8, 13), False, _refuses_2, _call_2),
)
"""In the order in which they are tried."""
