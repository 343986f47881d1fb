"""What the captured decode steps of tensor-parallel ranks exchange.

All ranks capture the same graphs in the same order, since a graph contains the exchanges of its step, and each of them
repeats the same graph in each step. Rank 0 samples; the last exchange of a graph gives its tokens to all ranks, whose
next step can so be launched before anyone has read them. Once rank 0 has read the tokens of a step, all ranks have
written its keys and values, which come before that exchange.

Before each decision on the way there, whether a step can be captured and whether a capture succeeded, the ranks settle
on one outcome: a rank that went on alone would wait for the others for ever. They do so on the host, so that nothing is
queued on a GPU between captures.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence

import torch

from common.engine import faults
from common.engine.batch import FlatStep
from common.engine.graph_calls import Event, GraphCalls
from common.engine.packed_step import pack_replay
from common.engine.rank_messages import Outcome
from common.model.collective import Collective

_ELSEWHERE = "it is not possible on another rank, whose log says why"

log = logging.getLogger("tandem.ranks")


class CaptureFailed(RuntimeError):
    """A capture failed on this rank or on another one. All ranks raise it at the same time."""


class CaptureShort(CaptureFailed, torch.OutOfMemoryError):
    """A capture failed because the memory of a GPU is too small."""


class GraphRanks:
    """The exchange of one rank. ``settle`` returns the worst of all ranks' outcomes; ``send`` sends a step to the other
    ranks, and is None on these."""

    def __init__(
        self,
        collective: Collective,
        settle: Callable[[Outcome], Outcome],
        send: Callable[[Sequence[array[int]]], None] | None = None,
    ) -> None:
        self._collective, self._settle, self._send = collective, settle, send

    @property
    def samples(self) -> bool:
        """Whether this is rank 0, which has the logits."""
        return self._send is not None

    def share_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Replace ``tokens`` by those of rank 0, and return them; part of a captured step."""
        return self._collective.copy_from_root(tokens)

    def launched(self, step: FlatStep, rows: int, kind: int) -> None:
        """Let the other ranks repeat their graph of ``rows`` rows and of the kind with this index for ``step``."""
        assert self._send is not None, "only rank 0 launches"
        self._send(pack_replay(step, rows, kind))

    def agreed(self, why: str) -> str:
        """Return ``why`` graphs are not possible on this rank, or that they are not on another one; "" if they are
        possible on all."""
        if why and not self.samples:
            log.warning("no CUDA graphs: %s", why)
        if self._settle(Outcome.IMPOSSIBLE if why else Outcome.DONE) == Outcome.DONE:
            return ""
        return why or _ELSEWHERE

    def require(self, error: RuntimeError | None) -> None:
        """Raise CaptureFailed or CaptureShort if a capture failed with ``error``, or one on another rank."""
        own = Outcome.DONE
        if error is not None:
            own = Outcome.SHORT_OF_MEMORY if faults.is_out_of_memory(error) else Outcome.IMPOSSIBLE
            if not self.samples:
                log.warning("a capture fails: %s", faults.describe(error))
        worst = self._settle(own)
        if worst == Outcome.DONE:
            return
        kind = CaptureShort if worst == Outcome.SHORT_OF_MEMORY else CaptureFailed
        raise kind(str(error) if error is not None and own == worst else _ELSEWHERE) from error

    def close_first(self, close: Callable[[], None]) -> None:
        """Let ``close`` be called before the exchange ends: NCCL waits for graphs that contain its work."""
        self._collective.closing.append(close)


class AgreedCalls:
    """The ``calls`` of one rank's device, where a capture fails if it does on any rank."""

    def __init__(self, calls: GraphCalls, ranks: GraphRanks) -> None:
        self._calls, self._ranks = calls, ranks

    def pinned(self, *shape: int) -> torch.Tensor:
        return self._calls.pinned(*shape)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._calls.copy(target, source)

    def event(self) -> Event:
        return self._calls.event()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        failed: RuntimeError | None = None
        replay = _nothing
        try:
            replay = self._calls.capture(run)
        except RuntimeError as error:
            faults.raise_if_lost(error)
            failed = error.with_traceback(None)  # its frames would keep the step's tensors in memory
        self._ranks.require(failed)
        return replay


def _nothing() -> None:
    raise AssertionError("a capture that failed is not repeated")
