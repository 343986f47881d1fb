"""Where generated files are kept, also if the configured directory cannot be used."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.checkpoint.cache_root import cache_root

pytestmark = pytest.mark.processes
PRINTED = "from common.checkpoint.cache_root import cache_root; print(cache_root())"


def test_child_processes_use_the_temporary_directory_of_their_parent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING):
        found = cache_root()
    assert found.is_dir() and str(tmp_path / "file" / "cache") in caplog.text
    assert cache_root() == found and os.environ["TANDEM_CACHE"] == str(found)
    child = subprocess.run([sys.executable, "-c", PRINTED], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == str(found) and not child.stderr
    assert found.is_dir(), "a child that ends removes only its own"


def test_a_temporary_directory_ends_with_its_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    environment = {**os.environ, "TANDEM_CACHE": str(tmp_path / "file" / "cache")}
    process = subprocess.run([sys.executable, "-c", PRINTED], capture_output=True, text=True, env=environment)
    assert process.returncode == 0 and not Path(process.stdout.strip()).exists()
