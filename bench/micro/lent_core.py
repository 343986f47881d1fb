"""``tandem bench lent-core``: how much a lent core speeds up steps of the engine.

Steps of one engine run on this process's first core, with and without the second core lent to it as an idle worker
lends it (:mod:`common.platform.core_lease`): decode by number of streams, then prompts by number of tokens. The two
kinds are timed in turn.
"""

from __future__ import annotations

import ctypes
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

from bench.load import results
from bench.simulate.cost import uniform
from common import builtin
from common.checkpoint.files import open_checkpoint
from common.config.bench.lent_core import BenchLentCoreConfig
from common.core.errors import StartError
from common.core.sequence import Batch
from common.platform import device, threads
from common.platform.core_lease import CoreLease

CONTEXT = 512
STREAMS, PROMPTS = (4, 8, 16, 32, 64), (16, 64, 512)


def batches(block_size: int) -> Iterator[tuple[str, Batch]]:
    """Yield each batch that is timed, with its name."""
    for count in STREAMS:
        yield f"{count} streams", uniform(block_size, count, CONTEXT - 1, 1)
    for tokens in PROMPTS:
        yield f"a prompt of {tokens}", uniform(block_size, 1, 0, tokens)


def measure(model: str, own: int, other: int, repeats: int) -> Iterator[tuple[str, float, float]]:
    """Yield each step's name, and the median seconds on core ``own`` alone and with ``other`` lent to it. Raises
    StartError without compiled kernels, which are the ones that can use a lent core."""
    device.pin((own,), 1)
    from common.engine.loading import load_engine
    from common.kernels import cpu

    if (library := cpu.library()) is None:
        raise StartError(
            "no core can be borrowed", "there are no compiled kernels", "install a C compiler, then Tandem"
        )
    checkpoint = open_checkpoint(model)
    most = max(STREAMS)
    engine = load_engine(
        checkpoint,
        num_kv_blocks=most * CONTEXT // 16,
        max_batched_tokens=max(PROMPTS),
        max_num_seqs=most,
        batch_hint=most,
    )
    lent = CoreLease.create()
    lent.settle([[own], [other]])
    owner = CoreLease(os.dup(lent.descriptor), [other])
    with threads.borrowing():
        library.borrow(lent.address, (ctypes.c_int32 * 1)(other), 1)
    try:
        engine.warm_up()
        for name, batch in batches(engine.layout.block_size):
            alone, helped = [], []
            for _ in range(repeats):
                alone.append(engine.step(batch).seconds)
                owner.lend()
                engine.step(batch)  # the helper wakes up
                helped.append(engine.step(batch).seconds)
                owner.take_back()
            yield name, statistics.median(alone), statistics.median(helped)
    finally:
        library.give_back()
        owner.close()
        lent.close()
        engine.close()


def run(config: BenchLentCoreConfig) -> int:
    """Print each step as it is measured. Raises StartError if this process may use only one core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise StartError("no core can be lent", "this process may use only one core", "allow it a second one")
    print("| step | alone | with a lent core | times as fast |\n|---|---|---|---|", flush=True)
    found = {}
    for name, alone, helped in measure(config.model or str(builtin.path()), cores[0], cores[1], config.repeats):
        found[name] = {"alone_s": alone, "helped_s": helped}
        print(f"| {name} | {1000 * alone:.2f} ms | {1000 * helped:.2f} ms | {alone / helped:.2f} |", flush=True)
    if config.save:
        results.save(Path(config.save), {"context": CONTEXT, "steps": found})
    return 0
