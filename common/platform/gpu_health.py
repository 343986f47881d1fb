"""When a GPU is unhealthy: which readings mean that a worker must not compute on it any more, and why.

Pure. The rules follow what NVIDIA publishes: the Xid catalog with the immediate action for each error
(docs.nvidia.com/deploy/xid-errors), the GPU memory error management guide for ECC and row remapping
(docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt), and the NVML API reference for recovery actions.
"""

from __future__ import annotations

from common.core.errors import StartError
from common.core.gpu import GpuState

FATAL_XIDS: dict[int, str] = {
    46: "the GPU stopped processing; reset it",
    48: "an uncorrectable (double-bit) memory error; reset the GPU",
    62: "its internal micro-controller halted; reset the GPU",
    64: "a faulty memory row could not be remapped; reset the GPU",
    79: "it has fallen off the bus; restart the machine",
    94: "an uncorrectable memory error in the memory of this process; restart the process",
    95: "an uncorrectable memory error that was not contained; reset the GPU",
    109: "a context switch timed out; reset the GPU",
    110: "a security fault; reset the GPU",
    119: "its system processor (GSP) does not answer; reset the GPU",
    120: "its system processor (GSP) failed; reset the GPU",
    140: "an uncorrectable memory error that the driver could not handle; reset the GPU",
    143: "it could not be initialized; reset the GPU",
    158: "a fatal timeout; reset the GPU",
}
"""Xid errors after which no kernel of this process can be trusted, in words. The catalog's immediate action for them is
to reset the GPU (46, 48, 62, 64, 95, 109, 110, 119, 120, 140, 143, 158), to restart the machine (79), or, for 94, to
restart the application, whose CUDA context is lost.

Others only count. Those of the application's own doing (13, 31, 43, 45, 69, ...) fail the CUDA context, which ends the
worker by itself and says nothing about the card. 63 (a row will be remapped), 92 (many corrected errors) and NVLink
errors (74, 144 to 150), most of which leave the card itself usable, need no action of the worker.
"""
RECOVERY_ACTIONS: dict[int, str] = {
    1: "a reset of the GPU",
    2: "a restart of the machine",
    4: "a reset of the GPU once it is drained",
    6: "a reset of the GPU's bus",
    7: "a restart of the machine",
}
"""NVML's recovery actions that the GPU needs before it can be used, by number. 3 and 5 concern traffic between GPUs."""


def fault_of(state: GpuState, uncorrected_before: int | None) -> str:
    """Return why a worker must leave this GPU, "" if it is healthy. ``uncorrected_before`` is its number of uncorrected
    ECC errors when the worker started; None if it was unknown."""
    for xid in state.xids:
        if (why := FATAL_XIDS.get(xid)) is not None:
            return f"{state.label} reports Xid {xid}: {why}"
    if state.recovery in RECOVERY_ACTIONS:
        return f"{state.label} needs {RECOVERY_ACTIONS[state.recovery]}, says its driver"
    if state.remap_failed:
        return f"{state.label} could not replace a faulty row of its memory: let its maker replace it"
    if uncorrected_before is not None and (state.ecc_uncorrected or 0) > uncorrected_before:
        return f"{state.label} has had an uncorrectable memory error: reset it"
    return ""


def lost(label: str, by_reset: bool) -> str:
    """Return the fault of a GPU that NVML no longer finds, or (``by_reset``) that it can use only after a reset."""
    return f"{label} cannot be used until it is reset" if by_reset else f"{label} is lost: {FATAL_XIDS[79]}"


def unusable(why: str) -> StartError:
    """Return the error with which a worker ends, or does not start, because of the fault ``why`` of its GPU."""
    return StartError(
        "this worker cannot use its GPU",
        why,
        "do that, then look at tandem status and at the Xid lines of the kernel log",
    )
