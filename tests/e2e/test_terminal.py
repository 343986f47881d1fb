"""``tandem doctor``, ``tandem status`` and ``tandem top`` against a system of real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.system import RunningSystem, tandem
from tests.fakes.terminal import Terminal
from tests.leaked_keys import new_key

pytestmark = pytest.mark.e2e
CLIENT, ADMIN = new_key(), new_key()


@pytest.fixture(scope="module")
def system(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    directory, model = tmp_path_factory.mktemp("up"), checkpoint("llama")
    flags = ("--prefill", "1", "--decode", "1", "--api-key", CLIENT, "--admin-api-key", ADMIN)
    with RunningSystem.up(directory, model, *flags) as running:
        yield running


def complete(system: RunningSystem) -> str:
    """Send a request and return the id of its answer."""
    body = {"model": system.name, "prompt": [3] * 40, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {CLIENT}"}
    asked = urllib.request.Request(f"{system.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked) as response:
        return str(json.load(response)["id"])


def row_of(system: RunningSystem, name: str) -> dict[str, Any]:
    asked = urllib.request.Request(f"{system.url}/admin/workers", headers={"Authorization": f"Bearer {ADMIN}"})
    with urllib.request.urlopen(asked) as response:
        return next(each for each in json.load(response)["workers"] if each["id"] == name)


def test_doctor_finds_a_healthy_system(system: RunningSystem, checkpoint: Callable[[str], Path]) -> None:
    words = ("--url", system.url, "--admin-api-key", ADMIN, "--port", "0", "--control-port", "0")
    done = tandem("doctor", checkpoint("llama"), "--json", *words)
    found: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    assert done.returncode == 0 and not [each for each in found if each["level"] == "bad"], found
    texts = {subject: [each["text"] for each in found if each["subject"] == subject] for subject in SUBJECTS}
    assert texts["system"] == [f"{system.url} serves with 1 prefill, 1 decode"]
    assert sorted(text.split()[0] for text in texts["workers"]) == ["decode-0", "prefill-0"]
    assert [text for text in texts["links"] if text.startswith("prefill-0 to decode-0: shm, ")], texts
    assert [text for text in texts["clocks"] if "within" in text], texts
    before = row_of(system, "prefill-0")["links"]
    done = tandem("doctor", checkpoint("llama"), "--links", *words)
    assert done.returncode == 0 and "prefill-0 to decode-0: shm, " in done.stdout
    (after,) = row_of(system, "prefill-0")["links"]
    assert [after] != before and after["to"] == "decode-0" and after["gb_per_s"] > 0, "it was measured again"
    refused = tandem("doctor", "--url", system.url, "--admin-api-key", CLIENT, "--port", "0", "--control-port", "0")
    assert refused.returncode == 1 and "with --admin-api-key or TANDEM_ADMIN_API_KEY" in refused.stdout


SUBJECTS = ("system", "workers", "links", "clocks")


def test_status_shows_the_system(system: RunningSystem) -> None:
    done = tandem("status", "--url", system.url, "--api-key", ADMIN)
    assert done.returncode == 0 and f"serves {system.name}: ready" in done.stdout and "prefill-0" in done.stdout
    done = tandem("status", "--url", system.url, "--api-key", ADMIN, "--json")
    assert {each["id"] for each in json.loads(done.stdout)["workers"]} == {"prefill-0", "decode-0"}


def test_top_shows_a_request_and_a_killed_worker(system: RunningSystem) -> None:
    name = complete(system)
    once = tandem("top", "--url", system.url, "--api-key", ADMIN, "--once")
    assert once.returncode == 0 and name[-8:] in once.stdout and "\x1b" not in once.stdout
    terminal = Terminal(system.url, "--api-key", ADMIN)
    try:
        terminal.frame(lambda shown: name[-8:] in shown and "prefill-0" in shown)
        second = complete(system)
        shown = terminal.frame(lambda shown: re.search(rf"{second[-8:]}  done .*decode-0", shown) is not None)
        assert shown.index(second[-8:]) < shown.index(name[-8:]), "the newest first"
        os.kill(row_of(system, "decode-0")["pid"], signal.SIGKILL)
        terminal.frame(lambda shown: "absent" in shown or "lost" in shown or "dead" in shown)
        terminal.frame(lambda shown: "back" in shown)
        assert complete(system)
        terminal.press("q")
        assert terminal.end() == 0
    finally:
        terminal.close()
