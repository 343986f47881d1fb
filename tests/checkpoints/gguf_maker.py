"""Writes GGUF files of the tests' checkpoints as the public converter does, independently of the reader."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

ARCHITECTURES = {
    "llama": "llama", "mixtral": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "phi3": "phi3", "gpt_oss": "gpt-oss", "mistral": "llama",
    "qwen2": "qwen2", "qwen2_moe": "qwen2moe", "gemma": "gemma", "granite": "granite", "smollm3": "smollm3",
    "olmo2": "olmo2", "arcee": "arcee", "starcoder2": "starcoder2", "cohere": "command-r",
}  # fmt: skip
Encode = Callable[[str, np.ndarray[Any, Any]], tuple[np.ndarray[Any, Any], Any]]
"""Returns the blocks and the ggml type of a tensor by its name in the file and its float32 values."""


def as_float32(_: str, values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], Any]:
    return values, None


def gguf_of(
    directory: Path,
    out: Path,
    *,
    encode: Encode = as_float32,
    shards: int = 1,
    without: Collection[str] = (),
    **metadata: Any,
) -> Path:
    """Write the checkpoint in ``directory`` to ``out``, in float32 unless ``encode`` says otherwise; return the file,
    of several shards the first. ``without``: tensors that are left out. ``metadata``: further or other entries, by key
    with ``__`` in place of dots, None to leave one out."""
    config = json.loads((directory / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    options = {"split_max_tensors": 8} if shards > 1 else {}
    writer = gguf.GGUFWriter(str(out), architecture, **options)
    writer.add_name("a tiny model")
    _add_sizes(writer, config)
    _add_tokenizer(writer, directory)
    for key, value in metadata.items():
        _add(writer, key.replace("__", "."), value)
    for name, values in tensors_of(directory, config, architecture):
        if name in without:
            continue
        data, kind = encode(name, np.ascontiguousarray(values))
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(iter(sorted(out.parent.glob(f"{out.stem}-00001-of-*.gguf"))), out)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            writer.kv_data[0].pop(key)
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(config.get("norm_epsilon", config.get("layer_norm_eps")))
    writer.add_rope_dimension_count(head_dim)
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full.get("rope_theta", 10_000.0))
    if "sliding_attention" in rope:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
    if full.get("rope_type") in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
        if original := full.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(original)
    if full.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    if window := config.get("sliding_window"):
        writer.add_sliding_window(window)
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if width := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(width)
    if config["model_type"] == "cohere":
        writer.add_logit_scale(config["logit_scale"])
    if config["model_type"] == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if cap := config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(cap)
    if cap := config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(cap)


def _add_tokenizer(writer: gguf.GGUFWriter, directory: Path) -> None:
    content = json.loads((directory / "tokenizer.json").read_text())
    vocab = sorted(content["model"]["vocab"].items(), key=lambda item: item[1])
    added = {token["content"]: token["special"] for token in content["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([text for text, _ in vocab])
    writer.add_token_types([{True: 3, False: 4}.get(added.get(text), 1) for text, _ in vocab])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template((directory / "chat_template.jinja").read_text())


def tensors_of(
    directory: Path, config: dict[str, Any], architecture: str
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the tensors as the file has them, by their names there."""
    arch = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    weights = load_file(directory / "model.safetensors")
    stacks: dict[str, dict[int, np.ndarray[Any, Any]]] = {}
    for name, values in weights.items():
        for there, found in _parts(name, values.astype(np.float32), config):
            base, _, number = there.partition("#")
            written = _name(names, base)
            if number:
                stacks.setdefault(written, {})[int(number)] = found
            else:
                yield written, found
    yield from ((name, np.stack([parts[at] for at in range(len(parts))])) for name, parts in stacks.items())
    rope = config.get("rope_parameters") or {}
    for kind in ("long", "short"):
        if factors := rope.get(f"{kind}_factor"):
            yield f"rope_factors_{kind}.weight", np.array(factors, np.float32)


def _name(names: Any, name: str) -> str:
    if name.endswith("self_attn.sinks"):
        return f"blk.{name.split('.')[2]}.attn_sinks.weight"
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found, name
    return str(found)


def _parts(
    name: str, values: np.ndarray[Any, Any], config: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield (name, values) of the tensors that a weight becomes. ``#N`` after a name: expert N of a stack."""
    kind, pieces = config["model_type"], name.split(".")
    if kind in ("llama", "mistral", "mixtral", "granite", "smollm3", "arcee") and pieces[-2] in ("q_proj", "k_proj"):
        heads = config["num_attention_heads" if pieces[-2] == "q_proj" else "num_key_value_heads"]
        shape = values.shape
        values = values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    elif kind.startswith("gemma") and pieces[-2].endswith("norm"):
        values = values + 1
    if kind == "gpt_oss" and "experts" in pieces:
        last = name.rpartition("experts.")[2]
        start, bias = name.removesuffix(last), "_bias" in last
        suffix = "bias" if bias else "weight"
        if not bias:
            values = values.swapaxes(1, 2)
        if last.startswith("gate_up"):
            yield f"{start}gate_proj.{suffix}", np.ascontiguousarray(values[:, ::2])
            yield f"{start}up_proj.{suffix}", np.ascontiguousarray(values[:, 1::2])
        else:
            yield f"{start}down_proj.{suffix}", values
    elif "experts" in pieces and pieces[pieces.index("experts") + 1].isdecimal():
        at = pieces.index("experts")
        number, last = pieces[at + 1], pieces[at + 2]
        yield ".".join([*pieces[: at + 1], last, pieces[-1]]) + f"#{number}", values
    else:
        yield name, values[0] if name.endswith("shared_expert_gate.weight") else values
