"""The token that a chat template writes after an assistant's message, found by rendering it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from common.checkpoint.json_files import read_json
from common.checkpoint.token_files import token_text

_QUESTION, _ANSWER, _NEXT = "qzquestionzq", "qzanswerzq", "qznextzq"
_INSIDE = re.compile(r"</(?!s>)[\w:.-]+>")
"""Tags that close a part of an answer, such as ``</think>``: no turn ends with them."""
_MOST_CHARS = 1 << 20
"""Characters that rendering may print, and by which a number may lengthen a text."""
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def written_after_answer(directory: Path, sources: Collection[str], added: Collection[str]) -> Iterator[str]:
    """Yield, for each template of ``sources``, the first of the ``added`` tokens that it writes after the content of an
    assistant's message; if it closes only messages that others follow, the first one before the next message that does
    not open the first message, too. Nothing for a template that fails or does not print contents."""
    tokens = [text for text in added if text and not _INSIDE.fullmatch(text)]
    if not tokens or not sources:
        return
    anyone = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
    special = _special(directory)
    for source in sources:
        for answered, followed in _renderings(source, special):
            last = anyone.search(answered.partition(_ANSWER)[2])
            between = anyone.search(followed.partition(_ANSWER)[2].partition(_NEXT)[0])
            if between and between[0] in followed.partition(_QUESTION)[0]:
                between = None
            if found := last or between:
                yield found[0]


def _renderings(source: str, special: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the texts of a chat that ends with an answer, and of one in which a question follows, "" if the template
    refuses that. Contents are strings, or lists of parts if the template prints no strings."""
    environment = _environment()
    for as_parts in (False, True):
        texts = list[str]()
        for chat in (_FOLLOWED[:2], _FOLLOWED):
            messages = [
                {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text} for role, text in chat
            ]
            try:
                template = environment.from_string(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", source))
                parts = template.generate(special, messages=messages, tools=None, add_generation_prompt=False)
                texts.append(_joined(parts))
            except Exception:  # a template is a program by the model's author and may raise anything
                texts.append("")
        if any(_ANSWER in text for text in texts):
            yield texts[0], texts[1]
            return


def _joined(parts: Iterator[str]) -> str:
    kept, chars = list[str](), 0
    for part in parts:
        kept.append(part)
        chars += len(part)
        if chars > _MOST_CHARS:
            raise ValueError("the template prints too much")
    return "".join(kept)


def _environment() -> Any:
    """Return a sandbox with what templates use. Texts that a number makes long are refused."""
    import jinja2  # here, since not all checkpoints have a template
    from jinja2.ext import loopcontrols
    from jinja2.filters import do_center, do_indent
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def check(*values: Any) -> None:
        if any(isinstance(value, int) and value > _MOST_CHARS for value in values):
            raise jinja2.TemplateError("too long")

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset("*")

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            text, count = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(count, int) and hasattr(text, "__len__"):
                check(len(text) * count)
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
            check(*args, *kwargs.values())
            return super().call(context, obj, *args, **kwargs)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def center(value: str, width: int = 80) -> str:
        check(width)
        return do_center(value, width)

    def indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        check(width)
        return do_indent(s, width, first, blank)

    found = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], optimized=False)
    found.filters |= {"tojson": lambda value, **_: json.dumps(value, ensure_ascii=False)}
    found.filters |= {"center": center, "indent": indent}
    found.globals |= {"raise_exception": refuse, "strftime_now": lambda _: ""}
    return found


_FOLLOWED = (("user", _QUESTION), ("assistant", _ANSWER), ("user", _NEXT))


def _special(directory: Path) -> dict[str, str]:
    """Return the texts of special tokens by the names that templates use."""
    sources: list[dict[str, Any]] = [
        read_json(directory / name) or {} for name in ("special_tokens_map.json", "tokenizer_config.json")
    ]
    return {name: text for each in sources for name in _NAMES if (text := token_text(each.get(name)))}
