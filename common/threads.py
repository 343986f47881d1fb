"""How the system's scheduler ranks a thread of ours."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "ppc64le": 355, "s390x": 345}
"""Numbers of the call sched_setattr(2), which the C library may not know."""


class _Attributes(ctypes.Structure):
    """``struct sched_attr`` in its first size, times in nanoseconds."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    ]


COMPUTING_SLICE_S = 0.005
"""More than Linux gives by itself (0.7 to 2.8 ms, by the number of cores), and no more than that needs."""


def stand_back(niceness: int, slice_s: float) -> None:
    """The calling thread, and all that it starts from now on, is ``niceness`` nicer than it was and may be interrupted
    by whoever wakes up after ``slice_s`` (0.1 ms at least), not after some milliseconds. It helps where there are fewer
    cores than work. Does nothing where niceness belongs to the process (all but Linux); a Linux before 6.12 has one
    slice for everybody."""
    if sys.platform == "linux":
        nicer = min(19, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
        with contextlib.suppress(OSError):  # a sandbox refuses it
            os.setpriority(os.PRIO_PROCESS, 0, nicer)
        _slice(slice_s)


def compute() -> None:
    """The calling thread, and all that it starts from now on, computes for long: whoever wakes up interrupts it at
    once, since Linux (6.12 or newer) lets those go first that ask for less time. Between threads of one slice the one
    that wakes up waits for the next tick, 4 ms: of the coordinator, each of its messages beside a long prompt. How much
    time a thread gets in all is not changed."""
    if sys.platform == "linux":
        _slice(COMPUTING_SLICE_S)


def _slice(seconds: float) -> None:
    number = _SCHED_SETATTR.get(platform.machine())
    if number is not None and os.sched_getscheduler(0) == os.SCHED_OTHER:  # else somebody has decided otherwise
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        wanted = _Attributes(ctypes.sizeof(_Attributes), os.SCHED_OTHER, 0, nice, 0, int(seconds * 1e9), 0, 0)
        ctypes.CDLL(None).syscall(number, 0, ctypes.byref(wanted), 0)
