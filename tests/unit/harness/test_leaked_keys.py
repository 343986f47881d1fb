"""The search of logs for keys finds one in each place where it can appear, alone and under xdist."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pace import scaled

ROOT = Path(__file__).parents[3]
INNER = """
import base64
import json
import logging
from tests import leaked_keys

def test_clean():
    leaked_keys.new_key()
    logging.warning("nothing")

def test_record():
    logging.warning("key %s", leaked_keys.new_key())

def test_registered():
    logging.warning("said key %s", leaked_keys.register("always-the-same"))

def test_traceback():
    try:
        raise ValueError(leaked_keys.new_key())
    except ValueError:
        logging.exception("failed")

def test_output():
    print("said", leaked_keys.new_key())

def test_cluster_key(tmp_path):
    path = leaked_keys.keygen(tmp_path / "cluster.key")
    logging.warning("cluster key %s", json.loads(path.read_text())["secret"]["decode"])

def test_cluster_key_in_base64(tmp_path):
    path = leaked_keys.keygen(tmp_path / "cluster.key")
    part = leaked_keys.keygen(tmp_path / "part.key", "--role", "decode", "--cluster-key-file", str(path))
    key = json.loads(part.read_text())["secret"]["decode"]
    logging.warning("handed on %s", base64.b64encode(key.encode()).decode())

def test_public_cluster_key(tmp_path):
    logging.warning("%s", json.loads(leaked_keys.keygen(tmp_path / "cluster.key").read_text())["public"])

def test_process_that_has_ended(tmp_path):
    log = tmp_path / "ended.log"
    leaked_keys.watch(log)
    log.write_text(leaked_keys.new_key())
    leaked_keys.search(log)

def test_process_that_lives_on(tmp_path):
    log = tmp_path / "alive.log"
    leaked_keys.watch(log)
    log.write_text(leaked_keys.new_key())
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_key_in_a_log_fails_the_test_and_the_session(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_it.py").write_text(INNER)
    without = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:hypothesispytest")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.leaked_keys", *without, "-c", os.devnull, "-n", workers,
         "--rootdir", tmp_path, f"--basetemp={tmp_path / 'base'}", tmp_path],
        capture_output=True, text=True, timeout=scaled(120), check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    failed = set(re.findall(r"^ERROR \S*::test_(\w+)", done.stdout, re.MULTILINE))
    cluster = {"cluster_key", "cluster_key_in_base64"}
    assert failed == {"record", "registered", "traceback", "output", "process_that_has_ended"} | cluster, done.stdout
    assert done.returncode == 1
    leaks = done.stdout.partition("keys in logs")[2].partition("short test summary")[0]
    for where in (
        "logger root: key KEY",
        "logger root: said key KEY",
        "ValueError: KEY",
        "said KEY",
        "logger root: cluster key KEY",
        "logger root: handed on KEY",
        "ended.log: KEY",
        "alive.log: KEY",
    ):
        assert leaks.count(where) == 1, done.stdout
    assert "sk-" not in leaks and "always-the-same" not in leaks


NAMES = {"api_key", "admin_api_key", "TANDEM_API_KEY", "TANDEM_ADMIN_API_KEY", "--api-key", "--admin-api-key"}
NO_KEY = "none"
"""What OpenAI's client, which insists on a key, is given for a server that wants none."""


def spelled_out(source: str) -> Iterator[str]:
    """Yield keys written as literals after a flag, in a field or in a variable."""

    def text(node: ast.AST | None) -> str:
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""

    for node in ast.walk(ast.parse(source)):
        pairs: list[tuple[str, str]] = []
        if isinstance(node, ast.List | ast.Tuple | ast.Call):
            row = node.args if isinstance(node, ast.Call) else node.elts
            pairs += [(text(flag), text(value)) for flag, value in itertools.pairwise(row)]
        if isinstance(node, ast.Call):
            pairs += [(each.arg or "", text(each.value)) for each in node.keywords]
        if isinstance(node, ast.Dict):
            pairs += [(text(name), text(value)) for name, value in zip(node.keys, node.values, strict=True)]
        yield from (
            value for name, value in pairs if name in NAMES and value not in ("", NO_KEY) and not value.startswith("--")
        )


def test_no_test_spells_out_a_key_that_is_not_searched_for() -> None:
    found = {str(file.relative_to(ROOT)): [*spelled_out(file.read_text())] for file in ROOT.glob("tests/**/*.py")}
    assert {
        name: keys for name, keys in found.items() if keys and name != "tests/unit/harness/test_leaked_keys.py"
    } == {}
    for line in ('up("--api-key", "a")', '["--admin-api-key", "a"]', 'f(api_key="a")', '{"TANDEM_API_KEY": "a"}'):
        assert [*spelled_out(line)] == ["a"], line


NO_FILES = {"PIPE", "DEVNULL", "STDOUT"}


def unwatched(source: str) -> Iterator[str]:
    """Yield the functions that start a process with output to a file but do not watch that file."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        called = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
        to_file = "open" in called and any(
            each.arg in ("stdout", "stderr") and ast.unparse(each.value).rpartition(".")[2] not in NO_FILES
            for call in calls
            for each in call.keywords
        )
        if to_file and not called & {"watch", "watched"}:
            yield function.name


def test_every_log_of_a_process_is_watched() -> None:
    found = {str(file.relative_to(ROOT)): [*unwatched(file.read_text())] for file in ROOT.glob("tests/**/*.py")}
    assert {name: functions for name, functions in found.items() if functions} == {}
    start = "def start(log):\n    {}popen(words, stdout=log.open('wb'), stderr=subprocess.STDOUT)"
    assert [*unwatched(start.format(""))] == ["start"]
    assert [*unwatched(start.format("leaked_keys.watch(log); "))] == []


def test_no_test_makes_cluster_keys_that_are_not_searched_for() -> None:
    """Only the tests of ``tandem keygen`` itself may."""
    keygen = re.compile(r"""[\[(]["']keygen["']""")
    found = {str(file.relative_to(ROOT)) for file in ROOT.glob("tests/**/*.py") if keygen.search(file.read_text())}
    assert found == {"tests/leaked_keys.py", "tests/unit/common/net/test_keys.py"}
