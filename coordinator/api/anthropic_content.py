"""Validates the ``system`` and ``messages`` of Anthropic's Messages API and converts their content blocks to the
messages that chat templates expect."""

from __future__ import annotations

from typing import NoReturn

from coordinator.api.chat_messages import MAX_ENTRIES, MAX_MESSAGES, Arguments
from coordinator.api.conversation import Conversation
from coordinator.api.fields import Fields, refuse, wrong_type
from coordinator.requests.spec import Json

ROLES = ("user", "assistant", "system")
MAX_CHARS = 1 << 26
_REFUSED = "Content blocks of type {} are not supported: this server serves text models."


def read_messages(fields: Fields, arguments: Arguments) -> list[Json]:
    """Return the messages of a request: its ``system`` prompt, then its ``messages``. Raises RequestError."""
    conversation = Conversation(arguments, joins=True)
    if (system := text_blocks(fields.raw("system"), "system")) is not None:
        conversation.add("system", system)
    items = fields.array("messages", MAX_MESSAGES)
    if items is None:
        fields.missing("messages")
    if not items:
        refuse("'messages' is an empty array; at least one message is needed.", "messages")
    if (entries := sum(map(_entries, items))) > MAX_ENTRIES:
        refuse(f"'messages' has {entries} content blocks, at most {MAX_ENTRIES} are allowed.", "messages")
    for index, item in enumerate(items):
        at = f"messages[{index}]"
        if not isinstance(item, dict):
            wrong_type(at, "an object", item)
        _message(Fields(item, at), conversation)
    if not (messages := conversation.messages()):
        refuse("'messages' has no content.", "messages")
    return messages


def _entries(item: object) -> int:
    """Count the content blocks of an unvalidated message, and the blocks in them."""
    content = item.get("content") if isinstance(item, dict) else None
    if not isinstance(content, list):
        return 0
    inner = [block.get("content") for block in content if isinstance(block, dict)]
    return len(content) + sum(len(blocks) for blocks in inner if isinstance(blocks, list))


def _message(message: Fields, conversation: Conversation) -> None:
    role = message.choice("role", ROLES) or message.missing("role")
    content = message.raw("content")
    if content is None:
        message.missing("content")
    at = message.at("content")
    if role == "system":
        conversation.add("system", text_blocks(content, at) or "")
        return
    if isinstance(content, str):
        _text(role, content, conversation)
        return
    if not isinstance(content, list):
        wrong_type(at, "a string or an array of content blocks", content)
    for index, value in enumerate(content):
        if not isinstance(value, dict):
            wrong_type(f"{at}[{index}]", "an object", value)
        block = Fields(value, f"{at}[{index}]")
        kind = block.string("type") or block.missing("type")
        if kind == "text":
            _text(role, _required(block, "text"), conversation)
        elif role == "user":
            _user_block(kind, block, conversation)
        else:
            _assistant_block(kind, block, conversation)


def _text(role: str, text: str, conversation: Conversation) -> None:
    if role == "assistant":
        conversation.say(text)
    else:
        conversation.add(role, text)


def _user_block(kind: str, block: Fields, conversation: Conversation) -> None:
    if kind != "tool_result":
        _refuse_block(kind, block, "tool_use", "assistant")
    block.boolean("is_error", False)
    text = text_blocks(block.raw("content"), block.at("content"))
    conversation.result(block.string("tool_use_id", limit=256) or block.missing("tool_use_id"), text or "")


def _assistant_block(kind: str, block: Fields, conversation: Conversation) -> None:
    match kind:
        case "thinking":
            if text := _required(block, "thinking"):
                conversation.reason(text)
        case "redacted_thinking":  # only its author could read it
            pass
        case "tool_use":
            name = block.string("name", limit=256) or block.missing("name")
            call_id = block.string("id", limit=256) or block.missing("id")
            given = block.mapping("input")
            conversation.call(call_id, name, given if given is not None else block.missing("input"), block.at("input"))
        case _:
            _refuse_block(kind, block, "tool_result", "user")


def _refuse_block(kind: str, block: Fields, misplaced: str, role: str) -> NoReturn:
    """Raise RequestError for a block of a ``kind`` that a message cannot have. Blocks of the kind ``misplaced`` belong
    to messages of ``role``."""
    if kind == misplaced:
        refuse(f"Only {role} messages can have blocks of type {kind!r}.", block.at("type"))
    refuse(_REFUSED.format(repr(kind[:64])), block.at("type"), "unsupported")


def text_blocks(value: object, at: str) -> str | None:
    """Return a string or an array of text blocks as one text, None if it is null. Raises RequestError."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        wrong_type(at, "a string or an array of text blocks", value)
    texts = []
    for index, entry in enumerate(value):
        if not isinstance(entry, dict):
            wrong_type(f"{at}[{index}]", "an object", entry)
        block = Fields(entry, f"{at}[{index}]")
        kind = block.string("type") or block.missing("type")
        if kind != "text":
            refuse(_REFUSED.format(repr(kind[:64])), block.at("type"), "unsupported")
        texts.append(_required(block, "text"))
    return "\n".join(texts)


def _required(block: Fields, name: str) -> str:
    text = block.string(name, limit=MAX_CHARS)
    return text if text is not None else block.missing(name)
