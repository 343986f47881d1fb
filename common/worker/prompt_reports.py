"""Reports of the log-probabilities of prompts: sent chunk by chunk, and kept for a while in case a message is lost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from common.core.ids import TransferId
from common.core.prompt_span import PromptSpan
from common.core.sequence import Batch, StepResult
from common.net.messages import Message
from common.net.prompt_columns import to_messages

KEPT_BYTES, KEPT_S = 64 << 20, 5.0
"""Bytes of log-probabilities kept, and seconds for which those of a prompt are kept after its last chunk. A coordinator
asks for missing ones every 0.2 s. If they are gone, it places the request again, and they are computed anew."""


@dataclass(slots=True)
class _Reported:
    """The spans of one (request, attempt), in order, and when the last was sent."""

    spans: list[PromptSpan] = field(default_factory=list)
    at: float = 0.0


class PromptReports:
    """Sends the log-probabilities of prompts with ``send``."""

    def __init__(self, send: Callable[[Message], object]) -> None:
        self._send = send
        self._kept: OrderedDict[TransferId, _Reported] = OrderedDict()
        """By the time of the last span, oldest first."""
        self._bytes = 0

    def take(self, batch: Batch, result: StepResult, now: float) -> None:
        """Send what a step has computed; called before its tokens are sent."""
        for index, span in result.prompts.items():
            transfer = batch.segments[index].sequence.id.transfer
            self._send_span(transfer, span)
            reported = self._kept.setdefault(transfer, _Reported())
            reported.spans.append(span)
            reported.at = now
            self._kept.move_to_end(transfer)
            self._bytes += span.size
        while self._bytes > KEPT_BYTES:
            self._drop_oldest()

    def resend(self, transfer: TransferId, start: int) -> None:
        """Send the log-probabilities of a prompt from position ``start`` on again, as far as they are kept."""
        kept = self._kept.get(transfer)
        for span in kept.spans if kept is not None else ():
            if span.end > start:
                self._send_span(transfer, span.part(max(start, span.start), span.end))

    def forget(self, now: float) -> None:
        """Drop what is older than KEPT_S; called regularly."""
        while self._kept and now - next(iter(self._kept.values())).at > KEPT_S:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, reported = self._kept.popitem(last=False)
        self._bytes -= sum(span.size for span in reported.spans)

    def _send_span(self, transfer: TransferId, span: PromptSpan) -> None:
        for message in to_messages(transfer, span):
            self._send(message)
