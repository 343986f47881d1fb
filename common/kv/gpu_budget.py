"""Divides a GPU's memory among weights, activations and the KV pool.

Pure: a worker measures, this module decides and says in words what would fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.core.errors import StartError
from common.kv.budget import human_bytes

CONTEXT_BYTES = 640 << 20
"""Memory that a process takes of a GPU beside its tensors: CUDA's context and the code of the kernels."""


@dataclass(frozen=True)
class GpuUse:
    """Memory of one GPU in bytes, measured by a worker whose weights are loaded: what the GPU has (``total``), what is
    free now (``free``), and what this worker takes. ``activations``: the peak of its largest step beside weights and
    pool, which had ``rows`` tokens. ``graphs``: what CUDA graphs of decode steps of up to ``graph_rows`` rows take."""

    total: int
    free: int
    weights: int
    activations: int
    rows: int
    graphs: int = 0
    graph_rows: int = 0

    @property
    def beside(self) -> int:
        """What is not taken yet and must stay free beside the pool."""
        return self.activations + self.graphs


@dataclass(frozen=True)
class GpuShare:
    """The part of a GPU's memory that one worker may take: ``utilization`` of it, shared by ``workers`` workers."""

    utilization: float = 0.9
    workers: int = 1

    def of(self, total: int) -> int:
        """Return the worker's part of ``total`` bytes."""
        return int(total * self.utilization) // self.workers

    def __str__(self) -> str:
        shared = f" shared by {self.workers} workers" if self.workers > 1 else ""
        return f"--gpu-memory-utilization {self.utilization:g}{shared}"


def plan_pool(use: GpuUse, share: GpuShare, token_bytes: int, tokens: int) -> tuple[int, str]:
    """Return the bytes of KV for a worker that may take ``share`` of its GPU, and a note on how the memory is divided.

    ``token_bytes``: KV of one token. ``tokens``: the shortest pool that is of use, normally the context asked for.
    Raises StartError if that does not fit; it names the context or the batch that would.
    """
    allowed = share.of(use.total)
    ours, there = allowed - use.weights - CONTEXT_BYTES - use.beside, use.free - use.beside
    pool = min(ours, there)
    taken = f"weights {human_bytes(use.weights)}, activations of {use.rows:,} tokens {human_bytes(use.activations)}, "
    if use.graphs:
        taken += f"CUDA graphs of up to {use.graph_rows} rows {human_bytes(use.graphs)}, "
    taken += f"CUDA {human_bytes(CONTEXT_BYTES)}"
    if pool >= tokens * token_bytes:
        return pool, f"GPU memory: {human_bytes(allowed)} of {human_bytes(use.total)} ({share}): {taken}"
    if there < ours:
        taken += f"; other processes leave {human_bytes(use.free)}"
    raise StartError(
        f"too little GPU memory for a context of {tokens:,} tokens, which needs {human_bytes(tokens * token_bytes)}",
        f"{share} allows {human_bytes(allowed)} of {human_bytes(use.total)}: {taken}; "
        f"that leaves {human_bytes(max(0, pool))}",
        _advice(use, pool, token_bytes, tokens),
    )


def plan_pools(uses: Sequence[GpuUse], share: GpuShare, token_bytes: int, tokens: int, shards: int) -> tuple[int, str]:
    """Return what :func:`plan_pool` does for a worker on several GPUs, each of which holds one of ``shards`` shards of
    every block. The fullest GPU decides."""
    plans = [plan_pool(use, share, token_bytes // shards, tokens) for use in uses]
    pool, note = min(plans)
    return pool * shards, note if len(uses) == 1 else f"{note} (the fullest of {len(uses)} GPUs)"


def most_for_kv(total: int, free: int, weights: int, share: GpuShare) -> int:
    """Return the bytes that ``weights`` bytes of weights leave of a worker's share of a GPU, activations not counted.
    Raises StartError if the weights alone do not fit. To be called before they are read."""
    left = min(share.of(total) - CONTEXT_BYTES, free) - weights
    if left > 0:
        return left
    raise StartError(
        f"too little GPU memory for weights of {human_bytes(weights)}",
        f"{share} allows {human_bytes(share.of(total))} of {human_bytes(total)}, of which CUDA takes "
        f"{human_bytes(CONTEXT_BYTES)}, and {human_bytes(free)} are free",
        "choose a smaller model, free the GPU, or run fewer workers on it",
    )


def _advice(use: GpuUse, pool: int, token_bytes: int, tokens: int) -> str:
    """Say which context fits, and which smaller batch would leave room for the one that was asked for, or whether it
    fits without CUDA graphs."""
    advice = []
    if (fits := max(0, pool) // token_bytes // 16 * 16) >= 16:
        advice.append(f"--max-model-len {fits} or less")
    room = pool + use.activations - tokens * token_bytes
    rows = room * use.rows // use.activations // 16 * 16 if use.activations else 0
    if 16 <= rows < use.rows:
        advice.append(f"--max-num-batched-tokens {rows} or less")
    if use.graphs and pool + use.graphs >= tokens * token_bytes:
        advice.append("--enforce-eager")
    if not advice:
        return "choose a smaller model, free the GPU, or run fewer workers on it"
    return f"give {', or '.join(advice)}"
