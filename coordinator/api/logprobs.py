"""Log-probabilities of output tokens as JSON, in the forms of chat completions, text completions and the Responses API.

Owns which tokens belong to the text of an answer. Must not know connections.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.core.ids import unpack_tokens
from common.net.messages import Logprobs
from coordinator.api.choice import Piece
from coordinator.api.prompt_report import FLOOR, TokenNames, by_name
from coordinator.output.deltas import Delta
from coordinator.requests.spec import Json


def chat_logprob(names: TokenNames, token: int, logprobs: Logprobs) -> Json:
    """Return one of OpenAI's ChatCompletionTokenLogprob objects."""
    top = [
        _entry(names, other, value) for other, value in zip(unpack_tokens(logprobs.top_ids), logprobs.top, strict=False)
    ]
    return {**_entry(names, token, logprobs.logprob), "top_logprobs": top}


def _entry(names: TokenNames, token: int, logprob: float) -> Json:
    spelled = list(names.text.token_bytes(token))
    return {"token": names.of(token), "logprob": max(logprob, FLOOR), "bytes": spelled}


def completion_logprobs(names: TokenNames, pieces: Sequence[Piece], offset: int) -> Json:
    """Return OpenAI's ``logprobs`` object of text completions. ``offset``: number of characters before ``pieces``."""
    tokens: list[str] = []
    values: list[float] = []
    tops: list[dict[str, float]] = []
    offsets: list[int] = []
    for piece in pieces:
        offsets.append(offset)
        offset += len(piece.text)
        if piece.logprobs is None:
            continue
        value = max(piece.logprobs.logprob, FLOOR)
        tokens.append(names.of(piece.token))
        values.append(value)
        pairs = zip(unpack_tokens(piece.logprobs.top_ids), piece.logprobs.top, strict=False)
        tops.append(by_name(names, [*pairs, (piece.token, value)]))
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


class TextLogprobs:
    """Finds the tokens of the text in an answer that also has reasoning and calls.

    The text of a token may be withheld until it is known to be no part of a marker or of a stop string. The tokens of
    markers, of reasoning, of calls and of stop strings are left out."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._withheld: list[tuple[int, Logprobs]] = []
        """Tokens since the last one whose text was shown, with their log-probabilities."""

    def push(self, piece: Piece, delta: Delta) -> list[Json]:
        """Add a token and what it adds to the answer. Return the entries of the tokens whose text is now shown, in the
        form of :func:`chat_logprob`."""
        if piece.logprobs is not None:
            self._withheld.append((piece.token, piece.logprobs))
        return self.take(delta)

    def take(self, delta: Delta) -> list[Json]:
        """Return the entries of the tokens whose text is the content of ``delta``, which has no token of its own."""
        shown: list[tuple[int, Logprobs]] = []
        if delta.content:
            first, end = self._span(delta.content.encode())
            shown, self._withheld = self._withheld[first:end], self._withheld[end:]
        elif delta.reasoning or delta.calls:
            self._withheld.clear()
        return [chat_logprob(self._names, token, logprobs) for token, logprobs in shown]

    def _span(self, content: bytes) -> tuple[int, int]:
        """Return where in the withheld tokens those begin and end whose bytes have ``content``: the last such place; if
        there is none, because the text differs from its tokens in white space, all of them."""
        spelled = [self._names.text.token_bytes(token) for token, _ in self._withheld]
        at = b"".join(spelled).rfind(content)
        if at < 0:
            return 0, len(spelled)
        first = end = position = 0
        for index, part in enumerate(spelled):
            if position < at + len(content) and part:
                end = index + 1
            position += len(part)
            if position <= at:
                first = index + 1
        return first, end
