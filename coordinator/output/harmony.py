"""Reader of the harmony format: messages in channels, each with a header that names its channel and recipient.

A message is ``<|start|>assistant<|channel|>CHANNEL to=RECIPIENT <|constrain|>json<|message|>TEXT<|end|>``; the first
one begins in the prompt. The recipient may also stand before the channel.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from coordinator.output.calls import Context
from coordinator.output.deltas import DeltaWriter
from coordinator.output.text_stream import Reading, TextStream, markers
from coordinator.output.values import read_value

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END = markers("<|end|>", "<|return|>", "<|call|>", START, CHANNEL)
_HEADER = markers(START, CHANNEL, MESSAGE, CONSTRAIN)
MARKERS = (*_END.texts, MESSAGE, CONSTRAIN)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_SIGN = "\x1f"
_CHANNEL = re.compile(_CHANNEL_SIGN + r"\s*(\w+)")
_MOST_HEADER = 1024
"""Characters before the first marker of a header; a longer text is none."""


class HarmonyReader:
    """Reads one output.

    ``analysis`` is reasoning; ``commentary`` to a function is a call; ``final``, ``commentary`` without a recipient and
    unknown channels are content; a message to another recipient, such as ``python``, is reasoning. Messages that go to
    the same place are separated by a line break. A call whose text is no object is content, and one that ends before
    its text is dropped. Without ``context`` calls are content, and without ``reasons`` reasoning is."""

    def __init__(self, stream: TextStream, writer: DeltaWriter, context: Context | None, reasons: bool) -> None:
        self._stream = stream
        self._writer = writer
        self._context = context
        self._reasons = reasons
        self._written = set[str]()
        """Places that have text already."""

    def read(self, thinking: bool) -> Reading:
        """Read the whole output. ``thinking``: the prompt ends inside reasoning."""
        yield
        ended_by = (yield from self._text("reasoning")) if thinking else START
        while not self._stream.ended or self._stream.at < len(self._stream.text):
            header = yield from self._header(ended_by)
            ended_by = yield from (self._text("content") if header is None else self._message(header))

    def _header(self, begun_by: str) -> Generator[None, None, str | None]:
        """Read a header up to its message, in which _CHANNEL_SIGN stands for the marker of a channel. Return None, with
        nothing read, if no header follows."""
        stream = self._stream
        parts = [_CHANNEL_SIGN] if begun_by == CHANNEL else []

        def add(text: str) -> None:
            parts.append(text.replace(_CHANNEL_SIGN, " "))

        while not parts:
            found = stream.find(_HEADER, stream.at)
            end = found.start() if found else len(stream.text) - _HEADER.held(stream.text, stream.at)
            if not _may_be_header(stream.text[stream.at : end]) or (stream.ended and not found):
                return None
            if found:
                break
            yield
        while True:
            marker = yield from stream.pass_until(_HEADER, add)
            if marker in ("", MESSAGE):
                return "".join(parts)
            parts.append(_CHANNEL_SIGN if marker == CHANNEL else " ")

    def _message(self, header: str) -> Generator[None, None, str]:
        """Read the text of a message. Return the marker that ended it."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        to = recipient[1] if recipient else ""
        name = to.removeprefix("functions.")
        function = bool(name) and (name != to or (self._context is not None and name in self._context.tools))
        if function and self._context is not None:
            return (yield from self._call(self._context, name))
        hidden = (to and not function) or (channel and channel[1] == "analysis")
        return (yield from self._text("reasoning" if hidden else "content"))

    def _call(self, context: Context, name: str) -> Generator[None, None, str]:
        stream = self._stream
        if (yield from stream.skip_space()) == "{":
            context.begin(name)
            yield from read_value(stream, context.writer.arguments)
            return (yield from stream.pass_until(_END, _ignore))
        ended_by = yield from stream.accept(_END)
        if not ended_by:
            return (yield from self._text("content"))
        context.begin(name)
        context.writer.arguments("{}")
        return ended_by

    def _text(self, place: str) -> Generator[None, None, str]:
        """Pass on text up to the end of its message. Return the marker that ended it."""
        place = place if self._reasons else "content"
        separator = "\n" if place in self._written else ""

        def write(text: str) -> None:
            nonlocal separator
            self._written.add(place)
            (self._writer.reasoning if place == "reasoning" else self._writer.content)(separator + text)
            separator = ""

        self._writer.in_reasoning = place == "reasoning"
        ended_by = yield from self._stream.pass_until(_END, write)
        self._writer.in_reasoning = False
        return ended_by


def _may_be_header(text: str) -> bool:
    """Return whether ``text`` may be a header, or its beginning, before any marker: a role and a recipient."""
    if len(text) > _MOST_HEADER:
        return False
    return all(
        word.startswith("to=") or "to=".startswith(word) or "assistant".startswith(word) for word in text.split()
    )


def _ignore(_: str) -> None:
    pass
