"""Validates the ``input`` of the Responses API and converts its items to the messages that chat templates expect."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from coordinator.api.chat_messages import MAX_ENTRIES, MAX_MESSAGES, Arguments, refuse_part, text_content
from coordinator.api.conversation import Conversation
from coordinator.api.fields import Fields, refuse, wrong_type
from coordinator.requests.spec import Json

ROLES = ("system", "developer", "user", "assistant")
MAX_CHARS = 1 << 26
_REASONING_PARTS = ("reasoning_text", "summary_text", "text")


def read_items(
    fields: Fields, arguments: Arguments, check_chars: Callable[[int, str], None] | None = None
) -> list[Json]:
    """Return the messages of a request: its ``instructions``, then its ``input``, a string or an array of items. Raises
    RequestError.

    ``check_chars`` is called with the total characters of the calls' arguments before any of them is parsed, and raises
    if there are too many."""
    conversation = Conversation(arguments, joins=False)
    if instructions := fields.string("instructions", limit=MAX_CHARS):
        conversation.add("system", instructions)
    given = fields.raw("input")
    if given is None:
        fields.missing("input")
    if isinstance(given, str):
        conversation.add("user", given)
        return conversation.messages()
    if not isinstance(given, list):
        wrong_type("input", "a string or an array of items", given)
    if not given:
        refuse("'input' is an empty array; at least one item is needed.", "input")
    if len(given) > MAX_MESSAGES:
        refuse(f"'input' has {len(given)} items, at most {MAX_MESSAGES} are allowed.", "input")
    if (entries := sum(map(_entries, given))) > MAX_ENTRIES:
        refuse(f"'input' has {entries} content parts, at most {MAX_ENTRIES} are allowed.", "input")
    if check_chars is not None:
        check_chars(sum(map(_argument_chars, given)), "input")
    for index, item in enumerate(given):
        at = f"input[{index}]"
        if not isinstance(item, dict):
            wrong_type(at, "an object", item)
        _item(Fields(item, at), conversation)
    if not (messages := conversation.messages()):
        refuse("'input' has no content.", "input")
    return messages


def _entries(item: object) -> int:
    """Count the content parts of an unvalidated item."""
    lists = [item.get(name) for name in ("content", "summary", "output")] if isinstance(item, dict) else []
    return sum(len(parts) for parts in lists if isinstance(parts, list))


def _argument_chars(item: object) -> int:
    """Return the length of the arguments of an unvalidated item."""
    arguments = item.get("arguments") if isinstance(item, dict) else None
    return len(arguments) if isinstance(arguments, str) else 0


def _item(item: Fields, conversation: Conversation) -> None:
    kind = item.string("type") or ("message" if item.has("role") else item.missing("type"))
    match kind:
        case "message":
            _message(item, conversation)
        case "function_call":
            name = item.string("name", limit=256) or item.missing("name")
            call_id = item.string("call_id", limit=256) or item.missing("call_id")
            arguments = item.string("arguments", limit=MAX_CHARS) or "{}"
            conversation.call(call_id, name, arguments, item.at("arguments"))
        case "function_call_output":
            call_id = item.string("call_id", limit=256) or item.missing("call_id")
            output = text_content(item.raw("output"), item.at("output"))
            conversation.result(call_id, output if output is not None else item.missing("output"))
        case "reasoning":
            if text := _reasoning(item):
                conversation.reason(text)
        case "item_reference":
            refuse(
                "Items cannot be referred to by their id, because this server stores none: send the items themselves.",
                item.at("type"),
                "unsupported",
            )
        case _:
            refuse(
                f"Items of type {kind[:64]!r} are not supported: only message, function_call, function_call_output and"
                " reasoning are.",
                item.at("type"),
                "unsupported",
            )


def _message(item: Fields, conversation: Conversation) -> None:
    role = item.choice("role", ROLES) or item.missing("role")
    text = text_content(item.raw("content"), item.at("content"))
    if text is None:
        item.missing("content")
    if role == "assistant":
        conversation.say(text)
    else:
        conversation.add(role, text)


def _reasoning(item: Fields) -> str:
    """Return the text of a reasoning item: its content, else its summary. Encrypted content of another server is not
    readable and dropped."""
    content = item.array("content", MAX_ENTRIES) or ()
    summary = item.array("summary", MAX_ENTRIES) or ()
    texts = [(part, item.at("content")) for part in content] or [(part, item.at("summary")) for part in summary]
    return "\n".join(
        chain.from_iterable([_reasoning_part(part, f"{at}[{index}]")] for index, (part, at) in enumerate(texts))
    )


def _reasoning_part(value: object, at: str) -> str:
    if not isinstance(value, dict):
        wrong_type(at, "an object", value)
    part = Fields(value, at)
    kind = part.string("type") or part.missing("type")
    if kind not in _REASONING_PARTS:
        refuse_part(kind, at)
    text = part.string("text", limit=MAX_CHARS)
    return text if text is not None else part.missing("text")
