"""A pytest plugin: no log holds a key that a test has used.

A test that needs a key, or a file of cluster keys, makes one here, or tells of one that must be the same every time.
Every log is searched for all of them: what this process logs, record by record; what a test's output captures; the log
of a process when that process has ended, and of those that never did at the end of the session. A test during which a
key was found fails, and so does the session. With xdist every worker searches its own logs for its own keys.
"""

from __future__ import annotations

import base64
import json
import logging
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_keys: set[str] = set()
_logs: set[Path] = set()
_found: list[str] = []
_all_found: list[str] = []


def new_key() -> str:
    """A key that no log may hold from now on."""
    return register(f"sk-{secrets.token_hex(12)}")


def register(key: str) -> str:
    """``key``, which no log may hold from now on. A word that logs hold anyway is no key for a test."""
    _keys.add(key)
    return key


def keygen(path: Path, *words: str) -> Path:
    """``path`` with the keys that ``tandem keygen --out PATH WORDS`` makes, no secret of which a log may hold."""
    from deploy.cli import main as cli

    assert cli.main(["keygen", "--out", str(path), *words]) == 0
    register_cluster_keys(path)
    return path


def register_cluster_keys(path: Path) -> list[str]:
    """The secrets of a file of cluster keys, which no log may hold from now on: as the file has them, and in base64, as
    a launcher hands them to its children."""
    found = json.loads(path.read_text())["secret"].values()
    return [register(each) for key in found for each in (key, base64.b64encode(key.encode()).decode())]


def watch(log: Path) -> None:
    """``log`` is searched when :func:`search` is called, at the latest at the end of the session."""
    _logs.add(log)


def search(log: Path) -> None:
    """Searches a log whose process has ended."""
    if log in _logs:
        _logs.discard(log)
        if _keys and log.exists():
            _look(log.read_text(errors="replace"), str(log))


def _look(text: str, where: str) -> None:
    for key in [key for key in _keys if key in text]:
        for line in text.splitlines():
            if key in line:
                leak = f"{where}: {line.replace(key, 'KEY')[:300]}"
                _found.append(leak)
                _all_found.append(leak)


class _Records(logging.Handler):
    """Searches what this process logs, at every level that is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        if _keys:
            _look(self.format(record), f"logger {record.name}")


_records = _Records()


@pytest.fixture(autouse=True)
def no_key_is_logged() -> Iterator[None]:
    logging.getLogger().addHandler(_records)
    yield
    logging.getLogger().removeHandler(_records)
    if _found:
        leaks = "\n  ".join(_found)
        _found.clear()
        pytest.fail(f"a key was logged\n  {leaks}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    for name, text in report.sections:  # type: ignore[attr-defined]
        if name.endswith(call.when) and not name.startswith("Captured log"):  # records were searched one by one
            _look(text, f"{item.nodeid}, {name}")
    if call.when == "teardown":  # of this test, not of the next
        _found.clear()
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    for log in list(_logs):
        search(log)
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["leaked_keys"] = list(_all_found)
    elif _all_found:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Of xdist: a worker has ended."""
    _all_found.extend(getattr(node, "workeroutput", {}).get("leaked_keys", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _all_found:
        terminalreporter.section("keys in logs")
        for leak in _all_found:
            terminalreporter.line(leak)
