"""The notation of calls and reasoning in a ``response_template``, from which grammars are made.

Reading needs no more than the template (:mod:`coordinator.output.regions`). A grammar has to know how calls are
written, which is clear where the markers are plain texts, or patterns with a name among plain text, around JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from coordinator.output.formats import ReasoningFormat, ToolFormat

NAME = "response_template"
_NAMED = re.compile(r"(?P<before>.*?)\(\?P<(?P<name>\w+)>(?:\\w\+|\[[^\]]+\]\+)\)(?P<behind>.*)", re.DOTALL)
"""A pattern with one named group, the name of a function."""
_LITERAL = re.compile(r"(?:\\s\*|\\[^\w\s]|[^\\^$.|?*+()\[\]{}])*")
"""A part of a pattern that means one text, with white space at some places."""


def notation(template: Mapping[str, Any]) -> tuple[ToolFormat | None, ReasoningFormat | None]:
    """Return how calls and reasoning are written according to a valid ``template``, None where it does not show."""
    fields = template["fields"]
    reasoning = next((fields[name] for name in ("thinking", "reasoning", "reasoning_content") if name in fields), None)
    return _calls(fields.get("tool_calls") or {}), _reasoning(reasoning or {})


def _calls(spec: Mapping[str, Any]) -> ToolFormat | None:
    begin, end = _text(spec.get("open")), _text(spec.get("close"))
    found = _NAMED.fullmatch(str(spec.get("open_pattern", "")))
    options = spec.get("content_args") or {}
    delimiters = options.get("string_delims") or []
    name, arguments = _places(spec.get("transform"))
    if spec.get("content") != "json" or not end:
        return None
    if found is not None and (name, arguments) == (found["name"], "content"):
        before, behind = map(_plain, (found["before"], found["behind"]))
        if not before or behind is None or len(delimiters) > 1:
            return None
        quote = delimiters[0][0] if delimiters else ""
        return ToolFormat(name=NAME, style="named", begin=before, tight=True, after_name=behind, end=end, quote=quote)
    if not begin or delimiters:
        return None
    if spec.get("transform_each") and name and "." not in name + arguments:
        section = begin, end
        return ToolFormat(name=NAME, style="json", section=section, listed=True, name_key=name, arguments_key=arguments)
    name, arguments = _key(name), _key(arguments)
    if spec.get("transform_each") or not name or not arguments:
        return None
    return ToolFormat(name=NAME, style="json", begin=begin, end=end, name_key=name, arguments_key=arguments)


def _key(place: str) -> str:
    """Return the key of the content that ``place`` names, "" if it is no key."""
    key = place.removeprefix("content.")
    return "" if key == place or "." in key else key


def _places(transform: object) -> tuple[str, str]:
    """Return where ``transform`` takes the name and the arguments of a call from, "" for what is not understood."""
    if transform is None:
        return "content.name", "content.arguments"
    function = transform.get("function", transform) if isinstance(transform, dict) else transform
    if function == "{content}":
        return "content.name", "content.arguments"
    if not isinstance(function, dict):
        return "", ""
    found = [re.fullmatch(r"\{([\w.]+)\}", str(function.get(key))) for key in ("name", "arguments")]
    name, arguments = ("" if each is None else each[1] for each in found)
    return name, arguments


def _reasoning(spec: Mapping[str, Any]) -> ReasoningFormat | None:
    begin, end = _text(spec.get("open")), _text(spec.get("close"))
    return ReasoningFormat(name=NAME, begin=begin, end=end) if begin and end else None


def _text(marker: object) -> str:
    """Return a marker that is a text, or the first of several, "" for none."""
    first = marker[0] if isinstance(marker, list) and marker else marker
    return first if isinstance(first, str) else ""


def _plain(pattern: str) -> str | None:
    """Return the text that ``pattern`` means, without white space that may be left out; None if it means several."""
    if _LITERAL.fullmatch(pattern) is None:
        return None
    return re.sub(r"\\(.)", r"\1", pattern.replace(r"\s*", ""))
