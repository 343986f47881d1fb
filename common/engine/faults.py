"""What an exception of the engine's computation means: one bad request, too little memory, or a dead device.

A CUDA error is reported by whatever call comes next and, but for a lack of memory, every call after it fails, too: the
process cannot repair its context.
"""

from __future__ import annotations

import torch

from common.core.errors import DeviceLost

REQUEST_FAULTS = (RuntimeError, IndexError, ValueError, TypeError, MemoryError)
"""Exceptions that torch and modelling code raise when one request's numbers are impossible or too large, and that torch
raises for everything that goes wrong on a GPU."""
NOT_FINITE = "the model's logits are not finite"
"""The error of a row that cannot be sampled."""
_LOST = ("CUDA error", "Triton Error [CUDA]", "CUDNN_STATUS_", "CUBLAS_STATUS_", "CUSOLVER_STATUS_", "NCCL error")
_SHORT = ("out of memory", "_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that the GPU's memory was too small for what was just computed; the device goes
    on."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return _is_of_cuda(error) and any(mark in str(error) for mark in _SHORT)


def raise_if_lost(error: BaseException) -> None:
    """Raise DeviceLost from ``error`` if it says that the device can no longer be used."""
    if _is_of_cuda(error) and not is_out_of_memory(error):
        raise DeviceLost(_first_line(error)) from error


def describe(error: BaseException) -> str:
    """Return ``error`` in one line, for the log."""
    if is_out_of_memory(error):
        return f"too little GPU memory: {_first_line(error)}"
    return f"{type(error).__name__}: {error}"


def free_cached(device: torch.device) -> None:
    """Give the memory that torch keeps for reuse back to the device, so that larger pieces can be had."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def wait_for(device: torch.device) -> None:
    """Wait until ``device`` has computed everything that was started, and raise what went wrong in it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _is_of_cuda(error: BaseException) -> bool:
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _LOST)


def _first_line(error: BaseException) -> str:
    """Return the first sentence of a message of torch, whose next ones say how to debug."""
    return str(error).strip().partition("\n")[0][:300]
