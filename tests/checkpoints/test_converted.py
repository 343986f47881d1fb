"""A checkpoint without tokenizer.json is served: text, chats and grammars, all from the converted one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from common.checkpoint.files import open_checkpoint
from tests.e2e.spawner import Spawner
from tests.e2e.system import RunningSystem, TandemProcess
from tests.models import SPECIALS
from tests.reference import Reference, greedy

pytestmark = pytest.mark.e2e


def without_tokenizer_json(original: Path, path: Path) -> Path:
    """Copy a checkpoint with vocab.json and merges.txt in place of tokenizer.json."""
    shutil.copytree(original, path)
    Tokenizer.from_file(str(path / "tokenizer.json")).model.save(str(path))
    (path / "tokenizer.json").unlink()
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "GPT2Tokenizer", "extra_special_tokens": list(SPECIALS)}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


async def test_a_converted_tokenizer_is_used_everywhere(
    checkpoint: Callable[[str], Path], tmp_path: Path, one_spawner: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # TANDEM_ variables do not reach the system
    original = checkpoint("llama")
    model = without_tokenizer_json(original, tmp_path / "model")
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"], "maxProperties": 1}
    TandemProcess.spawner = one_spawner
    try:
        with RunningSystem.up(tmp_path, model, "--prefill", "1", "--decode", "1") as system:
            assert "converted from vocab.json and merges.txt" in system.process.text
            async with system.client() as client:
                chat = await client.chat("hello", temperature=0, max_tokens=12, ignore_eos=True)
                form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
                shaped = await client.chat("hello", temperature=1, seed=3, max_tokens=60, response_format=form)
    finally:
        TandemProcess.spawner = None
    mine = open_checkpoint(str(model))
    tokenizer = Tokenizer.from_file(str(original / "tokenizer.json"))
    expected = tokenizer.encode("<|bos|><|user|>hello<|end|><|assistant|>", add_special_tokens=False).ids
    assert chat.prompt == expected
    Reference(original, 2048).check(expected, chat.ids, greedy(12))
    assert json.loads(shaped.choices[0].text)["a"] in ("x", "yy")
    assert mine.fingerprint == open_checkpoint(str(original)).fingerprint
    assert mine.path.is_relative_to(Path(os.environ["XDG_CACHE_HOME"]))
