"""A checkpoint directory that the coordinator can open, made without torch: configuration, tokenizer, weights header.

Its tokenizer is byte-level BPE with all 256 bytes and a few merges, so every text can be encoded and every id decoded.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>", "<|developer|>")
EOS = 1
VOCAB = 512
POSITIONS = 2048
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "a stop string must never leak, not even partially",
    "héllo wörld",
]


def fake_checkpoint(directory: Path, **generation: Any) -> Path:
    """Write the checkpoint into ``directory``; ``generation`` adds settings to generation_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    settings = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}, "chat_template": TEMPLATE}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "max_position_embeddings": POSITIONS,
        "eos_token_id": EOS,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 32,
    }
    generation = {"eos_token_id": [EOS, EOS]} | generation  # a list is complete: the template's <|end|> is not added
    files = {"tokenizer_config": settings, "config": config, "generation_config": generation}
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return directory


@functools.cache
def tokenizer_json() -> str:
    """Return the text of the checkpoint's tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        min_frequency=1,
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer.to_str(pretty=True)
