"""How a GPU's memory is divided, and what is said where it is too small."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from common.core.errors import StartError
from common.kv.gpu_budget import CONTEXT_BYTES, GpuShare, GpuUse, most_for_kv, plan_pool

GIB = 1 << 30
USE = GpuUse(total=80 * GIB, free=63 * GIB, weights=16 * GIB, activations=GIB, rows=2048)
TOKEN = 128 << 10  # bytes


def test_pool_gets_what_weights_and_activations_leave_of_the_share() -> None:
    pool, note = plan_pool(USE, GpuShare(0.9), TOKEN, 8192)
    assert pool == 72 * GIB - 17 * GIB - CONTEXT_BYTES
    for part in ("72.0 GiB of 80.0 GiB", "utilization 0.9", "weights 16.0 GiB", "2,048 tokens 1.0 GiB"):
        assert part in note


def test_cuda_graphs_get_their_memory_before_the_pool() -> None:
    use = replace(USE, graphs=3 * GIB, graph_rows=256)
    pool, note = plan_pool(use, GpuShare(0.9), TOKEN, 8192)
    assert pool == plan_pool(USE, GpuShare(0.9), TOKEN, 8192)[0] - 3 * GIB
    assert "CUDA graphs of up to 256 rows 3.0 GiB" in note
    assert plan_pool(replace(use, free=20 * GIB), GpuShare(0.9), TOKEN, 8192)[0] == 16 * GIB
    assert "CUDA graphs" not in plan_pool(USE, GpuShare(0.9), TOKEN, 8192)[1]


def test_running_without_cuda_graphs_is_advised_where_that_is_enough() -> None:
    use, tokens = replace(USE, graphs=3 * GIB, graph_rows=256), 53 * GIB // TOKEN
    with pytest.raises(StartError) as caught:
        plan_pool(use, GpuShare(0.9), TOKEN, tokens)
    assert "--enforce-eager" in caught.value.todo and "CUDA graphs" in caught.value.why
    plan_pool(replace(use, graphs=0), GpuShare(0.9), TOKEN, tokens)
    with pytest.raises(StartError) as caught:
        plan_pool(use, GpuShare(0.9), TOKEN, tokens + 3 * GIB // TOKEN)
    assert "--enforce-eager" not in caught.value.todo


def test_workers_on_one_gpu_divide_its_memory() -> None:
    pool, note = plan_pool(USE, GpuShare(0.9, 2), TOKEN, 8192)
    assert pool == 36 * GIB - 17 * GIB - CONTEXT_BYTES and "shared by 2 workers" in note


def test_memory_of_other_processes_is_not_planned() -> None:
    assert plan_pool(replace(USE, free=20 * GIB), GpuShare(0.9), TOKEN, 8192)[0] == 19 * GIB
    with pytest.raises(StartError, match=r"other processes leave 1\.5 GiB"):
        plan_pool(replace(USE, free=3 * GIB // 2), GpuShare(0.9), TOKEN, 8192)


@pytest.mark.parametrize("share", [GpuShare(0.9), GpuShare(0.9, 3), GpuShare(0.5)])
@pytest.mark.parametrize("activations", [GIB // 2, 8 * GIB, 60 * GIB])
@pytest.mark.parametrize("tokens", [16, 8192, 300_000, 1_000_000])
def test_context_and_batch_that_the_error_advises_fit(share: GpuShare, activations: int, tokens: int) -> None:
    use = replace(USE, activations=activations)
    try:
        pool, _ = plan_pool(use, share, TOKEN, tokens)
        assert pool >= tokens * TOKEN
        return
    except StartError as error:
        advice = error.todo
    if context := re.search(r"--max-model-len (\d+)", advice):
        assert 16 <= int(context[1]) < tokens
        plan_pool(use, share, TOKEN, int(context[1]))
        with pytest.raises(StartError):
            plan_pool(use, share, TOKEN, int(context[1]) + 16)
    if batch := re.search(r"--max-num-batched-tokens (\d+)", advice):
        rows = int(batch[1])
        plan_pool(replace(use, activations=activations * rows // use.rows, rows=rows), share, TOKEN, tokens)
    assert context or batch or "smaller model" in advice


def test_error_names_a_shorter_context_and_a_smaller_batch() -> None:
    with pytest.raises(StartError) as caught:
        plan_pool(replace(USE, activations=30 * GIB), GpuShare(0.9), TOKEN, 262_144)
    assert "--max-model-len" in caught.value.todo and "--max-num-batched-tokens" in caught.value.todo
    assert "262,144" in caught.value.what and "32.0 GiB" in caught.value.what


def test_weights_that_cannot_fit_are_refused_before_they_are_read() -> None:
    assert most_for_kv(80 * GIB, 79 * GIB, 71 * GIB, GpuShare(0.9)) == GIB - CONTEXT_BYTES
    for free, weights, share in ((79, 72, GpuShare(0.9)), (60, 61, GpuShare(0.9)), (79, 36, GpuShare(0.9, 2))):
        with pytest.raises(StartError, match="too little GPU memory for weights"):
            most_for_kv(80 * GIB, free * GIB, weights * GIB, share)
