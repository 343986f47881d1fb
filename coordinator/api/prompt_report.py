"""The log-probabilities of a prompt as JSON: vLLM's ``prompt_logprobs``, and those that ``echo`` shows. Also how tokens
are named in any log-probabilities.

They are encoded as they arrive, since those of a long prompt are many megabytes: encoding them at the end would block
the event loop. Knows nothing of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from common.core.prompt_span import PromptSpan
from coordinator.api.delta_encoder import encode
from coordinator.requests.spec import Json, Options
from coordinator.text.tokenizer import TextModel

FLOOR = -9999.0
"""Lower bound of the log-probabilities sent, because JSON has no minus infinity. The value is OpenAI's."""
ECHO_ARRAYS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
"""The members of OpenAI's ``logprobs`` object of text completions."""


_EchoRow = tuple[int, float | None, dict[str, float] | None]
"""A token, its log-probability and its element of ``top_logprobs``; None for the first token of a prompt."""


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are named. ``as_ids``: as "token_id:123", vLLM's form for clients that need the ids, instead of as
    their text, which several tokens may share."""

    text: TextModel
    as_ids: bool = False

    def of(self, token: int) -> str:
        """Return the name of ``token``."""
        return f"token_id:{token}" if self.as_ids else self.text.token_text(token)


class PromptReport:
    """The log-probabilities of ``prompt``, which all choices of one request show. ``echoed`` is its text if ``echo`` is
    set, else None. Each array is an opening bracket and the encoded elements, each followed by a comma."""

    def __init__(self, prompt: Sequence[int], options: Options, names: TokenNames, echoed: str | None) -> None:
        self._prompt, self._names = prompt, names
        self._tops = options.prompt_logprobs
        self._echo_tops = options.sampling.logprobs if echoed is not None else None
        self.chars = len(echoed or "")
        """Characters of the echoed prompt, before the output."""
        self._offset = 0
        self._detokenizer = names.text.detokenizer(skip_special_tokens=True)
        self._field = bytearray(b"[null,")
        self._echo = {name: bytearray(b"[") for name in ECHO_ARRAYS} if self._echo_tops is not None else {}
        if self._echo:
            self._add_echo([(prompt[0], None, None)])

    def add(self, span: PromptSpan) -> None:
        """Add the next positions of the prompt."""
        tokens, entries, rows = self._prompt[span.start : span.end], list[Json](), list[_EchoRow]()
        for at, (token, logprob, rank) in enumerate(zip(tokens, span.logprobs, span.ranks, strict=True)):
            top = slice(at * span.tops, (at + 1) * span.tops)
            best = list(zip(span.top_ids[top], span.top[top], strict=True))
            if self._tops is not None:
                entries.append(self._entries(token, logprob, rank, best[: self._tops]))
            if self._echo_tops is not None:
                named = by_name(self._names, [*best[: self._echo_tops], (token, logprob)])
                rows.append((token, max(logprob, FLOOR), named))
        if entries:
            self._field += elements(entries)
        if rows:
            self._add_echo(rows)

    def _entries(self, token: int, logprob: float, rank: int, best: Sequence[tuple[int, float]]) -> Json:
        """Return vLLM's entry of one position: by token id, first the prompt's token, then the most likely ones."""
        entries: Json = {str(token): self._entry(token, logprob, rank)}
        for place, (each, value) in enumerate(best, 1):
            entries[str(each)] = self._entry(each, value, place)
        return entries

    def _entry(self, token: int, logprob: float, rank: int) -> Json:
        return {"logprob": max(logprob, FLOOR), "rank": rank, "decoded_token": self._names.text.token_text(token)}

    def _add_echo(self, rows: Sequence[_EchoRow]) -> None:
        offsets = []
        for token, _, _ in rows:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(token))
        names = [self._names.of(token) for token, _, _ in rows]
        logprobs, tops = [logprob for _, logprob, _ in rows], [top for _, _, top in rows]
        columns: tuple[Sequence[object], ...] = (offsets, logprobs, names, tops)
        for array, column in zip(ECHO_ARRAYS, columns, strict=True):
            self._echo[array] += elements(column)

    @property
    def shows_field(self) -> bool:
        """Whether the answer has the member ``prompt_logprobs``."""
        return self._tops is not None

    def field(self) -> msgspec.Raw:
        """Return the member ``prompt_logprobs``: a list with null for the first token."""
        return closed(self._field, b"")

    def echo(self, name: str, output: bytes | bytearray) -> msgspec.Raw:
        """Return an array of the ``logprobs`` object: the prompt's part, then ``output``, encoded elements each
        followed by a comma."""
        return closed(self._echo.get(name, b"["), output)


def elements(values: Sequence[object]) -> bytes:
    """Return the elements of a JSON array, each followed by a comma; ``values`` is not empty."""
    return encode(values)[1:-1] + b","


def by_name(names: TokenNames, pairs: Iterable[tuple[int, float]]) -> dict[str, float]:
    """Return the element of ``top_logprobs`` for ``pairs`` of token id and log-probability. Of tokens with the same
    name, such as U+FFFD for any part of a character, the most likely one counts."""
    named: dict[str, float] = {}
    for token, logprob in pairs:
        name = names.of(token)
        named[name] = max(logprob, named.get(name, FLOOR))
    return named


def closed(start: bytes | bytearray, rest: bytes | bytearray) -> msgspec.Raw:
    """Return the JSON array of an opening bracket with elements and further elements, each followed by a comma."""
    array = bytearray(start)
    array += rest
    if len(array) == 1:
        return msgspec.Raw(b"[]")
    array[-1:] = b"]"
    return msgspec.Raw(array)
