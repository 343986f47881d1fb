"""The progress of a download: nothing for a short one, a bar on a terminal, a few lines elsewhere."""

from __future__ import annotations

import io
import logging

import pytest

from common.checkpoint import download_progress
from common.checkpoint.download_progress import LINE_EVERY_S, Download, counting


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "tandem.download")
    return caplog


def test_a_short_download_says_nothing(lines: pytest.LogCaptureFixture) -> None:
    for stream in (io.StringIO(), Terminal()):
        clock = Clock()
        download = Download("owner/name", stream, clock)
        download.count("a", 5, 10)
        clock.now = 0.9
        download.count("a", 10, 10)
        download.close()
        assert not stream.getvalue() and not lines.messages and not download.shown


def test_lines_of_a_long_one(lines: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    download = Download("owner/name", io.StringIO(), clock)
    for second in range(40):
        clock.now = float(second)
        download.count("a", second << 20, 40 << 20)
        download.count("b", 0, 0)
    download.close()
    assert lines.messages[0] == "downloading owner/name: 1.0 MiB of 40.0 MiB"
    assert (
        len(lines.messages) == 1 + int(39 // LINE_EVERY_S) + 1 and lines.messages[-1] == "downloaded owner/name in 39 s"
    )


def test_a_bar_on_a_terminal(lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    clock, stream = Clock(), Terminal()
    download = Download("owner/[name]", stream, clock)
    for second in range(3):
        clock.now = float(second)
        download.count("a", second << 20, 2 << 20)
    download.close()
    assert "downloading owner/[name]" in stream.getvalue() and not lines.messages


def test_the_bars_of_the_library_count(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(Download, "count", lambda _, counter, done, total: found.append((done, total)))
    with counting("owner/name") as bars:
        with bars(desc="bytes", total=0, initial=0, unit="B", unit_scale=True, name="x", bar_format="{n}") as bar:
            bar.total = 30
            bar.refresh()
            bar.update(10)
            bar.set_description("half")
            bar.set_postfix_str("1 MB/s", refresh=False)
            bar.update(20)
        assert list(bars(iter("ab"), desc="files", total=2)) == ["a", "b"]
        bars(total=2, desc="files").update(1)
    assert found == [(10, 30), (30, 30)]
    assert capsys.readouterr().err == ""
    assert download_progress.DELAY_S > 0
