"""Which attention backend serves a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from common.attention.cpu import CpuAttention
from common.attention.interface import AttentionBackend
from common.attention.torch_ref import TorchReference
from common.errors import StartError
from common.kv.store import KvStore

BACKENDS: Mapping[str, Callable[[KvStore], AttentionBackend]] = {"cpu": CpuAttention, "torch_ref": TorchReference}
DEFAULT = {"cpu": "cpu"}


def select_backend(device: str, store: KvStore, name: str | None = None) -> AttentionBackend:
    """The backend called ``name``, or the best one for ``device``; StartError if there is none by that name."""
    chosen = name or DEFAULT.get(device, "torch_ref")
    if chosen not in BACKENDS:
        raise StartError(f"no attention backend {chosen!r}", f"there are {', '.join(BACKENDS)}", "name one of these")
    return BACKENDS[chosen](store)
