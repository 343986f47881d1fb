"""Stand-in GPUs for tensor-parallel workers and their ranks, in processes started by the spawner (``PRELOADED``).

Tensors are on the CPU, the ranks meet in a process group of gloo, and KV is in the memory of a fake device. A worker
with several ranks computes on stand-ins whatever ``--device`` says. The one named by ``GPU_WORKER`` watches them
through a scripted NVML; ``GPU_XIDS`` is a pipe, each line of which is the UUID of a card and the number of an Xid error
that happens to it now.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from common.engine import rank_pools
from common.platform import device
from tests.e2e.spawner import PRELOADED
from tests.fakes.device_calls import FakeDevice
from tests.fakes.nvml_cards import FakeCard, FakeNvml
from tests.fakes.stand_in_gpu import stand_in

WORKER, XIDS = "GPU_WORKER", "GPU_XIDS"
_choose, _choose_ranks = device.choose, device.choose_ranks


def uuid_of(rank: int) -> str:
    """Return the UUID of the stand-in of ``rank``."""
    return f"GPU-{rank}000"


def _choose_stand_ins(wanted: str, ranks: int) -> tuple[list[device.Device], str]:
    if ranks == 1:
        return _choose_ranks(wanted, ranks)
    return [stand_in(uuid=uuid_of(rank)) for rank in range(ranks)], ""


def _report(pipe: str, nvml: FakeNvml) -> None:
    with os.fdopen(os.open(pipe, os.O_RDWR)) as lines:  # for writing too, so that it does not end
        for line in lines:
            uuid, xid = line.split()
            nvml.report(uuid, int(xid))


def install() -> None:
    """Replace the GPUs of this process."""
    label = sys.argv[1]
    if "/" in label:  # a rank other than 0: its worker, a slash and its number
        device.choose = lambda wanted: (stand_in(), "")
    device.choose_ranks = _choose_stand_ins
    rank_pools.device_calls = _device_calls
    if label == os.environ.get(WORKER):
        nvml = FakeNvml(*(FakeCard(uuid_of(rank)) for rank in range(2)))
        threading.Thread(target=_report, args=(os.environ[XIDS], nvml), daemon=True).start()
        sys.modules["pynvml"] = nvml  # type: ignore[assignment]


def _device_calls(where: Any) -> FakeDevice:
    return FakeDevice()


if os.environ.get(PRELOADED) == __name__:  # else a test only reads the names above
    install()
