"""``tandem inspect`` of GGUF files and of hub repositories, of which no weights are downloaded."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from common.builtin import path
from common.checkpoint import hub
from common.checkpoint import preview as previews
from common.checkpoint.files import open_checkpoint
from common.checkpoint.preview import Preview, preview
from common.checkpoint.sizes import EXPANDED_BITS, GGUF_BITS
from common.core.errors import StartError
from common.quantization.gguf_blocks import READERS, size_of, weight_of
from deploy.launcher.inspection import inspect
from tests.checkpoints.gguf_maker import gguf_of
from tests.checkpoints.quantized_maker import gptq, quantized_hub
from tests.e2e.system import tandem
from tests.fakes.hub import MODEL, FakeHub
from tests.models import make_model


class Hub:
    """A repository with the files of a directory. ``fetched`` counts the bytes read of each file that was opened."""

    def __init__(self, published: Path, local: Path) -> None:
        self.published, self.local, self.fetched = published, local, dict[str, int]()

    def download(self, model: str, revision: str | None, patterns: tuple[str, ...], out: tuple[str, ...] = ()) -> Path:
        assert model == MODEL
        self.local.mkdir(exist_ok=True)
        for file in self.published.iterdir():
            wanted = any(fnmatch(file.name, each) for each in patterns)
            if wanted and not any(fnmatch(file.name, each) for each in out):
                assert file.suffix not in (".safetensors", ".gguf"), "weights are downloaded"
                shutil.copyfile(file, self.local / file.name)
        return self.local

    @contextlib.contextmanager
    def open(self, model: str, revision: str | None, name: str) -> Iterator[tuple[BinaryIO, int]]:
        file = self.published / name
        with file.open("rb") as opened:
            yield opened, file.stat().st_size
            self.fetched[name] = opened.tell()


@pytest.fixture
def hub_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Hub]:
    def make(published: Path) -> Hub:
        made = Hub(published, tmp_path / "snapshot")
        monkeypatch.setattr(hub, "_download", made.download)
        monkeypatch.setattr(hub, "open_remote", made.open)
        monkeypatch.setattr("huggingface_hub.list_repo_files", lambda *_, **__: [f.name for f in published.iterdir()])
        monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
        return made

    return make


def parameters_of(directory: Path) -> int:
    total = 0
    with safe_open(directory / "model.safetensors", "numpy") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            total += file.get_tensor(name).size
    return total


def same(found: Preview, other: Preview) -> None:
    one, two = inspect(found), inspect(other)
    assert one.parameters == two.parameters and one.kv_bytes_per_token == two.kv_bytes_per_token
    assert one.memory == two.memory and one.tensors == two.tensors and one.end_tokens == two.end_tokens


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "gemma3", "gpt-oss"])
def test_a_repository(kind: str, checkpoint: Callable[[str], Path], hub_of: Callable[[Path], Hub]) -> None:
    published = checkpoint(kind)
    remote = hub_of(published)
    found = preview(MODEL)
    assert not found.local and not found.checkpoint.weight_files and found.checkpoint.name == MODEL
    assert inspect(found).parameters == parameters_of(published)
    assert 0 < remote.fetched["model.safetensors"] < (published / "model.safetensors").stat().st_size // 10
    same(found, preview(str(published)))


def test_a_repository_that_was_downloaded(checkpoint: Callable[[str], Path], hub_of: Callable[[Path], Hub]) -> None:
    remote = hub_of(checkpoint("llama"))
    remote.local.mkdir()
    shutil.copy(checkpoint("llama") / "model.safetensors", remote.local)
    found = preview(MODEL)
    assert found.local and found.checkpoint.fingerprint and not remote.fetched


def test_a_repository_that_is_not_served_is_refused_first(
    checkpoint: Callable[[str], Path], hub_of: Callable[[Path], Hub]
) -> None:
    remote = hub_of(checkpoint("mamba"))
    with pytest.raises(StartError, match="recurrent state"):
        preview(MODEL)
    assert not remote.fetched and not (remote.local / "tokenizer.json").exists()


def test_a_repository_without_weights(
    checkpoint: Callable[[str], Path], hub_of: Callable[[Path], Hub], tmp_path: Path
) -> None:
    published = tmp_path / "published"
    shutil.copytree(checkpoint("llama"), published, ignore=shutil.ignore_patterns("*.safetensors"))
    hub_of(published)
    with pytest.raises(StartError, match="no safetensors weights"):
        preview(MODEL)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("first_bytes", [1 << 20, 512])
def test_a_gguf_file_of_a_repository(
    shards: int, first_bytes: int, checkpoint: Callable[[str], Path], hub_of: Callable[[Path], Hub], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The header is read whatever its length, and nothing behind it but what the first bytes have."""
    monkeypatch.setattr(previews, "_FIRST_BYTES", first_bytes)
    published = tmp_path / "published"
    published.mkdir()
    file = gguf_of(checkpoint("llama"), published / "tiny-F32.gguf", shards=shards)
    remote = hub_of(published)
    found = preview(f"{MODEL}:F32")
    assert not found.local and found.checkpoint.format.container == "gguf" and len(remote.fetched) >= shards
    assert inspect(found).parameters == parameters_of(checkpoint("llama"))
    if first_bytes == 512:
        assert all(count < (published / name).stat().st_size for name, count in remote.fetched.items())
    same(found, preview(str(file)))
    assert found.weight_bytes == sum(each.stat().st_size for each in published.iterdir())


