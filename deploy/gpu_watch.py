"""Starts the monitor of a worker's GPUs, before the worker loads its model."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NoReturn

from common.platform.device import Device
from common.platform.gpu_health import unusable
from common.platform.gpu_monitor import GpuMonitor
from common.platform.gpu_readings import NvmlFailed
from deploy.launcher import status

log = logging.getLogger("tandem.gpu")


def watched(machines: Sequence[Device]) -> list[str]:
    """Return the UUIDs of the GPUs that a worker with ranks on ``machines`` computes on."""
    return [each.gpu.uuid for each in machines if each.gpu is not None]


def start(machines: Sequence[Device]) -> GpuMonitor | None:
    """Start watching the GPUs of a worker with ranks on ``machines``; None if it has none, or if NVML does not answer.
    Raises StartError if one of them is unhealthy, so that a restarted worker does not load its model onto it."""
    uuids = watched(machines)
    if not uuids:
        return None
    import pynvml  # only here: a worker on a CPU needs no NVML

    monitor = GpuMonitor(pynvml, uuids)
    monitor.on_stuck = _exit_at_once
    try:
        monitor.start()
    except NvmlFailed as error:
        log.warning("the GPU is not watched: NVML says %s", error)
        return None
    if monitor.fault:
        raise unusable(monitor.fault)
    return monitor


def _exit_at_once(why: str) -> NoReturn:
    """End the process: its loop is stuck in a call that the GPU will not answer, so it cannot leave by itself."""
    log.error("the loop does not end: leaving at once")
    status.failed(unusable(why))
    os._exit(1)
