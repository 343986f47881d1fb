"""Progress bars of benchmarks: on a terminal only, and gone when they are done."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bench.load import progress
from bench.load.progress import stepped


def test_items_pass_through_and_the_bar_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW_S", 0.0)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    assert list(stepped(console, "steps", ["a", "b", "c"])) == ["a", "b", "c"]
    assert "steps" in out.getvalue() and "2/3" in out.getvalue()
    assert out.getvalue().rstrip().endswith("\x1b[2K"), "its line is cleared"


@pytest.mark.parametrize("console", [None, Console(file=io.StringIO())])
def test_nothing_is_written_elsewhere(console: Console | None) -> None:
    assert list(stepped(console, "steps", [1, 2])) == [1, 2]
    assert console is None or console.file.getvalue() == ""  # type: ignore[attr-defined]
