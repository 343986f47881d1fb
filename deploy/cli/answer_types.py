"""The types of answers, from which the OpenAPI description has its schemas.

Owns their names and members. A test decodes real answers into these types, which know no other members, so that the
description and the encoders agree. An optional member is one that only some answers have.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class Answer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base class of all types here."""


# -- errors -----------------------------------------------------------------------------------------------------------


class ErrorDetail(Answer):
    """Why a request failed. ``param``: the path of the field that is wrong. ``code``: the reason, for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """An error in OpenAI's form."""

    error: ErrorDetail


class MessagesErrorDetail(Answer):
    """Why a request of the Messages API failed."""

    type: str
    message: str
    details: dict[str, str] | UnsetType = UNSET


class MessagesError(Answer):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


# -- log-probabilities and counts -------------------------------------------------------------------------------------


class TopLogprob(Answer):
    """A token that was likely, and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Answer):
    """An output token, its log-probability, and the most likely tokens at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """The log-probabilities of a choice of a chat completion."""

    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(Answer):
    """The log-probabilities of a choice of a text completion, one element per token. The first token of an echoed
    prompt has none."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Answer):
    """The log-probability and the rank of a token of the prompt, or of an alternative to it."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, one element per token of the prompt; null for the first."""


class CachedTokens(Answer):
    """The part of the prompt that was in the prefix cache."""

    cached_tokens: int


class ReasoningTokens(Answer):
    """The part of the output that is reasoning."""

    reasoning_tokens: int


class Usage(Answer):
    """Token counts of chat and text completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


class StageTimes(Answer):
    """Milliseconds in each stage, with ``return_metrics``."""

    queue_ms: float
    tokenize_ms: float
    prefill_ms: float
    transfer_ms: float | None
    transfer_exposed_ms: float | None
    kv_bytes: int | None
    decode_wait_ms: float
    ttft_ms: float
    itl_ms_mean: float
    path: Literal["disagg", "local", "colocated", "prefill"]
    prefill: str | None
    decode: str | None
    why: str


# -- chat completions -------------------------------------------------------------------------------------------------


class FunctionCall(Answer):
    """The name of a function and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call that the client should make."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Answer):
    """The message of a choice. ``reasoning_content`` and ``reasoning`` are the same text."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


ChatFinish = Literal["stop", "length", "tool_calls", "function_call"]


class ChatChoice(Answer):
    """One of the ``n`` answers to a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Answer):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    tandem: StageTimes | UnsetType = UNSET


class FunctionCallDelta(Answer):
    """What a chunk adds to a call. The name is in the first chunk of the call."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Answer):
    """What a chunk adds to the call ``index``. Its id is in its first chunk."""

    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Answer):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionCallDelta | UnsetType = UNSET


class ChatChunkChoice(Answer):
    """What a chunk adds to a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Answer):
    """An event of a stream: one token, the end of a choice, or the usage."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    tandem: StageTimes | UnsetType = UNSET


# -- text completions -------------------------------------------------------------------------------------------------


class TextChoice(Answer):
    """One of the ``n`` completions of a prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(Answer):
    """The completions of all prompts of a request."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage
    tandem: StageTimes | UnsetType = UNSET


class TextChunkChoice(Answer):
    """What a chunk adds to a choice."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextChunk(Answer):
    """An event of a stream: one token, the end of a choice, or the usage."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    tandem: StageTimes | UnsetType = UNSET