@pytest.mark.parametrize("kind", [*READERS, "IQ3_S"])
def test_bytes_in_memory_are_those_of_the_weights(kind: str) -> None:
    data = torch.randint(0, 60, (size_of(Type[kind], (64, 512)),), dtype=torch.uint8)
    weight = weight_of(Type[kind], data, (64, 512))
    assert weight.nbytes * 8 / (64 * 512) == pytest.approx(GGUF_BITS.get(kind, EXPANDED_BITS), rel=0.02)


@pytest.mark.parametrize("bits", [2, 4])
def test_the_memory_is_that_of_a_worker(bits: int, hub_of: Callable[[Path], Hub], tmp_path: Path) -> None:
    """Codes of 2 bits take 4, and what is not quantized has the type of the computation."""
    original = make_model("llama", tmp_path / "original", intermediate_size=128)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32}
    pair = quantized_hub(original, tmp_path, settings, partial(gptq, bits=bits))
    wanted = open_checkpoint(str(pair.model)).bytes_in("float32")
    assert inspect(preview(str(pair.model))).weight_bytes == wanted
    hub_of(pair.model)
    assert inspect(preview(MODEL)).weight_bytes == wanted


def test_a_damaged_gguf_file_of_a_repository(
    checkpoint: Callable[[str], Path], hub_of: Callable[[Path], Hub], tmp_path: Path
) -> None:
    published = tmp_path / "published"
    published.mkdir()
    file = gguf_of(checkpoint("llama"), published / "tiny-F32.gguf")
    file.write_bytes(file.read_bytes()[:9000])
    hub_of(published)
    with pytest.raises(StartError, match="damaged"):
        preview(MODEL)


def test_an_unknown_tag(checkpoint: Callable[[str], Path], hub_of: Callable[[Path], Hub]) -> None:
    hub_of(checkpoint("llama"))
    with pytest.raises(StartError, match="no GGUF file named Q4_0"):
        preview(f"{MODEL}:Q4_0")


