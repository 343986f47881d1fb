"""The limit on open files is raised as far as the system allows, and a low one is logged."""

from __future__ import annotations

import resource

import pytest

from common.platform import open_files


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "warned"),
    [
        (256, 4096, 4096, False),
        (1024, resource.RLIM_INFINITY, open_files.MOST_FILES, False),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY, False),
        (1 << 20, 1 << 20, 1 << 20, False),
        (50, 100, 100, True),
        (100, 100, 100, True),
    ],
)
def test_the_limit(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    wanted: int,
    warned: bool,
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    open_files.raise_limit()
    assert limits[-1] == (wanted, hard)
    assert [wanted in map(int, filter(str.isdigit, each.message.split())) for each in caplog.records] == warned * [True]
    assert 0 < open_files.reserved() < open_files.limit() // 2
