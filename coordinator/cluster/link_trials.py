"""Trial hand-offs, which measure the KV link of each pair of workers.

Owns the measurements (:class:`LinkStats`) and sends the Measure messages of the trials that they ask for. Knows no
request. A trial that fails is not repeated, because nothing waits for its result.
"""

from __future__ import annotations

from common.core.ids import new_request_id
from common.net.messages import Measure, Measured
from coordinator.cluster.gateway import Gateway
from coordinator.cluster.link_stats import LinkStats, Trial
from coordinator.cluster.peers import introduce
from coordinator.cluster.registry import WorkerHandle


class LinkTrials:
    """Starts the trials of workers that join and records their results in ``stats``."""

    def __init__(self, gateway: Gateway) -> None:
        self.stats = LinkStats()
        self._gateway = gateway

    def begin(self, worker: WorkerHandle) -> None:
        """Start the first trial of each pair that ``worker``, which has just joined, forms with others."""
        for trial in self.stats.trials(worker, self._gateway.registry):
            self._send(trial)

    def measured(self, worker: WorkerHandle, message: Measured) -> None:
        """Record the result of a trial hand-off and start the trial that follows it, if any."""
        decode = self._gateway.registry.get(message.decode)
        if decode is not None and (trial := self.stats.measured(worker, decode, message)) is not None:
            self._send(trial)

    def forget(self, worker: WorkerHandle) -> None:
        """Remove the measurements of a worker that is gone."""
        self.stats.forget(worker)

    def _send(self, trial: Trial) -> None:
        """Send a trial hand-off to its two ends, to decode first, because it must expect what prefill offers."""
        request = new_request_id()
        prefill, decode = introduce(trial.prefill, trial.decode)
        if self._gateway.send(trial.decode, Measure(request, 0, prefill, trial.tokens)):
            self._gateway.send(trial.prefill, Measure(request, 0, decode, trial.tokens))
