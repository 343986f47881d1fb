"""Reading of one model's output while it arrives."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import regex

from coordinator.output.calls import (
    CallReading,
    Context,
    Outcome,
    read_json_calls,
    read_named_call,
    read_pythonic_calls,
)
from coordinator.output.deltas import Delta, DeltaWriter
from coordinator.output.formats import OutputFormat, ReasoningFormat, ToolFormat, pieces
from coordinator.output.harmony import MARKERS, HarmonyReader
from coordinator.output.introductions import call_head, counting, introductions
from coordinator.output.parameters import read_parameters_call
from coordinator.output.prose import Prose
from coordinator.output.region_reader import RegionReader
from coordinator.output.text_stream import Markers, Reading, TextStream, markers
from coordinator.requests.spec import Json


class OutputParser:
    """Separates one output into reasoning, content and tool calls.

    ``tools``: the request's tools, as objects with ``function`` or as functions. ``thinking``: the prompt ends inside
    reasoning. Without ``parse_tools`` or ``parse_reasoning`` the markers concerned are plain content. ``new_id``: makes
    the identifier of a call, where the model writes none. ``tokens``: texts of added tokens of the tokenizer. A marker
    with one of them counts only where that arrived as one token. Spelled by other tokens, as the tokenizer spells it
    in strings of a client and as a model may repeat it, it is ordinary text. Which markers begin calls is said in
    :mod:`coordinator.output.introductions`. ``calls_first``: neither a call nor reasoning begins behind content, as
    where the content obeys a constraint of its own and may have such texts in its strings.

    No text raises. Whitespace around reasoning, before a call and behind one is dropped. What begins as a call and is
    none (no name, arguments that are no object) is content, marker included. A tool's name need not be known, except
    in families without a marker, where text that does not name a known tool is content. A call whose arguments have
    begun stays a call: malformed or unfinished arguments are closed, and text up to the end marker is dropped."""

    def __init__(
        self,
        format: OutputFormat,
        tools: Sequence[Json],
        *,
        thinking: bool,
        parse_tools: bool,
        parse_reasoning: bool = True,
        new_id: Callable[[], str],
        tokens: frozenset[str] = frozenset(),
        calls_first: bool = False,
    ) -> None:
        self._stream = TextStream(tokens)
        self._writer = DeltaWriter()
        tool_format = format.tools if parse_tools else None
        reasoning = format.reasoning if parse_reasoning else None
        known: dict[str, Json] | None = schemas(tools) if parse_tools else None
        context = None
        if tool_format is not None and known is not None:
            context = Context(self._stream, self._writer, tool_format, known, new_id)
        self._markers: list[str] | None = None
        """Texts that control tokens may be part of; None: any."""
        reader: _Reader | HarmonyReader | RegionReader
        if format.regions is not None:
            reader = RegionReader(format.regions, self._stream, self._writer, known, parse_reasoning, new_id)
        elif "channels" in (format.tools and format.tools.style, format.reasoning and format.reasoning.style):
            self._markers = list(MARKERS)
            reader = HarmonyReader(self._stream, self._writer, context, reasoning is not None)
        else:
            self._markers = _marker_texts(tool_format, reasoning)
            reader = _Reader(self._stream, self._writer, context, reasoning, calls_first)
        self._reading: Reading | None = reader.read(thinking)
        next(self._reading)

    @property
    def made_calls(self) -> bool:
        """Whether the output contains a tool call."""
        return self._writer.calls > 0

    @property
    def reasoning(self) -> bool:
        """Whether the output is inside reasoning now."""
        return self._writer.in_reasoning

    def push(self, text: str, special: bool = False, whole: bool = False) -> Delta:
        """Return what ``text``, the text of the next token, adds. ``special``: it is a control token that content does
        not show; one that is no part of a marker is dropped. ``whole``: it is an added token that content may show."""
        if text and (not special or self._markers is None or any(text in known for known in self._markers)):
            self._stream.push(text, special, whole)
            self._resume()
        return self._writer.take()

    def finish(self) -> Delta:
        """Return what the end of the output adds: text held back, and what closes an unfinished call. An unfinished
        call of which no argument was read is content."""
        self._stream.ended = True
        self._resume()
        return self._writer.take()

    def _resume(self) -> None:
        if self._reading is not None:
            try:
                next(self._reading)
            except StopIteration:
                self._reading = None


def schemas(tools: Sequence[Json]) -> dict[str, Json]:
    """Return the parameter schemas of ``tools`` by name."""
    found = dict[str, Json]()
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            found[function["name"]] = parameters if isinstance(parameters, dict) else {}
    return found


def _marker_texts(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> list[str]:
    """Return the texts that control tokens may be part of."""
    texts = list[str]()
    if tools is not None:
        texts += [tools.begin, tools.end, *tools.also, *tools.section, tools.id_marker, tools.quote]
        texts += [tools.after_name, tools.key, tools.after_key, tools.after_value]
    if reasoning is not None:
        texts += [reasoning.begin, reasoning.end, *reasoning.around_content]
    return [text for text in texts if text]


class _Reader:
    """Reads an output of text, reasoning between tags, and calls between markers or without any."""

    def __init__(
        self,
        stream: TextStream,
        writer: DeltaWriter,
        context: Context | None,
        reasoning: ReasoningFormat | None,
        calls_first: bool,
    ) -> None:
        self._stream = stream
        self._writer = writer
        self._content = Prose(writer.content, inner=context is not None)
        self._thought = Prose(writer.reasoning)
        self._context = context
        self._reasoning = reasoning
        self._calls_first = calls_first
        self._content_end = () if reasoning is None else reasoning.around_content[1:]
        self._every = {} if context is None else {each.marker: each for each in introductions(context.format)}
        """What may introduce a call inside a section of calls, by marker."""
        self._triggers: tuple[str, ...] = ()
        """Markers that may introduce one anywhere."""
        self._section: tuple[str, ...] = ()
        self._in_section = False
        self._closing: tuple[str, ...] = ()
        if context is not None:
            self._closing = context.format.closing
            self._triggers = tuple(each.marker for each in counting(context.format, stream.names_token))
            self._section = pieces(context.format.section[1])
        self._marked = context is not None and bool(context.format.opening)
        self._fresh = True
        """Whether there was no content yet, or none since a call. Otherwise no call without a marker begins."""
        self._head = _head(context) if context is not None and not self._marked else None
        self._separator = "" if context is None or self._marked else context.format.between.strip()

    def read(self, thinking: bool) -> Reading:
        """Read the whole output."""
        yield
        marker = ""
        if thinking and self._reasoning is not None:
            self._writer.in_reasoning = True
            yield from self._stream.accept(markers(self._reasoning.begin))
            marker = yield from self._reason(self._reasoning)
        while True:
            if marker in self._every:
                marker = yield from self._calls(marker)
                continue
            if not self._marked and self._fresh and self._context is not None:
                found = yield from self._unmarked_call(self._context)
                if found is not None:
                    marker = found
                    continue
            marker = yield from self._stream.pass_until(self._expected(), self._content.add)
            self._fresh = self._fresh and not self._content.begun
            if not marker:
                self._content.flush()
                return
            if self._calls_first and not self._fresh and marker not in self._content_end:
                self._content.add(marker)
                marker = ""
                continue
            if self._reasoning is not None and marker == self._reasoning.begin:
                if self._content.begun and not self._reasoning.anywhere:
                    self._content.add(marker)
                else:
                    marker = yield from self._reason(self._reasoning)
            elif marker not in self._every:
                self._fresh = False
                self._content.mark()

    def _expected(self) -> Markers:
        """Return the markers that may follow in content. Those that end calls are searched for once there is a call."""
        texts = list(self._introductions())
        if self._reasoning is not None:
            texts += [self._reasoning.begin, *self._reasoning.around_content]
        if self._writer.calls:
            texts += [text for text in self._closing if text[0] in "<["]
        return markers(*texts)

    def _introductions(self) -> tuple[str, ...]:
        """Return the markers that may introduce a call here."""
        return tuple(self._every) if self._in_section else self._triggers

    def _close(self, marker: str) -> None:
        """Note that ``marker``, which ends calls or is "", was read."""
        self._in_section = self._in_section and marker not in self._section

    def _reason(self, format: ReasoningFormat) -> Generator[None, None, str]:
        """Read reasoning to its end. Return the marker of a call if that ended it."""
        prose = self._thought
        prose.mark()
        calls = self._triggers if format.ended_by_call else ()
        self._writer.in_reasoning = True
        marker = yield from self._stream.pass_until(markers(format.end, *calls), prose.add)
        self._writer.in_reasoning = False
        if not marker:
            prose.flush()
        self._content.mark()
        return marker if marker in calls else ""

    def _unmarked_call(self, context: Context) -> Generator[None, None, str | None]:
        """Read a call of a known tool that begins without a marker. Return the marker of the next call, "" if there is
        none, or None if the text is no call."""
        stream = self._stream
        stream.record(0)
        outcome: Outcome = "none"
        if (yield from self._stands_head()):
            read = read_pythonic_calls if context.format.style == "pythonic" else read_json_calls
            outcome = yield from read(context, known_only=True)
        if outcome == "none":
            self._content.add(stream.recorded())
            return None
        return (yield from self._after(outcome))

    def _stands_head(self) -> Generator[None, None, bool]:
        """Return whether the unread text begins like a call without a marker."""
        stream, head = self._stream, self._head
        while head is not None:
            found = head.match(stream.text, stream.at, partial=not stream.ended)
            if found is None or not found.partial:
                return found is not None
            yield
        return False

    def _calls(self, marker: str) -> Generator[None, None, str]:
        """Read what a marker introduces. Return the marker of the next call, or "" if none follows directly."""
        assert self._context is not None
        stream, style = self._stream, self._context.format.style
        introduction = self._every[marker]
        stream.record(len(marker))
        stream.at -= introduction.bracket
        self._in_section = self._in_section or (bool(self._section) and marker == next(iter(self._every)))
        rest = introduction.following
        while rest and (found := (yield from stream.accept(markers(*rest)))):
            rest = rest[rest.index(found) + 1 :]
        char = yield from stream.skip_space()
        outcome: Outcome = "none"
        if style == "json" or (char and char in "[{" and style != "pythonic"):
            outcome = yield from read_json_calls(self._context)
            if outcome == "none" and self._context.format.method and char not in ("{", "["):
                outcome = yield from read_pythonic_calls(self._context, known_only=True)
        elif not rest:
            outcome = yield from _READERS[style](self._context)
        if outcome == "none":
            self._content.add(stream.recorded())
            return ""
        return (yield from self._after(outcome))

    def _after(self, outcome: Outcome) -> Generator[None, None, str]:
        """Read what belongs to a call behind it, surplus closing brackets too. Return the marker of the next call if
        that ended a broken one."""
        stream = self._stream
        self._content.mark()
        self._fresh = True
        if outcome == "broken":
            marker = yield from stream.pass_until(markers(*self._introductions(), *self._closing), _ignore)
            if marker in self._every:
                return marker
            self._close(marker)
        while (yield from stream.skip_space()) == "}":
            stream.at += 1
        for _ in self._closing:
            self._close((yield from stream.accept(markers(*self._closing))))
        if self._separator:
            yield from stream.accept(markers(self._separator))
        return ""


def _head(context: Context) -> Any:
    """Return the pattern of the beginning of a call without a marker, None if no tool is known."""
    return regex.compile(call_head(context.format, context.tools)) if context.tools else None


_READERS: dict[str, Callable[[Context], CallReading]] = {
    "named": read_named_call,
    "parameters": read_parameters_call,
    "pythonic": read_pythonic_calls,
}


def _ignore(_: str) -> None:
    pass
