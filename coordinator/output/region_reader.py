"""Reader of outputs whose format is a response template of the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import Any

from coordinator.output.deltas import DeltaWriter
from coordinator.output.parameters import typed, types_of
from coordinator.output.prose import Prose
from coordinator.output.regions import Marker, Region, RegionFormat
from coordinator.output.text_stream import Reading, TextStream
from coordinator.requests.spec import Json

_MOST_HELD = 4096
"""Characters withheld because they may be the beginning of a marker; if more match, none of them is one."""


class RegionReader:
    """Reads one output. Content and reasoning are streamed; a call is written whole at the end of its region.

    A region of calls that is malformed or unfinished is content, markers included. ``tools``: parameter schemas by the
    tool's name, or None if calls are content. Arguments given as text get the type of the schema."""

    def __init__(
        self,
        format: RegionFormat,
        stream: TextStream,
        writer: DeltaWriter,
        tools: dict[str, Json] | None,
        reasons: bool,
        new_id: Callable[[], str],
    ) -> None:
        self._format = format
        self._stream = stream
        self._writer = writer
        self._tools = tools
        self._reasons = reasons
        self._new_id = new_id
        self._slow = set[Marker]()
        """Markers whose pattern was too slow once."""
        self._prose = {"content": Prose(writer.content), "reasoning": Prose(writer.reasoning)}

    def read(self, thinking: bool) -> Reading:
        """Read the whole output. ``thinking``: the prompt ends inside reasoning."""
        yield
        region = (self._format.reasoning if thinking else None) or self._format.outside
        opened: Any = None
        while True:
            emit, finish = self._sink(region, opened)
            self._writer.in_reasoning = region is not None and region.place == "reasoning" and self._reasons
            found = yield from self._until(region, emit)
            finish(found[1] if found else None)
            if found is None:
                return
            region, opened = found[0] or self._format.outside, found[1] if found[0] else None

    def _until(
        self, region: Region | None, emit: Callable[[str], None]
    ) -> Generator[None, None, tuple[Region | None, Any] | None]:
        """Pass on the text of ``region`` up to a marker that ends it. Return the region that begins there, or None for
        what is outside, and the match; None if the output ended."""
        stream = self._stream
        watched: list[tuple[Region | None, Marker]] = []
        if region is None or region.begin is None:
            watched = [(each, each.begin) for each in self._format.regions if each.begin is not None]
        if region is not None and region.end is not None:
            watched.append((None, region.end))
        verbatim = region is not None and region.place == "calls"
        empty = True
        while True:
            best, held = self._search(watched, empty and (region is None or region.begin is None))
            end = held if best is None else best[1].start()
            if end > stream.at:
                emit(stream.verbatim(end) if verbatim else stream.prose(end))
                empty = False
            if best is not None:
                stream.at = best[1].end()
                return best
            if stream.ended:
                return None
            yield

    def _search(
        self, watched: list[tuple[Region | None, Marker]], empty: bool
    ) -> tuple[tuple[Region | None, Any] | None, int]:
        """Return the first marker that is certain, the longest if several begin there, and the index up to which text
        is certainly none. ``empty``: a marker without text must not end what has no text yet."""
        stream, best, held = self._stream, None, len(self._stream.text)
        for region, marker in watched:
            found = self._found(marker)
            if found is None or (empty and region is None and found.start() == found.end() == stream.at):
                continue
            at_end = found.end() == len(stream.text)
            if not stream.ended and (found.partial or (at_end and not (marker.fixed and found.end() > found.start()))):
                held = min(held, found.start())
            elif best is None or (found.start(), -found.end()) < (best[1].start(), -best[1].end()):
                best = (region, found)
        if best is not None and best[1].start() >= held:
            best = None
        if best is None and len(stream.text) - held > _MOST_HELD:
            held = len(stream.text)
        return best, held

    def _found(self, marker: Marker) -> Any:
        if marker in self._slow:
            return None
        try:
            stream = self._stream
            found = marker.search(stream.text, stream.at, stream.ended)
            while found is not None and not found.partial and not stream.genuine(*found.span()):
                found = marker.search(stream.text, found.start() + 1, stream.ended)
            return found
        except TimeoutError:
            self._slow.add(marker)
            return None

    def _sink(self, region: Region | None, opened: Any) -> tuple[Callable[[str], None], Callable[[Any], None]]:
        """Return what takes the text of ``region``, and what is called at its end with the match of its end marker."""
        place = region.place if region is not None else ""
        if place == "reasoning" and not self._reasons:
            place = "content"
        if region is None or not place:
            return _ignore, _ignore
        if place == "calls":
            parts = list[str]()
            return parts.append, lambda closed: self._calls(region, opened, parts, closed)
        if not region.strip:
            return (self._writer.reasoning if place == "reasoning" else self._writer.content), _ignore
        prose = self._prose[place]
        prose.mark()
        return prose.add, _ignore

    def _calls(self, region: Region, opened: Any, parts: list[str], closed: Any) -> None:
        text = "".join(parts)
        captures = {**(opened.groupdict() if opened else {}), **(closed.groupdict() if closed else {})}
        try:
            if self._tools is None or (closed is None and region.end is not None and not text.strip()):
                raise ValueError("no calls are read")
            calls = region.calls(text, captures)
        except (ValueError, TimeoutError, RecursionError):
            self._writer.content((opened[0] if opened else "") + text + (closed[0] if closed else ""))
            return
        for name, arguments in calls:
            self._writer.begin_call(self._new_id(), name)
            self._writer.arguments(self._json(name, arguments))

    def _json(self, name: str, arguments: dict[str, object]) -> str:
        """Return ``arguments`` as JSON, text as what the schema of the tool says."""
        assert self._tools is not None
        schema = self._tools.get(name, {})
        texts = []
        for key, value in arguments.items():
            types = types_of(schema, key) if isinstance(value, str) else None
            written = typed(value, types) if isinstance(value, str) and types else json.dumps(value, ensure_ascii=False)
            texts.append(f"{json.dumps(key, ensure_ascii=False)}: {written}")
        return "{" + ", ".join(texts) + "}"


def _ignore(_: object) -> None:
    pass
