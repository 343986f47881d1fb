"""What the README says about flags and files is so."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from common.config.coordinator import CoordinatorConfig
from common.config.options import options
from common.config.worker import WorkerConfig
from common.net import keys
from deploy.cli.commands import COMMANDS, CONFIGS, FAMILIES, load_config
from deploy.cli.flag_table import flag_table, with_table
from deploy.cli.main import build_parser
from tests.chaos.cells import CELLS
from tests.leaked_keys import new_key

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_flag_table_is_the_one_of_today() -> None:
    assert with_table(README) == README, "run: python -m deploy.cli.flag_table README.md"


def test_every_flag_is_in_the_table() -> None:
    table = flag_table()
    for config in CONFIGS:
        for item in options(config):
            assert f"`{item.flag}`" in table


def test_a_document_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="markers"):
        with_table("nothing")


def test_every_flag_in_the_text_exists() -> None:
    every = [item for config in CONFIGS for item in options(config)]
    known = {flag for item in every for flag in (item.flag, *item.aliases)} | {"--config", "--version"}
    known |= {f"--no-{flag[2:]}" for flag in known}
    for flag in re.findall(r"--[a-z][a-z-]+", re.sub(r"`python -m\s[^`]*`", "", README)):
        assert flag in known, flag


def test_every_command_that_is_shown_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its flags, and with leave to bind where it says: none would be refused before it opens its model."""
    _, commands = build_parser()
    monkeypatch.chdir(tmp_path)
    keys.make(tmp_path / "cluster.key")
    (tmp_path / "keys.txt").touch(0o600)
    (tmp_path / "keys.txt").write_text(new_key())
    shown = re.findall(r"^\w?\$ (?:\.venv/bin/)?tandem (\w+) ?(.*?)(?: +#.*)?$", README, re.MULTILINE)
    assert {name for name, _ in shown} == {"chat", "coordinator", "prefill", "decode", "eval", "keygen", "bench"}
    for first, rest in shown:
        second, _, words = rest.partition(" ") if first in FAMILIES else ("", "", rest)
        name = f"{first} {second}".strip()
        given = vars(commands[name].parse_args(shlex.split(words)))
        loaded = load_config(COMMANDS[name].config, given, {}, **COMMANDS[name].fixed).config
        if isinstance(loaded, CoordinatorConfig | WorkerConfig):
            replace(loaded, cluster_key_file=str(tmp_path / "cluster.key")).check_binds()


def test_what_a_newcomer_must_be_told_is_told() -> None:
    assert "it is for trying and for testing the server" in " ".join(README.split())
    for words in ("x-tandem-ignored", "(kvtransfer/PROTOCOL.md)", "SendLink", "BACKENDS"):
        assert words in README


def test_the_table_of_faults_is_the_one_that_was_measured() -> None:
    matrix = (ROOT / "bench" / "results" / "chaos.md").read_text(encoding="utf-8").split("\n## ")
    told = README.split("<!-- faults -->\n")[1].split("<!-- /faults -->")[0]
    assert told.strip() == matrix[1].removeprefix("The matrix").strip() + "\n\n" + matrix[0].split("\n\n")[1].strip()


def test_every_cell_of_the_matrix_was_measured_against_its_bound() -> None:
    wanted: dict[tuple[str, str, str], dict[str, str]] = {}
    for cell in CELLS:
        turn = f", turn of {cell.turn_s:g}" if cell.turns else ""
        wanted.setdefault((cell.name, cell.expect, cell.measure), {})[cell.phase] = f"of {cell.bound_s:g}{turn}"
    told = README.split("<!-- faults -->\n")[1].split("<!-- /faults -->")[0]
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in told.splitlines() if line.startswith("| ")]
    measured = {
        (name, expect, measure): {
            phase: re.sub(r"\d+\.\d+ of", "of", entry) for phase, entry in zip("QPXDS", entries, strict=True) if entry
        }
        for name, expect, measure, *entries, _ in rows[1:]
    }
    assert measured == wanted


def test_every_file_that_is_named_exists() -> None:
    for path in re.findall(r"`([\w/]+(?:/|\.(?:py|md|txt|toml)))`", README):
        if path != "keys.txt" and "/" in path:
            assert (ROOT / path).exists(), path
