"""GPU kernels in Triton: paged attention, rotary embeddings, writes into the KV pool, copies of pieces of its blocks.

Only the modules of this package import triton, and only code that runs on a GPU imports them: a CPU worker and the
coordinator never do. Must not know: model code, requests, schedulers, pools; only tensors.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

MISSING = "the package triton is not installed"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on the CPU and very slowly: for tests of everything but speed."""


def unusable(device: str) -> str | None:
    """Return why the kernels cannot run on ``device`` (a torch device type), in words; None if they can. This does not
    import triton."""
    if device != "cuda" and not INTERPRETED:
        return "Triton kernels run on GPUs; on a CPU only with TRITON_INTERPRET=1, very slowly"
    if find_spec("triton") is None:
        return MISSING
    return None if INTERPRETED else _cannot_build()


def _cannot_build() -> str | None:
    """Return what Triton lacks to build, on its first use, the module in C with which it calls the driver; None if
    nothing."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler (Debian: apt install gcc libc6-dev)"
    scheme = sysconfig.get_default_scheme()
    headers = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)  # as Triton does
    if not Path(headers, "Python.h").exists():
        return f"Triton needs Python's headers, which are not in {headers} (Debian: apt install python3-dev)"
    return None
