"""Which endpoints obey the fields that change an answer and that not all of them know.

Owns one table. An endpoint that does not obey such a field refuses it, so that no constraint of a client is lost
because it was sent to another API than the one that it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Api = Literal["chat", "text", "responses", "messages"]
PATHS: dict[Api, str] = {
    "chat": "/v1/chat/completions",
    "text": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
_NOTHING: tuple[object, ...] = (False, 0, "", [], {})


@dataclass(frozen=True, slots=True)
class Scope:
    """``obeyed``: the APIs that obey the field. ``instead``: what to use with others. ``neutral``: values that ask for
    nothing, besides null."""

    obeyed: tuple[Api, ...]
    instead: Mapping[Api, str] = field(default_factory=dict)
    neutral: tuple[object, ...] = _NOTHING

    def asks(self, value: object) -> bool:
        """Return whether ``value`` asks for something."""
        return value is not None and value not in self.neutral

    def advice(self, api: Api) -> str:
        """Return what the error of ``api`` advises."""
        if api in self.instead:
            return f"use {self.instead[api]}"
        return f"it belongs to {' and '.join(PATHS[each] for each in self.obeyed)}"


_CHATS: tuple[Api, ...] = ("chat", "responses", "messages")
_OPENAI: tuple[Api, ...] = ("chat", "text")
_FORMAT: dict[Api, str] = {"responses": "'text.format'", "messages": "'output_config.format'"}
_FORMAT_OF_MESSAGES: dict[Api, str] = dict.fromkeys(_OPENAI, "'response_format'") | {"responses": "'text.format'"}
_CONSTRAINT = Scope(_OPENAI, _FORMAT)
_REASONING = Scope(_CHATS)

SCOPES: dict[str, Scope] = {
    # constraints on the output
    "response_format": _CONSTRAINT,
    "structured_outputs": _CONSTRAINT,
    "guided_json": _CONSTRAINT,
    "guided_regex": _CONSTRAINT,
    "guided_choice": _CONSTRAINT,
    "guided_grammar": _CONSTRAINT,
    "guided_json_object": _CONSTRAINT,
    "text": Scope(("responses",), dict.fromkeys(_OPENAI, "'response_format'") | {"messages": "'output_config.format'"}),
    "output_config": Scope(("messages",), _FORMAT_OF_MESSAGES),
    "output_format": Scope(("messages",), _FORMAT_OF_MESSAGES),
    # length and end
    "max_completion_tokens": Scope(("chat", "text", "responses"), {"messages": "'max_tokens'"}),
    "max_output_tokens": Scope(
        ("responses",), {"chat": "'max_completion_tokens'", "text": "'max_tokens'", "messages": "'max_tokens'"}
    ),
    "stop_sequences": Scope(("messages",), dict.fromkeys(("chat", "text", "responses"), "'stop'")),
    "include_stop_str_in_output": Scope(_OPENAI),
    # reasoning
    "max_reasoning_tokens": _REASONING,
    "thinking_token_budget": _REASONING,
    "thinking_budget": _REASONING,
    "reasoning_effort": _REASONING,
    "include_reasoning": Scope(_CHATS, neutral=(True,)),
    "thinking": _REASONING,
    "enable_thinking": Scope(("chat", "responses"), {"messages": "'thinking'"}),
    "reasoning": Scope(("responses",), {"chat": "'reasoning_effort'", "messages": "'thinking'"}),
    # calls
    "tools": _REASONING,
    "tool_choice": Scope(_CHATS, neutral=(*_NOTHING, "none", "auto")),
    "functions": Scope(("chat",), {"responses": "'tools'", "messages": "'tools'"}),
    "function_call": Scope(("chat",), {"responses": "'tool_choice'", "messages": "'tool_choice'"}),
    # prompts
    "messages": Scope(("chat", "messages"), {"text": "'prompt'", "responses": "'input'"}),
    "input": Scope(("responses",), {"chat": "'messages'", "text": "'prompt'", "messages": "'messages'"}),
    "prompt": Scope(
        ("text",), {"chat": "'messages'", "responses": "'instructions' and 'input'", "messages": "'messages'"}
    ),
    "instructions": Scope(("responses",), {"chat": "a message of the role system", "messages": "'system'"}),
    "system": Scope(("messages",), {"chat": "a message of the role system", "responses": "'instructions'"}),
    "documents": Scope(("chat",)),
    "chat_template_kwargs": _REASONING,
    "continue_final_message": Scope(("chat",)),
    "add_generation_prompt": Scope(("chat",), neutral=(True,)),
    "add_special_tokens": Scope(_OPENAI),
    "truncate_prompt_tokens": Scope(_OPENAI),
    # what the answer shows
    "logprobs": Scope(_OPENAI, {"responses": "'top_logprobs'"}),
    "top_logprobs": Scope(("chat", "responses"), {"text": "'logprobs'"}),
    "prompt_logprobs": Scope(_OPENAI, neutral=()),
    "echo": Scope(("text",)),
    "best_of": Scope(("text",), {"chat": "'n'"}, neutral=(0, 1)),
    "return_token_ids": Scope(_OPENAI),
    "skip_special_tokens": Scope(_OPENAI, neutral=(True,)),
}
"""Scopes by the name of the field."""
