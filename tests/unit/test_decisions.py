"""The form of the decision pages: their number, their length, their parts, and that the index names each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "decisions"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.name != "index.md")
PARTS = ["Context.", "Choice.", "Cost.", "Evidence.", "Reopen when."]
MAX_PAGES, MAX_LINES, MAX_COLUMNS = 45, 20, 120


def test_there_are_few_pages_and_they_are_numbered_in_order() -> None:
    assert 0 < len(PAGES) <= MAX_PAGES
    names = [page.name for page in PAGES]
    assert all(re.fullmatch(r"\d\d-[a-z0-9]+(-[a-z0-9]+)*\.md", name) for name in names)
    assert [int(name[:2]) for name in names] == list(range(1, len(names) + 1))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_and_has_a_title_and_the_five_parts(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= MAX_COLUMNS
    title, *paragraphs = "\n".join(lines).split("\n\n")
    assert re.fullmatch(r"# \S.*", title)
    assert [re.match(r"\*\*(.*?)\*\* \S", paragraph).group(1) for paragraph in paragraphs] == PARTS


def test_the_index_links_each_page_and_lists_it_in_its_toctree() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((\d\d-[^)]*)\)", index) == [page.name for page in PAGES]
    toctree = index.split("```{toctree}\n:hidden:\n\n")[1].split("\n```")[0]
    assert toctree.split() == [page.stem for page in PAGES]
