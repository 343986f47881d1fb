"""Tools and reasoning through OpenAI's own client, with the built-in model on one prefill and one decode worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel

from common import builtin
from tests.e2e.system import RunningSystem

pytestmark = pytest.mark.e2e

SMALL = ("--dtype", "float32", "--threads", "1", "--num-kv-blocks", "1024")
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION: Any = {"role": "user", "content": "What is the weather in Oslo?"}
RESULT = json.dumps({"temperature": 7, "sky": "rainy"})


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    with RunningSystem.up(tmp_path_factory.mktemp("tools"), builtin.path(), small=SMALL) as system:
        yield OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A system whose template opens reasoning, unless a request turns it off."""
    directory = tmp_path_factory.mktemp("reasoner")
    source = (builtin.path() / "chat_template.jinja").read_text(encoding="utf-8")
    end = "{{- '<|assistant|>' -}}\n{%- endif -%}"
    assert source.rstrip().endswith(end)
    opened = "{{- '<|assistant|>' }}{{ '' if enable_thinking is false else '<think>\\n' }}{# </think> #}{%- endif -%}"
    template = directory / "template.jinja"
    template.write_text(source.rstrip().removesuffix(end) + opened)
    with RunningSystem.up(directory, builtin.path(), "--chat-template", str(template), small=SMALL) as system:
        yield OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0)


def asked(client: OpenAI, messages: list[Any], *, stream: bool, **fields: Any) -> tuple[ChatCompletionMessage, str]:
    """Return the message and the finish reason, whole or put together by the client from a stream."""
    fields = {"model": "model", "messages": messages, "tools": [WEATHER], "temperature": 0, **fields}
    if not stream:
        choice = client.chat.completions.create(**fields).choices[0]
        return choice.message, choice.finish_reason
    with client.chat.completions.stream(**fields) as events:
        final = events.get_final_completion().choices[0]
    return final.message, final.finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_question_call_result_answer(client: OpenAI, stream: bool) -> None:
    message, reason = asked(client, [QUESTION], stream=stream)
    assert reason == "tool_calls" and not message.content and message.tool_calls
    (call,) = message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    turn = {
        "role": "assistant",
        "content": message.content,
        "tool_calls": [call.model_dump(include={"id", "type", "function"})],
    }
    result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": RESULT}]}
    message, reason = asked(client, [QUESTION, turn, result], stream=stream)
    assert (message.content, reason) == ("It is 7 degrees and rainy in Oslo.", "stop") and not message.tool_calls


