"""The frozen parts by name.

A part has ``freeze()``, which writes its ``FILE`` and says in words what is there, ``kept()``, which reads it (lines or
their digest, by key), and ``record(keys)``, which yields (key, lines) as they are now, of all entries without keys.
"""

from __future__ import annotations

import importlib
from typing import Any

PARTS = ("histories", "transcripts", "tokens", "wire", "metrics", "commands", "mutations")


def part(name: str) -> Any:
    """The module; imported late, as some need torch."""
    return importlib.import_module(f"tests.golden.{name}")
