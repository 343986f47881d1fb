"""Sizes the KV pool and the longest request.

Pure, so that the launcher can refuse a start that must fail before it imports torch, by the same rule as the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.core.errors import StartError
from common.kv.layout import KvLayout

SHORTEST_CONTEXT = 32
"""Fewest tokens of context that are served: each start checks the model on as many."""


@dataclass(frozen=True)
class Budget:
    """Blocks in the pool, the longest request in tokens (prompt plus output), and notes on what was chosen
    automatically."""

    blocks: int
    max_model_len: int
    notes: tuple[str, ...] = ()


def human_bytes(count: float) -> str:
    """Format a number of bytes, such as "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def check_length(model_length: int, max_model_len: int | None, limit: int, scaling: str = "") -> None:
    """Raise StartError if ``max_model_len``, or without one the model's own context ``model_length``, is too short to
    be served, or longer than ``limit``. ``scaling``: why that is longer than the model's own."""
    wanted = max_model_len or model_length
    made = f"the model was made for {model_length:,}" + (f"; {scaling}" if scaling else "")
    if wanted > limit:
        raise StartError(f"cannot serve {wanted:,} tokens of context", made, f"use --max-model-len {limit} or less")
    if wanted < SHORTEST_CONTEXT:
        raise StartError(
            f"cannot serve {wanted:,} tokens of context",
            f"each start checks the model on {SHORTEST_CONTEXT} tokens" + ("" if max_model_len else f", and {made}"),
            f"use --max-model-len {SHORTEST_CONTEXT} or more"
            if limit >= SHORTEST_CONTEXT
            else "correct the length in its config.json, or choose another model",
        )


def fit(
    layout: KvLayout,
    model_length: int,
    max_model_len: int | None,
    *,
    kv_bytes: int,
    num_kv_blocks: int | None = None,
    limit: int | None = None,
    scaling: str = "",
) -> Budget:
    """Size a pool of ``kv_bytes`` bytes, or of exactly ``num_kv_blocks`` blocks.

    ``model_length`` is the model's own context in tokens, ``limit`` the longest allowed ``max_model_len`` (default: the
    model's own), ``scaling`` why that is longer (:func:`common.checkpoint.context.limit`). Raises StartError if
    ``max_model_len`` exceeds it or is below :data:`SHORTEST_CONTEXT`, or if one full-length request does not fit.
    """
    blocks = num_kv_blocks or kv_bytes // layout.block_bytes
    limit = limit or model_length
    check_length(model_length, max_model_len, limit, scaling)
    room = blocks * layout.block_size
    wanted = max_model_len if max_model_len is not None else min(model_length, room)
    if wanted > room or wanted < 2:
        need = layout.blocks_for(max(wanted, layout.block_size)) * layout.block_bytes
        raise StartError(
            "too little memory for one full-length request",
            f"{max(wanted, layout.block_size):,} tokens need {human_bytes(need)} of KV cache, "
            f"there are {human_bytes(blocks * layout.block_bytes if num_kv_blocks else kv_bytes)} ({room:,} tokens)",
            "lower --max-model-len, or raise --kv-cache-memory or --num-kv-blocks",
        )
    size = human_bytes(blocks * layout.block_bytes)
    notes = [f"KV pool {size}: {room:,} tokens, {room // wanted} full-length requests"]
    if max_model_len is None and wanted < model_length:
        notes.append(f"max-model-len {wanted:,}: the model's {model_length:,} limited to what the pool holds")
    elif max_model_len is None and scaling:
        notes.append(f"max-model-len {wanted:,}: {scaling}, give --max-model-len up to that for longer requests")
    return Budget(blocks, wanted, tuple(notes))
