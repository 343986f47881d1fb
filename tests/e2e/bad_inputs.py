"""Bad inputs by family, each with the answer that a client gets: data for test_bad_inputs.py.

Of the family *state*, only requests that any running system refuses are here: those that meet a full queue, missing
workers, a drain or another request of the same id are in tests/unit/coordinator/http/test_bad_states.py. Bad input on
the *internal wire* (frames, keys, messages and hand-offs of strangers) is in tests/security/test_strangers.py,
tests/unit/common/worker/test_bad_messages.py and tests/property/test_wire.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests import leaked_keys

CHAT, TEXT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
KEY, ADMIN_KEY, CONTEXT = leaked_keys.new_key(), leaked_keys.new_key(), 512
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PROMPT: dict[str, Any] = {"prompt": "hi", "max_tokens": 2}
BODIES = {CHAT: HELLO, TEXT: PROMPT, TOKENIZE: {"prompt": "hi"}, DETOKENIZE: {}, RESPONSES: {"input": "hi"}}


@dataclass(frozen=True)
class Bad:
    """One request and its answer: status, ``error.type``, ``error.code`` and ``error.param``."""

    name: str
    path: str
    body: bytes
    code: str | None
    param: str | None = None
    status: int = 400
    type: str = "invalid_request_error"
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: {"Authorization": f"Bearer {KEY}"})


def _fields(path: str, code: str, param: str | None, **fields: Any) -> Bad:
    shown = ", ".join(f"{name}={str(value)[:64]}" for name, value in fields.items())
    return Bad(f"{path} {shown}", path, json.dumps(BODIES[path] | fields).encode(), code, param)


def _bytes() -> Iterator[Bad]:
    for name, body, code in (
        ("empty", b"", "invalid_json"),
        ("white space", b" \n", "invalid_json"),
        ("truncated", b'{"messages": [', "invalid_json"),
        ("UTF-16", '{"prompt": "x"}'.encode("utf-16"), "invalid_json"),
        ("Latin-1", '{"prompt": "ü"}'.encode("latin-1"), "invalid_json"),
        ("a byte order mark", b"\xef\xbb\xbf{}", "invalid_json"),
        ("NaN", b'{"prompt": "x", "temperature": NaN}', "invalid_json"),
        ("Infinity", b'{"prompt": "x", "temperature": Infinity}', "invalid_json"),
        ("a number beyond float64", b'{"prompt": "x", "temperature": 1e999}', "invalid_json"),
        ("half a surrogate pair", b'{"prompt": "\\ud800"}', "invalid_json"),
        ("a control character", b'{"prompt": "\x01"}', "invalid_json"),
        ("a trailing comma", b'{"prompt": "x",}', "invalid_json"),
        ("two objects", b"{}{}", "invalid_json"),
        ("a comment", b"{/**/}", "invalid_json"),
        ("deep nesting", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
        ("an array", b"[]", "invalid_type"),
        ("a string", b'"x"', "invalid_type"),
        ("null", b"null", "invalid_type"),
        ("a key twice", b'{"prompt": "x", "prompt": "y"}', "duplicate_key"),
        ("form data", b"prompt=x", "invalid_json"),
        ("pickle", b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00.", "invalid_json"),
    ):
        yield Bad(f"bytes: {name}", TEXT, body, code)
    many = b'{"prompt": [' + b"[]," * 200_000 + b"[]]}"
    yield Bad("bytes: too many arrays", TEXT, many, "invalid_value")
    large = b'{"prompt": "' + b"x" * (9 << 20) + b'"}'
    yield Bad("bytes: too large", TEXT, large, "request_too_large", status=413)
    packed = {"Authorization": f"Bearer {KEY}", "Content-Encoding": "gzip"}
    code = "unsupported_content_encoding"
    yield Bad("bytes: compressed", TEXT, b"\x1f\x8b\x08", code, status=415, headers=packed)


def _auth() -> Iterator[Bad]:
    for name, headers in (
        ("no key", {}),
        ("a wrong key", {"Authorization": "Bearer wrong"}),
        ("another scheme", {"Authorization": f"Basic {KEY}"}),
        ("the key alone", {"Authorization": KEY}),
        ("an empty key", {"Authorization": "Bearer "}),
        ("a beginning of the key", {"Authorization": f"Bearer {KEY[:-1]}"}),
        ("the key and more", {"Authorization": f"Bearer {KEY}x"}),
        ("odd bytes", {"Authorization": "Bearer \udcff\udcfe"}),
        ("two keys", {"Authorization": f"Bearer {KEY}", "x-api-key": "other"}),
    ):
        yield Bad(f"auth: {name}", CHAT, json.dumps(HELLO).encode(), "invalid_api_key", None, 401, headers=headers)
    for path in (
        TEXT,
        "/v1/models",
        "/tokenize",
        "/v1/tokenize/",
        "/v1/detokenize",
        "/docs",
        "/openapi.json",
        "/nothing",
    ):
        method = "GET" if path in ("/v1/models", "/docs", "/openapi.json") else "POST"
        yield Bad(f"auth: {path}", path, b"{}", "invalid_api_key", None, 401, method=method, headers={})
    yield Bad("auth: admin", "/admin/workers", b"", "insufficient_permissions", None, 403, method="GET")
    yield Bad("auth: admin/", "/admin/workers/", b"", "insufficient_permissions", None, 403, method="GET")


def _prompts() -> Iterator[Bad]:
    for path in (CHAT, TEXT, RESPONSES):
        body = json.dumps(BODIES[path] | {"model": "no-such-model"}).encode()
        yield Bad(f"prompt: the model of {path}", path, body, "model_not_found", "model", 404)
    yield _fields(CHAT, "invalid_type", "model", model=5)
    for messages, param, code in (
        (None, "messages", "missing_required_parameter"),
        ("hi", "messages", "invalid_type"),
        ({}, "messages", "invalid_type"),
        ([], "messages", "invalid_value"),
        ([None], "messages[0]", "invalid_type"),
        (["hi"], "messages[0]", "invalid_type"),
        ([{}], "messages[0].role", "missing_required_parameter"),
        ([{"role": "nobody", "content": "x"}], "messages[0].role", "invalid_value"),
        ([{"role": 1, "content": "x"}], "messages[0].role", "invalid_type"),
        ([{"role": "user"}], "messages[0].content", "missing_required_parameter"),
        ([{"role": "user", "content": None}], "messages[0].content", "missing_required_parameter"),
        ([{"role": "user", "content": 5}], "messages[0].content", "invalid_type"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]", "invalid_type"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text",
            "missing_required_parameter",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost/"}}]}],
            "messages[0].content[0].type",
            "unsupported",
        ),
        ([{"role": "user", "content": "x " * 5000}], "messages", "context_length_exceeded"),
        ([{"role": "user", "content": ""}] * 100_000, None, "invalid_value"),
    ):
        yield _fields(CHAT, code, param, messages=messages)
    for prompt, param, code in (
        (None, "prompt", "missing_required_parameter"),
        (5, "prompt", "invalid_type"),
        ({}, "prompt", "invalid_type"),
        ([], "prompt", "invalid_value"),
        ("", None, None),
        ([[]], "prompt[0]", "invalid_value"),
        ([-1], "prompt[0]", "invalid_value"),
        ([1 << 31], "prompt", "invalid_value"),
        ([1.5], "prompt[0]", "invalid_type"),
        ([True], "prompt[0]", "invalid_type"),
        (["a", 5], "prompt[1]", "invalid_type"),
        (["a"] * 65, "prompt", "invalid_value"),
        ([40] * (CONTEXT + 1), "prompt", "context_length_exceeded"),
    ):
        if code is not None:
            yield _fields(TEXT, code, param, prompt=prompt)
    yield _fields(CHAT, "invalid_value", "chat_template_kwargs.messages", chat_template_kwargs={"messages": []})
    yield _fields(CHAT, "unsupported", "chat_template", chat_template="{{ 7 * 7 }}")
    yield _fields(DETOKENIZE, "invalid_value", "tokens", tokens=[1 << 31])
    yield _fields(DETOKENIZE, "missing_required_parameter", "tokens")
    yield _fields(TOKENIZE, "invalid_type", "prompt", prompt=["x"])
    yield _fields(RESPONSES, "unsupported", "previous_response_id", previous_response_id="resp_1")


def _sampling() -> Iterator[Bad]:
    for name, low, high, kind in (
        ("temperature", -0.1, 2.1, "number"), ("top_p", -0.1, 1.1, "number"), ("min_p", -0.1, 1.1, "number"),
        ("frequency_penalty", -2.1, 2.1, "number"), ("presence_penalty", -2.1, 2.1, "number"),
        ("repetition_penalty", 0, 101, "number"), ("top_k", -2, 1 << 40, "integer"), ("n", 0, 17, "integer"),
        ("max_tokens", -2, 1 << 40, "integer"), ("min_tokens", -1, 3, "integer"),
        ("seed", -(1 << 64), 1 << 64, "integer"),
    ):  # fmt: skip
        for value in (low, high):
            yield _fields(TEXT, "invalid_value", name, **{name: value})
        for wrong in ("1", True):
            yield _fields(TEXT, "invalid_type", name, **{name: wrong})
        if kind == "integer":
            yield _fields(TEXT, "invalid_type", name, **{name: 1.5})
    for code, param, fields in (
        ("context_length_exceeded", "max_tokens", {"max_tokens": CONTEXT}),
        ("invalid_value", "min_tokens", {"min_tokens": 5, "max_tokens": 2}),
        ("invalid_value", "stop", {"stop": ["a"] * 17}),
        ("invalid_value", "stop", {"stop": ""}),
        ("invalid_type", "stop[0]", {"stop": [5]}),
        ("invalid_value", "stop_token_ids", {"stop_token_ids": [1 << 31]}),
        ("invalid_value", "logit_bias.x", {"logit_bias": {"x": 1}}),
        ("invalid_value", "logit_bias.1", {"logit_bias": {"1": 101}}),
        ("invalid_value", "logit_bias", {"logit_bias": {"4294967295": 1}}),
        ("invalid_value", "allowed_token_ids", {"allowed_token_ids": []}),
        ("invalid_value", "bad_words[0]", {"bad_words": [""]}),
        ("invalid_value", "truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
        ("invalid_type", "stream", {"stream": "yes"}),
        ("invalid_value", "stream_options", {"stream_options": {}}),
        ("unsupported", "best_of", {"best_of": 2}),
        ("unsupported", "suffix", {"suffix": "x"}),
        ("unsupported", "logits_processors", {"logits_processors": ["x"]}),
        ("unsupported", "use_beam_search", {"use_beam_search": True}),
        ("unsupported", "kv_transfer_params", {"kv_transfer_params": {}}),
        ("invalid_value", "cache_salt", {"cache_salt": ""}),
        ("invalid_value", "structured_outputs", {"structured_outputs": {}}),
        ("invalid_value", "structured_outputs.regex", {"structured_outputs": {"regex": "("}}),
        ("grammar_too_complex", "guided_json", {"guided_json": {"enum": ["x" * 50] * 10_000}}),
    ):
        yield _fields(TEXT, code, param, **fields)


def _state() -> Iterator[Bad]:
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    worker = json.dumps({"worker": "no-such-worker"}).encode()
    yield Bad("state: drain", "/admin/drain", worker, "not_found", "worker", 404, headers=admin)
    scale = json.dumps({"decode": 0}).encode()
    yield Bad("state: scale", "/admin/scale", scale, "invalid_value", "decode", headers=admin)
    yield Bad("state: a method", CHAT, b"", "method_not_allowed", None, 405, method="GET")
    yield Bad("state: embeddings", "/v1/embeddings", b"{}", "not_found", None, 404)
    yield Bad("state: a stored response", "/v1/responses/resp_1", b"", "not_found", "response_id", 404, method="GET")


BAD: tuple[Bad, ...] = (*_bytes(), *_auth(), *_prompts(), *_sampling(), *_state())
