"""Makes worker processes die at an exact token: imported in each by the spawner (``PRELOADED`` of tests.e2e.spawner).

``DYING_AT`` is a JSON object from seeds of requests to numbers of output tokens. Once a request with such a seed has
that many output tokens, the worker that is about to compute the next one kills itself with SIGKILL. It does so once for
each request: the attempts that follow are computed to their end.
"""

from __future__ import annotations

import json
import os
import signal

from common.core.sequence import Batch, StepResult
from common.engine.runner import ModelEngine
from tests.e2e.spawner import PRELOADED

AT = "DYING_AT"


def _install(lengths: dict[int, int]) -> None:
    computed = ModelEngine.step

    def step(self: ModelEngine, batch: Batch) -> StepResult:
        for segment in batch.segments:
            sequence = segment.sequence
            at = lengths.get(sequence.request.sampling.seed)
            if at is not None and not sequence.attempt and sequence.output_length >= at:
                os.kill(os.getpid(), signal.SIGKILL)
        return computed(self, batch)

    ModelEngine.step = step  # type: ignore[method-assign]


if os.environ.get(PRELOADED) == __name__:  # else a test only reads the names above
    _install({int(seed): at for seed, at in json.loads(os.environ[AT]).items()})
