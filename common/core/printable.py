"""Text from elsewhere, as a terminal may show it."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return ``text`` with a question mark in place of each character that could drive a terminal, line breaks
    included."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def without_control(text: str) -> str:
    """Return ``text`` with its lines and tabs, but with another character in place of each control character: what a
    model writes must not drive the terminal."""
    return text.translate(_CONTROL)
