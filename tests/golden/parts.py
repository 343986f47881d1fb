"""The frozen parts by name.

A part has ``freeze()``, which writes its ``FILE`` and returns a description, ``kept()``, which reads the file (lines or
their digest, by key), and ``record(keys)``, which yields (key, lines) of the current behaviour, for all entries if
``keys`` is None.
"""

from __future__ import annotations

import importlib
from typing import Any

PARTS = ("histories", "transcripts", "tokens", "wire", "metrics", "commands", "mutations")


def part(name: str) -> Any:
    """Import the module of a part, lazily, since some need torch."""
    return importlib.import_module(f"tests.golden.{name}")