def test_the_prompt_of_the_second_turn_continues_the_first(client: OpenAI) -> None:
    """The turn of the call is rendered as the model wrote it, so its prefix is in the cache."""
    tokens = client.chat.completions.create(
        model="model", messages=[QUESTION], tools=[WEATHER], temperature=0, extra_body={"return_token_ids": True}
    )
    first = tokens.model_extra["prompt_token_ids"] + tokens.choices[0].model_extra["token_ids"]  # type: ignore[index]
    turn: Any = tokens.choices[0].message.model_dump(include={"role", "content", "tool_calls"})
    call = turn["tool_calls"][0]
    result: Any = {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
    second = client.chat.completions.create(
        model="model",
        messages=[QUESTION, turn, result],
        tools=[WEATHER],
        extra_body={"return_token_ids": True, "max_tokens": 1},
    )
    assert second.model_extra is not None and second.model_extra["prompt_token_ids"][: len(first)] == first


SAY: Any = {
    "type": "function",
    "function": {
        "name": "say",
        "parameters": {"type": "object", "properties": {"word": {"enum": ["hi", "bye"]}}, "required": ["word"]},
    },
}
NAMED = {"type": "function", "function": {"name": "say"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names", "reason"),
    [
        ("required", {"get_weather", "say"}, "tool_calls"),
        (ALLOWED, {"say"}, "tool_calls"),
        (NAMED, {"say"}, "stop"),
    ],
    ids=["required", "allowed", "named"],
)
def test_forced_calls_end_as_at_openai(client: OpenAI, choice: Any, names: set[str], reason: str, stream: bool) -> None:
    hello: Any = {"role": "user", "content": "Hello"}
    message, ended = asked(client, [hello], stream=stream, tools=[WEATHER, SAY], tool_choice=choice)
    assert ended == reason and not message.content and message.tool_calls
    for call in message.tool_calls:
        assert call.type == "function" and call.function.name in names
        arguments = json.loads(call.function.arguments)
        assert arguments.keys() == ({"word"} if call.function.name == "say" else {"city"})


class get_weather(BaseModel):  # noqa: N801 - the class gives the function its name
    """Get the weather of a city"""

    city: str


def test_calls_are_parsed_by_the_client(client: OpenAI) -> None:
    tool = pydantic_function_tool(get_weather)
    assert tool["function"]["strict"]
    answer = client.chat.completions.parse(model="model", messages=[QUESTION], tools=[tool], temperature=0)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == get_weather(city="Oslo")


def test_no_tool_is_called_with_tool_choice_none(client: OpenAI) -> None:
    message, reason = asked(client, [QUESTION], stream=False, tool_choice="none")
    assert message.content and not message.tool_calls and reason == "stop"


def test_reasoning_that_the_prompt_opens(reasoner: OpenAI) -> None:
    fields: Any = {"model": "model", "messages": [QUESTION], "temperature": 0, "max_tokens": 12}
    answer = reasoner.chat.completions.create(**fields)
    message: Any = answer.choices[0].message
    assert message.reasoning_content and message.reasoning == message.reasoning_content and message.content == ""
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens
    chunks = list(reasoner.chat.completions.create(**fields, stream=True))
    assert len(chunks) == answer.usage.completion_tokens + 1
    parts = [getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks]
    assert "".join(parts) == message.reasoning_content
    off = reasoner.chat.completions.create(**fields, reasoning_effort="none").choices[0].message
    assert off.content and off.model_extra is not None and off.model_extra["reasoning_content"] is None


# -- the Responses API and the Messages API ---------------------------------------------------------------------------

FLAT: Any = {"type": "function", **WEATHER["function"], "strict": False}
TOOL: Any = {
    "name": "get_weather",
    "description": WEATHER["function"]["description"],
    "input_schema": WEATHER["function"]["parameters"],
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_round_trip_by_the_responses_api(client: OpenAI, stream: bool) -> None:
    fields: Any = {"model": "model", "tools": [FLAT], "temperature": 0}

    def respond(items: list[Any]) -> Any:
        if not stream:
            return client.responses.create(**fields, input=items)
        with client.responses.stream(**fields, input=items) as events:
            return events.get_final_response()

    first = respond([QUESTION])
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Oslo"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    second = respond([QUESTION, call.to_dict(), result])
    assert second.output_text == "It is 7 degrees and rainy in Oslo." and second.status == "completed"
    assert second.usage.input_tokens_details.cached_tokens > 0, "the second prompt continues the first"


def say_message(client: OpenAI, **fields: Any) -> dict[str, Any]:
    """Return the answer of POST /v1/messages."""
    body = {"model": "model", "max_tokens": 100, "messages": [QUESTION], "temperature": 0, **fields}
    answer: Any = client.post("/messages", body=body, cast_to=object)
    assert isinstance(answer, dict)
    return answer


def test_a_round_trip_by_the_messages_api(client: OpenAI) -> None:
    first = say_message(client, tools=[TOOL])
    (use,) = first["content"]
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "get_weather", {"city": "Oslo"})
    assert first["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": RESULT}]}
    turns = [QUESTION, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    second = say_message(client, tools=[TOOL], messages=turns)
    assert second["content"] == [{"type": "text", "text": "It is 7 degrees and rainy in Oslo."}]
    assert second["stop_reason"] == "end_turn"
    forced = say_message(client, tools=[TOOL], tool_choice={"type": "any"})
    assert [block["type"] for block in forced["content"]] == ["tool_use"]


def test_thinking_of_the_messages_api(reasoner: OpenAI) -> None:
    silent = say_message(reasoner)
    assert [block["type"] for block in silent["content"]] == ["text"], "the template is told not to reason"
    cut = say_message(reasoner, thinking={"type": "adaptive"}, max_tokens=12)
    (thinking,) = cut["content"]
    assert thinking["type"] == "thinking" and thinking["thinking"] and thinking["signature"]
    assert cut["usage"]["output_tokens_details"]["thinking_tokens"] == cut["usage"]["output_tokens"]
    answer = reasoner.responses.create(model="model", input=[QUESTION], temperature=0, max_output_tokens=12)
    (item,) = answer.output
    assert item.type == "reasoning" and item.content and item.content[0].text and item.status == "completed"
