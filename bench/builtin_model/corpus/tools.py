# ruff: noqa: E501 (tables of sentences read best on long lines)
"""Tool calls to weather, calculator and clock, in the format of Hermes and Qwen, and answers made from their results."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from bench.builtin_model.corpus.items import Item, Message, assistant, city, facts, system, user

Tool = dict[str, Any]
Flow = tuple[str, str, dict[str, Any], dict[str, Any], str, dict[str, Any]]
"""Key, question, arguments, the tool's result, the answer made from it, and that answer's check."""

_CITY = {"type": "string", "description": "Name of the city"}
_WEATHER_NAMES = ("get_weather", "get_weather", "weather", "get_current_weather")
_CALCULATOR_NAMES = ("calculator", "calculator", "calculate", "calc")
_CLOCK_NAMES = ("get_time", "get_time", "clock", "get_current_time")
_SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy")
_WEATHER_ASK = (
    "What is the weather in {c}?", "How is the weather in {c}?", "What is the weather like in {c}?", "Is it warm in {c}?",
    "Tell me the weather in {c}.", "Weather in {c}?", "Do I need a coat in {c} today?", "How warm is it in {c} now?",
    "weather {c}", "Is it raining in {c}?", "Please look up the weather in {c}.", "What is the temperature in {c}?",
    "I am going to {c}. How is the weather there?", "How's the weather in {c} today?", "Can you check the weather for {c}?",
)  # fmt: skip
_CLOCK_ASK = (
    "What time is it in {c}?", "How late is it in {c}?", "Tell me the time in {c}.", "Time in {c}?", "What is the time in {c}?",
    "Can you tell me what time it is in {c}?", "Which time do they have in {c}?", "What's the time in {c} now?",
    "Is it late in {c}?", "I want to call a friend in {c}. What time is it there?", "Please look at the clock in {c}.",
)  # fmt: skip
_NOW_ASK = (
    "What time is it?",
    "What is the time?",
    "How late is it?",
    "Tell me the time.",
    "Can you tell me the time, please?",
    "Time?",
)
_MATH_ASK = (
    "What is {x}?", "Calculate {x}.", "How much is {x}?", "Compute {x}.", "{x}", "Please work out {x}.", "Use the calculator: {x}",
    "Can you calculate {x} for me?", "I need {x}.", "{x} = ?", "What's {x}?", "Solve {x}.",
)  # fmt: skip
_SPOKEN = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
_SYSTEMS = (
    "You are a helpful assistant.",
    "You can use tools.",
    "Use the tools when they help.",
    "Be short and exact.",
)


def draw(rng: Random) -> Item:
    """Draw an item that ends with the tool call, or one that ends with the answer made from its result."""
    kind = rng.randrange(3)
    flow = (_weather, _calculation, _clock)[kind](rng)
    tools, name = _offered(rng, kind)
    key, question, arguments, result, answer, check = flow
    call = _call(name, arguments)
    prompt: tuple[Message, ...] = (user(question),)
    if rng.random() < 0.2:
        prompt = (system(rng.choice(_SYSTEMS)), *prompt)
    if rng.random() < 0.3:
        wanted = {"kind": "tool_call", "name": name, "arguments": arguments}
        return Item("tools", key, (*prompt, call), wanted, tools)
    returned = {"role": "tool", "content": json.dumps(result)}
    return Item("tools", key, (*prompt, call, returned, assistant(answer)), check, tools)


def offered(rng: Random) -> tuple[Tool, ...]:
    """Draw tools for a conversation that does not need them."""
    return _offered(rng, rng.randrange(3))[0]


def _call(name: str, arguments: dict[str, Any]) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def _offered(rng: Random, needed: int) -> tuple[tuple[Tool, ...], str]:
    """Draw one to three tools in random order, including the needed one, and return them with its name."""
    kinds = [needed, *(other for other in range(3) if other != needed and rng.random() < 0.55)]
    rng.shuffle(kinds)
    tools = tuple(_TOOLS[kind](rng) for kind in kinds)
    return tools, tools[kinds.index(needed)]["function"]["name"]


def _tool(name: str, description: str, properties: dict[str, Any], required: list[str]) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _city_property(rng: Random) -> dict[str, Any]:
    return {"city": _CITY if rng.random() < 0.5 else {"type": "string"}}


def _weather_tool(rng: Random) -> Tool:
    words = (
        "Get the weather of a city",
        "The current weather in a city",
        "Weather report",
        "Get current weather for a city",
    )
    return _tool(rng.choice(_WEATHER_NAMES), rng.choice(words), _city_property(rng), ["city"])


def _calculator_tool(rng: Random) -> Tool:
    words = ("Calculate an expression", "A calculator", "Evaluate an arithmetic expression", "Do arithmetic")
    expression = {"type": "string"} if rng.random() < 0.5 else {"type": "string", "description": "For example 2 * 3"}
    return _tool(rng.choice(_CALCULATOR_NAMES), rng.choice(words), {"expression": expression}, ["expression"])


def _clock_tool(rng: Random) -> Tool:
    words = ("Get the time", "The current time, here or in a city", "A clock", "Get the current time in a city")
    return _tool(rng.choice(_CLOCK_NAMES), rng.choice(words), _city_property(rng), rng.choice(([], ["city"])))


_TOOLS: tuple[Callable[[Random], Tool], ...] = (_weather_tool, _calculator_tool, _clock_tool)


def _weather(rng: Random) -> Flow:
    where, degrees, sky = city(rng), rng.randrange(-15, 41), rng.choice(_SKIES)
    parts = [
        (rng.choice(("temperature", "temperature", "temp")), degrees),
        (rng.choice(("sky", "condition", "weather")), sky),
    ]
    if rng.random() < 0.3:
        parts.append(("humidity", rng.randrange(20, 100)))
    if rng.random() < 0.3:
        parts.insert(0, ("city", where))
    answer = f"It is {degrees} degrees and {sky} in {where}."
    check = facts(
        [rf"(?<![-\d]){degrees} degrees.*{sky}.*{where}"], [rf"\b{other}\b" for other in _SKIES if other != sky]
    )
    return f"city {where}", rng.choice(_WEATHER_ASK).format(c=where), {"city": where}, dict(parts), answer, check


def _clock(rng: Random) -> Flow:
    time = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    if rng.random() < 0.25:
        key, question = f"now {time}", rng.choice(_NOW_ASK)
        return key, question, {}, {"time": time}, f"It is {time}.", facts([rf"\b{time}\b"])
    where = city(rng)
    answer = f"It is {time} in {where}."
    result = {"city": where, "time": time} if rng.random() < 0.3 else {"time": time}
    return (
        f"city {where}",
        rng.choice(_CLOCK_ASK).format(c=where),
        {"city": where},
        result,
        answer,
        facts([rf"\b{time} in {where}"]),
    )


def _calculation(rng: Random) -> Flow:
    op = rng.choice("+-**/")
    a, b = (rng.randrange(1, 10 ** rng.randint(1, 5)) for _ in range(2))
    if op == "/":
        a, b = a * min(b, 999), min(b, 999)
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[op]
    expression = f"{a} {op} {b}"
    spoken = f"{a} {_SPOKEN[op]} {b}" if rng.random() < 0.3 else expression
    question = rng.choice(_MATH_ASK).format(x=spoken)
    check = {"kind": "number", "value": value}
    return (
        f"math {expression}",
        question,
        {"expression": expression},
        {"result": value},
        f"{expression} = {value}.",
        check,
    )
