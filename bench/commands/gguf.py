"""``tandem bench gguf``: GGUF files served by Tandem and by llama.cpp, on the same cores in turn.

Both servers run all the time; llama.cpp's is stopped while Tandem is measured, and Tandem uses no CPU when idle. The
load is that of :mod:`bench.load.sides`. Tandem is one colocated worker behind its coordinator, llama.cpp its server
with as many places; both are asked over HTTP by the same client.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.load import results
from bench.load.client import Target
from bench.load.sides import CONTEXT, FIGURES, PLACES, Side, descendants, first_token, measure, memory, ratio, tandem
from bench.load.tokens import FileTokenizer, ordinary_ids
from bench.peers import llamacpp
from common import builtin
from common.config.bench.gguf import BenchGgufConfig
from common.core.errors import StartError


def compare(config: BenchGgufConfig, peers: Path, file: Path) -> dict[str, Any]:
    """Serve ``file`` by both and return the figures of each."""
    ids = ordinary_ids(FileTokenizer(builtin.path()))
    with ExitStack() as stack:
        sides = [tandem(stack, str(file), config.threads), _theirs(stack, peers, file, config.threads)]
        return measure(sides, ids, config.rounds)


def _theirs(stack: ExitStack, folder: Path, file: Path, threads: int) -> Side:
    before, began = descendants(), time.perf_counter()
    peer = stack.enter_context(llamacpp.running(folder, file, threads=threads, places=PLACES, context=CONTEXT))
    target = Target(peer.url, file.stem, extra={"ignore_eos": True, "temperature": 0})
    first_token(target)
    seconds = time.perf_counter() - began
    return Side("llama.cpp", target, seconds, memory(descendants() - before), peer.pause, peer.resume)


def rows(name: str, found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of the table for the model ``name``: what was measured, the value of each, and the ratio."""
    shown: list[tuple[str, ...]] = []
    for what, key, unit, scale in FIGURES:
        ours, theirs = found["tandem"], found["llama.cpp"]
        values = (f"{each[key] * scale:,.1f} {unit}" for each in (ours, theirs))
        shown.append((name, what, *values, f"{ratio(ours, theirs, key):.2f}"))
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
