"""Bodies of the Messages API: what is accepted, how blocks become messages, and what each invalid body is answered."""

from __future__ import annotations

import time
from typing import Any

import pytest

from common.core.errors import RequestError
from coordinator.api.anthropic import omits_thinking, parse_messages
from coordinator.requests.spec import ChatBody
from tests.golden.other_apis import BAD_MESSAGES, HELLO, LEAST, RESULT, TOOL, USE
from tests.pace import scaled

CALLED = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


def parsed(**body: Any) -> ChatBody:
    return parse_messages({**LEAST, **body})


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}


# -- messages ---------------------------------------------------------------------------------------------------------


def test_system_prompts() -> None:
    assert parsed(system="s").messages == [{"role": "system", "content": "s"}, *HELLO]
    assert parsed(system=[text("s"), text("t")]).messages[0] == {"role": "system", "content": "s\nt"}


def test_blocks_become_messages() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    hidden = {"type": "redacted_thinking", "data": "y"}
    body = parsed(
        messages=[
            user(text("a"), text("b")),
            assistant(thought, hidden, text("Let me look."), USE, {**USE, "id": "t2"}),
            user(RESULT, {**RESULT, "tool_use_id": "t2", "content": [text("sun")], "is_error": True}, text("so?")),
        ]
    )
    assert body.messages == [
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "hm",
            "tool_calls": [CALLED, {**CALLED, "id": "t2"}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        {"role": "tool", "tool_call_id": "t2", "content": "sun"},
        {"role": "user", "content": "so?"},
    ]
    assert body.add_generation_prompt and not body.continue_final_message


def test_messages_of_one_role_are_joined() -> None:
    said = [*HELLO, *HELLO, assistant(text("a")), assistant(text("b")), *HELLO]
    assert [message["content"] for message in parsed(messages=said).messages] == ["hello\nhello", "a\nb", "hello"]


def test_many_messages_of_one_role_are_joined_in_linear_time() -> None:
    """16,384 messages of 500 characters: joining them one by one would copy 67 GB."""
    text = "x" * 500
    started = time.process_time()
    (message,) = parsed(messages=[{"role": "user", "content": text}] * 16_384).messages
    assert len(str(message["content"])) == 16_384 * 501 - 1
    assert time.process_time() - started < scaled(2.0)


def test_a_result_without_content() -> None:
    empty = {"type": "tool_result", "tool_use_id": "t1"}
    assert parsed(messages=[*HELLO, assistant(USE), user(empty)]).messages[-1]["content"] == ""


def test_input_as_text() -> None:
    body = parse_messages({**LEAST, "messages": [*HELLO, assistant(USE), user(RESULT)]}, arguments_as_text=True)
    assert body.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"city":"Oslo"}'  # type: ignore[index]


def test_a_last_turn_of_the_assistant_is_continued() -> None:
    body = parsed(messages=[*HELLO, assistant(text("Well,"))])
    assert body.continue_final_message and not body.add_generation_prompt


# -- other fields -----------------------------------------------------------------------------------------------------


def test_sampling_fields_and_extras() -> None:
    options = parsed(
        temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["x"], stream=True, seed=3, metadata={"user_id": "u"}
    ).options
    sampling = options.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (9, 0.5, 0.9)
    assert (sampling.top_k, sampling.seed, options.stop, options.stream) == (5, 3, ("x",), True)
    assert options.ignored == () and not options.include_stop
    assert parsed(inference_geo="eu").options.ignored == ("inference_geo",)


@pytest.mark.parametrize(
    ("choice", "wanted", "parallel"),
    [
        (None, "auto", True),
        ({"type": "auto"}, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "tool", "name": "weather"}, "named", True),
        ({"type": "none"}, None, True),
    ],
)
def test_tools_and_their_choice(choice: Any, wanted: str | None, parallel: bool) -> None:
    body = parsed(tools=[{**TOOL, "strict": True}, {**TOOL, "name": "other", "type": "custom"}], tool_choice=choice)
    if wanted is None:
        assert body.tools is None and body.tool_use is None
        return
    use = body.tool_use
    assert use is not None and (use.choice, use.parallel) == (wanted, parallel)
    function = {"name": "weather", "description": "d", "parameters": {"type": "object"}}
    assert use.tools[0] == {"type": "function", "function": {**function, "strict": True}}
    assert use.params[0] == "tools[0].input_schema" and len(use.tools) == (1 if wanted == "named" else 2)
    assert body.tools is not None and body.tools[0] == {"type": "function", "function": function}


def test_thinking() -> None:
    off = parsed()
    assert off.template_kwargs == {"enable_thinking": False, "thinking": False} and not off.include_reasoning
    on = parsed(max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024})
    assert on.template_kwargs == {"enable_thinking": True, "thinking": True}
    assert on.include_reasoning and on.max_reasoning_tokens == 1024
    adaptive = parsed(thinking={"type": "adaptive"}, output_config={"effort": "low"})
    assert adaptive.include_reasoning and adaptive.max_reasoning_tokens is None
    assert adaptive.template_kwargs["reasoning_effort"] == "low"
    thinking = {"type": "adaptive", "display": "omitted"}
    hidden = parsed(thinking=thinking)
    assert hidden.template_kwargs["enable_thinking"] is True and hidden.include_reasoning
    assert omits_thinking({"thinking": thinking})
    for shown in ({}, {"thinking": None}, {"thinking": {"type": "adaptive", "display": "summarized"}}):
        assert not omits_thinking(shown)
    assert parsed(chat_template_kwargs={"enable_thinking": True}).template_kwargs["enable_thinking"] is True


def test_a_format_is_a_constraint() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    constraint = parsed(output_config={"format": form}).options.constraint
    assert constraint is not None and (constraint.kind, constraint.param) == (
        "json_schema", "output_config.format.schema",
    )  # fmt: skip


def test_counting_needs_no_max_tokens() -> None:
    body = {"model": "tiny", "messages": HELLO}
    assert parse_messages(body, counting=True).messages == HELLO
    with pytest.raises(RequestError):
        parse_messages(body)


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "param", "code"), BAD_MESSAGES, ids=range(len(BAD_MESSAGES)))
def test_invalid_bodies(body: dict[str, Any], param: str | None, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        parsed(**body)
    error = caught.value
    assert (error.status, error.type, error.param, error.code) == (400, "invalid_request_error", param, code), error
