"""The comparison with llama.cpp: its options, and the memory of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.commands.gguf import run
from bench.load.sides import descendants, memory
from bench.peers import llamacpp
from common.config.bench.gguf import BenchGgufConfig
from common.core.errors import StartError

HOLD = "import sys; held = bytearray(64 << 20); print(len(held), flush=True); sys.stdin.read()"


@pytest.mark.processes
def test_memory_is_that_of_descendants() -> None:
    before = descendants()
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        new = descendants() - before
        assert child.pid in new and os.getpid() not in new
        assert memory([child.pid]) >= 64 << 20
        child.communicate(b"")
    assert memory([child.pid]) == 0, "it has ended"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shape": "1/2/3"}, "no shape"),
        ({"shape": "0/1/1/1/1/1"}, "no shape"),
        ({"types": "q8_0,q3_k"}, "q3_k"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, str], words: str) -> None:
    config = BenchGgufConfig(file="", **options)  # type: ignore[arg-type]
    with pytest.raises(StartError, match=words):
        _ = (config.shape_numbers, config.type_names)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="nothing to compare with"):
        run(BenchGgufConfig(file=""))
    with pytest.raises(StartError, match=r"no llama\.cpp") as caught:
        llamacpp.random_files(tmp_path, tmp_path / "tokenizer.json", (1, 1, 1, 1, 1, 1), ["q8_0"], tmp_path)
    assert "--peer llamacpp" in caught.value.todo
