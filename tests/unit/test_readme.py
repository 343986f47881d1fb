"""What the README says about flags and files is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.config import CONFIGS
from common.options import options
from deploy.flags import flag_table, with_table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_flag_table_is_the_one_of_today() -> None:
    assert with_table(README) == README, "run: python -m deploy.flags README.md"


def test_every_flag_is_in_the_table() -> None:
    table = flag_table()
    for config in CONFIGS:
        for item in options(config):
            assert f"`{item.flag}`" in table


def test_a_document_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="markers"):
        with_table("nothing")


def test_every_flag_in_the_text_exists() -> None:
    known = {item.flag for config in CONFIGS for item in options(config)} | {"--config"}
    known |= {f"--no-{flag[2:]}" for flag in known}
    for flag in re.findall(r"--[a-z][a-z-]+", README):
        assert flag in known | {"--kv-cache-memory-bytes", "--num-gpu-blocks-override"}, flag


def test_every_file_that_is_named_exists() -> None:
    for path in re.findall(r"`([\w/]+(?:/|\.(?:py|md|txt|toml)))`", README):
        if path != "keys.txt" and "/" in path:
            assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / path).exists(), path
