"""The progress of a download from the hub: a bar on a terminal, log lines elsewhere; nothing for one that ends soon."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from common.kv.budget import human_bytes

DELAY_S = 1.0
"""Time after which a download is worth a bar or a line."""
LINE_EVERY_S = 15.0

log = logging.getLogger("tandem.download")


class Download:
    """The bytes of one download. Its methods may be called in any thread. ``stream`` is where the bar is drawn if it is
    a terminal."""

    def __init__(self, model: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._model, self._stream, self._clock = model, stream or sys.stderr, clock
        self._lock = threading.Lock()
        self._began = self._said = clock()
        self._counts: dict[object, list[int]] = {}
        self._bar: Any = None
        self.shown = False
        """Whether a bar or a line was shown."""

    def count(self, counter: object, done: int, total: int) -> None:
        """Note that ``counter`` has counted ``done`` of ``total`` bytes. The library has several counters for the same
        bytes; the one that is furthest is shown."""
        with self._lock:
            self._counts[counter] = [done, max(done, total)]
            if (now := self._clock()) - self._began < DELAY_S:
                return
            done, total = max(self._counts.values())
            if self._stream.isatty():
                self._draw(done, total)
            elif not self.shown or now - self._said >= LINE_EVERY_S:
                self._said = now
                log.info("downloading %s: %s of %s", self._model, human_bytes(done), human_bytes(total))
            self.shown = True

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            columns = (
                TextColumn("downloading {task.description}", markup=False), BarColumn(), DownloadColumn(),
                TransferSpeedColumn(), TimeRemainingColumn(),
            )  # fmt: skip
            self._bar = Progress(*columns, console=Console(file=self._stream), transient=True)
            self._task = self._bar.add_task(self._model, total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        """Remove the bar, or say that a download that was reported is over."""
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
            elif self.shown:
                log.info("downloaded %s in %.0f s", self._model, self._clock() - self._began)


@contextmanager
def counting(model: str) -> Iterator[type[Any]]:
    """Yield what huggingface_hub takes as ``tqdm_class``: bars that draw nothing, but count for a :class:`Download`."""
    from tqdm import tqdm

    download = Download(model)

    class Counter(tqdm):  # type: ignore[misc]
        """A bar of the library. Those of bytes are counted, those of files are not."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.counts = options.get("unit") == "B"
            options.pop("name", None)
            super().__init__(*arguments, **options | {"disable": True})
            self.n, self.total = options.get("initial") or 0, options.get("total")

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if self.counts:
                download.count(self, int(self.n), int(self.total or 0))
            return None

    try:
        yield Counter
    finally:
        download.close()
