"""OpenAI's own client, synchronous and asynchronous."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from scenarios import (
    GREETING,
    KEY,
    MODEL,
    PERSON,
    PERSON_QUESTION,
    PERSON_SCHEMA,
    WEATHER,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    WEATHER_SCHEMA,
    Person,
)

CLIENT = "openai"
HELLO: Any = [{"role": "user", "content": GREETING}]
ASK_WEATHER: Any = [{"role": "user", "content": WEATHER_QUESTION}]
ASK_PERSON: Any = [{"role": "user", "content": PERSON_QUESTION}]
STRICT_WEATHER: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}


@pytest.fixture
def client(url: str) -> Any:
    with OpenAI(base_url=url, api_key=KEY, max_retries=0) as made:
        yield made


def asked(client: OpenAI, messages: Any, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **fields).choices[0]


def check_models(client: OpenAI) -> None:
    """list and retrieve models"""
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def check_chat(client: OpenAI) -> None:
    """chat"""
    choice = asked(client, HELLO)
    assert choice.message.content and choice.finish_reason == "stop"


def check_chat_history(client: OpenAI) -> None:
    """chat: system and developer messages, text parts, earlier turns"""
    turns: Any = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": GREETING}]},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "What is 2 + 3?"},
    ]
    assert "5" in asked(client, turns).message.content


def check_chat_stream(client: OpenAI) -> None:
    """chat, streamed, with usage"""
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0)
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, stream=True, stream_options=options)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def check_async(url: str) -> None:
    """chat, asynchronous, whole and streamed"""
    import asyncio

    async def run() -> tuple[str | None, str]:
        async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            whole = await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0)
            stream = await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, stream=True)
            assert isinstance(stream, AsyncIterator)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return whole.choices[0].message.content, "".join(parts)

    whole, streamed = asyncio.run(run())
    assert whole and whole == streamed


def check_stream_helper(client: OpenAI) -> None:
    """chat.completions.stream: events of content"""
    with client.chat.completions.stream(model=MODEL, messages=HELLO, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert {"chunk", "content.delta", "content.done"} <= set(kinds) and final.message.content


def check_stream_helper_of_tools(client: OpenAI) -> None:
    """chat.completions.stream: events of a tool call"""
    with client.chat.completions.stream(
        model=MODEL, messages=ASK_WEATHER, tools=[STRICT_WEATHER], temperature=0
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert [json.loads(event.arguments) for event in done] == [{"city": "Oslo"}]
    assert json.loads(call.function.arguments) == {"city": "Oslo"}


def check_stream_helper_of_a_type(client: OpenAI) -> None:
    """chat.completions.stream with response_format=a pydantic type"""
    with client.chat.completions.stream(
        model=MODEL, messages=ASK_PERSON, temperature=0, response_format=Person
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == PERSON


def check_parse(client: OpenAI) -> None:
    """chat.completions.parse with a pydantic type"""
    answer = client.chat.completions.parse(model=MODEL, messages=ASK_PERSON, temperature=0, response_format=Person)
    assert answer.choices[0].message.parsed == PERSON


def check_parse_tools(client: OpenAI) -> None:
    """chat.completions.parse with pydantic_function_tool"""
    from pydantic import BaseModel

    class GetWeather(BaseModel):
        """Get the weather of a city"""

        city: str

    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    answer = client.chat.completions.parse(model=MODEL, messages=ASK_WEATHER, temperature=0, tools=[tool])
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Oslo")


def check_json_object(client: OpenAI) -> None:
    """response_format json_object"""
    choice = asked(client, ASK_PERSON, response_format={"type": "json_object"})
    assert json.loads(choice.message.content) == PERSON.model_dump()


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def check_json_schema(client: OpenAI, strict: bool) -> None:
    """response_format json_schema"""
    named = {"name": "person", "schema": PERSON_SCHEMA, "strict": strict}
    choice = asked(client, ASK_PERSON, response_format={"type": "json_schema", "json_schema": named})
    assert Person.model_validate_json(choice.message.content) == PERSON


CHOICES: dict[str, Any] = {
    "auto": "auto",
    "required": "required",
    "named": {"type": "function", "function": {"name": "get_weather"}},
    "allowed": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}]},
    },
    "none": "none",
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("choice", CHOICES)
def check_tools(client: OpenAI, choice: str, stream: bool) -> None:
    """tools, tool_choice"""
    fields: Any = {"tools": [WEATHER], "tool_choice": CHOICES[choice], "parallel_tool_calls": False}
    if stream:
        with client.chat.completions.stream(model=MODEL, messages=ASK_WEATHER, temperature=0, **fields) as events:
            found = events.get_final_completion().choices[0]
    else:
        found = asked(client, ASK_WEATHER, **fields)
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in found.message.tool_calls or []]
    if choice == "none":
        assert not calls and found.message.content
    else:
        assert calls == [("get_weather", {"city": "Oslo"})]
        assert found.finish_reason == ("stop" if choice == "named" else "tool_calls")  # as OpenAI does


def check_tool_result(client: OpenAI) -> None:
    """a tool's call and result as history"""
    message = asked(client, ASK_WEATHER, tools=[WEATHER]).message
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": json.dumps(WEATHER_RESULT)}
    answer = asked(client, [*ASK_WEATHER, message, result], tools=[WEATHER])
    assert answer.message.content == WEATHER_ANSWER


