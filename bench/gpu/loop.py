"""A worker's real loop around an engine, without HTTP: when each step began and ended on the device."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from bench.goals.turns import working
from bench.gpu.timing import timer
from common.core.sequence import Batch


class Step(NamedTuple):
    """``rows`` tokens that were computed from ``start`` to ``end``, in seconds since any moment."""

    rows: int
    start: float
    end: float


class StepClock:
    """Notes the steps of ``engine`` from now on: on a GPU by events in its queue, else by the host's clock."""

    def __init__(self, engine: Any, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._marks: list[tuple[int, Any, Any]] = []
        self._first = self._mark()
        engine.step = self._noted(engine.step)
        if engine.launch is not None:
            engine.launch = self._noted(engine.launch)

    def steps(self) -> list[Step]:
        """Return the steps so far, once they have ended."""
        if not self._on_device:
            return [Step(rows, start, end) for rows, start, end in self._marks]
        torch.cuda.synchronize()
        since = self._first.elapsed_time
        return [Step(rows, since(start) / 1e3, since(end) / 1e3) for rows, start, end in self._marks]

    def _mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = timer()
        event.record()
        return event

    def _noted(self, run: Callable[[Batch], Any]) -> Callable[[Batch], Any]:
        def noted(batch: Batch) -> Any:
            start = self._mark()
            found = run(batch)
            if found is not None:  # None: the step was not launched and comes again
                self._marks.append((batch.length, start, self._mark()))
            return found

        return noted


def serve(
    engine: Any, device: torch.device, answers: Sequence[tuple[int, int]], streams: int, budget: int
) -> list[Step]:
    """Answer all of ``answers`` (prompt tokens, output tokens), requested at once, in a worker's loop with at most
    ``streams`` sequences and ``budget`` tokens per step; return its steps."""
    clock = StepClock(engine, device)
    with working(engine, answers, streams, budget) as worker:
        begun = False
        while worker.holdings() or not begun:
            rest_s = worker.turn()
            begun = begun or bool(worker.holdings())
            if rest_s:
                worker.channels.poll(rest_s)
    return clock.steps()


def nano_vllm_answers(scale: int = 1) -> list[tuple[int, int]]:
    """Return the requests of nano-vllm's benchmark (https://github.com/GeeeekExplorer/nano-vllm, bench.py): 256 prompts
    and answers of 100 to 1,024 tokens, seed 0. ``scale`` divides number and lengths."""
    draw = random.Random(0)
    lengths = range(256 // scale)
    return [(draw.randint(100, 1024) // scale, draw.randint(100, 1024) // scale) for _ in lengths]
