"""Checkpoints are opened, fingerprinted and refused without importing torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.checkpoint.files import open_checkpoint
from common.checkpoint.hub import FIRST
from common.checkpoint.support import refuse_unsupported
from common.core.errors import StartError
from common.kv.budget import fit, human_bytes
from common.kv.layout import KvLayout, LayerLayout
from tests.pace import scaled


@pytest.fixture
def copy(tmp_path: Path, checkpoint: Callable[[str], Path]) -> Path:
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "copy"))


def reason(model: str | Path) -> str:
    with pytest.raises(StartError) as caught:
        open_checkpoint(str(model))
    error = caught.value
    assert error.what and error.why and error.todo
    return f"{error.what}\n{error.why}\n{error.todo}"


def change_config(path: Path, **fields: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def test_checkpoint_reports_architecture_and_layers(checkpoint: Callable[[str], Path]) -> None:
    found = open_checkpoint(str(checkpoint("llama")))
    assert (found.architecture, found.vocab_size, found.max_position) == ("LlamaForCausalLM", 512, 4096)
    assert found.eos_token_ids == (1,) and found.dtype == "float32" and found.name == str(checkpoint("llama"))
    assert found.kv_layers() == (LayerLayout(2, 16, 16),) * 3
    assert found.position_limit == 4096
    dynamic = open_checkpoint(str(checkpoint("llama-dynamic")))
    assert (dynamic.max_position, dynamic.position_limit) == (512, 2048)
    assert open_checkpoint(str(checkpoint("deepseek-v3"))).kv_layers() == (LayerLayout(4, 24, 12),) * 3
    assert open_checkpoint(str(checkpoint("gpt2"))).kv_layers() == (LayerLayout(4, 16, 16),) * 3


def test_fingerprint_knows_contents_not_paths(copy: Path, checkpoint: Callable[[str], Path]) -> None:
    original = open_checkpoint(str(checkpoint("llama"))).fingerprint
    assert open_checkpoint(str(copy)).fingerprint == original
    assert open_checkpoint(str(copy), revision="v2").fingerprint != original
    assert open_checkpoint(str(checkpoint("llama-untied"))).fingerprint != original
    change_config(copy, rope_theta=500.0)
    assert open_checkpoint(str(copy)).fingerprint != original


def test_fingerprint_knows_the_weights(copy: Path) -> None:
    before = open_checkpoint(str(copy)).fingerprint
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    assert open_checkpoint(str(copy)).fingerprint != before


def test_missing_things_are_named(copy: Path, tmp_path: Path) -> None:
    assert "no such directory" in reason(tmp_path / "nothing")
    assert "no such directory" in reason("./nothing/here")
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    assert "pickled" in reason(copy)
    (copy / "pytorch_model.bin").unlink()
    assert "no *.safetensors" in reason(copy)
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert "model-00001-of-00002.safetensors is missing" in reason(copy)
    (copy / "config.json").unlink()
    assert "no config.json" in reason(copy)


@pytest.mark.parametrize("damage", ["short", "header", "empty", "long"])
def test_damaged_weights_are_refused(copy: Path, damage: str) -> None:
    weights = copy / "model.safetensors"
    data = weights.read_bytes()
    damaged = {"short": data[:-10], "header": b"\xff" * 16, "empty": b"", "long": data + b"x"}[damage]
    weights.write_bytes(damaged)
    assert "damaged" in reason(copy)


def test_damaged_config_is_refused(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    assert "cannot read" in reason(copy)
    (copy / "config.json").write_text("[]")
    assert "not a JSON object" in reason(copy)
    (copy / "config.json").write_text("[" * 100_000)
    assert "recursion" in reason(copy)


@pytest.mark.parametrize(("kind", "word"), [("mamba", "recurrent state"), ("t5", "encoder-decoder")])
def test_unsupported_architectures_are_refused(kind: str, word: str, checkpoint: Callable[[str], Path]) -> None:
    assert word in reason(checkpoint(kind))


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "made_up", "architectures": ["MadeUpForCausalLM"]}, "not a decoder-only"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "not a decoder-only"),
        (
            {"model_type": "made_up", "architectures": ["Mine"], "auto_map": {"AutoModel": "x.Y"}},
            "needs Python code",
        ),
        ({"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}, "recurrent state"),
        ({}, "not a decoder-only"),
    ],
)
def test_refusals_say_why(config: dict[str, object], word: str) -> None:
    with pytest.raises(StartError) as caught:
        refuse_unsupported("it", config)
    assert word in caught.value.why


def test_code_of_a_checkpoint_is_refused_with_the_flag_that_allows_it() -> None:
    config = {"model_type": "made_up", "architectures": ["Mine"], "auto_map": {"AutoModel": "x.Y"}}
    with pytest.raises(StartError) as caught:
        refuse_unsupported("it", config)
    assert "--trust-remote-code" in caught.value.todo
    refuse_unsupported("it", config, trust_remote_code=True)


def test_an_empty_quantization_config_is_none(copy: Path) -> None:
    change_config(copy, quantization_config=None)
    assert open_checkpoint(str(copy)).architecture == "LlamaForCausalLM"


@pytest.fixture
def hub(copy: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """A hub whose only model is ``copy``; the list gets the file patterns of each download."""
    asked = list[tuple[str, ...]]()

    def snapshot_download(model: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.append(tuple(allow_patterns))
        return str(copy)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


def test_weights_of_a_refused_hub_model_are_not_downloaded(copy: Path, hub: list[tuple[str, ...]]) -> None:
    assert open_checkpoint("owner/name").path == copy
    assert hub[0] == FIRST and len(hub) == 2 and "*.safetensors" in hub[1]
    hub.clear()
    change_config(copy, quantization_config={"quant_method": "aqlm"})
    assert "AQLM" in reason("owner/name")
    assert hub == [FIRST]


def test_why_the_hub_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(model: str, **_: object) -> str:
        raise OSError("Got: ConnectError: no such host\nAn error happened while trying to locate the files")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    assert "the download from the hub failed: ConnectError: no such host\n" in reason("owner/name")


def test_a_file_is_refused_without_asking_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: list[tuple[str, ...]]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, why in (
        ("README.md", "it is a file, but no GGUF file"),
        ("model.safetensors", "it is a file, but no GGUF file"),
        ("x.gguf", "the GGUF file is damaged"),
    ):
        (tmp_path / name).write_text("")
        assert why in reason(name)
        assert why in reason(tmp_path / name)
    assert "GGUF" in reason("absent.gguf")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.gguf").touch()
    assert "GGUF" in reason("folder")
    assert not hub


def test_opening_imports_no_torch(checkpoint: Callable[[str], Path]) -> None:
    code = (
        "import sys\n"
        "from common.checkpoint.files import open_checkpoint\n"
        "from common.platform.device import choose\n"
        "from common.platform.memory import kv_budget\n"
        f"open_checkpoint({str(checkpoint('llama'))!r}); choose('auto'); kv_budget(2)\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=scaled(30))


LAYOUT = KvLayout((LayerLayout(2, 16, 16),) * 4, "float32", 16)


def test_a_pool_is_sized_in_words() -> None:
    plenty = fit(LAYOUT, 4096, None, kv_bytes=LAYOUT.block_bytes * 1000)
    assert (plenty.blocks, plenty.max_model_len) == (1000, 4096)
    cut = fit(LAYOUT, 4096, None, kv_bytes=LAYOUT.block_bytes * 10)
    assert cut.max_model_len == 160 and any("limited" in note for note in cut.notes)
    assert fit(LAYOUT, 4096, 100, kv_bytes=0, num_kv_blocks=7).max_model_len == 100
    with pytest.raises(StartError, match="too little memory") as caught:
        fit(LAYOUT, 4096, 4096, kv_bytes=LAYOUT.block_bytes * 255)
    assert "4,096 tokens need 4.0 MiB" in caught.value.why
    with pytest.raises(StartError, match="too little memory"):
        fit(LAYOUT, 4096, None, kv_bytes=100)
    with pytest.raises(StartError, match="was made for 4,096"):
        fit(LAYOUT, 4096, 5000, kv_bytes=1 << 30)
    assert fit(LAYOUT, 512, 2000, kv_bytes=1 << 30, limit=2048).max_model_len == 2000
    assert fit(LAYOUT, 512, 32, kv_bytes=1 << 30).max_model_len == 32
    with pytest.raises(StartError, match="cannot serve 31 tokens") as caught:
        fit(LAYOUT, 512, 31, kv_bytes=1 << 30)
    assert caught.value.todo == "use --max-model-len 32 or more"
    with pytest.raises(StartError, match="the model was made for 8"):
        fit(LAYOUT, 8, None, kv_bytes=1 << 30)


def test_bytes_are_readable() -> None:
    assert [human_bytes(n) for n in (5, 2048, 3 << 20, 5 << 29)] == ["5 bytes", "2.0 KiB", "3.0 MiB", "2.5 GiB"]
