"""Writes tiny checkpoints with the peculiarities of published ones, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB = 300


def bytes_tokenizer(*added: str, special: bool = True) -> Tokenizer:
    """Return a tokenizer of the 256 bytes, with ``added`` tokens from id 256 on."""
    tokenizer = Tokenizer(models.BPE({char: at for at, char in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens = [AddedToken(text, special=special, normalized=False) for text in added]
    tokenizer.add_special_tokens(tokens) if special else tokenizer.add_tokens(tokens)
    return tokenizer


def write(directory: Path, files: Mapping[str, Any], tensors: Mapping[str, int] | None = None) -> Path:
    """Write a Llama's configuration, ``files`` (JSON content, or text for other names) and a weight file per entry of
    ``tensors``: file name -> number of its first tensor of two. Entries of ``files`` that are None are left out."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 32,
    }
    given = dict(files)
    if "config.json" in given and isinstance(given["config.json"], dict):
        given["config.json"] = config | given["config.json"]
    for name, content in ({"config.json": config} | given).items():
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text, encoding="utf-8")
    for name, first in ({"model.safetensors": 0} if tensors is None else tensors).items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(safetensors_of(f"t{first}", f"t{first + 1}"))
    return directory


def safetensors_of(*names: str) -> bytes:
    """Return a safetensors file with one float32 number per name."""
    entries = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * at, 4 * at + 4]} for at, name in enumerate(names)
    }
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4 * len(names))
