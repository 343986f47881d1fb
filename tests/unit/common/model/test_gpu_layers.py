"""Fused decoder layers for GPUs: which models get them, and that they compute what transformers' layers compute. Their
kernels run in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from common.attention.interface import ATTENTION, bind, from_transformers
from common.model import gpu_layers
from common.model.gpu_layers import GpuLayer, LastNorm, fuse_gpu_layers
from common.model.layers import DenseAttention
from tests.models import SERVED
from tests.pace import scaled
from tests.triton.layers import SHAPES, difference, logits, model_of
from tests.unit.common.engine.test_capture_audit import model_of as any_model_of

FITTING = {"llama", "llama-untied", "llama-dynamic", "qwen3", "mistral"}
RANKS = ("one-kv-head", "two-kv-heads", "biases")
"""Models of :mod:`tests.triton.ranks` in ``make test-all``."""


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    transformers.AttentionInterface.register(ATTENTION, from_transformers)


@pytest.mark.parametrize("name", SHAPES)
def test_merged_linears_compute_the_same(name: str) -> None:
    """Norms, rotary and activation are left out here: they need Triton."""
    assert difference(*SHAPES[name], torch.float32, ("linears",)) < 1e-6


def test_only_layers_of_the_common_shape_are_replaced() -> None:
    replaced = set()
    for kind in SERVED:
        model = any_model_of(kind, "cpu", torch.float32)
        if count := fuse_gpu_layers(model, ["linears"]):
            assert count == len(model.model.layers) and isinstance(model.model.norm, LastNorm)
            assert all(isinstance(layer, GpuLayer) for layer in model.model.layers)
            replaced.add(kind)
    assert replaced == FITTING


def test_a_layer_that_computes_something_else_stays() -> None:
    model = model_of(*SHAPES["llama"], torch.float32)
    forward = model.model.layers[1].forward
    model.model.layers[1].forward = lambda *args, **kwargs: 1.01 * forward(*args, **kwargs)
    expected = logits(model)
    assert fuse_gpu_layers(model, ["linears"]) == 0
    bind(model, DenseAttention())
    torch.testing.assert_close(logits(model), expected)


def test_layers_whose_kernels_cannot_be_compiled_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def add_norm(*_: Any) -> torch.Tensor:
        raise RuntimeError("ptxas does not know this GPU\nmore words")

    monkeypatch.setattr(gpu_layers, "_add_norm", add_norm)
    model = model_of(*SHAPES["llama"], torch.float32)
    expected = logits(model)
    assert fuse_gpu_layers(model, ["linears", "norms"]) == 0
    assert "layers are not fused: RuntimeError: ptxas does not know this GPU more words" in caplog.text
    bind(model, DenseAttention())
    torch.testing.assert_close(logits(model), expected)


def test_nothing_is_replaced_if_no_part_is_wanted() -> None:
    assert fuse_gpu_layers(model_of(*SHAPES["llama"], torch.float32), []) == 0


def test_weights_are_held_once() -> None:
    model: Any = model_of(*SHAPES["llama"], torch.float32)
    size = sum(weight.nbytes for weight in model.model.layers[0].parameters())
    query = model.model.layers[0].self_attn.q_proj.weight
    fuse_gpu_layers(model, ["linears"])
    layer = model.model.layers[0]
    assert sum(weight.nbytes for weight in layer.parameters()) == size
    merged = layer._qkv._linears[0].weight
    assert query.data_ptr() == merged.data_ptr() and query.shape[0] < merged.shape[0]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "script",
    ["layers", *(pytest.param(f"ranks {name}", marks=pytest.mark.whole) for name in RANKS)],
)
def test_the_kernels_compute_what_transformers_computes(script: str) -> None:
    """In one process, and in two ranks of which each has slices of the linears and some of the heads."""
    module, *names = script.split()
    done = subprocess.run(
        [sys.executable, "-m", f"tests.triton.{module}", *names], capture_output=True, text=True, timeout=scaled(150),
        cwd=Path(__file__).parents[4], env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "0 wrong" in done.stdout, done.stdout + done.stderr
