"""What the encoders of all kinds of responses have in common: their interface, the members with which each response
begins, and its token counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.core.errors import RequestError
from coordinator.api.choice import Choice, Piece
from coordinator.requests.spec import Json


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request. ``reasoning`` is the part of ``completion`` that is reasoning, None if
    reasoning is not separated from content."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int | None = None

    def json(self) -> Json:
        """Return OpenAI's ``usage`` object."""
        usage: Json = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if self.reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return usage


@dataclass(frozen=True, slots=True)
class Head:
    """The members with which every body and chunk of one response begins."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def json(self, kind: str) -> Json:
        """Return the members as a new JSON object, with ``kind`` as its ``object``."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class Shape(Protocol):
    """The encoder of one kind of response. Chunks are complete server-sent events. ``extra``: members to add."""

    head: Head
    needs_pieces: bool
    """Whether :meth:`keep` must be called for each token of a non-streaming response, not only for those with
    log-probabilities."""
    keepalive: bytes
    """What is sent on an idle stream."""

    def keep(self, choice: Choice, piece: Piece) -> None:
        """Encode and keep what :meth:`whole` needs of one token."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        """Return the body of a non-streaming response. Consumes the kept log-probabilities."""

    def begin(self, usage: Usage) -> bytes:
        """Return the events before the first chunk."""

    def chunk(self, choice: Choice, piece: Piece, usage: Usage | None) -> bytes:
        """Return the chunk of one token, with ``usage`` if the client requested continuous usage."""

    def end(self, choice: Choice, usage: Usage | None, extra: Json) -> bytes:
        """Return the chunk with the finish reason of a choice."""

    def usage(self, usage: Usage, extra: Json) -> bytes:
        """Return the events after the ends of all choices, if the client requested usage."""

    def done(self) -> bytes:
        """Return what ends a complete stream."""

    def failed(self, error: RequestError) -> bytes:
        """Return the events that end a stream with ``error``."""
