"""Grammars of arguments that are no JSON: Python literals, and values whose strings stand between markers.

Types, enumerations, and which properties there are and must be, are obeyed, in the order of the schema. What only a
value's JSON text could show (lengths, ranges, patterns, formats) is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.grammar import lark
from coordinator.grammar.expressions import WHITESPACE
from coordinator.grammar.structural_tag import markers

Schema = Mapping[str, object]
_DEPTH = 8
"""Levels of a schema that are followed; deeper values may be anything."""
_INTEGER = "/-?(0|[1-9][0-9]*)/"
_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"
_ESCAPE = r"""\\(["'\\\/nrt]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})"""
_PYTHON_STRING = rf"""/"([^"\\\n]|{_ESCAPE})*"|'([^'\\\n]|{_ESCAPE})*'/"""


class Values:
    """Rules for values of one tool's parameters. ``python``: Python's names of constants and its strings; otherwise
    JSON's constants, and strings that begin and end with the marker ``quote``."""

    def __init__(self, grammar: lark.Grammar, vocabulary: lark.Vocabulary, root: Schema, quote: str = "") -> None:
        self._grammar, self._vocabulary, self._root, self._quote = grammar, vocabulary, root, quote
        self._space = grammar.rule("SPACE", lark.regex(WHITESPACE))
        python: dict[bool | None, str] = {True: "True", False: "False", None: "None"}
        self._words = {value: word.lower() for value, word in python.items()} if quote else python
        if quote:
            self._words[None] = "null"
        self._string_rule = self._any_rule = ""

    def fields(self, schema: Schema, equals: str) -> str:
        """Return the expression for the properties of ``schema`` as ``key``, ``equals`` and value, joined by commas.
        Properties that the schema does not name are left out."""
        properties, required = schema.get("properties"), schema.get("required")
        named = properties if isinstance(properties, Mapping) else {}
        needed = required if isinstance(required, list) else []
        items = [(f"{self._key(name, equals)} {self.value(inner, 1)}", name in needed) for name, inner in named.items()]
        return self._joined(items)

    def _joined(self, items: Sequence[tuple[str, bool]]) -> str:
        """Return the expression for ``items`` (expression, whether it must be there) in their order, with commas."""
        comma = f'"," {self._space}?'
        after = alone = '""'  # what may follow an item, and the same if none was there yet
        for item, needed in reversed(items):
            name = self._grammar.rule("item", item)
            later, first = f"{comma} {name} {after}", f"{name} {after}"
            after, alone = (
                self._grammar.rule("after", later if needed else f"{later} | {after}"),
                self._grammar.rule("alone", first if needed else f"{first} | {alone}"),
            )
        return alone

    def _key(self, name: str, equals: str) -> str:
        return f"{lark.literal(name)} {self._space}? {lark.literal(equals)} {self._space}?"

    def value(self, schema: object, depth: int) -> str:
        """Return the expression for a value of ``schema``."""
        schema = self._resolved(schema)
        if not isinstance(schema, Mapping) or depth > _DEPTH:
            return self._any()
        if "const" in schema or isinstance(schema.get("enum"), list):
            given = [schema["const"]] if "const" in schema else schema["enum"]
            assert isinstance(given, list)
            return self._either([self._constant(each) for each in given])
        for keyword in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(keyword), list):
                return self._either([self.value(each, depth + 1) for each in options])
        kinds = schema.get("type", "object" if "properties" in schema else None)
        if isinstance(kinds, list):
            return self._either([self._typed(schema, each, depth) for each in kinds])
        return self._typed(schema, kinds, depth)

    def _either(self, options: Sequence[str]) -> str:
        return self._grammar.rule("either", " | ".join(options)) if options else self._any()

    def _typed(self, schema: Schema, kind: object, depth: int) -> str:
        match kind:
            case "string":
                return self._string()
            case "integer":
                return _INTEGER
            case "number":
                return _NUMBER
            case "boolean":
                return f'("{self._words[True]}" | "{self._words[False]}")'
            case "null":
                return f'"{self._words[None]}"'
            case "array":
                return self._array(self.value(schema.get("items"), depth + 1))
            case "object" if schema.get("properties"):
                return self._braces(self._properties(schema, depth))
            case "object":
                return self._object()
        return self._any()

    def _properties(self, schema: Schema, depth: int) -> str:
        named, required = schema["properties"], schema.get("required")
        assert isinstance(named, Mapping)
        needed = required if isinstance(required, list) else []
        colon = f'{self._space}? ":" {self._space}?'
        items = [
            (f"{self._constant_key(name)} {colon} {self.value(inner, depth + 1)}", name in needed)
            for name, inner in named.items()
        ]
        return self._joined(items)

    def _constant_key(self, name: str) -> str:
        return lark.literal(name) if self._quote else self._constant(name)

    def _array(self, item: str) -> str:
        space = self._space
        return self._grammar.rule("list", f'"[" {space}? ({item} ({space}? "," {space}? {item})*)? {space}? "]"')

    def _braces(self, inside: str) -> str:
        return self._grammar.rule("braces", f'"{{" {self._space}? {inside} {self._space}? "}}"')

    def _object(self) -> str:
        space, key = self._space, "/[^\\s,:{}\\[\\]\"']+/" if self._quote else self._string()
        item = self._grammar.rule("member", f'{key} {space}? ":" {space}? {self._any()}')
        return self._braces(f'({item} ({space}? "," {space}? {item})*)?')

    def _any(self) -> str:
        """Return the expression for any value."""
        if not self._any_rule:
            self._any_rule = self._grammar.reserve("any")
            words = " | ".join(f'"{word}"' for word in self._words.values())
            options = [self._string(), _NUMBER, words, self._array(self._any_rule), self._object()]
            self._grammar.define(self._any_rule, " | ".join(options))
        return self._any_rule

    def _string(self) -> str:
        if not self._string_rule:
            self._string_rule = self._grammar.rule("string", self._quoted() if self._quote else _PYTHON_STRING)
        return self._string_rule

    def _quoted(self) -> str:
        quote = markers(self._quote, self._vocabulary)
        if self._vocabulary.control_id(self._quote) is not None:
            return f"{quote} {lark.ANY_TEXT} {quote}"
        rest = self._grammar.rule("rest", f"{lark.ANY_TEXT} {quote}", "[lazy]")
        return f"{quote} {rest}"

    def _constant(self, value: object) -> str:
        """Return the expression for exactly ``value``."""
        if isinstance(value, str):
            if self._quote:
                quote = markers(self._quote, self._vocabulary)
                return f"{quote} {lark.literal(value)} {quote}"
            escaped = value.replace("\\", "\\\\").replace("\n", "\\n")
            double = '"' + escaped.replace('"', '\\"') + '"'
            single = "'" + escaped.replace("'", "\\'") + "'"
            return f"({lark.literal(double)} | {lark.literal(single)})"
        if value is None or isinstance(value, bool):
            return f'"{self._words[value]}"'
        return lark.literal(repr(value)) if isinstance(value, int | float) else self._any()

    def _resolved(self, schema: object) -> object:
        """Return ``schema``, or what it refers to by a pointer into the tool's parameters."""
        for _ in range(_DEPTH):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str):
                return schema
            found: object = self._root if reference.startswith("#/") else None
            for step in reference[2:].split("/"):
                step = step.replace("~1", "/").replace("~0", "~")
                found = found.get(step) if isinstance(found, Mapping) else None
            schema = found
        return None
