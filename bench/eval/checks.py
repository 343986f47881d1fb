"""Checkers that decide whether an answer is right: one function per kind of check, selected by the check's ``kind``.

A check is plain JSON, so that golden items can be stored in a file and judged without the corpus that made them:

    {"kind": "exact", "accept": ["fig, kiwi, plum"]}            one of these texts, ignoring spacing
    {"kind": "number", "value": -62}                            the result that the answer ends with
    {"kind": "facts", "accept": [regex...], "reject": [...]}    whole sentences that match one of accept, none of reject
    {"kind": "json", "schema": {...}, "value": {...}}           JSON that fits the schema, with these values
    {"kind": "tool_call", "name": ..., "arguments": {...}}      exactly this call
    {"kind": "story", "must": [word...]}                        different whole sentences that mention these words

A wrong answer fails; so do empty, truncated, repetitive and garbled ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_FACT_WORDS = 80
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_DOUBLED = re.compile(r"\b([a-z]{3,}) \1\b", re.IGNORECASE)
"""A word that is repeated at once. Words of one or two letters are exempt (``la la``)."""
_RESULT = re.compile(
    r"(?:^|\d ?=|:|\b(?:is|are|equals|has|have|get|gets|remain|leaves))\s*(-?\d+(?:\.\d+)?)(?: [a-z ]{1,30})?[.!]?\s*$"
)
"""The number at the end of an answer, alone or after a phrase that introduces a result."""
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float),
    "boolean": (bool,), "array": (list,), "object": (dict,),
}  # fmt: skip


class Verdict(NamedTuple):
    """The result of a check. ``right``: the answer is correct. ``valid``: at least its form is (the JSON fits the
    schema, the call parses). ``why`` explains a wrong answer."""

    right: bool
    valid: bool
    why: str = ""


class Answer(NamedTuple):
    """A server's answer: its text, and its tool calls as (name, arguments) if the server parsed them."""

    text: str
    calls: tuple[tuple[str, Any], ...] = ()


def check(spec: dict[str, Any], answer: Answer) -> Verdict:
    """Judge one answer by the check ``spec``."""
    return _CHECKS[spec["kind"]](spec, answer)


# -- text -------------------------------------------------------------------------------------------------------------


def _plain(text: str) -> str:
    return " ".join(text.split()).rstrip(".").strip()


def _exact(spec: dict[str, Any], answer: Answer) -> Verdict:
    right = _plain(answer.text) in {_plain(text) for text in spec["accept"]}
    return Verdict(right, right, "" if right else f"expected {spec['accept'][0]!r}")


def _number(spec: dict[str, Any], answer: Answer) -> Verdict:
    if _repeats(answer.text.split()):
        return Verdict(False, False, "repeats itself")
    found = _RESULT.search(answer.text)
    if not found:
        return Verdict(False, False, "no result")
    right = float(found[1]) == spec["value"]
    return Verdict(right, True, "" if right else f"expected {spec['value']}, found {found[1]}")


def _facts(spec: dict[str, Any], answer: Answer) -> Verdict:
    if flaw := _flaw(answer.text):
        return Verdict(False, False, flaw)
    text = " ".join(answer.text.split())
    if wrong := next((rule for rule in spec.get("reject", ()) if re.search(rule, text, re.IGNORECASE)), None):
        return Verdict(False, True, f"says {wrong!r}")
    right = any(re.search(rule, text, re.IGNORECASE) for rule in spec["accept"])
    return Verdict(right, True, "" if right else f"does not say {spec['accept'][0]!r}")


def _flaw(text: str) -> str:
    """Describe the first flaw in the form of a short text; empty if there is none."""
    words = text.split()
    if not words:
        return "empty"
    if len(words) > MAX_FACT_WORDS:
        return "is too long"
    if not re.search(r"[.!?]['\")]?$", text.strip()):
        return "the last sentence is cut off"
    for sentence in re.split(r"(?<=[.!?])\s+", text.strip()):
        if not re.match(r"['\"(]?[A-Z0-9]", sentence):
            return f"not a sentence: {sentence!r}"
    if _repeats(words) or _DOUBLED.search(text):
        return "repeats itself"
    return ""


def _repeats(words: list[str]) -> bool:
    """Return whether runs of four words recur more than once."""
    runs = [tuple(words[at : at + 4]) for at in range(len(words) - 3)]
    return len(runs) - len(set(runs)) > 1


def _story(spec: dict[str, Any], answer: Answer) -> Verdict:
    text = answer.text.strip()
    sentences = re.split(r"(?<=[.!?])\s+|(?<=[.!?][\"'])\s+(?=[A-Z])", text)
    if not re.search(r"[.!?]['\")]?$", text):
        return Verdict(False, False, "the last sentence is cut off")
    if not 4 <= len(sentences) <= 25 or len(text.split()) > 250:
        return Verdict(False, False, f"{len(sentences)} sentences")
    if len(set(sentences)) < len(sentences):
        return Verdict(False, False, "repeats a sentence")
    if not all(re.match(r"['\"(]?[A-Z]", sentence) for sentence in sentences):
        return Verdict(False, False, "a sentence does not begin with a capital letter")
    missing = [word for word in spec["must"] if not re.search(rf"\b{re.escape(word)}", text, re.IGNORECASE)]
    return Verdict(not missing, True, f"does not mention {missing[0]!r}" if missing else "")


# -- JSON and calls ---------------------------------------------------------------------------------------------------


def _json(spec: dict[str, Any], answer: Answer) -> Verdict:
    try:
        value = json.loads(answer.text)
    except ValueError as error:
        return Verdict(False, False, f"not JSON: {error}")
    if not fits(value, spec["schema"]):
        return Verdict(False, False, "does not fit the schema")
    right = same(value, spec["value"])
    return Verdict(right, True, "" if right else f"expected {json.dumps(spec['value'])}")


def _tool_call(spec: dict[str, Any], answer: Answer) -> Verdict:
    calls = list(answer.calls)
    for body in _CALL.findall(answer.text):
        try:
            call = json.loads(body)
            calls.append((call["name"], call["arguments"]))
        except (ValueError, KeyError, TypeError):
            return Verdict(False, False, "the call cannot be parsed")
    if len(calls) != 1:
        return Verdict(False, False, f"{len(calls)} calls")
    name, arguments = calls[0]
    if not isinstance(arguments, dict):
        return Verdict(False, False, "the arguments are not an object")
    right = name == spec["name"] and same(arguments, spec["arguments"])
    return Verdict(right, True, "" if right else f"expected {spec['name']}({json.dumps(spec['arguments'])})")


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether ``value`` fits ``schema``, which may use type, enum, items, properties, required and
    additionalProperties of JSON Schema."""
    kind = schema.get("type")
    if kind and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list):
        return all(fits(each, schema.get("items", {})) for each in value)
    if isinstance(value, dict):
        known = schema.get("properties", {})
        missing = [name for name in schema.get("required", ()) if name not in value]
        unknown = schema.get("additionalProperties", True) is False and set(value) - set(known)
        return not missing and not unknown and all(fits(value[name], known[name]) for name in value if name in known)
    return True


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal as JSON; unlike in Python, ``true`` does not equal 1."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


_CHECKS: dict[str, Callable[[dict[str, Any], Answer], Verdict]] = {
    "exact": _exact, "number": _number, "facts": _facts, "story": _story, "json": _json, "tool_call": _tool_call,
}  # fmt: skip
