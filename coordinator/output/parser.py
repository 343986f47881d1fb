"""Reading of one model's output while it arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from coordinator.output.calls import Context, Outcome, read_json_call
from coordinator.output.deltas import Delta, DeltaWriter
from coordinator.output.formats import OutputFormat, ReasoningFormat, ToolFormat
from coordinator.output.text_stream import SPACE, Markers, Reading, TextStream, markers
from coordinator.requests.spec import Json


class OutputParser:
    """Separates one output into reasoning, content and tool calls.

    ``tools``: the request's tools, as objects with ``function`` or as functions. ``thinking``: the prompt ends inside
    reasoning. Without ``parse_tools`` or ``parse_reasoning`` the markers concerned are plain content. ``new_id``: makes
    the identifier of a call, where the model writes none.

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
    ) -> None:
        self._stream = TextStream()
        self._writer = DeltaWriter()
        tool_format = format.tools if parse_tools else None
        reasoning = format.reasoning if parse_reasoning else None
        self._known = _known_texts(tool_format, reasoning)
        context = None
        if tool_format is not None:
            context = Context(self._stream, self._writer, tool_format, schemas(tools), new_id)
        reader = _Reader(self._stream, self._writer, context, reasoning)
        self._reading: Reading | None = reader.read(thinking)
        next(self._reading)

    @property
    def made_calls(self) -> bool:
        """Whether the output contains a tool call."""
        return self._writer.calls > 0

    def push(self, text: str, special: bool = False) -> Delta:
        """Return what ``text``, the text of the next token, adds. ``special``: it is a control token; one that is no
        part of a marker is dropped."""
        if text and (not special or any(text in known for known in self._known)):
            self._stream.push(text, special)
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


def _known_texts(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> list[str]:
    """Return the texts that control tokens may be part of."""
    texts = list[str]()
    if tools is not None:
        texts += [tools.begin, tools.end, *tools.also, *tools.section]
        texts += [tools.after_name, tools.key, tools.after_key, tools.after_value, tools.quote]
    if reasoning is not None:
        texts += [reasoning.begin, reasoning.end]
    return [text for text in texts if text]


class _Prose:
    """Text between markers. Withholds whitespace until text follows it, so that it can be dropped before a marker."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._space: list[str] | None = []
        """Whitespace withheld; None at a place where it is dropped."""
        self.begun = False
        """Whether there is text since the beginning or the last place where whitespace is dropped."""

    def add(self, text: str) -> None:
        if self._space is None:
            text = text.lstrip(SPACE)
            if not text:
                return
            self._space = []
        body = text.rstrip(SPACE)
        if body:
            self.begun = True
            self._write("".join([*self._space, body]))
            self._space.clear()
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def flush(self) -> None:
        """Write the whitespace that was withheld."""
        if self._space:
            self._write("".join(self._space))
            self._space = []

    def drop(self) -> None:
        """Drop whitespace here, on both sides."""
        self._space = None
        self.begun = False


class _Reader:
    """The generator that reads one output."""

    def __init__(
        self, stream: TextStream, writer: DeltaWriter, context: Context | None, reasoning: ReasoningFormat | None
    ) -> None:
        self._stream = stream
        self._writer = writer
        self._content = _Prose(writer.content)
        self._context = context
        self._opening = () if context is None else context.format.opening
        self._closing = () if context is None else context.format.closing
        self._reasoning = reasoning

    def read(self, thinking: bool) -> Reading:
        """Read the whole output."""
        yield
        if thinking and self._reasoning is not None:
            yield from self._reason(self._reasoning)
        while True:
            marker = yield from self._stream.pass_until(self._expected(), self._content.add)
            if not marker:
                self._content.flush()
                return
            if self._reasoning is not None and marker == self._reasoning.begin:
                yield from self._thought(marker, self._reasoning)
            elif marker in self._opening:
                yield from self._call(marker)

    def _expected(self) -> Markers:
        """Return the markers that may follow in content. Those that end calls are searched for once there is a call."""
        begin = "" if self._reasoning is None else self._reasoning.begin
        closing = [text for text in self._closing if self._writer.calls and text[0] in "<["]
        return markers(begin, *self._opening, *closing)

    def _thought(self, marker: str, format: ReasoningFormat) -> Reading:
        if self._content.begun and not format.anywhere:
            self._content.add(marker)
        else:
            yield from self._reason(format)

    def _reason(self, format: ReasoningFormat) -> Reading:
        prose = _Prose(self._writer.reasoning)
        prose.drop()
        if not (yield from self._stream.pass_until(markers(format.end), prose.add)):
            prose.flush()
        self._content.drop()

    def _call(self, marker: str) -> Reading:
        assert self._context is not None
        self._stream.record(len(marker))
        outcome: Outcome = yield from read_json_call(self._context)
        if outcome == "none":
            self._content.add(self._stream.recorded())
            return
        if outcome == "broken":
            yield from self._stream.pass_until(markers(*self._closing), _ignore)
        else:
            yield from self._stream.accept(markers(*self._closing))
        self._content.drop()


def _ignore(_: str) -> None:
    pass
