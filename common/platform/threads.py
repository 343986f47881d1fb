"""How the system's scheduler ranks a thread of ours."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import threading
from collections.abc import Iterator

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


COMPUTING_SLICE_S, ANSWERING_SLICE_S, BORROWING_SLICE_S = 0.005, 0.0001, 0.1
"""More than Linux gives by itself (0.7 to 2.8 ms, by the number of cores), and the least and the most that it takes."""
URGENT = -10
"""Niceness of who answers for everybody: it has its share of time again soon after it had some, and so goes first
also when it wakes up several times in a row."""
_USUAL = os.getpriority(os.PRIO_PROCESS, 0) if sys.platform == "linux" else 0
"""Niceness of this process as it was started."""
_IS_USUAL = sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER
"""Else somebody has decided otherwise about all of its threads."""


def answer(niceness: int = 0, *, at_once: bool = False) -> None:
    """The calling thread, and all that it starts from now on, passes on what comes: it often wakes up for a moment, and
    interrupts whoever computes, since Linux (6.12 or newer) lets those go first that ask for less time. Between threads
    of one slice the one that wakes up waits for the next tick, 4 ms. It is ``niceness`` nicer than this process, or not
    nice at all where that is below 0 and this user may do so: by default few may. ``at_once``: where this user may, it
    is a real-time thread, whom nobody interrupts who is not one; so it must never compute for long, and nothing but
    itself moves it to an idle core. Does nothing where niceness belongs to the process (all but Linux)."""
    _rank(niceness, ANSWERING_SLICE_S, at_once)


def compute() -> None:
    """The calling thread, and all that it starts from now on, computes for long, and lets all go first that
    :func:`answer`. How much time a thread gets in all is not changed."""
    _rank(0, COMPUTING_SLICE_S)


@contextlib.contextmanager
def borrowing() -> Iterator[None]:
    """What the calling thread, which computes, starts in this block computes on cores of others, and lets these go
    first when they wake up."""
    _rank(0, BORROWING_SLICE_S)
    try:
        yield
    finally:
        compute()


@contextlib.contextmanager
def answering(niceness: int = 0, *, at_once: bool = False) -> Iterator[None]:
    """:func:`answer`, for a block; what is started behind it is ranked as usual."""
    answer(niceness, at_once=at_once)
    try:
        yield
    finally:
        _rank(0, 0)


def may_be_real_time() -> bool:
    """Whether this user may have real-time threads, as a thread finds that is gone when this returns."""
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
        with contextlib.suppress(OSError):  # who may not, or a sandbox, refuses it
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
