"""Servers that are measured in turn: each has the same load in every round, and figures are medians over the rounds.

A round sends each server a prompt of random tokens, one stream, and eight streams at once. The figures of prompts are
by the time to the first token. Prompts are not cached.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.load.client import Target
from bench.load.run import run_now
from bench.load.systems import running
from bench.load.workloads import random_asks
from common.core.errors import StartError
from common.net.http_client import HttpClient

PLACES, CONTEXT = 8, 1024
PROMPT = 512
SHORT, STREAM = 32, 96
"""Prompt and output tokens of a stream."""
FIGURES = (
    ("decode, one stream", "one", "tokens/s", 1.0), ("decode, eight streams", "eight", "tokens/s", 1.0),
    (f"prompt of {PROMPT}", "prompt", "tokens/s", 1.0), ("start to first token", "start_s", "s", 1.0),
    ("memory of all processes", "memory", "MiB", 1 / (1 << 20)),
)  # fmt: skip
"""What is measured: its name, its key in the results, its unit, and the units in one of the results."""


@dataclass
class Side:
    """A running server and its figures by name, one for each round."""

    name: str
    target: Target
    start_s: float
    memory: int
    pause: Callable[[], None] = lambda: None
    resume: Callable[[], None] = lambda: None
    found: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, ids: list[int], seed: int) -> None:
        """Send one round of requests."""
        for name, count, prompt, output in (
            ("prompt", 1, PROMPT, 4),
            ("one", 1, SHORT, STREAM),
            ("eight", PLACES, SHORT, STREAM),
        ):
            asks = random_asks(ids, count, prompt, output, seed=seed)
            records = run_now(self.target, asks, [0.0] * count).records
            if bad := [record.error for record in records if record.error]:
                raise StartError(f"{self.name} does not serve this load", bad[0], "look at what it logs")
            if name == "prompt":
                rate = PROMPT / records[0].ttft
            else:
                began = min(record.moments[0] for record in records)
                tokens = sum(record.output_tokens - 1 for record in records)
                rate = tokens / (max(record.moments[-1] for record in records) - began)
            self.found.setdefault(name, []).append(rate)

    def rates(self) -> dict[str, float]:
        """Return the median of each figure, in tokens per second."""
        return {name: statistics.median(each) for name, each in self.found.items()}


def descendants() -> set[int]:
    """Return the ids of the processes that this one, or its descendants, have started."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found, new = set[int](), {os.getpid()}
    while new := {process for process, parent in parents.items() if parent in new} - found:
        found |= new
    return found


def memory(processes: Iterable[int]) -> int:
    """Return the bytes that ``processes`` have in memory. A page of several processes counts for each in part."""
    found = 0
    for process in processes:
        with contextlib.suppress(OSError):
            shown = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)
            found += int(shown[1]) << 10 if shown else 0
    return found


def measure(sides: Sequence[Side], ids: list[int], rounds: int) -> dict[str, Any]:
    """Send ``rounds`` rounds of random ``ids`` to the sides in turn, after one that warms them up. Returns the figures
    of each by name."""
    for number in range(rounds + 1):
        for side in sides:
            side.resume()
            side.measure(ids, number)
            side.pause()
        if not number:
            for side in sides:
                side.found.clear()
    return {
        side.name: side.rates() | {"start_s": side.start_s, "memory": side.memory, "rounds": side.found}
        for side in sides
    }


def ratio(one: dict[str, Any], other: dict[str, Any], key: str) -> float:
    """Return the ratio of a figure of two sides; of rates, the median of the ratios in each round, so that a slow
    moment of the machine counts for both."""
    if key not in one["rounds"]:
        return float(one[key] / other[key])
    pairs = zip(one["rounds"][key], other["rounds"][key], strict=True)
    return statistics.median(float(a / b) for a, b in pairs)


def tandem(stack: ExitStack, model: str, threads: int, name: str = "tandem", flags: Sequence[str] = ()) -> Side:
    """Serve ``model`` by one colocated worker, until ``stack`` is closed."""
    flags = ["--threads", str(threads), "--max-num-seqs", str(PLACES), "--max-model-len", str(CONTEXT),
             "--no-enable-prefix-caching", *flags]  # fmt: skip
    before, began = descendants(), time.perf_counter()
    url = stack.enter_context(running(model, "1c", flags))
    target = Target(url, HttpClient(url).served(None)["id"], extra={"ignore_eos": True, "temperature": 0})
    first_token(target)
    return Side(name, target, time.perf_counter() - began, memory(descendants() - before))


def first_token(target: Target) -> None:
    """Wait for an answer of one token."""
    HttpClient(target.url).post("/v1/completions", {"model": target.model, "prompt": "one", "max_tokens": 1})
