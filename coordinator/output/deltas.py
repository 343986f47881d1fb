"""What one piece of a model's output adds to an answer."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CallDelta:
    """Text added to one tool call.

    ``index``: number of the call in the answer, from 0. ``id`` and ``name``: set in the first delta of a call and None
    in later ones. ``arguments``: JSON text to append; all deltas of a call together are one JSON object."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(slots=True)
class Delta:
    """Text added to an answer. Falsy if nothing is added."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class DeltaWriter:
    """Collects what the readers of one output find, until :meth:`take` returns it."""

    def __init__(self) -> None:
        self.calls = 0
        """Calls begun so far."""
        self.in_reasoning = False
        """Whether the text read next is reasoning."""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._deltas: list[CallDelta] = []

    def content(self, text: str) -> None:
        self._content.append(text)

    def reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def begin_call(self, call_id: str, name: str) -> None:
        self._deltas.append(CallDelta(self.calls, call_id, name, ""))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Append ``text`` to the arguments of the last call that was begun."""
        if not text:
            return
        index = self.calls - 1
        if not self._deltas or self._deltas[-1].index != index:
            self._deltas.append(CallDelta(index, None, None, ""))
        self._deltas[-1].arguments += text

    def take(self) -> Delta:
        """Return what was written since the last call."""
        delta = Delta("".join(self._content), "".join(self._reasoning), self._deltas)
        self._content.clear()
        self._reasoning.clear()
        self._deltas = []
        return delta
