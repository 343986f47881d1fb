"""langchain-openai's ChatOpenAI, over chat completions and over responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
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
    Person,
)

CLIENT = "langchain-openai"
APIS = pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return json.dumps({**WEATHER_RESULT, "asked": city})


def chat(url: str, responses: bool = False, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=url,
        api_key=KEY,  # type: ignore[arg-type]
        model=MODEL,
        temperature=0,
        max_retries=0,
        use_responses_api=responses,
        **fields,
    )


@APIS
def check_invoke(url: str, responses: bool) -> None:
    """invoke"""
    message = chat(url, responses).invoke(GREETING)
    assert message.text and message.usage_metadata and message.usage_metadata["output_tokens"]


@APIS
def check_stream(url: str, responses: bool) -> None:
    """stream"""
    model = chat(url, responses)
    parts = list(model.stream(GREETING))
    assert len(parts) > 2 and "".join(part.text for part in parts) == model.invoke(GREETING).text


@APIS
def check_async(url: str, responses: bool) -> None:
    """ainvoke, astream, abatch"""

    async def run() -> list[str]:
        model = chat(url, responses)
        streamed = "".join([part.text async for part in model.astream(GREETING)])
        both = await model.abatch([GREETING, GREETING])
        return [(await model.ainvoke(GREETING)).text, streamed, *(each.text for each in both)]

    (text,) = set(asyncio.run(run()))
    assert text


@APIS
@pytest.mark.parametrize("choice", ["auto", "any", "get_weather"])
def check_bind_tools(url: str, choice: str, responses: bool) -> None:
    """bind_tools"""
    (call,) = chat(url, responses).bind_tools([get_weather], tool_choice=choice).invoke(WEATHER_QUESTION).tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})


@APIS
def check_tool_stream(url: str, responses: bool) -> None:
    """bind_tools, streamed"""
    whole: Any = None
    for part in chat(url, responses).bind_tools([get_weather]).stream(WEATHER_QUESTION):
        assert isinstance(part, AIMessageChunk)
        whole = part if whole is None else whole + part
    (call,) = whole.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})


@APIS
def check_tool_result(url: str, responses: bool) -> None:
    """a tool's call and result as history"""
    model = chat(url, responses).bind_tools([get_weather])
    question = HumanMessage(WEATHER_QUESTION)
    asked = model.invoke([question])
    result = ToolMessage(json.dumps(WEATHER_RESULT), tool_call_id=asked.tool_calls[0]["id"])
    assert model.invoke([question, asked, result]).text == WEATHER_ANSWER


METHODS = [
    ("function_calling", False),
    ("function_calling", True),
    ("json_schema", True),
    ("json_schema", False),
    ("json_mode", None),
]


@APIS
@pytest.mark.parametrize(("method", "strict"), METHODS)
def check_structured(url: str, method: Any, strict: bool | None, responses: bool) -> None:
    """with_structured_output: method, strict, API"""
    model = chat(url, responses).with_structured_output(Person, method=method, strict=strict)
    found = model.invoke(PERSON_QUESTION)
    assert isinstance(found, Person)
    assert found == PERSON or method == "function_calling"  # whose schema the built-in model cannot fill rightly


def check_structured_by_schema(url: str) -> None:
    """with_structured_output: a JSON schema, include_raw"""
    schema = {**PERSON_SCHEMA, "title": "Person"}
    found = chat(url).with_structured_output(schema, method="json_schema", include_raw=True).invoke(PERSON_QUESTION)
    assert isinstance(found, dict) and found["parsed"] == PERSON.model_dump() and found["parsing_error"] is None


def check_structured_stream(url: str) -> None:
    """with_structured_output, streamed"""
    parts = list(chat(url).with_structured_output(Person, method="json_schema").stream(PERSON_QUESTION))
    assert parts[-1] == PERSON


def check_logprobs(url: str) -> None:
    """logprobs, n, stop, seed"""
    model = chat(url, logprobs=True, top_logprobs=2, n=2, seed=1, stop_sequences=["zzz"])
    assert len(model.generate([[HumanMessage(GREETING)]]).generations[0]) == 2
    assert model.invoke(GREETING).response_metadata["logprobs"]["content"]


def check_completions(url: str) -> None:
    """OpenAI (text completions), whole and streamed"""
    model = OpenAI(base_url=url, api_key=KEY, model=MODEL, temperature=0, max_tokens=6, max_retries=0)  # type: ignore[arg-type]
    assert model.invoke("One two") == "".join(model.stream("One two"))


def check_embeddings(url: str) -> None:
    """OpenAIEmbeddings"""
    model = OpenAIEmbeddings(
        base_url=url,
        api_key=KEY,  # type: ignore[arg-type]
        model=MODEL,
        max_retries=0,
        check_embedding_ctx_length=False,
    )
    model.embed_query(GREETING)
