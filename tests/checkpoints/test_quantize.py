"""``tandem quantize``: what it writes is compressed-tensors by that format's definition, near the original, and read
again by our own reader; its card says what was done and what it costs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.eval import agreement
from common import builtin
from common.checkpoint.files import open_checkpoint
from common.model import load
from common.quantization import export
from common.quantization.open import open_source
from deploy.cli import quantize
from deploy.cli.main import main as cli
from tests.checkpoints.format_cases import HUB
from tests.checkpoints.quantized_maker import LINEAR, quantized_hub
from tests.models import make_model
from tests.reference import Reference

KINDS = ("llama", "llama-untied", "qwen3-moe", "mixtral", "gemma2", "phi3")


def quantized(original: Path, out: Path, *flags: str) -> Path:
    assert cli(["quantize", str(original), str(out), "--answers", "0", *flags]) == 0
    return out


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def arguments_of(config: dict[str, Any], module: str) -> dict[str, Any]:
    """Return how a module is quantized: the group that names it, else that of all linear layers."""
    groups = config["quantization_config"]["config_groups"].values()
    named = [group["weights"] for group in groups if module in group["targets"]]
    return named[0] if named else next(group["weights"] for group in groups if "Linear" in group["targets"])


def decoded(tensors: dict[str, torch.Tensor], module: str, arguments: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the weight of a module, element by element: signed values are packed with 2 ** (bits - 1) added, along the
    columns, zero points along the rows."""
    bits, size = arguments["num_bits"], arguments["group_size"]
    each, half = 32 // bits, 1 << bits - 1
    words, scales = tensors[f"{module}.weight_packed"].numpy(), tensors[f"{module}.weight_scale"].float().numpy()
    zeros = None if arguments["symmetric"] else tensors[f"{module}.weight_zero_point"].numpy()
    rows, columns = tensors[f"{module}.weight_shape"].tolist()
    found = np.zeros((rows, columns), np.float32)
    for n in range(rows):
        for k in range(columns):
            group = k // size
            value = (int(words[n, k // each]) >> k % each * bits & (1 << bits) - 1) - half
            zero = 0 if zeros is None else (int(zeros[n // each, group]) >> n % each * bits & (1 << bits) - 1) - half
            found[n, k] = scales[n, group] * np.float32(value - zero)
    return found


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("bits", "group", "symmetric"), [(4, 64, False), (4, 16, False), (4, 64, True), (8, 64, True), (8, 32, False)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_near_the_original(
    kind: str, bits: int, group: int, symmetric: bool, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    original = checkpoint(kind)
    flags = ["--bits", str(bits), "--group", str(group), *(["--symmetric"] if symmetric else [])]
    out = quantized(original, tmp_path / "out", *flags)
    config, tensors, weights = json.loads((out / "config.json").read_text()), tensors_in(out), tensors_in(original)
    source = open_source(open_checkpoint(str(out)))
    assert source is not None
    rounded = {name for name in weights if LINEAR.fullmatch(name)}
    assert source.compact().keys() == rounded and source.plain().keys() == weights.keys() - rounded
    ignored = set(config["quantization_config"]["ignore"])
    routers = {name.removesuffix(".weight") for name in weights if re.search(r"\.gate\.weight", name)}
    assert ignored == routers | {"lm_head"}, "also an output layer that has the embedding's weight"
    for name in sorted(rounded):
        module, values = name.removesuffix(".weight"), weights[name].numpy()
        arguments = arguments_of(config, module)
        found = decoded(tensors, module, arguments)
        assert np.array_equal(source.compact()[name]().dequantize().numpy(), found), name
        size = arguments["group_size"]
        assert arguments["symmetric"] == (symmetric or bits == 8)
        assert arguments["num_bits"] == bits and size <= group and values.shape[1] % size == 0, name
        assert size == group or values.shape[1] % (2 * size), "the largest group that fits"
        pieces = values.reshape(len(values), -1, size)
        spread, largest = np.maximum(pieces.max(2), 0) - np.minimum(pieces.min(2), 0), np.abs(pieces).max(2)
        step = largest / 127 if bits == 8 else largest / 7.5 if symmetric else spread / 15
        error = np.abs(found - values).reshape(pieces.shape).max(2)
        assert (error <= step * (0.52 if arguments["symmetric"] else 1.02)).all(), name
    for name, lazy in source.plain().items():
        assert torch.equal(lazy[...], weights[name]), name


def test_the_library_of_the_format_reads_it(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    for bits in ("4", "8"):
        out = quantized(checkpoint("llama"), tmp_path / bits, "--bits", bits)
        config = json.loads((out / "config.json").read_text())["quantization_config"]
        schemes = QuantizationConfig.model_validate(config).config_groups
        compressor, tensors = BaseCompressor.load_from_registry("pack-quantized"), tensors_in(out)
        source = open_source(open_checkpoint(str(out)))
        assert source is not None and source.compact()
        for name, make in source.compact().items():
            module = name.removesuffix("weight")
            parts = {key.removeprefix(module): value for key, value in tensors.items() if key.startswith(module)}
            parts["weight_scale"] = parts["weight_scale"].float()
            named = [each for each in schemes.values() if module[:-1] in each.targets]
            scheme = named[0] if named else next(each for each in schemes.values() if "Linear" in each.targets)
            found = compressor.decompress(parts, scheme)["weight"]
            assert torch.equal(found.float(), make().dequantize()), name


def test_transformers_reads_it(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """It takes no zero points: compressed-tensors 0.20 expects them unpacked while it loads."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    original = checkpoint("llama")
    for bits in ("4", "8"):
        out = quantized(original, tmp_path / bits, "--bits", bits, "--symmetric")
        dense = dequantized(original, out, tmp_path / f"{bits}-dense")
        tokens = torch.arange(3, 40)[None]
        with torch.inference_mode():
            found, expected = (
                AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits for path in (out, dense)
            )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_scales_have_the_type_of_the_model(tmp_path: Path) -> None:
    """Loaders convert scales to it, which must not change them."""
    original = make_model("llama", tmp_path / "original")
    file = original / "model.safetensors"
    save_file({name: each.bfloat16() for name, each in load_file(file).items()}, file, metadata={"format": "pt"})
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    tensors = tensors_in(quantized(original, tmp_path / "out"))
    assert {each.dtype for name, each in tensors.items() if name.endswith("scale")} == {torch.bfloat16}


def test_rows_that_are_no_whole_groups_are_kept(tmp_path: Path) -> None:
    original = make_model("llama", tmp_path / "original", intermediate_size=72, num_hidden_layers=1)
    out = quantized(original, tmp_path / "out")
    tensors = tensors_in(out)
    assert "model.layers.0.mlp.down_proj.weight" in tensors
    assert "model.layers.0.mlp.up_proj.weight_packed" in tensors
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["ignore"] == ["model.layers.0.mlp.down_proj", "lm_head"]
    assert re.search(r"matrices kept as they are .*: 1$", (out / "README.md").read_text(), re.MULTILINE)


def test_large_models_are_written_in_several_files(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tensors_in(quantized(checkpoint("llama"), tmp_path / "whole"))
    monkeypatch.setattr(export, "_SHARD", 30_000)
    out = quantized(checkpoint("llama"), tmp_path / "parts")
    found = tensors_in(out)
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2 and {file.name for file in files} == set(index["weight_map"].values())
    assert files[-1].name == f"model-{len(files):05}-of-{len(files):05}.safetensors"
    for file in files:
        names = {name for name, place in index["weight_map"].items() if place == file.name}
        assert names == load_file(file).keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert open_checkpoint(str(out)).weight_files == tuple(files)


def test_the_tokenizer_and_the_templates_are_there(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    original = checkpoint("llama")
    out = quantized(original, tmp_path / "out")
    texts = {file.name for file in original.iterdir() if file.suffix in (".json", ".jinja")}
    assert {file.name for file in out.iterdir()} == texts | {"model.safetensors", "README.md"}
    for name in texts - {"config.json"}:
        assert (out / name).read_bytes() == (original / name).read_bytes()
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode


def test_the_card_says_what_was_done(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    out = quantized(checkpoint("llama-untied"), tmp_path / "out")
    card = (out / "README.md").read_text()
    tensors = tensors_in(out)
    packed = [name for name in tensors if name.endswith("weight_packed")]
    down = sum("down_proj" in name for name in packed)
    assert f"- {len(packed) - down} matrices in 4 bits, with a zero per group, in groups of 64 columns" in card
    assert f"- {down} matrices in 4 bits, with a zero per group, in groups of 32 columns" in card  # 96 columns
    assert re.search(r"^- matrices kept as they are .*: 1$", card, re.MULTILINE) and "\nNot measured.\n" in card
    assert card.startswith("---\ntags:\n- compressed-tensors\n---\n")


def test_progress_is_printed_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "LINE_EVERY_S", 0.0)
    quantized(make_model("llama", tmp_path / "original"), tmp_path / "out")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("quantized ")]
    assert all(re.fullmatch(r"quantized [\d.]+ [KM]iB of [\d.]+ KiB", line) for line in lines)
    assert len(set(lines)) > 1


def test_matrices_of_other_layers_are_kept(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPT-2 has [in, out] in layers that are not torch's linear ones."""
    assert "no matrices of linear layers" in refused(capsys, str(checkpoint("gpt2")), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_card_names_the_built_in_model(tmp_path: Path) -> None:
    """Its folder is called "model"."""
    assert cli(["quantize", str(builtin.path()), str(tmp_path / "out"), "--answers", "0"]) == 0
    assert f"# {builtin.NAME}, quantized to 4 bits\n" in (tmp_path / "out" / "README.md").read_text()


def test_joined_experts_are_kept_and_said(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """gpt-oss has one tensor for all experts of a layer, most of its weights."""
    quantized(checkpoint("gpt-oss"), tmp_path / "out")
    layers = json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"]
    kept = 1 + 3 * layers  # the output layer; routers, and two tensors of experts in each layer
    assert f", {kept} kept: " in capsys.readouterr().out


def test_the_card_has_the_figures_of_the_quality(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are those of the numbers that were written, computed by transformers."""
    original = make_model("llama", tmp_path / "original")
    words = ["quantize", str(original), str(tmp_path / "out"), "--bits", "4", "--answers", "3"]
    assert cli(words) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    said = capsys.readouterr().out
    assert card.split("## Quality\n\n")[1].split("\n\nMeasure")[0] in said
    dense = dequantized(original, tmp_path / "out", tmp_path / "dense")
    chats, as_chats = agreement.sample(open_checkpoint(str(original)), 3)
    assert as_chats and len(chats) == 3
    rows = [[Reference(model, 1024).logits(chat.tokens)[chat.prompt - 1 : -1] for chat in chats]
            for model in (original, dense)]  # fmt: skip
    before, after = (torch.from_numpy(np.concatenate(each)).log_softmax(-1) for each in rows)
    tokens = torch.tensor([token for chat in chats for token in chat.tokens[chat.prompt :]])
    same = (before.argmax(1) == after.argmax(1)).float().mean()
    perplexities = [float((-each.gather(1, tokens[:, None]).mean()).exp()) for each in (before, after)]
    found = re.search(r"\| perplexity \| ([\d.]+) \| ([\d.]+) \(([+-][\d.]+)%\) \|", card)
    assert found is not None
    assert [float(found[1]), float(found[2])] == pytest.approx(perplexities, rel=1e-3)
    assert perplexities[0] != pytest.approx(perplexities[1], rel=2e-3), "rounding to 4 bits is to be seen"
    assert float(found[3]) == pytest.approx(100 * (perplexities[1] / perplexities[0] - 1), abs=0.1)
    assert f"| same most likely token | 100.00% | {same:.2%} |" in card
    assert f"On {len(tokens)} tokens of 3 reference answers" in card and "chat template" in card


def dequantized(original: Path, quantized: Path, out: Path) -> Path:
    """Write the numbers of a quantized checkpoint in float32."""
    shutil.copytree(original, out)
    config, tensors = json.loads((quantized / "config.json").read_text()), tensors_in(quantized)
    weights = load_file(original / "model.safetensors")
    for name in weights:
        module = name.removesuffix(".weight")
        if f"{module}.weight_packed" in tensors:
            weights[name] = torch.from_numpy(decoded(tensors, module, arguments_of(config, module)))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_a_model_without_chats_is_measured_on_text(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = shutil.copytree(checkpoint("llama"), tmp_path / "original")
    (original / "chat_template.jinja").unlink()
    assert cli(["quantize", str(original), str(tmp_path / "out"), "--bits", "8", "--answers", "2"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "as plain text, since the model has no chat template" in card and "| perplexity |" in card


def test_a_model_that_does_not_fit_is_written_all_the_same(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "free_memory", lambda: 1000)
    assert cli(["quantize", str(checkpoint("llama")), str(tmp_path / "out"), "--answers", "2"]) == 0
    assert "Not measured: too little memory" in (tmp_path / "out" / "README.md").read_text()


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli(["quantize", *words, "--answers", "0"]) == 1
    return capsys.readouterr().err


def test_what_exists_is_not_overwritten(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    assert "exists already" in refused(capsys, str(checkpoint("llama")), str(tmp_path / "out"))
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]


def test_quantized_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = quantized_hub(make_model("llama", tmp_path / "original"), tmp_path / "gptq", *HUB["GPTQ"])
    said = refused(capsys, str(pair.model), str(tmp_path / "out"))
    assert "quantized already, in GPTQ 4-bit" in said and not (tmp_path / "out").exists()


def test_nothing_is_left_of_a_model_that_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model("llama", tmp_path / "original")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name][1, 1] = float("inf")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert name in refused(capsys, str(model), str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


def test_nothing_is_left_when_the_process_is_terminated(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(quantize, "_progress", lambda _: lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as caught:
        quantized(checkpoint("llama"), tmp_path / "out")
    assert caught.value.code == 143 and not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_a_killed_process_left_is_removed(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Also if it had the same process id, as in containers. What running processes write stays."""
    with subprocess.Popen(["true"]) as ended:
        pass
    left = {number: tmp_path / f"{export._begun(tmp_path / 'out')}{number}" for number in (ended.pid, os.getpid(), 1)}
    for directory in left.values():
        (directory / "nested").mkdir(parents=True)
    quantized(checkpoint("llama"), tmp_path / "out")
    assert {*tmp_path.iterdir()} == {tmp_path / "out", left[1]}


def test_both_names_are_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs a model and a directory" in refused(capsys, str(tmp_path))
