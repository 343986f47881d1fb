"""Text between markers: content or reasoning."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.output.text_stream import SPACE


class Prose:
    """Passes text on to ``write``, without the whitespace next to markers; text on both sides of one is separated by a
    line break.

    Whitespace is withheld until other text follows it, so that it can be dropped if a marker follows instead; with
    ``inner`` False only at the beginning."""

    def __init__(self, write: Callable[[str], None], inner: bool = True) -> None:
        self.begun = False
        """Whether there was text other than whitespace since the beginning or the last marker."""
        self._write = write
        self._inner = inner
        self._keep = True
        """Whether whitespace at the beginning is passed on if text follows it."""
        self._space = list[str]()
        self._separator = ""

    def add(self, text: str) -> None:
        if self.begun and not self._inner:
            self._write(text)
            return
        if not self.begun and not self._keep:
            text = text.lstrip(SPACE)
        body = text.rstrip(SPACE)
        if body and not self._inner:
            body = text
        if body:
            self.begun = True
            self._write("".join([self._separator, *self._space, body]))
            self._separator = ""
            self._space.clear()
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def flush(self) -> None:
        """Pass on the whitespace that was withheld."""
        if self._space:
            self._write("".join(self._space))
            self._space.clear()

    def mark(self) -> None:
        """A marker stands here: drop the whitespace on both sides."""
        self._space.clear()
        if self.begun:
            self._separator = "\n"
        self.begun = self._keep = False
