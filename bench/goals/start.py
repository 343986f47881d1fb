"""C12: how long a start takes, from the command to the first token."""

from __future__ import annotations

import os
import statistics
import sys
import sysconfig
import time
from pathlib import Path

from bench.goals.field import Field
from bench.goals.figures import GoalTarget, Row
from bench.load import results
from bench.load.systems import running
from common.net.http_client import HttpClient


def c12(field: Field) -> list[Row]:
    """From the command to the first token with the built-in model; cold is with none of its files in the page cache."""
    field.open()
    warm, cold = [], []
    for _ in range(field.effort.rounds):
        forget_files()
        cold.append(first_token_s())
        warm.append(first_token_s())
    return [
        Row("C12", f"start to first token, {how}", "s", statistics.median(seconds),
            (GoalTarget("value", most, at_most=True),), detail={"seconds": seconds})
        for how, seconds, most in (("cold", cold, 15), ("warm", warm, 8))
    ]  # fmt: skip


def first_token_s() -> float:
    """Return the seconds from the start of a system with the built-in model to its first token."""
    began = time.perf_counter()
    with running("", "1p1d") as url:
        server = HttpClient(url)
        server.post("/v1/completions", {"model": server.served(None)["id"], "prompt": "one", "max_tokens": 1})
        return time.perf_counter() - began


def forget_files() -> int:
    """Drop the files of this environment and this program from the page cache, unless a process has mapped them; return
    how many."""
    count = 0
    for folder in (sys.prefix, sysconfig.get_path("stdlib"), results.ROOT):
        for path in Path(folder).rglob("*"):
            if path.is_file() and not path.is_symlink():
                try:
                    descriptor = os.open(path, os.O_RDONLY)
                except OSError:
                    continue
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    count += 1
                finally:
                    os.close(descriptor)
    return count
