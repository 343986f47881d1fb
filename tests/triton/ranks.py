"""The fused decoder layers of two tensor-parallel ranks in Triton's interpreter, against layers that are not fused and
against one process: ``TRITON_INTERPRET=1 python -m tests.triton.ranks``, or with the names of some :data:`MODELS`.

The ranks are threads that meet in a process group of gloo. The interpreter keeps the number of the running program in a
global variable, so kernels are launched one at a time.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton.runtime.interpreter import GridExecutor

from common.model.gpu_layers import PARTS
from tests.models import make_model
from tests.ranks import TOLERANCE, fake_gpus, logits_of, split_engine
from tests.triton.interpreter import patch_language_once

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one-kv-head": ("qwen3", {"num_key_value_heads": 1, "num_hidden_layers": 2}),
    "two-kv-heads": ("qwen3", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
}


def one_at_a_time(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``launch`` for several threads that take turns."""
    turn = threading.RLock()

    def launched(*arguments: Any, **named: Any) -> Any:
        with turn:
            return launch(*arguments, **named)

    return launched


def differences(path: Path) -> tuple[float, float]:
    """Return the largest differences of logits between two ranks with fused layers, and two without or one process."""
    found = []
    for ranks, parts in ((2, PARTS), (2, ()), (1, ())):
        with split_engine(path, ranks, gpu=ranks > 1, gpu_fusion=parts) as engine:
            notes = " ".join(engine.notes)
            assert (f"layers with fused {', '.join(PARTS)}" in notes) == bool(parts), notes
            found.append(logits_of(engine))
    fused, apart, whole = found
    return float((fused - apart).abs().max()), float((fused - whole).abs().max())


def main() -> int:
    torch.set_num_threads(1)
    patch_language_once()
    GridExecutor.__call__ = one_at_a_time(GridExecutor.__call__)
    names, wrong = sys.argv[1:] or [*MODELS], 0
    for name in names:
        kind, overrides = MODELS[name]
        with tempfile.TemporaryDirectory() as folder, fake_gpus():
            off = differences(make_model(kind, Path(folder), **overrides))
        if not max(off) <= TOLERANCE:
            wrong += 1
            print(f"wrong by {off[0]:.2g} and {off[1]:.2g}: {name}")
    print(f"{len(names)} models, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
