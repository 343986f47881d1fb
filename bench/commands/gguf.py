"""``tandem bench gguf``: GGUF files served by Tandem and by llama.cpp, on the same cores in turn.

Both servers run all the time; llama.cpp's is stopped while Tandem is measured, and Tandem uses no CPU when idle. A
round sends each server, in turn, a prompt of random tokens, one stream, and eight streams at once. The figures are
medians over the rounds, those of prompts by the time to the first token. Prompts are not cached. Tandem is one
colocated worker behind its coordinator, llama.cpp its server with as many places; both are asked over HTTP by the same
client.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.load import results
from bench.load.client import Target
from bench.load.run import run_now
from bench.load.systems import running
from bench.load.tokens import FileTokenizer, ordinary_ids
from bench.load.workloads import random_asks
from bench.peers import llamacpp
from common import builtin
from common.config.bench.gguf import BenchGgufConfig
from common.core.errors import StartError
from common.net.http_client import HttpClient

PLACES, CONTEXT = 8, 1024
PROMPT = 512
SHORT, STREAM = 32, 96
"""Prompt and output tokens of a stream."""


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


def compare(config: BenchGgufConfig, peers: Path, file: Path) -> dict[str, Any]:
    """Serve ``file`` by both and return the figures of each."""
    ids = ordinary_ids(FileTokenizer(builtin.path()))
    threads = config.threads
    with ExitStack() as stack:
        sides = [_ours(stack, file, threads), _theirs(stack, peers, file, threads)]
        for number in range(config.rounds + 1):
            for side in sides:
                side.resume()
                side.measure(ids, number)
                side.pause()
            if not number:  # the first round warms both up
                for side in sides:
                    side.found.clear()
        return {
            side.name: side.rates() | {"start_s": side.start_s, "memory": side.memory, "rounds": side.found}
            for side in sides
        }


def _first_token(target: Target) -> None:
    HttpClient(target.url).post("/v1/completions", {"model": target.model, "prompt": "one", "max_tokens": 1})


def _ours(stack: ExitStack, file: Path, threads: int) -> Side:
    flags = ["--threads", str(threads), "--max-num-seqs", str(PLACES), "--max-model-len", str(CONTEXT),
             "--no-enable-prefix-caching"]  # fmt: skip
    before, began = descendants(), time.perf_counter()
    url = stack.enter_context(running(str(file), "1c", flags))
    target = Target(url, HttpClient(url).served(None)["id"], extra={"ignore_eos": True, "temperature": 0})
    _first_token(target)
    return Side("tandem", target, time.perf_counter() - began, memory(descendants() - before))


def _theirs(stack: ExitStack, folder: Path, file: Path, threads: int) -> Side:
    before, began = descendants(), time.perf_counter()
    peer = stack.enter_context(llamacpp.running(folder, file, threads=threads, places=PLACES, context=CONTEXT))
    target = Target(peer.url, file.stem, extra={"ignore_eos": True, "temperature": 0})
    _first_token(target)
    seconds = time.perf_counter() - began
    return Side("llama.cpp", target, seconds, memory(descendants() - before), peer.pause, peer.resume)


def rows(name: str, found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of the table for the model ``name``: what was measured, the value of each, and the ratio."""
    shown: list[tuple[str, ...]] = []
    for what, key, unit, scale in (
        ("decode, one stream", "one", "tokens/s", 1.0), ("decode, eight streams", "eight", "tokens/s", 1.0),
        (f"prompt of {PROMPT}", "prompt", "tokens/s", 1.0), ("start to first token", "start_s", "s", 1.0),
        ("memory of all processes", "memory", "MiB", 1 / (1 << 20)),
    ):  # fmt: skip
        ours, theirs = found["tandem"][key] * scale, found["llama.cpp"][key] * scale
        shown.append((name, what, f"{ours:,.1f} {unit}", f"{theirs:,.1f} {unit}", f"{ours / theirs:.2f}"))
    return shown


def run(config: BenchGgufConfig) -> int:
    """Print a row per file: tokens per second of both, and their ratio."""
    if not config.peers:
        raise StartError(
            "there is nothing to compare with", "--peers is missing",
            f"{sys.executable} -m deploy.cli bench install-peers FOLDER --peer llamacpp, then --peers FOLDER",
        )  # fmt: skip
    peers = Path(config.peers)
    kept: dict[str, Any] = {}
    print("| file | what | Tandem | llama.cpp | ratio |\n|---|---|---|---|---|", flush=True)
    with ExitStack() as stack:
        files = [Path(config.file)] if config.file else []
        if not files:
            folder = Path(config.models or stack.enter_context(tempfile.TemporaryDirectory()))
            files = llamacpp.random_files(
                peers, builtin.path() / "tokenizer.json", config.shape_numbers, config.type_names, folder
            )
        for file in files:
            kept[file.stem] = found = compare(config, peers, file)
            found["bytes"] = file.stat().st_size
            for row in rows(file.stem, found):
                print(f"| {' | '.join(row)} |", flush=True)
    if config.save:
        results.save(Path(config.save), {"shape": config.shape, "threads": config.threads, "files": kept})
    return 0
