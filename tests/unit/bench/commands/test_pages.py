"""``tandem bench pages``: the tables of the benchmark pages equal the saved figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.commands.pages import TABLES, with_tables
from bench.load.results import ROOT
from common.core.errors import StartError
from deploy.cli import main as cli

RESULTS, DOCS = ROOT / "bench" / "results", ROOT / "docs" / "benchmarks"
PAGES = sorted(DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_are_those_of_the_saved_figures(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_tables(text, RESULTS) == text, "run: tandem bench pages"


def test_each_machine_has_its_page_and_each_file_is_on_it() -> None:
    machines = {path.name for path in RESULTS.iterdir() if path.is_dir()} - {"local"}
    assert {page.stem for page in PAGES} == machines | {"index"}
    for machine in machines:
        text = (DOCS / f"{machine}.md").read_text(encoding="utf-8")
        for path in (RESULTS / machine).iterdir():
            assert path.name in text, f"{machine}.md does not use {path.name}"


def test_there_are_at_most_twenty_files() -> None:
    files = [path for path in RESULTS.rglob("*") if path.is_file() and path.parent.name != "local"]
    assert len(files) <= 20


def test_a_page_is_rewritten_and_an_unknown_table_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "zen4.md"
    page.write_text("# Zen 4\n\n<!-- table: wire zen4 -->\nold\n<!-- /table -->\n\nend\n")
    assert cli.main(["bench", "pages", "--results", str(RESULTS), "--docs", str(tmp_path)]) == 0
    text = page.read_text()
    assert "| shared memory | " in text and "old" not in text and text.endswith("<!-- /table -->\n\nend\n")
    assert capsys.readouterr().out == f"{page}\n"
    assert set(TABLES) >= {"goals", "compare", "wire"}
    for marker in ("nothing zen4", "goals nowhere"):
        with pytest.raises(StartError, match="no table"):
            with_tables(f"<!-- table: {marker} -->\n<!-- /table -->", RESULTS)
