"""An answer as the blocks in which it is written: reasoning, text and tool calls, one after the other.

Owns where a block begins and ends. The encoders of the Responses API and of the Messages API turn the steps of blocks
into their events. Must not know either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from coordinator.output.deltas import CallDelta, Delta

BlockKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """A part of an answer. ``index``: its number in the answer, from 0. ``call_id`` and ``name``: of a call, whose text
    is its arguments as JSON. ``cut``: whether the end of the answer cut it short."""

    kind: BlockKind
    index: int
    call_id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)
    cut: bool = False

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.parts)


class Step(NamedTuple):
    """What happens to a block: it is opened, ``text`` is added to it, or it is closed."""

    what: Literal["open", "add", "close"]
    block: Block
    text: str = ""


class BlockReader:
    """Divides one answer into blocks. At most one block is open, the last."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def push(self, delta: Delta) -> list[Step]:
        """Add what ``delta`` adds to the answer and return the steps that this takes."""
        block = self._open
        if block is not None and block.kind == "text" and not delta.reasoning and not delta.calls:  # most tokens
            if not delta.content:
                return []
            block.parts.append(delta.content)
            return [Step("add", block, delta.content)]
        return list(self._steps(delta))

    def finish(self, *, cut: bool) -> list[Step]:
        """End the answer and return the last steps. An answer without any block gets an empty text. ``cut``: whether
        the answer ended because it became too long."""
        steps = [] if self.blocks else list(self._begin(Block("text", 0)))
        if self._open is not None:
            self._open.cut = cut
        return [*steps, *self._close()]

    def abandon(self) -> None:
        """End the answer without closing its last block, because it failed."""
        if self._open is not None:
            self._open.cut, self._open = True, None

    def _steps(self, delta: Delta) -> Iterator[Step]:
        calls = delta.calls
        if calls and calls[0].id is None:  # belongs to a call that began earlier, so before all else
            yield from self._call(calls[0])
            calls = calls[1:]
        if delta.reasoning:
            yield from self._add("reasoning", delta.reasoning)
        if delta.content:
            yield from self._add("text", delta.content)
        for call in calls:
            yield from self._call(call)

    def _call(self, call: CallDelta) -> Iterator[Step]:
        if call.id is not None:
            yield from self._begin(Block("call", len(self.blocks), call.id, call.name or ""))
        assert self._open is not None and self._open.kind == "call", "arguments without a call"
        if call.arguments:
            self._open.parts.append(call.arguments)
            yield Step("add", self._open, call.arguments)

    def _add(self, kind: BlockKind, text: str) -> Iterator[Step]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Block(kind, len(self.blocks)))
        assert self._open is not None
        self._open.parts.append(text)
        yield Step("add", self._open, text)

    def _begin(self, block: Block) -> Iterator[Step]:
        yield from self._close()
        self.blocks.append(block)
        self._open = block
        yield Step("open", block)

    def _close(self) -> Iterator[Step]:
        if self._open is not None:
            yield Step("close", self._open)
            self._open = None
