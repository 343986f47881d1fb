"""Makes one worker process see a scripted GPU: imported in it by the spawner (``PRELOADED`` of tests.e2e.spawner).

The worker named by ``GPU_WORKER`` watches the GPU, and computes on the CPU as before. ``GPU_SCRIPT`` is a directory
with a file ``values.json``, read once (readings that differ from a healthy H100), and a pipe ``xids``, from which each
line is the number of an Xid error that happens now.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import deploy.gpu_watch
from tests.fakes.nvml_cards import H100, FakeCard, FakeNvml

UUID = "GPU-1111"


def _report(pipe: Path, nvml: FakeNvml) -> None:
    with os.fdopen(os.open(pipe, os.O_RDWR)) as lines:  # for writing too, so that it does not end
        for line in lines:
            nvml.report(UUID, int(line))


def _install(script: Path) -> None:
    values = H100 | dict(json.loads((script / "values.json").read_text()).items())
    nvml = FakeNvml(FakeCard(UUID, values=values))
    threading.Thread(target=_report, args=(script / "xids", nvml), daemon=True).start()
    sys.modules["pynvml"] = nvml  # type: ignore[assignment]
    deploy.gpu_watch.watched = lambda _: [UUID]


if os.environ["GPU_WORKER"] in sys.argv:
    _install(Path(os.environ["GPU_SCRIPT"]))
