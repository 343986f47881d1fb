# ruff: noqa: E501 (tables of sentences read best on long lines)
"""The elements of the corpus: items, their split into training and held-out, and functions that draw words."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

Message = dict[str, Any]
"""A chat message as in OpenAI's API: ``role``, ``content``, and ``tool_calls`` if there are any."""
HELD_OUT_OF = 24
"""One item in this many is held out."""


@dataclass(frozen=True)
class Item:
    """One exchange that ends with the assistant's reference answer.

    ``key`` is the content that must not occur on both sides of the split (a pair of numbers, a list of words, the
    wording of a question); ``check`` judges answers to all messages but the last.
    """

    skill: str
    key: str
    messages: tuple[Message, ...]
    check: dict[str, Any]
    tools: tuple[dict[str, Any], ...] = field(default=())

    @property
    def held_out(self) -> bool:
        """Whether the item belongs to the held-out split, by a hash of its skill and key."""
        digest = hashlib.blake2b(f"{self.skill}|{self.key}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_OF == 0


def ask(skill: str, key: str, question: str, answer: str, check: dict[str, Any]) -> Item:
    """Return the usual kind of item: one question, one answer."""
    return Item(skill, key, (user(question), assistant(answer)), check)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def facts(accept: Sequence[str], reject: Sequence[str] = ()) -> dict[str, Any]:
    """Return a check of kind ``facts``: regular expressions that the answer must match, and others that it must
    not."""
    return {"kind": "facts", "accept": list(accept), "reject": list(reject)}


def wording(text: str) -> str:
    """Return a question's key for the split, which ignores case, punctuation and spacing."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def article(noun: str) -> str:
    """Return ``noun`` after "a" or "an", by its first letter."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def sentence(text: str) -> str:
    """Return ``text`` with its first letter capitalized."""
    return text[:1].upper() + text[1:]


_ONSETS = "b br c d f g gr h j k l m n p r s sh st t tr v z".split()
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
_CODAS = ("", "", "", "l", "n", "r", "s", "t", "m", "nd")


def invented(rng: Random, syllables: int = 2) -> str:
    """Draw an invented name, so that the model learns to copy names rather than to memorize them."""
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables)]
    return ("".join(parts) + rng.choice(_CODAS)).capitalize()


PEOPLE = (
    "Ana", "Ben", "Carla", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Kira", "Leo", "Mara", "Nils", "Olga",
    "Paul", "Rosa", "Sam", "Tina", "Umar", "Vera", "Walter", "Yara", "Zoe", "Amir", "Bela", "Clara", "Dana", "Elif", "Finn",
    "Gina", "Hana", "Ivan", "Jana", "Karim", "Lena", "Milo", "Nora", "Otto", "Petra", "Ravi", "Sara", "Tom", "Lucy", "Max",
    "Maya", "Noah", "Mia", "Alice", "Bob",
)  # fmt: skip
CITIES = (
    "Paris", "London", "Berlin", "Rome", "Madrid", "Lisbon", "Vienna", "Prague", "Oslo", "Dublin", "Athens", "Cairo", "Tokyo",
    "Delhi", "Lima", "Toronto", "Boston", "Chicago", "Sydney", "Zurich", "Hamburg", "Munich", "Milan", "Warsaw", "Budapest",
    "Helsinki", "Stockholm", "Copenhagen", "Brussels", "Amsterdam", "Istanbul", "Nairobi", "Lagos", "Seoul", "Beijing",
    "Singapore", "Havana", "Bogota", "Quito", "Geneva", "Lyon", "Porto", "Seattle", "Denver", "New York", "San Francisco",
)  # fmt: skip


def person(rng: Random) -> str:
    """Draw a person's name, sometimes an invented one."""
    return rng.choice(PEOPLE) if rng.random() < 0.7 else invented(rng, rng.choice((1, 2, 2, 3)))


def city(rng: Random) -> str:
    """Draw a city's name, sometimes an invented one."""
    return rng.choice(CITIES) if rng.random() < 0.6 else invented(rng, rng.choice((2, 2, 3)))
