"""The kernels on the card: all of them against the oracle, and G3, paged decode attention alone."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from bench.goals.figures import GoalTarget, Row
from bench.gpu.stages import Setting
from bench.gpu.timing import seconds_per_call
from bench.load.processes import die_with_parent
from bench.load.results import ROOT
from common.attention.interface import Params, Span
from common.core.errors import StartError
from common.kernels.e4m3 import lacks_units
from common.kv.layout import KvLayout, LayerLayout
from common.kv.scales import KvScales, LayerScales
from common.kv.storage.fp8 import Fp8Codec
from common.kv.storage.slab import SlabStore
from common.kv.storage.tensors import DTYPES

PROCESSES = 8
"""Compilation takes most of the time, on the host's cores."""
DRY_SHARES = 40
"""In a dry run one of so many parts of the sampled grid runs."""
BLOCK, DIM, HEADS = 16, 128, 32
GROUPS = (4, 8)
POINTS = ((1, 1024), (1, 32_768), (16, 4096), (64, 1024), (64, 8192), (256, 1024), (256, 4096))
"""Batch and context."""
FP8_POINTS = ((1, 32_768), (64, 8192), (256, 1024))
NAN_CODE = 0x7F
_CALLS_OF_A_GRAPH = 10


def correct(setting: Setting) -> list[Row]:
    """Run on the device what the tests run in Triton's interpreter, in several processes: the sampled grid of attention
    and products, and the kernels around them. Raises StartError with the cases that are wrong."""
    shares = [f"0/{DRY_SHARES}"] if setting.dry else [f"{share}/{PROCESSES}" for share in range(PROCESSES)]
    programs = [["tests.triton.grid", "--sample", "--share", share] for share in shares]
    programs += [["tests.triton.parts"], ["tests.triton.layers"]]
    device = "cpu" if setting.dry else "cuda"
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if setting.dry else {}), "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", *program, "--device", device],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=die_with_parent,  # the card belongs to the next stage if this one takes too long
        )
        for program in programs
    ]
    said = [run.communicate()[0] for run in runs]
    if broken := [text for run, text in zip(runs, said, strict=True) if run.returncode]:
        raise StartError("kernels are wrong on this device", "".join(broken)[-2000:], "correct them")
    count = sum(int(text.splitlines()[-1].split()[0]) for text in said)
    return [Row("", "cases of the kernels that equal the oracle", "", count, (), note="none is wrong")]


def g3(setting: Setting) -> list[Row]:
    """Paged decode attention against the copy bandwidth, and against torch's attention over contiguous KV."""
    device = torch.device(setting.device)
    rows = []
    for group in GROUPS:
        for batch, context in ((2, 64),) if setting.dry else POINTS:
            rows.append(_decode(setting, device, group, batch, context))
    if lacks_units(device) is None:
        for batch, context in ((2, 64),) if setting.dry else FP8_POINTS:
            rows.append(_decode(setting, device, GROUPS[0], batch, context, in_fp8=True))
    return rows


def _decode(setting: Setting, device: torch.device, group: int, batch: int, context: int, in_fp8: bool = False) -> Row:
    """Measure decode attention of one layer. With KV ``in_fp8`` the row has no target; its limit is half as high."""
    kv_heads = (8 if setting.dry else HEADS) // group
    dtype: Any = "float32" if setting.dry else "bfloat16"
    store = _filled(kv_heads, dtype, in_fp8, batch * -(-context // BLOCK), device)
    layout = store.layout
    query = torch.randn(batch, kv_heads * group, DIM, device=device, dtype=DTYPES[dtype])
    backend = _backend(setting, store)
    each = layout.blocks_for(context)
    order = torch.randperm(store.blocks).tolist()  # blocks of a pool in use are scattered
    plan = backend.plan([Span(row, 1, context - 1, order[row * each : (row + 1) * each]) for row in range(batch)])
    params = Params(DIM**-0.5)
    seconds = _captured_s(lambda: backend.attend(plan, 0, query, params), device)
    least = 2 * batch * context * kv_heads * DIM * layout.element_bytes / setting.ceilings["copy_bytes_per_s"]
    dense = _dense_s(batch, context, kv_heads, group, DTYPES[dtype], device)
    store.close()
    what = f"paged decode attention, batch {batch}, context {context:,}, group of {group}"
    targets = (GoalTarget("share", 0.85), GoalTarget("value", 1e6 * dense, at_most=True))
    return Row(
        "" if in_fp8 else "G3", f"{what}, KV in fp8" if in_fp8 else what, "µs", 1e6 * seconds,
        () if in_fp8 else targets, limit=1e6 * least, share=least / seconds,
        note=f"torch's attention over contiguous {dtype}: {1e6 * dense:.1f} µs",
    )  # fmt: skip


def _filled(kv_heads: int, dtype: Any, in_fp8: bool, blocks: int, device: torch.device) -> SlabStore:
    """Return a pool of one layer with random numbers."""
    layout = KvLayout((LayerLayout(kv_heads, DIM, DIM),), "fp8" if in_fp8 else dtype, BLOCK)
    scales = LayerScales(*[tuple(2.0 ** (head % 2) for head in range(kv_heads))] * 2)
    codec = Fp8Codec(KvScales((scales,)), DTYPES[dtype], device) if in_fp8 else None
    store = SlabStore(layout, blocks, device, codec=codec)
    for part in (store.k(0), store.v(0)):
        if in_fp8:
            part.view(torch.uint8).random_(0, NAN_CODE)
        else:
            part.normal_()
    return store


def _backend(setting: Setting, store: SlabStore) -> Any:
    if setting.dry:  # without the interpreter, whose kernels say nothing about speed
        from common.attention.torch_reference import TorchReference

        return TorchReference(store)
    from common.attention.triton import TritonAttention

    return TritonAttention(store)


def _dense_s(batch: int, context: int, kv_heads: int, group: int, dtype: torch.dtype, device: torch.device) -> float:
    query = torch.randn(batch, kv_heads * group, 1, DIM, device=device, dtype=dtype)
    key, value = (torch.randn(batch, kv_heads, context, DIM, device=device, dtype=dtype) for _ in range(2))
    return _captured_s(lambda: functional.scaled_dot_product_attention(query, key, value, enable_gqa=True), device)


def _captured_s(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of ``call``, on a GPU within a CUDA graph, so that launches from Python do not count."""
    if device.type != "cuda":
        return statistics.median(seconds_per_call(call, device))
    for _ in range(3):  # compile and reserve outside of the capture
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS_OF_A_GRAPH):
            call()
    return statistics.median(seconds_per_call(graph.replay, device)) / _CALLS_OF_A_GRAPH
