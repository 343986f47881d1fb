"""G7, G8: KV of 4,096 tokens of an 8B model from one process to another, both with a pool on the card.

Two processes take turns on one card, so what is hidden behind prefill cannot be seen here; the rate of the copy can.
"""

from __future__ import annotations

import statistics

from bench.goals.figures import GoalTarget, Row
from bench.gpu.stages import Setting
from bench.micro import wire

TOKENS, REPEATS = 4096, 9
DRY_TOKENS, DRY_REPEATS = 64, 2


def measure(setting: Setting) -> list[Row]:
    """Measure whole hand-offs, from the announcement to the acceptance, over CUDA IPC and through pinned host
    memory."""
    tokens, repeats = (DRY_TOKENS, DRY_REPEATS) if setting.dry else (TOKENS, REPEATS)
    size = tokens * wire.LAYOUT.token_bytes
    direct = "shm" if setting.dry else "cuda-ipc"
    by_ipc = size / statistics.median(wire.measure(direct, tokens, repeats, gpu=not setting.dry))
    by_host = statistics.median(wire.measure("zmq", tokens, repeats, gpu=not setting.dry))
    copy_s = 2 * size / setting.ceilings["copy_bytes_per_s"]
    to_host = setting.ceilings["to_host_bytes_per_s"]
    return [
        Row("G7", f"hand-off of {size >> 20} MiB between two processes, {direct}", "ms", 1e3 * by_ipc,
            (GoalTarget("value", 0.35, at_most=True),), limit=1e3 * copy_s, share=copy_s / by_ipc),
        Row("G8", "the same through pinned host memory", "GB/s", by_host / 1e9, (GoalTarget("share", 0.9),),
            limit=to_host / 1e9, share=by_host / to_host),
    ]  # fmt: skip
