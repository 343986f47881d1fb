"""How long calls take on a device, measured by its own clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

_WARM_UPS = 3
_LEAST_S, _ROUNDS = 0.02, 7


def seconds_per_call(call: Callable[[], object], device: torch.device) -> list[float]:
    """Return the seconds of one ``call`` in each of several rounds. A round repeats the call for long enough that the
    launch of one kernel is hidden behind the one before it, as in a step."""
    for _ in range(_WARM_UPS):
        call()
    once = _round_s(call, 1, device)
    repeats = max(1, min(1000, round(_LEAST_S / max(once, 1e-6))))
    return [_round_s(call, repeats, device) / repeats for _ in range(_ROUNDS)]


def _round_s(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        return time.perf_counter() - began
    start, end = timer(), timer()
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize(device)
    seconds: float = start.elapsed_time(end) / 1e3
    return seconds


def timer() -> Any:
    """Return a CUDA event that knows when it happened."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
