"""Files of saved figures: one run, or several named runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.load import results
from common.core.errors import StartError


@pytest.mark.processes  # a saved run names its commit, which git tells
def test_a_file_has_one_run_or_several_with_names(tmp_path: Path) -> None:
    one, several = tmp_path / "one.json", tmp_path / "several.json"
    results.save(one, {"rate": 1.0})
    assert results.load(one)["rate"] == 1.0 and results.load(one)["machine"]["cores"] >= 1
    for name, rate in (("short", 1.0), ("long", 2.0), ("short", 3.0)):
        results.save(Path(f"{several}#{name}"), {"rate": rate})
    assert {name: each["rate"] for name, each in json.loads(several.read_text()).items()} == {"short": 3.0, "long": 2.0}
    assert results.load(Path(f"{several}#long"))["rate"] == 2.0
    with pytest.raises(KeyError):
        results.load(Path(f"{several}#tight"))


@pytest.mark.processes  # a saved run names its commit, which git tells
def test_a_run_is_not_added_to_a_file_of_one(tmp_path: Path) -> None:
    results.save(file := tmp_path / "one.json", {"rate": 1.0})
    with pytest.raises(StartError, match="the file holds one run"):
        results.save(Path(f"{file}#short"), {"rate": 2.0})
    assert results.load(file)["rate"] == 1.0
