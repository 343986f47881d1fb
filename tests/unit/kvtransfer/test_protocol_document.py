"""PROTOCOL.md has the state machines and the header size of the code, and the failure model has the rows of the chaos
matrix.

``python -m tests.unit.kvtransfer.test_protocol_document`` rewrites the state tables.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.core.errors import InvariantBroken
from common.core.ids import RequestId, TransferId
from common.kv.layout import KvLayout, LayerLayout
from kvtransfer.frames import HEADER_BYTES
from kvtransfer.session import (
    RECEIVER_MOVES,
    SENDER_MOVES,
    Moves,
    ReceiverSession,
    SenderSession,
    TransferLimits,
    TransferState,
)
from tests.chaos.cells import CELLS

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "kvtransfer" / "PROTOCOL.md"
FAILURES = ROOT / "docs" / "concepts" / "failure-model.md"
MARKED = re.compile(r"(<!-- states of the (\w+) -->\n).*?(<!-- /states -->)", re.DOTALL)
TRANSFER = TransferId(RequestId(bytes(16)), 1)
MACHINES = {"sender": SENDER_MOVES, "receiver": RECEIVER_MOVES}


def table(moves: Moves) -> str:
    """Return the transitions as a Markdown table, in the order of the state machine."""
    rows = ["| state | next states |", "|---|---|", "| (start) | RESERVED |"]
    for state, following in moves.items():
        rows.append(f"| {state.name} | {', '.join(each.name for each in moves if each in following) or '(end)'} |")
    return "\n".join([*rows, ""])


def with_tables(text: str) -> str:
    return MARKED.sub(lambda match: match[1] + table(MACHINES[match[2]]) + match[3], text)


def test_the_tables_are_those_of_the_code() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert [match[2] for match in MARKED.finditer(text)] == list(MACHINES)
    assert with_tables(text) == text


def test_each_machine_has_its_own_way_to_accepted() -> None:
    """A sender passes COMMITTING on its way to ACCEPTED; a receiver goes there directly."""
    layout, limits = KvLayout((LayerLayout(1, 4, 4),), "float32", 16), TransferLimits()
    sender = SenderSession(TRANSFER, layout, 16, 0.0, limits)
    receiver = ReceiverSession(TRANSFER, layout, 16, 0, 0.0, limits)
    for session, forbidden in ((sender, TransferState.ACCEPTED), (receiver, TransferState.COMMITTING)):
        session.move(TransferState.SENDING)
        with pytest.raises(InvariantBroken, match=f"SENDING cannot become {forbidden.name}"):
            session.move(forbidden)
    sender.move(TransferState.COMMITTING)
    for session in (sender, receiver):
        session.move(TransferState.ACCEPTED)
        with pytest.raises(InvariantBroken, match="ACCEPTED cannot become EXPIRED"):
            session.move(TransferState.EXPIRED)
        session.move(TransferState.RELEASED)


def test_the_header_has_the_size_it_says() -> None:
    assert f"## Frame header ({HEADER_BYTES} bytes, little-endian)" in DOCUMENT.read_text(encoding="utf-8")


def test_every_failure_is_made_to_happen() -> None:
    section = FAILURES.read_text(encoding="utf-8").split("## Detection and recovery")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|")[-1] for line in section.splitlines() if line.startswith("| ")][1:]
    named = [name.strip() for row in rows for name in row.split(" · ") if name.strip()]
    assert sorted(named) == sorted({cell.name for cell in CELLS})


if __name__ == "__main__":
    written = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(with_tables(written), encoding="utf-8")
