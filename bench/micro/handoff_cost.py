"""``tandem bench handoff-cost``: CPU time that fault detection and verification add to a request, and their share.

The whole request is measured on ``tandem up MODEL``: CPU seconds of all its processes over a load of such requests, and
the KV that was handed over. The parts (:mod:`bench.micro.handoff_parts`) are measured one by one, with the counts that
a request of this shape needs at that concurrency. Messages that exist without any fault detection are left out, except
those of the hand-off, which count in full.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import aiohttp

from bench.load import results
from bench.load.processes import cpu_seconds
from bench.micro.handoff_parts import BLOCK_SIZE, RequestShape, parts
from common import builtin
from common.checkpoint.files import open_checkpoint
from common.config.bench.handoff_cost import BenchHandoffCostConfig
from common.core.errors import StartError
from common.kv.layout import KvDtype, KvLayout, LayerLayout


async def ready(url: str) -> None:
    """Wait until the system serves."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(120):
        while (await session.get(f"{url}/ready")).status != 200:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.2)


async def load(url: str, requests: int, prompt: int, output: int, concurrency: int) -> float:
    """Return the mean seconds of the requests, from sending to the end."""
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


async def handed_over(url: str) -> tuple[float, float]:
    """Return the KV bytes and the number of hand-offs so far."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        page = await response.text()
    sums = [r"^tandem_kv_transfer_bytes_total\{.*\} (\S+)", r"^tandem_kv_transfer_seconds_count (\S+)"]
    size, count = (sum(map(float, re.findall(each, page, re.MULTILINE))) for each in sums)
    return size, count


@dataclass(frozen=True)
class Whole:
    """One request among others: its CPU time in microseconds, its seconds in the system, and the bytes of KV handed
    over."""

    cpu_us: float
    seconds: float
    kv_bytes: float


def request(model: str, requests: int, prompt: int, output: int, concurrency: int) -> Whole:
    """Return the average over a load of ``requests``, ``concurrency`` at a time, each of which is handed over. Raises
    StartError if the system does not start or a request was not handed over."""
    command = [sys.executable, "-m", "deploy.cli", "up", model, "--port", "0", "--control-port", "0"]
    command.append("--no-enable-prefix-caching")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as up:
        try:
            url, said = "", []
            assert up.stdout is not None
            for line in up.stdout:
                said.append(line)
                if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                    url = found[0]
                    break
            if not url:
                raise StartError("tandem up does not start", "".join(said), "start it by hand")
            asyncio.run(ready(url))
            asyncio.run(load(url, concurrency, prompt, output, concurrency))  # warm
            size, count = asyncio.run(handed_over(url))
            before = cpu_seconds(up.pid)
            seconds = asyncio.run(load(url, requests, prompt, output, concurrency))
            cpu_us = (cpu_seconds(up.pid) - before) / requests * 1e6
            size_then, count_then = asyncio.run(handed_over(url))
            if count_then - count != requests:
                why = f"{count_then - count:g} of {requests} requests were handed over"
                raise StartError("there is no figure", why, "give longer prompts, or another model")
            return Whole(cpu_us, seconds, (size_then - size) / requests)
        finally:
            up.terminate()
            up.communicate()


def layout_of(model: str, prompt: int, kv_bytes: float) -> KvLayout:
    """Return the layout of the KV that was handed over; its element type follows from its size. Raises StartError if no
    type fits."""
    config = open_checkpoint(model).config
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    layers = (LayerLayout(heads, width, width),) * config["num_hidden_layers"]
    dtypes: tuple[KvDtype, ...] = ("float32", "bfloat16")
    for layout in (KvLayout(layers, dtype, BLOCK_SIZE) for dtype in dtypes):
        if layout.range_bytes(0, len(layers), prompt) == kv_bytes:
            return layout
    why = f"{kv_bytes:g} bytes of KV for {prompt} tokens are not what {len(layers)} such layers have"
    raise StartError("the KV layout is unknown", why, "name a model with key and value heads of one size")


def run(config: BenchHandoffCostConfig) -> int:
    """Print the cost of each part in microseconds and as a share of the request's CPU time."""
    model = config.model or str(builtin.path())
    prompt, output, live = config.random_input_len, config.random_output_len, config.max_concurrency
    whole = request(model, config.num_prompts, prompt, output, live)
    shape = RequestShape(prompt, output, live, layout_of(model, prompt, whole.kv_bytes))
    print(f"a request of {prompt}/{output} tokens, {live} at a time: {whole.cpu_us / 1e6:.3f} s of CPU, "
          f"{whole.seconds:.2f} s in the system")  # fmt: skip
    found = {}
    for name, cost in parts(shape, whole.seconds):
        found[name] = cost
        print(f"  {name:48} {cost:9.1f} us  {cost / whole.cpu_us:7.3%}")
    total = sum(found.values())
    print(f"  {'in all':48} {total:9.1f} us  {total / whole.cpu_us:7.3%}")
    if config.save:
        request_us = {"cpu": whole.cpu_us, "in_the_system": 1e6 * whole.seconds}
        results.save(Path(config.save), {"request_us": request_us, "parts_us": found, "in_all_us": total})
    return 0
