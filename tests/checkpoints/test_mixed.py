"""Checkpoints of which some layers have integer codes and others float8, as compressed-tensors writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.checkpoint.files import open_checkpoint
from common.checkpoint.preview import preview
from common.engine.loading import load_engine
from deploy.launcher.inspection import inspect
from tests.checkpoints.format_cases import FLOATS, PACKED, compressed
from tests.checkpoints.quantized_maker import Array, Pair, Rounded, fp8_tensor, pack_quantized, quantized_hub
from tests.models import make_model


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model with 12 projections of attention in float8, and 9 of its MLPs in codes of 4 bits."""
    directory = tmp_path_factory.mktemp("mixed")
    original = make_model("llama", directory / "original", intermediate_size=128)
    settings = compressed("mixed-precision", FLOATS)
    packed = {"targets": ["re:.*mlp.*"], "weights": PACKED, "format": "pack-quantized"}
    settings["config_groups"]["group_1"] = packed

    def encode(weight: Array) -> Rounded:
        return pack_quantized(weight) if 128 in weight.shape else fp8_tensor(weight)

    return quantized_hub(original, directory, settings, encode)


def products(model: Path, how: str) -> str:
    options = {"dtype": "float32", "num_kv_blocks": 8, "max_batched_tokens": 64, "max_num_seqs": 4, "batch_hint": 4}
    engine = load_engine(open_checkpoint(str(model)), products=how, **options)  # type: ignore[arg-type]
    engine.close()
    return next(note for note in engine.notes if note.startswith("weights stay quantized"))


def test_a_start_says_which_products_are_exact(mixed: Pair) -> None:
    note = products(mixed.model, "auto")
    assert "12 in fp8" in note and "9 in compressed-tensors 4-bit" in note
    assert "products are integer (activations rounded to 8 or 16 bits), exact with fp8" in note
    assert "products are exact" in products(mixed.model, "exact")


def test_inspect_describes_all_formats(mixed: Pair) -> None:
    found = inspect(preview(str(mixed.model)))
    assert found.format == "compressed-tensors 8-bit float, scales per tensor; 4-bit integer, groups of 32"
    assert any("rounded to 8 or 16 bits, but not for F8_E4M3" in each for each in found.fast)
    assert found.parameters == inspect(preview(str(mixed.reference))).parameters
