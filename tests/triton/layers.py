"""The fused decoder layers of GPUs against transformers' own, each part alone and all together, with and without norms
of heads, biases and padding of tiles: ``TRITON_INTERPRET=1 python -m tests.triton.layers``, or on a GPU ``python -m
tests.triton.layers --device cuda``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import transformers

from common.attention.interface import ATTENTION, bind, from_transformers
from common.attention.torch_reference import TorchReference
from common.core.ids import BlockId
from common.core.sequence import Batch, Segment
from common.engine.batch import flatten
from common.engine.device_steps import uploaded
from common.engine.runner import PagedAttention, sequence_of
from common.engine.staging import UploadStaging
from common.kv.layout import KvLayout, LayerLayout
from common.kv.storage.slab import SlabStore
from common.model import gpu_layers
from common.model.gpu_layers import PARTS, GpuLayer, fuse_gpu_layers
from common.model.layers import DenseAttention
from common.model.probe import device_of, forward

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"hidden_act": "silu"}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama with gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {}),
}
ROWS = 3
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest accepted difference of logits, relative to their largest."""


def model_of(kind: str, fields: dict[str, Any], dtype: torch.dtype, device: str = "cpu") -> Any:
    torch.manual_seed(0)
    size = {
        "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(kind, **(size | fields))
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=dtype, attn_implementation=ATTENTION).eval().requires_grad_(False)
    for weight in model.parameters():
        noise = torch.randn(weight.shape)
        weight.copy_(noise / weight.shape[-1] ** 0.5 if weight.ndim > 1 else weight + 0.3 * noise)
    bind(model, DenseAttention())
    return model.to(device)


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    rows = torch.arange(ROWS, device=device_of(model))[None]
    ids, positions = rows * 5, rows + 40
    return forward(model, ids, positions, None).float()


def difference(
    kind: str, fields: dict[str, Any], dtype: torch.dtype, parts: tuple[str, ...], device: str = "cpu"
) -> float:
    """Return the largest difference of logits, relative to the largest logit; infinity if nothing was fused."""
    model = model_of(kind, fields, dtype, device)
    expected = logits(model)
    if fuse_gpu_layers(model, parts) != 2:
        return float("inf")
    bind(model, DenseAttention())
    assert all(isinstance(layer, GpuLayer) for layer in model.model.layers)
    logits(model)
    left = torch.full((ROWS, 48), 9.0, device=device)
    model.model.layers[-1]._residual.delta = left  # what a step that failed has left
    return float((logits(model) - expected).abs().max() / expected.abs().max())


@torch.inference_mode()
def paged(kind: str, fields: dict[str, Any], parts: tuple[str, ...], device: str) -> tuple[torch.Tensor, ...]:
    """Return the logits of a prompt that is computed through a pool, and all keys and values in that pool."""
    model, where = model_of(kind, fields, torch.float32, device), torch.device(device)
    assert fuse_gpu_layers(model, parts) == 2
    dim = model.config.head_dim
    store = SlabStore(KvLayout((LayerLayout(2, dim, dim),) * 2, "float32", 16), 4, where)
    attention = PagedAttention(store, TorchReference(store))
    bind(model, attention)
    prompt = sequence_of([5 * token % 64 for token in range(20)])
    step = uploaded(flatten(Batch((Segment(prompt, 0, 20),), ([BlockId(3), BlockId(1)],)), 16), UploadStaging(where))
    attention.begin(step)
    found = forward(model, step.tensor("ids")[None], step.tensor("positions")[None], None)
    return found, *(part(layer).clone() for layer in range(2) for part in (store.k, store.v))


def off_through_pool(kind: str, fields: dict[str, Any], device: str) -> float:
    """Return the largest difference, relative to the largest number, that the kernel makes which rotates and stores."""
    but_rotary = tuple(part for part in PARTS if part != "rotary")
    apart, together = (paged(kind, fields, parts, device) for parts in (but_rotary, PARTS))
    return max(float((one - other).abs().max() / one.abs().max()) for one, other in zip(apart, together, strict=True))


def main() -> int:
    from tests.triton.interpreter import patch_language_once  # imports triton, which users of this module can lack

    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    patch_language_once()
    transformers.AttentionInterface.register(ATTENTION, from_transformers)
    torch.set_num_threads(1)
    gpu_layers._TOLERANCE = dict.fromkeys(gpu_layers._TOLERANCE, 1.0)  # the logits decide here, not the trial
    cases = [("qwen3", torch.float32, (part,)) for part in PARTS]
    cases += [(name, torch.float32, PARTS) for name in SHAPES]
    cases += [("qwen3", dtype, PARTS) for dtype in (torch.bfloat16, torch.float16)]
    wrong = 0
    for name, dtype, parts in cases:
        kind, fields = SHAPES[name]
        off = difference(kind, fields, dtype, parts, device)
        if not off <= CLOSE[dtype]:
            wrong += 1
            print(f"wrong by {off:.2g}: {name}, {dtype}, {'+'.join(parts)}")
    pools = ("llama", "qwen3")
    for name in pools:
        off = off_through_pool(*SHAPES[name], device)
        if not off <= CLOSE[torch.float32]:
            wrong += 1
            print(f"wrong by {off:.2g} through a pool: {name}")
    print(f"{len(cases) + len(pools)} cases, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
