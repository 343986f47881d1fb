"""How a chat template wants earlier turns that called functions or reasoned, found out by rendering a probe.

Templates differ: some iterate over a call's arguments or print them with ``tojson``, and need an object; others
concatenate them, and need text. Some show the calls of a turn only if its content is null, and some refuse ids of
another form than their own. Rendering a conversation with one call in each of these forms shows which form appears in
the prompt as intended.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

from common.core.errors import RequestError
from coordinator.requests.spec import Json

_NAME, _KEY, _VALUE = "probed_call", "probed_key", "probed_value"
_PARAMETERS: Json = {"type": "object", "properties": {"x": {"type": "string", "description": "d"}}, "required": ["x"]}
_TOOL: Json = {"type": "function", "function": {"name": "other", "description": "d", "parameters": _PARAMETERS}}
_REASONING = re.compile(r"""(?:\.|\[\s*['"])(reasoning|thinking)\b""")
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_SHORT_ID_CHARS = 9


@dataclass(frozen=True, slots=True)
class HistoryForm:
    """The form of assistant and tool messages for one template.

    ``arguments_as_text``: arguments of calls are text, not objects. ``null_content``: the content of a turn with calls
    and no text is null, not empty. ``short_ids``: ids of calls have exactly nine letters and digits, as Mistral's
    templates require. ``reasoning_names``: names under which the template looks for the reasoning of a turn, besides
    ``reasoning_content``."""

    arguments_as_text: bool = False
    null_content: bool = False
    short_ids: bool = False
    reasoning_names: tuple[str, ...] = ()

    def message(self, message: Json) -> Json:
        """Return a copy of ``message`` in this form. Arguments are in the right form already (see
        :func:`~coordinator.api.chat_messages.parse_messages`)."""
        copy = dict(message)
        calls = message.get("tool_calls")
        if self.null_content and calls and not message.get("content"):
            copy["content"] = None
        if self.short_ids:
            if isinstance(calls, list):
                copy["tool_calls"] = [{**call, "id": _short(str(call["id"]))} for call in calls]
            if "tool_call_id" in message:
                copy["tool_call_id"] = _short(str(message["tool_call_id"]))
        # templates for gpt-oss refuse a turn with calls that has content beside its reasoning
        if (reasoning := message.get("reasoning_content")) and not (calls and message.get("content")):
            copy.update(dict.fromkeys(self.reasoning_names, reasoning))
        return copy


def _short(name: str) -> str:
    """Return ``name`` if it has the form of a short id, else a short id that depends on it alone."""
    if _SHORT_ID.fullmatch(name):
        return name
    return hashlib.blake2b(name.encode(), digest_size=_SHORT_ID_CHARS).hexdigest()[:_SHORT_ID_CHARS]


def find_form(render: Callable[[list[Json], list[Json]], str], source: str) -> HistoryForm:
    """Return the form for the template ``source``: of those in which a call appears in the prompt as intended the one
    that changes the least. ``render``: renders messages and tools; it raises RequestError for a form that the template
    refuses."""
    names = tuple(sorted(set(_REASONING.findall(source))))
    best, most = HistoryForm(), 0
    for choices in sorted(product((False, True), repeat=3), key=sum):
        null_content, arguments_as_text, short_ids = choices
        form = HistoryForm(arguments_as_text, null_content, short_ids)
        try:
            marks = _marks(render(list(map(form.message, _conversation(form))), [_TOOL]))
        except RequestError:
            continue
        if marks > most:
            best, most = form, marks
        if most == _ALL_MARKS:
            break
    return replace(best, reasoning_names=names)


def _conversation(form: HistoryForm) -> list[Json]:
    arguments: object = f'{{"{_KEY}": "{_VALUE}"}}' if form.arguments_as_text else {_KEY: _VALUE}
    call: Json = {"id": "call_1", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "call_1"},
    ]


_ALL_MARKS = 3


def _marks(prompt: str) -> int:
    """Grade a rendered probe: 1 if it was rendered at all, 2 if the call appears in it, _ALL_MARKS if its arguments are
    neither a Python object's text nor a string inside a JSON string."""
    if _NAME not in prompt or _VALUE not in prompt:
        return 1
    return 2 if f"'{_KEY}'" in prompt or f'\\"{_KEY}\\"' in prompt else _ALL_MARKS
