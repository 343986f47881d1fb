"""The progress of one choice of a request on one worker, and the shape of one engine step.

Pure. Knows neither blocks nor sockets nor tensors. A sequence is a growing list of token ids of which the first
``computed`` have their KV in the pool. Prefill and decode differ only in how many are ``missing``: many, or one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import inf

from common.core.ids import BlockId, SequenceId
from common.core.request import FinishReason, Request


class Sequence:
    """Token ids of one choice: the prompt, then the output.

    Before its prompt is computed a request with ``n > 1`` is one sequence of choice 0 with ``siblings`` > 0; its last
    prompt row is sampled once per choice, and :meth:`fork` then makes the others.
    """

    __slots__ = (
        "_endings",
        "_ends_from",
        "_keeps_logprobs",
        "_last_length",
        "attempt",
        "best_from",
        "choice",
        "computed",
        "finish",
        "id",
        "logprobs",
        "prompt_length",
        "request",
        "siblings",
        "tokens",
    )

    def __init__(self, request: Request, attempt: int, choice: int = 0) -> None:
        self.request, self.attempt, self.choice = request, attempt, choice
        self.id = SequenceId(request.id, choice, attempt)
        self.tokens: list[int] = request.prompt_tokens()
        self.prompt_length = len(self.tokens)
        self.tokens += request.emitted_tokens(choice)
        self.computed = 0
        self.siblings = request.n - 1 if choice == 0 and not request.emitted else 0
        self.finish = FinishReason.RUNNING
        self.logprobs: list[TokenLogprobs | None] = []
        """Of the output tokens that were sampled here, if the request wants any: a lost span must be told again."""
        sampling = request.sampling  # what every step asks, which finds in no cache what it had to look for
        self._endings, self._ends_from = sampling.ending_token_ids, self.prompt_length + sampling.min_tokens
        self._keeps_logprobs = sampling.logprobs is not None
        self._last_length = self.prompt_length + sampling.max_tokens
        self.best_from: float = self._ends_from if sampling.takes_best else inf
        """With so many tokens or more the next one is the most likely, and nothing else is asked for."""

    @property
    def missing(self) -> int:
        """Tokens whose KV must still be computed before the next token can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def choices(self) -> tuple[int, ...]:
        """The choices that are sampled from this sequence's next row."""
        return tuple(range(self.siblings + 1)) if self.siblings else (self.choice,)

    def append(self, token: int, logprobs: TokenLogprobs | None = None) -> FinishReason:
        """Takes a sampled token; returns and remembers whether it ends the sequence."""
        self.tokens.append(token)
        if self._keeps_logprobs:
            self.logprobs.append(logprobs)
        length = len(self.tokens)
        if token in self._endings and length > self._ends_from:
            self.finish = FinishReason.STOP
        elif length >= self._last_length:
            self.finish = FinishReason.LENGTH
        return self.finish

    def fork(self, choice: int) -> Sequence:
        """Another choice over the same computed prompt, before either has appended its first token."""
        other = Sequence(self.request, self.attempt, choice)
        other.siblings, other.computed = 0, self.computed
        return other

    def __repr__(self) -> str:
        return f"Sequence({self.id}, {self.computed}/{len(self.tokens)} tokens, {self.finish.name})"


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens ``[start, start + length)`` of ``sequence`` in one step; ``wants_token`` if the last row is sampled."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def wants_token(self) -> bool:
        return self.end == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: segments, and for each the block ids that cover its sequence's tokens ``[0, end)``. How large it is, is
    counted once."""

    segments: tuple[Segment, ...]
    tables: tuple[Seq[BlockId], ...]
    length: int = field(init=False)
    """Tokens computed in this step."""
    streams: int = field(init=False)
    """Segments of one token."""
    attended: int = field(init=False)
    """Positions that these tokens attend to, summed over all of them; rounded up within a segment."""

    def __post_init__(self) -> None:
        length = streams = attended = 0
        for segment in self.segments:
            each = segment.length
            length += each
            attended += each * (segment.start + each)
            if each == 1:
                streams += 1
        object.__setattr__(self, "length", length)
        object.__setattr__(self, "streams", streams)
        object.__setattr__(self, "attended", attended)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one sampled position: the chosen token's, and the k most likely in falling order."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class StepResult:
    """What one step produced.

    ``tokens[i]`` are the ids sampled for segment i, one per entry of its sequence's ``choices``, or empty when the
    segment did not want one. ``logprobs[i]`` matches ``tokens[i]`` where the request asked for them, else is empty.
    ``errors`` names segments whose own computation failed (by index); the rest of the batch is valid.
    """

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    seconds: float
    errors: dict[int, str] = field(default_factory=dict)
