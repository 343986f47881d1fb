"""About 1,800 HTTP requests as data: every field of the API with valid values, limits, and values beyond the limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.golden import other_apis
from tests.leaked_keys import register

CHAT, TEXT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
KEY, ADMIN_KEY = register("key-of-a-client"), register("key-of-an-admin")
PAGE = "https://page.example"
INT64 = 1 << 63
FAILURES = (
    "no_memory", "engine_error", "transfer_failed", "deadline", "too_long", "grammar_too_complex", "grammar_failed",
)  # fmt: skip
"""Error codes with which a worker fails a request for good."""
SILENT = {"colocated": {"delay_s": 60.0}}
"""Options of workers that never send a token."""


class Call(NamedTuple):
    """One HTTP request; ``server`` names one of :data:`SERVERS`."""

    name: str
    server: str
    method: str
    path: str
    headers: dict[str, str]
    body: bytes | None
    raw: bytes | None = None
    """The bytes of the whole request, if it is malformed."""
    later: bytes = b""
    """Bytes to send after ``raw``, once the server has sent a response head."""
    leaves: bool = False
    """Whether the client closes the connection after the first event of a stream."""


SERVERS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "colocated": (("colocated",), {}),
    "pair": (("prefill", "decode"), {"local_prefill": "never"}),
    "empty": ((), {}),
    "keys": (("colocated",), {"api_key": KEY, "admin_api_key": ADMIN_KEY}),
    "client key": ((), {"api_key": KEY}),
    "admin key": ((), {"admin_api_key": ADMIN_KEY}),
    "no prefill": (("decode",), {"no_prefill_policy": "reject"}),
    "small": (("colocated",), {"max_body_bytes": 2048, "max_model_len": 64, "max_queued_requests": 2}),
    "draining": (("colocated",), {"draining": True}),
    "slow": (("colocated",), {"slow": 60.0, "request_timeout": 2.0}),
    "full": (("colocated",), {"full": True}),
    "impatient": ((), {"client_timeout": 0.2}),
    "strict": (("colocated",), {"strict_params": True}),
    "origins": ((), {"allowed_origins": (PAGE,)}),
    "every origin": ((), {"allowed_origins": ("*",), "api_key": KEY}),
    "metrics for keys": ((), {"metrics_access": "key", "api_key": KEY}),
    "no template": ((), {"template": ""}),
    "refusing template": ((), {"template": "{{ raise_exception('roles must alternate') }}"}),
    **{f"fails: {code}": (("colocated",), {"fails": code}) for code in FAILURES},
    "fails for now": (("colocated",), {"fails": "engine_error", "retriable": True}),
    "forgetful template": ((), {"template": "{% for each in messages[1:] %}{{ each.content }}{% endfor %}"}),
    "smaller": ((), {"max_body_bytes": 400}),
    "indenting template": ((), {"template": "{{ tools | tojson(indent=4) }}"}),
    "small prefill": (
        ("prefill", "decode"),
        {"no_prefill_policy": "reject", "workers": {"prefill": {"changes": {"kv_blocks": 4}}}},
    ),
    "a handler fails": ((), {"trouble": "a handler fails"}),
    "a handler refuses": ((), {"trouble": "a handler refuses"}),
    "no ids": ((), {"trouble": "no request gets an id"}),
    "second token fails": (("colocated",), {"trouble": "the second token cannot be written"}),
    "end fails": (("colocated",), {"trouble": "no end can be written"}),
    "no memory": ((), {"trouble": "no memory for bodies"}),
    "full lanes": ((), {"trouble": "full lanes"}),
    "slow queue": (("colocated",), {"trouble": "a slow queue"}),
    "ended feed": ((), {"trouble": "the feed has ended"}),
    "full feed": ((), {"trouble": "no room for pages"}),
    "deadly": (("colocated",) * 3, {"trouble": "the busy worker dies", "workers": SILENT}),
    "broken lines": (("colocated",) * 2, {"trouble": "connections break", "workers": SILENT}),
    "leaving": (("colocated",), {"slow": 60.0}),
    "shrinking": (("prefill", "decode"), {"trouble": "a smaller decode worker", "slow": 60.0, "failure_timeout": 0.5}),
}
"""The workers and options of each server, as :func:`tests.golden.adapter.serve` takes them."""

# -- values of each field ---------------------------------------------------------------------------------------------

WRONG_FOR_ALL: tuple[Any, ...] = ({}, {"a": 1})


def integer(low: int, high: int, *more: Any) -> tuple[Any, ...]:
    return (None, low, low + 1, low - 1, high, high + 1, 2.0, 1.5, "2", True, [], *WRONG_FOR_ALL, *more)


def number(low: float, high: float, *more: Any) -> tuple[Any, ...]:
    outside = (round(low - 0.001, 6), round(high + 0.001, 6), 1e300)
    return (None, low, high, (low + high) / 2, 1, *outside, "0.5", False, [], *WRONG_FOR_ALL, *more)


def boolean(*more: Any) -> tuple[Any, ...]:
    return (None, True, False, 0, 1, "true", [], *WRONG_FOR_ALL, *more)


def text(*more: Any) -> tuple[Any, ...]:
    return (None, "x", "", "é🙂", 5, True, ["x"], *WRONG_FOR_ALL, *more)


def anything(*more: Any) -> tuple[Any, ...]:
    """Return values of a field that is ignored or not supported."""
    return (None, False, True, 1, "x", [], ["x"], *WRONG_FOR_ALL, *more)


BOTH: dict[str, tuple[Any, ...]] = {
    "model": text("tiny", "tiny ", "other", "x" * 1025),
    "max_tokens": integer(1, 2**31 - 1, 5, 100, 2048, 2049, INT64, -1),
    "temperature": number(0, 2, -1, "high"),
    "top_p": number(0, 1, 1e-12),
    "top_k": integer(-1, 2**31 - 1, 0, 20, 512, 10**6),
    "min_p": number(0, 1),
    "repetition_penalty": number(0.01, 100, 0, 1.1, -1),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "seed": integer(-INT64, INT64 - 1, 0, 1, -1, 7),
    "n": integer(1, 128, 0, 3, 129),
    "min_tokens": integer(0, 2**31 - 1, 2, 4, 5),
    "stop": text("zz", ["a", "b"], ["a", 1], [""], ["x"] * 16, ["x"] * 17, "x" * 1024, "x" * 1025, [None]),
    "stop_token_ids": ([], [1], [1, 2, 511], [512], [-1], [2**32 - 1], [2**32], [1.0], ["1"], [0] * 129, 1, "1", {}),
    "logit_bias": ({}, {"1": 1}, {"1": -100, "511": 100}, {"1": 100.5}, {"512": 1}, {"-1": 1}, {"x": 1}, {"1": "1"},
                   {"1": None}, {"99999999999": 1}, {"٣": 1}, [], "x", 1, None),
    "ignore_eos": boolean(),
    "skip_special_tokens": boolean(),
    "include_stop_str_in_output": boolean(),
    "return_token_ids": boolean(),
    "return_metrics": boolean(),
    "priority": integer(-(1 << 31), (1 << 31) - 1, -1, 0),
    "cache_salt": text("tenant", "x" * 1024, "x" * 1025),
    "stream": boolean(),
    "stream_options": (None, {}, {"include_usage": True}, {"include_usage": "x"}, {"continuous_usage_stats": True},
                       {"other": 1}, [], "x", 1, True),
    "user": text(),
    "suffix": anything(),
    "audio": anything(),
    "use_beam_search": anything(),
    "functions": anything(),
    "function_call": anything("auto"),
    "web_search_options": anything(),
    "kv_transfer_params": anything(),
    "bootstrap_room": (None, 1),
    "structured_outputs": anything(),
    "guided_json": (None, {}),
    "guided_choice": (None, ["a"]),
    "prompt_logprobs": (None, 0, 1, False),
    "modalities": (None, ["text"], ["text", "audio"], ["audio"], [], "text", 1),
    "response_format": (None, {}, {"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, {"type": 1}, 1),
    "allowed_token_ids": ([], [5], [5, 9.0], [512], [-1], ["5"], "x", 1, None),
    "bad_words": ([], ["a"], ["a", " b", "cd"], [1], [" "], ["x" * 257], ["x"] * 129, "x", None),
    "truncate_prompt_tokens": integer(1, 2**31 - 1, 2, -1),
    "add_special_tokens": boolean(),
    "logits_processors": anything(),
    "length_penalty": (None, 1, 1.0, 2, True),
    "spaces_between_special_tokens": boolean(),
    "an_unknown_field": anything(),
}  # fmt: skip
ONLY_CHAT: dict[str, tuple[Any, ...]] = {
    "max_completion_tokens": integer(1, 2**31 - 1, 5, 2049, -1),
    "logprobs": boolean(5),
    "top_logprobs": integer(0, 20, 5),
    "tool_choice": (None, "auto", "none", "required", {"type": "function", "function": {"name": "f"}}, "x", 1, []),
    "parallel_tool_calls": anything(),
    "chat_template_kwargs": (None, {}, {"enable_thinking": False}, {"a": {"b": [1]}}, {"messages": []}, {"tools": 1},
                             {"_x": 1}, {"chat_template": "x"}, [], "x", 1),
    "reasoning_effort": text("low", "high", "x" * 65),
    "add_generation_prompt": boolean(),
    "continue_final_message": boolean(),
    "tools": (
        None, [], [{}], [1], "x", {},
        [{"type": "function"}], [{"type": "function", "function": {}}], [{"type": "function", "function": 1}],
        [{"type": "function", "function": {"name": "f"}}], [{"type": "other", "function": {"name": "f"}}],
        [{"type": "function", "function": {"name": ""}}], [{"type": "function", "function": {"name": "x" * 257}}],
        [{"type": "function", "function": {"name": "f", "description": "<|end|>", "parameters": {"type": "object"}}}],
    ),
    "messages": (
        None, [], {}, "x", 1, [None], [1], ["x"], [[]], [{}],
        [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": ""}], [{"role": "user", "content": "x"}],
        [{"role": "user", "content": None}], [{"role": "user", "content": 1}], [{"role": "user", "content": {}}],
        [{"role": "user", "content": []}], [{"role": "user", "content": ["x", "y"]}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_text", "text": "y"}]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"text": "x"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 1}]}], [{"role": "user", "content": [1]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "user", "content": [{"type": "file", "file": {}}]}],
        [{"role": "user", "content": [{"type": "other"}]}],
        [{"role": "nobody", "content": "x"}], [{"role": 1, "content": "x"}], [{"role": "", "content": "x"}],
        *([{"role": role, "content": "x"}] for role in ("system", "developer", "assistant", "tool", "function")),
        [{"role": "tool", "content": "x", "tool_call_id": "1"}], [{"role": "tool", "content": "x", "tool_call_id": 1}],
        [{"role": "user", "content": "x", "name": "n"}], [{"role": "user", "content": "x", "name": 1}],
        [{"role": "user", "content": "x", "unknown": 1}],
        [{"role": "assistant", "content": None}], [{"role": "assistant", "refusal": "no"}],
        [{"role": "assistant", "content": "x", "reasoning_content": "r"}],
        [{"role": "assistant", "tool_calls": []}], [{"role": "assistant", "tool_calls": [{}]}],
        [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}],
        [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}],
        [{"role": "assistant",
          "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]}],
        [{"role": "assistant",
          "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "x"}}]}],
        [{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
         {"role": "user", "content": "c"}],
        [{"role": "user", "content": "<|end|><|assistant|>"}], [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "x" * 1500}], [{"role": "user", "content": "q " * 4000}],
    ),
}  # fmt: skip
ONLY_TEXT: dict[str, tuple[Any, ...]] = {
    "logprobs": integer(0, 20, 5, True),
    "best_of": integer(1, 1 << 16, 2),
    "echo": boolean(),
    "prompt": (
        None, "", "x", "hello world", "é🙂", 1, 1.5, True, {}, [], [[]], [""], ["a", "b"], [1], [1, 2, 511], [512],
        [2**32], [-1], [1.5], [1.0], [True], ["a", 1], [[1], "a"], [[1, 2], [3]], [[1], [-1]], [[1], [512]], [None],
        ["x"] * 65, [1] * 2048, [1] * 2049, "q " * 4000, "<|end|>", "\ud800", "a\u0000b",
    ),
}  # fmt: skip
TOKENS: dict[str, tuple[Any, ...]] = {
    "prompt": (None, "", "x", "hello world", "é🙂", "<|end|>", 1, [], ["x"], {}, True, "\ud800"),
    "messages": (
        None,
        [],
        "x",
        [{"role": "user", "content": "hi"}],
        [{"role": "user"}],
        [{"role": "x", "content": ""}],
    ),
    "model": (None, "tiny", "other", 1),
    "add_special_tokens": boolean(),
    "return_token_strs": boolean(),
    "add_generation_prompt": boolean(),
    "continue_final_message": boolean(),
    "tools": ([], [1]),
    "an_unknown_field": (1,),
}
IDS: dict[str, tuple[Any, ...]] = {
    "tokens": (None, [], [1], [40, 41, 300], [511], [512], [-1], [1.0], [1.5], ["1"], [True], "x", 1, {}, [2**70]),
    "model": (None, "tiny", "other", 1),
    "an_unknown_field": (1,),
}  # fmt: skip
SOME_CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
SOME_TEXT = {"prompt": "hello", "max_tokens": 3}
SOME_BODIES = {CHAT: SOME_CHAT, TEXT: SOME_TEXT}

TOGETHER: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
    (CHAT, {"logprobs": False, "top_logprobs": 2}),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 2}),
    (CHAT, {"max_tokens": 3, "min_tokens": 4}),
    (CHAT, {"n": 3, "logprobs": True}),
    (CHAT, {"continue_final_message": True, "messages": [{"role": "assistant", "content": "so"}]}),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}),
    (CHAT, {"add_generation_prompt": False, "return_token_ids": True}),
    (CHAT, {"tool_choice": "none", "tools": [{"type": "function", "function": {"name": "f"}}]}),
    (CHAT, {"ignore_eos": True, "max_tokens": 20}),
    (CHAT, {"max_tokens": 20, "return_token_ids": True, "skip_special_tokens": False}),
    (CHAT, {"max_tokens": 20, "min_tokens": 12, "return_token_ids": True}),
    (CHAT, {"max_tokens": 20, "stop_token_ids": list(range(100, 140)), "return_token_ids": True}),
    (CHAT, {"temperature": 0, "top_p": 0, "top_k": -1, "seed": 7, "frequency_penalty": 1, "presence_penalty": -1}),
    (CHAT, {"kv_transfer_params": {}, "temperature": 9}),
    (CHAT, {"a": 1, "b": 2, "cé": 3, "d" * 2000: 4}),
    (TEXT, {"echo": True, "logprobs": 1}),
    (TEXT, {"echo": True, "logprobs": 2, "max_tokens": 0, "prompt": [40, 41, 300], "n": 2}),
    (TEXT, {"max_tokens": 0, "prompt_logprobs": 1}),
    (TEXT, {"prompt": ["x" * 100] * 64, "n": 16, "prompt_logprobs": 20}),
    (TEXT, {"echo": True, "prompt_logprobs": 0, "prompt": [[40], [41, 42]], "return_token_ids": True}),
    (CHAT, {"prompt_logprobs": 2, "n": 2}),
    (TEXT, {"echo": True, "n": 2, "prompt": ["a", [40, 41]]}),
    (TEXT, {"n": 2, "best_of": 2}),
    (TEXT, {"n": 2, "best_of": 3}),
    (TEXT, {"prompt": ["one", "two three"], "n": 2, "logprobs": 2, "return_token_ids": True}),
    (TEXT, {"max_tokens": 2047, "prompt": [1, 2]}),
    (TEXT, {"max_tokens": 2046, "prompt": [40, 41], "min_tokens": 2047}),
    (TEXT, {"max_tokens": 20, "stop": ["e", "a", "i", "o"]}),
    (TEXT, {"max_tokens": 20, "stop": ["e", "a", "i", "o"], "include_stop_str_in_output": True}),
    (TEXT, {"max_tokens": 20, "stop": ["e", "a", "i", "o"], "min_tokens": 9}),
    (TEXT, {"max_tokens": 20}),
    (TEXT, {"max_tokens": 20, "max_completion_tokens": 2}),
    (TEXT, {"max_tokens": None}),
    (TEXT, {"max_tokens": -1, "prompt": [40] * 2040}),
    (TEXT, {"max_tokens": None, "prompt": [40] * 2040}),
    (TEXT, {"truncate_prompt_tokens": -1, "prompt": [40] * 2100, "echo": True}),
    (TEXT, {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1}),
    (TEXT, {"bad_words": ["\N{MUSICAL SYMBOL G CLEF}" * 256]}),
    (TEXT, {"logit_bias": {str(token): 1 for token in range(512)}}),
)
_F: Any = {"type": "function", "function": {"name": "f"}}
_G: Any = {"type": "function", "name": "g", "description": "flat", "parameters": {"type": "object"}}
TOOLS: tuple[dict[str, Any], ...] = (
    {"tools": [_F, _G]},
    {"tools": [_F, {**_G, "strict": True}]},
    {"tools": [_F, _F]},
    {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
    {"tools": [{"type": "function"}]},
    {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
    {"tools": [{"type": "function", "function": {"name": "mcp.weather/now:v1"}}]},
    {"tools": [{"type": "function", "function": {"name": "say \"now\""}}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
    *({"tools": [_F, _G], "tool_choice": choice} for choice in (
        "auto", "none", "required", {}, {"type": "custom"}, {"type": "function"}, {"type": "function", "name": "f"},
        {"type": "function", "function": {}}, {"type": "function", "function": {"name": "h"}},
        {"type": "allowed_tools", "mode": "auto", "tools": [_F]}, {"type": "allowed_tools", "mode": "auto"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [_G]}}, {"type": "allowed_tools"},
        {"type": "allowed_tools", "mode": "auto", "tools": ["f"]},
        {"type": "allowed_tools", "mode": "required", "tools": [_F]},
    )),
    {"tools": [_F], "parallel_tool_calls": False},
    *({"functions": functions, "function_call": choice} for functions, choice in (
        ([_F["function"]], None), ([_F["function"]], "none"), ([_F["function"]], {"name": "f"}),
        ([_F["function"]], {"name": "h"}), ([_F["function"]], {}), ([_F["function"]], "required"),
        ([_F["function"], _F["function"]], None), (["f"], None),
    )),
    {"functions": [_F["function"]], "tools": [_F]},
    {"documents": [{"title": "t", "text": "x"}]},
    {"documents": ["x"]},
    {"max_reasoning_tokens": 5},
    {"thinking_token_budget": 5},
    {"thinking": {"type": "enabled", "budget_tokens": 5}},
    {"thinking": {"type": "disabled", "keep": "all"}},
    {"enable_thinking": True},
    {"include_reasoning": False},
    {"reasoning_effort": "none"},
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "reasoning": "r", "content": None}]},
    {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
    {"messages": [{"role": "user", "content": "x", "function_call": {"name": "f"}}]},
)  # fmt: skip
"""Fields about tools and reasoning."""
STRUCTURED: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_object"}, "guided_regex": "a"},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 1}}},
    {"structured_outputs": {"regex": "a", "other": 1}},
    {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"choice": [1]}},
    {"structured_outputs": {"structural_tag": 1}},
)
"""Constraints that are malformed."""
USAGE = {"include_usage": True}
STREAMED: tuple[dict[str, Any], ...] = (
    {},
    {"stream_options": USAGE},
    {"stream_options": USAGE | {"continuous_usage_stats": True}},
    {"return_token_ids": True},
    {"return_metrics": True},
    {"return_metrics": True, "stream_options": USAGE},
)
"""Fields to vary in streaming requests."""

BODIES: dict[str, bytes] = {
    "empty": b"",
    "blank": b"  ",
    "null": b"null",
    "number": b"5",
    "string": b'"x"',
    "array": b"[]",
    "object": b"{}",
    "cut": b'{"messages": [',
    "text after it": b"{} x",
    "single quotes": b"{'a': 1}",
    "trailing comma": b'{"a": 1,}',
    "comment": b"{} // x",
    "NaN": b'{"temperature": NaN}',
    "Infinity": b'{"temperature": Infinity}',
    "1e400": b'{"temperature": 1e400}',
    "long number": b'{"seed": ' + b"9" * 5000 + b"}",
    "twice": b'{"model": "tiny", "model": "other"}',
    "no UTF-8": b'{"prompt": "\xff"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "BOM": b'\xef\xbb\xbf{"prompt": "x"}',
    "NUL": b'{"prompt": "\x00"}',
    "half a surrogate": b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\udc00"}]}',
    "deep": b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    "form": b"prompt=x&max_tokens=1",
    "binary": bytes(range(256)),
}
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")
PATHS = (
    "/", CHAT, TEXT, TOKENIZE, DETOKENIZE, "/v1/models", "/v1/models/tiny", "/v1/models/other", "/health", "/ready",
    "/version", "/admin/workers", "/admin/drain", "/admin/scale", "/v1", "/v1/", "/v1/embeddings", "/v1/audio/speech",
    "/v1/responses", "/admin", "/nothing", "/v1/chat/completions/", "//v1/models", "/v1/models/", "/v1/../v1/models",
    "/%2e%2e/etc/passwd", "/v1/models/%00", "/v1/models/a/b", "/health?x=1", "/" + "x" * 9000, "/metrics?",
    "/favicon.ico", "/robots.txt", "/ui/nothing", "/ui/%2e%2e/openapi.json",
)  # fmt: skip
KEYS: dict[str, dict[str, str]] = {
    "none": {},
    "client": {"Authorization": f"Bearer {KEY}"},
    "admin": {"Authorization": f"Bearer {ADMIN_KEY}"},
    "wrong": {"Authorization": "Bearer wrong"},
    "empty": {"Authorization": "Bearer "},
    "basic": {"Authorization": f"Basic {KEY}"},
    "lower case": {"Authorization": f"bearer {KEY}"},
    "bare": {"Authorization": KEY},
    "x-api-key": {"x-api-key": KEY},
    "wrong x-api-key": {"x-api-key": "wrong"},
    "the same twice": {"Authorization": f"Bearer {KEY}", "x-api-key": KEY},
    "two that differ": {"Authorization": f"Bearer {KEY}", "x-api-key": "wrong"},
}
SITES: dict[str, dict[str, str]] = {
    "localhost": {"Host": "localhost:8000"},
    "IPv6": {"Host": "[::1]:8000"},
    "another host": {"Host": "example.com"},
    "no host": {"Host": ""},
    "malformed host": {"Host": "[::1"},
    "own origin": {"Origin": "http://localhost:3000"},
    "foreign origin": {"Origin": "https://example.com"},
    "null origin": {"Origin": "null"},
    "preflight": {"Origin": "https://example.com", "Access-Control-Request-Method": "POST"},
}
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
PAGES: dict[str, dict[str, str]] = {
    "no page": {},
    "an allowed page": {"Origin": PAGE},
    "an allowed page, preflight": {"Origin": PAGE, **PREFLIGHT},
    "its other port": {"Origin": f"{PAGE}:444"},
    "another page": {"Origin": "https://example.com"},
    "another page, preflight": {"Origin": "https://example.com", **PREFLIGHT},
    "a page of no origin": {"Origin": "null"},
}
RAW: dict[str, bytes] = {
    "no version": b"GET /health\r\n\r\n",
    "HTTP/1.0": b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n",
    "HTTP/1.0 error": b"GET /nothing HTTP/1.0\r\nHost: localhost\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n",
    "binary": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "bad method": b"G@T /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "bad length": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
    "two lengths": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "length and chunks": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "control character": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: a\x01b\r\nConnection: close\r\n\r\n",
    "space before the colon": b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n",
    "chunks": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    b'f\r\n{"prompt": "x"}\r\n0\r\n\r\n',
    "bad chunk": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "long header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"x" * 20_000 + b"\r\n\r\n",
    "expect": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 15\r\n"
    b'Connection: close\r\n\r\n{"prompt": "x"}',
    "strange expectation": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nExpect: a miracle\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n",
    "99 GB": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99000000000\r\n\r\n{",
    "two at once": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /ready HTTP/1.1\r\nHost: localhost\r\n"
    b"Connection: close\r\n\r\n",
}


# -- all of them ------------------------------------------------------------------------------------------------------


def _post(name: str, server: str, path: str, body: Any, headers: dict[str, str] | None = None) -> Call:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Call(name, server, "POST", path, {"Content-Type": "application/json", **(headers or {})}, data)


def _shown(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"))
    return text if len(text) <= 60 else f"{text[:50]}..{len(text)}"


def _fields(path: str, base: dict[str, Any], table: dict[str, tuple[Any, ...]]) -> Iterator[Call]:
    for name, values in table.items():
        for value in values:
            yield _post(f"{path} {name}={_shown(value)}", "colocated", path, base | {name: value})


def _generating() -> Iterator[Call]:
    yield from _fields(CHAT, SOME_CHAT, ONLY_CHAT | BOTH)
    # fields of both APIs are parsed by the same code, so for completions a part of their values is enough
    yield from _fields(TEXT, SOME_TEXT, ONLY_TEXT | {name: values[:6] for name, values in BOTH.items()})
    for path, extra in TOGETHER:
        for stream in (False, True):
            body = SOME_BODIES[path] | extra | {"stream": stream}
            yield _post(f"{path} together {_shown(extra)} stream={stream}", "colocated", path, body)
    for server in ("colocated", "pair"):
        for path, base in SOME_BODIES.items():
            for options in STREAMED:
                yield _post(
                    f"{server} {path} streamed {_shown(options)}", server, path, base | options | {"stream": True}
                )
            for extra in (
                {"n": 2},
                {"return_metrics": True},
                {"max_tokens": 1},
                {"max_tokens": 20},
                {"cache_salt": "s"},
            ):
                yield _post(f"{server} {path} whole {_shown(extra)}", server, path, base | extra)
    for stream in (False, True):
        yield _post(f"slow {CHAT} stream={stream}", "slow", CHAT, SOME_CHAT | {"stream": stream})
    for server in ("empty", "no prefill", "draining", "full", *(name for name in SERVERS if name.startswith("fails"))):
        for path, base in SOME_BODIES.items():
            for stream in (False, True):
                yield _post(f"{server} {path} stream={stream}", server, path, base | {"stream": stream})


LONGER_THAN_THE_CONTEXT = {
    CHAT: {"messages": [{"role": "user", "content": "x" * 100_000}]},
    TEXT: {"prompt": "x" * 100_000},
    TOKENIZE: {"prompt": "x" * 100_000},
    DETOKENIZE: {"tokens": [40] * 10_000},
}


def _others() -> Iterator[Call]:
    yield from _fields(TOKENIZE, {"prompt": "hello"}, TOKENS)
    yield from _fields(DETOKENIZE, {"tokens": [40, 41]}, IDS)
    for path in (CHAT, TEXT, TOKENIZE, DETOKENIZE):
        for name, body in BODIES.items():
            yield _post(f"{path} body: {name}", "colocated", path, body)
    for path, body in LONGER_THAN_THE_CONTEXT.items():
        yield _post(f"{path} of more than the context can hold", "colocated", path, body)
    for path in PATHS:
        shown = path if len(path) < 60 else f"{path[:20]}..{len(path)}"
        for method in METHODS if path in ("/", CHAT, "/v1/models", "/health", "/admin/drain") else ("GET", "POST"):
            body = b"{}" if method in ("POST", "PUT", "PATCH") else None
            yield Call(f"{method} {shown}", "colocated", method, path, {}, body)
    for query in ("", "?limit=1", "?limit=0", "?limit=201", "?limit=x", "?limit="):
        yield Call(f"GET /admin/requests{query}", "empty", "GET", f"/admin/requests{query}", {}, None)
    yield Call("GET /admin/requests/nothing", "empty", "GET", "/admin/requests/nothing", {}, None)
    for server in ("ended feed", "full feed"):
        yield Call(f"{server}: GET /admin/events", server, "GET", "/admin/events", {}, None)
    for path in ("/ready", "/health", "/admin/workers", "/v1/models"):
        for server in ("empty", "pair", "no prefill", "draining"):
            yield Call(f"{server} GET {path}", server, "GET", path, {}, None)
    for body in ({}, {"worker": "nobody"}, {"worker": 1}, {"worker": "nobody", "timeout": -1}, {"worker": "x" * 999}):
        yield _post(f"/admin/drain {_shown(body)}", "colocated", "/admin/drain", body)
    for body in ({}, {"decode": 1}, {"decode": 0}, {"prefill": -1}, {"prefill": "x"}, {"decode": 10**6}):
        yield _post(f"/admin/scale {_shown(body)}", "colocated", "/admin/scale", body)


def _guarded() -> Iterator[Call]:
    calls = (("GET", "/health"), ("GET", "/ready"), ("GET", "/v1/models"), ("GET", "/metrics"), ("POST", TOKENIZE),
             ("GET", "/admin/workers"), ("GET", "/nothing"), ("GET", "/"), ("GET", "/ui/nothing"))  # fmt: skip
    for server in ("keys", "client key", "admin key"):
        for name, headers in KEYS.items():
            for method, path in calls:
                if path == "/metrics" and name in ("none", "client", "admin"):
                    continue  # the page is frozen in another part; here only its access control
                body = b'{"prompt": "x"}' if method == "POST" else None
                yield Call(f"{server}: {method} {path} with {name}", server, method, path, headers, body)
    for server in ("colocated", "admin key", "client key"):
        for name, headers in SITES.items():
            for method in ("GET", "OPTIONS"):
                yield Call(f"{server}: {method} /v1/models from {name}", server, method, "/v1/models", headers, None)
            yield Call(f"{server}: GET /health from {name}", server, "GET", "/health", headers, None)
    for server in ("origins", "every origin"):
        for name, headers in PAGES.items():
            with_key = headers | KEYS["client"]
            for method in ("GET", "POST", "OPTIONS") if "preflight" not in name else ("OPTIONS",):
                yield Call(f"{server}: {method} from {name}", server, method, "/v1/models", with_key, None)
        yield Call(f"{server}: an error for a page", server, "GET", "/nothing", PAGES["an allowed page"], None)
    for name in ("none", "wrong"):
        yield Call(f"metrics for keys: with {name}", "metrics for keys", "GET", "/metrics", KEYS[name], None)
    for server in ("no template", "refusing template"):
        yield _post(f"{server}: a chat", server, CHAT, SOME_CHAT)
        yield _post(f"{server}: /tokenize of a chat", server, TOKENIZE, {"messages": SOME_CHAT["messages"]})
    for name, headers in (
        ("gzip", {"Content-Encoding": "gzip"}),
        ("identity", {"Content-Encoding": "identity"}),
        ("an id", {"X-Request-Id": "mine-1"}),
        ("a strange id", {"X-Request-Id": "no good id"}),
        ("text/plain", {"Content-Type": "text/plain"}),
        ("no type", {"Content-Type": ""}),
        ("accepts HTML", {"Accept": "text/html"}),
    ):
        yield _post(f"{TEXT} with {name}", "colocated", TEXT, SOME_TEXT, headers)
    yield Call("GET / as a page", "colocated", "GET", "/", {"Accept": "text/html"}, None)
    late = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
    yield Call("impatient: half a body", "impatient", "GET", "", {}, None, late)
    for name, data in RAW.items():
        yield Call(f"raw: {name}", "colocated", "GET", "", {}, None, data)
    yield _post("small: a body of 3 KB", "small", TEXT, {"prompt": "x" * 3000})
    yield _post("small: beyond the context", "small", TEXT, {"prompt": "q " * 100, "max_tokens": 1})
    yield _post("small: answers that do not fit", "small", TEXT, {"prompt": "q", "max_tokens": 64})
    yield _post("small: more prompts than may wait", "small", TEXT, {"prompt": ["a", "b", "c"], "max_tokens": 1})
    yield _post("small: an open-ended answer", "small", CHAT, {"messages": SOME_CHAT["messages"]})


def _refused() -> Iterator[Call]:
    """Yield requests that reach the refusals which the tables above do not; see :mod:`tests.golden.refusals`."""
    deep: Any = "x"
    for _ in range(70):
        deep = [deep]
    part, call = {"role": "user", "content": ["x"] * 16_385}, {"type": "function", "function": {"arguments": "{}"}}
    for name, path, body in (
        ("70 levels", TEXT, SOME_TEXT | {"prompt": deep}),
        ("131,073 strings", TEXT, {"prompt": [""] * 131_073}),
        ("131,073 arrays", TEXT, {"prompt": [[]] * 131_073}),
        ("4,097 biases", TEXT, SOME_TEXT | {"logit_bias": {str(token): 1 for token in range(4_097)}}),
        ("16,385 parts", CHAT, SOME_CHAT | {"messages": [part]}),
        ("a tool call that is none", CHAT, SOME_CHAT | {"messages": [{"role": "assistant", "tool_calls": [1]}]}),
        ("a tool call without a name", CHAT, SOME_CHAT | {"messages": [{"role": "assistant", "tool_calls": [call]}]}),
        ("more blocks than there are", TEXT, SOME_TEXT | {"n": 16, "max_tokens": 300}),
        ("too many log-probabilities", TEXT, {"prompt": [[9]] * 64, "n": 16, "logprobs": 20, "max_tokens": 200}),
        ("a long text of too many tokens", TEXT, {"prompt": "q " * 8_500}),
    ):
        yield _post(f"{path} {name}", "colocated", path, body)
    for body in TOOLS + STRUCTURED:
        shown = json.dumps(body, separators=(",", ":"))[1:-1]
        yield _post(f"{CHAT} {shown}", "colocated", CHAT, SOME_CHAT | body)
    for name, path, body in other_apis.bodies():
        yield _post(name, "colocated", path, body)
    for method, path in (
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/resp_1/input_items"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", other_apis.MESSAGES),
        ("POST", f"{other_apis.MESSAGES}/batches"),
    ):
        yield Call(f"{method} {path}", "colocated", method, path, {}, None)
    for path in (other_apis.RESPONSES, other_apis.MESSAGES, other_apis.COUNT):
        yield _post(f"no key: {path}", "keys", path, other_apis.LEAST_OF[path])
        headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
        yield _post(f"a key: {path}", "keys", path, other_apis.LEAST_OF[path])._replace(headers=headers)
        yield _post(f"draining: {path}", "draining", path, other_apis.LEAST_OF[path])
        yield _post(f"empty: {path}", "empty", path, other_apis.LEAST_OF[path])
    strict = SOME_BODIES | {path: other_apis.LEAST_OF[path] for path in (other_apis.RESPONSES, other_apis.MESSAGES)}
    for path, body in strict.items():
        yield _post(f"strict {path}", "strict", path, body)
        yield _post(f"strict {path} foo", "strict", path, {**body, "foo": 1})
    for path in (other_apis.RESPONSES, other_apis.MESSAGES):
        for stream in (False, True):
            body = {**other_apis.LEAST_OF[path], "stream": stream}
            yield _post(f"slow {path} stream={stream}", "slow", path, body)
            yield _post(f"second token fails {path} stream={stream}", "second token fails", path, body)
    yield _post("small: an echo that is too long", "small", TEXT, {"prompt": "x" * 500, "echo": True, "n": 5})
    yield _post("smaller: a long text of few ids", "smaller", DETOKENIZE, {"tokens": [4] * 60})
    start = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
    chunked = start + b"Transfer-Encoding: chunked\r\n"
    chunks = b"bb8\r\n" + b"x" * 3000 + b"\r\n0\r\n\r\n"
    yield Call("small: chunks of 3 KB", "small", "POST", "", {}, None, chunked + b"Connection: close\r\n\r\n" + chunks)
    heads = b"".join(b"X-%d: %s\r\n" % (number, b"x" * 15_000) for number in range(5))
    yield Call("raw: a long head", "colocated", "GET", "", {}, None, start + heads + b"\r\n")
    expecting = chunked + b"Expect: 100-continue\r\n\r\n"
    yield Call("raw: a bad chunk later", "colocated", "POST", "", {}, None, expecting, b"zz\r\n")
    last = {"role": "assistant", "content": "so"}
    continued = {"messages": [last], "continue_final_message": True}
    yield _post("forgetful template: a message to continue", "forgetful template", CHAT, continued)
    numbers: Any = [1] * 2_000
    for _ in range(50):
        numbers = [numbers]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": numbers}}}]
    yield _post("indenting template: deep numbers", "indenting template", CHAT, SOME_CHAT | {"tools": tools})
    for stream in (False, True):
        for server in ("second token fails", "end fails", "slow queue", "broken lines"):
            yield _post(f"{server} {CHAT} stream={stream}", server, CHAT, SOME_CHAT | {"stream": stream})
        body = {"prompt": [50] * 80, "max_tokens": 3, "stream": stream}
        yield _post(f"small prefill {TEXT} stream={stream}", "small prefill", TEXT, body)
    yield _post(f"deadly {CHAT}", "deadly", CHAT, SOME_CHAT)
    long = {"prompt": [50] * 16, "max_tokens": 300, "ignore_eos": True, "stream": True}
    yield _post(f"shrinking {TEXT}", "shrinking", TEXT, long)
    leaves = _post(f"leaving {CHAT}", "leaving", CHAT, SOME_CHAT | {"stream": True})
    yield leaves._replace(leaves=True)
    for server in ("a handler fails", "a handler refuses", "no ids", "full lanes"):
        yield _post(f"{server}: {TOKENIZE}", server, TOKENIZE, {"prompt": "q" * 20_000})
    half = start + b"Content-Length: 99\r\n\r\n{"
    yield Call("no memory: half a body", "no memory", "POST", "", {}, None, half)
    yield _post("no memory: a body of 20 KB", "no memory", TOKENIZE, {"prompt": "q" * 20_000})


def calls() -> list[Call]:
    found = [*_generating(), *_others(), *_guarded(), *_refused()]
    found.sort(key=lambda call: list(SERVERS).index(call.server))  # a stable sort that groups the requests by server
    by_name: dict[str, Call] = {}
    for call in found:
        assert by_name.setdefault(call.name, call) == call, call.name
    return list(by_name.values())
