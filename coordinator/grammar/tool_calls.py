"""Grammars of tool calls in each family's notation, from the table in :mod:`coordinator.output.formats`.

The name is one of the tools that may be called. Arguments match the tool's schema: in JSON (styles json, named,
channels) by llguidance's own grammars, between tags by :mod:`coordinator.grammar.tagged`, as Python literals and quoted
strings by :mod:`coordinator.grammar.notation`. Parameters between tags and of Python calls come in the order of the
schema, without those that it does not name unless it is explicitly open.

A tool that is not strict may have a schema with keywords that cannot be obeyed: they are left out, and if that does not
help, arguments may be any JSON object. A strict tool is then refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from llguidance import LLMatcher

from coordinator.grammar import lark
from coordinator.grammar.cases import Document
from coordinator.grammar.errors import TOO_COMPLEX, UNSUPPORTED, GrammarError
from coordinator.grammar.expressions import ANY_OBJECT, WHITESPACE, json_value
from coordinator.grammar.json_schema import path_of, prepared
from coordinator.grammar.notation import Values
from coordinator.grammar.structural_tag import markers
from coordinator.grammar.tagged import Tagged
from coordinator.grammar.task import Tool
from coordinator.grammar.texts import Inexpressible
from coordinator.output.formats import ToolFormat
from coordinator.output.introductions import Introduction, call_head, introductions

NEWLINE = "\n"
Detail = Literal["all", "names", "nothing"]
"""What is obeyed of the schemas of tools that are not strict: all, or of notations without JSON only the names of
parameters, or nothing, so that arguments may be any object."""


class Calls:
    """Rules for the calls of one output. ``detail``: how much of the schemas of tools that are not
    strict is obeyed."""

    def __init__(
        self,
        grammar: lark.Grammar,
        vocabulary: lark.Vocabulary,
        form: ToolFormat,
        tools: Sequence[Tool],
        *,
        parallel: bool,
        detail: Detail = "all",
    ) -> None:
        self._grammar, self._vocabulary, self.form = grammar, vocabulary, form
        self.tools, self.parallel, self._detail = tools, parallel, detail
        self._space_rule = self._call_rule = ""
        self._any_value: list[str] = []
        self.left_out: list[tuple[int, str]] = []
        """Index of a tool that is not strict, and path of what of its schema is not obeyed."""

    @property
    def space(self) -> str:
        """Expression for white space that may be left out."""
        if not self._space_rule:
            self._space_rule = self._grammar.rule("SPACE", lark.regex(WHITESPACE))
        return f"{self._space_rule}?"

    # -- texts of the format ----------------------------------------------------------------------------------------

    def flexible(self, text: str, *, around_value: bool = False) -> str:
        """Return the expression for ``text`` of a format, in which white space at line breaks and at its ends may be
        left out or be another. ``around_value``: there is a line break or none, as other white space would be read as
        part of a value."""
        parts: list[str] = []
        at_break = '"\\n"?' if around_value else self.space
        for at, line in enumerate(text.split("\n")):
            if at and (not parts or parts[-1] != at_break):
                parts.append(at_break)
            bare = line.strip(" ")
            if bare != line and line.startswith(" ") and (not parts or parts[-1] != self.space):
                parts.append(self.space)
            if bare:
                parts.append(markers(bare, self._vocabulary))
            if bare and line.endswith(" "):
                parts.append(self.space)
        return " ".join(parts)

    # -- calls ------------------------------------------------------------------------------------------------------

    def whole_group(self) -> str:
        """Return the expression for a group of calls with the family's first marker, if it has one."""
        for first in introductions(self.form)[: len(self.form.opening)]:
            return f"{self.flexible(first.marker + first.written)} {self.group(first.surplus)}"
        return f"{self.flexible(f'{NEWLINE}[' if self.form.brackets else '')} {self.group()}"

    def introduced(self, introduction: Introduction) -> str:
        """Return the expression for what stands behind the marker of ``introduction``: a group of calls, or a list that
        says that no tool is called."""
        before, group = self.flexible(introduction.written), self.group(introduction.surplus)
        if self.form.no_tool and self.form.brackets:
            group = f"({group} | {self._no_call()})"
        return f"{before} {group}"

    def group(self, surplus: Sequence[str] = ()) -> str:
        """Return the expression for one group of calls behind its marker and bracket. ``surplus``: markers behind it
        that may be missing. If they close what is around single calls, there is one call."""
        if surplus and not self.form.brackets:
            closing = self.form.closing[: len(self.form.closing) - len(surplus)]
            rest = (
                f"{self.space} {self.flexible(NEWLINE.join(closing))} ({self.flexible(NEWLINE.join(('', *surplus)))})?"
            )
            return self._rule("group", f"{self._spaced_call()} {rest}")
        others = self._others(closed=not surplus)
        if self.form.style != "pythonic" or self.form.brackets:
            return self._rule("group", f"{self._spaced_call()} {others}")
        space, end = self.space, self.flexible(self.form.end)  # the brackets may be missing
        call = self._spaced_call()
        bare = f"{call} ({space} {self._call()})*" if self.parallel else call
        comma = f'({space} "," {space} {self._call()})*' if self.parallel else ""
        return self._rule("group", f'({space} "[" {call} {comma} {space} "]" | {bare}) {space} {end}')

    def _no_call(self) -> str:
        """Return the expression for a list of one object that names no tool."""
        space, form = self.space, self.form
        names = " | ".join(lark.literal(f'"{name}"') for name in form.no_tool)
        name = f'{lark.literal(f"{chr(34)}{form.name_key}{chr(34)}")} {space} ":" {space} ({names})'
        arguments = f'{lark.literal(f"{chr(34)}{form.arguments_key}{chr(34)}")} {space} ":" {space} "{{" {space} "}}"'
        members = f'{name} {space} "," {space} {arguments}'
        end = f"{self.flexible(form.end)} {self.flexible(form.section[1])}"
        return self._rule("none", f'{space} "{{" {space} {members} {space} "}}" {space} "]" {space} {end}')

    def unmarked_group(self) -> str:
        """Return the expression for a group of calls without markers. Its beginning up to the name is one terminal, so
        that :meth:`unlike_calls`, other text, ends where it is complete: the lexer prefers the longer match."""
        options: list[str] = []
        for tool in self.tools:
            name = re.escape(tool.name)
            blank = rf"(?:{WHITESPACE})?"
            if self.form.style == "pythonic":
                head = self._grammar.rule("HEAD", lark.regex(rf"{blank}\[{blank}{name}\("))
                options.append(f"{head} {self._pythonic(tool)}")
            else:
                kind = rf'(?:"type"{blank}:{blank}"function"{blank},{blank})?'
                key = rf'{blank}\{{{blank}{kind}"{self.form.name_key}"{blank}:{blank}"{name}"'
                options.append(f'{self._grammar.rule("HEAD", lark.regex(key))} {self._json(tool)} {self.space} "}}"')
        return self._rule("group", f"({' | '.join(options)}) {self._others()}")

    def unlike_calls(self) -> str:
        """Return the terminal for text that does not begin like a call without markers."""
        like_call = call_head(self.form, [tool.name for tool in self.tools])
        return self._grammar.rule("TEXT", f"{lark.ANY_TEXT} & ~{lark.regex(f'{like_call}(?s:.*)')}")

    def _others(self, *, closed: bool = True) -> str:
        """Return the expression for what follows the first call: others, and the end of the group. ``closed``: the end
        of its section must be there."""
        form = self.form
        end, section = self.flexible(form.end), self.flexible(form.section[1])
        if not closed:
            section = f"({section})?"
        if self.form.brackets:
            more = f'({self.space} "," {self.space} {self._call()})*' if self.parallel else ""
            end = f"({end})?" if end and not form.opening else end
            return f'{more} {self.space} "]" {self.space} {end} {section}'
        between = self.flexible(form.between.strip())
        between = f"({between})? {self.space}" if between else ""
        call = f"{self.space} {end} {self.space} {between} {self.flexible(form.begin)} {self._spaced_call()}"
        return f"{f'({call})*' if self.parallel else ''} {self.space} {end} {section}"

    def named_calls(self, before_arguments: str) -> str:
        """Return the expression for a name, ``before_arguments`` and the arguments in JSON, of any of the tools."""
        options = (f"{lark.literal(tool.name)} {before_arguments} {self.arguments(tool)}" for tool in self.tools)
        return self._rule("call", " | ".join(options))

    def _rule(self, name: str, body: str) -> str:
        """Define a rule without repeated white space, and return its name."""
        parts: list[str] = []
        for part in body.split(" "):
            if part and not (parts and part == self.space == parts[-1]):
                parts.append(part)
        return self._grammar.shared(name, " ".join(parts) or '""')

    def _spaced_call(self) -> str:
        return self._call() if self.form.tight else f"{self.space} {self._call()}"

    def _call(self) -> str:
        """Return the expression for one call behind its ``begin``: any of the tools."""
        if self._call_rule:
            return self._call_rule
        space = self.space
        match self.form.style:
            case "json":
                names = (f"{lark.literal(f'{chr(34)}{tool.name}{chr(34)}')} {self._json(tool)}" for tool in self.tools)
                if not self.form.name_key:
                    return self._grammar.shared("call", f'"{{" {space} ({" | ".join(names)}) {space} "}}"')
                key = lark.literal(f'"{self.form.name_key}"')
                numbered = ""
                if self.form.name_key == "tool_name":  # Cohere's models number their calls
                    numbered = f'("\\"tool_call_id\\"" {space} ":" {space} /"[0-9]{{1,3}}"/ {space} "," {space})?'
                body = f'"{{" {space} {numbered} {key} {space} ":" {space} ({" | ".join(names)}) {space} "}}"'
            case "parameters":
                body = " | ".join(map(self._parameters, self.tools))
            case "pythonic":
                body = " | ".join(f'{lark.literal(tool.name)} "(" {self._pythonic(tool)}' for tool in self.tools)
            case _:
                body = " | ".join(map(self._named, self.tools))
        self._call_rule = self._grammar.rule("call", body)
        return self._call_rule

    def _json(self, tool: Tool) -> str:
        """Return the expression for what follows the name in an object, up to its closing brace."""
        key, space = lark.literal(f'"{self.form.arguments_key}"'), self.space
        if not self.form.name_key:
            return f'{space} ":" {space} {self.arguments(tool)}'
        behind = f"{space} {self.arguments(tool)}"
        if self.form.section[0] == "[TOOL_CALLS]":  # older models of Mistral write an identifier behind
            behind += f' ({space} "," {space} "\\"id\\"" {space} ":" {space} /"[a-zA-Z0-9]{{9}}"/)?'
        return f'{space} "," {space} {key} {space} ":" {behind}'

    def _named(self, tool: Tool) -> str:
        form = self.form
        name = lark.literal(form.name_prefix + tool.name)
        number = '":" /[0-9]{1,3}/' if form.numbered else ""
        after = self._after_name()
        if form.id_marker:  # Mistral's: older models write neither marker
            after = f"({markers(form.id_marker, self._vocabulary)} /[a-zA-Z0-9]{{1,64}}/)? ({after})?"
        if not form.quote:
            return f"{name} {number} {after} {self.space} {self.arguments(tool)}"
        fields = self._written(tool, lambda document: self._values(document, form.quote).fields(":"))
        return f'{name} {number} {after} "{{" {self.space} {fields} {self.space} "}}"'

    def _after_name(self) -> str:
        """Return the expression for the text behind a name; a line break that ends the name must be there."""
        text = self.form.after_name
        return f"{lark.literal(chr(10))} {self.flexible(text[1:])}" if text.startswith("\n") else self.flexible(text)

    def _pythonic(self, tool: Tool) -> str:
        """Return the expression for what follows a name and its bracket."""
        fields = self._written(tool, lambda document: self._values(document).fields("="))
        return f'{self.space} {fields} {self.space} ")"'

    def _values(self, document: Document, quote: str = "") -> Values:
        return Values(self._grammar, self._vocabulary, document, self.space, self._any_value, quote)

    def _parameters(self, tool: Tool) -> str:
        def fields(document: Document) -> str:
            flexible = functools.partial(self.flexible, around_value=True)
            tagged = Tagged(self._grammar, self._vocabulary, self.form, document, flexible, self.space)
            return tagged.fields()

        name = lark.literal(self.form.name_prefix + tool.name)
        return f"{name} {self._after_name()} {self.space} {self._rule('fields', self._written(tool, fields))}"

    # -- arguments --------------------------------------------------------------------------------------------------

    def arguments(self, tool: Tool) -> str:
        """Return the expression for the arguments of ``tool`` as a JSON object."""
        return self._grammar.shared("json", self._json_arguments(tool, _object(tool.parameters)))

    def _json_arguments(self, tool: Tool, schema: Mapping[str, object]) -> str:
        """Return the expression for JSON of a tool's schema, as exactly as it can be obeyed."""
        if tool.strict:
            try:
                return json_value(schema, closed=True)
            except GrammarError as error:
                raise GrammarError(error.text, error.path, error.code, tool.index) from None
        for lenient in (False, True) if self._detail == "all" else ():
            try:
                found = json_value(schema, lenient=lenient)
            except GrammarError as error:
                self._leave_out(tool, error)
                continue
            if not LLMatcher.validate_grammar(f"start: json\njson: {found}"):
                return found
        self.left_out.append((tool.index, ""))
        return json_value(ANY_OBJECT)

    def _leave_out(self, tool: Tool, error: GrammarError) -> None:
        """Note a keyword that cannot be obeyed. Raises GrammarError if the schema is malformed."""
        if error.code not in (UNSUPPORTED, TOO_COMPLEX):
            raise GrammarError(error.text, error.path, error.code, tool.index) from None
        self.left_out.append((tool.index, error.path))

    def _written(self, tool: Tool, write: Callable[[Document], str]) -> str:
        """Return the expression that ``write`` makes of a tool's schema, as exactly as the notation can obey it."""
        schema = _object(tool.parameters)
        if tool.strict:
            try:
                return write(Document(_only_object(prepared(schema, closed=True)), strict=True))
            except GrammarError as error:
                raise GrammarError(error.text, error.path, error.code, tool.index) from None
            except Inexpressible as error:
                text = f"is not supported: calls of this model cannot obey the keyword {error.keyword!r}."
                raise GrammarError(text, path_of(schema, error.keyword), UNSUPPORTED, tool.index) from None
        for lenient in (False, True) if self._detail == "all" else ():
            try:
                document = Document(_only_object(prepared(schema, lenient=lenient)), strict=False)
                found = write(document)
            except GrammarError as error:
                self._leave_out(tool, error)
            except Inexpressible as error:
                self.left_out.append((tool.index, path_of(schema, error.keyword)))
            else:
                self.left_out += [(tool.index, path_of(schema, keyword)) for keyword in document.given_up]
                return found
        self.left_out.append((tool.index, ""))
        return write(Document(_any_values(schema) if self._detail != "nothing" else ANY_OBJECT, strict=False))


def _object(parameters: object) -> dict[str, object]:
    """Return the schema of a tool's arguments, which are always an object."""
    if not isinstance(parameters, dict):
        return dict(ANY_OBJECT)
    return parameters if "type" in parameters else {**ANY_OBJECT, **parameters}


def _only_object(made: Mapping[str, object] | bool) -> Mapping[str, object]:
    return made if isinstance(made, Mapping) else ANY_OBJECT


def _any_values(schema: Mapping[str, object]) -> Mapping[str, object]:
    """Return the schema of objects with the properties of ``schema``, whatever their values."""
    properties, required = schema.get("properties"), schema.get("required")
    names = properties if isinstance(properties, dict) else {}
    needed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return {"type": "object", "properties": dict.fromkeys(names, True), "required": needed}
