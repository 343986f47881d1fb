"""Writes Llamas of random weights as GGUF files, quantized by llama.cpp's own code.

    python random_gguf.py TOKENIZER_JSON FOLDER LAYERS HIDDEN FEED_FORWARD HEADS KV_HEADS VOCABULARY TYPE...

Runs in the environment of ``tandem bench install-peers --peer llamacpp``, which has llama.cpp. It imports nothing of
Tandem. ``TYPE`` is f32, bf16, q8_0, q4_0 or q4_k_m, the mixture that llama.cpp's quantizer makes under that name: the
output matrix, and in half of the layers the values and the second matrix of the feed-forward part, are Q6_K.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp.xllamacpp as compiled

CONTEXT, STD = 4096, 0.02
TYPES = {"f32": "F32", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_k_m": "Q4_K"}
FILE_TYPES = {"f32": 0, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_k_m": 15}

_llamacpp = ctypes.CDLL(compiled.__file__)
_llamacpp.ggml_quantize_chunk.restype = _llamacpp.ggml_row_size.restype = ctypes.c_size_t
_llamacpp.ggml_quantize_chunk.argtypes = [
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
]  # fmt: skip
_llamacpp.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]


def quantized(weight: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Return the rows of ``weight``, float32 [rows, columns], as llama.cpp stores them."""
    if kind is gguf.GGMLQuantizationType.F32:
        return weight
    if kind is gguf.GGMLQuantizationType.BF16:
        return np.asarray(gguf.quantize(weight, kind))
    rows, columns = weight.shape
    found = np.empty((rows, _llamacpp.ggml_row_size(int(kind), columns)), np.uint8)
    _llamacpp.ggml_quantize_chunk(int(kind), weight.ctypes.data, found.ctypes.data, 0, rows, columns, None)
    return found


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], size: int) -> None:
    """Add a byte-level tokenizer, filled up to ``size`` with words that no text is split into."""
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = [text for text, _ in sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])]
    tokens += [f"word{at}" for at in range(len(tokens), size)]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if text in special else gguf.TokenType.NORMAL for text in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def write(path: Path, tokenizer: dict[str, Any], shape: list[int], kind: str) -> None:
    """Write a model of ``shape`` (layers, hidden, feed-forward, heads, key-value heads, vocabulary)."""
    layers, hidden, inner, heads, kv_heads, vocabulary = shape
    kv = hidden // heads * kv_heads
    most, better = gguf.GGMLQuantizationType[TYPES[kind]], gguf.GGMLQuantizationType.Q6_K
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(path.stem)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocabulary)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(2)
    add_vocabulary(writer, tokenizer, vocabulary)
    rng = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int, to: gguf.GGMLQuantizationType = most) -> None:
        weight = rng.standard_normal((rows, columns), np.float32) * np.float32(STD)
        data = quantized(weight, to)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=None if data.dtype == np.float32 else to)

    mixed = kind == "q4_k_m"
    add("token_embd", vocabulary, hidden)
    add("output", vocabulary, hidden, better if mixed else most)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(layers):
        more = mixed and (layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2)
        for name, rows, columns in (("attn_q", hidden, hidden), ("attn_k", kv, hidden), ("attn_output", hidden, hidden),
                                    ("ffn_gate", inner, hidden), ("ffn_up", inner, hidden)):  # fmt: skip
            add(f"blk.{layer}.{name}", rows, columns)
        add(f"blk.{layer}.attn_v", kv, hidden, better if more else most)
        add(f"blk.{layer}.ffn_down", hidden, inner, better if more else most)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for each in sys.argv[9:]:
        write(Path(sys.argv[2]) / f"{each}.gguf", given, [int(word) for word in sys.argv[3:9]], each)
