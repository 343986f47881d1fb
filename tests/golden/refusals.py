"""Finds the places in ``coordinator/`` that refuse or fail a request, and those that no transcript reaches.

A place is a call of ``RequestError``, or of a function that always returns or raises one. Its name consists of the
enclosing function, the called name, and status, code and parameter where they are constants. It contains no file and no
line, so a place that moves keeps its name.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOM = Path(__file__).parents[2] / "coordinator"
LEFT_OUT = ROOM / "grammar"
"""Refuses in a child process: tests/unit/coordinator/grammar, tests/unit/coordinator/http/test_structured.py."""
BASE = "RequestError"
_MAKERS = ("NoReturn", BASE)
"""Return annotations of functions that always return or raise a RequestError."""
_WORD = re.compile(r"[\w.\[\]-]{1,40}")

Function = ast.FunctionDef | ast.AsyncFunctionDef

EXCUSED = {
    "drain: shutting_down()": "of a drain that takes too long: tests/unit/coordinator/http/test_drain.py",
    "Dispatcher.submit: shutting_down()": "the drain would have to begin while the prompt is tokenized",
    "Connection.handle_error: overloaded()": "of hundreds of connections: tests/security/test_http_limits.py",
}
"""Places that no transcript reaches, with the reason."""
if sys.version_info >= (3, 14):
    EXCUSED["parse_json: refuse(invalid_json) #4"] = "the stack of C is deep enough: what is too deep is refused later"


class Place(NamedTuple):
    """A call: its name, file and lines, and the last part of the called name."""

    name: str
    file: str
    lines: range
    called: str


def places() -> list[Place]:
    trees = {
        str(file): ast.parse(file.read_text()) for file in sorted(ROOM.glob("**/*.py")) if LEFT_OUT not in file.parents
    }
    makers = {BASE} | {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, Function) and isinstance(node.returns, ast.Name) and node.returns.id in _MAKERS
    }
    found: list[Place] = []
    counts: Counter[str] = Counter()
    for file, tree in trees.items():
        for within, call in _calls(tree, ""):
            called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if called in makers:
                name = f"{within or 'module'}: {called}({', '.join(_constants(call))})"
                counts[name] += 1
                name += f" #{counts[name]}" if counts[name] > 1 else ""
                found.append(Place(name, file, range(call.lineno, (call.end_lineno or call.lineno) + 1), called))
    return found


def _calls(node: ast.AST, within: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls below ``node`` in order, each with the qualified name of its enclosing function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield within, child
        named = isinstance(child, Function | ast.ClassDef)
        yield from _calls(child, f"{within}.{child.name}".strip(".") if named else within)


def _constants(call: ast.Call) -> Iterator[str]:
    """Yield the constant numbers and words among the arguments; messages are checked by transcripts instead."""
    for argument in (*call.args, *(each.value for each in call.keywords)):
        if isinstance(argument, ast.Constant):
            value = argument.value
            if isinstance(value, int) or (isinstance(value, str) and _WORD.fullmatch(value)):
                yield str(value)


def complaints(reached: set[tuple[str, int, str]]) -> list[str]:
    """Return complaints: places that no transcript reaches and that have no excuse, and excuses that are not needed.

    ``reached`` comes from :func:`tests.golden.adapter.watched_refusals`."""
    by_name = {
        place.name: any((place.file, line, place.called) in reached for line in place.lines) for place in places()
    }
    lacking = [f"no transcript reaches {name}" for name, there in by_name.items() if not there and name not in EXCUSED]
    return lacking + [f"needs no excuse: {name}" for name in EXCUSED if by_name.get(name, True)]
