"""Requests to the Responses API and the Messages API: one of each kind, and bodies that are refused, each with the
field and the code of its error. Unit tests check these against the parsers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
INPUT = "/v1/responses/input_tokens"
FUNCTION = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
FUNCTION_CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
TOOL = {"name": "weather", "description": "d", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "rain"}
HELLO = [{"role": "user", "content": "hello"}]
LEAST = {"model": "tiny", "max_tokens": 9, "messages": HELLO}
LEAST_OF: dict[str, dict[str, Any]] = {
    RESPONSES: {"model": "tiny", "max_output_tokens": 9, "input": "hello"},
    MESSAGES: LEAST,
    COUNT: LEAST,
}
"""A small request for each path."""


def _user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def _assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


BAD_RESPONSES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": 3}, "input", "invalid_type"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input", "invalid_value"),
    ({"input": [3]}, "input[0]", "invalid_type"),
    ({"input": [{}]}, "input[0].type", "missing_required_parameter"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"type": "message", "content": "a"}]}, "input[0].role", "missing_required_parameter"),
    ({"input": [{"role": "user", "content": 3}]}, "input[0].content", "invalid_type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "unsupported",
    ),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type", "unsupported"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type", "unsupported"),
    ({"input": [{**FUNCTION_CALL, "name": None}]}, "input[0].name", "missing_required_parameter"),
    ({"input": [{**FUNCTION_CALL, "call_id": None}]}, "input[0].call_id", "missing_required_parameter"),
    ({"input": [{**FUNCTION_CALL, "arguments": "[]"}]}, "input[0].arguments", "invalid_value"),
    ({"input": [{**FUNCTION_CALL, "arguments": {}}]}, "input[0].arguments", "invalid_type"),
    ({"input": [{**OUTPUT, "output": None}]}, "input[0].output", "missing_required_parameter"),
    ({"input": [{**OUTPUT, "call_id": 3}]}, "input[0].call_id", "invalid_type"),
    ({"input": [{**OUTPUT, "call_id": None}]}, "input[0].call_id", "missing_required_parameter"),
    ({"input": [{"type": "reasoning", "content": [{"text": "a"}]}]}, "input[0].content[0].type",
     "missing_required_parameter"),
    ({"input": [{"type": "reasoning", "content": ["a"]}]}, "input[0].content[0]", "invalid_type"),
    ({"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]}, "input[0].summary[0].type", "unsupported"),
    ({"input": [{"type": "reasoning", "content": [{"type": "text"}]}]}, "input[0].content[0].text",
     "missing_required_parameter"),
    ({"instructions": 3}, "instructions", "invalid_type"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "unsupported"),
    ({"max_output_tokens": 9, "max_tokens": 8}, "max_tokens", "invalid_value"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning_effort", "invalid_value"),
    ({"max_reasoning_tokens": 3, "thinking_budget": 3}, "thinking_budget", "invalid_value"),
    ({"thinking": {}}, "thinking.type", "missing_required_parameter"),
    ({"thinking": True, "enable_thinking": False}, "enable_thinking", "invalid_value"),
    ({"tools": [{**FUNCTION, "name": "a b"}]}, "tools[0].name", "invalid_value"),
    ({"logits_processors": ["x"]}, "logits_processors", "unsupported"),
    ({"conversation": "conv_1"}, "conversation", "unsupported"),
    ({"background": True}, "background", "unsupported"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported"),
    ({"truncation": "auto"}, "truncation", "unsupported"),
    ({"truncation": "middle"}, "truncation", "invalid_value"),
    ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"top_logprobs": "3"}, "top_logprobs", "invalid_type"),
    ({"reasoning": {"summary": "short"}}, "reasoning.summary", "invalid_value"),
    ({"reasoning": {"generate_summary": 1}}, "reasoning.generate_summary", "invalid_type"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported"),
    ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids", "invalid_type"),
    ({"n": 2}, "n", "unsupported"),
    ({"store": "yes"}, "store", "invalid_type"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"max_output_tokens": "9"}, "max_output_tokens", "invalid_type"),
    ({"temperature": 3}, "temperature", "invalid_value"),
    ({"metadata": {"a": 3}}, "metadata.a", "invalid_type"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a", "invalid_value"),
    ({"metadata": {str(at): "" for at in range(17)}}, "metadata", "invalid_value"),
    ({"include": "a"}, "include", "invalid_type"),
    ({"include": [3]}, "include[0]", "invalid_type"),
    ({"include": ["a"]}, "include[0]", "invalid_value"),
    ({"text": "a"}, "text", "invalid_type"),
    ({"text": {"format": {}}}, "text.format.type", "missing_required_parameter"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
    ({"reasoning": "low"}, "reasoning", "invalid_type"),
    ({"reasoning": {"effort": 1}}, "reasoning.effort", "invalid_type"),
    ({"reasoning": {"max_tokens": 9}}, "reasoning.max_tokens", "unsupported"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages", "invalid_value"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported"),
    ({"tools": [{"type": "web_search_preview_2025_03_11"}]}, "tools[0].type", "unsupported"),
    ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0].type", "unsupported"),
    ({"tools": [{"type": "local_shell"}]}, "tools[0].type", "unsupported"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "b"}}, "tool_choice.name", "invalid_value"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "file_search"}}, "tool_choice.type", "unsupported"),
]  # fmt: skip

IMAGE = {"type": "image", "source": {"type": "url", "url": "http://a"}}
BAD_MESSAGES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"model": None}, "model", "missing_required_parameter"),
    ({"model": 3}, "model", "invalid_type"),
    ({"max_tokens": None}, "max_tokens", "missing_required_parameter"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "a"}, "messages", "invalid_type"),
    ({"messages": [{"role": "user", "content": []}]}, "messages", "invalid_value"),
    ({"messages": ["a"]}, "messages[0]", "invalid_type"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "invalid_type"),
    ({"messages": [_user("a")]}, "messages[0].content[0]", "invalid_type"),
    ({"messages": [_user({"text": "a"})]}, "messages[0].content[0].type", "missing_required_parameter"),
    ({"messages": [_user({"type": "text"})]}, "messages[0].content[0].text", "missing_required_parameter"),
    ({"messages": [_user(IMAGE)]}, "messages[0].content[0].type", "unsupported"),
    ({"messages": [_user({"type": "document"})]}, "messages[0].content[0].type", "unsupported"),
    ({"messages": [_user(USE)]}, "messages[0].content[0].type", "invalid_value"),
    ({"messages": [_assistant(RESULT)]}, "messages[0].content[0].type", "invalid_value"),
    ({"messages": [_assistant({"type": "server_tool_use"})]}, "messages[0].content[0].type", "unsupported"),
    ({"messages": [_assistant({"type": "thinking"})]}, "messages[0].content[0].thinking", "missing_required_parameter"),
    ({"messages": [_assistant({**USE, "id": None})]}, "messages[0].content[0].id", "missing_required_parameter"),
    ({"messages": [_assistant({**USE, "name": None})]}, "messages[0].content[0].name", "missing_required_parameter"),
    ({"messages": [_assistant({**USE, "name": 3})]}, "messages[0].content[0].name", "invalid_type"),
    ({"messages": [_assistant({**USE, "input": "{}"})]}, "messages[0].content[0].input", "invalid_type"),
    ({"messages": [_assistant({**USE, "input": None})]}, "messages[0].content[0].input", "missing_required_parameter"),
    ({"messages": [*HELLO, _assistant(USE)]}, "messages", "invalid_value"),
    ({"messages": [_user({**RESULT, "tool_use_id": None})]}, "messages[0].content[0].tool_use_id",
     "missing_required_parameter"),
    ({"messages": [_user({**RESULT, "content": [IMAGE]})]}, "messages[0].content[0].content[0].type", "unsupported"),
    ({"messages": [_user({**RESULT, "content": [3]})]}, "messages[0].content[0].content[0]", "invalid_type"),
    ({"messages": [_user({**RESULT, "is_error": 1})]}, "messages[0].content[0].is_error", "invalid_type"),
    ({"system": 3}, "system", "invalid_type"),
    ({"system": [{"text": "a"}]}, "system[0].type", "missing_required_parameter"),
    ({"system": [IMAGE]}, "system[0].type", "unsupported"),
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"top_k": "a"}, "top_k", "invalid_type"),
    ({"stop_sequences": [""]}, "stop_sequences[0]", "invalid_value"),
    ({"stop_sequences": {}}, "stop_sequences", "invalid_type"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"n": 2}, "n", "unsupported"),
    ({"container": "c"}, "container", "unsupported"),
    ({"mcp_servers": [{"url": "http://a"}]}, "mcp_servers", "unsupported"),
    ({"thread": {"type": "create"}}, "thread", "unsupported"),
    ({"thinking": {}}, "thinking.type", "missing_required_parameter"),
    ({"thinking": {"type": "much"}}, "thinking.type", "invalid_value"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "missing_required_parameter"),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens", "invalid_value"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort", "invalid_value"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", "invalid_value"),
    ({"output_format": {"type": "text"}}, "output_format.type", "invalid_value"),
    ({"output_format": {"type": "json_schema"}, "output_config": {"format": {"type": "json_schema"}}}, "output_format",
     "invalid_value"),
    ({"stop": ["a"], "stop_sequences": ["b"]}, "stop", "invalid_value"),
    ({"output_config": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning_effort", "invalid_value"),
    ({"thinking_token_budget": 3, "max_reasoning_tokens": 4}, "thinking_token_budget", "invalid_value"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported"),
    ({"max_completion_tokens": 9}, "max_completion_tokens", "unsupported"),
    ({"top_logprobs": 2}, "top_logprobs", "unsupported"),
    ({"tools": [{**TOOL, "name": "caf\N{LATIN SMALL LETTER E WITH ACUTE}"}]}, "tools[0].name", "invalid_value"),
    ({"tools": [3]}, "tools[0]", "invalid_type"),
    ({"tools": [{**TOOL, "name": None}]}, "tools[0].name", "missing_required_parameter"),
    ({"tools": [{**TOOL, "input_schema": None}]}, "tools[0].input_schema", "missing_required_parameter"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name", "invalid_value"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "unsupported"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "unsupported"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice", "invalid_type"),
    ({"tools": [TOOL], "tool_choice": {}}, "tool_choice.type", "missing_required_parameter"),
    ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "missing_required_parameter"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name", "invalid_value"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "invalid_value"),
]  # fmt: skip

_PARTS = [{"type": "text", "text": ""}] * 16_385
LARGE_RESPONSES: list[dict[str, Any]] = [
    {"input": HELLO * 16_385},
    {"input": [{"role": "user", "content": _PARTS}]},
    {"input": "q " * 8_500},
    {"max_output_tokens": 100_000},
]
LARGE_MESSAGES: list[dict[str, Any]] = [
    {"messages": [_user(*_PARTS)]},
    {"max_tokens": 100_000},
]
"""Bodies that are too large in some way, which the parsers alone do not always see."""


def bodies() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, path and body of each request."""
    reply = {"max_output_tokens": 5, "temperature": 0}
    for stream in (False, True):
        for more in (
            {},
            {"tools": [FUNCTION], "instructions": "Be brief."},
            {"input": [*HELLO, FUNCTION_CALL, OUTPUT]},
            {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
        ):
            yield _named(RESPONSES, {"input": "hello", **reply, "stream": stream, **more})
        for more in (
            {},
            {"tools": [TOOL], "system": "Be brief."},
            {"messages": [*HELLO, _assistant(USE), _user(RESULT)]},
        ):
            yield _named(MESSAGES, {**LEAST, "temperature": 0, "stream": stream, **more})
    yield _named(COUNT, LEAST)
    yield _named(INPUT, {"input": "hello"})
    for body, _, _ in BAD_RESPONSES:
        yield _named(RESPONSES, {"input": "hello", **body})
    for body, _, _ in BAD_MESSAGES:
        yield _named(MESSAGES, {**LEAST, **body})
    for index, body in enumerate(LARGE_RESPONSES):
        yield f"{RESPONSES} large {index}", RESPONSES, {"input": "hello", **body}
    for index, body in enumerate(LARGE_MESSAGES):
        yield f"{MESSAGES} large {index}", MESSAGES, {**LEAST, **body}


def _named(path: str, body: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    shown = json.dumps(body, separators=(",", ":"))[1:-1]
    return f"{path} {shown if len(shown) < 200 else f'{shown[:160]}... {len(shown)}'}", path, body
