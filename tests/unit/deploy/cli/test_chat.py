"""``tandem chat`` shows the reasoning of an answer on a terminal, and only the answer elsewhere."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from common.config.chat import ChatConfig
from deploy.cli import chat

DELTAS = (
    {"content": None, "reasoning_content": "Hm, [b]"},
    {"reasoning_content": "well"},
    {},
    {"content": "Yes"},
    {"content": "."},
)
EVIL = "\x1b]0;x\x07\x9b2J"
"""Sequences that would set the title of a terminal and clear it."""


class _Server:
    deltas: tuple[dict[str, Any], ...] = DELTAS

    def __init__(self, *_: object) -> None:
        self.asked: list[Any] = []

    def model(self) -> str:
        return "tiny"

    def chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.asked.append(body["messages"])
        for delta in self.deltas:
            yield {"choices": [{"delta": delta}]}


@pytest.mark.parametrize(("terminal", "shown"), [(True, "Hm, [b]well\n\nYes.\n"), (False, "Yes.\n")])
def test_reasoning_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch, terminal: bool, shown: str) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(chat, "HttpClient", _Server)
    monkeypatch.setenv("TERM", "dumb")
    assert chat.run(ChatConfig(), "Is it?") == 0
    assert out.getvalue().startswith(shown)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_model_cannot_drive_the_terminal(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """A pipe gets every byte: it may be a file."""
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(_Server, "deltas", ({"reasoning_content": EVIL}, {"content": f"a\tb\n{EVIL}"}))
    monkeypatch.setattr(chat, "HttpClient", _Server)
    monkeypatch.setenv("TERM", "dumb")
    assert chat.run(ChatConfig(), "Is it?") == 0
    shown = out.getvalue()
    assert "a\tb\n" in shown
    assert (EVIL in shown) == (not terminal)
    assert any(char in shown for char in "\x1b\x07\x9b") == (not terminal)