def run(hub: FakeHub, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program with the real client of the hub, which keeps downloads in ``folder``."""
    places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hub"), "TANDEM_CACHE": str(folder / "cache")}
    clean = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
    command = [sys.executable, *words]
    return subprocess.run(command, env=clean | places, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("wanted", [MODEL, f"{MODEL}:F32"])
def test_with_the_real_client(wanted: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The first megabyte of 10 MB of weights is fetched, and the first five of a GGUF file of 15 MB."""
    (published := tmp_path / "published").mkdir()
    if wanted == MODEL:
        for file in path().glob("*.*"):
            shutil.copy(file, published)
    else:
        large = make_model("llama", tmp_path / "large", vocab_size=60_000)
        gguf_of(large, published / "tiny-F32.gguf")
    with FakeHub(published) as hub:
        done = run(hub, tmp_path, "-m", "deploy.cli", "inspect", wanted, "--json")
    assert done.returncode == 0 and not done.stderr, done.stderr
    answer, weights = json.loads(done.stdout), next(each for each in published.iterdir() if each.stat().st_size > 5e6)
    assert answer["served"] and not answer["downloaded"] and answer["file_bytes"] == weights.stat().st_size
    assert 0 < hub.sent[weights.name] < weights.stat().st_size * 0.6


def test_what_is_downloaded_to_be_served(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    published = Path(shutil.copytree(checkpoint("llama"), tmp_path / "published"))
    for left_out in ("consolidated.safetensors", "model.fp16.safetensors", "adapter_model.safetensors", "x.bin"):
        shutil.copy(published / "model.safetensors", published / left_out)
    code = f"from common.checkpoint.files import open_checkpoint; print(len(open_checkpoint({MODEL!r}).weight_files))"
    with FakeHub(published) as hub:
        done = run(hub, tmp_path, "-c", code)
    assert done.stdout == "1\n", done.stderr
    weights = {name for name in hub.sent if name.endswith((".safetensors", ".bin"))}
    assert weights == {"model.safetensors"}
    assert hub.sent["model.safetensors"] == (published / "model.safetensors").stat().st_size


@pytest.mark.parametrize("folder", ["", "Q8_0"])
@pytest.mark.parametrize("tag", ["", ":Q8_0"])
def test_a_repository_of_gguf_files_that_has_a_configuration(
    tag: str, folder: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Many repositories of GGUF files have the original's config.json, and large models as shards in a folder."""
    (published := tmp_path / "published").mkdir()
    (published / folder).mkdir(exist_ok=True)
    shutil.copy(checkpoint("llama") / "config.json", published)
    gguf_of(checkpoint("llama"), published / folder / "m-Q8_0.gguf", shards=3 if folder else 1)
    (published / "mmproj-Q8_0.gguf").write_bytes(b"GGUF")
    code = f"from common.checkpoint.files import open_checkpoint; print(open_checkpoint({MODEL + tag!r}).weight_files)"
    with FakeHub(published) as hub:
        seen = run(hub, tmp_path, "-m", "deploy.cli", "inspect", MODEL + tag, "--json")
        done = run(hub, tmp_path, "-c", code)
    assert seen.returncode == 0 and json.loads(seen.stdout)["format"] == "GGUF", seen.stdout + seen.stderr
    assert done.returncode == 0 and done.stdout.count("m-Q8_0") == (4 if folder else 1), done.stderr
    assert "mmproj-Q8_0.gguf" not in hub.sent


def test_the_command_imports_no_torch(checkpoint: Callable[[str], Path]) -> None:
    code = (
        "import sys\nfrom deploy.cli.main import main\n"
        "code = main(sys.argv[1:])\nassert not {'torch', 'transformers'} & set(sys.modules)\nsys.exit(code)"
    )
    command = [sys.executable, "-c", code, "inspect", str(checkpoint("qwen3-moe")), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["active_parameters"] < answer["parameters"] and any("experts" in each for each in answer["slow"])


def test_the_command_fails_for_what_is_not_served(checkpoint: Callable[[str], Path]) -> None:
    done = tandem("inspect", checkpoint("t5"))
    assert done.returncode == 1 and "encoder-decoder" in done.stderr and "Traceback" not in done.stderr


def _without_tensors(source: Path, target: Path, drop: str) -> None:
    weights = load_file(source / "model.safetensors")
    save_file({name: each for name, each in weights.items() if drop not in name}, target / "model.safetensors")


@pytest.mark.parametrize(
    ("drop", "fields", "words"),
    [
        ("layers.1.self_attn.q_proj", {}, "no self_attn.q_proj in layer 1"),
        ("layers.2.", {}, "no tensor of layer 2"),
        ("nothing", {"num_hidden_layers": 10**7}, "no tensor of layer 3"),
        ("nothing", {"num_key_value_heads": 4}, "self_attn.k_proj of layer 0 is 32×64"),
        ("nothing", {"vocab_size": 500}, "embed_tokens.weight is 512×64, but its configuration asks for 500×64"),
        ("model.norm", {}, "its weights have no norm"),
        ("lm_head", {}, "its weights have no lm_head"),
    ],
)
def test_weights_that_are_not_whole_are_refused(
    drop: str, fields: dict[str, int], words: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint("llama-untied"), model)
    _without_tensors(checkpoint("llama-untied"), model, drop)
    config = json.loads((model / "config.json").read_text()) | fields
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartError) as caught:
        inspect(preview(str(model)))
    assert words in caught.value.why


@pytest.mark.e2e
def test_the_command_fails_for_weights_that_are_not_whole(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), model)
    _without_tensors(checkpoint("llama"), model, "layers.0.")
    done = tandem("inspect", model)
    assert done.returncode == 1 and "no tensor of layer 0" in done.stdout + done.stderr
