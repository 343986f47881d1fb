"""Intents: many wordings of one question, and a few answers. A wording is a pattern such as ``{Hi|Hello}{ there|}!``.

In an answer, the part between asterisks is the part that a right answer must contain: ``Hello! *How can I help* you?``
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from bench.builtin_model.corpus.items import Item, ask, facts, sentence, wording

_INNERMOST = re.compile(r"\{([^{}]*)\}")


class Intent(NamedTuple):
    """Patterns of a question, and its answers; any of them is right."""

    asks: tuple[str, ...]
    answers: tuple[str, ...]


def intents(text: str) -> tuple[Intent, ...]:
    """Parse blocks separated by empty lines: wordings, one per line, then answers, each after ``=``."""
    made = []
    for block in text.strip().split("\n\n"):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        asks = tuple(line for line in lines if not line.startswith("="))
        made.append(Intent(asks, tuple(line[1:].strip() for line in lines if line.startswith("="))))
    return tuple(made)


def expand(rng: Random, pattern: str) -> str:
    """Draw one of the texts that match the pattern."""
    while found := _INNERMOST.search(pattern):
        pattern = pattern[: found.start()] + rng.choice(found[1].split("|")) + pattern[found.end() :]
    return " ".join(pattern.split())


def said(answer: str) -> str:
    """Return the answer without its asterisks."""
    return answer.replace("*", "")


def keys(answers: Sequence[str]) -> list[str]:
    """Return the marked parts of the answers as regular expressions."""
    return [re.escape(key).replace("\\ ", " ") for answer in answers for key in re.findall(r"\*([^*]+)\*", answer)]


def exchange(rng: Random, skill: str, intent: Intent, opening: str = "") -> Item:
    """Draw a question of this intent and one of its answers. ``opening`` is a pattern that may precede the question."""
    question = expand(rng, rng.choice(intent.asks))
    if opening and rng.random() < 0.35:
        front = expand(rng, opening)
        question = f"{front} {question}" if front[-1] in ".!?" else f"{front} {question[:1].lower()}{question[1:]}"
    question = _casual(rng, re.sub(r"\bi\b", "I", sentence(question)))
    return ask(skill, wording(question), question, said(rng.choice(intent.answers)), facts(keys(intent.answers)))


def _casual(rng: Random, text: str) -> str:
    """Return ``text`` as people type it: sometimes in lower case or without the final punctuation."""
    pick = rng.random()
    if pick < 0.12:
        return text.rstrip("?.!")
    if pick < 0.24:
        return text.lower().rstrip("?.!")
    return text
