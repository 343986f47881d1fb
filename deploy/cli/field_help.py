"""What the reference says about the fields of requests."""

from __future__ import annotations

FIELD_HELP = {
    "add_special_tokens": "Whether a text prompt begins with the tokens that the tokenizer adds. For chats only false.",
    "allowed_token_ids": "Sample only these token ids.",
    "bad_words": "Texts that the output must not have, each as its own tokens and as those with a space before it.",
    "truncate_prompt_tokens": "Keep only the last so many tokens of the prompt; -1: what fits beside `max_tokens`.",
    "add_generation_prompt": "Whether the template ends with the opening of the assistant's turn.",
    "best_of": "Accepted only when not above `n`.",
    "cache_salt": "Requests share cached prefixes only with requests of the same salt.",
    "chat_template_kwargs": "Variables for the chat template.",
    "continue_final_message": "Continue the last message, which must be the assistant's.",
    "documents": "Texts to answer from, for chat templates that know them.",
    "echo": "Put the prompt before the output; with `logprobs` also its log-probabilities.",
    "frequency_penalty": "Penalty per earlier occurrence of a token in the output.",
    "function_call": "Older form of `tool_choice`: `auto`, `none`, or an object with a function's name.",
    "functions": "Older form of `tools`. An answer then has at most one call, as `function_call`.",
    "guided_choice": "Older name of `structured_outputs.choice`.",
    "guided_grammar": "Older name of `structured_outputs.grammar`.",
    "guided_json": "Older name of `structured_outputs.json`.",
    "guided_json_object": "Older name of `structured_outputs.json_object`.",
    "guided_regex": "Older name of `structured_outputs.regex`.",
    "guided_whitespace_pattern": "Older name of `structured_outputs.whitespace_pattern`.",
    "ignore_eos": "Generate past the end-of-sequence token.",
    "include_reasoning": "Whether the answer has the reasoning. Default: true.",
    "include_stop_str_in_output": "Keep the stop string in the output.",
    "logit_bias": "Token id to a value from -100 to 100 that is added to its logit.",
    "logprobs": "Return the log-probability of each output token; `top_logprobs` adds alternatives.",
    "max_completion_tokens": "Longest output in tokens; wins over `max_tokens`. -1: what fits.",
    "max_reasoning_tokens": "Longest reasoning in tokens, for models that mark its end.",
    "max_tokens": "Longest output in tokens; -1: what fits. Default: what fits for chats, at most 16 for completions.",
    "messages": "The conversation: roles system, developer, user, assistant, tool; text content only.",
    "min_p": "Smallest probability of a token, relative to the most likely one.",
    "min_tokens": "Output tokens before an end-of-sequence token or a stop may end the output.",
    "modalities": 'Only `["text"]`.',
    "model": "Name of the served model; may be left out.",
    "n": "Choices per prompt. The prompt is computed once.",
    "parallel_tool_calls": "Whether an answer may have several tool calls. Default: true.",
    "presence_penalty": "Penalty for tokens that occur in the output.",
    "priority": "Requests with a lower value are scheduled first.",
    "prompt_logprobs": "Return the log-probability and rank of each prompt token, and so many alternatives.",
    "prompt": "A string, token ids, or an array of either.",
    "reasoning_effort": "Passed to the chat template; `none` also turns reasoning off where the template can.",
    "repetition_penalty": "Divides the logits of tokens that occur in the prompt or the output; 1 is none.",
    "response_format": "What the output must be: `text`, `json_object`, `json_schema` (strict or not), "
    "`structural_tag`. JSON schemas are obeyed or refused, never ignored.",
    "return_metrics": "Add `tandem` to the answer: milliseconds in each stage.",
    "return_token_ids": "Add the token ids of prompt and output.",
    "return_tokens_as_token_ids": "Name tokens in log-probabilities `token_id:ID`, not by their text. Default: as the "
    "server is configured.",
    "seed": "Seed of the sampler: the same seed and prompt give the same tokens, also after a hand-off or a retry.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "stop": "A string or up to 16 strings that end the output.",
    "stop_token_ids": "Token ids that end the output.",
    "stream": "Send server-sent events while tokens are generated.",
    "stream_options": "Only with `stream`.",
    "stream_options.continuous_usage_stats": "Put `usage` into every chunk.",
    "stream_options.include_usage": "Send a last chunk with `usage`.",
    "structured_outputs": "What the output must match, as in vLLM: exactly one of "
    "`json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`.",
    "structured_outputs.json": "A JSON schema, as an object or as text.",
    "structured_outputs.regex": "A regular expression that the whole output matches; without "
    "look-around and back-references.",
    "structured_outputs.choice": "Strings, of which the output is one.",
    "structured_outputs.grammar": "A grammar in Lark (as llguidance reads it) or GBNF.",
    "structured_outputs.json_object": "`true` for any JSON object.",
    "structured_outputs.structural_tag": "Free text in which triggers begin parts with a schema; both "
    "forms of xgrammar.",
    "structured_outputs.whitespace_pattern": "Regular expression for the white space between JSON tokens. "
    "Default: one space, or one line break with indentation.",
    "structured_outputs.disable_any_whitespace": "Whether JSON has no white space between its tokens.",
    "structured_outputs.disable_additional_properties": "Whether objects have only the properties that the schema "
    "names, unless it says otherwise.",
    "temperature": "0 is greedy. Default: the model's `generation_config.json`, else 1.",
    "tool_choice": "`auto`, `none`, `required`, a function, or an object of type `allowed_tools`. Calls match the "
    "tools' schemas; those of `strict` tools are obeyed or refused.",
    "tools": "Functions that the answer may call, in OpenAI's nested form or in the flat form of the Responses API.",
    "top_k": "Sample among this many most likely tokens; -1 or 0: all.",
    "top_logprobs": "Alternatives per token; needs `logprobs`.",
    "top_p": "Sample among the most likely tokens that together have this probability.",
    "user": "Accepted; has no effect.",
}
"""Descriptions of the fields of chat completions. A test requires one for each field, and no other."""

