"""Chat templates: renders messages to prompt text as transformers does, without importing it.

Rebuilds the jinja2 environment of ``transformers.utils.chat_template_utils`` (sandbox, filters, globals, loop
controls), because importing that module takes 0.7 s. The rendered text equals that of transformers, character for
character. In addition, each character is marked with its origin, template or client (:mod:`coordinator.text.traced`),
so that no string of a client, however deeply nested, can become a control token.
"""

from __future__ import annotations

import functools
import itertools
import json
import secrets
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from markupsafe import soft_str

from common.core.errors import RequestError, StartError
from coordinator.requests.spec import Json
from coordinator.text import render_budget
from coordinator.text.history import HistoryForm, find_form
from coordinator.text.render_budget import RenderBudget, TooMuchText
from coordinator.text.traced import Traced, join, join_with, origins, written


class _Generation(jinja2.ext.Extension):
    """Accepts ``{% generation %}``, which marks assistant text for training, and renders its content unchanged."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Compiles every string constant of a template to a :class:`Traced` string of the template's origin."""

    environment: _Environment

    def visit_Const(self, node: jinja2.nodes.Const, frame: jinja2.compiler.Frame) -> None:  # noqa: N802 - jinja2's
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(self.environment.literal(value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(  # noqa: N802 - jinja2's
        self, node: jinja2.nodes.TemplateData, frame: jinja2.compiler.Frame
    ) -> None:
        self.write(self.environment.literal(node.data))

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802 - jinja2's
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self.environment.literal("".join(group))


class _Formatter(SandboxedFormatter):
    """``str.format`` with its output charged to the render budget."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        render_budget.before_field(format_spec)
        text = super().format_field(value, format_spec)
        render_budget.current.get().spend(len(text), len(text))
        return text


def _concat(parts: Iterable[str]) -> Traced:
    """Join ``parts``. Raises TooMuchText as soon as they exceed the longest allowed text."""
    budget = render_budget.current.get()
    kept, chars = list[str](), 0
    for part in parts:
        kept.append(part)
        chars += len(part)
        if chars > budget.most:
            raise TooMuchText
    budget.spend(chars)
    return join(kept)


class _Environment(ImmutableSandboxedEnvironment):
    """The jinja2 environment of one template. String operations are charged to the current render budget and keep the
    origins of characters."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset("+*%")
    concat = staticmethod(_concat)

    def __init__(self) -> None:
        # not optimized: the optimizer would fold lists and objects of strings into one constant without origins
        extensions = [_Generation, jinja2.ext.loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        self.literals: list[Traced] = []
        self.filters |= {"tojson": _tojson, "join": _join, "safe": _safe}
        self.filters |= {"replace": _replace, "indent": _indent, "center": _center, "format": _format}
        self.filters["list"] = _list
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime}

    def literal(self, text: str) -> str:
        """Return a Python expression for ``text``, a constant of the template."""
        self.literals.append(written(text))
        return f"environment.literals[{len(self.literals) - 1}]"

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        render_budget.before_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        text = getattr(obj, "__self__", None)
        if isinstance(text, str):
            args = render_budget.before_method(text, obj.__name__, args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return jinja2's sandboxed ``str.format``. For a format string that is all the template's own, the result
        keeps the origins of its parts."""
        plain = super().wrap_str_format(value)
        if plain is None:
            return None
        text = value.__self__
        if value.__name__ == "format_map":
            return functools.partial(self._format_map, plain, text)
        return functools.partial(self._format, plain, text)

    def _format_map(self, plain: Callable[..., str], text: str, *mappings: Any, **named: Any) -> str:
        if len(mappings) == 1 and not named:
            _Formatter(self).vformat(text, (), mappings[0])
        return plain(*mappings, **named)

    def _format(self, plain: Callable[..., str], text: str, *values: Any, **named: Any) -> str:
        _Formatter(self).vformat(text, values, named)
        wanted, parts = plain(*values, **named), list[str]()
        if not isinstance(text, Traced) or b"\0" in origins(text):
            return wanted
        formatter = SandboxedFormatter(self)
        numbers = itertools.count()
        for literal, name, layout, conversion in formatter.parse(text):
            parts.append(written(literal))
            if name is not None:
                value, _ = formatter.get_field(name or str(next(numbers)), values, named)
                simple = isinstance(value, str) and not layout and not conversion
                parts.append(value if simple else formatter.vformat(f"{{:{layout}}}", (value,), {}))
        made = join(parts)
        return made if made == wanted else wanted


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return render_budget.to_json(value, encoder, indented=indent is not None)


@jinja2.pass_eval_context
def _join(context: jinja2.nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    """jinja2's ``join`` filter, keeping origins."""
    separator = str(d)
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(context.environment, attribute), value)
    parts = list(map(str, value))
    render_budget.before_joining(separator, parts)
    return join_with(separator, parts)


@jinja2.pass_eval_context
def _replace(context: jinja2.nodes.EvalContext, s: str, old: str, new: str, count: int | None = None) -> str:
    text, old, new = str(s), str(old), str(new)
    render_budget.before_replacing(text, old, new, -1 if count is None else count)
    return jinja2.filters.do_replace(context, text, old, new, count)


def _list(value: Iterable[Any]) -> list[Any]:
    if isinstance(value, str):
        render_budget.current.get().split(len(value))
    return list(value)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    render_budget.before_indenting(s, width, blank)
    return jinja2.filters.do_indent(s, width, first, blank)


def _center(value: str, width: int = 80) -> str:
    text = soft_str(value)
    render_budget.before_padding(text, width)
    return jinja2.filters.do_center(text, width)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    render_budget.before_percent(soft_str(value), kwargs or args)
    return jinja2.filters.do_format(value, *args, **kwargs)


def _safe(value: str) -> str:
    """jinja2's ``safe`` filter. Traced text is returned unchanged: nothing is escaped here, and Markup would lose its
    origins."""
    return value if isinstance(value, Traced) else jinja2.filters.do_mark_safe(value)


def _strftime(layout: str) -> str:
    return datetime.now().strftime(layout)


class ChatTemplate:
    """One compiled template. ``special``: texts of special tokens by the names that templates use (``bos_token`` ...).
    Raises StartError if ``source`` does not compile."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        try:
            self._template = _Environment().from_string(source)
        except jinja2.TemplateError as error:
            raise StartError(
                "the chat template cannot be used", str(error), "correct it, or give --chat-template"
            ) from error
        self._special = {name: written(text) for name, text in special.items()}
        self._knows_developer = "developer" in source
        self.form = HistoryForm()
        """How messages are given to the template."""
        self.form = find_form(lambda messages, tools: self.render(messages, tools=tools), source)

    def render(
        self,
        messages: list[Json],
        *,
        tools: list[Json] | None = None,
        documents: list[Json] | None = None,
        kwargs: Json | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        most: int = sys.maxsize,
    ) -> Traced:
        """Render the prompt. Raises RequestError 400 if the template fails on the messages, TooMuchText if it would
        make a text of more than ``most`` characters."""
        end = f"CONTINUE{secrets.token_hex(16)}" if continue_final_message else ""
        budget = render_budget.current.set(RenderBudget(most + len(end)))
        try:
            text = self._template.render(
                {
                    **(kwargs or {}),
                    **self._special,
                    "messages": self._prepare(messages, end),
                    "tools": tools,
                    "documents": documents,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TooMuchText:
            raise
        except Exception as error:  # a template is a program by the model's author and may raise anything
            reason = str(error)[:500] or type(error).__name__
            raise RequestError(
                f"The chat template refuses these messages: {reason}", param="messages", code="invalid_messages"
            ) from error
        finally:
            render_budget.current.reset(budget)
        prompt = text if isinstance(text, Traced) else join([text])
        return _cut_at(prompt, end) if end else prompt

    def _prepare(self, messages: list[Json], end: str) -> list[Json]:
        """Copy ``messages``, append ``end`` to the last content, and mark roles as the template's: they are validated
        words of the server and may be part of a control token."""
        plain = [{**self.form.message(message), "role": written(self._role(message))} for message in messages]
        if end:
            plain[-1]["content"] = f"{plain[-1]['content']}{end}"
        return plain

    def _role(self, message: Json) -> str:
        role = str(message["role"])
        return "system" if role == "developer" and not self._knows_developer else role


def _cut_at(text: Traced, end: str) -> Traced:
    """Return ``text`` up to the last ``end``, a random marker that no client can guess."""
    at = text.rfind(end)
    if at < 0:
        raise RequestError(
            "The chat template drops the final message, so it cannot be continued.", param="continue_final_message"
        )
    return text[:at]
