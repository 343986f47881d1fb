"""Anthropic's own client, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_tool
from scenarios import (
    GREETING,
    KEY,
    MODEL,
    PERSON,
    PERSON_QUESTION,
    PERSON_SCHEMA,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    WEATHER_SCHEMA,
    Person,
)

CLIENT = "anthropic"
HELLO: Any = [{"role": "user", "content": GREETING}]
ASK_WEATHER: Any = [{"role": "user", "content": WEATHER_QUESTION}]
ASK_PERSON: Any = [{"role": "user", "content": PERSON_QUESTION}]
TOOL: Any = {"name": "get_weather", "description": "Get the weather of a city", "input_schema": WEATHER_SCHEMA}
GREEDY = {"temperature": 0}  # a field of the API that the client has no longer
FIELDS: Any = {"model": MODEL, "max_tokens": 200, "extra_body": GREEDY}


@pytest.fixture
def client(base: str) -> Any:
    with Anthropic(base_url=base, api_key=KEY, max_retries=0) as made:
        yield made


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def check_messages(client: Anthropic) -> None:
    """messages.create"""
    message = client.messages.create(**FIELDS, messages=HELLO)
    assert text_of(message) and message.stop_reason == "end_turn" and message.usage.output_tokens


def check_models(client: Anthropic) -> None:
    """models.list and models.retrieve"""
    (listed,) = client.models.list()
    assert listed.id == MODEL and listed.display_name and listed.created_at and listed.max_input_tokens
    assert client.models.retrieve(MODEL) == listed


def check_history(client: Anthropic) -> None:
    """system prompt, text blocks, earlier turns, cache_control, metadata, stop_sequences"""
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": GREETING, "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello!"}]},
        {"role": "user", "content": "What is 2 + 3?"},
    ]
    system: Any = [{"type": "text", "text": "You are a helpful assistant."}]
    message = client.messages.create(
        **FIELDS, messages=turns, system=system, metadata={"user_id": "me"}, stop_sequences=["zzz"]
    )
    assert "5" in text_of(message)


def check_stop_sequence(client: Anthropic) -> None:
    """stop_reason stop_sequence and max_tokens"""
    whole = text_of(client.messages.create(**FIELDS, messages=HELLO))
    word = whole.split()[1]
    message = client.messages.create(**FIELDS, messages=HELLO, stop_sequences=[word])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word) and word not in text_of(message)
    short: Any = {**FIELDS, "max_tokens": 1}
    assert client.messages.create(**short, messages=HELLO).stop_reason == "max_tokens"


def check_stream(client: Anthropic) -> None:
    """messages.create, streamed"""
    events = list(client.messages.create(**FIELDS, messages=HELLO, stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]


def check_stream_helper(client: Anthropic) -> None:
    """messages.stream"""
    whole = client.messages.create(**FIELDS, messages=HELLO)
    with client.messages.stream(**FIELDS, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(whole) == text_of(final)
    assert final.usage.output_tokens == whole.usage.output_tokens and final.stop_reason == whole.stop_reason


def check_async(base: str) -> None:
    """asynchronous, whole and streamed"""

    async def run() -> tuple[str, str]:
        async with AsyncAnthropic(base_url=base, api_key=KEY, max_retries=0) as client:
            whole = await client.messages.create(**FIELDS, messages=HELLO)
            async with client.messages.stream(**FIELDS, messages=HELLO) as stream:
                return text_of(whole), await stream.get_final_text()

    whole, streamed = asyncio.run(run())
    assert whole and whole == streamed


CHOICES: dict[str, Any] = {
    "auto": {"type": "auto", "disable_parallel_tool_use": True},
    "any": {"type": "any"},
    "tool": {"type": "tool", "name": "get_weather"},
    "none": {"type": "none"},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("choice", CHOICES)
def check_tools(client: Anthropic, choice: str, stream: bool) -> None:
    """tools, tool_choice"""
    fields: Any = {**FIELDS, "messages": ASK_WEATHER, "tools": [TOOL], "tool_choice": CHOICES[choice]}
    if stream:
        with client.messages.stream(**fields) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**fields)
    calls = [(block.name, block.input) for block in message.content if block.type == "tool_use"]
    if choice == "none":
        assert not calls and text_of(message)
    else:
        assert calls == [("get_weather", {"city": "Oslo"})] and message.stop_reason == "tool_use"


def check_tool_result(client: Anthropic) -> None:
    """tool_use and tool_result as history"""
    first = client.messages.create(**FIELDS, messages=ASK_WEATHER, tools=[TOOL])
    (call,) = [block for block in first.content if block.type == "tool_use"]
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": json.dumps(WEATHER_RESULT)}
    turns: Any = [*ASK_WEATHER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert text_of(client.messages.create(**FIELDS, messages=turns, tools=[TOOL])) == WEATHER_ANSWER


def check_tool_runner(client: Anthropic) -> None:
    """beta.messages.tool_runner: calls a function until there is an answer"""

    @beta_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city"""
        assert city == "Oslo"
        return json.dumps(WEATHER_RESULT)

    runner = client.beta.messages.tool_runner(**FIELDS, messages=ASK_WEATHER, tools=[get_weather])
    assert text_of(runner.until_done()) == WEATHER_ANSWER


def check_count_tokens(client: Anthropic) -> None:
    """messages.count_tokens: what a request with the same fields uses"""
    fields: Any = {"model": MODEL, "messages": ASK_WEATHER, "tools": [TOOL], "system": "Be short."}
    counted = client.messages.count_tokens(**fields).input_tokens
    usage = client.messages.create(**fields, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0) + (
        usage.cache_creation_input_tokens or 0
    )


def check_parse(client: Anthropic) -> None:
    """messages.parse with a pydantic type"""
    assert client.messages.parse(**FIELDS, messages=ASK_PERSON, output_format=Person).parsed_output == PERSON


def check_output_config(client: Anthropic) -> None:
    """output_config: a JSON schema"""
    config: Any = {"format": {"type": "json_schema", "schema": PERSON_SCHEMA}}
    message = client.messages.create(**FIELDS, messages=ASK_PERSON, output_config=config)
    assert Person.model_validate_json(text_of(message)) == PERSON


def check_thinking_off(client: Anthropic) -> None:
    """thinking disabled, and thinking blocks in the history"""
    turns: Any = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A greeting.", "signature": ""},
                {"type": "text", "text": "Hello!"},
            ],
        },
        {"role": "user", "content": "What is 2 + 3?"},
    ]
    assert "5" in text_of(client.messages.create(**FIELDS, messages=turns, thinking={"type": "disabled"}))


def check_errors(client: Anthropic) -> None:
    """errors as the client's exceptions"""
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nothing", max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(model=MODEL, max_tokens=5, messages=HELLO, extra_body={"temperature": 9})
    assert "temperature" in str(wrong.value)


def check_images(client: Anthropic) -> None:
    """images"""
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    turns: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    client.messages.create(**FIELDS, messages=turns)


def check_server_tools(client: Anthropic) -> None:
    """Anthropic's hosted tools (web search)"""
    client.messages.create(**FIELDS, messages=HELLO, tools=[{"type": "web_search_20250305", "name": "web_search"}])


def check_batches(client: Anthropic) -> None:
    """messages.batches"""
    client.messages.batches.create(
        requests=[{"custom_id": "1", "params": {"model": MODEL, "max_tokens": 5, "messages": HELLO}}]
    )
