"""Formats that a tokenizer brings itself: the ``response_template`` of transformers 5 in ``tokenizer_config.json``.

A template names the fields of a message. Each field has markers (texts or regular expressions) around its text, or none
if it takes the text between the others. Only the fields ``content``, ``tool_calls``, and ``thinking``, ``reasoning`` or
``reasoning_content`` are read; the text of other fields is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from coordinator.output.text_stream import TextStream
from coordinator.output.values import Notation, read_value

Place = Literal["content", "reasoning", "calls", ""]
Scope = Mapping[str, object]

_PLACES: dict[str, Place] = {
    "content": "content",
    "thinking": "reasoning",
    "reasoning": "reasoning",
    "reasoning_content": "reasoning",
    "tool_calls": "calls",
}
_PARSERS = frozenset({"text", "int", "float", "bool", "json", "xml-inline", "kv-lines"})
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_TIMEOUT_S = 0.05
"""Longest run of one of the template's regular expressions. One that takes longer is not used in this output again."""


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker of a region. ``fixed``: a match at the end of the text so far cannot become another one."""

    pattern: Any
    fixed: bool

    def search(self, text: str, at: int, ended: bool) -> Any:
        """Return the first match from ``at`` on, which may be partial unless the output has ended, or None. Raises
        TimeoutError if the pattern is too slow for this text."""
        return self.pattern.search(text, at, partial=not ended, timeout=_TIMEOUT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of an output that becomes one field of a message. ``begin`` None: the part is the text outside all other
    regions. ``end`` None: it extends to the end of the output. ``strip``: whitespace around its text is dropped."""

    place: Place
    begin: Marker | None
    end: Marker | None
    strip: bool
    parse: Callable[[str], object]
    transform: Any
    each: bool

    def calls(self, text: str, captures: Scope) -> list[tuple[str, dict[str, object]]]:
        """Return name and arguments of the calls in ``text``, the inside of the region. ``captures``: named groups of
        its markers. Raises ValueError if it is malformed."""
        value = self.parse(text)
        if self.transform is not None and self.each:
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                raise ValueError("not a list of objects")
            value = [_transformed(self.transform, {**captures, **item}) for item in value]
        elif self.transform is not None:
            value = _transformed(self.transform, {**captures, "content": value})
        return [_call(item) for item in (value if isinstance(value, list) else [value])]


@dataclass(frozen=True, slots=True)
class RegionFormat:
    """A whole response template. ``regions``: those with a beginning. ``outside``: the one without, or None if text
    outside is dropped."""

    regions: tuple[Region, ...]
    outside: Region | None

    @property
    def reads_calls(self) -> bool:
        return any(region.place == "calls" for region in self.regions)

    @property
    def reasoning(self) -> Region | None:
        return next((region for region in self.regions if region.place == "reasoning"), None)

    def reasoning_opened(self, text: str) -> int:
        """Return the index at which the marker that begins reasoning stands in ``text``, if only whitespace follows it,
        and -1 otherwise."""
        region, found, at = self.reasoning, None, 0
        try:
            while region is not None and region.begin is not None and at < len(text):
                following = region.begin.search(text, at, True)
                if following is None:
                    break
                found, at = following, max(following.end(), at + 1)
        except TimeoutError:
            return -1
        return found.start() if found and found[0] and not text[found.end() :].strip() else -1

    def marks(self, token: str) -> bool:
        """Return whether ``token``, the text of an added token, is a marker of calls or begins one."""
        markers = [marker for each in self.regions if each.place == "calls" for marker in (each.begin, each.end)]
        found = [marker.search(token, 0, False) for marker in markers if marker is not None]
        return any(match is not None and match.span() == (0, len(token)) for match in found)


def load(template: object) -> RegionFormat | None:
    """Return the format that a ``response_template`` describes; None if it is none, or of an unknown kind."""
    if (
        not isinstance(template, dict)
        or template.get("version", 1) != 1
        or not isinstance(template.get("fields"), dict)
    ):
        return None
    try:
        regions = [_region(name, spec) for name, spec in template["fields"].items()]
    except (ValueError, TypeError, KeyError):
        return None
    outside = [region for region in regions if region.begin is None]
    if len(outside) > 1:
        return None
    if not outside and all(region.place != "content" for region in regions):
        outside = [_region("content", {})]
    return RegionFormat(tuple(region for region in regions if region.begin is not None), next(iter(outside), None))


