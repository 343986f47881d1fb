"""instructor, in each mode that it has for OpenAI's and Anthropic's clients."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterable
from typing import Any

import instructor
import pytest
from anthropic import Anthropic
from instructor import Mode
from openai import AsyncOpenAI, OpenAI
from scenarios import KEY, MODEL, PERSON_QUESTION, WEATHER_QUESTION, GetWeather, Person

CLIENT = "instructor"
MESSAGES: Any = [{"role": "user", "content": PERSON_QUESTION}]


class get_weather(GetWeather):  # noqa: N801 - the class is the tool's name
    """Get the weather of a city"""


OPENAI_MODES = (
    Mode.TOOLS,
    Mode.TOOLS_STRICT,
    Mode.FUNCTIONS,
    Mode.JSON,
    Mode.JSON_O1,
    Mode.MD_JSON,
    Mode.JSON_SCHEMA,
    Mode.PARALLEL_TOOLS,
    Mode.RESPONSES_TOOLS,
    Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS,
)
ANTHROPIC_MODES = (Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_JSON, Mode.ANTHROPIC_PARALLEL_TOOLS)


def wrap(url: str, mode: Mode) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return instructor.from_openai(OpenAI(base_url=url, api_key=KEY, max_retries=0), mode=mode)


def create(client: Any, mode: Mode, **fields: Any) -> Any:
    """Ask for what the built-in model can write in this mode: a call of its weather tool, or JSON."""
    parallel, by_tool = "PARALLEL" in mode.name, "JSON" not in mode.name
    question = WEATHER_QUESTION if by_tool else PERSON_QUESTION
    found = client.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        max_retries=0,
        response_model=Iterable[get_weather] if parallel else get_weather if by_tool else Person,
        **fields,
    )
    return [each.city for each in found] if parallel else found.city if by_tool else found


@pytest.mark.parametrize("mode", OPENAI_MODES, ids=lambda mode: mode.name)
def check_mode(url: str, mode: Mode) -> None:
    """create: mode"""
    fields: Any = {}
    if mode is Mode.MD_JSON:  # it only prompts, in a way that the built-in model does not understand
        fields["extra_body"] = {"structured_outputs": {"json": Person.model_json_schema()}}
    found = create(wrap(url, mode).chat.completions, mode, temperature=0, **fields)
    if "JSON" in mode.name:
        assert isinstance(found, Person)
    else:
        assert found == (["Oslo"] if "PARALLEL" in mode.name else "Oslo")


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON, Mode.JSON_SCHEMA], ids=lambda mode: mode.name)
def check_partial(url: str, mode: Mode) -> None:
    """create_partial (streamed): mode"""
    parts = list(
        wrap(url, mode).chat.completions.create_partial(
            model=MODEL, messages=MESSAGES, temperature=0, max_retries=0, response_model=Person
        )
    )
    assert len(parts) > 1 and Person.model_validate(parts[-1].model_dump())


def check_iterable(url: str) -> None:
    """create_iterable (streamed)"""
    found = wrap(url, Mode.TOOLS).chat.completions.create_iterable(
        model=MODEL,
        messages=[{"role": "user", "content": WEATHER_QUESTION}],
        temperature=0,
        max_retries=0,
        response_model=get_weather,
    )
    assert [each.city for each in found] == ["Oslo"]


def check_async(url: str) -> None:
    """asynchronous client"""

    async def run() -> Any:
        async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            wrapped = instructor.from_openai(client, mode=Mode.JSON_SCHEMA)
            return await wrapped.chat.completions.create(
                model=MODEL, messages=MESSAGES, temperature=0, max_retries=0, response_model=Person
            )

    assert isinstance(asyncio.run(run()), Person)


@pytest.mark.parametrize("mode", ANTHROPIC_MODES, ids=lambda mode: mode.name)
def check_anthropic_mode(base: str, mode: Mode) -> None:
    """create with Anthropic's client: mode"""
    client: Any = instructor.from_anthropic(Anthropic(base_url=base, api_key=KEY, max_retries=0), mode=mode)
    found = create(client.messages, mode, max_tokens=300, extra_body={"temperature": 0})
    if "JSON" in mode.name:
        assert isinstance(found, Person)
    else:
        assert found == (["Oslo"] if "PARALLEL" in mode.name else "Oslo")
