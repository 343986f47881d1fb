"""A GGUF file has the configuration, the weights and the text of the checkpoint from which it was written."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.checkpoint import hub
from common.checkpoint.files import open_checkpoint
from common.checkpoint.gguf import GgufModel, open_gguf, shards_of
from common.checkpoint.gguf_names import head_order, targets
from common.checkpoint.gguf_rope import rope_parameters
from common.checkpoint.preview import preview
from common.config.up import UpConfig
from common.core.errors import StartError
from coordinator.text.tokenizer import TextModel
from tests import models
from tests.checkpoints.gguf_maker import gguf_of
from tests.models import CHAT_TEMPLATE, make_model

KINDS = ("llama", "llama-untied", "mixtral", "qwen3", "qwen3-moe", "gemma2", "phi3", "phi3-longrope", "gpt-oss")


@pytest.fixture(autouse=True)
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))


def weights_of(model: GgufModel, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the float32 weights of a file under transformers' names, by the targets."""
    found = dict[str, torch.Tensor]()
    halves = dict[str, dict[str, torch.Tensor]]()
    for name, target in targets(model).items():
        tensor = model.tensors[name]
        values = torch.from_numpy(np.array(tensor.data).view(np.float32).reshape(tensor.shape).copy())
        if target.rows in ("query", "key"):
            heads = config["num_attention_heads" if target.rows == "query" else "num_key_value_heads"]
            values = values[head_order(heads, config["head_dim"])]
        values = values - 1 if target.minus_one else values
        values = values[None] if target.unsqueeze else values
        if target.rows in ("gate", "up"):
            halves.setdefault(target.name, {})[target.rows] = values
        elif target.stacked and config["model_type"] == "gpt_oss":
            halves[target.name] = {"": values}
        elif target.stacked:
            found |= {target.name.format(at): each for at, each in enumerate(values)}
        else:
            found[target.name] = values
    for name, parts in halves.items():  # gpt-oss stores its experts in one tensor, gate and up in turn
        whole = parts[""] if "" in parts else torch.stack([parts["gate"], parts["up"]], 2).flatten(1, 2)
        bias = name.endswith(".bias")
        there = name.replace(".{}", "").replace("_proj.weight", "_proj").replace("_proj.bias", "_proj_bias")
        found[there] = whole if bias else whole.transpose(1, 2).contiguous()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_configuration_and_weights_make_the_same_model(
    kind: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    original = checkpoint(kind)
    file = gguf_of(original, tmp_path / "model.gguf")
    opened = open_checkpoint(str(file))
    config = AutoConfig.from_pretrained(opened.path)
    state = weights_of(open_gguf([file]), opened.config)
    model, info = type(AutoModelForCausalLM.from_config(config)).from_pretrained(
        None, config=config, state_dict=state, output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    expected = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    tokens = torch.arange(20, 120)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, expected(tokens).logits, rtol=1e-4, atol=1e-4)
    theirs = open_checkpoint(str(original))
    assert opened.kv_layers() == theirs.kv_layers() and opened.max_position == theirs.max_position
    assert opened.vocab_size == theirs.vocab_size and opened.dtype == "float32"


GRANITE = {"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 96,
    "decoder_sparse_step": 1,
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2moe": ("qwen2_moe", MOE),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "granite": ("granite", GRANITE),
    "granite-biases": ("granite", GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "olmo2": ("olmo2", {}),
    "arcee": ("arcee", {}),
    "starcoder2": ("starcoder2", {"use_bias": True, "sliding_window": None}),
    "command-r": ("cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_architectures_make_the_same_model(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, fields = OTHERS[kind]
    monkeypatch.setitem(models.KINDS, kind, (model_type, models.KINDS["llama-untied"][1] | fields))
    original = make_model(kind, tmp_path / "model")
    test_configuration_and_weights_make_the_same_model(kind, lambda _: original, tmp_path)


def test_gemma_3_has_a_base_of_its_own_for_windows(tmp_path: Path) -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    layers = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"]
    original = make_model("gemma3", tmp_path / "model", num_hidden_layers=7, layer_types=layers, rope_parameters=rope)
    test_configuration_and_weights_make_the_same_model("", lambda _: original, tmp_path)


@pytest.mark.parametrize("scaling", ["yarn", "linear", "llama3"])
def test_rope_scaling_is_read(scaling: str, tmp_path: Path) -> None:
    rope = {"rope_type": scaling, "factor": 4.0, "rope_theta": 10_000.0}
    if scaling != "linear":
        rope["original_max_position_embeddings"] = 2048
    if scaling == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    original = make_model("llama", tmp_path / "model", rope_parameters=rope)
    if scaling != "llama3":
        test_configuration_and_weights_make_the_same_model("", lambda _: original, tmp_path)
        return
    file = gguf_of(original, tmp_path / "model.gguf")
    found = open_gguf([file])
    frequencies = 10_000.0 ** (-np.arange(0, 16, 2) / 16)
    lengths = 2 * np.pi / frequencies
    factors = np.where(lengths > 2048, 4.0, 1.0)  # by the definition in Llama's own code
    between = (lengths >= 512) & (lengths <= 2048)
    smooth = (2048 / lengths - 1) / 3
    factors[between] = (1 / ((1 - smooth) / 4 + smooth))[between]
    tensor = tmp_path / "factors"
    tensor.write_bytes(factors.astype(np.float32).tobytes())
    place = type(next(iter(found.tensors.values())))("rope_freqs.weight", 0, (8,), tensor, 0, 32)
    with_factors = GgufModel("llama", found.metadata, {**found.tensors, place.name: place}, found.files, b"")
    assert rope_parameters(with_factors, 16) == rope
    tensor.write_bytes((factors + np.eye(8)[2] / 2).astype(np.float32).tobytes())
    with pytest.raises(StartError, match="factors"):
        rope_parameters(with_factors, 16)


def test_text_is_that_of_the_original(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    original = checkpoint("llama")
    template = "{% for m in messages %}<|system|>{{ m.content }}{% endfor %}"
    file = gguf_of(original, tmp_path / "a-Q4_0.gguf", tokenizer__ggml__eot_token_id=7)
    opened = open_checkpoint(str(file))
    mine, theirs = (TextModel(path, vocab_size=512) for path in (opened.path, original))
    assert (opened.path / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    for text in ("Hello  world 123", "<|user|>你好<|end|> x\n\n", " naïve 🙂 "):
        assert mine.encode(text) == theirs.encode(text)
        assert mine.decode(mine.encode(text)) == theirs.decode(theirs.encode(text))
    assert opened.eos_token_ids == (1, 7) and "(7, GGUF)" in opened.remarks()[0]
    assert opened.source == file and opened.format.method == "gguf" and opened.model_directory == opened.path
    named = gguf_of(
        original, tmp_path / "named.gguf",
        tokenizer__chat_templates=["tool_use"], tokenizer__chat_template__tool_use=template,
    )  # fmt: skip
    path = open_checkpoint(str(named)).path
    assert (path / "additional_chat_templates" / "tool_use.jinja").read_text() == template


def test_the_fingerprint_is_of_content(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    file = gguf_of(checkpoint("llama"), tmp_path / "a.gguf")
    first = open_checkpoint(str(file))
    copy = shutil.copy(file, tmp_path / "b.gguf")
    assert open_checkpoint(str(copy)).fingerprint == first.fingerprint
    assert open_checkpoint(str(copy)).path == first.path
    assert first.weight_bytes == file.stat().st_size
    original = open_checkpoint(str(checkpoint("llama")))
    assert original.bytes_in("bfloat16") == original.weight_bytes // 2
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert open_checkpoint(str(file)).fingerprint != first.fingerprint


def test_a_gguf_file_is_known_by_its_first_bytes(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Caches name files by their hash, without a suffix."""
    path = gguf_of(checkpoint("llama"), tmp_path / "model.gguf")
    named = open_checkpoint(str(path))
    size, renamed = named.weight_bytes, path.rename(tmp_path / "sha256-0123")
    found = open_checkpoint(str(renamed))
    assert found.fingerprint == named.fingerprint and found.format == named.format
    assert preview(str(renamed)).weight_bytes == size


def test_shards_are_one_model(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    first = gguf_of(checkpoint("llama"), tmp_path / "model.gguf", shards=2)
    opened = open_checkpoint(str(first))
    assert len(opened.weight_files) > 1 and len(open_gguf(shards_of(first)).tensors) > 8
    assert open_checkpoint(str(opened.weight_files[1])).weight_files == opened.weight_files
    assert open_checkpoint(str(tmp_path)).weight_files == opened.weight_files  # a directory with only GGUF
    opened.weight_files[1].rename(tmp_path / "away")
    with pytest.raises(StartError, match="shard") as caught:
        open_checkpoint(str(first))
    assert opened.weight_files[1].name in caught.value.why


def raw(*, version: int = 3, tensors: int = 0, keys: bytes = b"", count: int = 0, table: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + keys + table


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(name: str, *dims: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")
CRAFTED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "no magic": (b"XXXX" + bytes(100), "magic"),
    "version 1": (raw(version=1) + bytes(64), "version 1, and only"),
    "version 4": (raw(version=4) + bytes(64), "version 4, and only"),
    "a pointer of git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer of git-lfs"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "other byte order"),
    "cut in the header": (raw(count=3), "ends"),
    "2^60 keys": (raw(count=1 << 60, keys=ARCHITECTURE), "ends"),
    "2^60 tensors": (raw(count=1, keys=ARCHITECTURE, tensors=1 << 60), "ends"),
    "a long string": (raw(count=1, keys=struct.pack("<Q", 1 << 62)), "ends"),
    "2^60 strings": (raw(count=1, keys=text("x") + struct.pack("<IIQ", 9, 8, 1 << 60)), "ends"),
    "2^60 numbers": (raw(count=1, keys=text("x") + struct.pack("<IIQ", 9, 6, 1 << 60)), "ends"),
    "arrays of arrays": (raw(count=1, keys=text("x") + struct.pack("<IIQ", 9, 9, 1)), "arrays of arrays"),
    "a type of its own": (raw(count=1, keys=text("x") + struct.pack("<I", 77)), "77"),
    "the same key twice": (raw(count=2, keys=ARCHITECTURE * 2), "Duplicate"),
    "a tensor beyond the end": (raw(count=1, keys=ARCHITECTURE, tensors=1, table=entry("a", 32, 1 << 40)), "ends"),
    "2^40 dimensions": (raw(count=1, keys=ARCHITECTURE, tensors=1, table=entry("a", *[1] * 9)), "dimensions"),
    "no whole blocks": (raw(count=1, keys=ARCHITECTURE, tensors=1, table=entry("a", 33, kind=2)), "blocks"),
    "an unknown tensor type": (raw(count=1, keys=ARCHITECTURE, tensors=1, table=entry("a", 32, kind=99)), "99"),
    "no tensors": (raw(count=1, keys=ARCHITECTURE) + bytes(64), "no tensors"),
    "no architecture": (raw(tensors=1, table=entry("a", 1)) + bytes(64), "no architecture"),
    "the same tensor twice": (
        raw(count=1, keys=ARCHITECTURE, tensors=2, table=entry("a", 1) * 2) + bytes(128), "twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CRAFTED)
def test_damaged_files_are_refused_in_words(case: str, tmp_path: Path) -> None:
    content, words = CRAFTED[case]
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    with pytest.raises(StartError) as caught:
        open_checkpoint(str(file))
    assert words in caught.value.why, caught.value.why


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut_is_refused(cut: float, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    file = gguf_of(checkpoint("llama"), tmp_path / "x.gguf")
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * cut)])
    with pytest.raises(StartError, match="GGUF"):
        open_checkpoint(str(file))


@pytest.mark.parametrize(
    ("architecture", "words"),
    [("mamba", "recurrent state"), ("t5", "decoder-only"), ("deepseek2", "latent"), ("new-one", "not one of arcee")],
)
def test_architectures_that_are_not_served(architecture: str, words: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), architecture)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(StartError) as caught:
        open_checkpoint(str(tmp_path / "x.gguf"))
    assert words in caught.value.why


def test_a_tensor_without_a_place_is_an_error(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    file = gguf_of(checkpoint("llama"), tmp_path / "x.gguf")
    data = file.read_bytes()
    file.write_bytes(data.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"))
    with pytest.raises(StartError) as caught:
        open_checkpoint(str(file))
    assert "blk.1.attn_x.weight" in caught.value.why


NAMES = (
    *("m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf", "m.F16.gguf", "mmproj-Q4_K_M.gguf", "m-IQ2_XS.gguf"),
    *("big/m-Q6_K-00001-of-00002.gguf", "big/m-Q6_K-00002-of-00002.gguf"),
)


@pytest.mark.parametrize(
    ("tag", "chosen"),
    [
        ("", "m-Q4_K_M.gguf"), ("Q8_0", "m-Q8_0.gguf"), ("q4_k_s", "m-Q4_K_S.gguf"), ("f16", "m.F16.gguf"),
        ("Q6_K", "big/m-Q6_K-00001-of-00002.gguf"), ("IQ2", "m-IQ2_XS.gguf"), ("Q5_K_M", ""),
        ("16", ""), ("m.f16", "m.F16.gguf"), ("4_K", ""),
    ],
)  # fmt: skip
def test_the_tag_chooses_the_file(tag: str, chosen: str) -> None:
    assert hub.choose_gguf(NAMES, tag)[0] == chosen
    if not chosen:
        assert "m-Q8_0.gguf" in hub.no_such_gguf("owner/name", tag, NAMES).why


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("m.Q4_0.gguf", "m.Q4_0"), ("/a.b/Model-Q8_0-00001-of-00003.GGUF", "Model-Q8_0"),
        ("owner/name:Q4_K_M", "owner/name:Q4_K_M"), ("owner/name-gguf", "owner/name-gguf"),
    ],
)  # fmt: skip
def test_a_file_is_served_under_its_name(model: str, name: str) -> None:
    assert UpConfig(model=model).served_name == name
    assert UpConfig(model=model, served_model_name="x").served_name == "x"


def test_without_a_tag_the_smallest_of_at_least_4_bits() -> None:
    assert hub.choose_gguf(("a-Q2_K.gguf", "a-Q8_0.gguf", "a-Q5_K_M.gguf"), "")[0] == "a-Q5_K_M.gguf"
    assert hub.choose_gguf(("a-imatrix.gguf", "mmproj-Q4_0.gguf", "only.gguf"), "") == ("only.gguf", "")
    assert hub.choose_gguf((), "") == ("", "")


def test_a_repository_of_gguf_files(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    gguf_of(checkpoint("llama"), repository / "m-Q4_K_M.gguf")
    shutil.copy(repository / "m-Q4_K_M.gguf", repository / "m-Q8_0.gguf")
    asked = list[Any]()
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda *_, **__: [f.name for f in repository.iterdir()])
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda _, allow_patterns, **__: asked.append(allow_patterns) or str(repository),
    )
    opened = open_checkpoint("owner/name")
    assert opened.source == repository / "m-Q4_K_M.gguf" and asked[-1] == ["m-Q4_K_M.gguf"]
    assert "m-Q4_K_M.gguf was chosen of 2 files" in opened.notes
    assert open_checkpoint("owner/name:q8_0").source == repository / "m-Q8_0.gguf"
    with pytest.raises(StartError, match="Q3"):
        open_checkpoint("owner/name:Q3_K")


def test_a_vocabulary_is_read_at_once(tmp_path: Path) -> None:
    """The gguf package alone makes a million objects of these arrays."""
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_token_list([f"t{at}" for at in range(50_000)])
    writer.add_token_scores([float(at) for at in range(50_000)])
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_gguf([tmp_path / "x.gguf"])
    tokens, scores = (found.metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores"))
    assert type(tokens) is list and tokens[-1] == "t49999" and scores[-1] == 49_999.0
    assert json.dumps(scores[:2]) == "[0.0, 1.0]"
