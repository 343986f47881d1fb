"""Pytest plugin that checks that no log contains a key used by a test.

A test that needs a key or a file of cluster keys creates it here, or registers a fixed one. All logs are searched for
all registered keys: log records of this process as they are emitted, captured output of each test, and the log of a
child process when that process has ended (or at the end of the session if it never does). Both the test during which a
key was found and the session fail. Under xdist every worker searches its own logs for its own keys.
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
    """Return a new random key that no log may contain from now on."""
    return register(f"sk-{secrets.token_hex(12)}")


def register(key: str) -> str:
    """Register ``key`` as one that no log may contain, and return it. It must not be a word that logs contain
    anyway."""
    _keys.add(key)
    return key


def keygen(path: Path, *words: str) -> Path:
    """Run ``tandem keygen --out PATH WORDS``, register the secrets in the file, and return ``path``."""
    from deploy.cli import main as cli

    assert cli.main(["keygen", "--out", str(path), *words]) == 0
    register_cluster_keys(path)
    return path


def register_cluster_keys(path: Path) -> list[str]:
    """Register and return the secrets of a file of cluster keys: as the file has them, and base64-encoded, as a
    launcher passes them to its child processes."""
    found = json.loads(path.read_text())["secret"].values()
    return [register(each) for key in found for each in (key, base64.b64encode(key.encode()).decode())]


def watch(log: Path) -> None:
    """Register ``log`` to be searched by :func:`search`, at the latest at the end of the session."""
    _logs.add(log)


def search(log: Path) -> None:
    """Search a log whose process has ended."""
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
    """Searches every log record that this process emits."""

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
        # log records were searched when they were emitted
        if name.endswith(call.when) and not name.startswith("Captured log"):
            _look(text, f"{item.nodeid}, {name}")
    if call.when == "teardown":  # so that the next test does not report these again
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
    """Collect the leaks that an xdist worker found."""
    _all_found.extend(getattr(node, "workeroutput", {}).get("leaked_keys", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _all_found:
        terminalreporter.section("keys in logs")
        for leak in _all_found:
            terminalreporter.line(leak)
