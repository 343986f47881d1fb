"""The quantized weights of a GGUF file are those of the checkpoint from which it was written, rounded by the gguf
package: rows are in the model's order, experts are apart or together as the model has them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from common.checkpoint.gguf import open_gguf
from common.core.errors import StartError
from common.quantization import gguf as reader
from common.quantization.gguf import open_gguf_weights
from common.quantization.source import WeightSource
from tests.checkpoints.gguf_maker import Encode, gguf_of
from tests.models import make_model

KINDS = ("llama", "llama-untied", "mixtral", "qwen3", "qwen3-moe", "gemma2", "phi3", "gpt-oss")
Array = np.ndarray[Any, Any]


def encode_as(types: Mapping[str, Type], rest: Type) -> Encode:
    """Return an encoder of matrices: by the first of ``types``, patterns of names in the file, that matches."""

    def encode(name: str, values: Array) -> tuple[Array, Any]:
        if values.ndim < 2 or "gate_inp" in name or "bias" in name:
            return values, None
        kind = next((kind for pattern, kind in types.items() if re.search(pattern, name)), rest)
        return quantize(values, kind), kind

    return encode


def rounded(values: torch.Tensor, kind: Type) -> torch.Tensor:
    """Return ``values`` [..., out, in] as the package rounds them."""
    flat = np.ascontiguousarray(values.float().numpy())
    return torch.from_numpy(dequantize(quantize(flat, kind), kind)).view(values.shape)


def check(source: WeightSource, original: Path, kind_of: Callable[[str], Type]) -> None:
    """See that ``source`` has all weights of a checkpoint, matrices rounded to the types of ``kind_of``."""
    weights = load_file(original / "model.safetensors")
    compact, stacked, plain = source.compact(), source.stacked(), source.plain()
    assert not compact.keys() & plain.keys() and not stacked.keys() & plain.keys()
    assert {*compact, *stacked, *plain} == weights.keys()
    for name, values in weights.items():
        if name in compact:
            assert torch.equal(compact[name]().dequantize(), rounded(values, kind_of(name))), name
        elif name in stacked:
            experts = torch.stack([weight.dequantize() for weight in stacked[name]()])
            assert torch.equal(experts, rounded(values.transpose(1, 2), kind_of(name))), name
        else:
            torch.testing.assert_close(plain[name][...].float(), values.float(), rtol=1e-6, atol=1e-6)
            assert plain[name].get_shape() == list(values.shape)
    matrices = {name for name, values in weights.items() if values.dim() > 1 and "bias" not in name}
    routers = {name for name in matrices if re.search(r"\.(gate|router)\.weight", name)}
    assert {*compact, *stacked} == matrices - routers


def read_all(source: WeightSource) -> None:
    for reads in (source.compact(), source.stacked()):
        for read in reads.values():
            read()
    for lazy in source.plain().values():
        lazy[...]


@pytest.fixture
def made(tmp_path: Path, checkpoint: Callable[[str], Path]) -> Callable[[str], Path]:
    """Return ``made(kind)``: a tiny checkpoint whose rows are whole blocks."""

    def make(kind: str) -> Path:
        whole = kind != "qwen3-moe"
        return checkpoint(kind) if whole else make_model(kind, tmp_path / kind, moe_intermediate_size=64)

    return make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_", [Type.Q8_0, Type.Q4_1])
def test_weights_are_those_of_the_checkpoint(
    kind: str, type_: Type, made: Callable[[str], Path], tmp_path: Path
) -> None:
    original = made(kind)
    file = gguf_of(original, tmp_path / "model.gguf", encode=encode_as({}, type_))
    check(open_gguf_weights(open_gguf([file])), original, lambda _: type_)


def test_experts_in_mxfp4(made: Callable[[str], Path], tmp_path: Path) -> None:
    """As the published gpt-oss files have them."""
    original = made("gpt-oss")
    encode = encode_as({"_exps": Type.MXFP4}, Type.Q8_0)
    source = open_gguf_weights(open_gguf([gguf_of(original, tmp_path / "model.gguf", encode=encode)]))
    check(source, original, lambda name: Type.MXFP4 if "experts" in name else Type.Q8_0)
    experts = [weight for read in source.stacked().values() for weight in read()]
    assert {(weight.bits, weight.coding) for weight in experts} == {(4, "table")} and not source.notes


def test_experts_over_shards(made: Callable[[str], Path], tmp_path: Path) -> None:
    original = made("qwen3-moe")
    gguf_of(original, tmp_path / "model.gguf", encode=encode_as({}, Type.Q5_1), shards=2)
    shards = sorted(tmp_path.glob("model-*.gguf"))
    assert len(shards) > 2
    check(open_gguf_weights(open_gguf(shards)), original, lambda _: Type.Q5_1)


def test_types_may_differ_between_tensors(made: Callable[[str], Path], tmp_path: Path) -> None:
    types = {"token_embd": Type.Q8_0, "attn_v": Type.Q5_1, "attn_k": Type.Q5_0, "ffn_down": Type.Q4_0}
    original = made("llama")
    file = gguf_of(original, tmp_path / "model.gguf", encode=encode_as(types, Type.Q4_1))
    names = {"embed_tokens": Type.Q8_0, "v_proj": Type.Q5_1, "k_proj": Type.Q5_0, "down_proj": Type.Q4_0}

    def kind_of(name: str) -> Type:
        return next((kind for part, kind in names.items() if part in name), Type.Q4_1)

    source = open_gguf_weights(open_gguf([file]))
    check(source, original, kind_of)
    assert {weight().source for weight in source.compact().values()} == {"Q8_0", "Q5_1", "Q5_0", "Q4_0", "Q4_1"}
    assert not source.notes


def test_gate_and_up_of_two_types_are_rounded_and_said(made: Callable[[str], Path], tmp_path: Path) -> None:
    original = made("gpt-oss")
    types = {"ffn_gate_exps": Type.Q8_0}
    file = gguf_of(original, tmp_path / "model.gguf", encode=encode_as(types, Type.Q4_0))
    source = open_gguf_weights(open_gguf([file]))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    values = load_file(original / "model.safetensors")[name].transpose(1, 2)
    expected = torch.stack([rounded(values[:, ::2], Type.Q8_0), rounded(values[:, 1::2], Type.Q4_0)], 2).flatten(1, 2)
    found = torch.stack([weight.dequantize() for weight in source.stacked()[name]()])
    assert float((found - expected).abs().max()) <= float(expected.abs().max()) / 127 * 0.51
    assert source.notes == [f"{len(values)} weights in Q8_0 and Q4_0, expanded to 8 bits"]


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "gpt-oss"])
def test_weights_that_are_not_quantized_stay_plain(kind: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    original = made(kind)
    source = open_gguf_weights(open_gguf([gguf_of(original, tmp_path / "model.gguf")]))
    weights = load_file(original / "model.safetensors")
    assert not source.compact() and not source.stacked() and source.plain().keys() == weights.keys()
    for name, values in weights.items():
        assert torch.equal(source.plain()[name][...], values.float()), name


def test_long_tensors_are_read_in_parts(
    made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_CHUNK", 200)
    original = made("llama")
    file = gguf_of(original, tmp_path / "model.gguf", encode=encode_as({}, Type.Q4_0), shards=2)
    shards = sorted(tmp_path.glob("model-*.gguf"))
    check(open_gguf_weights(open_gguf(shards or [file])), original, lambda _: Type.Q4_0)


def test_a_file_that_has_become_shorter_is_an_error(made: Callable[[str], Path], tmp_path: Path) -> None:
    file = gguf_of(made("llama"), tmp_path / "model.gguf", encode=encode_as({}, Type.Q4_0))
    model = open_gguf([file])
    source = open_gguf_weights(model)
    last = max(model.tensors.values(), key=lambda tensor: tensor.offset)
    with file.open("r+b") as written:
        written.truncate(last.offset + 1)
    with pytest.raises(StartError, match="become shorter"):
        read_all(source)


@pytest.mark.parametrize(
    ("kind", "name"), [("llama", "ffn_down.weight"), ("qwen3-moe", "ffn_up_exps"), ("gpt-oss", "ffn_gate_exps")]
)
@pytest.mark.parametrize("type_", [Type.Q8_0, Type.Q4_1])
def test_a_scale_that_is_no_number_is_an_error(
    kind: str, name: str, type_: Type, made: Callable[[str], Path], tmp_path: Path
) -> None:
    file = gguf_of(made(kind), tmp_path / "model.gguf", encode=encode_as({}, type_))
    model = open_gguf([file])
    tensor = next(tensor for tensor in model.tensors.values() if f"blk.1.{name}" in tensor.name)
    read_all(open_gguf_weights(model))
    with file.open("r+b") as written:  # the scale of the last block
        written.seek(tensor.offset + tensor.nbytes - gguf.GGML_QUANT_SIZES[type_][1])
        written.write(np.float16("nan").tobytes())
    with pytest.raises(StartError, match="not finite") as raised:
        read_all(open_gguf_weights(model))
    assert tensor.name in raised.value.what


def test_heads_that_do_not_divide_the_rows_are_an_error(made: Callable[[str], Path], tmp_path: Path) -> None:
    original = made("llama")
    config = json.loads((original / "config.json").read_text())
    file = gguf_of(original, tmp_path / "model.gguf", encode=encode_as({}, Type.Q8_0))
    read = open_gguf([file])
    heads = config["num_attention_heads"] + 1
    wrong = {**read.metadata, "llama.attention.head_count": heads}
    model = type(read)(read.architecture, wrong, read.tensors, read.files, read.header)
    with pytest.raises(StartError, match=f"are not {heads} heads"):
        open_gguf_weights(model)


def test_maker_rounds_as_the_package(tmp_path: Path) -> None:
    """The oracle itself: rows are rounded one by one, so that their order does not matter."""
    values = torch.randn(6, 64)
    order = torch.randperm(6)
    assert torch.equal(rounded(values[order], Type.Q4_1), rounded(values, Type.Q4_1)[order])
    assert gguf.GGML_QUANT_SIZES[Type.Q4_1] == (32, 20)
