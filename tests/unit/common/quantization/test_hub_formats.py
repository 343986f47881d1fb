"""Readers of the hub's quantized formats, against their definitions element by element."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from common.core.errors import StartError
from common.quantization.awq import open_awq
from common.quantization.compressed import open_compressed
from common.quantization.export import exported, quantization_config
from common.quantization.fp8 import open_fp8
from common.quantization.gptq import open_gptq
from common.quantization.mxfp4 import open_mxfp4
from common.quantization.source import TensorFiles, WeightSource
from common.quantization.weight import QuantizedWeight, quantize
from tests.unit.common.quantization import hub_formats as hub
from tests.unit.common.quantization.test_weight import random_weight

MODULE = "model.layers.0.self_attn.q_proj"
NORM = "model.norm.weight"


def files_of(directory: Path, tensors: dict[str, torch.Tensor], module: str = MODULE) -> TensorFiles:
    """Write the tensors of a module, and a norm beside it."""
    named = {f"{module}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named | {NORM: torch.arange(4.0)}, directory / "model.safetensors")
    return TensorFiles([directory / "model.safetensors"])


def weight_of(source: WeightSource) -> QuantizedWeight:
    """Return the only compact weight, and see that the norm is left."""
    assert list(source.compact()) == [f"{MODULE}.weight"]
    assert torch.equal(source.plain()[NORM][...], torch.arange(4.0))
    return source.compact()[f"{MODULE}.weight"]()


def check(weight: QuantizedWeight, expected: np.ndarray[Any, Any]) -> None:
    assert weight.shape == expected.shape
    assert np.array_equal(weight.dequantize().numpy(), expected)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("sym", [False, True])
@pytest.mark.parametrize("order", ["", "activation"])
def test_gptq(tmp_path: Path, bits: int, v2: bool, sym: bool, order: str) -> None:
    tensors, expected = hub.gptq(32, 128, bits, 32, sym=sym, v2=v2, order=order)
    settings = {"bits": bits, "group_size": 32, "desc_act": bool(order)}
    settings |= {"checkpoint_format": "gptq_v2"} if v2 else {}
    source = open_gptq(files_of(tmp_path, tensors), settings)
    weight = weight_of(source)
    check(weight, expected)
    assert (weight.bits, weight.group) == (8 if bits == 8 else 4, 32)
    assert (weight.zeros is None) == sym and (weight.order is None) == (not order)
    assert not source.notes and list(source.plain()) == [NORM]


def test_a_zero_of_256_is_rounded(tmp_path: Path) -> None:
    tensors, expected = hub.gptq(16, 64, 8)
    tensors["qzeros"][0, 0] = -1  # stored 255, four times
    expected[:4, :32] = 0
    weight = weight_of(open_gptq(files_of(tmp_path, tensors), {"bits": 8, "group_size": 32}))
    assert weight.source.endswith("expanded to 8 bits")
    difference = np.abs(weight.dequantize().numpy() - expected)[4:]
    assert difference.max() <= np.abs(expected).max() / 127 * 0.51


def test_gptq_without_order_in_the_file(tmp_path: Path) -> None:
    tensors, expected = hub.gptq(16, 64, g_idx=False)
    check(weight_of(open_gptq(files_of(tmp_path, tensors), {"bits": 4, "group_size": 32})), expected)
    tensors["g_idx"] = torch.zeros(64, dtype=torch.int32)
    check(weight_of(open_gptq(files_of(tmp_path, tensors), {"bits": 4, "group_size": 32})), expected)


@pytest.mark.parametrize(("columns", "size", "group"), [(576, 128, 64), (192, 192, 64), (256, 256, 128), (48, 48, 16)])
def test_groups_of_other_sizes_are_exact(tmp_path: Path, columns: int, size: int, group: int) -> None:
    tensors, expected = hub.gptq(16, columns, size=size)
    weight = weight_of(open_gptq(files_of(tmp_path, tensors), {"bits": 4, "group_size": size}))
    check(weight, expected)
    assert weight.group == group


def test_settings_of_other_modules_do_not_count(tmp_path: Path) -> None:
    tensors, expected = hub.gptq(16, 128, 8, 64, sym=True)
    check(weight_of(open_gptq(files_of(tmp_path, tensors), {"bits": 4, "group_size": 128})), expected)


def test_bits_of_a_module_without_order_are_those_of_its_tensors(tmp_path: Path) -> None:
    tensors, expected = hub.gptq(16, 128, 8, 64, g_idx=False)
    check(weight_of(open_gptq(files_of(tmp_path, tensors), {"bits": 4, "group_size": 128})), expected)


@pytest.mark.parametrize(("size", "order"), [(24, ""), (32, "uneven")])
def test_irregular_groups_are_rounded_and_said(tmp_path: Path, size: int, order: str) -> None:
    tensors, expected = hub.gptq(16, 96, size=size, order=order)
    source = open_gptq(files_of(tmp_path, tensors), {"bits": 4, "group_size": size, "desc_act": bool(order)})
    weight = weight_of(source)
    step = np.abs(expected).max() / 127
    assert weight.bits == 8 and np.abs(weight.dequantize().numpy() - expected).max() <= step * 0.51
    assert source.notes == ["1 weight in GPTQ 4-bit with irregular groups, expanded to 8 bits"]


def test_gptq_of_an_output_layer_and_a_bias(tmp_path: Path) -> None:
    tensors, expected = hub.gptq(16, 64)
    source = open_gptq(files_of(tmp_path, tensors | {"bias": torch.ones(16)}, "lm_head"), {"bits": 4, "group_size": 32})
    check(source.compact()["lm_head.weight"](), expected)
    assert sorted(source.plain()) == ["lm_head.bias", NORM]


@pytest.mark.parametrize("wrong", [-1, 2])
def test_a_group_that_is_not_there_is_an_error(tmp_path: Path, wrong: int) -> None:
    tensors, _ = hub.gptq(16, 64)
    tensors["g_idx"][5] = wrong
    with pytest.raises(StartError, match="g_idx names groups beyond the 2"):
        weight_of(open_gptq(files_of(tmp_path, tensors), {"bits": 4, "group_size": 32, "desc_act": True}))


def test_tensors_that_do_not_fit_are_errors(tmp_path: Path) -> None:
    tensors, _ = hub.gptq(16, 64)
    with pytest.raises(StartError, match=r"q_proj.weight"):
        weight_of(open_gptq(files_of(tmp_path, tensors | {"scales": torch.ones(2, 8).half()}), {"bits": 4}))
    tensors["scales"][0, 0] = float("nan")
    with pytest.raises(StartError, match="not finite"):
        weight_of(open_gptq(files_of(tmp_path, tensors), {"bits": 4, "group_size": 32}))


@pytest.mark.parametrize("size", [32, 64, 128])
def test_awq(tmp_path: Path, size: int) -> None:
    tensors, expected = hub.awq(32, 128, size)
    weight = weight_of(open_awq(files_of(tmp_path, tensors), {"bits": 4, "group_size": size, "version": "gemm"}))
    check(weight, expected)
    assert (weight.bits, weight.group, weight.source) == (4, size, "AWQ 4-bit")


def test_awq_of_another_layout_is_an_error(tmp_path: Path) -> None:
    tensors, _ = hub.awq(32, 128)
    tensors["qweight"] = torch.zeros(32, 16, dtype=torch.int32)  # gemv: [out, in / 8]
    with pytest.raises(StartError, match="not packed as AWQ gemm"):
        weight_of(open_awq(files_of(tmp_path, tensors), {"group_size": 32}))


def compressed(bits: int, size: int | None, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "group_size": size, "strategy": "group" if size else "channel", **more}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}


@pytest.mark.parametrize("bits", [3, 4, 6, 8])
@pytest.mark.parametrize("size", [0, 32])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_pack_quantized(tmp_path: Path, bits: int, size: int, asymmetric: bool) -> None:
    tensors, expected = hub.pack_quantized(16, 96, bits, size, asymmetric=asymmetric)
    weight = weight_of(open_compressed(files_of(tmp_path, tensors), compressed(bits, size or None)))
    check(weight, expected)
    assert weight.bits == (4 if bits <= 4 else 8) and weight.group == 32 and weight.most == (1 << bits) - 1


def test_pack_quantized_in_order_of_activation(tmp_path: Path) -> None:
    tensors, expected = hub.pack_quantized(16, 96, order=True)
    weight = weight_of(open_compressed(files_of(tmp_path, tensors), compressed(4, 32, actorder="group")))
    check(weight, expected)
    assert weight.order is not None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(16, 128), (13, 100)])
def test_what_we_write_is_read_again(tmp_path: Path, bits: Literal[4, 8], shape: tuple[int, int]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    weight = quantize(values, bits, 64)
    tensors = exported(weight)
    settings = quantization_config(bits, {64: [MODULE]}, ["lm_head"])
    found = weight_of(open_compressed(files_of(tmp_path, tensors), settings))
    check(found, weight.dequantize().numpy())
    assert (found.bits, found.group, found.nbytes) == (bits, 64, weight.nbytes)
    # by the definition: signed values, packed with 2 ** (bits - 1) added
    half = 1 << bits - 1
    for n, k in ((0, 0), (3, 17), (12, 99)):
        word = int(tensors["weight_packed"][n, k * bits // 32])
        value = (word >> k * bits % 32 & (1 << bits) - 1) - half
        zero = 0
        if bits == 4:
            zero = (int(tensors["weight_zero_point"][n * 4 // 32, k // 64]) >> n * 4 % 32 & 15) - half
        assert float(tensors["weight_scale"][n, k // 64]) * (value - zero) == float(found.dequantize()[n, k])


def test_weights_of_two_levels_are_not_written() -> None:
    with pytest.raises(ValueError, match="no weight of plain groups"):
        exported(random_weight("two levels"))
    with pytest.raises(ValueError, match="has the zero 8"):
        exported(replace(random_weight("int4"), zero=7))


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_words_of_older_writers(tmp_path: Path, bits: int) -> None:
    tensors, expected = hub.pack_quantized(16, 96, bits, padded=True)
    check(weight_of(open_compressed(files_of(tmp_path, tensors), compressed(bits, 32))), expected)


def test_bits_of_the_group_that_names_the_module(tmp_path: Path) -> None:
    tensors, expected = hub.pack_quantized(16, 96, 8)
    settings = compressed(4, 32)
    settings["config_groups"]["group_1"] = {"targets": ["re:.*q_proj$"], "weights": {"num_bits": 8, "group_size": 32}}
    check(weight_of(open_compressed(files_of(tmp_path, tensors), settings)), expected)


def test_a_name_goes_before_a_pattern(tmp_path: Path) -> None:
    """Whatever their order: so does compressed-tensors itself."""
    tensors, expected = hub.pack_quantized(16, 96, 8)
    settings = compressed(4, 32)
    settings["config_groups"]["group_1"] = {"targets": ["re:.*"], "weights": {"num_bits": 4, "group_size": 32}}
    settings["config_groups"]["group_2"] = {"targets": [MODULE], "weights": {"num_bits": 8, "group_size": 32}}
    check(weight_of(open_compressed(files_of(tmp_path, tensors), settings)), expected)


def test_bits_of_linear_layers_go_before_those_of_other_classes(tmp_path: Path) -> None:
    tensors, expected = hub.pack_quantized(16, 96, 8)
    settings = compressed(4, 32)
    groups = settings["config_groups"]
    groups["group_0"]["targets"] = ["Embedding"]
    groups["group_1"] = {"targets": ["Linear"], "weights": {"num_bits": 8, "group_size": 32}}
    check(weight_of(open_compressed(files_of(tmp_path, tensors), settings)), expected)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("tensor", [False, True])
def test_int8(tmp_path: Path, asymmetric: bool, tensor: bool) -> None:
    tensors, expected = hub.int_quantized(16, 96, asymmetric=asymmetric, tensor=tensor)
    source = open_compressed(files_of(tmp_path, tensors | {"input_scale": torch.ones(1)}), compressed(8, None))
    check(weight_of(source), expected)
    assert source.notes == ["1 tensor input_scale not used"]


@pytest.mark.parametrize("scales", [np.array([[0.5]]), np.linspace(0.1, 1, 48)[:, None]])
def test_float8_of_compressed_tensors(tmp_path: Path, scales: np.ndarray[Any, Any]) -> None:
    weight, expected = hub.float8(48, 64, scales, (48 // len(scales), 64))
    given = torch.from_numpy(scales).float()
    tensors = {"weight": weight, "weight_scale": given, "k_scale": torch.ones(1)}
    source = open_compressed(files_of(tmp_path, tensors), compressed(8, None, type="float"))
    check(weight_of(source), expected)
    assert list(source.plain()) == [NORM]


def test_mxfp4_of_compressed_tensors(tmp_path: Path) -> None:
    both, exponents, expected = hub.mxfp4(16, 64)
    files = files_of(tmp_path, {"weight_packed": both, "weight_scale": exponents})
    check(weight_of(open_compressed(files, compressed(4, 32, type="float"))), expected)


def test_weights_of_unknown_types_are_errors(tmp_path: Path) -> None:
    tensors = {"weight": torch.ones(4, 32).to(torch.float8_e5m2), "weight_scale": torch.ones(1)}
    with pytest.raises(StartError, match="F8_E5M2"):
        open_compressed(files_of(tmp_path, tensors), compressed(8, None))
    with pytest.raises(StartError, match="F8_E5M2"):
        open_fp8(files_of(tmp_path, tensors), {})


def test_an_uncompressed_weight_stays_plain(tmp_path: Path) -> None:
    files = files_of(tmp_path, {"weight": torch.ones(4, 32), "weight_scale": torch.ones(4, 1)})
    source = open_compressed(files, compressed(8, None))
    assert not source.compact() and sorted(source.plain()) == [f"{MODULE}.weight", NORM]


@pytest.mark.parametrize("block", [(16, 32), (128, 128), (32, 64)])
@pytest.mark.parametrize("shape", [(48, 96), (130, 192)])
def test_fp8_blocks(tmp_path: Path, block: tuple[int, int], shape: tuple[int, int]) -> None:
    scales = np.random.default_rng(1).random((-(-shape[0] // block[0]), -(-shape[1] // block[1]))).astype(np.float32)
    weight, expected = hub.float8(*shape, scales, block)
    files = files_of(tmp_path, {"weight": weight, "weight_scale_inv": torch.from_numpy(scales)})
    found = weight_of(open_fp8(files, {"weight_block_size": list(block)}))
    check(found, expected)
    assert found.coding == "e4m3" and found.bits == 8


def test_fp8_with_scales_in_powers_of_two(tmp_path: Path) -> None:
    exponents = np.array([[120, 127], [130, 124]], np.uint8)
    weight, expected = hub.float8(32, 64, 2.0 ** (exponents.astype(np.float64) - 127), (16, 32))
    scales = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
    files = files_of(tmp_path, {"weight": weight, "weight_scale_inv": scales})
    check(weight_of(open_fp8(files, {"weight_block_size": [16, 32]})), expected)


@pytest.mark.parametrize("scales", [np.array([[0.25]]), np.linspace(0.1, 1, 48)[:, None]])
def test_fp8_per_tensor_and_row(tmp_path: Path, scales: np.ndarray[Any, Any]) -> None:
    weight, expected = hub.float8(48, 80, scales, (48 // len(scales), 80))
    given = torch.from_numpy(scales).float()
    tensors = {"weight": weight, "weight_scale": given.reshape(()) if len(given) == 1 else given}
    source = open_fp8(files_of(tmp_path, tensors | {"input_scale": torch.ones(())}), {"activation_scheme": "static"})
    check(weight_of(source), expected)
    assert source.notes == ["1 tensor input_scale not used"]


def test_damaged_fp8_is_an_error(tmp_path: Path) -> None:
    weight, _ = hub.float8(16, 32, np.ones((1, 1)), (16, 32))
    with pytest.raises(StartError, match="without a scale"):
        open_fp8(files_of(tmp_path, {"weight": weight}), {})
    with pytest.raises(StartError, match="scales"):
        weight_of(open_fp8(files_of(tmp_path, {"weight": weight, "weight_scale": torch.ones(3, 2)}), {}))
    weight.view(torch.uint8)[3, 4] = 0xFF
    with pytest.raises(StartError, match="no numbers"):
        weight_of(open_fp8(files_of(tmp_path, {"weight": weight, "weight_scale": torch.ones(1)}), {}))


def test_mxfp4_of_gpt_oss(tmp_path: Path) -> None:
    experts = [hub.mxfp4(12, 64, seed) for seed in range(3)]
    tensors = {
        "gate_up_proj_blocks": torch.stack([both.view(12, 2, 16) for both, _, _ in experts]),
        "gate_up_proj_scales": torch.stack([exponents for _, exponents, _ in experts]),
        "gate_up_proj_bias": torch.ones(3, 12),
    }
    source = open_mxfp4(files_of(tmp_path, tensors, "model.layers.0.mlp.experts"))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert list(source.stacked()) == [name] and sorted(source.plain()) == [f"{name}_bias", NORM]
    for weight, (_, _, expected) in zip(source.stacked()[name](), experts, strict=True):
        check(weight, expected)


def test_mxfp4_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    tensors = {"gate_up_proj_blocks": torch.zeros(1, 4, 2, 16, dtype=torch.uint8)}
    with pytest.raises(StartError, match="do not fit"):
        open_mxfp4(files_of(tmp_path, tensors))
    tensors["gate_up_proj_scales"] = torch.full((1, 4, 2), 255, dtype=torch.uint8)
    source = open_mxfp4(files_of(tmp_path, tensors))
    with pytest.raises(StartError, match="no numbers"):
        next(iter(source.stacked().values()))()


def test_weights_do_not_change_with_the_file(tmp_path: Path) -> None:
    weight, expected = hub.float8(16, 32, np.ones((1, 1)), (16, 32))
    files = files_of(tmp_path, {"weight": weight, "weight_scale": torch.ones(1)})
    found = weight_of(open_fp8(files, {}))
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    check(found, expected)
