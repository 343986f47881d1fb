"""What an exception of the engine's computation means: one bad request, too little memory, or a dead device.

A CUDA error is reported by the next call, whatever that is. Unless it was a lack of memory, every later call fails,
too: the process cannot repair its CUDA context.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import torch

from common.core.errors import DeviceLost, StartError
from common.kv.budget import human_bytes

REQUEST_FAULTS = (RuntimeError, IndexError, ValueError, TypeError, MemoryError)
"""Exceptions that torch and modelling code raise when one request's numbers are impossible or too large, and that torch
raises for everything that goes wrong on a GPU."""
NOT_FINITE = "the model's logits are not finite"
"""The error of a row that cannot be sampled."""
_LOST = ("CUDA error", "Triton Error [CUDA]", "CUDNN_STATUS_", "CUBLAS_STATUS_", "CUSOLVER_STATUS_", "NCCL error")
_OF_CAPTURE = "captur"
"""In what CUDA says of all errors of capture, which end the capture and leave the device as it was."""
_SHORT = ("out of memory", "_ALLOC_FAILED")
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
"""What torch says that it asked the device for."""
SMALLER_POOL = (
    "lower --gpu-memory-utilization (or --kv-cache-memory, --num-kv-blocks), so that the KV pool leaves more, or lower "
    "--max-num-batched-tokens and --max-num-seqs"
)
"""Advice for a step that does not fit beside the pool."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that the GPU's memory was too small for what was just computed; the device goes
    on."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return _is_of_cuda(error) and any(mark in str(error) for mark in _SHORT)


def raise_if_lost(error: BaseException) -> None:
    """Raise DeviceLost from ``error`` if it says that the device can no longer be used."""
    if _is_of_cuda(error) and not is_out_of_memory(error) and _OF_CAPTURE not in _first_line(error):
        raise DeviceLost(_first_line(error)) from error


def describe(error: BaseException) -> str:
    """Return ``error`` in one line, for the log."""
    if is_out_of_memory(error):
        return f"too little GPU memory: {_first_line(error)}"
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def shortage_in_words(what: str, device: torch.device, todo: str) -> Iterator[None]:
    """Turn a lack of GPU memory within the block into a StartError, which says ``what`` did not fit, how many bytes
    were free, and what ``todo``."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        wanted = _WANTED.search(str(error))
        why = f"{wanted[1]} more did not fit" if wanted else _first_line(error)
        raise StartError(f"too little GPU memory {what}", f"{why}; {memory_of(device)}", todo) from None


def memory_of(device: torch.device) -> str:
    """Return in words how much of the device's memory is free, and how much this process holds."""
    try:
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
    except (RuntimeError, ValueError, AssertionError):
        return "how much is free is not known"
    return f"{human_bytes(free)} of {human_bytes(total)} are free, {human_bytes(own)} are this worker's"


def free_cached(device: torch.device) -> None:
    """Give the memory that torch keeps for reuse back to the device, so that larger pieces can be had."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def wait_for(device: torch.device) -> None:
    """Wait until ``device`` has computed everything that was started, and raise what went wrong in it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def sentinel(device: torch.device) -> Callable[[], None]:
    """Return a function that raises DeviceLost if ``device`` has failed. It waits for nothing and may be called from
    any thread, also during a capture."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))

    def check() -> None:
        torch.cuda.set_device(device)  # of this thread: else CUDA would take memory of another GPU
        try:
            event.query()
        except RuntimeError as error:
            raise DeviceLost(_first_line(error)) from error

    return check


def _is_of_cuda(error: BaseException) -> bool:
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _LOST)


def _first_line(error: BaseException) -> str:
    """Return the first sentence of a message of torch, whose next ones say how to debug."""
    return str(error).strip().partition("\n")[0][:300]