def _region(name: str, spec: Any) -> Region:
    if not isinstance(spec, dict):
        raise TypeError(name)
    kind, options = spec.get("content", "text"), spec.get("content_args", {})
    if kind not in _PARSERS:
        raise ValueError(kind)
    place = _PLACES.get(name, "")
    begin, end = (_marker(spec.get(key), spec.get(f"{key}_pattern")) for key in ("open", "close"))
    return Region(
        place=place,
        begin=begin,
        end=end,
        strip=bool(options.get("strip", True)),
        parse=_parser(kind, options),
        transform=spec.get("transform"),
        each=bool(spec.get("transform_each", False)),
    )


def _marker(texts: object, pattern: object) -> Marker | None:
    if isinstance(pattern, str):
        return Marker(_compiled(pattern), fixed=False)
    if texts is None:
        return None
    listed = [str(text) for text in (texts if isinstance(texts, list) else [texts])]
    if not all(listed):
        raise ValueError("an empty marker")
    listed.sort(key=len, reverse=True)
    fixed = not any(longer != text and longer.startswith(text) for longer in listed for text in listed)
    return Marker(_compiled("|".join(map(re.escape, listed))), fixed)


def _compiled(pattern: str) -> Any:
    """Compile ``pattern`` for partial matches and time limits, which :mod:`re` does not have. Raises ValueError if it
    is malformed."""
    import regex  # slow to import, and most tokenizers have no template

    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise ValueError(pattern) from error


def _parser(kind: str, options: Mapping[str, Any]) -> Callable[[str], object]:
    """Return the function that makes a value of a region's text; it raises ValueError if the text is malformed."""
    if kind == "json":
        return _json_parser(options)
    if kind == "xml-inline":
        tag, inner = _compiled(options["tag_pattern"]), _inner_parser(options)
        if not {"key", "value"} <= set(tag.groupindex):
            raise ValueError("a tag pattern needs a key and a value")
        return lambda text: {found["key"]: inner(found["value"]) for found in tag.finditer(text, timeout=_TIMEOUT_S)}
    if kind == "kv-lines":
        between, inner = str(options.get("kv_sep", ":")), _inner_parser(options)
        pairs = options.get("line_sep", "\n")
        return lambda text: {
            key.strip(): inner(value.strip())
            for key, found, value in (line.partition(between) for line in text.split(pairs))
            if found
        }
    if kind in ("int", "float"):
        number = int if kind == "int" else float
        return lambda text: number(text.strip())
    if kind == "bool":
        return lambda text: text.strip().lower() in ("true", "1")
    return (lambda text: text.strip()) if options.get("strip", True) else (lambda text: text)


def _inner_parser(options: Mapping[str, Any]) -> Callable[[str], object]:
    inner = options.get("value_parser")
    if inner is None:
        return lambda text: text
    return _parser(inner.get("name", "text"), inner.get("args", {}))


def _json_parser(options: Mapping[str, Any]) -> Callable[[str], object]:
    delimiters = options.get("string_delims", [])
    if len(delimiters) > 1 or any(begin != end for begin, end in delimiters):
        raise ValueError("strings with different markers")
    notation = Notation(quote=delimiters[0][0] if delimiters else "")
    lenient = bool(options.get("allow_non_json", False))

    def parse(text: str) -> object:
        stream, parts = TextStream(), list[str]()
        stream.push(text + "\n")
        stream.ended = True
        try:
            next(read_value(stream, parts.append, notation))
        except StopIteration as stop:
            if stop.value and not stream.text[stream.at :].strip():
                try:
                    return json.loads("".join(parts))
                except (ValueError, RecursionError):
                    pass
        if lenient:
            return text.strip()
        raise ValueError("not JSON")

    return parse


def _transformed(transform: Any, scope: Scope) -> object:
    """Return ``transform`` with each ``{name}`` replaced by that value of ``scope``. Raises ValueError if there is
    none."""
    if isinstance(transform, dict):
        return {key: _transformed(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_transformed(value, scope) for value in transform]
    found = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if found is None:
        return transform
    value: object = scope
    for step in found[1].split("."):
        if not isinstance(value, Mapping) or step not in value:
            raise ValueError(step)
        value = value[step]
    return value


def _call(value: object) -> tuple[str, dict[str, object]]:
    function = value.get("function", value) if isinstance(value, dict) else None
    if isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]:
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if isinstance(arguments, dict):
            return function["name"], arguments
    raise ValueError("no call")
