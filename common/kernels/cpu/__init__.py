"""CPU kernels in C for operations that torch has no fast operator for. Without them everything still works, slower.

They are compiled when the package is installed, if there is a compiler (``pyproject.toml``), for several instruction
sets; the fastest one that runs here is selected when the library is loaded. The functions take raw pointers and release
the interpreter lock. Must not know: model code, requests, schedulers.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""``enum type`` of native.c."""
INTERFACE = 13
"""``tandem_interface`` of native.c: increased on both sides when the signature or meaning of a call changes."""
MISSING = "the kernels in C were not compiled when this package was installed"
_P, _I64, _I32, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Layer(ctypes.Structure):
    """``struct layer``: one attention layer, with the addresses of its keys and values in the pool."""

    _fields_ = (
        *((name, _P) for name in ("keys", "values", "sinks")),
        *((name, _I64) for name in ("block_bytes", "block_size", "window")),
        *((name, _I32) for name in ("kv_heads", "group", "k_dim", "v_dim", "type", "element_bytes")),
        *((name, _F) for name in ("scaling", "softcap")),
    )


class Spans(ctypes.Structure):
    """``struct spans``: the rows of one step, grouped by sequence, and their block tables."""

    _fields_ = (*((name, _P) for name in ("row", "length", "start", "table_at", "tables")), ("count", _I64))


class Linear(ctypes.Structure):
    """``struct linear``: one packed linear layer."""

    _fields_ = (
        *((name, _P) for name in ("packed", "bias")),
        *((name, _I64) for name in ("in_features", "columns", "out")),
        *((name, _I32) for name in ("type", "activation", "halves")),
        ("groups", _P),
    )


class Groups(ctypes.Structure):
    """``struct groups``: a weight in groups, or a part of one."""

    _fields_ = (
        *((name, _P) for name in ("codes", "scales", "minima", "sub_scales", "sub_minima", "zeros")),
        *((name, _P) for name in ("bias", "table", "order", "next")),
        *((name, _I64) for name in ("in_features", "padded", "out")),
        *((name, _I32) for name in ("bits", "coding", "group", "span", "zero", "most", "scale_type", "exact", "terms")),
    )


class Norm(ctypes.Structure):
    """``struct norm``: one RMS norm."""

    _fields_ = (("weight", _P), ("dim", _I64), ("epsilon", _F))


class Rotary(ctypes.Structure):
    """``struct rotary``: rotary embedding of queries and keys, with their norms if any."""

    _fields_ = (
        *((name, _I64) for name in ("row", "query_heads", "key_heads", "dim", "rotated")),
        *((name, Norm) for name in ("query_norm", "key_norm")),
    )


class DecoderLayer(ctypes.Structure):
    """``struct decoder_layer``: pointers to the structures of its parts."""

    _fields_ = tuple(
        (name, _P) for name in ("input_norm", "mlp_norm", "qkv", "out", "gate_up", "down", "rotary", "attention")
    )


class Decoder(ctypes.Structure):
    """``struct decoder``: all layers, the embedding before them, and the final norm and logits head."""

    _fields_ = (
        ("layers", _P),
        ("count", _I64),
        ("embedding", _P),
        ("embedding_groups", _P),
        ("vocabulary", _I64),
        *((name, _P) for name in ("cos", "sin", "norm", "head")),
    )


class Pass(ctypes.Structure):
    """``struct pass``: the input rows, output and buffers of one forward pass."""

    _fields_ = (
        *((name, _P) for name in ("ids", "positions", "block", "offset", "keep", "spans", "logits", "peaks")),
        *((name, _P) for name in ("hidden", "normed", "qkv", "attended", "gated", "cos", "sin")),
        *((name, _I64) for name in ("rows", "kept")),
        ("threads", _I32),
    )


_SIGNATURES = {
    "tandem_borrow": (ctypes.c_int, [_P, _P, ctypes.c_int]),
    "tandem_borrowed_s": (ctypes.c_double, []),
    "tandem_give_back": (None, []),
    "tandem_decode": (ctypes.c_int, [_P, _P, _I64, _I64]),
    "tandem_group_rows": (ctypes.c_int, [_P, _P, _I64, _P, _I64, ctypes.c_int]),
    "tandem_group_variant": (ctypes.c_char_p, []),
    "tandem_lanes": (ctypes.c_int, []),
    "tandem_linear": (ctypes.c_int, [_P, _P, _P, _P, _I64, _I64, _I64, ctypes.c_int]),
    "tandem_norm": (None, [_P, _P, _P, _I64, ctypes.c_int]),
    "tandem_pack": (None, [_P, _I64, _I64, ctypes.c_int, ctypes.c_int, _P]),
    "tandem_peaks": (None, [_P, _I64, _I64, ctypes.c_int, _P]),
    "tandem_read": (ctypes.c_uint64, [_P, _I64, ctypes.c_int]),
    "tandem_rotate": (None, [_P, _P, _I64, _P, _P, ctypes.c_int]),
    "tandem_store": (None, [_P, _P, _P, _I64, _I64, _I64, _P, _P]),
    "tandem_attend": (ctypes.c_int, [_P, _P, _P, _P, _I64, _I64, ctypes.c_int]),
    "tandem_use": (ctypes.c_int, [ctypes.c_char_p]),
    "tandem_variant": (ctypes.c_char_p, [ctypes.c_int]),
}


class Library:
    """The loaded kernels. Each attribute such as ``attend`` is the C function ``tandem_attend`` of native.c."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        self.attend = self._library.tandem_attend
        self.borrow = self._library.tandem_borrow
        self.borrowed_s = self._library.tandem_borrowed_s
        self.decode = self._library.tandem_decode
        self.give_back = self._library.tandem_give_back
        self.group_rows = self._library.tandem_group_rows
        self.lanes = self._library.tandem_lanes
        self.linear = self._library.tandem_linear
        self.norm = self._library.tandem_norm
        self.pack = self._library.tandem_pack
        self.peaks = self._library.tandem_peaks
        self.read = self._library.tandem_read
        self.rotate = self._library.tandem_rotate
        self.store = self._library.tandem_store
        self.variants: tuple[str, ...] = tuple(self._variants())
        """Names of the instruction set variants that run on this CPU, the fastest first."""
        self.use(self.variants[0])

    def _variants(self) -> list[str]:
        names: list[str] = []
        while (name := self._library.tandem_variant(len(names))) is not None:
            names.append(name.decode())
        return names

    def use(self, variant: str) -> None:
        """Select ``variant`` for the whole process; raises ValueError if it does not run on this CPU."""
        if self._library.tandem_use(variant.encode()):
            raise ValueError(f"kernels for {variant!r} do not run here, those for {', '.join(self.variants)} do")
        self.variant = variant
        self.group_variant: str = self._library.tandem_group_variant().decode()
        """Name of the instruction set for products with weights in groups."""


@cache
def library() -> Library | None:
    """Load the compiled kernels; None if there are none or they were compiled from older sources."""
    here = Path(__file__).parent
    paths = [here / f"_kernels{suffix}" for suffix in EXTENSION_SUFFIXES]
    found = next((path for path in paths if path.exists()), None)
    if found is None or ctypes.CDLL(str(found)).tandem_interface() != INTERFACE:
        return None
    return Library(found)
