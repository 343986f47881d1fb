"""OpenAI's agents SDK with its model for chat completions and its model for responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
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

CLIENT = "openai-agents"
APIS = pytest.mark.parametrize("api", ["chat", "responses"])
SETTINGS = ModelSettings(temperature=0, max_tokens=400)
set_tracing_disabled(True)


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    assert city == "Oslo"
    return json.dumps(WEATHER_RESULT)


def model_of(url: str, api: str) -> Any:
    client = AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0)
    return (OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel)(model=MODEL, openai_client=client)


def agent(url: str, api: str, **fields: Any) -> Agent[Any]:
    return Agent(**{"name": "assistant", "model": model_of(url, api), "model_settings": SETTINGS, **fields})


def output(made: Agent[Any], question: str, *, stream: bool = False) -> Any:
    """Run the agent until its final output."""

    async def run() -> Any:
        config = RunConfig(tracing_disabled=True)
        if not stream:
            return (await Runner.run(made, question, run_config=config)).final_output
        result = Runner.run_streamed(made, question, run_config=config)
        kinds = {event.type async for event in result.stream_events()}
        assert "raw_response_event" in kinds
        return result.final_output

    return asyncio.run(run())


@APIS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def check_run(url: str, api: str, stream: bool) -> None:
    """run, with instructions"""
    assert output(agent(url, api, instructions="Be short."), GREETING, stream=stream)


@APIS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def check_tools(url: str, api: str, stream: bool) -> None:
    """a tool's call and result"""
    assert output(agent(url, api, tools=[get_weather]), WEATHER_QUESTION, stream=stream) == WEATHER_ANSWER


@APIS
def check_tool_required(url: str, api: str) -> None:
    """tool_choice required, then an answer"""
    settings = ModelSettings(temperature=0, max_tokens=400, tool_choice="required", parallel_tool_calls=False)
    made = agent(url, api, tools=[get_weather], model_settings=settings)
    assert output(made, WEATHER_QUESTION) == WEATHER_ANSWER


@APIS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def check_output_type(url: str, api: str, stream: bool) -> None:
    """output_type of a pydantic type"""
    assert output(agent(url, api, output_type=Person), PERSON_QUESTION, stream=stream) == PERSON


@APIS
def check_handoff(url: str, api: str) -> None:
    """a handoff to another agent, which answers with a tool"""
    settings = ModelSettings(temperature=0, max_tokens=400, tool_choice="required")
    other = agent(url, api, name="weather", tools=[get_weather])
    made = agent(url, api, name="first", handoffs=[handoff(other)], model_settings=settings)
    assert isinstance(output(made, WEATHER_QUESTION), str)


@APIS
def check_sessions(url: str, api: str) -> None:
    """the history of an earlier run as input"""

    async def run() -> Any:
        made = agent(url, api, tools=[get_weather])
        config = RunConfig(tracing_disabled=True)
        first = await Runner.run(made, WEATHER_QUESTION, run_config=config)
        again = [*first.to_input_list(), {"role": "user", "content": GREETING}]
        return (await Runner.run(made, again, run_config=config)).final_output

    assert asyncio.run(run())