TEXT_HELP = FIELD_HELP | {
    "logprobs": "Return the log-probability of each output token, and so many alternatives.",
    "max_tokens": "Longest output in tokens; 0 only computes the prompt, for `echo` and `prompt_logprobs`.",
}
"""Descriptions of the fields of text completions: those of chat completions, except for fields that differ."""

RESPONSES_HELP = {
    "chat_template_kwargs": "Variables for the chat template.",
    "include": "`message.output_text.logprobs` adds log-probabilities; no other value has an effect.",
    "input": "A string, or items: message, function_call, function_call_output, reasoning; text content only.",
    "instructions": "A system message before the input.",
    "max_output_tokens": "Longest output in tokens. Default: what fits.",
    "max_reasoning_tokens": "Most tokens of reasoning before the answer; 0 is none. Refused if its marks are unknown.",
    "metadata": "Up to 16 strings, which the answer repeats; no effect.",
    "n": "Only 1.",
    "parallel_tool_calls": "Whether an answer may have several function calls. Default: true.",
    "prompt_cache_key": "Accepted; has no effect: prompts share what they begin with.",
    "prompt_cache_retention": "Accepted; has no effect.",
    "reasoning": "`effort` is passed to the chat template; `summary` chooses how reasoning is returned.",
    "reasoning.effort": "As `reasoning_effort` of chat completions.",
    "reasoning.generate_summary": "Older name of `reasoning.summary`.",
    "reasoning.summary": "`auto`, `concise` or `detailed`: the whole reasoning is returned as `summary_text`, since no "
    "summary is written. Without it: as `reasoning_text`.",
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
    "top_logprobs": "Log-probabilities of the text's tokens, with so many alternatives (0 to 20) each.",
    "truncation": "Only `disabled`.",
    "user": "Accepted; has no effect.",
}
"""Descriptions of the fields of POST /v1/responses that chat completions lack or define differently."""

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
    "thinking": "Type `enabled` or `adaptive`: reasoning is shown as thinking blocks. Otherwise reasoning is turned "
    "off in the template, and none is shown.",
    "thinking.budget_tokens": "Most tokens of reasoning, less than `max_tokens`.",
    "thinking.display": "`omitted`: thinking blocks have a signature and no text.",
    "thinking.type": "`enabled` (with a budget), `adaptive` or `disabled`.",
    "tool_choice": "An object of type `auto`, `any`, `tool` (with a name) or `none`.",
    "tools": "Tools with a name and an `input_schema`. Anthropic's own tools are refused by name.",
}
"""Descriptions of the fields of POST /v1/messages that chat completions lack or define differently."""
