"""Sizes the KV pool and the longest request.

Pure, so that the launcher can refuse a start that must fail before it imports torch, by the same rule as the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.core.errors import StartError
from common.kv.layout import KvLayout


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
    ``max_model_len`` exceeds it or if one full-length request does not fit.
    """
    blocks = num_kv_blocks or kv_bytes // layout.block_bytes
    limit = limit or model_length
    if max_model_len is not None and max_model_len > limit:
        raise StartError(
            f"cannot serve {max_model_len:,} tokens of context",
            f"the model was made for {model_length:,}" + (f"; {scaling}" if scaling else ""),
            f"use --max-model-len {limit} or less",
        )
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
