"""Choice of the attention backend for a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from common.attention.cpu import CpuAttention
from common.attention.interface import AttentionBackend
from common.attention.native import NativeAttention
from common.attention.torch_reference import TorchReference
from common.core.errors import StartError
from common.kernels import cpu
from common.kv.storage.tensors import KvStore

BACKENDS: Mapping[str, Callable[[KvStore], AttentionBackend]] = {
    "native": NativeAttention,
    "cpu": CpuAttention,
    "torch_ref": TorchReference,
}


def select_backend(device: str, store: KvStore, name: str | None = None) -> AttentionBackend:
    """Return the backend called ``name``, or the best one for ``device`` (a torch device type). StartError if there is
    none of that name, or if its kernels were not compiled."""
    chosen = name or _best(device)
    if chosen not in BACKENDS:
        raise StartError(
            f"no attention backend {chosen!r}", f"available are {', '.join(BACKENDS)}", "choose one of these"
        )
    if chosen == "native" and cpu.library() is None:
        raise StartError("no native attention", cpu.MISSING, "install a C compiler, then reinstall Tandem")
    return BACKENDS[chosen](store)


def _best(device: str) -> str:
    if device != "cpu":
        return "torch_ref"
    return "cpu" if cpu.library() is None else "native"
