"""Computes the XXH3-64 of many pieces of memory, and copies them, in one pass; implemented in ``pieces.c``.

``pieces.c`` is compiled when the package is installed. Without it callers hash and copy piece by piece. Must not know
blocks or layers.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

Numbers = npt.NDArray[np.int64]
INTERFACE = 1
"""Version of the C interface, ``tandem_pieces_interface`` of ``pieces.c``; raise both when the call changes."""
_LEAST_BYTES = 241
"""``pieces.c`` implements only the variant that XXH3 uses for inputs of at least this size."""


@cache
def _compiled() -> Callable[..., int] | None:
    here = Path(__file__).parent
    return _loaded([here / f"_pieces{suffix}" for suffix in EXTENSION_SUFFIXES])


def _loaded(paths: Iterable[Path]) -> Callable[..., int] | None:
    """Load the function from the first of ``paths`` that exists; None if none does or its interface does not match."""
    found = next((path for path in paths if path.exists()), None)
    if found is None or sys.byteorder != "little":
        return None
    try:
        library = ctypes.CDLL(str(found))  # calls through CDLL release the GIL
        if library.tandem_pieces_interface() != INTERFACE:
            return None
        function = library.tandem_digest
    except (OSError, AttributeError):
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    function.restype, function.argtypes = ctypes.c_uint64, [address, address, address, number, number, ctypes.c_int]
    return function


def are_compiled() -> bool:
    """Return whether the compiled function is available, which :func:`digest` requires."""
    return _compiled() is not None


def digest(sources: Numbers, sizes: Numbers, targets: Numbers | None = None, *, wide: bool = True) -> int:
    """Return the XXH3-64 (https://xxhash.com) of the concatenation of n pieces of memory.

    ``sources`` are their addresses and ``sizes`` their lengths in bytes, both int64 [n], contiguous. With ``targets``
    (int64 [n]) each piece is also copied there; the bytes hashed are those copied, even if another process changes the
    source meanwhile. ``wide`` allows 512-bit vectors. The addresses are not checked: the caller must ensure that they
    are valid.
    """
    function, total = _compiled(), int(sizes.sum())
    assert function is not None
    if total < _LEAST_BYTES:
        data = [ctypes.string_at(int(source), int(size)) for source, size in zip(sources, sizes, strict=True)]
        for piece, target in zip(data, [] if targets is None else targets, strict=targets is not None):
            ctypes.memmove(int(target), piece, len(piece))
        return xxhash.xxh3_64_intdigest(b"".join(data))
    to = None if targets is None else targets.ctypes.data
    return function(sources.ctypes.data, to, sizes.ctypes.data, len(sizes), total, wide)
