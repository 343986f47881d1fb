"""Memory is reckoned from what the weights take there, not from the size of the files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import nn

from common.checkpoint import sizes
from common.checkpoint.files import open_checkpoint
from common.checkpoint.gguf import GgufTensor
from common.core.errors import StartError
from common.model import load as loader
from common.model.compact import CompactEmbedding, CompactLinear
from common.model.load_compact import load_compact
from common.quantization.gguf_blocks import weight_of
from common.quantization.open import open_source
from tests.checkpoints.format_cases import Case, cases

KEPT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")


@pytest.mark.parametrize("name", [*KEPT, "IQ3_S", "TQ1_0"])
def test_gguf_types_take_what_their_groups_take(name: str) -> None:
    kind = GGMLQuantizationType[name]
    block, size = GGML_QUANT_SIZES[kind]
    shape = (16, 512)
    nbytes = 16 * 512 // block * size
    tensor = GgufTensor("x", int(kind), shape, Path(), 0, nbytes)
    weight = weight_of(int(kind), torch.from_numpy(np.zeros(nbytes, np.uint8)), shape)
    table = 0 if weight.table is None else weight.table.nbytes
    assert sizes.sizes_of_gguf([tensor]) == sizes.Sizes(weight.nbytes - table, 0)


SAMPLE = (("Q4_K_M", "qwen3-moe"), ("GPTQ", "llama"), ("AWQ", "qwen3"), ("w8a8", "llama"), ("fp8 in blocks", "qwen3"))


@pytest.mark.parametrize("case", cases(*SAMPLE), ids=str)
def test_bytes_are_those_of_the_loaded_model(case: Case, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(case.make(tmp_path).model))
    source = open_source(checkpoint)
    assert source is not None
    model = load_compact(checkpoint, source, "float32", exact=True, where=torch.device("cpu")).model
    weights = {id(part): part.nbytes for module in model.modules() for part in parts_of(module)}
    whole = sum(weights.values()) + sum(weight.nbytes for weight in model.parameters())
    assert abs(checkpoint.bytes_in("float32") - whole) < 0.08 * whole  # scales, in float16, are taken as floats


def parts_of(module: nn.Module) -> list[object]:
    if isinstance(module, CompactLinear):
        return [*module.parts]
    return [module.part] if isinstance(module, CompactEmbedding) else []


def test_too_little_memory_is_said_of_the_quantized_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(str(Case("Q4_0", "llama").make(tmp_path).model))
    need = checkpoint.bytes_in("bfloat16")
    assert need < 0.6 * open_checkpoint(str(tmp_path / "original")).bytes_in("bfloat16")
    monkeypatch.setattr(loader, "free_memory", lambda: need)
    loader.read_weights(checkpoint, "bfloat16")
    monkeypatch.setattr(loader, "free_memory", lambda: need - 1)
    with pytest.raises(StartError, match="too little memory"):
        loader.read_weights(checkpoint, "bfloat16")


def test_the_progress_of_reading_is_told_in_bytes(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a file as well: a model may be one large file."""
    found, told = open_checkpoint(str(checkpoint("llama"))), list[tuple[int, int, str]]()
    monkeypatch.setattr(loader, "_REPORT_BYTES", 1)
    loader.read_weights(found, "float32", lambda *told_now: told.append(told_now))
    total = sum(path.stat().st_size for path in found.weight_files)
    assert told[0] == (0, total, "model.safetensors") and told[-1][:2] == (total, total)
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told) and len(told) > 2


@pytest.mark.parametrize("kind", ["llama", "llama-untied"])
def test_weights_that_are_rounded_at_load_take_less(checkpoint: Callable[[str], Path], kind: str) -> None:
    found = open_checkpoint(str(checkpoint(kind)))
    whole, tied = found.weight_bytes // 2, kind == "llama"
    eight, four = (found.bytes_in("bfloat16", way) for way in ("int8", "int4"))
    plain = 0 if tied else 512 * 64
    assert four < eight < 0.75 * whole
    assert eight - four == pytest.approx((whole / 2 - plain) * (8.25 - 4.375) / 8, rel=0.05)
    assert replace(found, sizes=sizes.Sizes(10, 3)).bytes_in("bfloat16") == 16
