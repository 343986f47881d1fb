"""The types of answers of the Responses API and of the Messages API, as :mod:`deploy.cli.answer_types` has the
others."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from deploy.cli.answer_types import Answer, ReasoningTokens, StageTimes, TokenLogprob

# -- the Responses API ------------------------------------------------------------------------------------------------


class OutputText(Answer):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningText(Answer):
    """The text of reasoning, as it was written or in place of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(Answer, tag_field="type", tag="message"):
    """An item of an answer: text."""

    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Answer, tag_field="type", tag="reasoning"):
    """An item of an answer: reasoning."""

    id: str
    status: ItemStatus
    summary: list[ReasoningText]
    content: list[ReasoningText]


class FunctionCallItem(Answer, tag_field="type", tag="function_call"):
    """An item of an answer: a call that the client should make."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ResponseError(Answer):
    """Why a stream ended with ``response.failed``."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class IncompleteDetails(Answer):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(Answer):
    """Parts of the prompt."""

    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(Answer):
    """Token counts of the Responses API."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class Response(Answer):
    """An answer of the Responses API. Its members from ``instructions`` on repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    max_tool_calls: None
    model: str
    output: list[OutputMessage | ReasoningItem | FunctionCallItem]
    previous_response_id: None
    service_tier: Literal["default"]
    store: bool
    system_fingerprint: str
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    user: str | None
    tandem: StageTimes | UnsetType = UNSET


class InputTokens(Answer):
    """The length of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


# -- the Messages API -------------------------------------------------------------------------------------------------


class TextBlock(Answer, tag_field="type", tag="text"):
    """A content block: text."""

    text: str


class ThinkingBlock(Answer, tag_field="type", tag="thinking"):
    """A content block: reasoning."""

    thinking: str
    signature: str


class ToolUseBlock(Answer, tag_field="type", tag="tool_use"):
    """A content block: a call that the client should make."""

    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(Answer):
    """The part of the output that is reasoning."""

    thinking_tokens: int


class MessageUsage(Answer):
    """Token counts of the Messages API. ``input_tokens`` are those that were not in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class Message(Answer):
    """An answer of the Messages API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage
    system_fingerprint: str
    tandem: StageTimes | UnsetType = UNSET


class CountedTokens(Answer):
    """The length of a prompt."""

    input_tokens: int
