# ruff: noqa: E501 (tables of sentences read best on long lines)
"""Sorting and copying lists of words and of numbers."""

from __future__ import annotations

from random import Random

from bench.builtin_model.corpus.items import PEOPLE, Item, ask, invented

WORDS = tuple(
    "ant apple bag ball bear bee bell bird boat book box bread bridge bus cake candle car cat chair cheese cloud coat corn cow "
    "cup desk dog door drum duck ear egg eye farm fig fire fish flag flower fork fox frog garden goat grape hat hill honey horse "
    "house ink jam key king kite lake lamp leaf lemon lion map milk moon mouse nest night nut ocean onion orange owl paper park "
    "pear pen pig plum pond queen rain river road roof rose salt sand school sea seed ship shoe snow soap spoon star stone street "
    "sun table tea tiger tree turtle uncle valley wagon wall water wheel wind window wolf yard zebra".split()
)
_SORT_WORDS = (
    "Sort these words alphabetically: {x}", "Put these words in alphabetical order: {x}", "Sort from A to Z: {x}",
    "Please sort: {x}", "Alphabetical order, please: {x}", "Can you sort these words? {x}", "Order these words by the alphabet: {x}",
    "sort these words: {x}", "Arrange alphabetically: {x}", "Here are some words: {x}. Please sort them.",
)  # fmt: skip
_SORT_UP = (
    "Sort these numbers: {x}", "Sort from small to large: {x}", "Put these numbers in ascending order: {x}",
    "Please sort these numbers from smallest to largest: {x}", "Order these numbers: {x}", "sort: {x}", "Can you sort {x}?",
    "Arrange these numbers from low to high: {x}", "Here are some numbers: {x}. Please sort them.",
)  # fmt: skip
_SORT_DOWN = (
    "Sort these numbers from large to small: {x}", "Put these numbers in descending order: {x}",
    "Please sort from largest to smallest: {x}", "Sort in descending order: {x}", "Arrange these numbers from high to low: {x}",
)  # fmt: skip
_COPY = (
    "Repeat: {x}", "Repeat after me: {x}", "Copy this: {x}", "Say exactly this: {x}", "Please repeat these words: {x}",
    "Write this again: {x}", "Copy the following line: {x}", "Echo: {x}", "Can you repeat this? {x}", "Say it back to me: {x}",
)  # fmt: skip


def draw(rng: Random) -> Item:
    """Draw an item of this skill."""
    return rng.choice((_sorted_words, _sorted_numbers, _copied))(rng)


def _sorted_words(rng: Random) -> Item:
    words = rng.sample(WORDS, rng.randint(3, 6))
    return _item("sort", rng.choice(_SORT_WORDS), words, sorted(words))


def _sorted_numbers(rng: Random) -> Item:
    top = rng.choice((20, 100, 100, 1000))
    numbers = rng.sample(range(top), rng.randint(3, 6))
    down = rng.random() < 0.35
    order = sorted(numbers, reverse=down)
    return _item("sort", rng.choice(_SORT_DOWN if down else _SORT_UP), list(map(str, numbers)), list(map(str, order)))


def _copied(rng: Random) -> Item:
    pick = rng.random()
    if pick < 0.45:
        parts = [rng.choice(WORDS) for _ in range(rng.randint(2, 8))]
    elif pick < 0.7:
        parts = [str(rng.randrange(rng.choice((10, 100, 1000, 10000)))) for _ in range(rng.randint(2, 6))]
    elif pick < 0.85:
        parts = [invented(rng, rng.randint(1, 3)) for _ in range(rng.randint(1, 4))]
    else:
        parts = [
            rng.choice((rng.choice(WORDS), str(rng.randrange(1000)), rng.choice(PEOPLE)))
            for _ in range(rng.randint(3, 7))
        ]
    return _item("copy", rng.choice(_COPY), parts, parts, rng.choice((" ", ", ", " ")))


def _item(skill: str, template: str, given: list[str], wanted: list[str], separator: str = ", ") -> Item:
    answer = separator.join(wanted)
    question = template.format(x=separator.join(given))
    return ask(skill, " ".join(sorted(given)), question, answer, {"kind": "exact", "accept": [answer]})
