"""The oracle engine on a device that computes late.

A launched step waits in a queue, in order with block copies, and is computed when its result is read, or before, as
``eager`` decides: so hand-offs that land between launch and computation meet a step that still writes. As every next
token depends on all KV bytes, a block that was reused too early changes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.core.sequence import Batch, Segment, Sequence, StepResult
from common.kv.cache import BlockCopy
from tests.fakes.oracle import OracleEngine, _choose, _roll, converted


@dataclass
class _Run:
    """A launched step. ``tokens`` are known once it is computed."""

    engine: OverlappedOracle
    rows: list[tuple[Segment, list[int], _Run | None]]
    """Each row with its block ids, and the step that samples its input, if that was not known."""
    tokens: dict[Sequence, int] = field(default_factory=dict)
    read: bool = False

    def compute(self) -> None:
        for segment, table, source in self.rows:
            known = segment.sequence.tokens[: segment.end]
            if source is not None:
                known = [*segment.sequence.tokens[: segment.start], source.tokens[segment.sequence]]
            self.tokens[segment.sequence] = self.engine.next_token(segment, table, known)

    def result(self) -> StepResult:
        assert not self.read, "a step is read twice"
        self.read = True
        while self.engine.queue and not (self.tokens or not self.rows):
            self.engine.advance()
        tokens = [[self.tokens[segment.sequence]] for segment, _, _ in self.rows]
        return StepResult(tokens, [[] for _ in tokens], 0.0)


class OverlappedOracle(OracleEngine):
    """An :class:`OracleEngine` whose decode steps can be launched. ``eager`` says, before each launch, whether the
    device has caught up."""

    def __init__(self, *args: Any, eager: Callable[[], bool] = lambda: False, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.launch = self._launch
        self.eager = eager
        self.queue: deque[_Run | BlockCopy] = deque()
        self.launched = self.dropped = 0
        self._last: _Run | None = None

    def advance(self) -> None:
        """Compute the oldest entry of the queue."""
        match self.queue.popleft():
            case _Run() as run:
                run.compute()
            case BlockCopy() as copy:
                super().copy_blocks([copy])

    def catch_up(self) -> None:
        while self.queue:
            self.advance()

    def step(self, batch: Batch) -> StepResult:
        assert self._last is None or self._last.read, "a step with known tokens runs while one is unread"
        self.catch_up()
        return super().step(batch)

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        self.queue.extend(copies)

    def _launch(self, batch: Batch) -> _Run | None:
        if any(each.length > 1 or each.sequence.siblings or each.sequence.constrained for each in batch.segments):
            return None
        if any(each.sequence.request.sampling.logprobs is not None for each in batch.segments):
            return None
        before = self._last if self._last is not None and not self._last.read else None
        rows = []
        for segment, table in zip(batch.segments, batch.tables, strict=True):
            unknown = segment.start == len(segment.sequence.tokens)
            assert not unknown or before is not None, "no step samples this row's input"
            rows.append((segment, list(table), before if unknown else None))
        if self.eager():
            self.catch_up()
        self._last = _Run(self, rows)
        self.queue.append(self._last)
        self.launched += 1
        return self._last

    def next_token(self, segment: Segment, table: list[int], tokens: list[int]) -> int:
        """Write the row's KV and return the token that all KV of its sequence gives."""
        rolled: list[int] = []
        for token in tokens:
            rolled.append(_roll(rolled[-1] if rolled else 0, token))
        self.place(table, range(segment.start, segment.end), range(len(self.layout.layers)), rolled)  # type: ignore[arg-type]
        data = np.frombuffer(self._read(table, segment.end), np.uint8)  # type: ignore[arg-type]
        sampling, sequence = segment.sequence.request.sampling, segment.sequence
        everything = converted(data, self.layout.dtype, "float32")
        return _choose(everything, sampling.seed, sequence.choice, segment.end - sequence.prompt_length)
