"""pydantic-ai over chat completions, responses and messages."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from scenarios import (
    GREETING,
    KEY,
    MODEL,
    PERSON,
    PERSON_QUESTION,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    Person,
)

CLIENT = "pydantic-ai-slim"
APIS = pytest.mark.parametrize("api", ["chat", "responses", "messages"])


def model_of(base: str, api: str) -> Any:
    if api == "messages":
        return AnthropicModel(
            MODEL,
            profile=ModelProfile(supports_json_schema_output=True),  # the default is by the names of Anthropic's models
            provider=AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=base, api_key=KEY, max_retries=0)),
        )
    provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0))
    return (OpenAIChatModel if api == "chat" else OpenAIResponsesModel)(MODEL, provider=provider)


def agent(base: str, api: str, **fields: Any) -> Agent[None, Any]:
    settings: Any = {"temperature": 0, "max_tokens": 400}
    return Agent(model_of(base, api), model_settings=settings, retries=0, **fields)


def with_weather(base: str, api: str, **fields: Any) -> Agent[None, Any]:
    made = agent(base, api, **fields)

    @made.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather of a city"""
        assert city == "Oslo"
        return json.dumps(WEATHER_RESULT)

    return made


@APIS
def check_run(base: str, api: str) -> None:
    """run, with instructions, then with the history"""
    made = agent(base, api, instructions="Be short.")
    first = made.run_sync(GREETING)
    assert first.output and first.usage.output_tokens
    assert made.run_sync("What is 2 + 3?", message_history=first.all_messages()).output


@APIS
def check_run_stream(base: str, api: str) -> None:
    """run_stream"""

    async def run() -> tuple[list[str], str]:
        async with agent(base, api).run_stream(GREETING) as result:
            parts = [part async for part in result.stream_text(delta=True, debounce_by=None)]
            return parts, await result.get_output()

    parts, text = asyncio.run(run())
    assert len(parts) > 2 and "".join(parts) == text


@APIS
def check_tools(base: str, api: str) -> None:
    """a tool's call and result"""
    assert with_weather(base, api).run_sync(WEATHER_QUESTION).output == WEATHER_ANSWER


@APIS
def check_tools_stream(base: str, api: str) -> None:
    """a tool's call and result, streamed"""

    async def run() -> Any:
        async with with_weather(base, api).run_stream(WEATHER_QUESTION) as result:
            return await result.get_output()

    assert asyncio.run(run()) == WEATHER_ANSWER


@APIS
@pytest.mark.parametrize("kind", [ToolOutput, NativeOutput, PromptedOutput], ids=lambda kind: kind.__name__)
def check_output(base: str, api: str, kind: Any) -> None:
    """output of a pydantic type: kind, API"""
    found = agent(base, api, output_type=kind(Person)).run_sync(PERSON_QUESTION).output
    assert isinstance(found, Person)
    assert found == PERSON or kind is not NativeOutput


@APIS
def check_output_stream(base: str, api: str) -> None:
    """output of a pydantic type, streamed"""

    async def run() -> Any:
        async with agent(base, api, output_type=NativeOutput(Person)).run_stream(PERSON_QUESTION) as result:
            return await result.get_output()

    assert asyncio.run(run()) == PERSON
