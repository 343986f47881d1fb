"""Hyperparameters of the built-in model and of its draft model."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaConfig

from bench.builtin_model.training.tokenizer import CONTEXT, VOCABULARY


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of one training run. An optimizer step computes about ``batch_tokens`` tokens, in pieces of at
    most ``piece_tokens``; ``warmup`` is a fraction of the steps."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    steps: int
    batch_tokens: int = 8192
    piece_tokens: int = 4096
    rate: float = 3e-3
    """Peak learning rate of embeddings and norms; matrices use Muon at ``matrix_rate``."""
    matrix_rate: float = 5e-3
    later: float = 0.4
    """After this fraction of the steps, examples are drawn by ``LATER_SHARES``."""
    weight_decay: float = 0.1
    warmup: float = 0.02
    other_weight: float = 0.0
    """Loss weight of tokens outside the assistant's messages."""
    distil: float = 0.0
    """Weight of the divergence from the teacher's distribution in the loss, 0 to 1."""
    seed: int = 1

    def config(self, bos: int, eos: list[int], pad: int) -> LlamaConfig:
        """Return the Llama configuration of these sizes. ``bos``, ``eos`` and ``pad`` are token ids."""
        return LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.ffn,
            vocab_size=VOCABULARY,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            initializer_range=0.02,
            bos_token_id=bos,
            eos_token_id=eos,
            pad_token_id=pad,
            attention_dropout=0.0,
            dtype="float32",
        )


MODEL = Recipe(hidden=256, layers=6, heads=4, kv_heads=2, ffn=768, steps=3000)
DRAFT = Recipe(
    hidden=128, layers=3, heads=4, kv_heads=2, ffn=352, steps=1200, rate=4e-3, matrix_rate=8e-3, distil=0.7, seed=2
)
