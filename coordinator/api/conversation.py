"""Builds the messages that chat templates expect from pieces of a conversation that come one by one.

Used where an API gives an assistant's turn as several items or blocks: its reasoning, its text and its calls become one
message again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.api.chat_messages import Arguments
from coordinator.api.delta_encoder import encode
from coordinator.requests.spec import Json

_SYSTEM = ("system", "developer")


@dataclass(slots=True)
class _Message:
    """A message that may still grow. Texts are joined at the end: joining them one by one would take a time that grows
    with the square of their number."""

    role: str
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    call_id: str | None = None

    def json(self) -> Json:
        """Return the message for a chat template."""
        message: Json = {"role": self.role, "content": "\n".join(self.texts)}
        if self.calls:
            message["tool_calls"] = self.calls
        if self.call_id is not None:
            message["tool_call_id"] = self.call_id
        if self.reasoning:
            message["reasoning_content"] = "\n".join(self.reasoning)
        return message


class Conversation:
    """The messages so far. ``joins``: whether texts of the same role that follow each other are one message, as in the
    Messages API; otherwise only system messages are, because many templates accept one alone."""

    def __init__(self, arguments: Arguments, *, joins: bool) -> None:
        self._messages: list[_Message] = []
        self._arguments, self._joins = arguments, joins

    def messages(self) -> list[Json]:
        """Return all messages."""
        return [message.json() for message in self._messages]

    def add(self, role: str, text: str) -> None:
        """Add a text of another role than the assistant's."""
        last = self._last(role)
        if last is None or not (self._joins or role in _SYSTEM):
            last = self._new(role)
        last.texts.append(text)

    def result(self, call_id: str, text: str) -> None:
        """Add the result of the call ``call_id``."""
        self._messages.append(_Message("tool", [text], call_id=call_id))

    def reason(self, text: str) -> None:
        """Add reasoning of the assistant. It begins a turn, unless it follows other reasoning."""
        turn = self._last("assistant")
        if turn is None or turn.texts or turn.calls:
            turn = self._new("assistant")
        turn.reasoning.append(text)

    def say(self, text: str) -> None:
        """Add a text of the assistant. It belongs to the reasoning before it."""
        turn = self._last("assistant")
        if turn is None or turn.calls or (turn.texts and not self._joins):
            turn = self._new("assistant")
        turn.texts.append(text)

    def call(self, call_id: str, name: str, arguments: Json | str, at: str) -> None:
        """Add a call of the assistant to its turn. ``arguments``: an object, or text at ``at`` in the body. Raises
        RequestError if the text is not a JSON object."""
        shown: Json | str
        if isinstance(arguments, str):
            shown = self._arguments.read(arguments, at)
        else:
            shown = encode(arguments).decode() if self._arguments.as_text else arguments
        turn = self._last("assistant") or self._new("assistant")
        turn.calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": shown}})

    def _last(self, role: str) -> _Message | None:
        """Return the last message if it is of ``role``."""
        return self._messages[-1] if self._messages and self._messages[-1].role == role else None

    def _new(self, role: str) -> _Message:
        self._messages.append(_Message(role))
        return self._messages[-1]