def check_choices_and_logprobs(client: OpenAI) -> None:
    """n, seed, stop, logprobs, logit_bias, penalties"""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        n=3,
        seed=7,
        temperature=0.9,
        top_p=0.9,
        logprobs=True,
        top_logprobs=3,
        stop=["zzz"],
        logit_bias={"5": -100},
        frequency_penalty=0.1,
        presence_penalty=0.1,
        max_completion_tokens=20,
        user="me",
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content
        assert len(choice.logprobs.content[0].top_logprobs) == 3


def check_completions(client: OpenAI) -> None:
    """completions, whole and streamed, with echo and logprobs"""
    fields: Any = {"model": MODEL, "prompt": "One two three", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**fields, echo=True, logprobs=2).choices[0]
    assert whole.text.startswith("One two three") and whole.logprobs is not None
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**fields, stream=True))
    assert whole.text == "One two three" + streamed


def check_raw_responses(client: OpenAI) -> None:
    """with_raw_response, with_streaming_response"""
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=4)
    assert raw.headers["x-request-id"] and raw.parse().choices
    with client.chat.completions.with_streaming_response.create(model=MODEL, messages=HELLO, max_tokens=4) as response:
        assert json.loads(response.read())["choices"]


def check_errors(client: OpenAI) -> None:
    """errors as the client's exceptions"""
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nothing", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=10**6)
    assert long.value.code == "context_length_exceeded"


def check_stream_arrives_early(client: OpenAI) -> None:
    """a long stream arrives as it is written"""
    began = time.monotonic()
    fields: Any = {"max_tokens": 300, "extra_body": {"ignore_eos": True}}
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **fields)
    arrived = [time.monotonic() - began for _ in stream]
    assert len(arrived) > 300 and arrived[0] < arrived[-1] / 2


def check_early_end(client: OpenAI) -> None:
    """a stream that the client closes"""
    with client.chat.completions.create(model=MODEL, messages=HELLO, stream=True) as stream:
        next(iter(stream))
    assert asked(client, HELLO).message.content


# -- /v1/responses ----------------------------------------------------------------------------------------------------

RESPONSE_TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": WEATHER_SCHEMA,
    "strict": True,
}


def check_responses(client: OpenAI) -> None:
    """responses, whole and streamed"""
    fields: Any = {"model": MODEL, "input": GREETING, "instructions": "Be short.", "temperature": 0, "store": False}
    whole = client.responses.create(**fields)
    assert whole.output_text and whole.status == "completed"
    events = list(client.responses.create(**fields, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def check_responses_stream_helper(client: OpenAI) -> None:
    """responses.stream"""
    with client.responses.stream(model=MODEL, input=GREETING, temperature=0, store=False) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output_text
    assert {"response.output_item.added", "response.content_part.added", "response.output_text.done"} <= kinds


def check_responses_parse(client: OpenAI) -> None:
    """responses.parse with a pydantic type"""
    found = client.responses.parse(model=MODEL, input=ASK_PERSON, temperature=0, text_format=Person, store=False)
    assert found.output_parsed == PERSON


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def check_responses_tools(client: OpenAI, choice: str) -> None:
    """responses: tools and their results"""
    chosen: Any = {"type": "function", "name": "get_weather"} if choice == "named" else choice
    fields: Any = {"model": MODEL, "tools": [RESPONSE_TOOL], "temperature": 0, "store": False}
    first = client.responses.create(input=ASK_WEATHER, tool_choice=chosen, **fields)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert call.name == "get_weather" and json.loads(call.arguments) == {"city": "Oslo"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps(WEATHER_RESULT)}
    assert client.responses.create(input=[*ASK_WEATHER, *first.output, result], **fields).output_text == WEATHER_ANSWER


def check_responses_tools_stream(client: OpenAI) -> None:
    """responses.stream: a tool call"""
    with client.responses.stream(
        model=MODEL, input=ASK_WEATHER, tools=[RESPONSE_TOOL], temperature=0, store=False
    ) as stream:
        done = [event for event in stream if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [{"city": "Oslo"}]


def check_responses_previous(client: OpenAI) -> None:
    """responses: previous_response_id"""
    client.responses.create(model=MODEL, input=GREETING, previous_response_id="resp_1")


def check_responses_builtin_tool(client: OpenAI) -> None:
    """responses: OpenAI's hosted tools (web_search)"""
    client.responses.create(model=MODEL, input=GREETING, tools=[{"type": "web_search"}])


# -- not here ---------------------------------------------------------------------------------------------------------


def check_images(client: OpenAI) -> None:
    """images in messages"""
    part: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    asked(client, [{"role": "user", "content": [part]}])


def check_audio(client: OpenAI) -> None:
    """audio answers"""
    audio: Any = {"voice": "alloy", "format": "wav"}
    asked(client, HELLO, modalities=["text", "audio"], audio=audio)


def check_suffix(client: OpenAI) -> None:
    """completions: suffix"""
    client.completions.create(model=MODEL, prompt="One", suffix="three")


def check_custom_tool(client: OpenAI) -> None:
    """tools of type custom"""
    asked(client, HELLO, tools=[{"type": "custom", "custom": {"name": "run", "description": "Run code"}}])


def check_embeddings(client: OpenAI) -> None:
    """embeddings"""
    client.embeddings.create(model=MODEL, input=GREETING)
