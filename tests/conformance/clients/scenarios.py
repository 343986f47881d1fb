"""What the clients ask of the built-in model, which answers it rightly: one tool, one schema, and their answers."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

MODEL = "tandem-builtin"
KEY = "none"
GREETING = "Hello"
WEATHER_QUESTION = "What is the weather in Oslo?"
WEATHER_RESULT = {"temperature": 7, "sky": "rainy"}
WEATHER_ANSWER = "It is 7 degrees and rainy in Oslo."
WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather of a city", "parameters": WEATHER_SCHEMA},
}


class GetWeather(BaseModel):
    """Get the weather of a city"""

    city: str


class Person(BaseModel):
    """What PERSON_QUESTION asks for. Bounded, so that an answer ends though the model does not know where to end it."""

    name: Annotated[str, Field(max_length=12)]
    age: Annotated[int, Field(ge=0, le=150)]
    size: Literal["small", "medium", "large"]


PERSON_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "size": {"type": "string", "enum": ["small", "medium", "large"]},
    },
    "required": ["name", "age", "size"],
    "additionalProperties": False,
}
PERSON = Person(name="Tom", age=34, size="small")
PERSON_QUESTION = (
    "The person is called Tom. The person is 34 years old. The size is small. "
    f"Answer with JSON that fits this schema: {json.dumps(PERSON_SCHEMA)}"
)
