"""Grammars of arguments that are no JSON: Python literals, and values whose strings stand between markers.

They obey what JSON schemas say, in the order of the schema's properties. Numbers with bounds, and strings in double
quotes that have a pattern or format, are JSON there as well, so llguidance's own grammars of them serve.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from llguidance import LLMatcher

from coordinator.grammar import lark, texts
from coordinator.grammar.cases import Case, Document, Members, Schema
from coordinator.grammar.expressions import json_value
from coordinator.grammar.structural_tag import markers

_INTEGER = "/-?(0|[1-9][0-9]*)/"
_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"
_ESCAPE = r"""\\(["'\\\/nrt]|x[0-9a-fA-F]{2}|u([0-9a-cA-CefEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))"""
_DOUBLE, _SINGLE = rf'([^"\\\n]|{_ESCAPE})', rf"([^'\\\n]|{_ESCAPE})"
_ALL_KINDS = frozenset({"null", "boolean", "number", "string", "array", "object"})
_WORD = re.compile(r"""[^\s,:=()\[\]{}"'<>;]+""")
_UNQUOTED_KEY = f"/{_WORD.pattern}/"


class Values:
    """Rules for values of one tool's parameters. ``space``: expression for white space that may be left out.
    ``any_rule``: the rule for any value, once there is one, for all tools.
    ``quote`` "": Python's names of constants and its strings; otherwise JSON's constants, and strings that begin and
    end with that marker. Where something cannot be expressed, all methods raise Inexpressible."""

    def __init__(
        self,
        grammar: lark.Grammar,
        vocabulary: lark.Vocabulary,
        document: Document,
        space: str,
        any_rule: list[str],
        quote: str = "",
    ) -> None:
        self._grammar, self._vocabulary, self._document = grammar, vocabulary, document
        self._space, self._any_rule, self._quote = space, any_rule, quote
        python: dict[bool | None, str] = {True: "True", False: "False", None: "None"}
        self._words = {value: word.lower() for value, word in python.items()} if quote else python
        if quote:
            self._words[None] = "null"
        self._references: dict[str, str] = {}

    def fields(self, equals: str) -> str:
        """Return the expression for the parameters as ``key``, ``equals`` and value, joined by commas."""
        found = [case.schema for case in self._document.cases(self._document.root) if case.kind == "object"]
        key = _UNQUOTED_KEY if self._quote else "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
        options = [
            self._members(self._document.members(each), self._bare_key, lambda terms: [key, *terms], equals)
            for each in found or [{}]
        ]
        return self._either(options)

    def value(self, schema: object) -> str:
        """Return the expression for a value of ``schema``."""
        if isinstance(schema, dict) and schema.keys() == {"$ref"}:
            reference = str(schema["$ref"])
            if reference not in self._references:
                self._references[reference] = rule = self._grammar.reserve("ref")
                self._grammar.define(rule, self._cases(self._document.target(reference)))
            return self._references[reference]
        return self._cases(schema)

    def _cases(self, schema: object) -> str:
        cases = self._document.cases(schema)
        if not cases:
            raise texts.Inexpressible("type")
        if {case.kind for case in cases if case.free} >= _ALL_KINDS:
            return self._any()
        return self._either([self._case(each) for each in cases])

    def _case(self, case: Case) -> str:
        match case.kind:
            case "constants":
                return self._either([self._constant(each) for each in case.constants])
            case "string":
                return self._string(case.schema)
            case "integer" | "number":
                return self._number(case)
            case "boolean":
                return f'("{self._words[True]}" | "{self._words[False]}")'
            case "null":
                return f'"{self._words[None]}"'
            case "array":
                return self._array(case.schema)
        return self._object(case.schema)

    def _either(self, options: Sequence[str]) -> str:
        distinct = list(dict.fromkeys(options))
        return distinct[0] if len(distinct) == 1 else self._grammar.shared("either", " | ".join(distinct))

    # -- sequences --------------------------------------------------------------------------------------------------

    @property
    def _comma(self) -> str:
        return self._grammar.shared("comma", f'{self._space} "," {self._space}')

    def _repeated(self, item: str, low: int, high: int | None) -> str:
        """Return the expression for ``low`` to ``high`` items with commas."""
        if high == 0:
            return '""'
        more = "" if high == 1 else f"({self._comma} {item}){texts.times(max(0, low - 1), high and high - 1)}"
        return f"{item} {more}" if low else f"({item} {more})?"

    def _joined(self, items: Sequence[tuple[str, bool]], other: str, low: int, high: int | None) -> str:
        """Return the expression for ``items`` (expression, whether it must be there) in their order, with commas, and
        then ``low`` to ``high`` times ``other``, "" for none."""
        rest = f"({self._comma} {other}){texts.times(low, high)}" if other and high != 0 else ""
        first = next((at for at, (_, needed) in enumerate(items) if needed), None)
        alone = [] if first is not None else [self._repeated(other, low, high) if other else '""']
        options: list[str] = []
        for at in range(len(items) - 1, -1, -1):
            item, needed = items[at]
            if first is not None and at > first:
                rest = f"({self._comma} {item}){'' if needed else '?'} {rest}"
                continue
            item = item if first == 0 else self._grammar.shared("item", item)
            options.append(f"{item} {rest}")
            if at:
                rest = self._grammar.shared("rest", f"({self._comma} {item}){'' if needed else '?'} {rest}")
        return self._either([*reversed(options), *alone])

    def _members(
        self, members: Members, key: Callable[[str], str], other_key: Callable[[list[str]], list[str]], equals: str
    ) -> str:
        """Return the expression for the members of an object. ``key``: the expression of a named key; ``other_key``:
        terms of a key from those that it must match."""
        is_ = self._grammar.shared("is", f"{self._space} {lark.literal(equals)} {self._space}")
        items = [(f"{key(name)} {is_} {self.value(each)}", needed) for name, each, needed in members.named]
        others = [
            f"{self._grammar.shared('KEY', texts.joined(other_key(terms)))} {is_} {self.value(each)}"
            for terms, each in members.others
        ]
        return self._joined(items, self._grammar.shared("other", " | ".join(others)) if others else "", *members.bounds)

    def _array(self, schema: Schema) -> str:
        low, high = texts.bounds(schema, "minItems", "maxItems")
        given = schema.get("prefixItems")
        first = given if isinstance(given, list) else []
        rest = schema.get("items", True)
        if rest is False:
            high = len(first) if high is None else min(high, len(first))
        beyond = (max(0, low - len(first)), None if high is None else max(0, high - len(first)))
        item = "" if rest is False or (high is not None and high <= len(first)) else self.value(rest)
        if not first:
            inside = self._repeated(item, *beyond) if item else '""'
        else:
            first = first if high is None else first[:high]
            inside = f"({self._comma} {item}){texts.times(*beyond)}" if item else '""'
            for at in range(len(first) - 1, -1, -1):
                inside = f"{self._comma if at else ''} {self.value(first[at])} {inside}"
                inside = self._grammar.shared("items", inside if at < low else f'{inside} | ""')
        return self._grammar.shared("list", f'"[" {self._space} {inside} {self._space} "]"')

    def _object(self, schema: Schema) -> str:
        members = self._document.members(schema)
        if self._quote:
            inside = self._members(members, self._bare_key, lambda terms: [_UNQUOTED_KEY, *terms], ":")
        else:
            inside = self._members(members, self._constant, lambda terms: [_quoted_key(terms)], ":")
        return self._grammar.shared("braces", f'"{{" {self._space} {inside} {self._space} "}}"')

    def _bare_key(self, name: str) -> str:
        """Return the expression for a key without quotes, or within markers if it is not one word."""
        return self._constant(name) if self._quote and not _WORD.fullmatch(name) else lark.literal(name)

    def _any(self) -> str:
        """Return the expression for any value."""
        if not self._any_rule:
            self._any_rule.append(self._grammar.reserve("any"))
            words = " | ".join(f'"{word}"' for word in self._words.values())
            options = [self._string({}), _NUMBER, words, self._array({"items": {}}), self._object({})]
            self._grammar.define(self._any_rule[0], " | ".join(options))
        return self._any_rule[0]

    # -- scalars ----------------------------------------------------------------------------------------------------

    def _number(self, case: Case) -> str:
        if not case.free:
            found = json_value({"type": case.kind, **case.schema})
            if not LLMatcher.validate_grammar(f"start: json\njson: {found}"):
                return self._grammar.shared("json", found)
            self._document.give_up(next(iter(case.schema)))
        return _INTEGER if case.kind == "integer" else _NUMBER

    def _string(self, schema: Schema) -> str:
        terms = texts.terms(schema, self._document.give_up)
        if self._quote:
            return self._marked(terms)
        if not {"patterns", "format"} & schema.keys():
            count = texts.times(*texts.bounds(schema, "minLength", "maxLength"))
            return self._grammar.shared("STRING", rf"""/"{_DOUBLE}{count}"|'{_SINGLE}{count}'/""")
        return f"""({self._double(schema, terms)} | {self._plain(terms, "'")})"""

    def _double(self, schema: Schema, terms: Sequence[str]) -> str:
        """Return the expression for strings in double quotes that match ``schema``, as JSON writes them."""
        said = {keyword: value for keyword, value in schema.items() if keyword != "patterns"}
        patterns = schema.get("patterns")
        conditions = [{"pattern": each} for each in patterns] if isinstance(patterns, list) else []
        found = json_value({"type": "string", **said, **({"allOf": conditions} if conditions else {})})
        if not LLMatcher.validate_grammar(f"start: json\njson: {found}"):
            return self._grammar.shared("json", found)
        return self._plain(terms, '"')

    def _plain(self, terms: Sequence[str], quote: str) -> str:
        """Return the expression for text that matches ``terms`` between ``quote``, with nothing to be escaped."""
        text = texts.joined([*terms, rf"/[^{quote}\\\x00-\x1f]*/"])
        return self._grammar.shared("STRING", f"{lark.literal(quote)} {text} {lark.literal(quote)}")

    def _marked(self, terms: Sequence[str]) -> str:
        quote = markers(self._quote, self._vocabulary)
        control = self._vocabulary.control_id(self._quote) is not None
        if not terms and not control:
            rest = self._grammar.shared("rest", f"{lark.ANY_TEXT} {quote}", "[lazy]")
        elif not terms:
            rest = f"{lark.ANY_TEXT} {quote}"
        else:
            text = texts.joined([*terms, texts.without(self._quote)])
            rest = (
                f"{self._grammar.shared('TEXT', text)} {quote}"
                if control
                else self._grammar.shared("TEXT", f"{text} {quote}")
            )
        return f"{quote} {rest}"

    def _constant(self, value: object) -> str:
        """Return the expression for exactly ``value``."""
        if isinstance(value, str):
            if self._quote:
                quote = markers(self._quote, self._vocabulary)
                return f"{quote} {lark.literal(value)} {quote}" if value else f"{quote} {quote}"
            inside = json.dumps(value, ensure_ascii=False)[1:-1]
            bare = inside.replace('\\"', '"').replace("'", "\\'")
            return f"""({lark.literal(f'"{inside}"')} | {lark.literal(f"'{bare}'")})"""
        if value is None or isinstance(value, bool):
            return f'"{self._words[value]}"'
        if isinstance(value, list):
            inside = f" {self._comma} ".join(map(self._constant, value))
        elif isinstance(value, Mapping):
            key = self._bare_key if self._quote else self._constant
            is_ = f'{self._space} ":" {self._space}'
            inside = f" {self._comma} ".join(
                f"{key(name)} {is_} {self._constant(each)}" for name, each in value.items()
            )
        else:
            return lark.literal(repr(value))
        begin, end = ("[", "]") if isinstance(value, list) else ("{", "}")
        return f'("{begin}" {self._space} {inside} {self._space} "{end}")'


def _quoted_key(terms: Sequence[str]) -> str:
    """Return the terminal expression for a key in quotes of either kind that matches ``terms``."""
    text = texts.joined([r"""/[^"'\\\x00-\x1f]{1,64}/""", *terms])
    return rf"""("\"" {text} "\"" | "'" {text} "'")"""
