"""Encodes the output tokens of one step as columns of a :class:`common.net.messages.Tokens` message (rarely several).

A *span* is a run of consecutive output tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from common.core.ids import SequenceId, pack_tokens, unpack_tokens
from common.core.request import FinishReason
from common.core.sequence import Sequence, TokenLogprobs
from common.net.messages import MAX_SPANS, Logprobs, Tokens


def stop_id(sequence: Sequence) -> int:
    """Return the token id that stopped the sequence, or -1."""
    return sequence.tokens[-1] if sequence.finish is FinishReason.STOP else -1


def to_wire(logprobs: TokenLogprobs | None) -> Logprobs | None:
    """Convert ``logprobs`` to their form in a message."""
    if logprobs is None:
        return None
    return Logprobs(logprobs.logprob, pack_tokens(logprobs.top_ids), logprobs.top_logprobs)


def from_wire(logprobs: Logprobs | None) -> TokenLogprobs | None:
    """Convert back from :func:`to_wire`; ValueError if the bytes of the ids are not a whole number of tokens."""
    if logprobs is None:
        return None
    return TokenLogprobs(logprobs.logprob, tuple(unpack_tokens(logprobs.top_ids)), logprobs.top)


@dataclass(slots=True)
class TokenSpanEncoder:
    """Collects the token spans of one step and encodes them as messages."""

    spans: list[tuple[bytes, int, int, int, int, int, int]] = field(default_factory=list)
    """(request, choice, attempt, start, count, finish, stop id) of each span in the message being filled."""
    ids: list[int] = field(default_factory=list)
    """Token ids of these spans, joined."""
    logprobs: list[Logprobs | None] = field(default_factory=list)
    """One entry per token id."""
    full: list[Tokens] = field(default_factory=list)
    """Complete messages, in order."""

    def add(self, sequence: Sequence, start: int) -> None:
        """Add the output tokens of ``sequence`` from index ``start`` on, and the log-probabilities of those that were
        sampled on this worker, if the request asks for them."""
        if start == sequence.output_length - 1 and not sequence.logprobs and self._has_room():
            id, finish = sequence.id, sequence.finish  # fast path: nearly every stream in nearly every step
            self.spans.append((id.request, id.choice, id.attempt, start, 1, finish, stop_id(sequence)))
            self.ids.append(sequence.tokens[-1])
            self.logprobs.append(None)
            return
        logprobs = sequence.logprobs[max(0, start - sequence.output_length + len(sequence.logprobs)) :]
        self._add(
            sequence.id,
            start,
            sequence.tokens[sequence.prompt_length + start :],
            sequence.finish,
            stop_id(sequence),
            [to_wire(entry) for entry in logprobs],
        )

    def again(
        self,
        sequence: SequenceId,
        start: int,
        output: list[int],
        finish: FinishReason,
        stop_id: int,
        logprobs: Seq[Logprobs | None],
    ) -> None:
        """Add the output tokens of a finished sequence from index ``start`` on. ``output`` is its whole output,
        ``logprobs`` belong to the last tokens of it."""
        new_logprobs = logprobs[max(0, start - len(output) + len(logprobs)) :]
        self._add(sequence, start, output[start:], finish, stop_id, new_logprobs)

    def _add(
        self,
        sequence: SequenceId,
        start: int,
        tokens: list[int],
        finish: FinishReason,
        stop_id: int,
        logprobs: Seq[Logprobs | None],
    ) -> None:
        """Add one span. Where a message is full the span is split; only its last part carries the finish reason."""
        last = False
        while not last:
            if len(self.spans) == MAX_SPANS or (tokens and len(self.ids) == MAX_SPANS):
                self._close()
            count = min(len(tokens), MAX_SPANS - len(self.ids))
            new_logprobs = logprobs[: max(0, count - (len(tokens) - len(logprobs)))]
            last = count == len(tokens)
            end = (finish, stop_id) if last else (FinishReason.RUNNING, -1)
            self.spans.append((sequence.request, sequence.choice, sequence.attempt, start, count, *end))
            self.ids += tokens[:count]
            self.logprobs += [None] * (count - len(new_logprobs))
            self.logprobs += new_logprobs
            start, tokens, logprobs = start + count, tokens[count:], logprobs[len(new_logprobs) :]

    def _has_room(self) -> bool:
        return len(self.spans) < MAX_SPANS and len(self.ids) < MAX_SPANS

    def messages(self) -> Iterator[Tokens]:
        """Yield the messages in order; none if no span was added."""
        yield from self.full
        if self.spans:
            yield self._message()

    def _message(self) -> Tokens:
        requests, choices, attempts, starts, counts, finish, stop_ids = zip(*self.spans, strict=True)
        ids, logprobs = pack_tokens(self.ids), tuple(self.logprobs) if any(self.logprobs) else ()
        return Tokens(b"".join(requests), choices, attempts, starts, counts, finish, stop_ids, ids, logprobs)

    def _close(self) -> None:
        """Complete the message being filled and begin another."""
        self.full.append(self._message())
        self.spans, self.ids, self.logprobs = [], [], []
