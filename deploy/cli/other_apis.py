"""What the reference says about the fields of the Responses API and of the Messages API."""

from __future__ import annotations

RESPONSES_HELP = {
    "chat_template_kwargs": "Variables for the chat template.",
    "include": "No value has an effect; `message.output_text.logprobs` is refused.",
    "input": "A string, or items: message, function_call, function_call_output, reasoning; text content only.",
    "instructions": "A system message before the input.",
    "max_output_tokens": "Longest output in tokens. Default: what fits.",
    "max_reasoning_tokens": "Most tokens of reasoning before the answer; 0 is none. Refused if its marks are unknown.",
    "metadata": "Up to 16 strings, which the answer repeats; no effect.",
    "n": "Only 1.",
    "parallel_tool_calls": "Whether an answer may have several function calls. Default: true.",
    "prompt_cache_key": "Accepted; has no effect: prompts share what they begin with.",
    "prompt_cache_retention": "Accepted; has no effect.",
    "reasoning": "`effort` is passed to the chat template; other members have no effect.",
    "reasoning.effort": "As `reasoning_effort` of chat completions.",
    "safety_identifier": "Accepted; has no effect.",
    "service_tier": "Accepted; has no effect.",
    "stop": "A string or up to 16 strings that end the output.",
    "store": "Accepted; nothing is stored, and the answer says `store: false`.",
    "stream": "Send named events while tokens are generated.",
    "stream_options": "Only with `stream`.",
    "stream_options.include_obfuscation": "Accepted; nothing is added to events.",
    "text": "`format` constrains the output: text, json_object, json_schema.",
    "text.format": "As `response_format` of chat completions, with the members of `json_schema` beside `type`.",
    "tool_choice": "`auto`, `none`, `required`, a function by name, or `allowed_tools`.",
    "tools": "Functions that the answer may call. Built-in tools are refused by name.",
    "top_logprobs": "Only 0.",
    "truncation": "Only `disabled`.",
    "user": "Accepted; has no effect.",
}
"""One line per field of POST /v1/responses, besides those that mean the same as in chat completions."""

MESSAGES_HELP = {
    "chat_template_kwargs": "Variables for the chat template.",
    "max_tokens": "Required. Longest output in tokens, reasoning included.",
    "messages": "Turns of user and assistant, with text, tool_use, tool_result and thinking blocks. A last turn of the "
    "assistant is continued.",
    "metadata": "Accepted; has no effect.",
    "model": "Required. Name of the served model.",
    "n": "Only 1.",
    "output_config": "`effort` is passed to the chat template; `format` constrains the output.",
    "output_config.effort": "One of `low`, `medium`, `high`, `xhigh`, `max`.",
    "output_config.format": "`json_schema` with a `schema`.",
    "service_tier": "Accepted; has no effect.",
    "stop_sequences": "Up to 16 strings that end the output.",
    "stream": "Send named events while tokens are generated.",
    "system": "A string or text blocks.",
    "thinking": "Type `enabled` or `adaptive`: reasoning is shown as thinking blocks. Else the template is told not to "
    "reason, and reasoning is not shown.",
    "thinking.budget_tokens": "Most tokens of reasoning, less than `max_tokens`.",
    "thinking.display": "`omitted`: reasoning is generated, and not shown.",
    "thinking.type": "`enabled` (with a budget), `adaptive` or `disabled`.",
    "tool_choice": "An object of type `auto`, `any`, `tool` (with a name) or `none`.",
    "tools": "Tools with a name and an `input_schema`. Anthropic's own tools are refused by name.",
}
"""One line per field of POST /v1/messages, besides those that mean the same as in chat completions."""
