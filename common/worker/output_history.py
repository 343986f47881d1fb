"""Outputs of recently finished sequences, to be sent again if the message with their last tokens was lost."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from common.core.ids import SequenceId, pack_tokens, unpack_tokens
from common.core.request import FinishReason
from common.core.sequence import Sequence
from common.net.messages import Logprobs
from common.worker.token_spans import TokenSpanEncoder, stop_id, to_wire

KEPT, KEPT_S = 256, 5.0
"""Number of outputs kept, and seconds for which they are kept. A coordinator that has seen a gap asks every 0.2 s. For
an end that it missed it asks when a heartbeat omits the request, up to twice within a second and a half; for a choice
that is silent while others of its request go on, with every heartbeat."""


@dataclass(frozen=True, slots=True)
class _Output:
    """The output of a sequence that finished at ``at``, without its prompt, which is most of a sequence."""

    at: float
    tokens: bytes
    finish: FinishReason
    stop_id: int
    logprobs: tuple[Logprobs | None, ...]


class OutputHistory:
    """Outputs of the sequences that finished last, by sequence id."""

    def __init__(self) -> None:
        self._outputs: OrderedDict[SequenceId, _Output] = OrderedDict()

    def keep(self, sequence: Sequence, now: float) -> None:
        """Add the output of a finished sequence; the oldest is dropped beyond KEPT."""
        logprobs = tuple(to_wire(entry) for entry in sequence.logprobs)
        output = pack_tokens(sequence.output)
        self._outputs[sequence.id] = _Output(now, output, sequence.finish, stop_id(sequence), logprobs)
        if len(self._outputs) > KEPT:
            self._outputs.popitem(last=False)

    def forget(self, now: float) -> None:
        """Drop outputs older than KEPT_S; called in every turn of the loop."""
        while self._outputs and now - next(iter(self._outputs.values())).at > KEPT_S:
            self._outputs.popitem(last=False)

    def replay(self, sequence: SequenceId, start: int, writer: TokenSpanEncoder) -> bool:
        """Write the output of ``sequence`` from position ``start`` on to ``writer``; False if it is not kept."""
        kept = self._outputs.get(sequence)
        if kept is None:
            return False
        output = unpack_tokens(kept.tokens)
        if len(output) > start or not output:  # an end without output is all that there is
            writer.again(sequence, start, output, kept.finish, kept.stop_id, kept.logprobs)
        return True
