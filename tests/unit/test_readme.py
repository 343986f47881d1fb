"""What the README says about flags and files is so."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from bench.commands.goals import GOALS
from bench.goals.figures import of_json, table
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


def test_the_table_of_attention_is_what_was_measured() -> None:
    saved = json.loads((ROOT / "bench" / "results" / "kernels-zen4.json").read_text(encoding="utf-8"))
    rows: dict[int, list[str]] = {}
    for each in sorted(saved["attention"], key=lambda each: (each["batch"], each["context"])):
        rows.setdefault(each["batch"], []).append(f"{each['bytes_per_s'] / 1e9:.1f} GB/s, {each['share']:.0%}")
    assert len(rows) == 4 and not saved["slower_than_torch"]
    for batch, cells in rows.items():
        assert f"  | {batch} | {' | '.join(cells)} |" in README


def test_the_goals_are_those_of_one_run_and_each_that_is_missed_is_told_of() -> None:
    folder = ROOT / "bench" / "results"
    saved = json.loads((folder / "goals.json").read_text(encoding="utf-8"))
    document = (folder / "goals.md").read_text(encoding="utf-8").strip()
    rows = [of_json(each) for each in saved["rows"]]
    assert {row.goal for row in rows} == set(GOALS)
    assert not any(saved[what] for what in ("failed", "broken", "left")), "one whole run"
    assert document.startswith("\n".join(table(rows))), "the two files are of one run"
    shown, _, words = README.split("<!-- goals -->\n")[1].partition("<!-- /goals -->\n")
    lines, command = document.splitlines(), document.splitlines()[-1]
    parts = [line for line in lines if line.startswith("- measured before, by a run of ")]
    assert len(parts) == len(saved["parts"]), "one that was resumed says so, here and there"
    told = [*(line for line in lines if line.startswith("|")), "", *parts, *([""] if parts else []), command]
    assert shown.strip().splitlines() == told
    missed = {row.goal for row in rows if row.met is False}
    assert set(re.findall(r"\*\*(C\d+)\*\*", words.partition("\n## ")[0])) == missed
    for picture in ("streams", "timeline", "attainment"):
        assert f"](bench/results/goals-{picture}.png)" in README


def test_every_file_that_is_named_exists() -> None:
    for path in re.findall(r"`([\w/]+(?:/|\.(?:py|md|txt|toml)))`", README):
        if path != "keys.txt" and "/" in path:
            assert (ROOT / path).exists(), path
    for folder, text in ((ROOT, README), (ROOT / "bench", (ROOT / "bench" / "FIGURES.md").read_text(encoding="utf-8"))):
        for path in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (folder / path).exists(), path


def test_every_heading_that_is_linked_exists() -> None:
    linked = [
        (document, (document.parent / path).resolve() if path else document, anchor)
        for document in (ROOT / "README.md", ROOT / "bench" / "FIGURES.md")
        for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text(encoding="utf-8"))
    ]
    assert len(linked) > 10
    for document, target, anchor in linked:
        lines = target.read_text(encoding="utf-8").splitlines()
        assert anchor in {_anchor(line) for line in lines if line.startswith("#")}, (document.name, target.name, anchor)


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lstrip("# ").lower()).replace(" ", "-")
