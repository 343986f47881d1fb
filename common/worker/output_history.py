"""What a worker can still tell of sequences that have finished, if the message with their last tokens was lost."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from common.core.ids import SequenceId, pack_tokens, unpack_tokens
from common.core.request import FinishReason
from common.core.sequence import Sequence
from common.net.messages import Logprobs
from common.worker.token_spans import TokenSpanEncoder, stop_id, to_wire

KEPT, KEPT_S = 256, 5.0
"""So many, for so long: a coordinator that has seen a gap asks every 0.2 s; for an end that it was not told of when a
heartbeat omits the request, up to twice within a second and a half; for a choice that is silent while others of its
request go on with every heartbeat."""


@dataclass(frozen=True, slots=True)
class _Output:
    """Of a sequence that has finished at ``at``: no prompt, which is most of one."""

    at: float
    tokens: bytes
    finish: FinishReason
    stop_id: int
    logprobs: tuple[Logprobs | None, ...]


class OutputHistory:
    """Outputs of the last sequences that have finished."""

    def __init__(self) -> None:
        self._outputs: OrderedDict[SequenceId, _Output] = OrderedDict()

    def keep(self, sequence: Sequence, now: float) -> None:
        logprobs = tuple(to_wire(entry) for entry in sequence.logprobs)
        output = pack_tokens(sequence.output)
        self._outputs[sequence.id] = _Output(now, output, sequence.finish, stop_id(sequence), logprobs)
        if len(self._outputs) > KEPT:
            self._outputs.popitem(last=False)

    def forget(self, now: float) -> None:
        """Drops what has been kept long enough; to be called every now and then."""
        while self._outputs and now - next(iter(self._outputs.values())).at > KEPT_S:
            self._outputs.popitem(last=False)

    def tell(self, sequence: SequenceId, start: int, writer: TokenSpanEncoder) -> bool:
        """Writes its output from position ``start`` on; False if it is not kept."""
        told = self._outputs.get(sequence)
        if told is None:
            return False
        output = unpack_tokens(told.tokens)
        if len(output) > start:
            writer.again(sequence, start, output, told.finish, told.stop_id, told.logprobs)
        return True
