"""Progress bars of benchmarks: shown on a terminal, silent elsewhere, gone when they are done."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

REDRAW_S = 0.5

T = TypeVar("T")


class Bar:
    """A progress bar of ``total`` steps. It has no thread, which would disturb what is measured: it is redrawn when a
    step ends, at most every ``REDRAW_S`` seconds."""

    def __init__(self, console: Console | None, title: str, total: int) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        shown = console is not None and console.is_terminal
        self._progress = Progress(*columns, console=console, disable=not shown, auto_refresh=False, transient=True)
        self._task = self._progress.add_task(title, total=total)
        self._drawn_at = 0.0

    def __enter__(self) -> Bar:
        """Show the bar."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self) -> None:
        """Note that a step has ended."""
        self._progress.advance(self._task)
        now = time.monotonic()
        if now - self._drawn_at >= REDRAW_S:
            self._drawn_at = now
            self._progress.refresh()


def stepped(console: Console | None, title: str, items: Sequence[T]) -> Iterator[T]:
    """Yield ``items`` with a bar that advances from one to the next."""
    with Bar(console, title, len(items)) as bar:
        for item in items:
            yield item
            bar.advance()
