"""Rotary scaling reaches beyond the length that the configuration names, if it is asked for."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint.context import limit
from common.checkpoint.files import open_checkpoint
from common.core.errors import StartError
from common.kv.budget import fit
from common.kv.layout import KvLayout, LayerLayout
from tests.checkpoints.makers import write
from tests.e2e.spawner import Spawner
from tests.e2e.system import RunningSystem, TandemProcess
from tests.models import make_model
from tests.reference import Reference, greedy

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
SCALED = [
    # (rotary parameters, model type, tokens)
    ({"rope_parameters": YARN}, "qwen3", 131_072),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "llama", 131_072),
    ({"rope_scaling": {"type": "linear", "factor": 2.5}}, "llama", 81_920),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "llama", 65_536),
    ({"rope_scaling": {"type": "yarn", "factor": 16.0}, "original_max_position_embeddings": 4096}, "llama", 65_536),
    ({"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}}, "olmo3", 131_072),
]
NOT_SCALED: list[tuple[dict[str, Any], str]] = [
    ({}, "llama"),
    ({"rope_scaling": None}, "llama"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "llama"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}}, "llama"),
    ({"rope_scaling": {"type": "longrope", "factor": 32.0}}, "phi3"),
    ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, "gemma3_text"),
    ({"rope_parameters": YARN | {"original_max_position_embeddings": 8192}}, "deepseek_v3"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 8192}, "llama"),
]


@pytest.mark.parametrize(("fields", "kind", "tokens"), SCALED)
def test_scaling_reaches_beyond_the_models_length(fields: dict[str, Any], kind: str, tokens: int) -> None:
    reached, why = limit({"max_position_embeddings": 32_768, "model_type": kind} | fields)
    assert reached == tokens and f"scaling reaches {tokens:,}" in why


@pytest.mark.parametrize(("fields", "kind"), NOT_SCALED)
def test_scaled_lengths_that_the_configuration_has_already(fields: dict[str, Any], kind: str) -> None:
    assert limit({"max_position_embeddings": 32_768, "model_type": kind} | fields) == (32_768, "")


def test_a_length_beyond_all_positions_is_cut() -> None:
    most, _ = limit({"max_position_embeddings": 32_768, "rope_scaling": {"type": "yarn", "factor": 1e300}})
    assert most == 2**31 - 1


def test_the_messages_say_how_far_and_how(tmp_path: Path) -> None:
    scaled = {"max_position_embeddings": 512, "rope_scaling": YARN | {"original_max_position_embeddings": 512}}
    found = open_checkpoint(str(write(tmp_path, {"config.json": scaled})))
    assert (found.max_position, found.position_limit) == (512, 2048)
    layout = KvLayout((LayerLayout(2, 16, 16),), "float32", 16)
    known = {"limit": found.position_limit, "scaling": found.scaling}
    with pytest.raises(StartError) as caught:
        fit(layout, 512, 2049, kv_bytes=1 << 30, **known)  # type: ignore[arg-type]
    assert "was made for 512; its yarn scaling reaches 2,048" in caught.value.why
    assert "--max-model-len 2048" in caught.value.todo
    assert fit(layout, 512, 2048, kv_bytes=1 << 30, **known).max_model_len == 2048  # type: ignore[arg-type]
    own = fit(layout, 512, None, kv_bytes=1 << 30, **known)  # type: ignore[arg-type]
    assert own.max_model_len == 512 and "its yarn scaling reaches 2,048" in own.notes[-1]


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["yarn", "linear"])
async def test_tokens_beyond_the_models_length_are_right(kind: str, tmp_path: Path, one_spawner: Spawner) -> None:
    scaling = {"rope_type": kind, "factor": 4.0, "rope_theta": 10_000.0}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = 256
    model = make_model("llama", tmp_path / "model", max_position_embeddings=256, rope_parameters=scaling)
    prompt = random.Random(7).choices(range(20, 500), k=700)
    TandemProcess.spawner = one_spawner
    try:
        with RunningSystem.up(
            tmp_path, model, "--prefill", "1", "--decode", "1",
            small=("--dtype", "float32", "--threads", "1", "--num-kv-blocks", "200", "--max-model-len", "1024"),
        ) as system:  # fmt: skip
            async with system.client() as client:
                answer = await client.complete(prompt, temperature=0, max_tokens=24, ignore_eos=True)
    finally:
        TandemProcess.spawner = None
    Reference(model, 1024).check(prompt, answer.ids, greedy(24))
