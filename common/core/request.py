"""A validated request, as workers see it.

Owns ``SamplingParams`` and ``Request``, which travel inside messages. Text never comes here: stop strings, templates
and tools stay in the coordinator.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec

from common.core.ids import REQUEST_ID_BYTES, TOKEN_ID_BYTES, RequestId, unpack_tokens

MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_TOKENS = 1 << 31
MAX_GRAMMAR = 1 << 18
"""Characters of a request's grammar."""
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 1024, 1024
"""Token sequences that a request may forbid, and tokens in each."""
MAX_ALLOWED_IDS = 1 << 20
GREEDY_BELOW = 1e-5
"""A lower temperature means greedy, as in vLLM: logits divided by it would overflow float32."""
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
BadWord = Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]
Id = Annotated[RequestId, msgspec.Meta(min_length=REQUEST_ID_BYTES, max_length=REQUEST_ID_BYTES)]


class FinishReason(IntEnum):
    """Why a sequence ended on a worker. A match of a stop string is not among the reasons: the coordinator detects it
    and aborts the request."""

    RUNNING = 0
    STOP = 1  # end of sequence or a stop token id
    LENGTH = 2  # max_tokens
    ABORTED = 3
    FAILED = 4


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How the next token is chosen. Names and meanings are those of OpenAI and vLLM.

    ``max_tokens`` 0 samples nothing: the request ends when its prompt is computed. ``temperature`` 0 is greedy.
    ``top_k`` 0 is off. ``logprobs`` None is off, 0 returns that of the chosen token, k also those of the k most likely.
    ``eos_token_ids`` end a sequence unless ``ignore_eos``; until ``min_tokens`` tokens are output, neither they nor
    ``stop_token_ids`` can be sampled. ``seed`` is always set: the coordinator draws one if the client sent none.
    ``prompt_logprobs`` is as ``logprobs``, for all tokens of the prompt but the first. ``grammar`` is a grammar of
    llguidance (Lark text or its JSON form), which the whole output from its first token on must match; empty is no
    constraint. Only ``allowed_token_ids`` (little-endian uint32) are sampled, unless there are none, and never the last
    token of one of ``bad_words`` right after its other tokens, all of them output. Raises ValueError if the bytes of
    ``allowed_token_ids`` are no whole number of ids.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    grammar: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR)] = ""
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    allowed_token_ids: Annotated[bytes, msgspec.Meta(max_length=MAX_ALLOWED_IDS * TOKEN_ID_BYTES)] = b""
    bad_words: Annotated[tuple[BadWord, ...], msgspec.Meta(max_length=MAX_BAD_WORDS)] = ()

    def __post_init__(self) -> None:
        if len(self.allowed_token_ids) % TOKEN_ID_BYTES:
            raise ValueError("the bytes of the allowed token ids are not a multiple of 4")

    @property
    def ending_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a sequence when sampled. A grammar allows an end of sequence only once it is complete,
        with ``ignore_eos`` only if nothing else can follow: then it ends the sequence all the same."""
        ignored = self.ignore_eos and not self.grammar
        return self.stop_token_ids if ignored else (*self.eos_token_ids, *self.stop_token_ids)

    @property
    def has_penalty(self) -> bool:
        """Whether a penalty changes logits by the tokens that the sequence already has."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def restricts(self) -> bool:
        """Whether some tokens may not be sampled, apart from a grammar."""
        return bool(self.allowed_token_ids or self.bad_words)

    @property
    def takes_best(self) -> bool:
        """Whether sampling is a plain argmax of the logits once ``min_tokens`` are output: greedy, without logprobs,
        bias, penalties, a grammar or other restrictions."""
        changed = self.logit_bias or self.has_penalty or self.grammar or self.restricts
        plain = self.logprobs is None and not changed
        return self.temperature < GREEDY_BELOW and plain


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One request as workers see it.

    ``prompt`` is token ids as little-endian uint32. ``emitted`` holds, per choice, the output ids that the client
    already has, packed alike: a retry or migration computes their KV again as if they were prompt and samples only
    after them, while penalties count them as output. ``ended`` lists choices that are complete. The coordinator has
    the log-probabilities of the first ``scored`` prompt tokens that have any, from earlier attempts. A lower
    ``priority`` runs earlier. ``deadline_ms`` is the time left when the message was sent. Raises ValueError if the
    fields contradict each other; decoding the message around it then fails.
    """

    id: Id
    prompt: bytes
    sampling: SamplingParams
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] = 1
    emitted: tuple[bytes, ...] = ()
    cache_salt: str = ""
    priority: int = 0
    deadline_ms: int = 600_000
    ended: tuple[int, ...] = ()
    scored: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)] = 0

    def __post_init__(self) -> None:
        if not self.prompt or any(len(tokens) % 4 for tokens in (self.prompt, *self.emitted)):
            raise ValueError("the prompt is empty, or token bytes are not a multiple of 4")
        if self.emitted and len(self.emitted) != self.n:
            raise ValueError(f"output of {len(self.emitted)} choices in a request for {self.n}")
        ended = set(self.ended)
        if ended and not (self.emitted and ended < set(range(self.n))):
            raise ValueError("ended choices must exist and have output, and must not be all choices")
        if self.scored > self.to_score:
            raise ValueError(f"{self.scored} log-probabilities of a prompt that has {self.to_score}")

    @property
    def prompt_length(self) -> int:
        """Tokens in the prompt."""
        return len(self.prompt) // 4

    @property
    def to_score(self) -> int:
        """Prompt tokens whose log-probabilities are requested: all but the first, or none."""
        return self.prompt_length - 1 if self.sampling.prompt_logprobs is not None else 0

    def prompt_tokens(self) -> list[int]:
        """Return the token ids of the prompt."""
        return unpack_tokens(self.prompt)

    def emitted_tokens(self, choice: int) -> list[int]:
        """Return the output ids of ``choice`` that the client already has."""
        return unpack_tokens(self.emitted[choice]) if choice < len(self.emitted) else []
