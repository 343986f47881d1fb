"""Freezes rotary embeddings that choose their frequencies from the longest position of a batch.

``longrope`` and ``dynamic`` look at the largest position in the row they are given. In a flat row it may belong to
another request, so a long neighbour would change a short request, and keys computed before and after would not match.
They are frozen at load as if every sequence had the full context length: ``longrope`` uses its long factors exactly
when that length exceeds the one of its original training (as in vLLM), ``dynamic`` the base of that length. For
``dynamic`` at the model's own length nothing changes; a larger length stretches all requests alike.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn


def freeze_rotary(model: nn.Module, length: int) -> tuple[list[str], str]:
    """Freeze every rotary embedding that looks at the batch, for sequences of ``length`` tokens.

    Return notes in words, and a hash over the frozen frequencies ("" if there are none): workers whose frequencies
    differ must not exchange KV.
    """
    notes: dict[str, None] = {}
    digest = hashlib.blake2b(digest_size=8)
    for module in model.modules():
        for kind, layer_type in _looking_kinds(module):
            frequencies = _freeze(module, layer_type, length)
            digest.update(frequencies.detach().float().cpu().numpy().tobytes())
            notes[f"rotary {kind}: frequencies frozen for {length:,} positions, the same for every request"] = None
    return list(notes), digest.hexdigest() if notes else ""


def _looking_kinds(module: Any) -> list[tuple[str, str | None]]:
    """Return the (kind, layer type) pairs of a rotary module that look at the batch; the layer type is None if the
    module has only one."""
    kinds = getattr(module, "rope_type", None)
    pairs: list[tuple[str, str | None]] = []
    if isinstance(kinds, str):
        pairs = [(kinds, None)]
    elif isinstance(kinds, dict):
        pairs = [(kind, layer) for layer, kind in kinds.items()]
    return [(kind, layer) for kind, layer in pairs if kind == "longrope" or "dynamic" in kind]


@torch.no_grad()
def _freeze(module: Any, layer_type: str | None, length: int) -> torch.Tensor:
    """Run the module once on the last position, then stop it from looking at the batch; return its frequencies."""
    where = next((buffer.device for buffer in module.buffers()), torch.device("cpu"))
    like, last = torch.zeros(1, device=where), torch.tensor([[length - 1]], device=where)
    if layer_type is None:
        module(like, last)
        module.rope_type = "default"
    else:
        module(like, last, layer_type)
        module.rope_type = {**module.rope_type, layer_type: "default"}
    frequencies: torch.Tensor = getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
    return frequencies
