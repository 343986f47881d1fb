"""The Triton backend serves whole systems on a CPU, in Triton's interpreter: every token is right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.system import RunningSystem, TandemProcess
from tests.e2e.test_tokens import ONE_ONE, check, prompt_of
from tests.models import make_model, spread_kv
from tests.reference import Reference

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.whole,  # a step of the interpreter takes seconds; its kernels are tested one by one in any case
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]
LENGTHS = (5, 52)
"""The longer one exceeds the windows of Gemma 2 and gpt-oss."""
SLOW = ("--max-num-seqs", "2", "--max-model-len", "256", "--failure-timeout", "60")
"""For steps that take seconds on a busy machine."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt-oss"])
async def test_every_token_is_right(
    kind: str,
    checkpoint: Callable[[str], Path],
    oracle: Callable[[str], Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Grouped heads, softcap and windows, sinks; prompts on prefill, tokens after a hand-off on decode."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(TandemProcess, "spawner", None)  # a forked worker would have imported triton before
    flags = (*ONE_ONE, "--attention", "triton", "--local-prefill", "never", *SLOW)
    fields = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True, "logprobs": 0}
    with RunningSystem.up(tmp_path, checkpoint(kind), *flags) as system:
        async with system.client() as client:
            answers = await asyncio.gather(*(client.complete(prompt_of(length, 90), **fields) for length in LENGTHS))
        await system.process.until_logged("triton: as requested, in Triton's interpreter")
    for answer in answers:
        assert answer.path == "disagg"
        check(oracle(kind), answer, fields, f"{len(answer.prompt)} tokens")


@pytest.mark.timeout(500)
async def test_kv_in_fp8_gives_the_tokens_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head has a scale of its own. torch attends to the same pool in the same system, without the interpreter."""
    model = spread_kv(make_model("llama", tmp_path / "model"))
    fields = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    prompts = [prompt_of(length, 90) for length in LENGTHS]
    monkeypatch.setattr(TandemProcess, "spawner", None)  # a forked worker would have imported triton before
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found: dict[str, list[list[int]]] = {}
    for attention in ("triton", "torch"):
        flags = (*ONE_ONE, "--attention", attention, "--kv-cache-dtype", "fp8", "--local-prefill", "never", *SLOW)
        (folder := tmp_path / attention).mkdir()
        with RunningSystem.up(folder, model, *flags) as system:
            async with system.client() as client:
                answers = await asyncio.gather(*(client.complete(prompt, **fields) for prompt in prompts))
            for part in (f"{attention}: as requested", "12 of 12 scales differ from 1"):
                await system.process.until_logged(part)
        assert all(answer.path == "disagg" for answer in answers)
        found[attention] = [answer.ids for answer in answers]
    assert found["triton"] == found["torch"]
