"""Builds the messages that chat templates expect from pieces of a conversation that come one by one.

Used where an API gives an assistant's turn as several items or blocks: its reasoning, its text and its calls become one
message again.
"""

from __future__ import annotations

from collections.abc import Callable

from coordinator.api.chat_messages import Arguments
from coordinator.api.delta_encoder import encode
from coordinator.requests.spec import Json

_SYSTEM = ("system", "developer")


class Conversation:
    """The messages so far. ``joins``: whether texts of the same role that follow each other are one message, as in the
    Messages API; otherwise only system messages are, because many templates accept one alone."""

    def __init__(self, arguments: Arguments, *, joins: bool) -> None:
        self.messages: list[Json] = []
        self._arguments, self._joins = arguments, joins
        self._turn: Json | None = None
        """The assistant's message at the end, if there is one."""

    def add(self, role: str, text: str) -> None:
        """Add a text of another role than the assistant's."""
        last = self.messages[-1] if self.messages else None
        self._turn = None
        if last is not None and last["role"] == role and (self._joins or role in _SYSTEM):
            last["content"] = f"{last['content']}\n{text}"
        else:
            self.messages.append({"role": role, "content": text})

    def result(self, call_id: str, text: str) -> None:
        """Add the result of the call ``call_id``."""
        self._turn = None
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def reason(self, text: str) -> None:
        """Add reasoning of the assistant. It begins a turn, unless it follows other reasoning."""
        turn = self._fitting(lambda turn: not turn["content"] and "tool_calls" not in turn)
        before = turn.get("reasoning_content")
        turn["reasoning_content"] = text if before is None else f"{before}\n{text}"

    def say(self, text: str) -> None:
        """Add a text of the assistant. It belongs to the reasoning before it."""
        turn = self._fitting(lambda turn: "tool_calls" not in turn and (self._joins or not turn["content"]))
        turn["content"] = f"{turn['content']}\n{text}" if turn["content"] else text

    def call(self, call_id: str, name: str, arguments: Json | str, at: str) -> None:
        """Add a call of the assistant to its turn. ``arguments``: an object, or text at ``at`` in the body. Raises
        RequestError if the text is not a JSON object."""
        if isinstance(arguments, str):
            shown = self._arguments.read(arguments, at)
        else:
            shown = encode(arguments).decode() if self._arguments.as_text else arguments
        calls = self._fitting(lambda _: True).setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": shown}})

    def _fitting(self, fits: Callable[[Json], bool]) -> Json:
        """Return the assistant's message at the end if there is one and it ``fits``, else a new one."""
        if self._turn is None or not fits(self._turn):
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
        return self._turn
