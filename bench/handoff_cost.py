"""``python -m bench.handoff_cost MODEL``: what safety costs, as a share of the CPU time that a request takes.

Each part is run alone, many times, in its own code: leases, heartbeats, checksums and proofs of hand-offs, fencing of
spans. The request is measured whole: CPU seconds of all processes of ``tandem up MODEL`` over a load of such requests.
Medians; the parts of one request, with the counts that a request of this shape makes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import aiohttp
import numpy as np

from common.checkpoint import open_checkpoint
from common.ids import Incarnation, RequestId, TransferId, pack_transfers, unpack_transfers
from common.messages import FromWorker, Heartbeat, Lease, ToWorker
from common.request import FinishReason
from common.wire import decode, encode
from coordinator.lifecycle import Life, State
from kvtransfer.frames import checksum_of, fold
from kvtransfer.plan import TARGET_BYTES
from kvtransfer.proof import proof, proves

BEAT_S = 0.5
LIVE = 16
"""Requests that share a worker's lease and heartbeat."""


def microseconds(action: Callable[[], object], rounds: int = 7, seconds: float = 0.05) -> float:
    """CPU time of one call, in microseconds: the median of ``rounds`` rounds of about ``seconds`` each."""
    action()
    count, began = 1, time.process_time()
    while time.process_time() - began < seconds / 10:
        action()
        count += 1
    count = max(1, int(count * 10))
    found = []
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(count):
            action()
        found.append((time.process_time() - began) / count * 1e6)
    return statistics.median(found)


def lease() -> float:
    """One lease: packed, sent as a message, read and compared, per live request."""
    rng = Random(1)
    transfers = [TransferId(RequestId(rng.randbytes(16)), 0) for _ in range(LIVE)]
    held = set(transfers)

    def once() -> None:
        message = decode(encode(Lease(pack_transfers(transfers), 1000)), ToWorker)
        assert not held - set(unpack_transfers(message.live))

    return microseconds(once) / LIVE


def heartbeat() -> float:
    """One heartbeat: said, understood and compared with what the worker should have, per live request."""
    rng = Random(2)
    ids = [rng.randbytes(16) for _ in range(LIVE)]
    counters = {f"counter_{number}": float(number) for number in range(16)}

    def once() -> None:
        beat = Heartbeat(Incarnation("0" * 16), 9, b"".join(ids), 9, 9, 9, 9, 9, 9, -1, False, counters, 40)
        heard = decode(encode(beat), FromWorker)
        known = {heard.live[at : at + 16] for at in range(0, len(heard.live), 16)}
        assert all(each in known for each in ids)

    return microseconds(once) / LIVE


def checksums(kv_bytes: int) -> float:
    """Both sides hash every byte once, and fold the frames' checksums."""
    frames = max(1, round(kv_bytes / TARGET_BYTES))
    data = np.random.default_rng(3).integers(0, 256, kv_bytes // frames, np.uint8)
    return 2 * frames * (microseconds(lambda: checksum_of(data)) + microseconds(lambda: fold(1, 2)))


def proofs() -> float:
    """An Open and a Grant, each shown and checked."""
    token, transfer = os.urandom(16), TransferId(RequestId(bytes(16)), 0)
    shown = proof(token, transfer, "open")
    return 2 * (
        microseconds(lambda: proof(token, transfer, "open"))
        + microseconds(lambda: proves(shown, token, transfer, "open"))
    )


def fencing(output_tokens: int) -> float:
    """Every span of a stream goes through the one door that knows attempts, repeats and gaps."""

    def stream() -> None:
        life = Life(1)
        life.place("disagg", Incarnation("p"), Incarnation("d"))
        life.move(State.PREFILLING)
        for position in range(output_tokens):
            life.accept(0, 0, position, [7], FinishReason.RUNNING)

    return microseconds(stream)


# -- the request whole ------------------------------------------------------------------------------------------------


def cpu_seconds(root: int) -> float:
    """User and system time of the process ``root`` and of all that it has started and that still run, so far."""
    ticks, parents = dict[int, int](), dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # proc(5), from the state on
        except OSError:  # it has ended meanwhile
            continue
        pid = int(stat.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])

    def belongs(pid: int) -> bool:
        return pid == root or (pid in parents and belongs(parents[pid]))

    return sum(ticks[pid] for pid in ticks if belongs(pid)) / os.sysconf("SC_CLK_TCK")


async def ready(url: str) -> None:
    """Waits until the system serves."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(120):
        while (await session.get(f"{url}/ready")).status != 200:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.2)


async def load(url: str, requests: int, prompt: int, output: int, concurrency: int) -> float:
    """Seconds that the requests took from sending to end, on average."""
    rng, spent, slots = Random(4), [], asyncio.Semaphore(concurrency)
    async with aiohttp.ClientSession() as session:

        async def one() -> None:
            ids = [rng.randrange(100, 1000) for _ in range(prompt)]
            body = {"prompt": ids, "max_tokens": output, "ignore_eos": True, "temperature": 0, "stream": True}
            async with slots:
                began = time.monotonic()
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    assert response.status == 200, await response.text()
                    await response.read()
                spent.append(time.monotonic() - began)

        await asyncio.gather(*(one() for _ in range(requests)))
    return statistics.mean(spent)


def request(model: str, requests: int, prompt: int, output: int, concurrency: int) -> tuple[float, float]:
    """(CPU microseconds of one request, seconds that it is in the system)."""
    command = [sys.executable, "-m", "deploy.cli", "up", model, "--port", "0", "--no-enable-prefix-caching"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as up:
        try:
            url = ""
            assert up.stdout is not None
            for line in up.stdout:
                if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                    url = found[0]
                    break
            asyncio.run(ready(url))
            asyncio.run(load(url, concurrency, prompt, output, concurrency))  # warm
            before = cpu_seconds(up.pid)
            seconds = asyncio.run(load(url, requests, prompt, output, concurrency))
            return (cpu_seconds(up.pid) - before) / requests * 1e6, seconds
        finally:
            up.terminate()
            up.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.handoff_cost", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=64)
    options = parser.parse_args()
    config = open_checkpoint(options.model).config
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    width = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    kv_bytes = options.prompt * config["num_hidden_layers"] * heads * width * 2 * 2
    whole, seconds = request(options.model, options.requests, options.prompt, options.output, options.concurrency)
    beats = seconds / BEAT_S
    parts = {
        f"leases ({beats:.1f} to each of two workers)": 2 * beats * lease(),
        f"heartbeats ({beats:.1f} of each of two workers)": 2 * beats * heartbeat(),
        f"checksums ({kv_bytes / 2**20:.1f} MiB of KV, both sides)": checksums(kv_bytes),
        "proofs (an Open and a Grant)": proofs(),
        f"fencing ({options.output} spans)": fencing(options.output),
    }
    shape = f"{options.prompt}/{options.output} tokens"
    print(f"a request of {shape}: {whole / 1e6:.3f} s of CPU, {seconds:.2f} s in the system")
    for name, cost in parts.items():
        print(f"  {name:48} {cost:9.1f} us  {cost / whole:7.3%}")
    total = sum(parts.values())
    print(f"  {'in all':48} {total:9.1f} us  {total / whole:7.3%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
