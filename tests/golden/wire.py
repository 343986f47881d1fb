"""Bytes between processes: an example of each message, and other encodings such as frame headers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from tests.golden import adapter
from tests.golden.store import HERE, Lines

FILE = HERE / "wire.json"


def kept() -> dict[str, Lines]:
    return {key: [data] for key, data in _flat(json.loads(FILE.read_text()))}


def record(keys: Iterable[str] | None = None) -> Iterator[tuple[str, Lines]]:
    for key, data in _flat(adapter.wire()):
        if keys is None or key in keys:
            yield key, [data]


def _flat(tree: dict[str, object]) -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from ((f"{name}: {each}", data) for each, data in value.items())
        else:
            yield name, str(value)


def freeze() -> str:
    FILE.write_text(json.dumps(adapter.wire(), indent=2) + "\n")
    return f"{len(kept())} examples"
