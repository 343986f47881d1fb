"""Chat templates: messages to prompt text, in the dialect of transformers, without importing it.

``transformers.utils.chat_template_utils`` costs 0.7 s of imports for fifty lines of jinja2 environment; these are
those lines: the same sandbox, filters, globals and loop controls. What a client typed stays text: control tokens inside
message contents are fenced, so that the tokenizer can encode them as plain characters and no role can be forged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import RequestError, StartError
from coordinator.fields import Json

_FENCES = range(0xF0000, 0xF0100)
"""Private-use characters; two that no message contains mark text that must not become control tokens."""
_CONTINUE = "\U000f1000CONTINUE"


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks assistant text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime(layout: str) -> str:
    return datetime.now().strftime(layout)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime
    return environment


class Piece(str):
    """Prompt text."""


class Typed(str):
    """Prompt text that a client typed and that looks like control tokens: to be encoded as plain characters."""


class ChatTemplate:
    """One compiled template. ``special`` are the names templates know (``bos_token`` ...); ``control`` the texts of all
    control tokens of the tokenizer."""

    def __init__(self, source: str, special: dict[str, str], control: list[str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise StartError(
                "the chat template cannot be used", str(error), "correct it, or give --chat-template"
            ) from error
        self._special = special
        self._knows_developer = "developer" in source
        longest_first = sorted((re.escape(text) for text in control if text), key=len, reverse=True)
        self._control = re.compile("|".join(longest_first)) if longest_first else None

    def render(
        self,
        messages: list[Json],
        *,
        tools: list[Json] | None = None,
        kwargs: Json | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[Piece | Typed]:
        """The prompt as pieces; RequestError 400 when the template refuses the messages."""
        messages, fence = self._prepare(messages, continue_final_message)
        try:
            text = self._template.render(
                {
                    **(kwargs or {}),
                    **self._special,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # a template is a program of the model's author: it may fail in any way
            reason = str(error)[:500] or type(error).__name__
            raise RequestError(
                f"The chat template refuses these messages: {reason}", param="messages", code="invalid_messages"
            ) from error
        if continue_final_message:
            text = _cut_at_continue(text)
        return list(_pieces(text, fence))

    def _prepare(self, messages: list[Json], continue_final: bool) -> tuple[list[Json], tuple[str, str]]:
        plain = [
            {**message, "role": "system"} if message["role"] == "developer" and not self._knows_developer else message
            for message in messages
        ]
        if continue_final:
            plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}{_CONTINUE}"}
        fence = _fence_for(plain)
        return [self._fenced(message, fence) for message in plain], fence

    def _fenced(self, message: Json, fence: tuple[str, str]) -> Json:
        content = message["content"]
        if self._control is None or not isinstance(content, str) or not self._control.search(content):
            return message
        return {**message, "content": self._control.sub(lambda found: f"{fence[0]}{found[0]}{fence[1]}", content)}


def _fence_for(messages: list[Json]) -> tuple[str, str]:
    """Two characters that occur in no content. Almost always the first two candidates."""
    text = [content for message in messages if isinstance(content := message["content"], str)]
    unused = (char for char in map(chr, _FENCES) if not any(char in content for content in text))
    try:
        return next(unused), next(unused)
    except StopIteration:
        raise RequestError("The messages use every private-use character.", param="messages") from None


def _cut_at_continue(text: str) -> str:
    at = text.rfind(_CONTINUE)
    if at < 0:
        raise RequestError(
            "The chat template drops the final message, so it cannot be continued.", param="continue_final_message"
        )
    return text[:at]


def _pieces(text: str, fence: tuple[str, str]) -> Iterator[Piece | Typed]:
    opening, closing = fence
    for index, part in enumerate(text.split(opening)):
        typed, closed, rest = part.partition(closing) if index else ("", "", part)
        if index and not closed:  # a template cut the content inside the fence
            typed, rest = part, ""
        if typed:
            yield Typed(typed)
        if rest:
            yield Piece(rest)


def pick_template(candidates: Any) -> str | None:
    """The template of ``tokenizer_config.json``: a string, or a list of named ones of which ``default`` counts."""
    if isinstance(candidates, str):
        return candidates
    if isinstance(candidates, list):
        named = {str(item.get("name")): item.get("template") for item in candidates if isinstance(item, dict)}
        chosen = named.get("default") or next(iter(named.values()), None)
        return chosen if isinstance(chosen, str) else None
    return None
