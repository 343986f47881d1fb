"""The stages of ``tandem bench gpu``: each runs in a process of its own, is saved when it ends, and can be resumed.

A stage that fails, hangs or loses its CUDA context costs only its own rows.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.goals.figures import Row, as_json, of_json
from bench.gpu.shapes import LARGE, SMALL, TINY_LARGE, TINY_SMALL, LlamaShape
from bench.load.processes import die_with_parent


@dataclass(frozen=True, slots=True)
class Setting:
    """What a stage measures. ``device`` is a torch device, ``folder`` holds the checkpoints, ``ceilings`` are the
    fields of :class:`bench.gpu.ceilings.Ceilings` once they are measured."""

    device: str
    dry: bool
    folder: Path
    ceilings: Mapping[str, float] = field(default_factory=dict)

    @property
    def small(self) -> LlamaShape:
        """The 0.6B model, or a tiny one in a dry run."""
        return TINY_SMALL if self.dry else SMALL

    @property
    def large(self) -> LlamaShape:
        """The 8B model, or a tiny one in a dry run."""
        return TINY_LARGE if self.dry else LARGE


DRY_LIMIT = 5
"""Factor on the limits in a dry run: Triton's interpreter is slow, and the machine may be busy."""


@dataclass(frozen=True, slots=True)
class Stage:
    """``function``: ``"module:name"``, called with a :class:`Setting` in a fresh process; returns rows. ``limit_s``: it
    is ended after so many seconds on a GPU."""

    name: str
    what: str
    function: str
    limit_s: float


STAGES = {
    stage.name: stage
    for stage in (
        Stage("ceilings", "bandwidth, matrix products, link to the host", "bench.gpu.card:ceilings", 90),
        Stage("kernels", "every kernel against the oracle", "bench.gpu.kernels:correct", 150),
        Stage("attention", "G3: paged decode attention alone", "bench.gpu.kernels:g3", 120),
        Stage("decode", "G1, G2: decode steps of an 8B model", "bench.gpu.engine:decode", 210),
        Stage("prefill", "G4: prefill of 4,096 tokens", "bench.gpu.engine:prefill", 120),
        Stage("gaps", "G6: time between decode steps in a worker's loop", "bench.gpu.engine:gaps", 120),
        Stage("batch", "G5: 256 requests on a 0.6B model", "bench.gpu.engine:batch", 120),
        Stage("handoff", "G7: KV between two processes by CUDA IPC", "bench.gpu.handoff:direct", 90),
        Stage("pinned", "G8: KV between two processes through host memory", "bench.gpu.handoff:pinned", 90),
        Stage("pair", "1P1D in two processes gives the tokens of one", "bench.gpu.pair:compare", 240),
    )
}
"""In the order in which they run: what matters most, and what others need, comes first. Each should take half of its
limit at most, and all together less than ten minutes."""


@dataclass
class StageOutcome:
    """The result of one stage: rows, or the text of its failure, and the seconds that it took."""

    rows: list[Row] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the outcome as :meth:`of_json` reads it."""
        return asdict(self) | {"rows": [as_json(row) for row in self.rows]}

    @classmethod
    def of_json(cls, kept: Mapping[str, Any]) -> StageOutcome:
        """Make an outcome from what :meth:`as_json` returned."""
        return cls([of_json(row) for row in kept["rows"]], kept["failure"], kept["seconds"])


def run(setting: Setting, stage: Stage) -> StageOutcome:
    """Run ``stage`` in a child process, and end it after its limit."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(stage.function, setting, there))
    began = time.monotonic()
    child.start()
    there.close()
    try:
        limit_s = stage.limit_s * (DRY_LIMIT if setting.dry else 1)
        rows, failure = here.recv() if here.poll(limit_s) else ([], f"not done after {limit_s:.0f} s")
    except EOFError:
        child.join()
        rows, failure = [], f"its process ended with exit code {child.exitcode}"
    finally:
        child.kill()
        child.join()
        here.close()
    return StageOutcome(rows, failure, time.monotonic() - began)


def _child(function: str, setting: Setting, pipe: Connection) -> None:
    die_with_parent()
    if setting.dry:
        os.environ["OMP_NUM_THREADS"] = "1"  # tiny shapes; torch is not imported yet
    module, _, name = function.partition(":")
    try:
        work: Callable[[Setting], list[Row]] = getattr(importlib.import_module(module), name)
        found = work(setting), ""
    except Exception as error:  # the table shows it; the other stages go on
        traceback.print_exc()
        found = [], f"{type(error).__name__}: {error}"
    pipe.send(found)
