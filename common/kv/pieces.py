"""XXH3-64 of bytes that lie in many places, and their copies, in one pass over them: ``pieces.c``.

Without its function, which is compiled when the package is installed, callers hash and copy piece by piece. Must not
know blocks or layers.
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
"""``tandem_pieces_interface`` of ``pieces.c``: raised on both sides when the call changes."""
_LEAST_BYTES = 241
"""Of which XXH3 takes all in the one way that ``pieces.c`` knows."""


@cache
def _compiled() -> Callable[..., int] | None:
    here = Path(__file__).parent
    return _loaded([here / f"_pieces{suffix}" for suffix in EXTENSION_SUFFIXES])


def _loaded(paths: Iterable[Path]) -> Callable[..., int] | None:
    """The function in the first of ``paths`` that is there; None if none is, or it is not what this module calls."""
    found = next((path for path in paths if path.exists()), None)
    if found is None or sys.byteorder != "little":
        return None
    try:
        library = ctypes.CDLL(str(found))  # whose calls release the interpreter lock
        if library.tandem_pieces_interface() != INTERFACE:
            return None
        function = library.tandem_digest
    except (OSError, AttributeError):
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    function.restype, function.argtypes = ctypes.c_uint64, [address, address, address, number, number, ctypes.c_int]
    return function


def are_compiled() -> bool:
    """Whether :func:`digest` can be called here."""
    return _compiled() is not None


def digest(sources: Numbers, sizes: Numbers, targets: Numbers | None = None, *, wide: bool = True) -> int:
    """XXH3-64 (https://xxhash.com) of ``sizes`` bytes at the addresses ``sources`` (int64 [n] both, contiguous),
    behind one another. Each is copied to its place in ``targets`` as well, if these are given: what is
    hashed is what is copied, even if somebody changes it meanwhile. ``wide`` allows vectors of 512 bits.

    Nothing here knows whether there is memory at these addresses.
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
