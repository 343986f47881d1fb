"""Structural tags: free text in which certain words begin a part with a grammar of its own.

Both JSON forms are understood: vLLM's older one (``structures`` with begin, schema and end, and ``triggers``), and the
``format`` of xgrammar, a tree of const_string, json_schema, regex, grammar, any_text, sequence, or, tag, triggered_tags
and tags_with_separator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.grammar import lark
from coordinator.grammar.errors import TOO_COMPLEX, GrammarError, refuse, unsupported
from coordinator.grammar.expressions import as_lark, json_value, parsed
from coordinator.grammar.json_schema import MAX_DEPTH

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Tag:
    """A part of the output: ``begin``, then ``content`` (an expression), then ``end``. With ``content`` None the part
    is free text up to ``end``."""

    begin: str
    content: str | None
    end: str


def answer(grammar: lark.Grammar, tag: Json, vocabulary: lark.Vocabulary, whitespace: str | None) -> str:
    """Add the rules for a structural tag and return their expression. Raises GrammarError."""
    builder = _Builder(grammar, vocabulary, whitespace)
    if "format" in tag:
        return builder.form(tag["format"], ".format", 0)
    return builder.older(tag)


def triggered(
    grammar: lark.Grammar,
    tags: Sequence[tuple[str, Tag]],
    vocabulary: lark.Vocabulary,
    *,
    at_least_one: bool = False,
    only_one: bool = False,
) -> str:
    """Return the expression for free text in which each trigger begins one of its tags. ``tags`` are (trigger, tag),
    and each tag begins with its trigger. ``only_one``: after the first tag there is neither text nor another tag."""
    by_trigger: dict[str, list[Tag]] = {}
    for trigger, tag in tags:
        by_trigger.setdefault(trigger, []).append(tag)
    control = {trigger: vocabulary.control_id(trigger) for trigger in by_trigger}
    text = grammar.rule("TEXT", lark.ANY_TEXT)
    parts: list[str] = []
    for trigger, mine in by_trigger.items():
        token = control[trigger]
        if token is not None:
            head = f"{text} {lark.tokens(token)}"
        else:
            head = grammar.rule("head", f"{text} {lark.literal(trigger)}", "[lazy]")
        rests = [Tag(tag.begin.removeprefix(trigger), tag.content, tag.end) for tag in mine]
        parts.append(
            grammar.rule("part", f"{head} ({' | '.join(tag_body(grammar, each, vocabulary) for each in rests)})")
        )
    some = grammar.rule("some", " | ".join(parts))
    if only_one:
        return grammar.rule("tags", some if at_least_one else f"{some} | {text}")
    return grammar.rule("tags", f"{some}{'+' if at_least_one else '*'} {text}")


def tag_body(grammar: lark.Grammar, tag: Tag, vocabulary: lark.Vocabulary) -> str:
    """Return the expression of one tag."""
    begin = markers(tag.begin, vocabulary)
    if tag.content is not None:
        return " ".join(filter(None, (begin, tag.content, markers(tag.end, vocabulary)))) or '""'
    token = vocabulary.control_id(tag.end)
    if tag.end and token is None:
        rest = grammar.rule("rest", f"{lark.ANY_TEXT} {lark.literal(tag.end)}", "[lazy]")
    else:
        rest = f"{lark.ANY_TEXT} {'' if token is None else lark.tokens(token)}"
    return f"{begin} {rest}".strip()


def markers(text: str, vocabulary: lark.Vocabulary) -> str:
    """Return the expression for ``text``, in which control tokens may be spelled out, "" for no text."""
    return " ".join(
        lark.literal(part) if isinstance(part, str) else lark.tokens(part) for part in vocabulary.split(text)
    )


class _Builder:
    """Translates one structural tag."""

    def __init__(self, grammar: lark.Grammar, vocabulary: lark.Vocabulary, whitespace: str | None) -> None:
        self._grammar, self._vocabulary, self._whitespace = grammar, vocabulary, whitespace

    def older(self, tag: Json) -> str:
        """Translate the form with ``structures`` and ``triggers``."""
        triggers = _strings(tag.get("triggers"), ".triggers")
        tags: list[tuple[str, Tag]] = []
        for index, each in enumerate(_objects(tag.get("structures"), ".structures")):
            path = f".structures[{index}]"
            begin = _string(each, "begin", path)
            content = self._schema(each.get("schema", {}), f"{path}.schema")
            tags.append((_trigger(triggers, begin, path), Tag(begin, content, _string(each, "end", path, ""))))
        return triggered(self._grammar, tags, self._vocabulary)

    def form(self, form: object, path: str, depth: int) -> str:
        """Translate a node of the tree ``format``."""
        if not isinstance(form, dict):
            refuse("must be an object.", path, "invalid_type")
        if depth > MAX_DEPTH:
            refuse(f"is nested deeper than {MAX_DEPTH} levels.", path, TOO_COMPLEX)
        kind = form.get("type")
        make = self._kinds().get(kind) if isinstance(kind, str) else None
        if make is None:
            unsupported(f"must be one of {', '.join(self._kinds())}.", f"{path}.type")
        return make(form, path, depth + 1)

    def _kinds(self) -> dict[str, Callable[[Json, str, int], str]]:
        return {
            "const_string": lambda form, path, _: markers(_string(form, "value", path), self._vocabulary) or '""',
            "json_schema": lambda form, path, _: self._schema(form.get("json_schema", {}), f"{path}.json_schema"),
            "regex": lambda form, path, _: self._grammar.rule("REGEX", lark.regex(_string(form, "pattern", path))),
            "grammar": lambda form, path, _: self._grammar.other(as_lark(_string(form, "grammar", path))),
            "any_text": lambda form, path, _: lark.ANY_TEXT,
            "sequence": self._sequence,
            "or": self._either,
            "tag": lambda form, path, depth: tag_body(self._grammar, self._tag(form, path, depth), self._vocabulary),
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def _sequence(self, form: Json, path: str, depth: int) -> str:
        parts = _objects(form.get("elements"), f"{path}.elements")
        return " ".join(self.form(each, f"{path}.elements[{at}]", depth) for at, each in enumerate(parts))

    def _either(self, form: Json, path: str, depth: int) -> str:
        parts = _objects(form.get("elements"), f"{path}.elements")
        options = [self.form(each, f"{path}.elements[{at}]", depth) for at, each in enumerate(parts)]
        return self._grammar.rule("either", " | ".join(options))

    def _tag(self, form: Json, path: str, depth: int) -> Tag:
        content = form.get("content")
        free = isinstance(content, dict) and content.get("type") == "any_text"
        inner = None if free else self.form(content, f"{path}.content", depth)
        end = form.get("end", "")
        if not isinstance(end, str):
            refuse("must be a string.", f"{path}.end", "invalid_type")
        return Tag(_string(form, "begin", path), inner, end)

    def _triggered(self, form: Json, path: str, depth: int) -> str:
        triggers = _strings(form.get("triggers"), f"{path}.triggers")
        tags: list[tuple[str, Tag]] = []
        for index, each in enumerate(_objects(form.get("tags"), f"{path}.tags")):
            tag = self._tag(each, f"{path}.tags[{index}]", depth)
            tags.append((_trigger(triggers, tag.begin, f"{path}.tags[{index}]"), tag))
        return triggered(
            self._grammar,
            tags,
            self._vocabulary,
            at_least_one=form.get("at_least_one") is True,
            only_one=form.get("stop_after_first") is True,
        )

    def _separated(self, form: Json, path: str, depth: int) -> str:
        tags = _objects(form.get("tags"), f"{path}.tags")
        options = [
            tag_body(self._grammar, self._tag(each, f"{path}.tags[{at}]", depth), self._vocabulary)
            for at, each in enumerate(tags)
        ]
        tag = self._grammar.rule("tag", " | ".join(options))
        separator = markers(_string(form, "separator", path, ""), self._vocabulary)
        several = tag if form.get("stop_after_first") is True else f"{tag} ({separator} {tag})*"
        return several if form.get("at_least_one") is True else f"({several})?"

    def _schema(self, schema: object, path: str) -> str:
        try:
            return self._grammar.rule("json", json_value(parsed(schema), self._whitespace))
        except GrammarError as error:
            raise GrammarError(error.text, path + error.path, error.code) from None


def _trigger(triggers: Sequence[str], begin: str, path: str) -> str:
    found = next((each for each in triggers if begin.startswith(each)), None)
    if found is None:
        refuse("must begin with one of the triggers.", f"{path}.begin")
    return found


def _string(form: Json, name: str, path: str, default: str | None = None) -> str:
    value = form.get(name, default)
    if not isinstance(value, str):
        refuse("must be a string.", f"{path}.{name}", "invalid_type")
    return value


def _strings(value: object, path: str) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        refuse("must be an array of strings that are not empty.", path, "invalid_type")
    return value


def _objects(value: object, path: str) -> list[Json]:
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
        refuse("must be an array of objects.", path, "invalid_type")
    return value
