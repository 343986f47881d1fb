"""Storage of frozen entries: lists of lines by key, stored whole or as digests that locate the first changed line.

A digest file has one line per entry: key, number of lines, spacing, digest of all lines, and marks. A mark is one byte
of the digest of all lines so far, at every ``spacing``-th line. A changed line changes the first mark after it with
probability 255/256, and otherwise probably the next one.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
Lines = list[str]
MOST_SHOWN = 300
"""The most characters shown of a line in a failed test."""
ADVICE = (
    "both sides: python -m tests.golden.diff {part} --key {key!r}\n"
    "if the change is meant: make golden ARGS={part}, in a commit that says so"
)


class Digest(NamedTuple):
    """The digest of an entry."""

    count: int
    spacing: int
    digest: str
    marks: bytes

    @classmethod
    def of(cls, lines: Sequence[str], spacing: int = 1) -> Digest:
        running, marks = hashlib.blake2b(digest_size=6), bytearray()
        for number, line in enumerate(lines, 1):
            running.update(line.encode() + b"\n")
            if number % spacing == 0:
                marks.append(running.digest()[0])
        return cls(len(lines), spacing, running.hexdigest(), bytes(marks))

    def departs(self, lines: Sequence[str]) -> range | None:
        """Return the range of line indices that contains the first changed line; None if no line changed."""
        now = Digest.of(lines, self.spacing)
        if now.digest == self.digest:
            return None
        pairs = enumerate(zip(self.marks, now.marks, strict=False))
        same = next((at for at, (old, new) in pairs if old != new), min(len(self.marks), len(now.marks)))
        return range(same * self.spacing, min((same + 1) * self.spacing, len(lines)))


def difference(kept: Digest | Lines, lines: Lines, before: int) -> str:
    """Describe the difference between a frozen entry and its current lines; "" if there is none."""
    if isinstance(kept, list):
        return "\n".join(difflib.unified_diff(kept, lines, "frozen", "now", lineterm="", n=before))
    if (departs := kept.departs(lines)) is None:
        return ""
    first, last = departs.start, departs.stop
    where = f"one of the lines {first + 1} to {last}" if last - first > 1 else f"line {first + 1}"
    if first >= kept.count or first == last:
        where = "the end"
    shown = range(max(0, first - before), last)
    marked = [f"{'>' if at in departs else ' '} {at + 1:5} {shorten(lines[at])}" for at in shown]
    counts = f"{kept.count} lines then, {len(lines)} now"
    return "\n".join([f"{where} is another ({counts}); now there is", *marked])


def shorten(line: str) -> str:
    return line if len(line) <= MOST_SHOWN else f"{line[:MOST_SHOWN]}... ({len(line)} characters)"


def write_digests(path: Path, entries: Iterable[tuple[str, Digest]]) -> None:
    with path.open("w") as file:
        for key, (count, spacing, digest, marks) in entries:
            file.write(f"{key} {count} {spacing} {digest} {base64.b64encode(marks).decode()}\n")


def read_digests(path: Path) -> dict[str, Digest]:
    found = {}
    for line in path.read_text().splitlines():
        key, count, spacing, digest, marks = line.rsplit(" ", 4)
        found[key] = Digest(int(count), int(spacing), digest, base64.b64decode(marks))
    return found


def write_whole(path: Path, entries: Iterable[tuple[str, Lines]]) -> None:
    """Write every line of each entry, for parts with few and short entries."""
    with path.open("w") as file:
        for key, lines in entries:
            file.write("\n    ".join([key, *lines]) + "\n")


def read_whole(path: Path) -> dict[str, Lines]:
    found: dict[str, Lines] = {}
    key = ""
    for line in path.read_text().splitlines():
        if line.startswith("    "):
            found[key].append(line[4:])
        else:
            found[key := line] = []
    return found


def canonical(value: Any) -> Any:
    """Return ``value`` in a form that is equal on all machines: floats with six digits, bytes in hexadecimal."""
    match value:
        case float():
            return float(f"{value:.6g}")
        case bytes() | memoryview():
            return value.hex()
        case dict():
            return {str(key): canonical(value[key]) for key in sorted(value, key=str)}
        case list() | tuple():
            return [canonical(each) for each in value]
        case _:
            return value


def compact(value: Any) -> str:
    return json.dumps(canonical(value), separators=(",", ":"), ensure_ascii=True)


def flat(value: Any, path: str = "") -> Iterator[str]:
    """Yield one line per leaf of a JSON value, and per empty container."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from flat(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, each in enumerate(value):
            yield from flat(each, f"{path}[{index}]")
    else:
        yield f"{path} = {compact(value)}"
