"""Log-probabilities of prompts as messages: columns of numbers, little-endian."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from typing import Any

from common.core.errors import WireError
from common.core.ids import TransferId
from common.core.prompt_span import WORD, PromptSpan
from common.net.messages import MAX_PROMPT_ENTRIES, PromptLogprobs


def to_messages(transfer: TransferId, span: PromptSpan) -> Iterator[PromptLogprobs]:
    """Yield the messages with ``span`` of the prompt of (request, attempt), in order."""
    for piece in span.pieces(MAX_PROMPT_ENTRIES):
        columns: list[array[Any]] = [piece.logprobs, piece.ranks, piece.top_ids, piece.top]
        yield PromptLogprobs(transfer.request, transfer.attempt, piece.start, *map(_packed, columns))


def from_message(message: PromptLogprobs) -> PromptSpan:
    """Convert back from :func:`to_messages`. Raises WireError if the columns do not fit together, if the span is empty,
    or if a number is not a log-probability or a rank."""
    count, entries = len(message.logprobs) // WORD, len(message.top) // WORD
    tops = entries // count if count else 0
    sizes = (len(message.logprobs), len(message.ranks), len(message.top_ids), len(message.top))
    if not count or sizes != (WORD * count, WORD * count, WORD * count * tops, WORD * count * tops):
        raise WireError("columns of log-probabilities that do not fit together")
    logprobs, top = _unpacked("f", message.logprobs), _unpacked("f", message.top)
    ranks, top_ids = _unpacked("I", message.ranks), _unpacked("I", message.top_ids)
    if not (max(logprobs) < 1 and sum(logprobs) < count and sum(top) < entries + 1) or 0 in ranks:
        raise WireError("numbers that are no log-probabilities, or no ranks")
    return PromptSpan(message.start, tops, logprobs, ranks, top_ids, top)


def _packed(column: array[Any]) -> bytes:
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column.tobytes()


def _unpacked(kind: str, data: bytes) -> array[Any]:
    column = array(kind, data)
    if sys.byteorder == "big":
        column.byteswap()
    return column
