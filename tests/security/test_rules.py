"""Checks that the security tests are black boxes: moving the product's modules cannot break them, and no helper of the
product can hide a hole."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

OWN = Path(__file__).parent
ROOMS = ("common", "coordinator", "prefill", "decode", "kvtransfer", "deploy", "bench")
BY_NAME = ("importlib", "runpy")
HELPERS = ("tests.e2e.spawner", "tests.e2e.system", "tests.leaked_keys", "tests.pace", "tests.fakes.checkpoint")
"""Allowed helpers outside this folder. The first two know how a ``tandem`` command is started."""
_SAID = re.compile(rf"\b(from|import)\s+({'|'.join(ROOMS)})\b|\b({'|'.join(ROOMS)})\.(?!log\b)[a-z_]+")
"""Matches a module of the product in a string, which another process could be made to run."""


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield every imported module; for ``from a import b`` also ``a.b``, which may be one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = ".".join(filter(None, ("tests.security" if node.level else "", node.module)))
            assert node.level < 2, "an import from above this folder"
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def strange(source: str) -> list[str]:
    """Return what ``source`` uses of the product's internals or of other tests."""
    tree = ast.parse(source)
    found = []
    for name in imported(tree):
        room = name.partition(".")[0]
        near = any(f"{name}.".startswith(f"{helper}.") for helper in (*HELPERS, "tests.security"))
        if room in (*ROOMS, *BY_NAME) or (room == "tests" and not near):
            found.append(name)
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return found + [match[0] for text in texts for match in _SAID.finditer(text)]


@pytest.mark.parametrize("name", sorted(file.name for file in OWN.glob("*.py") if file != Path(__file__)))
def test_nothing_of_the_product_is_used_from_inside(name: str) -> None:
    assert not strange((OWN / name).read_text())


@pytest.mark.parametrize(
    "source",
    [
        "import common", "import deploy.cli.main as cli", "from deploy import cli",
        "def f():\n    from common.net.wire import x",
        "from tests.e2e.test_cluster import own_address", "import tests.models", "from tests import golden",
        "from tests.e2e import test_cluster", "import tests", "import importlib", "from runpy import run_module",
        "CODE = 'import os\\nfrom deploy import cli'", "words = ['-m', 'deploy.cli']", "x = f'{y}: decode.role'",
    ],
)  # fmt: skip
def test_the_rule_can_fail(source: str) -> None:
    assert strange(source)


@pytest.mark.parametrize(
    "source",
    [
        "import json", "from tests import leaked_keys", "from tests.e2e.system import RunningSystem",
        "import tests.pace", "from tests.security.outside import ask", "from . import outside",
        "import commonmark", "x = 'decode'",
        "'''A worker of the prefill. It asks the coordinator: decode.'''",
    ],
)  # fmt: skip
def test_the_rule_can_hold(source: str) -> None:
    assert not strange(source)
