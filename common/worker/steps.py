"""Runs a worker's steps: computes a batch, measures it, and gives its tokens to the role."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from common.core.sequence import Batch, StepResult
from common.platform.core_lease import CoreLease

if TYPE_CHECKING:
    from common.worker.loop import Worker

log = logging.getLogger("tandem.worker")


class StepRunner:
    """Runs the steps that ``worker`` plans, each before the next is planned (:mod:`common.worker.overlap` runs them
    otherwise)."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.cores: CoreLease | None = None
        """The lease through which workers of this machine lend each other cores while idle; None if they do not."""

    def advance(self) -> bool:
        """Run one step if there is anything to compute; return whether there was."""
        batch = self._worker.plan()
        if batch is not None:
            self.run(batch)
        return batch is not None

    def run(self, batch: Batch) -> None:
        """Compute ``batch`` and take in its tokens."""
        worker, membership, step_times = self._worker, self._worker.membership, self._worker.step_times
        now, length, attended = worker.clock(), batch.length, batch.attended
        worker.before_step(batch, now)
        membership.expected_s = step_times.expect(length, attended)
        stood_still_s, helped_s = -membership.stood_still_s(), -self._helped_s()
        result = worker.engine.step(batch)
        membership.expected_s = 0.0
        stood_still_s += membership.stood_still_s()  # time in which the process was stopped is not compute time
        helped_s += self._helped_s()  # count what borrowed cores saved: the next step may have none
        step_times.took(length, attended, max(0.0, worker.clock() - now - stood_still_s + helped_s))
        self.take_in(batch, result)

    def take_in(self, batch: Batch, result: StepResult) -> None:
        """Give the tokens of a finished step to their sequences, and fail the requests that failed in it."""
        worker, planner = self._worker, self._worker.planner
        samples = planner.complete(batch, result)
        worker.prompt_reports.take(batch, result, worker.clock())
        for index, why in result.errors.items():
            sequence = batch.segments[index].sequence
            if sequence.id in planner:  # a sibling's failure may have ended it already
                log.error("a request failed in the engine: %s", why)
                failed = "the model failed on this request"
                worker.requests.fail(sequence.id.transfer, "engine_error", failed, retriable=True)
        for index, refusal in result.refusals.items():
            sequence = batch.segments[index].sequence
            if sequence.id in planner:
                log.warning("a request failed by its grammar: %s", refusal.words)
                worker.requests.fail(sequence.id.transfer, refusal.code, refusal.words, retriable=False)
        if result.errors or result.refusals:
            samples = [sample for sample in samples if sample.sequence.id in planner]
        worker.sampled(batch, samples, worker.clock())
        worker.report.stepped(batch.length, result.seconds)

    def _helped_s(self) -> float:
        """Return how many seconds longer all steps so far would have taken without borrowed cores."""
        return 0.0 if self.cores is None else self.cores.borrowed_s() / max(1, len(self.cores.own))
