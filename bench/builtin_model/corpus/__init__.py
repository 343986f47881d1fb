"""Owns the corpus: a deterministic generator of conversations about a small world, with no text from other sources.

One module per skill draws *items*; a hash of an item's content decides whether it is held out of training.
``conversation`` makes a training example from one or several items, ``golden`` the evaluation set from held-out items.
It must know neither torch nor the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import NamedTuple

from bench.builtin_model.corpus import arithmetic, jsons, lists, smalltalk, stories, tandem, tools, world
from bench.builtin_model.corpus.items import Item, Message, system

__all__ = ["SKILLS", "Conversation", "Item", "conversation", "golden", "held_out", "record", "trained", "write_golden"]

SKILLS: dict[str, Callable[[Random], Item]] = {
    "smalltalk": smalltalk.draw,
    "world": world.draw,
    "tandem": tandem.draw,
    "arithmetic": arithmetic.draw,
    "lists": lists.draw,
    "json": jsons.draw,
    "tools": tools.draw,
    "stories": stories.draw,
}
SHARES = {
    "smalltalk": 16, "world": 18, "tandem": 12, "arithmetic": 20, "lists": 14, "json": 9, "tools": 10, "stories": 4,
}  # fmt: skip
"""Relative frequency of each skill, in items."""
LATER_SHARES = {
    "smalltalk": 6, "world": 6, "tandem": 5, "arithmetic": 11, "lists": 34, "json": 22, "tools": 13, "stories": 3,
}  # fmt: skip
"""Frequencies in the later part of training, when the model forms sentences but still has to learn exact copying and
sorting."""
GOLDEN_COUNTS = {
    "smalltalk": 50, "world": 50, "tandem": 30, "arithmetic": 50, "lists": 50, "json": 30, "tools": 30, "stories": 20,
}  # fmt: skip
GOLDEN_SEED = 2024
_SYSTEMS = (
    "You are a helpful assistant.", "You are Tandem's built-in model.", "Be kind.", "Answer in short sentences.",
    "You are a friendly assistant.", "Be short.", "Help the user.", "You are a small and honest assistant.",
)  # fmt: skip
GOES_ON, LONG, LONG_GOES_ON = 0.25, 0.006, 0.96
"""Probabilities that a conversation gets one more exchange, that it is a long one, and that a long one gets one more
exchange."""
MAX_CHARACTERS = 4000
_CHATTY = ("smalltalk", "world", "tandem")


class Conversation(NamedTuple):
    """One training example: messages and offered tools or, in ``raw``, plain text without roles."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, object], ...] = ()
    raw: str = ""


def trained(skill: str, rng: Random) -> Item:
    """Draw an item of the training split."""
    while (item := SKILLS[skill](rng)).held_out:
        pass
    return item


def held_out(skill: str, rng: Random) -> Item:
    """Draw an item of the held-out split."""
    while not (item := SKILLS[skill](rng)).held_out:
        pass
    return item


def conversation(rng: Random, shares: Mapping[str, int] = SHARES) -> Conversation:
    """Draw a training example: usually one exchange, sometimes several, sometimes with a system prompt or with tools
    that it does not need."""
    first = trained(rng.choices(list(shares), list(shares.values()))[0], rng)
    if first.skill == "stories" and rng.random() < 0.15:
        return Conversation((), raw=first.messages[-1]["content"])
    more = LONG_GOES_ON if rng.random() < LONG else GOES_ON
    items, length = [first], _length(first)
    while not _has_system(first) and rng.random() < more and length < MAX_CHARACTERS:
        items.append(_companion(rng, first, shares))
        length += _length(items[-1])
    rng.shuffle(items)
    messages = tuple(message for item in items for message in item.messages)
    offered = first.tools
    if not offered and rng.random() < 0.04 and all(item.skill in _CHATTY for item in items):
        offered = tools.offered(rng)
    if messages[0]["role"] != "system" and rng.random() < 0.12:
        messages = (system(rng.choice(_SYSTEMS)), *messages)
    return Conversation(messages, offered)


def _companion(rng: Random, first: Item, shares: Mapping[str, int]) -> Item:
    """Draw an item to combine with ``first``. If that offers tools, the companion asks nothing that a tool answers."""
    skills = _CHATTY if first.tools else tuple(name for name in shares if name != "tools")
    weights = [shares[name] for name in skills]
    while _has_system(item := trained(rng.choices(skills, weights)[0], rng)):
        pass
    return item


def _has_system(item: Item) -> bool:
    """Return whether the item has its own system prompt, which would apply to its companions too."""
    return bool(item.messages[0]["role"] == "system")


def _length(item: Item) -> int:
    return sum(len(message["content"]) for message in item.messages)


def golden() -> list[Item]:
    """Return the evaluation set: distinct held-out items of all skills."""
    items: list[Item] = []
    for skill, count in GOLDEN_COUNTS.items():
        rng, seen = Random(f"{GOLDEN_SEED} {skill}"), set[str]()
        while len(seen) < count:
            item = held_out(skill, rng)
            if item.key not in seen:
                seen.add(item.key)
                items.append(item)
    return items


def record(item: Item) -> dict[str, object]:
    """Return a golden item as stored in the file: its messages, the reference answer, and the check of an answer."""
    asked, reference = [_as_sent(message) for message in item.messages[:-1]], _as_sent(item.messages[-1])
    kept = {"skill": item.skill, "messages": asked, "reference": reference, "check": item.check}
    return kept | ({"tools": list(item.tools)} if item.tools else {})


def _as_sent(message: Message) -> Message:
    """Return ``message`` as clients of the OpenAI API send it: tool calls have ids, and their arguments are text."""
    if message["role"] == "tool":
        return {"role": "tool", "tool_call_id": "call_1", "content": message["content"]}
    if not message.get("tool_calls"):
        return message
    function = message["tool_calls"][0]["function"]
    sent = {"name": function["name"], "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {**message, "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": sent}]}


def write_golden(target: Path) -> None:
    """Write the golden set as JSON lines."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(record(item), ensure_ascii=False) + "\n" for item in golden())
    target.write_text("".join(lines), encoding="utf-8")
