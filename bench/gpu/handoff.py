"""G7, G8: KV of 4,096 tokens of an 8B model from one process to another, both with a pool on the card.

Two processes take turns on one card, so what is hidden behind prefill cannot be seen here; the rate of the copy can.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

from bench.goals.figures import GoalTarget, Row
from bench.gpu.stages import Setting
from bench.micro import wire
from common.core.ids import BlockId
from common.kv.storage.cuda import CudaMemory
from common.kv.storage.device_calls import DeviceCalls

TOKENS, REPEATS = 4096, 9
DRY_TOKENS, DRY_REPEATS = 64, 2
FRAME_TOKENS, FRAME_LAYERS = 1024, 4
"""A frame of 16 MiB, in pieces of 32 KiB."""


def direct(setting: Setting) -> list[Row]:
    """G7: whole hand-offs, from the announcement to the acceptance, over CUDA IPC."""
    tokens, repeats = _amounts(setting)
    size, link = tokens * wire.LAYOUT.token_bytes, "shm" if setting.dry else "cuda-ipc"
    seconds = size / statistics.median(wire.measure(link, tokens, repeats, gpu=not setting.dry))
    copy_s = 2 * size / setting.ceilings["copy_bytes_per_s"]
    return [
        Row("G7", f"hand-off of {size >> 20} MiB between two processes, {link}", "ms", 1e3 * seconds,
            (GoalTarget("value", 0.35, at_most=True),), limit=1e3 * copy_s, share=copy_s / seconds)
    ]  # fmt: skip


def pinned(setting: Setting) -> list[Row]:
    """G8: the same hand-offs through pinned host memory; and how fast the pieces of KV are gathered."""
    tokens, repeats = _amounts(setting)
    size, to_host = tokens * wire.LAYOUT.token_bytes, setting.ceilings["to_host_bytes_per_s"]
    rate = statistics.median(wire.measure("zmq", tokens, repeats, gpu=not setting.dry))
    what = f"hand-off of {size >> 20} MiB between two processes, pinned host memory"
    ways = {} if setting.dry else _ways()
    return [
        Row("G8", what, "GB/s", rate / 1e9, (GoalTarget("share", 0.9),), limit=to_host / 1e9, share=rate / to_host),
        *gather_rows(ways, tokens, repeats, setting.ceilings["copy_bytes_per_s"]),
    ]


def _amounts(setting: Setting) -> tuple[int, int]:
    return (DRY_TOKENS, DRY_REPEATS) if setting.dry else (TOKENS, REPEATS)


def _ways() -> Mapping[str, DeviceCalls]:
    """Return both ways in which the pieces of a frame are copied into a landing buffer."""
    import torch

    from common.kv.storage.cuda_driver import CudaDriver, torch_driver

    engines = CudaDriver(0, lambda: int(torch.cuda.current_stream(0).cuda_stream))
    return {"as hand-offs do": torch_driver(0), "by the copy engines": engines}


def gather_rows(ways: Mapping[str, DeviceCalls], tokens: int, repeats: int, bytes_per_s: float) -> list[Row]:
    """Measure how fast scattered KV of ``tokens`` tokens is gathered frame by frame. ``bytes_per_s``: the card's copy
    bandwidth, reads and writes together."""
    size, rows = tokens * wire.LAYOUT.token_bytes, []
    for name, calls in ways.items():
        seconds = statistics.median(_gather_s(calls, tokens) for _ in range(repeats + 1))
        reached = size / seconds / 1e9
        rows.append(
            Row("", f"gather {size >> 20} MiB of KV {name}", "GB/s", reached, (), limit=bytes_per_s / 2e9,
                share=reached / (bytes_per_s / 2e9))
        )  # fmt: skip
    return rows


def _gather_s(calls: DeviceCalls, tokens: int) -> float:
    """Return the seconds in which all frames of ``tokens`` tokens are gathered into one landing buffer."""
    layout, count = wire.LAYOUT, wire.LAYOUT.blocks_for(tokens)
    memory = CudaMemory(layout, count, calls)
    landing = calls.allocate(layout.range_bytes(0, FRAME_LAYERS, FRAME_TOKENS))
    table = [BlockId(block) for block in (*range(0, count, 2), *range(1, count, 2))]
    began = time.perf_counter()
    for first in range(0, tokens, FRAME_TOKENS):
        for layer in range(0, len(layout.layers), FRAME_LAYERS):
            frame = range(first, min(first + FRAME_TOKENS, tokens))
            memory.gather(table, frame, range(layer, layer + FRAME_LAYERS), landing)
    calls.wait(calls.record_event())
    seconds = time.perf_counter() - began
    calls.free(landing)
    memory.close()
    return seconds
