"""Tiny checkpoints with random weights, one per model family that behaves differently.

Each has two to four layers, a hidden size of 64 and a byte-level BPE tokenizer of about 512 ids. Weights are drawn so
that nothing degenerates: logits spread, greedy output varies, and norms and biases are not at their neutral values (a
neutral norm would hide that it was skipped). The weights depend only on the kind, so two runs write equal ones.

Write one by hand: ``python -m tests.models llama /some/directory``.
"""

from __future__ import annotations

import functools
import math
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, POSITIONS = 64, 4, 2, 16, 3, 4096
SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
BOS, EOS, PAD = 0, 1, 2
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CORPUS = """
A block has holders, not an owner. The sender holds source blocks until the receiver has released them, and the
receiver writes only its own memory. There is no prefill phase and no decode phase: a step is a list of segments, and
decoding is a segment of length one. What the client asked is a request; its progress on one worker is a sequence; the
hand-off between two workers is a transfer. Every queue has a bound and a metric, every wait has a deadline.
def take(self, count: int, holder: str) -> list[int]: return [self.free.pop() for _ in range(count)]
The quick brown fox jumps over the lazy dog, while 1234567890 numbers and (brackets) [lists] {"json": true, "x": null}
are read. Größe, naïve café, 你好世界, こんにちは, привет, and 🙂 have characters of several bytes.
"""


@functools.cache
def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer whose first ids are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        min_frequency=1,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


VOCAB = 512


def _common(**extra: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    } | extra


def _experts(**extra: Any) -> dict[str, Any]:
    return _common(num_experts_per_tok=2, **extra)


def _alternating(full_every: int) -> list[str]:
    return ["full_attention" if (i + 1) % full_every == 0 else "sliding_attention" for i in range(4)]


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_theta": 10_000.0, **parameters}


