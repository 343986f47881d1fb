"""litellm: its own functions over an OpenAI-compatible server and over Anthropic's API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest
from scenarios import (
    GREETING,
    KEY,
    MODEL,
    PERSON,
    PERSON_QUESTION,
    WEATHER,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    Person,
)

CLIENT = "litellm"
litellm.telemetry = False
litellm.suppress_debug_info = True
APIS = pytest.mark.parametrize("api", ["chat", "messages"])


def fields_of(base: str, api: str, question: str) -> Any:
    messages = [{"role": "user", "content": question}]
    where = {"chat": (f"hosted_vllm/{MODEL}", f"{base}/v1"), "messages": (f"anthropic/{MODEL}", base)}[api]
    return {
        "model": where[0],
        "api_base": where[1],
        "api_key": KEY,
        "messages": messages,
        "temperature": 0,
        "max_tokens": 200,
        "num_retries": 0,
        "max_retries": 0,
    }


@APIS
def check_completion(base: str, api: str) -> None:
    """completion"""
    answer = litellm.completion(**fields_of(base, api, GREETING))
    assert answer.choices[0].message.content and answer.usage.completion_tokens


@APIS
def check_stream(base: str, api: str) -> None:
    """completion, streamed"""
    parts = list(litellm.completion(**fields_of(base, api, GREETING), stream=True))
    assert len(parts) > 2 and "".join(part.choices[0].delta.content or "" for part in parts)


@APIS
def check_acompletion(base: str, api: str) -> None:
    """acompletion, whole and streamed"""

    async def run() -> tuple[str, str]:
        whole = await litellm.acompletion(**fields_of(base, api, GREETING))
        stream = await litellm.acompletion(**fields_of(base, api, GREETING), stream=True)
        return whole.choices[0].message.content, "".join([part.choices[0].delta.content or "" async for part in stream])

    whole, streamed = asyncio.run(run())
    assert whole and whole == streamed


@APIS
@pytest.mark.parametrize("choice", ["auto", "required"])
def check_tools(base: str, api: str, choice: str) -> None:
    """tools, their results"""
    fields = fields_of(base, api, WEATHER_QUESTION) | {"tools": [WEATHER]}
    message = litellm.completion(**fields, tool_choice=choice).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    fields["messages"] += [message, {"role": "tool", "tool_call_id": call.id, "content": json.dumps(WEATHER_RESULT)}]
    assert litellm.completion(**fields).choices[0].message.content == WEATHER_ANSWER


@APIS
def check_tools_stream(base: str, api: str) -> None:
    """tools, streamed, put together by stream_chunk_builder"""
    fields = fields_of(base, api, WEATHER_QUESTION) | {"tools": [WEATHER]}
    whole: Any = litellm.stream_chunk_builder(list(litellm.completion(**fields, stream=True)))
    (call,) = whole.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})


@APIS
def check_response_format(base: str, api: str) -> None:
    """response_format of a pydantic type"""
    answer = litellm.completion(**fields_of(base, api, PERSON_QUESTION), response_format=Person)
    found = Person.model_validate_json(answer.choices[0].message.content)
    assert found == PERSON or api == "messages"  # a call of a tool there


def check_text_completion(url: str) -> None:
    """text_completion"""
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=url, api_key=KEY, prompt="One two", max_tokens=5
    )
    assert answer.choices[0].text


def check_responses(url: str) -> None:
    """responses, whole and streamed"""
    fields: Any = {"model": f"openai/{MODEL}", "api_base": url, "api_key": KEY, "input": GREETING, "temperature": 0}
    assert litellm.responses(**fields).output_text
    kinds = [event.type for event in litellm.responses(**fields, stream=True)]
    assert kinds[-1] == "response.completed"


def check_embedding(url: str) -> None:
    """embedding"""
    litellm.embedding(model=f"openai/{MODEL}", api_base=url, api_key=KEY, input=[GREETING], max_retries=0)
