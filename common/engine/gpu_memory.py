"""Measures what a loaded model takes of its GPU's memory, before the KV pool is made."""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.core.errors import StartError
from common.core.ids import BlockId, new_request_id, pack_tokens
from common.core.request import MAX_LOGPROBS, Request, SamplingParams
from common.core.sequence import Batch, Segment, Sequence
from common.engine.faults import free_cached, is_out_of_memory, wait_for
from common.engine.runner import ModelEngine
from common.kv.budget import human_bytes
from common.kv.gpu_budget import GpuUse

_EVERYTHING = SamplingParams(
    1, 0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=MAX_LOGPROBS
)
"""Parameters for which sampling takes the most memory."""


def measure_use(make_trial: Callable[[], ModelEngine], rows: int, sequences: int) -> GpuUse:
    """Run the largest steps, of ``rows`` tokens and of ``sequences`` sequences, in the engine that ``make_trial``
    returns; it has a small pool and is closed afterwards. Raises StartError if the GPU's memory is too small for such a
    step."""
    trial = make_trial()
    device = trial.store.device
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        run_largest(trial, rows, sequences)
        wait_for(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise StartError(
            f"too little GPU memory for a step of {rows:,} tokens and {sequences:,} sequences",
            f"the weights take {human_bytes(before)}, and activations did not fit beside them",
            "lower --max-num-batched-tokens and --max-num-seqs, or free the GPU",
        ) from None
    activations = torch.cuda.max_memory_reserved(device) - before
    trial.close()
    del trial
    free_cached(device)
    free, total = torch.cuda.mem_get_info(device)
    return GpuUse(total, free, torch.cuda.memory_allocated(device), activations, rows)


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
