"""PROTOCOL.md cannot drift: its diagram comes from the table of moves, its header size from the code,
its failures are the rows of the chaos matrix.

``python -m tests.unit.test_protocol_document`` writes the diagram anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvtransfer.frames import HEADER_BYTES
from kvtransfer.session import MOVES
from tests.chaos.cells import CELLS

DOCUMENT = Path(__file__).parents[2] / "kvtransfer" / "PROTOCOL.md"
MARKED = re.compile(r"(<!-- states -->\n).*?(<!-- /states -->)", re.DOTALL)


def diagram() -> str:
    """The moves as a mermaid state diagram, in the order of the table."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> RESERVED"]
    order = list(MOVES)
    for state, following in MOVES.items():
        lines += [f"    {state.name} --> {each.name}" for each in order if each in following]
        lines += [] if following else [f"    {state.name} --> [*]"]
    return "\n".join([*lines, "```", ""])


def test_the_diagram_is_the_table() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert MARKED.sub(lambda match: match[1] + diagram() + match[2], text) == text


def test_the_header_has_the_size_it_says() -> None:
    assert f"## Frame header ({HEADER_BYTES} bytes, little-endian)" in DOCUMENT.read_text(encoding="utf-8")


def test_every_failure_is_made_to_happen() -> None:
    section = DOCUMENT.read_text(encoding="utf-8").split("## Failures")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|")[-1] for line in section.splitlines() if line.startswith("| ")][1:]
    named = [name.strip() for row in rows for name in row.split(" · ") if name.strip()]
    assert sorted(named) == sorted({cell.name for cell in CELLS})


if __name__ == "__main__":
    written = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(MARKED.sub(lambda match: match[1] + diagram() + match[2], written), encoding="utf-8")
