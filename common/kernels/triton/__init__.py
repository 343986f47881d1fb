"""GPU kernels in Triton: paged attention, rotary embeddings, writes into the KV pool, copies of pieces of its blocks.

Only the modules of this package import triton, and only code that runs on a GPU imports them: a CPU worker and the
coordinator never do. Must not know: model code, requests, schedulers, pools; only tensors.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

MISSING = "the package triton is not installed"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on the CPU and very slowly: for tests of everything but speed."""


def unusable(device: str) -> str | None:
    """Return why the kernels cannot run on ``device`` (a torch device type), in words; None if they can. This does not
    import triton."""
    if device != "cuda" and not INTERPRETED:
        return "Triton kernels run on GPUs; on a CPU only with TRITON_INTERPRET=1, very slowly"
    return MISSING if find_spec("triton") is None else None
