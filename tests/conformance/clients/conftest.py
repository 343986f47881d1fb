"""The address of the server for each check, validation of all that passed, and the results of a run.

Runs in an environment of its own, without Tandem's packages. ``CONFORMANCE_URL`` is a recorder's (``recorder.py``);
``CONFORMANCE_RESULTS`` names the file that gets one JSON line per check.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # not the root, whose packages need what is not installed here

import validation
from refused import REFUSED, Refusal

_URL = os.environ["CONFORMANCE_URL"]
_RESULTS = Path(os.environ["CONFORMANCE_RESULTS"])
_LOCAL = ("127.0.0.1", "localhost", "::1")
_outcome = pytest.StashKey[dict[str, pytest.TestReport]]()
_strangers: list[str] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse every address but this machine's: no client may fetch price lists or send telemetry."""
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host is not None and host not in _LOCAL:
        _strangers.append(f"{event} {host}")
        raise ConnectionRefusedError(f"a client called {host}")


sys.addaudithook(_watch)


def check_name(item: pytest.Item) -> str:
    """``openai.chat_stream`` or ``openai.tools[none]``: the module's client and the function."""
    return f"{item.path.stem.removeprefix('check_')}.{item.name}"


@pytest.fixture
def base(request: pytest.FixtureRequest) -> str:
    """The server's base URL for this check, without ``/v1``."""
    return f"{_URL}/at/{_slug(check_name(request.node))}"


@pytest.fixture
def url(base: str) -> str:
    """The server's base URL with ``/v1``."""
    return f"{base}/v1"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9_.]+", "-", name.lower())


def _exchanges(name: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{_URL}/recorded/{_slug(name)}") as response:
        return json.load(response)


@pytest.fixture(autouse=True)
def what_passed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Validate every body and event of the check; a refused one must be refused as the table says."""
    name = check_name(request.node)
    _strangers.clear()
    _exchanges(name)
    yield
    assert not _strangers, _strangers
    exchanges = _exchanges(name)
    if os.environ.get("CONFORMANCE_SHOW"):
        print(json.dumps(exchanges, indent=1))
    for exchange in exchanges:
        validation.check(exchange)
    refusal = REFUSED.get(name)
    if refusal is not None:
        assert exchanges, "no request was sent"
        last = exchanges[-1]
        assert (last["status"], json.loads(last["body"])["error"].get("code")) == (refusal.status, refusal.code), last
    else:
        assert exchanges or request.node.get_closest_marker("local"), "no request was sent"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """A check in ``REFUSED`` must raise; its error is the outcome ``refused``."""
    report = yield
    refusal = REFUSED.get(check_name(item))
    if call.when == "call" and refusal is not None:
        if report.failed:
            report.outcome, report.longrepr = "passed", None
        else:
            report.outcome, report.longrepr = "failed", "REFUSED lists it, but it works"
    item.stash.setdefault(_outcome, {})[report.when] = report
    if call.when == "teardown":
        _write(item, refusal)
    return report


def _write(item: pytest.Item, refusal: Refusal | None) -> None:
    reports = item.stash[_outcome].values()
    outcome, reason = "ok", ""
    if refusal is not None:
        outcome, reason = "refused", refusal.reason
    for report in reports:
        if report.skipped:
            outcome, reason = "skipped", str(report.longrepr[2]).removeprefix("Skipped: ")
        elif report.failed:
            outcome, reason = "failed", str(report.longrepr).strip().splitlines()[-1]
    module = item.module  # type: ignore[attr-defined]
    title = (item.function.__doc__ or item.originalname).strip().splitlines()[0].rstrip(".")  # type: ignore[attr-defined]
    parameters = item.name.partition("[")[2].rstrip("]")
    result = {
        "client": module.CLIENT,
        "version": getattr(module, "VERSION", None) or metadata.version(module.CLIENT),
        "check": check_name(item),
        "feature": f"{title}: {parameters}" if parameters else title,
        "outcome": outcome,
        "reason": reason,
    }
    with _RESULTS.open("a") as file:
        file.write(json.dumps(result) + "\n")
