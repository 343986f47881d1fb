# ruff: noqa: E501 (tables of sentences read best on long lines)
"""JSON answers to a given schema: facts in plain words, a schema, and the object that holds the facts."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from bench.builtin_model.corpus.items import Item, Message, assistant, city, person, system, user
from bench.builtin_model.corpus.lists import WORDS

_COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "pink", "orange", "purple")
_ANIMALS = ("dog", "cat", "horse", "cow", "goat", "hen", "duck", "rabbit", "fish", "parrot")
_JOBS = "teacher baker doctor farmer pilot painter nurse driver cook gardener engineer singer".split()
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_WHO = ("The person", "The customer", "A friend", "The guest", "My neighbour", "The new member")


class JsonField(NamedTuple):
    """A property: its schema, how a value is drawn, and phrases that state it, with ``{v}`` for the value. A boolean has
    two phrases, for true and for false."""

    name: str
    schema: dict[str, Any]
    draw: Callable[[Random], Any]
    sayings: tuple[str, ...]


_STRING, _INTEGER, _BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_NAMES = {"type": "array", "items": {"type": "string"}}


def _words(rng: Random) -> list[str]:
    return rng.sample(WORDS, rng.randint(1, 3))


_FIELDS = (
    JsonField("name", _STRING, person, ("the name is {v}", "is called {v}", "has the name {v}")),
    JsonField("age", _INTEGER, lambda rng: rng.randrange(1, 100), ("is {v} years old", "the age is {v}")),
    JsonField("city", _STRING, city, ("lives in {v}", "comes from {v}", "the city is {v}")),
    JsonField("job", _STRING, lambda rng: rng.choice(_JOBS), ("works as a {v}", "the job is {v}")),
    JsonField("colour", _STRING, lambda rng: rng.choice(_COLOURS), ("likes the colour {v}", "the colour is {v}")),
    JsonField("color", {"type": "string", "enum": list(_COLOURS[:3])}, lambda rng: rng.choice(_COLOURS[:3]), ("the color is {v}",)),
    JsonField("animal", _STRING, lambda rng: rng.choice(_ANIMALS), ("has a {v}", "the animal is a {v}")),
    JsonField("price", _INTEGER, lambda rng: rng.randrange(1, 1000), ("the price is {v}", "pays {v} coins")),
    JsonField("count", _INTEGER, lambda rng: rng.randrange(1, 200), ("the count is {v}", "there are {v} pieces")),
    JsonField("day", _STRING, lambda rng: rng.choice(_DAYS), ("comes on {v}", "the day is {v}")),
    JsonField("year", _INTEGER, lambda rng: rng.randrange(1900, 2030), ("the year is {v}", "was there in {v}")),
    JsonField("happy", _BOOLEAN, lambda rng: rng.random() < 0.5, ("is happy", "is not happy")),
    JsonField("married", _BOOLEAN, lambda rng: rng.random() < 0.5, ("is married", "is not married")),
    JsonField("open", _BOOLEAN, lambda rng: rng.random() < 0.5, ("is open", "is not open")),
    JsonField("items", _NAMES, _words, ("the items are {v}", "buys {v}")),
    JsonField("tags", _NAMES, _words, ("the tags are {v}",)),
    JsonField("friend", _STRING, person, ("has a friend called {v}", "the friend is {v}")),
    JsonField("size", {"type": "string", "enum": ["small", "medium", "large"]},
          lambda rng: rng.choice(("small", "medium", "large")), ("the size is {v}", "wants size {v}")),
    JsonField("food", _STRING, lambda rng: rng.choice(WORDS), ("eats {v}", "the food is {v}")),
    JsonField("score", _INTEGER, lambda rng: rng.randrange(0, 101), ("the score is {v}", "has {v} points")),
)  # fmt: skip
_REQUESTS = (
    "{text} Answer with JSON that fits this schema: {schema}",
    "Give me JSON for this schema: {schema} The facts: {text}",
    "{text} Write this as JSON. Schema: {schema}",
    "Schema: {schema} Text: {text} Answer with JSON only.",
    "Fill this JSON schema: {schema} from this text: {text}",
    "Extract the facts as JSON. {text} The schema is {schema}",
    "Turn this into JSON: {text} Use the schema {schema}",
)
_SYSTEMS = (
    "Answer with JSON that fits this schema: {schema}",
    "Always answer in JSON. The schema is {schema}",
    "Extract the facts from the text as JSON. Schema: {schema}",
)


def draw(rng: Random) -> Item:
    """Draw an item of this skill."""
    fields = rng.sample(_FIELDS, rng.choice((1, 2, 2, 3, 3, 4)))
    value = {field.name: field.draw(rng) for field in fields}
    schema = _schema(rng, fields)
    written = json.dumps(schema, separators=rng.choice(((", ", ": "), (",", ":"))))
    text = _text(rng, fields, value)
    if rng.random() < 0.2:
        prompt: tuple[Message, ...] = (system(rng.choice(_SYSTEMS).format(schema=written)), user(text))
    else:
        prompt = (user(rng.choice(_REQUESTS).format(text=text, schema=written)),)
    return Item(
        "json",
        " ".join(sorted(field.name for field in fields)),
        (*prompt, assistant(json.dumps(value, ensure_ascii=False))),
        {"kind": "json", "schema": schema, "value": value},
    )


def _schema(rng: Random, fields: list[JsonField]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {field.name: field.schema for field in fields}}
    if rng.random() < 0.7:
        schema["required"] = [field.name for field in fields]
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    return schema


def _text(rng: Random, fields: list[JsonField], value: dict[str, Any]) -> str:
    """Return the facts in words, in random order."""
    who, clauses = rng.choice(_WHO), []
    for field in rng.sample(fields, len(fields)):
        clause = _clause(rng, field, value[field.name])
        clauses.append(clause[0].upper() + clause[1:] if clause.startswith(("the ", "there ")) else f"{who} {clause}")
    return ". ".join(clauses) + "."


def _clause(rng: Random, field: JsonField, value: Any) -> str:
    if isinstance(value, bool):
        return field.sayings[0 if value else 1]
    return rng.choice(field.sayings).format(v=" and ".join(value) if isinstance(value, list) else value)
