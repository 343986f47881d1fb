"""Choice of the attention backends for prompts (prefill) and for single tokens (decode).

Backends that need triton or flash-attn are imported only when they may be chosen: a CPU worker imports neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from common.attention.composite import CompositeAttention
from common.attention.cpu import CpuAttention
from common.attention.interface import AttentionBackend, LayerCall
from common.attention.native import NativeAttention
from common.attention.torch_reference import TorchReference
from common.attention.trial import find_fault
from common.core.errors import StartError
from common.kernels import cpu
from common.kernels import triton as triton_kernels
from common.kernels.e4m3 import lacks_units
from common.kv.storage.interface import KvStorage
from common.kv.storage.tensors import KvStore

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, Phase] = ("prefill", "decode")


class Unusable(Exception):
    """A backend cannot run here, for the reason in its text."""


@dataclass(frozen=True)
class Attention:
    """The chosen backend, and the notes that say which it is and why."""

    backend: AttentionBackend
    notes: tuple[str, ...]


def _native(store: KvStorage) -> AttentionBackend:
    if not isinstance(store, KvStore):
        raise Unusable("the kernels in C run on CPUs")
    if cpu.library() is None:
        raise Unusable(cpu.MISSING)
    if store.codec is not None:
        raise Unusable("the kernels in C do not know KV in fp8")
    return NativeAttention(store)


def _cpu(store: KvStorage) -> AttentionBackend:
    if not isinstance(store, KvStore):
        raise Unusable("it is arranged for CPUs")
    return CpuAttention(store)


def _triton(store: KvStorage, splits: int | None = None) -> AttentionBackend:
    if (why := triton_kernels.unusable(store.device.type)) is not None:
        raise Unusable(why)
    if store.codec is not None and (why := lacks_units(store.device)) is not None:
        raise Unusable(f"it cannot read KV in fp8: {why}")
    from common.attention.triton import TritonAttention

    return TritonAttention(store, splits)


def _flash(store: KvStorage) -> AttentionBackend:
    if store.codec is not None:
        raise Unusable("flash-attn is not used for KV in fp8")
    from common.attention.flash import FlashUnusable, find_flash

    try:
        return find_flash(store)
    except FlashUnusable as error:
        raise Unusable(str(error)) from None


BACKENDS: Mapping[str, Callable[[KvStorage], AttentionBackend]] = {
    "native": _native,
    "cpu": _cpu,
    "torch": TorchReference,
    "triton": _triton,
    "flash": _flash,
}
"""Each makes its backend or raises :class:`Unusable`."""
_TRIED = ("triton", "flash")
"""Backends that must pass a trial against the reference."""
_COMPILE = "install a C compiler, then reinstall Tandem"
_REMEDIES = {
    "triton": "install tandem[gpu] on a machine with a GPU that fits, or choose another backend",
    "flash": "install a version of flash-attn that fits, or choose another backend",
}
_PREFERRED: Mapping[Phase, tuple[str, ...]] = {"prefill": ("flash", "triton"), "decode": ("triton", "flash")}
"""What is tried on a GPU, before torch."""


class Wanted(NamedTuple):
    """The names of the backends that a user asks for: for both phases, and in place of that for one; "auto" is the best
    one that works. ``splits``: the fixed number of parts into which Triton splits each sequence for a single token;
    None for one that follows from the batch."""

    both: str = "auto"
    prefill: str | None = None
    decode: str | None = None
    splits: int | None = None


AUTO = Wanted()


def select_backend(store: KvStorage, wanted: Wanted = AUTO, calls: Sequence[LayerCall] = ()) -> Attention:
    """Return the backends for prompts and for single tokens as one backend, with notes.

    ``calls`` says how the model calls each layer, for the trials of backends that need one, which overwrite some blocks
    of the pool. StartError if a backend that was asked for does not exist or cannot run on the device of ``store``, or
    if a number of splits was asked for and the backend for single tokens has none.
    """
    choice = _BackendChoice(store, calls, wanted.splits)
    longer, why_longer = choice.of("prefill", wanted.prefill or wanted.both)
    single, why_single = choice.of("decode", wanted.decode or wanted.both)
    if wanted.splits is not None:
        if single.name != "triton":
            raise StartError("--decode-splits is for triton only", f"decode attention is {why_single}", "omit it")
        why_single += f"; in {wanted.splits} splits, whatever the batch"
    if longer is not single:
        both: AttentionBackend = CompositeAttention(longer, single, store.k(0).device)
        return Attention(both, (f"prefill attention {why_longer}", f"decode attention {why_single}"))
    if why_longer == why_single:
        return Attention(single, (f"attention {why_single}",))
    return Attention(single, (f"prefill attention {why_longer}", f"decode attention {why_single}"))


class _BackendChoice:
    """Makes each backend once, and tries it once per phase."""

    def __init__(self, store: KvStorage, calls: Sequence[LayerCall], splits: int | None) -> None:
        self._store, self._calls = store, calls
        self._backends = {**BACKENDS}
        if splits is not None:
            self._backends["triton"] = partial(_triton, splits=splits)
        self._made: dict[str, AttentionBackend] = {}

    def of(self, phase: Phase, wanted: str) -> tuple[AttentionBackend, str]:
        """Return the backend ``wanted`` for ``phase``, or the best one if that is "auto", and its name with the
        reason."""
        if wanted == "auto":
            return self._best(phase)
        if wanted not in BACKENDS:
            known = ", ".join(("auto", *BACKENDS))
            raise StartError(f"no attention backend {wanted!r}", f"available are {known}", "choose one of these")
        try:
            made = self._make(wanted, phase)
        except Unusable as error:
            remedy = _COMPILE if str(error) == cpu.MISSING else _REMEDIES.get(wanted, "choose another backend")
            raise StartError(f"no {wanted} attention for {phase}", str(error), remedy) from None
        slowly = ", in Triton's interpreter, which is very slow" if _is_interpreted(made) else ""
        return made, f"{_described(made)}: as requested{slowly}"

    def _best(self, phase: Phase) -> tuple[AttentionBackend, str]:
        if self._store.device.type == "cpu":
            try:
                made = self._make("native", phase)
                return made, _described(made)
            except Unusable as error:
                return self._make("cpu", phase), f"cpu: {error}, which makes decoding slower"
        refused = ""
        for name in _PREFERRED[phase]:
            try:
                made = self._make(name, phase)
                return made, f"{_described(made)}: it passed its trial{refused}"
            except Unusable as error:
                refused += f"; not {name}: {error}"
        return self._make("torch", phase), f"torch, which is slow{refused}"

    def _make(self, name: str, phase: Phase) -> AttentionBackend:
        """Return the backend ``name``; :class:`Unusable` if it cannot run or fails its trial."""
        if name not in self._made:
            self._made[name] = self._backends[name](self._store)
        made = self._made[name]
        if name in _TRIED and (fault := find_fault(made, self._store, self._calls, phase == "prefill")) is not None:
            raise Unusable(fault)
        return made


def _described(backend: AttentionBackend) -> str:
    library = cpu.library() if backend.name == "native" else None
    return backend.name if library is None else f"{backend.name} for {library.variant}"


def _is_interpreted(backend: AttentionBackend) -> bool:
    return backend.name == "triton" and triton_kernels.INTERPRETED