_GEMMA2 = _common(
    num_hidden_layers=4,
    tie_word_embeddings=True,
    sliding_window=48,
    layer_types=_alternating(2),
    query_pre_attn_scalar=HEAD_DIM,
    attn_logit_softcapping=3.0,
    final_logit_softcapping=4.0,
)
_GEMMA3 = _common(
    num_hidden_layers=4,
    tie_word_embeddings=True,
    sliding_window=32,
    layer_types=_alternating(4),
    query_pre_attn_scalar=HEAD_DIM,
)
_QWEN3_MOE = _experts(num_experts=4, moe_intermediate_size=48, decoder_sparse_step=1, norm_topk_prob=True)
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(HEAD_DIM // 2)],
    "long_factor": [2.0 + 1.5 * i for i in range(HEAD_DIM // 2)],
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": POSITIONS,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_DEEPSEEK = {
    **_common(),
    "num_key_value_heads": HEADS,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
_MAMBA = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "state_size": 8, "num_hidden_layers": 2, "eos_token_id": EOS}
_T5 = {"vocab_size": VOCAB, "d_model": HIDDEN, "d_kv": HEAD_DIM, "d_ff": 96, "num_layers": 2, "num_heads": HEADS}

# kind -> (transformers model type, configuration)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _common(tie_word_embeddings=True)),
    "llama-untied": ("llama", _common()),
    "llama-dynamic": (
        # the scaling applies to positions beyond 512: serve it with a longer --max-model-len
        "llama",
        _common(max_position_embeddings=512, rope_parameters=_rope(rope_type="dynamic", factor=4.0)),
    ),
    "qwen3": ("qwen3", _common(tie_word_embeddings=True)),
    "qwen3-moe": ("qwen3_moe", _QWEN3_MOE),
    "mistral": ("mistral", _common(sliding_window=64)),
    "mixtral": ("mixtral", _experts(num_local_experts=4)),
    "gemma2": ("gemma2", _GEMMA2),
    "gemma3": ("gemma3_text", _GEMMA3),
    "phi3": ("phi3", _common()),
    "phi3-longrope": (
        "phi3",
        _common(original_max_position_embeddings=64, rope_parameters=_rope(**_LONGROPE)),
    ),
    "gpt-oss": (
        "gpt_oss",
        _experts(
            num_hidden_layers=4, num_local_experts=4, sliding_window=32, rope_parameters=_rope(rope_type="default")
        ),
    ),
    "gpt2": ("gpt2", _GPT2),
    "deepseek-v3": ("deepseek_v3", _DEEPSEEK),
    "mamba": ("mamba", _MAMBA),
    "t5": ("t5", _T5),
}
REFUSED = ("mamba", "t5")
SERVED = tuple(kind for kind in KINDS if kind not in REFUSED)


def make_model(kind: str, directory: Path, **overrides: Any) -> Path:
    """Write a checkpoint of ``kind`` with its tokenizer; ``overrides`` replace fields of the configuration."""
    model_type, fields = KINDS[kind]
    return _write(kind, model_type, fields | overrides, directory)


def make_of(model_type: str, directory: Path, **fields: Any) -> Path:
    """Write a checkpoint of any ``model_type`` of transformers, with ``fields`` beside the usual sizes."""
    return _write(model_type, model_type, _common(**fields), directory)


def _write(kind: str, model_type: str, fields: dict[str, Any], directory: Path) -> Path:
    config = AutoConfig.for_model(model_type, **fields)
    auto: Any = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    _draw_weights(model, seed=zlib.crc32(kind.encode()))
    tokenizer = make_tokenizer()
    if model.can_generate():
        model.generation_config.eos_token_id = [EOS, EOS]  # a list is complete: the template's <|end|> is not added
        model.generation_config.bos_token_id, model.generation_config.pad_token_id = BOS, PAD
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def spread_kv(directory: Path) -> Path:
    """Multiply the keys and the values of each KV head of the Llama in ``directory`` by a power of two of its own, and
    divide queries and the output projection by it: the model computes the same, but in fp8 each head needs another
    scale."""
    file = directory / "model.safetensors"
    weights = load_file(file)
    k, v = (torch.tensor(each).repeat_interleave(HEAD_DIM) for each in ([2.0**-7, 2.0**6], [2.0**9, 2.0**-4]))
    for layer in range(LAYERS):
        start = f"model.layers.{layer}.self_attn."
        for name, factor in (("k", k), ("v", v)):
            weights[f"{start}{name}_proj.weight"] *= factor[:, None]
        of_queries, of_outputs = (
            each.view(KV_HEADS, -1).repeat_interleave(HEADS // KV_HEADS, 0).flatten() for each in (k, v)
        )
        weights[f"{start}q_proj.weight"] /= of_queries[:, None]
        weights[f"{start}o_proj.weight"] /= of_outputs
    save_file(weights, file, metadata={"format": "pt"})
    return directory


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Replace every weight: matrices with gain, norms around their neutral value, biases around zero.

    Gemma normalizes a layer's output before adding it. A large norm weight there lets the layers decide the next token;
    otherwise the token's own embedding would, and with tied embeddings the model would repeat its input for ever.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if id(weight) in embeddings:
            weight.copy_((0.1 if getattr(model.config, "tie_word_embeddings", False) else 0.25) * noise)
        elif weight.ndim >= 2:
            weight.copy_(noise * 1.5 / math.sqrt(HIDDEN))
        elif "post_" in name and "gemma" in model.config.model_type:
            weight.copy_(5.0 + noise)
        elif name.endswith("norm.weight") or ".ln_" in name or "layernorm" in name.lower():
            weight.add_(0.2 * noise)
        else:
            weight.copy_(0.3 * noise)


def main(arguments: list[str], echo: Callable[[str], object] = print) -> int:
    if len(arguments) != 2 or arguments[0] not in KINDS:
        echo(f"usage: python -m tests.models KIND DIRECTORY, with KIND one of {', '.join(KINDS)}")
        return 2
    echo(str(make_model(arguments[0], Path(arguments[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
