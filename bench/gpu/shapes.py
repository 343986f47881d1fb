"""The models of the goals G1 to G8, with random weights, and tiny ones for a dry run.

Speed depends on the shape and the type of the weights, not on their values, as long as these are not zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SPREAD = 0.02
"""Standard deviation of the weights."""
_SHARD_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A Llama. ``tied``: the output layer is the embedding."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    vocabulary: int
    tied: bool
    positions: int = 32_768

    @property
    def linear_weights(self) -> int:
        """Elements of all linear layers, with the output layer: what a decode step reads of the weights."""
        projections = self.hidden * self.dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (projections + 3 * self.hidden * self.inner) + self.hidden * self.vocabulary

    @property
    def kv_elements(self) -> int:
        """Elements of one token's keys and values."""
        return 2 * self.layers * self.kv_heads * self.dim

    def decode_bytes(self, batch: int, context: int, element_bytes: int = 2) -> int:
        """Bytes that a decode step must read."""
        return element_bytes * (self.linear_weights + batch * context * self.kv_elements)

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a prompt of ``tokens`` tokens of which only the last row is sampled."""
        head = self.hidden * self.vocabulary
        attention = 2.0 * self.layers * self.heads * self.dim * tokens**2
        return 2.0 * (self.linear_weights - head) * tokens + attention + 2.0 * head

    def config(self) -> dict[str, Any]:
        """Return the model's ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.hidden,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.dim, "intermediate_size": self.inner, "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions, "tie_word_embeddings": self.tied, "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 0,
            "eos_token_id": 1, "attention_bias": False, "mlp_bias": False,
        }  # fmt: skip


SMALL = LlamaShape("llama-0.6b", 1024, 28, 16, 8, 128, 3072, 151_936, tied=True)
LARGE = LlamaShape("llama-8b", 4096, 32, 32, 8, 128, 14_336, 128_256, tied=False)
TINY_SMALL = LlamaShape("llama-tiny", 64, 2, 4, 2, 16, 128, 8192, tied=True, positions=1024)
TINY_LARGE = LlamaShape("llama-tiny-8", 128, 3, 8, 2, 16, 256, 8192, tied=False, positions=1024)


def make(shape: LlamaShape, folder: Path, device: torch.device) -> Path:
    """Return the checkpoint of ``shape`` in ``folder``, written if it is not there. Weights are drawn on ``device``,
    because a CPU takes minutes for billions of them."""
    path = folder / shape.name
    index = path / "model.safetensors.index.json"
    if index.exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    files = 0

    def write() -> None:
        nonlocal files
        name = f"model-{files:05d}.safetensors"
        save_file(shard, path / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()
        files += 1

    for name, size in _tensors(shape):
        shard[name] = _drawn(size, device)
        if sum(each.nbytes for each in shard.values()) > _SHARD_BYTES:
            write()
    write()
    (path / "config.json").write_text(json.dumps(shape.config(), indent=1), encoding="utf-8")
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")  # last: now it is whole
    return path


def _drawn(size: tuple[int, ...], device: torch.device) -> torch.Tensor:
    if len(size) == 1:  # a norm
        return torch.ones(size, dtype=torch.bfloat16)
    return torch.randn(size, dtype=torch.bfloat16, device=device).mul_(SPREAD).cpu()


def _tensors(shape: LlamaShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and size of every weight, as transformers names them."""
    yield "model.embed_tokens.weight", (shape.vocabulary, shape.hidden)
    query, kv = shape.heads * shape.dim, shape.kv_heads * shape.dim
    for layer in range(shape.layers):
        start = f"model.layers.{layer}."
        yield start + "self_attn.q_proj.weight", (query, shape.hidden)
        yield start + "self_attn.k_proj.weight", (kv, shape.hidden)
        yield start + "self_attn.v_proj.weight", (kv, shape.hidden)
        yield start + "self_attn.o_proj.weight", (shape.hidden, query)
        yield start + "mlp.gate_proj.weight", (shape.inner, shape.hidden)
        yield start + "mlp.up_proj.weight", (shape.inner, shape.hidden)
        yield start + "mlp.down_proj.weight", (shape.hidden, shape.inner)
        yield start + "input_layernorm.weight", (shape.hidden,)
        yield start + "post_attention_layernorm.weight", (shape.hidden,)
    yield "model.norm.weight", (shape.hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocabulary, shape.hidden)
