"""Frozen entries: each is a list of lines under a key, kept whole or as digests that find the first changed line.

A digest file has one line per entry: key, number of lines, spacing, digest of all lines, and marks: one byte of the
digest of all lines so far, at every ``spacing``-th line. A changed line shows in the first mark behind it, but for one
chance in 256, and then in the next.
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
"""Characters of a line in a failed test."""
ADVICE = (
    "both sides: python -m tests.golden.diff {part} --key {key!r}\n"
    "if the change is meant: make golden ARGS={part}, in a commit that says so"
)


class Digest(NamedTuple):
    """What is kept of an entry."""

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
        """Indices of the lines of which one is the first that changed; None if none did."""
        now = Digest.of(lines, self.spacing)
        if now.digest == self.digest:
            return None
        pairs = enumerate(zip(self.marks, now.marks, strict=False))
        same = next((at for at, (old, new) in pairs if old != new), min(len(self.marks), len(now.marks)))
        return range(same * self.spacing, min((same + 1) * self.spacing, len(lines)))


def difference(kept: Digest | Lines, lines: Lines, before: int) -> str:
    """In words; "" if there is none."""
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
    """For entries that are few and short: each line is kept."""
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
    """``value`` with what may differ between machines made equal: floats have six digits, bytes are hexadecimal."""
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
    """One line for each leaf of a JSON value, and for each container that is empty."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from flat(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, each in enumerate(value):
            yield from flat(each, f"{path}[{index}]")
    else:
        yield f"{path} = {compact(value)}"
