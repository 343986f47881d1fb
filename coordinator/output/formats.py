"""How model families write tool calls and reasoning, as data.

A tool call is written in one of five styles (:attr:`ToolFormat.style`). With the texts of a :class:`ToolFormat` the
calls of a turn are ``section[0]``, then calls joined by ``between``, then ``section[1]``; one call is

- ``json``: ``begin`` ``{"name": NAME, "arguments": OBJECT}`` ``end``, where the keys are ``name_key`` and
  ``arguments_key``; with ``listed`` the objects of all calls are one JSON array and ``begin`` and ``end`` are empty;
- ``named``: ``begin`` NAME ``after_name`` OBJECT ``end``;
- ``parameters``: ``begin`` NAME ``after_name``, then per argument ``key`` KEY ``after_key`` VALUE ``after_value``, then
  ``end``; a value is plain text for a string and JSON for everything else;
- ``pythonic``: ``NAME(KEY=LITERAL, ...)``; all calls are one Python list between ``begin`` and ``end``;
- ``channels``: messages of the harmony format, which has a reader of its own.

Whitespace in these texts is what the family's own chat template writes. Readers accept any whitespace there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

ToolStyle = Literal["json", "named", "parameters", "pythonic", "channels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How one family writes tool calls. ``name``: what ``--tool-call-parser`` accepts."""

    name: str
    style: ToolStyle
    begin: str = ""
    """Text before a call. Empty with an empty ``section``: calls have no marker, and text is taken as a call if it
    begins as one of a known tool."""
    end: str = ""
    also: tuple[str, ...] = ()
    """Other texts that may stand for ``begin``, or for ``section[0]`` if there is a section."""
    section: tuple[str, str] = ("", "")
    """Texts around all calls of a turn."""
    between: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    listed: bool = False
    after_name: str = ""
    key: str = ""
    after_key: str = ""
    after_value: str = ""
    name_prefix: str = ""
    """Text written before each tool's name, such as ``functions.``."""
    quote: str = ""
    """Marker around strings, within which nothing is escaped."""
    call_ids: Literal["", "name:index"] = ""
    """Identifiers that the model itself writes behind the name; empty if it writes none."""
    short_ids: bool = False
    """Whether the chat template accepts only identifiers of nine letters and digits."""

    @property
    def trigger(self) -> str:
        """Marker that a call, or the section of all calls, begins with; "" if the family has none."""
        return next(iter(pieces(self.section[0] + "\n" + self.begin)), "")

    @property
    def opening(self) -> tuple[str, ...]:
        """Markers up to the name or object of a call, in their order; all but the last may be left out."""
        return pieces(self.section[0] + "\n" + self.begin)

    @property
    def closing(self) -> tuple[str, ...]:
        """Markers behind a call, in their order; each may be left out."""
        return pieces(self.end + "\n" + self.section[1])


def pieces(text: str) -> tuple[str, ...]:
    """Split a text of a format into markers, which may be separated by whitespace."""
    return tuple(piece for piece in re.split(r"\n|(?<=```)(?=<)", text) if piece)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How one family writes its reasoning. ``name``: what ``--reasoning-parser`` accepts."""

    name: str
    style: Literal["tags", "channels"] = "tags"
    begin: str = "<think>"
    end: str = "</think>"
    anywhere: bool = False
    """Whether reasoning may begin in the middle of content; otherwise only at its start and behind a call."""
    ended_by_call: bool = False
    """Whether the marker of a tool call ends reasoning that is still open."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How one model writes. None: the model has no such thing, or it is not known."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    def __bool__(self) -> bool:
        return self.tools is not None or self.reasoning is not None


_TOOLS = (ToolFormat(name="hermes", style="json", begin="<tool_call>\n", end="\n</tool_call>", between="\n"),)

_REASONING = (ReasoningFormat(name="deepseek_r1"), ReasoningFormat(name="qwen3"))

TOOL_FORMATS = {each.name: each for each in _TOOLS}
"""By the names that vLLM gives its parsers where it has one."""
REASONING_FORMATS = {each.name: each for each in _REASONING}
