"""Thread priorities: which threads run first when there are fewer cores than work."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from common.net.sockets import Channels
from common.platform import threads
from tests.threads import running_threads, started_by_libzmq

GETATTR = {"x86_64": 315, "aarch64": 275, "riscv64": 275, "ppc64le": 356, "s390x": 346}
"""Number of the system call sched_getattr(2), by architecture."""


def slice_s(thread: int) -> float:
    """Return the time slice that sched_setattr(2) gave to a thread, or the system's default; 0 before Linux 6.12."""
    found = threads._Attributes()
    size = ctypes.sizeof(found)
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(GETATTR[platform.machine()], thread, ctypes.byref(found), size, 0):
        raise OSError(ctypes.get_errno(), "sched_getattr")
    return float(found.runtime) / 1e9


def in_thread(work: object) -> None:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    thread.join()


needs_slices = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in GETATTR or not slice_s(0),
    reason="this system has one slice for all threads",
)


@needs_slices
def test_threads_that_compute_have_longer_slices_than_those_that_pass_messages_on() -> None:
    usual = slice_s(0)
    found: dict[str, Any] = {}

    def compute() -> None:
        threads.compute()
        before = running_threads()
        channels = Channels()
        sockets = [channels.dealer("tcp://127.0.0.1:1", b"us"), channels.router("tcp://127.0.0.1:*", kv=True)[0]]
        started = started_by_libzmq(before, 4)
        found["computing"], found["nice"] = slice_s(0), os.getpriority(os.PRIO_PROCESS, 0)
        found["messages"] = {slice_s(each) for each in started}
        for socket in sockets:
            socket.close()
        channels.close()

    in_thread(compute)
    assert found["computing"] == pytest.approx(threads.COMPUTING_SLICE_S) and usual < threads.COMPUTING_SLICE_S
    assert [*found["messages"]] == [pytest.approx(threads.ANSWERING_SLICE_S)]
    assert found["nice"] == os.getpriority(os.PRIO_PROCESS, 0), "it gets as much time as before"
    assert slice_s(0) == usual, "a thread that did not ask is unchanged"


@needs_slices
def test_answering_restores_scheduling_after_block() -> None:
    usual, found = (slice_s(0), os.getpriority(os.PRIO_PROCESS, 0)), []

    def answer() -> None:
        for niceness in (5, threads.URGENT):
            with threads.answering(niceness):
                found.append((slice_s(0), os.getpriority(os.PRIO_PROCESS, 0)))
            found.append((slice_s(0), os.getpriority(os.PRIO_PROCESS, 0)))

    in_thread(answer)
    nicer, behind, urgent, at_last = found
    assert nicer == (pytest.approx(threads.ANSWERING_SLICE_S), usual[1] + 5)
    assert urgent[0] == pytest.approx(threads.ANSWERING_SLICE_S) and urgent[1] in (usual[1], usual[1] + threads.URGENT)
    assert behind[0] == at_last[0] == usual[0]
    if urgent[1] < usual[1]:  # without the right to be urgent, niceness cannot be taken back either
        assert behind == at_last == usual


@needs_slices
def test_threads_of_an_urgent_one_that_compute_are_not_urgent() -> None:
    usual, found = os.getpriority(os.PRIO_PROCESS, 0), []

    def answer() -> None:
        threads.answer(threads.URGENT)
        with ThreadPoolExecutor(1, initializer=threads.compute) as pool:
            found.append(pool.submit(lambda: (slice_s(0), os.getpriority(os.PRIO_PROCESS, 0))).result())

    in_thread(answer)
    assert found == [(pytest.approx(threads.COMPUTING_SLICE_S), usual)]


def real_time_is_allowed() -> bool:
    found = []

    def ask() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        except OSError:
            return
        found.append(True)

    in_thread(ask)
    return bool(found)


@needs_slices
def test_whether_real_time_threads_are_allowed_is_found_without_becoming_one() -> None:
    before = os.sched_getscheduler(0)
    assert threads.may_be_real_time() == real_time_is_allowed() and os.sched_getscheduler(0) == before


@needs_slices
def test_answering_at_once_uses_real_time_scheduling_in_block_only() -> None:
    usual, found = (os.SCHED_OTHER, slice_s(0), os.getpriority(os.PRIO_PROCESS, 0)), []

    def note() -> None:
        found.append((os.sched_getscheduler(0), slice_s(0), os.getpriority(os.PRIO_PROCESS, 0)))

    def answer() -> None:
        with threads.answering(at_once=True):
            found.append((os.sched_getscheduler(0),))
            with ThreadPoolExecutor(1, initializer=threads.compute) as pool:
                pool.submit(note).result()
        note()

    in_thread(answer)
    at_once, computing, behind = found
    assert at_once == (os.SCHED_RR if real_time_is_allowed() else os.SCHED_OTHER,)
    assert computing == (os.SCHED_OTHER, pytest.approx(threads.COMPUTING_SLICE_S), usual[2])
    assert behind == usual


POLICIES = """
import os, threading
from common.net.sockets import Channels
from tests.threads import running_threads, started_by_libzmq

def policies(kv, at_once):
    before = running_threads()
    channels = Channels(at_once=at_once)
    started = first = started_by_libzmq(before, 2)
    socket, _ = channels.router("tcp://127.0.0.1:*", kv=kv)
    if kv:
        started = started_by_libzmq(before | first, 2)
    print(*{os.sched_getscheduler(each) for each in started})
    socket.close()
    channels.close()

for kv, at_once in ((False, True), (True, True), (False, False)):
    thread = threading.Thread(target=policies, args=(kv, at_once))
    thread.start()
    thread.join()
"""
"""Prints the scheduling policies of libzmq's threads for control messages, and of those for KV, in a process that has
no others."""


@needs_slices
@pytest.mark.processes
def test_control_messages_are_passed_on_at_once_where_that_is_wanted_and_kv_never() -> None:
    done = subprocess.run([sys.executable, "-c", POLICIES], capture_output=True, text=True, timeout=60, check=True)
    wanted = os.SCHED_RR if real_time_is_allowed() else os.SCHED_OTHER
    assert done.stdout.split() == [str(wanted), str(os.SCHED_OTHER), str(os.SCHED_OTHER)]
