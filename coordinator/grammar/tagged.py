"""Grammars of parameters that are written one by one between tags, as Qwen3-Coder, GLM 4.5 and MiniMax do.

A string is written as it is, every other value as JSON. The reader decides by the types in the schema which it is, so
text that it would take for JSON is a string only where the schema allows both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from llguidance import LLMatcher

from coordinator.grammar import lark, texts
from coordinator.grammar.cases import KINDS, Case, Document, Schema
from coordinator.grammar.errors import GrammarError
from coordinator.grammar.expressions import json_value
from coordinator.grammar.structural_tag import markers
from coordinator.output.formats import ToolFormat

_KEY = "/[^\\s<>\"'=\\/]{1,64}/"
_PLAIN = {
    "null": "null",
    "boolean": "true|false",
    "integer": "-?(0|[1-9][0-9]*)",
    "number": r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?",
}
"""JSON of values that are not constrained, by their type."""
_BLANK = r"[ \t\r\n]*"
_LIKE = {
    "boolean": rf"{_BLANK}([tT]rue|[fF]alse){_BLANK}",
    "integer": rf"{_BLANK}-?[0-9](?s:.*)",
    "number": rf"{_BLANK}-?[0-9](?s:.*)",
    "array": rf"{_BLANK}\[(?s:.*)",
    "object": rf"{_BLANK}\{{(?s:.*)",
}
"""Text that may be read as a value of a type, if the schema allows that."""


class Tagged:
    """Rules for the parameters of one tool. ``flexible``: the expression for a text of the format. Where something
    cannot be expressed, :meth:`fields` raises Inexpressible."""

    def __init__(
        self,
        grammar: lark.Grammar,
        vocabulary: lark.Vocabulary,
        form: ToolFormat,
        document: Document,
        flexible: Callable[[str], str],
        space: str,
    ) -> None:
        self._grammar, self._vocabulary, self._form, self._document = grammar, vocabulary, form, document
        self._flexible, self._space = flexible, space
        self._lines = form.after_key.endswith("\n")
        """Whether values stand on lines of their own; the line breaks around them do not belong to them."""
        self._tag = form.after_value.strip()
        self._end = markers(self._tag, vocabulary)
        self._control = vocabulary.control_id(self._tag) is not None

    def fields(self) -> str:
        """Return the expression for all parameters, in the order of the schema."""
        found = [case.schema for case in self._document.cases(self._document.root) if case.kind == "object"]
        return " | ".join(self._fields(each) for each in found or [{}])

    def _fields(self, schema: Schema) -> str:
        members = self._document.members(schema)
        parts: list[str] = []
        for name, each, needed in members.named:
            field = self._grammar.shared(
                "field", f"{self._flexible(self._form.key)} {lark.literal(name)} {self._value(each)}"
            )
            parts.append(f"({field} {self._space})" + ("" if needed else "?"))
        options: list[str] = []
        for terms, each in members.others:
            key = self._grammar.shared("KEY", texts.joined([_KEY, *terms]))
            options.append(f"{self._flexible(self._form.key)} {key} {self._value(each)}")
        if options and members.bounds[1] != 0:
            other = self._grammar.shared("field", " | ".join(options))
            parts.append(f"({other} {self._space}){texts.times(*members.bounds)}")
        return " ".join(parts)

    # -- values -----------------------------------------------------------------------------------------------------

    def _value(self, schema: object) -> str:
        """Return the expression for a value behind its key, with its end tag."""
        cases = self._document.cases(schema)
        if not cases:
            raise texts.Inexpressible("type")
        if self._form.typed:
            return self._typed(cases)
        if self._unread(cases):
            return f"{self._head()} {self._any_text()}"
        if (choices := self._choices(cases)) is not None:
            return f"{self._head()} ({choices}) {self._closing()}"
        if not any(map(_texts, cases)):
            return f"{self._head()} {self._json(cases)} {self._closing()}"
        return f"{self._head(mandatory=True)} {self._mixed(cases)}"

    def _typed(self, cases: Sequence[Case]) -> str:
        """Return the expression where the key says whether the value is a string."""
        strings, others = _split(cases)
        options: list[str] = []
        if strings:
            text = self._any_text() if self._unread(strings) else self._text(strings, [])
            options.append(f"{self._head()} {text}")
        if others:
            options.append(f"{self._head(text=False)} {self._json(others)} {self._closing()}")
        return self._grammar.shared("value", " | ".join(options))

    def _head(self, *, text: bool = True, mandatory: bool = False) -> str:
        """Return the expression for what stands between a key and its value. ``mandatory``: with the line break."""
        after = self._form.after_key if text else self._form.after_key.replace('"true"', '"false"')
        if mandatory and self._lines:
            return self._grammar.shared("head", f'{self._flexible(after.removesuffix(chr(10)))} "\\n"')
        return self._grammar.shared("head", self._flexible(after) or '""')

    def _closing(self) -> str:
        return self._grammar.shared("end", self._flexible(self._form.after_value) or '""')

    def _unread(self, cases: Sequence[Case]) -> bool:
        """Return whether any text is a value of ``cases``."""
        return any(case.free and case.kind == "string" for case in cases) and all(
            case.free or case.kind == "string" or (case.constants and set(_kinds_of(case)) == {"string"})
            for case in cases
        )

    def _any_text(self) -> str:
        if self._control:
            return f"{lark.ANY_TEXT} {self._end}"
        return self._grammar.shared("text", f"{lark.ANY_TEXT} {self._end}", "[lazy]")

    def _choices(self, cases: Sequence[Case]) -> str | None:
        """Return the expression for strings of an enumeration, None if there are other values."""
        values = [each for case in cases for each in case.constants or (None,)]
        if not all(isinstance(each, str) and each.strip("\n") == each and each for each in values):
            return None
        return " | ".join(dict.fromkeys(lark.literal(str(each)) for each in values if self._tag not in str(each)))

    def _mixed(self, cases: Sequence[Case]) -> str:
        """Return the expression for text of ``cases``, of which some are strings, behind the line break before it."""
        strings, others = _split(cases)
        plain = [case for case in others if case.free and case.kind in _PLAIN]
        scalars = [each for case in others for each in case.constants if not isinstance(each, list | dict)]
        compound = tuple(each for case in others for each in case.constants if isinstance(each, list | dict))
        nested = [case for case in others if case not in plain and not case.constants]
        nested += [Case("constants", {}, compound)] if compound else []
        free = {kind for case in plain for kind in (case.kind, "integer" if case.kind == "number" else "")}
        unlike = {_LIKE[kind] for case in nested for kind in _kinds_of(case) if kind in _LIKE}
        unlike |= {_LIKE[kind] for each in scalars for kind in _kinds_of(Case("", {}, (each,))) if kind in _LIKE}
        unlike -= {_LIKE[kind] for kind in free if kind in _LIKE}
        more = [f"/{_PLAIN[case.kind]}/" for case in plain] + [lark.literal(json.dumps(each)) for each in scalars]
        text = self._text(strings, sorted(unlike), more)
        return self._grammar.shared("value", f"{text} | {self._json(nested)} {self._closing()}") if nested else text

    def _text(self, strings: Sequence[Case], unlike: Sequence[str], more: Sequence[str] = ()) -> str:
        """Return the expression for the text of ``strings`` that matches none of the expressions ``unlike``, or of
        ``more``, up to its end tag."""
        within = [*(f"~{lark.regex(each)}" for each in unlike), texts.without(self._tag)]
        options = list(more)
        for case in strings:
            if case.constants:
                values = (str(each) for each in case.constants if self._tag not in str(each))
                options += [lark.literal(each) for each in values if not any(re.fullmatch(one, each) for one in unlike)]
            else:
                options.append(texts.joined([*texts.terms(case.schema, self._document.give_up), *within]))
        text = texts.either(options) if options else '""'
        text += ' "\\n"' if self._lines else ""
        return (
            f"{self._grammar.shared('TEXT', text)} {self._end}"
            if self._control
            else self._grammar.shared("TEXT", f"{text} {self._end}")
        )

    def _json(self, cases: Sequence[Case]) -> str:
        """Return the expression for JSON of ``cases``."""
        schemas = [_schema(case) for case in cases]
        schema: Schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        try:
            found = json_value(self._document.embedded(schema))
        except GrammarError:
            found = ""
        if found and not LLMatcher.validate_grammar(f"start: json\njson: {found}"):
            return self._grammar.shared("json", found)
        self._document.give_up(next(iter(cases[0].schema), "enum"))
        return self._grammar.shared(
            "json", json_value({"type": sorted({kind for case in cases for kind in _kinds_of(case)})})
        )


def _texts(case: Case) -> bool:
    """Return whether ``case`` has strings."""
    return case.kind == "string" or any(isinstance(each, str) for each in case.constants)


def _split(cases: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    """Return ``cases`` with strings, and those with other values."""
    strings: list[Case] = []
    others: list[Case] = []
    for case in cases:
        words = tuple(each for each in case.constants if isinstance(each, str))
        rest = tuple(each for each in case.constants if not isinstance(each, str))
        if case.kind == "string" or words:
            strings.append(Case(case.kind, case.schema, words))
        if rest or (case.kind != "string" and not case.constants):
            others.append(Case(case.kind, case.schema, rest))
    return strings, others


def _kinds_of(case: Case) -> list[str]:
    """Return the types of the values of ``case``."""
    if case.kind in KINDS:
        return [case.kind]
    kinds = (bool, "boolean"), (int | float, "number"), (list, "array"), (dict, "object"), (str, "string")
    return [next((name for kind, name in kinds if isinstance(each, kind)), "null") for each in case.constants]


def _schema(case: Case) -> Schema:
    """Return the JSON schema of ``case``."""
    if case.constants:
        return {"enum": list(case.constants)}
    conditions = case.schema.get("patterns")
    said = {keyword: value for keyword, value in case.schema.items() if keyword != "patterns"}
    patterns = [{"pattern": each} for each in conditions] if isinstance(conditions, list) else []
    return {"type": case.kind, **said, **({"allOf": patterns} if patterns else {})}
