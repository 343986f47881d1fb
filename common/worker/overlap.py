"""The loop of a worker whose device computes while Python goes on: a step is launched before the last one is read.

    turn n:    plan ahead of step n ── launch step n + 1 ── read step n ── send its tokens
    turn n+1:  messages, hand-offs (the device computes step n + 1) ── plan ahead of it ── launch step n + 2 ── ...

So the device always has a step to compute, and does not wait for Python between two steps. A sequence that ends with a
token of step n, or is aborted, may have a row in step n + 1, too. The result of that row is dropped, and the sequence's
blocks are returned after that step (:mod:`common.engine.launched`). An end by ``max_tokens`` is known in advance and
costs no row.

Only decode steps overlap. If the next step needs more (a prompt, blocks of a sequence to be parked, a row that the
engine does not launch), the launched step is read first, and the next turn plans with all tokens known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.core.sequence import Batch
from common.engine.launched import LaunchedBlocks, LaunchedStep, StepLauncher

if TYPE_CHECKING:
    from common.worker.loop import Worker


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched step: its batch, and the time at which it was launched."""

    batch: Batch
    step: LaunchedStep
    launched_at: float


class Overlap:
    """Advances ``worker`` by one step per turn, with at most one launched step between two turns."""

    def __init__(self, worker: Worker, launch: StepLauncher) -> None:
        self._worker, self._launch_step = worker, launch
        self._blocks = LaunchedBlocks(worker.cache)
        self._flight: _Flight | None = None
        self._read_at = 0.0
        worker.planner.release = self._blocks.release

    def advance(self) -> bool:
        """Launch a step, read the one launched before, or both; return False if there was nothing to do."""
        worker, before = self._worker, self._flight
        batch = worker.plan() if before is None else worker.planner.plan_ahead(before.batch)
        self._flight = None if batch is None else self._launch(batch)
        if before is not None:
            self._read(before)
        elif batch is not None and self._flight is None:
            worker.steps.run(batch)
        return before is not None or batch is not None

    def settle(self) -> None:
        """Read a launched step whose sequences have all left."""
        if self._flight is not None:
            before, self._flight = self._flight, None
            self._read(before)

    def _launch(self, batch: Batch) -> _Flight | None:
        now = self._worker.clock()
        if (step := self._launch_step(batch)) is None:
            return None
        self._blocks.launched()
        self._worker.before_step(batch, now)
        return _Flight(batch, step, now)

    def _read(self, flight: _Flight) -> None:
        worker, batch = self._worker, flight.batch
        stood_still_s = -worker.membership.stood_still_s()
        worker.membership.expected_s = worker.step_times.expect(batch.length, batch.attended)
        result = flight.step.result()
        worker.membership.expected_s = 0.0
        stood_still_s += worker.membership.stood_still_s()
        now = worker.clock()
        # the device began it when it was launched, or when it had finished the step before
        result.seconds = max(0.0, now - max(flight.launched_at, self._read_at) - stood_still_s)
        self._read_at = now
        worker.step_times.took(batch.length, batch.attended, result.seconds)
        self._blocks.read()
        worker.steps.take_in(batch, result)
