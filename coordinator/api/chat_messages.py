"""Validates the ``messages`` of a chat request and converts them to the plain form that chat templates expect.

Text parts are joined, tool-call arguments are parsed to objects, and null counts as absent. No URL is fetched. Only
text is accepted: images, audio and files are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple, NoReturn

from coordinator.api.fields import Fields, JsonBudget, parse_arguments, refuse, wrong_type
from coordinator.requests.spec import Json

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_NAME_CHARS = 256
MAX_MESSAGES = 1 << 14
MAX_ENTRIES = 1 << 14
"""Maximum number of text parts and tool calls of all messages together."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def parse_messages(
    fields: Fields,
    budget: JsonBudget,
    check_chars: Callable[[int, str], None] | None = None,
    *,
    arguments_as_text: bool = False,
) -> list[Json]:
    """Return the messages in the field ``messages``. RequestError unless there is at least one and all are valid.

    ``budget`` counts the JSON values in the arguments of tool calls. ``check_chars`` is called with the total number of
    characters of these arguments before any of them is parsed, and raises if there are too many.
    ``arguments_as_text``: whether the messages have the arguments as the client's text, which is validated all the
    same, or as the object in it."""
    items = fields.array("messages", MAX_MESSAGES)
    if items is None:
        fields.missing("messages")
    if not items:
        refuse("'messages' is an empty array; at least one message is needed.", "messages")
    if (entries := sum(map(_entries, items))) > MAX_ENTRIES:
        refuse(f"'messages' has {entries} text parts and tool calls, at most {MAX_ENTRIES} are allowed.", "messages")
    if check_chars is not None:
        check_chars(sum(map(len, chain.from_iterable(map(_arguments, items)))), "messages")
    arguments = Arguments(budget, arguments_as_text)
    return [_message(item, f"messages[{index}]", arguments) for index, item in enumerate(items)]


class Arguments(NamedTuple):
    """How tool-call arguments are read: see :func:`parse_messages`. ``as_text``: whether templates get their text."""

    budget: JsonBudget
    as_text: bool

    def read(self, text: str, at: str) -> Json | str:
        """Return the arguments in ``text``, at ``at`` in the body. Raises RequestError if it is not a JSON object."""
        parsed = parse_arguments(text, at, self.budget)
        return text if self.as_text else parsed


def _entries(item: object) -> int:
    """Count the text parts and tool calls of an unvalidated message."""
    lists = (item.get("content"), item.get("tool_calls")) if isinstance(item, dict) else ()
    return sum(len(entries) for entries in lists if isinstance(entries, list))


def _arguments(item: object) -> Iterator[str]:
    """Yield the tool-call arguments of an unvalidated message."""
    calls = item.get("tool_calls") if isinstance(item, dict) else None
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    for function in functions or ([item.get("function_call")] if isinstance(item, dict) else []):
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str):
            yield arguments


def _message(item: object, at: str, arguments: Arguments) -> Json:
    if not isinstance(item, dict):
        wrong_type(at, "an object", item)
    fields = Fields(item, at)
    role = fields.choice("role", ROLES) or fields.missing("role")
    if role == "function":
        return _function_result(fields)
    message: Json = {"role": role}
    content = text_content(fields.raw("content"), f"{at}.content")
    calls = fields.array("tool_calls", 1024)
    former = None if calls else fields.nested("function_call")
    reasoning = fields.string("reasoning_content", limit=1 << 26) or fields.string("reasoning", limit=1 << 26)
    has_more = calls or former or reasoning is not None or fields.has("refusal")
    if content is None and not (role == "assistant" and has_more):
        fields.missing("content")
    message["content"] = content if content is not None else fields.string("refusal", limit=1 << 26) or ""
    if (calls or former) and role != "assistant":
        name = "tool_calls" if calls else "function_call"
        refuse("Only assistant messages can have tool calls.", f"{at}.{name}")
    if calls:
        message["tool_calls"] = [_tool_call(call, f"{at}.tool_calls[{n}]", arguments) for n, call in enumerate(calls)]
    elif former:  # the deprecated form of a single call
        function = _function(former, arguments)
        message["tool_calls"] = [{"id": _former_id(function["name"]), "type": "function", "function": function}]
    if role == "tool":
        message["tool_call_id"] = fields.string("tool_call_id") or fields.missing("tool_call_id")
    if (author := fields.string("name", limit=1 << 26)) is not None:
        message["name"] = author
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message


def _function_result(fields: Fields) -> Json:
    """Return a message of the deprecated role ``function`` as one of the role ``tool``, which templates know."""
    name = fields.string("name", limit=MAX_NAME_CHARS) or fields.missing("name")
    content = text_content(fields.raw("content"), fields.at("content"))
    return {"role": "tool", "content": content or "", "tool_call_id": _former_id(name), "name": name}


def _former_id(name: object) -> str:
    """Return the id of a call of the function ``name`` in the deprecated form, which has no ids: the same for the call
    and its result."""
    return f"call_{name}"


def text_content(value: object, at: str) -> str | None:
    """Return a content at ``at``, a string or an array of text parts, as one text. None if it is null. Raises
    RequestError."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        wrong_type(at, "a string or an array of text parts", value)
    return "\n".join(_part(part, f"{at}[{index}]") for index, part in enumerate(value))


def _part(part: object, at: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        wrong_type(at, "an object", part)
    fields = Fields(part, at)
    kind = fields.string("type") or fields.missing("type")
    if kind not in _TEXT_PARTS:
        refuse_part(kind, at)
    name = _TEXT_PARTS[kind]
    text = fields.string(name, limit=1 << 26)
    return text if text is not None else fields.missing(name)


def refuse_part(kind: str, at: str) -> NoReturn:
    """Raise RequestError for the part at ``at`` of the type ``kind``, which is not text."""
    refuse(
        f"Parts of type {kind[:32]!r} are not supported: this server serves text models.", f"{at}.type", "unsupported"
    )


def _tool_call(call: object, at: str, arguments: Arguments) -> Json:
    if not isinstance(call, dict):
        wrong_type(at, "an object", call)
    fields = Fields(call, at)
    fields.choice("type", ("function",))
    function = fields.nested("function") or fields.missing("function")
    return {"id": fields.string("id") or "", "type": "function", "function": _function(function, arguments)}


def _function(function: Fields, arguments: Arguments) -> Json:
    name = function.string("name", limit=MAX_NAME_CHARS) or function.missing("name")
    text = function.string("arguments", limit=1 << 26) or "{}"
    return {"name": name, "arguments": arguments.read(text, function.at("arguments"))}
