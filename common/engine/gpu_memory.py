"""Measures what a loaded model takes of its GPU's memory, before the KV pool is made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch

from common.core.ids import BlockId, new_request_id, pack_tokens
from common.core.request import MAX_LOGPROBS, Request, SamplingParams
from common.core.sequence import Batch, Segment, Sequence
from common.engine.cuda_graphs import MAX_ROWS
from common.engine.faults import free_cached, shortage_in_words, wait_for
from common.engine.graph_calls import GraphCalls
from common.engine.graph_capture import DRIVER_BYTES, GraphUse
from common.engine.rank_messages import Channel
from common.engine.runner import ModelEngine
from common.kv.gpu_budget import GpuUse

_EVERYTHING = SamplingParams(
    1, 0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=MAX_LOGPROBS
)
"""Parameters for which sampling takes the most memory."""


class UseMeter:
    """Measures what steps take of ``device`` beside the weights, which are what is allocated at its creation."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._weights = device, torch.cuda.memory_allocated(device)
        self._activations: int | None = None

    def begin(self) -> None:
        """Measure the peak of all steps from now on."""
        self._before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> None:
        """Note the peak of the steps since :meth:`begin`, which have ended. The first call counts."""
        if self._activations is None:
            self._activations = torch.cuda.max_memory_reserved(self._device) - self._before
        free_cached(self._device)

    def read(self, rows: int, graphs: GraphUse) -> GpuUse:
        """Return what is used, where the largest step had ``rows`` tokens. To be called without a pool."""
        free_cached(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return GpuUse(total, free, self._weights, self._activations or 0, rows, graphs.bytes, graphs.rows)


def measure_use(
    make_trial: Callable[[], ModelEngine],
    device: torch.device,
    rows: int,
    sequences: int,
    graph_calls: Callable[[], GraphCalls] | None,
    alone: bool,
    ranks: Channel | None = None,
) -> list[GpuUse]:
    """Run the largest steps, of ``rows`` tokens and of ``sequences`` sequences, in the engine that ``make_trial``
    returns; it has a small pool and is closed afterwards. With ``graph_calls``, CUDA graphs of its decode steps are
    measured, too. ``alone``: no other worker takes memory of the GPU meanwhile. Return what is taken of this process's
    GPU, then of those of the other ``ranks``. Raises StartError if the GPU's memory is too small for such steps."""
    meter = UseMeter(device)
    trial = make_trial()
    trial.max_num_seqs = sequences
    if ranks is not None:
        ranks.begin_measuring()
    meter.begin()
    what = f"for a step of {rows:,} tokens and {sequences:,} sequences"
    with shortage_in_words(what, device, "lower --max-num-batched-tokens and --max-num-seqs, or free the GPU"):
        run_largest(trial, rows, sequences)
        wait_for(device)
    meter.end()
    graphs = GraphUse() if graph_calls is None else _measure_graphs(trial, device, graph_calls(), alone)
    trial.close()
    del trial
    others = [] if ranks is None else ranks.end_measuring()
    return [meter.read(rows, graphs), *(replace(each, rows=rows) for each in others)]


def _measure_graphs(trial: ModelEngine, device: torch.device, calls: GraphCalls, alone: bool) -> GraphUse:
    """Return what the CUDA graphs of ``trial`` take. Only a worker that is ``alone`` on the GPU can read from the
    memory that is free what the driver takes for them; for the others this is estimated."""
    driver_bytes = 0 if alone else DRIVER_BYTES
    with no_room_for_graphs(trial.max_num_seqs, device):
        return trial.measure_graphs(calls, partial(taken, device, driver_bytes), driver_bytes)


def taken(device: torch.device, driver_bytes: int) -> int:
    """Return the bytes that are taken of ``device`` once all work on it has ended: by all, or, if ``driver_bytes`` are
    added for each graph, by torch in this process."""
    wait_for(device)
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.memory_reserved(device) if driver_bytes else total - free


def no_room_for_graphs(rows: int, device: torch.device) -> AbstractContextManager[None]:
    """Turn a lack of memory for graphs of up to ``rows`` rows into a StartError."""
    what = f"for CUDA graphs of decode steps of {min(rows, MAX_ROWS)} rows"
    return shortage_in_words(what, device, "give --enforce-eager, lower --max-num-seqs, or free the GPU")


def run_largest(engine: ModelEngine, rows: int, sequences: int) -> None:
    """Run a prefill step of ``rows`` tokens and a decode step of ``sequences`` sequences that use every part of
    sampling. All of them share the blocks of the pool, so what they compute means nothing."""
    length = min(rows, engine.store.blocks * engine.layout.block_size)
    blocks = [BlockId(block) for block in range(engine.layout.blocks_for(length))]
    prompt = pack_tokens([1] * length)

    def batch(count: int, first: int) -> Batch:
        fresh = (Sequence(Request(new_request_id(), prompt, _EVERYTHING), 0) for _ in range(count))
        return Batch(tuple(Segment(each, first, length - first) for each in fresh), (blocks,) * count)

    engine.run_once(batch(max(1, rows // length), 0))
    engine.run_once(batch(sequences, length - 1))
