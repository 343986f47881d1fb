"""The progress of one choice of a request on one worker, and the input and output of one engine step.

Pure; knows no pool, sockets or tensors. A sequence is a growing list of token ids, of which the first ``computed``
have their KV in the pool. Prefill and decode differ only in how many are ``missing``: many, or one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import inf

from common.core.ids import BlockId, SequenceId
from common.core.prompt_span import PromptSpan
from common.core.request import FinishReason, Request


class Sequence:
    """The token ids of one choice: the prompt, then the output.

    Until its prompt is computed, a request with ``n > 1`` is one sequence of choice 0 with ``siblings`` > 0. The last
    row of the prompt is then sampled once per choice, and :meth:`fork` creates the other sequences.
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
        "constrained",
        "finish",
        "id",
        "logprobs",
        "masked",
        "matcher",
        "prompt_length",
        "request",
        "restriction",
        "run",
        "scored",
        "siblings",
        "to_score",
        "tokens",
    )

    def __init__(self, request: Request, attempt: int, choice: int = 0) -> None:
        self.request, self.attempt, self.choice = request, attempt, choice
        self.id = SequenceId(request.id, choice, attempt)
        self.tokens: list[int] = request.prompt_tokens()
        self.prompt_length = len(self.tokens)
        self.tokens += request.emitted_tokens(choice)
        self.computed = 0
        self.run = 1
        """Tokens appended since the last step: the sampled one, and those that the grammar forces after it."""
        self.matcher: object | None = None
        """State of the request's grammar on this worker (:mod:`common.grammar`), made again from the output on
        demand."""
        self.to_score = request.to_score if choice == 0 else 0
        """Rows of the prompt, from the first on, that give the log-probability of the token behind them."""
        self.scored = min(request.scored, self.to_score)
        """How many of these have been computed, here or in an earlier attempt."""
        self.restriction: object | None = None
        """Masks of the request's restrictions on this worker (:mod:`common.engine.restrictions`), made on demand."""
        self.siblings = request.n - 1 if choice == 0 and not request.emitted else 0
        self.finish = FinishReason.RUNNING
        self.logprobs: list[TokenLogprobs | None] = []
        """Log-probabilities of the output tokens sampled here, if requested; kept to send a lost span again."""
        sampling = request.sampling  # derived once: every step reads these, and lookups would miss the CPU's caches
        self._endings, self._ends_from = sampling.ending_token_ids, self.prompt_length + sampling.min_tokens
        self._keeps_logprobs = sampling.logprobs is not None
        self.constrained = bool(sampling.grammar) and sampling.max_tokens > 0
        self.masked = self.constrained or (sampling.restricts and sampling.max_tokens > 0)
        """Whether the next token is sampled under a mask. Without output there is none, which no mask can fail."""
        self._last_length = self.prompt_length + sampling.max_tokens
        self.best_from: float = self._ends_from if sampling.takes_best else inf
        """Length in tokens from which on the next token is a plain argmax (``SamplingParams.takes_best``), or inf."""

    @property
    def missing(self) -> int:
        """Tokens whose KV must still be computed before the next token can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def streams(self) -> bool:
        """Whether only the newest tokens are missing, so that the next step samples: one token, or the run of those
        that a grammar has forced."""
        return self.missing <= self.run

    @property
    def reusable(self) -> int:
        """Number of leading tokens whose KV may come from the prefix cache: all but the last, which must be computed to
        sample; while log-probabilities of the prompt are missing, the rows that have given theirs."""
        return self.scored if self.scored < self.to_score else len(self.tokens) - 1

    @property
    def output(self) -> list[int]:
        """The output token ids, those emitted before a retry included (a new list)."""
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        """Number of output tokens, those emitted before a retry included."""
        return len(self.tokens) - self.prompt_length

    @property
    def ends_with_next(self) -> bool:
        """Whether the next token is the last one that the request asks for, whatever it is."""
        return len(self.tokens) + 1 >= self._last_length

    @property
    def choices(self) -> tuple[int, ...]:
        """The choices that are sampled from this sequence's next row."""
        return tuple(range(self.siblings + 1)) if self.siblings else (self.choice,)

    def append(self, token: int, logprobs: TokenLogprobs | None = None) -> FinishReason:
        """Append a sampled token; set and return ``finish``, RUNNING unless the token ends the sequence."""
        self.tokens.append(token)
        self.run = 1
        if self._keeps_logprobs:
            self.logprobs.append(logprobs)
        length = len(self.tokens)
        if token in self._endings and length > self._ends_from:
            self.finish = FinishReason.STOP
        elif length >= self._last_length:
            self.finish = FinishReason.LENGTH
        return self.finish

    def force(self, token: int) -> FinishReason:
        """Append a token that the request's grammar leaves no choice about, right after the one before: its
        log-probability is 0, and both are computed in one step. Return as :meth:`append`."""
        run, wanted = self.run, self.request.sampling.logprobs
        finish = self.append(token, None if wanted is None else certain(token, wanted))
        self.run = run + 1
        return finish

    def end_unsampled(self) -> FinishReason:
        """Set and return ``finish`` if the request asks for no output: the prompt is computed, which ends it."""
        if self.request.sampling.max_tokens == 0:
            self.finish = FinishReason.LENGTH
        return self.finish

    def fork(self, choice: int) -> Sequence:
        """Return a sequence of another choice over the same computed prompt. Call it before the first token is
        appended."""
        other = Sequence(self.request, self.attempt, choice)
        other.siblings, other.computed = 0, self.computed
        return other

    def __repr__(self) -> str:
        return f"Sequence({self.id}, {self.computed}/{len(self.tokens)} tokens, {self.finish.name})"


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens ``[start, start + length)`` of ``sequence``, computed in one step. The last row is sampled if
    ``wants_token``."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        """Position after the last token of the segment."""
        return self.start + self.length

    @property
    def wants_token(self) -> bool:
        """Whether the segment ends at the sequence's last token, so that the next one is sampled."""
        return self.end == len(self.sequence.tokens)

    @property
    def rows_to_score(self) -> range:
        """Positions of the rows in this segment whose logits give a requested log-probability of the next prompt token
        that has not been computed yet."""
        sequence = self.sequence
        return range(max(self.start, sequence.scored), min(self.end, sequence.to_score))


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one step: segments, and per segment the ids of the blocks that hold tokens ``[0, end)`` of its
    sequence."""

    segments: tuple[Segment, ...]
    tables: tuple[Seq[BlockId], ...]
    length: int = field(init=False)
    """Tokens computed in this step."""
    streams: int = field(init=False)
    """Number of segments of sequences that stream: of one token, or of one and those that a grammar has forced."""
    prompt_tokens: int = field(init=False)
    """Tokens of all other segments: chunks of prompts, and of outputs that are computed again."""
    attended: int = field(init=False)
    """Positions attended to, summed over all tokens; each token of a segment counts as much as its last."""

    def __post_init__(self) -> None:
        length = streams = prompt_tokens = attended = 0
        for segment in self.segments:
            each = segment.length
            length += each
            attended += each * (segment.start + each)
            if each <= segment.sequence.run:
                streams += 1
            else:
                prompt_tokens += each
        object.__setattr__(self, "length", length)
        object.__setattr__(self, "streams", streams)
        object.__setattr__(self, "prompt_tokens", prompt_tokens)
        object.__setattr__(self, "attended", attended)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one sampled position: of the chosen token, and of the k most likely, descending."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


def certain(token: int, wanted: int) -> TokenLogprobs:
    """Return the log-probabilities of a token that a grammar forces, of ``wanted`` most likely ones: 0 for itself, and
    no others."""
    return TokenLogprobs(0.0, (token,), (0.0,)) if wanted else TokenLogprobs(0.0)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the grammar of a request ends it: a code of :data:`common.net.messages.FAILURES`, and words for the
    client."""

    code: str
    words: str


@dataclass(slots=True)
class StepResult:
    """The output of one step.

    ``tokens[i]`` are the ids sampled for segment i, one per entry of its sequence's ``choices``; empty unless the
    segment ``wants_token``. ``logprobs[i]`` matches ``tokens[i]`` if the request asked for logprobs, else is empty.
    ``prompts`` maps the index of a segment to the log-probabilities that its ``rows_to_score`` give. ``errors`` maps
    the index of a segment whose own computation failed to the reason; the others are valid. ``refusals`` are those of
    segments whose grammar fails them. ``late`` are segments whose token mask was not ready: their last token is
    computed again in a later step, which then samples.
    """

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    seconds: float
    errors: dict[int, str] = field(default_factory=dict)
    refusals: dict[int, Refusal] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    prompts: dict[int, PromptSpan] = field(default_factory=dict)
