"""What cannot be served is refused for the true reason, and the refusal says what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from common.checkpoint.files import open_checkpoint
from common.checkpoint.formats import SAFETENSORS, read_format
from common.checkpoint.support import architecture_of, refuse_unsupported
from common.core.errors import StartError
from tests.checkpoints.makers import bytes_tokenizer, safetensors_of, write
from tests.e2e.system import tandem


def refusal(model: str | Path) -> str:
    with pytest.raises(StartError) as caught:
        open_checkpoint(str(model))
    assert caught.value.what and caught.value.why and caught.value.todo
    return f"{caught.value.why}\n{caught.value.todo}"


def quantized(**settings: Any) -> dict[str, Any]:
    return {"quantization_config": settings}


PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
DESCRIBED: list[tuple[dict[str, Any], str, str]] = [
    # (configuration, method, description)
    (quantized(quant_method="gptq", bits=4, group_size=128), "gptq", "GPTQ 4-bit, groups of 128"),
    (quantized(quant_method="gptq", bits=8, group_size=-1, desc_act=True), "gptq", "GPTQ 8-bit, one group per row"),
    (quantized(quant_method="awq", bits=4, group_size=64, version="gemm"), "awq", "AWQ 4-bit, groups of 64"),
    (quantized(quant_method="fp8", weight_block_size=[128, 128]), "fp8", "fp8, blocks of 128×128"),
    (quantized(quant_method="fp8", activation_scheme="static"), "fp8", "fp8, scales per tensor"),
    (quantized(quant_method="fbgemm_fp8"), "fbgemm_fp8", "fp8, scales per row"),
    (quantized(quant_method="mxfp4"), "mxfp4", "MXFP4"),
    (
        quantized(quant_method="compressed-tensors", config_groups={"group_0": {"weights": PACKED}}),
        "compressed-tensors",
        "compressed-tensors 4-bit integer, groups of 128",
    ),
    (
        {"compression_config": {"config_groups": {"a": {"weights": {"num_bits": 8, "type": "float"}}}}},
        "compressed-tensors",
        "compressed-tensors 8-bit float",
    ),
    ({"text_config": quantized(quant_method="gptq", bits=4)}, "gptq", "GPTQ 4-bit"),
]


@pytest.mark.parametrize(("fields", "method", "shown"), DESCRIBED)
def test_formats_are_described(fields: dict[str, Any], method: str, shown: str) -> None:
    found = read_format(fields)
    assert found.method == method and found.shown.startswith(shown)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (quantized(quant_method="bitsandbytes", load_in_4bit=True), "bitsandbytes: only its own CUDA kernels"),
        (quantized(quant_method="aqlm"), "AQLM"),
        (quantized(quant_method="hqq"), "HQQ"),
        (quantized(quant_method="torchao"), "torchao"),
        (quantized(quant_method="modelopt", quant_algo="NVFP4"), "NVFP4"),
        (quantized(quant_method="brand_new"), "brand_new"),
        (quantized(bits=4), "an unnamed method"),
        (quantized(quant_method="gptq", checkpoint_format="marlin"), "GPTQ, repacked for Marlin"),
        (quantized(quant_method="awq", version="gemv"), "AWQ gemv"),
        (quantized(quant_method="compressed-tensors", format="nvfp4-pack-quantized"), "compressed-tensors, NVFP4"),
        (quantized(quant_method="compressed-tensors", config_groups={"W4A16": ["Linear"]}), "the preset scheme W4A16"),
        (
            quantized(quant_method="compressed-tensors", config_groups={"group_0": {"targets": ["re:("]}}),
            "the target re:(",
        ),
        (quantized(quant_method="fp8", weight_block_size=[32]), "fp8 in blocks of [32]"),
        (quantized(quant_method="gptq", bits="four"), "GPTQ with bits 'four'"),
        (quantized(quant_method="awq", bits=4, group_size=[128]), "AWQ with group_size [128]"),
        (quantized(quant_method="compressed-tensors", config_groups=[1]), "the groups [1]"),
        (quantized(quant_method="compressed-tensors", config_groups={"a": {"weights": "W4A16"}}), "the group a"),
        (quantized(quant_method="compressed-tensors", config_groups={"a": {"targets": "Linear"}}), "the group a"),
        (
            quantized(quant_method="compressed-tensors", config_groups={"a": {"weights": {"group_size": "x"}}}),
            "group_size 'x'",
        ),
    ],
)
def test_formats_that_are_not_read(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    said = refusal(write(tmp_path, {"config.json": fields}, {}))
    assert words in said and "not serve yet" not in said and "unquantized" in said


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"transform_config": {"config_groups": {"R4": {}}}}, "rotations"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "2:4 sparse"),
    ],
)
def test_what_comes_on_top_of_a_format(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    groups = {"config_groups": {"group_0": {"weights": PACKED}}}
    assert words in refusal(write(tmp_path, {"config.json": quantized(**groups, **fields)}, {}))


def test_quantization_that_another_file_describes(tmp_path: Path) -> None:
    modelopt = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    assert "ModelOpt" in refusal(write(tmp_path / "fp8", {"hf_quant_config.json": modelopt}))
    gptq = write(tmp_path / "gptq", {"quantize_config.json": {"bits": 4, "group_size": 128, "desc_act": False}})
    assert open_checkpoint(str(gptq)).format.shown.startswith("GPTQ 4-bit, groups of 128")
    awq = write(tmp_path / "awq", {"quant_config.json": {"w_bit": 4, "q_group_size": 64, "version": "GEMM"}})
    assert open_checkpoint(str(awq)).format.shown.startswith("AWQ 4-bit, groups of 64")


def test_codes_that_no_file_describes_are_refused(tmp_path: Path) -> None:
    """Their scales would be ignored, and the answers nonsense."""
    path = write(tmp_path, {}, {})
    entry = {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4]}
    header = json.dumps({"model.layers.0.mlp.up_proj.weight": entry}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert "up_proj.weight is F8_E4M3" in refusal(path)


WHOLE = [
    quantized(quant_method="gptq", bits=4, group_size=128),
    quantized(quant_method="awq", bits=4, group_size=128),
    quantized(quant_method="fp8"),
    quantized(quant_method="compressed-tensors", config_groups={"group_0": {"weights": PACKED}}),
]


@pytest.mark.parametrize("fields", WHOLE)
def test_whole_weights_that_the_configuration_calls_quantized(fields: dict[str, Any], tmp_path: Path) -> None:
    """They were served unquantized without a word; vLLM fails to load them."""
    path, name = write(tmp_path, {"config.json": fields}, {}), "model.layers.0.mlp.up_proj.weight"
    (path / "model.safetensors").write_bytes(safetensors_of(name))
    said = refusal(path)
    assert f"all are whole ({name} is F32)" in said and "remove quantization_config from config.json" in said


def test_whole_weights_with_scales_of_the_kv_cache_alone(tmp_path: Path) -> None:
    fields = quantized(quant_method="compressed-tensors", config_groups={}, kv_cache_scheme={"num_bits": 8})
    path = write(tmp_path, {"config.json": fields}, {})
    (path / "model.safetensors").write_bytes(safetensors_of("model.layers.0.mlp.up_proj.weight"))
    assert open_checkpoint(str(path)).format.shown == "compressed-tensors without quantized weights"


def test_no_quantization_is_safetensors() -> None:
    assert read_format({"quantization_config": None}) is SAFETENSORS
    assert read_format({"text_config": {"vocab_size": 3}}) is SAFETENSORS


@pytest.mark.parametrize("kind", ["falcon", "gptj", "bloom", "mpt", "codegen", "gpt_neo"])
def test_models_with_attention_of_their_own_are_refused_for_it(kind: str, tmp_path: Path) -> None:
    """Loading them failed with ``KeyError: 'tandem_paged'``."""
    config = {"model_type": kind, "architectures": None}
    assert "attention function of its own" in refusal(write(tmp_path, {"config.json": config}))


@pytest.mark.parametrize("code", [{}, {"auto_map": {"AutoModelForCausalLM": "modeling.X"}}])
@pytest.mark.parametrize(("kind", "name"), [("mpt", "MPTForCausalLM"), ("RefinedWebModel", "RWForCausalLM")])
def test_published_names_of_these_models(kind: str, name: str, code: dict[str, Any], tmp_path: Path) -> None:
    """Their own code has no paged attention either, so it is not asked for."""
    said = refusal(write(tmp_path, {"config.json": {"model_type": kind, "architectures": [name], **code}}))
    assert "attention function of its own" in said and "--trust-remote-code" not in said


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("qwen2_vl", "Qwen2VLForConditionalGeneration", "reads images, which is not served yet"),
        ("llama4", "Llama4ForConditionalGeneration", "reads images, which is not served yet"),
        ("t5", "T5ForConditionalGeneration", "is an encoder-decoder model"),
        ("bert", "BertForMaskedLM", "is not a decoder-only language model"),
    ],
)
def test_models_of_another_kind_are_refused_for_it(kind: str, name: str, words: str, tmp_path: Path) -> None:
    assert words in refusal(write(tmp_path, {"config.json": {"model_type": kind, "architectures": [name]}}))


@pytest.mark.parametrize("file", ["consolidated.safetensors", "model.fp16.safetensors"])
def test_weights_in_another_layout_are_named(file: str, tmp_path: Path) -> None:
    assert file in refusal(write(tmp_path, {}, {file: 0}))


def test_an_adapter_as_peft_publishes_it_is_named(tmp_path: Path) -> None:
    adapter = {"base_model_name_or_path": "meta/base"}
    files = {"config.json": None, "adapter_config.json": adapter}
    said = refusal(write(tmp_path, files, {"adapter_model.safetensors": 0}))
    assert "adapter for meta/base" in said and "merge" in said


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, {}, {})
    (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    assert "git-lfs" in refusal(path)


@pytest.mark.parametrize("address", ["https://huggingface.co/owner/name", "hf.co/owner/name:Q4_0"])
def test_an_address_of_the_hub_is_no_id(address: str) -> None:
    assert "give the id: owner/name" in refusal(address)


def test_the_folder_of_a_repository_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    write(tmp_path / "snapshots" / "abc", {})
    assert str(tmp_path / "snapshots" / "abc") in refusal(tmp_path)


def test_a_lone_shard_is_not_whole(tmp_path: Path) -> None:
    said = refusal(write(tmp_path, {}, {"model-00001-of-00002.safetensors": 0}))
    assert "model-00002-of-00002.safetensors" in said


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vocab_size": "many"}, "its vocab_size is 'many'"),
        ({"num_attention_heads": 0}, "its num_attention_heads is 0"),
        ({"max_position_embeddings": -1}, "its max_position_embeddings is -1"),
        ({"max_position_embeddings": 1e30}, "its max_position_embeddings is 1e+30"),
        ({"num_hidden_layers": [2, "3"]}, "its num_hidden_layers is [2, '3']"),
        ({"num_hidden_layers": int("9" * 400)}, "its num_hidden_layers is a number of more than 40 digits"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "its rope_scaling.factor is inf"),
        ({"rope_scaling": {"type": "linear", "factor": int("9" * 400)}}, "its rope_scaling.factor is a number"),
        ({"rope_parameters": {"full_attention": {"factor": "2"}}}, "its rope_parameters.full_attention.factor is '2'"),
        ({"rope_scaling": "linear"}, "its rope_scaling is 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.0}}, "its rope_scaling.factor is 0.0, not above 0"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "of the type 'spiral', which transformers lacks"),
        ({"text_config": [1]}, "its text_config is [1]"),
        ({"text_config": {"head_dim": 1.5}}, "its head_dim is 1.5"),
        ({"head_dim": [None]}, "its head_dim is [None]"),
        ({"vocab_size": [300]}, "its vocab_size is [300]"),
        ({"model_type": ["llama"]}, "its model_type is ['llama'], not a text"),
        ({"layer_types": 3}, "its layer_types is 3, not a list"),
        ({"model_type": None}, "no model_type"),
    ],
)
def test_a_size_that_is_none_is_named_with_its_value(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refusal(write(tmp_path, {"config.json": fields}))


@pytest.mark.parametrize("added", [7, {"a": 1}])
def test_a_tokenizer_whose_added_tokens_are_no_list(added: Any, tmp_path: Path) -> None:
    content = json.loads(bytes_tokenizer("<a>").to_str()) | {"added_tokens": added}
    files = {"tokenizer.json": content, "added_tokens.json": {"<b>": 257}}
    assert refusal(write(tmp_path, files))


def test_a_header_without_types_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path, {}, {})
    header = b'{"t": {"shape": [1], "data_offsets": [0, 4]}}'
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert "damaged" in refusal(path)


@pytest.mark.parametrize("model", ["x" * 5000, "a\0b"])
def test_an_argument_that_is_no_path_is_refused(model: str) -> None:
    assert "hub id" in refusal(model)


@pytest.mark.parametrize("size", [None, "absent"])
def test_sizes_that_are_left_out_are_those_of_the_class(size: str | None, tmp_path: Path) -> None:
    """As in the published configuration of gemma-3-4b-it."""
    text: dict[str, Any] = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    config: dict[str, Any] = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
    }
    if size is None:
        config["text_config"] = text | {"vocab_size": None}
    path = write(tmp_path, {})
    (path / "config.json").write_text(json.dumps(config))
    found = open_checkpoint(str(path))
    theirs = AutoConfig.for_model(**text)
    assert found.vocab_size == theirs.vocab_size and found.max_position == theirs.max_position_embeddings
    layers = found.kv_layers()
    assert layers is not None and len(layers) == 34
    assert (layers[0].kv_heads, layers[0].k_dim) == (theirs.num_key_value_heads, theirs.head_dim)


def test_a_vocabulary_of_no_known_size_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, {"config.json": {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "m.X"}}})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "vocab_size"}))
    with pytest.raises(StartError, match="vocab_size"):
        _ = open_checkpoint(str(path), trust_remote_code=True).vocab_size


@pytest.mark.parametrize("kind", ["mamba2", "falcon_mamba", "jamba", "qwen3_next", "minimax", "lfm2", "zamba2"])
def test_models_with_a_state_are_refused_for_it(kind: str, tmp_path: Path) -> None:
    config = {"model_type": kind, "architectures": None}
    assert "recurrent state" in refusal(write(tmp_path, {"config.json": config}))


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("minimax_m2", "MiniMaxM2ForCausalLM"),
        ("llama", "LlamaForCausalLM"),
        ("qwen3_moe", "Qwen3MoeForCausalLM"),
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("gpt_oss", "GptOssForCausalLM"),
    ],
)
def test_models_are_known_by_their_type_alone(kind: str, architecture: str, tmp_path: Path) -> None:
    """A name that begins as one with a state does is no state, and ``architectures`` may be missing."""
    config = {"model_type": kind, "architectures": None}
    assert architecture_of(config) == architecture
    assert open_checkpoint(str(write(tmp_path, {"config.json": config}))).architecture == architecture
    refuse_unsupported("it", {"model_type": kind})


def test_a_gguf_file_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    for model in (tmp_path / "model.Q4_K_M.gguf", tmp_path, "absent.gguf"):
        assert "GGUF" in refusal(model)


@pytest.mark.e2e
def test_the_command_prints_the_reason_and_no_traceback(tmp_path: Path) -> None:
    fields = quantized(quant_method="bitsandbytes", load_in_4bit=True)
    done = tandem("up", write(tmp_path, {"config.json": fields}, {}))
    said = done.stdout + done.stderr
    assert done.returncode and "bitsandbytes" in said and "Traceback" not in said


@pytest.mark.e2e
def test_a_model_without_architectures_is_loaded(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    from common.engine.loading import load_engine

    path = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    text = (path / "config.json").read_text()
    assert '"architectures"' in text
    (path / "config.json").write_text(text.replace('"architectures"', '"unknown"'))
    engine = load_engine(
        open_checkpoint(str(path)), dtype="float32", num_kv_blocks=20, max_batched_tokens=64, max_num_seqs=2,
        max_model_len=64, batch_hint=1,
    )  # fmt: skip
    engine.close()
    assert engine.vocab_size == 512
