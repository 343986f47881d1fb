"""The benchmark of grammars measures each schema, and each hostile grammar beside streams."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.micro import grammar
from tests.pace import scaled

pytestmark = pytest.mark.e2e
COMMAND = [sys.executable, "-m", "deploy.cli", "bench", "grammar", "--rounds", "1", "--tokens", "50", "--streams", "2"]


@pytest.mark.whole
def test_it_measures_every_grammar(tmp_path: Path) -> None:
    command = [*COMMAND, "--save", str(saved := tmp_path / "grammar.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120), check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(saved.read_text())
    assert found["tokens"].keys() == grammar.SCHEMAS.keys() and found["beside"].keys() == grammar.BESIDE.keys()
    assert all(each["token_s"] > 0 for each in found["tokens"].values())
    for name in (*grammar.SCHEMAS, *grammar.BESIDE):
        assert f"| {name} |" in done.stdout
