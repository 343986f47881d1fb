"""Bodies of the OpenAI endpoints: which are accepted, and how the others are refused."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.errors import RequestError
from common.core.request import MAX_CHOICES
from coordinator.api.chat_messages import MAX_ENTRIES, MAX_MESSAGES
from coordinator.api.fields import MAX_CONTAINERS, MAX_STRINGS, parse_json
from coordinator.api.openai import MAX_BIASES, MAX_PROMPTS, parse_chat, parse_completion

MESSAGES = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> Any:
    return parse_chat(parse_json(json.dumps({"messages": MESSAGES, **fields}).encode()))


def completion(**fields: Any) -> Any:
    return parse_completion(parse_json(json.dumps({"prompt": "hello", **fields}).encode()))


def refusal(call: Callable[[], Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call()
    assert caught.value.status == 400 and caught.value.message
    return caught.value


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"1",
        b"{'a': 1}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": "\\ud800"}',
        b'{"a": "\\udc00 \\ud800"}',
        b'{"a": "\xff"}',
        b'\xef\xbb\xbf{"a": 1}',
        '{"a": 1}'.encode("utf-16"),
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": 1, "b": 1}}',
        b'{"a": 1} x',
        b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b"\x80\x04\x95",
    ],
)
def test_parse_json_rejects_all_but_objects(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_json(body)
    assert caught.value.status == 400


_KEYS = st.sampled_from(["a", "b", "a:b", ":", '"', "\u00e9"])
_JSON = st.recursive(
    st.none() | st.integers(-3, 3) | st.sampled_from(["", ":", "a:b:c"]),
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(_KEYS, inner), max_size=3).map(tuple),
    max_leaves=8,
)
"""JSON values; an object is a tuple of its members, so that a key may occur twice."""


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return "{" + ", ".join(f"{json.dumps(key)} : {_written(inner)}" for key, inner in value) + "}"
    return "[" + ",".join(map(_written, value)) + "]" if isinstance(value, list) else json.dumps(value)


def _repeats(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(dict(value)) != len(value) or any(_repeats(inner) for _, inner in value)
    return isinstance(value, list) and any(map(_repeats, value))


@given(st.lists(st.tuples(_KEYS, _JSON), max_size=4).map(tuple))
def test_a_key_that_is_there_twice_is_found_at_any_depth_beside_any_colons(body: Any) -> None:
    written = _written(body)
    if _repeats(body):
        assert refusal(lambda: parse_json(written.encode())).code == "duplicate_key"
    else:
        assert parse_json(written.encode()) == json.loads(written)


def test_ordinary_unicode_passes() -> None:
    assert parse_json('{"a": "héllo \\ud83d\\ude00 🙂\\u0000"}'.encode()) == {"a": "héllo 😀 🙂\0"}


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(body: bytes) -> None:
    with contextlib.suppress(RequestError):
        parse_json(body)


# -- fields -----------------------------------------------------------------------------------------------------------


def test_null_is_absent() -> None:
    names = [
        "model",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "frequency_penalty",
        "presence_penalty",
        "response_format",
        "tools",
        "tool_choice",
        "user",
        "top_k",
        "min_p",
        "repetition_penalty",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "chat_template_kwargs",
        "continue_final_message",
        "add_generation_prompt",
        "priority",
        "cache_salt",
        "return_token_ids",
        "kv_transfer_params",
        "audio",
        "best_of",
        "suffix",
        "unknown_thing",
    ]
    body = chat(**dict.fromkeys(names))
    assert body == chat()
    assert body.options.ignored == ()


def test_defaults() -> None:
    options = chat().options
    assert (options.n, options.stream, options.sampling.max_tokens, options.sampling.logprobs) == (1, False, None, None)
    assert options.sampling.temperature is None, "the model's own default counts"
    assert completion().options.sampling.max_tokens is None
    assert completion().options.sampling.default_tokens == 16
    assert completion(max_tokens=-1).options.sampling == chat().options.sampling, "as many as fit"
    assert chat(max_tokens=5, max_completion_tokens=-1).options.sampling.max_tokens is None
    assert chat().options.truncate_prompt is None and chat(truncate_prompt_tokens=-1).options.truncate_prompt == 0


def test_every_sampling_field_arrives() -> None:
    sampling = chat(
        temperature=0.5, top_p=0, top_k=-1, min_p=0.1, repetition_penalty=1.2, frequency_penalty=-1, presence_penalty=2,
        logit_bias={"5": -100, "7": 1.5}, min_tokens=2, max_tokens=9, seed=-3, stop_token_ids=[4, 5.0], ignore_eos=True,
        logprobs=True, top_logprobs=3,
    ).options.sampling  # fmt: skip
    assert sampling.temperature == 0.5 and 0 < sampling.top_p < 1e-6 and sampling.top_k == 0
    assert sampling.logit_bias == {5: -100.0, 7: 1.5} and sampling.stop_token_ids == (4, 5)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens, sampling.logprobs) == (-3, 9, 2, 3)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-45}, "repetition_penalty"),
        ({"repetition_penalty": 101}, "repetition_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"n": 0}, "n"),
        ({"n": MAX_CHOICES + 1}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": 5}, "allowed_token_ids"),
        ({"allowed_token_ids": [3, -1]}, "allowed_token_ids[1]"),
        ({"allowed_token_ids": ["3"]}, "allowed_token_ids[0]"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": ["word", 5]}, "bad_words[1]"),
        ({"bad_words": [" "]}, "bad_words[0]"),
        ({"bad_words": ["x" * 257]}, "bad_words[0]"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1e300}, "max_tokens"),
        ({"min_tokens": 10, "max_tokens": 5}, "min_tokens"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stop": ""}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"1": True}}, "logit_bias.1"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(map(str, range(MAX_BIASES + 1)), 1)}, "logit_bias"),
        ({"priority": 1.5}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"model": 5}, "model"),
    ],
)
def test_out_of_range_and_wrong_types_name_the_field(fields: dict[str, Any], param: str) -> None:
    assert refusal(lambda: chat(**fields)).param == param


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"seed": 1 << 63}, "between -9223372036854775808 and 9223372036854775807"),
        ({"seed": -(1 << 63) - 1}, "at least -9223372036854775808"),
        ({"n": 10**30}, "between 1 and"),
    ],
)
def test_parameter_error_names_bound(fields: dict[str, Any], words: str) -> None:
    assert words in str(refusal(lambda: chat(**fields)))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [*MESSAGES, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[1].content[0].type",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"tools": [{"type": "code"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "text"}, "response_format"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"add_generation_prompt": 1}}, "chat_template_kwargs.add_generation_prompt"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
        ({"messages": [{"role": "user", "content": ["a"] * (MAX_ENTRIES // 2 + 1)}] * 2}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [0] * 1000}] * 17}, "messages"),
        ({"messages": MESSAGES * (MAX_MESSAGES + 1)}, "messages"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"bootstrap_host": "x"}, "bootstrap_host"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"guided_json": 1}, "guided_json"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_chats_that_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal(lambda: chat(**fields)).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [1 << 40]}, "prompt[0]"),
        ({"prompt": ["a", [1, None]]}, "prompt[1][1]"),
        ({"prompt": ["a", {}]}, "prompt[1]"),
        ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    ],
)
def test_completions_that_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal(lambda: completion(**fields)).param == param


def test_more_ids_than_the_context_holds_are_refused_unread() -> None:
    for prompt, param in (([1, 2, 3], "prompt"), ([[1], ["no", "id", "here"]], "prompt[1]")):
        error = refusal(functools.partial(parse_completion, {"prompt": prompt}, 2))
        assert (error.code, error.param) == ("context_length_exceeded", param)
    assert parse_completion({"prompt": [1, 2.0]}, 2).prompts == [[1, 2]]


def test_prompts_in_every_form() -> None:
    assert completion().prompts == ["hello"]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(prompt=[[1, 2], [3]]).prompts == [[1, 2], [3]]


def test_messages_become_plain() -> None:
    body = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "2", "name": None},
        ]
    )
    assert body.messages[0]["content"] == "a\nb"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert body.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert body.messages[2] == {"role": "tool", "content": "2", "tool_call_id": "1"}


def test_unknown_fields_are_named_not_obeyed() -> None:
    assert chat(store=True, metadata={}, foo=1).options.ignored == ("store", "metadata", "foo")
    assert chat(user="me").options.ignored == ()


def test_the_longer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).options.sampling.max_tokens == 7


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_NAMES = st.sampled_from(
    [
        "messages",
        "prompt",
        "model",
        "n",
        "stop",
        "seed",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "tools",
        "tool_choice",
        "response_format",
        "temperature",
        "top_k",
        "chat_template_kwargs",
        "stop_token_ids",
        "modalities",
        "max_tokens",
        "echo",
    ]
)


@given(st.dictionaries(_NAMES, _JSON, max_size=6))
def test_no_body_raises_anything_but_a_refusal(body: dict[str, Any]) -> None:
    for parse in (parse_chat, parse_completion):
        with contextlib.suppress(RequestError):
            parse({"messages": MESSAGES, "prompt": "x", **body})


def test_values_of_a_body_are_counted_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    crowds = [
        b'{"x":[' + b",".join([b"[]"] * (MAX_CONTAINERS + 1)) + b"]}",
        b'{"x":[' + b",".join([b'""'] * (MAX_STRINGS + 1)) + b"]}",
        b'{"x":{' + b",".join(b'"%d":1' % at for at in range(MAX_STRINGS + 1)) + b"}}",
    ]
    signs = ["[" * MAX_CONTAINERS * 2, '\\"[{' * MAX_CONTAINERS, '"' * MAX_STRINGS * 3, "\\" * 300_001, 'a\\\\"b']
    for text in signs:
        body = json.dumps({"x": text}).encode()
        assert parse_json(body) == {"x": text}
    monkeypatch.setattr("coordinator.api.fields.msgspec.json.decode", None)
    for body in crowds:
        with pytest.raises(RequestError, match="at most 131072 are allowed"):
            parse_json(body)
