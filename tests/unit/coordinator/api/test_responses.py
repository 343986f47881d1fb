"""Bodies of the Responses API: what is accepted, how items become messages, and what each invalid body is answered."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.core.errors import RequestError
from coordinator.api.delta_encoder import encode
from coordinator.api.responses import ResponsesBody, parse_responses
from tests.golden.other_apis import BAD_RESPONSES
from tests.golden.other_apis import FUNCTION as TOOL
from tests.golden.other_apis import FUNCTION_CALL as CALL
from tests.golden.other_apis import OUTPUT as RESULT

USER = {"role": "user", "content": "hello"}


def parsed(**body: Any) -> ResponsesBody:
    return parse_responses({"input": "hello", **body})


def messages(*items: Any, **body: Any) -> list[dict[str, Any]]:
    return parse_responses({"input": list(items), **body}).chat.messages


def echoed(body: ResponsesBody) -> Any:
    return msgspec.json.decode(encode(body.echo))


# -- input ------------------------------------------------------------------------------------------------------------


def test_a_string_is_a_message_of_the_user() -> None:
    body = parsed(instructions="Be brief.")
    assert body.chat.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert body.chat.add_generation_prompt and not body.chat.continue_final_message


def test_messages_with_parts() -> None:
    assert messages(
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "d", "annotations": [], "logprobs": []}],
        },
    ) == [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": "b\nc"},
        {"role": "assistant", "content": "d"},
    ]


def test_instructions_and_a_system_message_are_one() -> None:
    shown = messages({"role": "system", "content": "b"}, USER, instructions="a")
    assert shown == [{"role": "system", "content": "a\nb"}, USER]


def test_the_items_of_an_answer_become_one_turn() -> None:
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    said = {"role": "assistant", "content": "Let me look."}
    other = {**CALL, "call_id": "c2"}
    shown = messages(USER, reasoning, said, CALL, other, RESULT, {**RESULT, "call_id": "c2", "output": "sun"}, said)
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert shown == [
        USER,
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": name, "type": "function", "function": function} for name in ("c1", "c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
        {"role": "assistant", "content": "Let me look."},
    ]


def test_a_second_text_or_later_reasoning_is_a_turn_of_its_own() -> None:
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    said = {"role": "assistant", "content": "a"}
    assert messages(USER, said, said, reasoning, CALL)[1:] == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
            ],
        },
    ]


def test_encrypted_reasoning_is_dropped() -> None:
    assert messages({"type": "reasoning", "summary": [], "encrypted_content": "xyz"}, USER) == [USER]


def test_arguments_as_text_stay_the_clients_text() -> None:
    (_, turn) = parse_responses({"input": [USER, CALL]}, arguments_as_text=True).chat.messages
    assert turn["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'  # type: ignore[index]


def test_the_output_of_a_call_may_be_parts() -> None:
    shown = messages(USER, CALL, {**RESULT, "output": [{"type": "input_text", "text": "rain"}]})
    assert shown[-1]["content"] == "rain"


# -- other fields -----------------------------------------------------------------------------------------------------


def test_sampling_fields_and_extras() -> None:
    options = parsed(
        max_output_tokens=7, temperature=0.5, top_p=0.9, seed=3, top_k=5, stop=["x"], stream=True
    ).chat.options
    sampling = options.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.5, 0.9)
    assert (sampling.seed, sampling.top_k, options.stop, options.stream) == (3, 5, ("x",), True)
    assert options.n == 1 and options.include_usage and not options.continuous_usage


def test_tools_in_the_flat_form_reach_the_template_nested() -> None:
    strict = {**TOOL, "strict": True}
    body = parsed(tools=[strict], tool_choice={"type": "function", "name": "weather"}, parallel_tool_calls=False)
    assert body.chat.tools == [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    use = body.chat.tool_use
    assert use is not None and use.choice == "named" and not use.parallel and use.params == ("tools[0].parameters",)
    shown = echoed(body)
    assert shown["tools"] == [{**strict, "description": None}] and shown["parallel_tool_calls"] is False
    assert shown["tool_choice"] == {"type": "function", "name": "weather"}


def test_no_tools_are_offered_with_none() -> None:
    body = parsed(tools=[TOOL], tool_choice="none")
    assert body.chat.tools is None and body.chat.tool_use is None and echoed(body)["tools"]


def test_a_format_is_a_constraint() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    constraint = parsed(text={"format": form}).chat.options.constraint
    assert constraint is not None and (constraint.kind, constraint.value, constraint.strict) == (
        "json_schema", schema, True,
    )  # fmt: skip
    assert constraint.param == "text.format.schema"
    assert parsed(text={"format": {"type": "text"}}).chat.options.constraint is None
    assert parsed(text={"format": {"type": "json_object"}}).chat.options.constraint is not None


def test_the_effort_of_reasoning_reaches_the_template() -> None:
    assert parsed(reasoning={"effort": "low"}).chat.template_kwargs == {"reasoning_effort": "low"}
    none = parsed(reasoning={"effort": "none"}, chat_template_kwargs={"thinking": True}).chat.template_kwargs
    assert none == {"reasoning_effort": "none", "enable_thinking": False, "thinking": True}


def test_what_has_no_effect_is_named() -> None:
    body = parsed(
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        max_tool_calls=3,
        store=True,
        user="u",
        metadata={"a": "b"},
    )
    assert sorted(body.chat.options.ignored) == [
        "include.reasoning.encrypted_content",
        "max_tool_calls",
        "text.verbosity",
    ]
    shown = echoed(body)
    assert shown["metadata"] == {"a": "b"} and shown["user"] == "u" and shown["text"]["verbosity"] == "low"
    assert shown["reasoning"] == {"effort": "low", "summary": "auto"} and body.summary
    assert parsed(reasoning={"summary": "concise"}).chat.options.ignored == ("reasoning.summary",)
    assert parsed(reasoning={"generate_summary": "auto"}).summary and not parsed(reasoning={"effort": "low"}).summary


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None), ({"top_logprobs": 0}, None), ({"top_logprobs": 3}, 3),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 20}, 20),
    ],
)  # fmt: skip
def test_log_probabilities(fields: dict[str, Any], logprobs: int | None) -> None:
    body = parsed(**fields)
    assert body.chat.options.sampling.logprobs == logprobs and body.chat.options.ignored == ()
    assert echoed(body)["top_logprobs"] == (logprobs or 0)


@pytest.mark.parametrize(
    "harmless",
    [
        {"background": False}, {"previous_response_id": None}, {"truncation": "disabled"}, {"top_logprobs": 0},
        {"n": 1}, {"include": []}, {"text": {}}, {"reasoning": None}, {"tools": []}, {"conversation": None},
    ],
)  # fmt: skip
def test_defaults_that_are_spelled_out(harmless: dict[str, Any]) -> None:
    assert parsed(**harmless).chat.options.ignored == ()


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "param", "code"), BAD_RESPONSES, ids=range(len(BAD_RESPONSES)))
def test_invalid_bodies(body: dict[str, Any], param: str | None, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        parsed(**body)
    error = caught.value
    assert (error.status, error.type, error.param, error.code) == (400, "invalid_request_error", param, code), error


def test_arguments_that_cannot_fit_are_not_parsed() -> None:
    def check(chars: int, field: str) -> None:
        if chars > 1000:
            raise RequestError("Too long.", param=field, code="context_length_exceeded")

    with pytest.raises(RequestError) as caught:
        parse_responses({"input": [USER, {**CALL, "arguments": "[" * 1001}]}, None, check)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "input"
    tool = {**TOOL, "description": "x" * 1000}  # an answer repeats the tools, also those that no template gets
    with pytest.raises(RequestError) as caught:
        parse_responses({"input": "a", "tools": [tool], "tool_choice": "none"}, None, check)
    assert caught.value.param == "tools"
