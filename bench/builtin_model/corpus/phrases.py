"""Intents: many wordings of one question, few answers. A wording is a pattern such as ``{Hi|Hello}{ there|}!``.

In an answer the part between asterisks is what every right answer says: ``Hello! *How can I help* you?``
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from bench.builtin_model.corpus.items import Item, ask, facts, sentence, wording

_INNERMOST = re.compile(r"\{([^{}]*)\}")


class Intent(NamedTuple):
    """Patterns of questions, and the answers of which any will do."""

    asks: tuple[str, ...]
    answers: tuple[str, ...]


def intents(text: str) -> tuple[Intent, ...]:
    """Blocks separated by empty lines: wordings, one per line, then answers, each behind ``=``."""
    made = []
    for block in text.strip().split("\n\n"):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        asks = tuple(line for line in lines if not line.startswith("="))
        made.append(Intent(asks, tuple(line[1:].strip() for line in lines if line.startswith("="))))
    return tuple(made)


def expand(rng: Random, pattern: str) -> str:
    """One of the texts that the pattern stands for."""
    while found := _INNERMOST.search(pattern):
        pattern = pattern[: found.start()] + rng.choice(found[1].split("|")) + pattern[found.end() :]
    return " ".join(pattern.split())


def said(answer: str) -> str:
    """The answer without its marks."""
    return answer.replace("*", "")


def keys(answers: Sequence[str]) -> list[str]:
    """What a right answer says, as regular expressions."""
    return [re.escape(key).replace("\\ ", " ") for answer in answers for key in re.findall(r"\*([^*]+)\*", answer)]


def exchange(rng: Random, skill: str, intent: Intent, opening: str = "") -> Item:
    """One question of this intent with one of its answers; ``opening`` is a pattern put in front of the question."""
    question = expand(rng, rng.choice(intent.asks))
    if opening and rng.random() < 0.35:
        front = expand(rng, opening)
        question = f"{front} {question}" if front[-1] in ".!?" else f"{front} {question[:1].lower()}{question[1:]}"
    question = _casual(rng, re.sub(r"\bi\b", "I", sentence(question)))
    return ask(skill, wording(question), question, said(rng.choice(intent.answers)), facts(keys(intent.answers)))


def _casual(rng: Random, text: str) -> str:
    """As people type: sometimes without a capital letter or the mark at the end."""
    pick = rng.random()
    if pick < 0.12:
        return text.rstrip("?.!")
    if pick < 0.24:
        return text.lower().rstrip("?.!")
    return text
