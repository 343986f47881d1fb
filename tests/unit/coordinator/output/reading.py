"""Runs an output parser over a text cut into tokens."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.output.deltas import Delta
from coordinator.output.formats import REASONING_FORMATS, TOOL_FORMATS, OutputFormat
from coordinator.output.parser import OutputParser
from coordinator.output.regions import load

TOOLS: list[dict[str, object]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"enum": ["C", "F"]},
                    "exact": {"type": "boolean"},
                    "where": {"type": "object", "properties": {"lat": {"type": "number"}}},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]

JSON_LINES: dict[str, Any] = {
    "start_anchor": "<bot>",
    "fields": {
        "thinking": {"open": "<why>", "close": "</why>"},
        "tool_calls": {
            "open": "<do>",
            "close": "</do>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": ["<end>", "<end2>"]},
    },
}
"""A response template of a tokenizer."""


@dataclass
class Read:
    """What all deltas of one output add up to. ``calls``: id, name and arguments' text of each."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def named(self) -> list[tuple[str, Any]]:
        """Name and parsed arguments of each call."""
        return [(name, json.loads(arguments)) for _, name, arguments in self.calls]


def add_up(deltas: Iterable[Delta]) -> Read:
    """Join ``deltas`` and check what must hold for each of them."""
    read, heads, texts = Read(), list[tuple[str, str]](), list[list[str]]()
    for delta in deltas:
        read.content += delta.content
        read.reasoning += delta.reasoning
        for call in delta.calls:
            if call.index == len(heads):
                assert call.id and call.name, "the first delta of a call has its id and name"
                heads.append((call.id, call.name))
                texts.append([])
            else:
                assert call.id is None and call.name is None and call.index == len(heads) - 1
                assert call.arguments, "a later delta of a call adds something"
            texts[call.index].append(call.arguments)
    read.calls = [(*head, "".join(parts)) for head, parts in zip(heads, texts, strict=True)]
    for _, arguments in read.named:
        assert isinstance(arguments, dict), "arguments are one JSON object"
    return read


def parser_of(
    tools: str = "",
    reasoning: str = "",
    *,
    thinking: bool = False,
    parse_tools: bool = True,
    parse_reasoning: bool = True,
    known: Sequence[dict[str, object]] = TOOLS,
    tokens: frozenset[str] = frozenset(),
    calls_first: bool = False,
) -> OutputParser:
    numbers = itertools.count()
    format = OutputFormat(TOOL_FORMATS[tools] if tools else None, REASONING_FORMATS[reasoning] if reasoning else None)
    return OutputParser(
        format,
        known,
        thinking=thinking,
        parse_tools=parse_tools,
        parse_reasoning=parse_reasoning,
        new_id=lambda: f"call_{next(numbers)}",
        tokens=tokens,
        calls_first=calls_first,
    )


def parser_for(
    template: dict[str, Any],
    thinking: bool = False,
    parse_tools: bool = True,
    reasons: bool = True,
    tokens: frozenset[str] = frozenset(),
) -> OutputParser:
    """Return the parser of a model with the response template ``template``."""
    regions, numbers = load(template), itertools.count()
    assert regions is not None
    return OutputParser(
        OutputFormat(regions=regions),
        TOOLS,
        thinking=thinking,
        parse_tools=parse_tools,
        parse_reasoning=reasons,
        new_id=lambda: f"call_{next(numbers)}",
        tokens=tokens,
    )


def read(parser: OutputParser, tokens: Iterable[tuple[str, bool] | tuple[str, bool, bool]]) -> Read:
    """Return what ``parser`` reads in ``tokens``, the arguments of its method ``push``."""
    deltas = [parser.push(*token) for token in tokens]
    done = add_up([*deltas, parser.finish()])
    assert parser.made_calls == bool(done.calls)
    return done


def cuts(text: str, control: Sequence[str] = (), *, rounds: int = 4) -> Iterator[list[tuple[str, bool]]]:
    """Yield ways to cut ``text`` into tokens: whole, in two at every place, into single characters, at random.

    Each text of ``control`` is one control token in all of them."""
    whole = _whole(text, control)
    yield whole
    for number, (piece, special) in enumerate(whole):
        for place in range(1, 0 if special else len(piece)):
            yield [*whole[:number], (piece[:place], False), (piece[place:], False), *whole[number + 1 :]]
    yield [each for piece, special in whole for each in ([(piece, True)] if special else [(c, False) for c in piece])]
    for seed in range(rounds):
        yield random_cuts(text, seed, control)


def random_cuts(text: str, seed: int, control: Sequence[str] = ()) -> list[tuple[str, bool]]:
    """Cut ``text`` into tokens of one to a few characters, the same in every run with the same ``seed``."""
    chance = random.Random(seed)
    most = chance.choice((2, 4, 8, 16))
    tokens = list[tuple[str, bool]]()
    for piece, special in _whole(text, control):
        at = 0
        while at < len(piece):
            size = len(piece) if special else chance.randint(1, most)
            tokens.append((piece[at : at + size], special))
            at += size
    return tokens


def _whole(text: str, control: Sequence[str]) -> list[tuple[str, bool]]:
    tokens = list[tuple[str, bool]]()
    while text:
        found = [(text.find(each), -len(each), each) for each in control if each in text]
        at, _, token = min(found, default=(len(text), 0, ""))
        if at:
            tokens.append((text[:at], False))
        if token:
            tokens.append((token, True))
        text = text[at + len(token) :]
    return tokens
