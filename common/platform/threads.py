"""Scheduling priorities and time slices of our threads (Linux only: elsewhere niceness belongs to the process)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import threading
from collections.abc import Iterator

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "ppc64le": 355, "s390x": 345}
"""Numbers of the system call sched_setattr(2), for which the C library may have no function."""


class _Attributes(ctypes.Structure):
    """``struct sched_attr`` in its first version, times in nanoseconds."""

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


COMPUTING_SLICE_S, ANSWERING_SLICE_S, BORROWING_SLICE_S = 0.005, 0.0001, 0.1
"""Time slices. A computing thread gets more than Linux's default (0.7 to 2.8 ms, by the number of cores); the other two
are the least and the most that Linux accepts."""
URGENT = -10
"""Niceness of a thread on which all requests depend: it soon has its share of processor time again, so it goes first
even when it wakes up several times in a row."""
_USUAL = os.getpriority(os.PRIO_PROCESS, 0) if sys.platform == "linux" else 0
"""Niceness of this process as it was started."""
_IS_USUAL = sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER
"""Whether this process was started with the default scheduling policy; if not, the policy is left as it is."""


def answer(niceness: int = 0, *, at_once: bool = False) -> None:
    """Rank the calling thread, and all threads that it starts from now on, as relaying messages: it often wakes up for
    a moment, and preempts threads that compute.

    It preempts them because Linux (6.12 or newer) prefers the thread that asks for the shorter time slice; between
    equal slices, a thread that wakes up waits for the next tick, 4 ms. ``niceness`` is added to that of this process; a
    negative one raises the priority where this user is permitted to, which by default few are. With ``at_once`` the
    thread becomes a real-time thread where permitted: only other real-time threads preempt it, so it must never compute
    for long, and it has to move itself to an idle core.
    """
    _rank(niceness, ANSWERING_SLICE_S, at_once)


def compute() -> None:
    """Rank the calling thread, and all threads that it starts from now on, as computing for long: threads ranked by
    :func:`answer` preempt it. Its share of processor time stays the same."""
    _rank(0, COMPUTING_SLICE_S)


@contextlib.contextmanager
def borrowing() -> Iterator[None]:
    """Rank the threads that the calling thread starts in this block as computing on cores of other processes, whose
    threads preempt them on waking up. After the block the calling thread is ranked by :func:`compute`."""
    _rank(0, BORROWING_SLICE_S)
    try:
        yield
    finally:
        compute()


@contextlib.contextmanager
def answering(niceness: int = 0, *, at_once: bool = False) -> Iterator[None]:
    """Apply :func:`answer` within a block; after it, the calling thread has the default rank."""
    answer(niceness, at_once=at_once)
    try:
        yield
    finally:
        _rank(0, 0)


def may_be_real_time() -> bool:
    """Return whether this user may have real-time threads; tried in a thread that has ended when this returns."""
    if sys.platform != "linux" or not _IS_USUAL:
        return False
    policies: list[int] = []

    def attempt() -> None:
        _real_time(True)
        policies.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return policies == [os.SCHED_RR]


def _rank(niceness: int, slice_s: float, at_once: bool = False) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # this user may not, or a sandbox forbids it
            os.setpriority(os.PRIO_PROCESS, 0, max(-20, min(19, _USUAL + niceness)))
        if _IS_USUAL:
            _real_time(False)
            _slice(slice_s)
            if at_once:
                _real_time(True)


def _real_time(wanted: bool) -> None:
    policy, priority = (os.SCHED_RR, os.sched_get_priority_min(os.SCHED_RR)) if wanted else (os.SCHED_OTHER, 0)
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(0) != policy:
            os.sched_setscheduler(0, policy, os.sched_param(priority))


def _slice(seconds: float) -> None:
    number = _SCHED_SETATTR.get(platform.machine())
    with contextlib.suppress(OSError):
        if number is not None:
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            wanted = _Attributes(ctypes.sizeof(_Attributes), os.SCHED_OTHER, 0, nice, 0, int(seconds * 1e9), 0, 0)
            ctypes.CDLL(None).syscall(number, 0, ctypes.byref(wanted), 0)
