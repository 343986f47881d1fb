"""Addition and subtraction of numbers with up to three digits, column by column, including negative results.

The written steps handle one column each, units first, so that each needs only two digits and a carry:

    3 4 7 + 2 8 5:  7+5=12, 4+8+1=13, 3+2+1=6, so 347 + 285 = 632.
    6 3 2 - 2 8 5:  2-5+10=7, 3-8-1+10=4, 6-2-1=3, so 632 - 285 = 347.

A smaller number minus a larger one is computed as the negative of the reverse.
"""

from __future__ import annotations

from random import Random

from bench.builtin_model.corpus.items import Item, ask, person

_ASK = (
    "What is {a} {op} {b}?", "{a} {op} {b}", "{a} {op} {b} = ?", "Calculate {a} {op} {b}.", "Compute {a} {op} {b}.",
    "How much is {a} {op} {b}?", "Please work out {a} {op} {b}.", "Can you tell me what {a} {op} {b} is?",
    "{a}{op}{b}", "what's {a}{op}{b}?", "Solve {a} {op} {b}.", "I need the result of {a} {op} {b}.", "{a}{op}{b}=",
)  # fmt: skip
_ADD = (
    "What is {a} plus {b}?", "Add {a} and {b}.", "What is the sum of {a} and {b}?", "How much is {a} plus {b}?",
    "Please add {b} to {a}.", "{a} plus {b}", "What do you get when you add {a} and {b}?",
)  # fmt: skip
_SUB = (
    "What is {a} minus {b}?", "Subtract {b} from {a}.", "How much is {a} minus {b}?", "Take {b} away from {a}.",
    "What is the difference {a} minus {b}?", "{a} minus {b}", "What is left when you take {b} from {a}?",
)  # fmt: skip
_ADD_STORY = (
    "{who} has {a} {things} and gets {b} more. How many {things} does {who} have now?",
    "There are {a} {things} in one box and {b} in another. How many {things} are there together?",
    "{who} finds {a} {things} today and {b} tomorrow. How many is that in all?",
)
_SUB_STORY = (
    "{who} has {a} {things} and gives away {b}. How many {things} are left?",
    "There are {a} {things} on the table. {who} takes {b} of them. How many remain?",
    "{who} had {a} {things} and lost {b}. How many does {who} still have?",
)
_THINGS = ("apples", "coins", "books", "stones", "cards", "shells", "pens", "nuts", "stamps", "eggs", "cups", "balls")


def draw(rng: Random) -> Item:
    """Draw an item of this skill."""
    a, b = _number(rng), _number(rng)
    return _added(rng, a, b) if rng.random() < 0.5 else _subtracted(rng, a, b)


def _number(rng: Random) -> int:
    """Draw a number, usually of three digits, which are the hardest."""
    return rng.randrange(rng.choice((10, 100, 100, 1000, 1000, 1000, 1000, 1000)))


def _added(rng: Random, a: int, b: int) -> Item:
    low, high = sorted((a, b))
    return ask(
        "arithmetic",
        f"{low} {high}",
        _question(rng, a, b, "+", _ADD, _ADD_STORY),
        f"{addition(a, b)}, so {a} + {b} = {a + b}.",
        {"kind": "number", "value": a + b},
    )


def _subtracted(rng: Random, a: int, b: int) -> Item:
    low, high = sorted((a, b))
    question = _question(rng, a, b, "-", _SUB, _SUB_STORY if a > b > 1 else ())
    turned = f"{b} is larger than {a}. {b} - {a}: " if b > a else ""
    return ask(
        "arithmetic",
        f"{low} {high}",
        question,
        f"{turned}{subtraction(high, low)}, so {a} - {b} = {a - b}.",
        {"kind": "number", "value": a - b},
    )


def _question(rng: Random, a: int, b: int, op: str, words: tuple[str, ...], stories: tuple[str, ...]) -> str:
    if stories and a > 1 and b > 1 and rng.random() < 0.15:
        return rng.choice(stories).format(a=a, b=b, who=person(rng), things=rng.choice(_THINGS))
    return rng.choice(words if rng.random() < 0.4 else _ASK).format(a=a, b=b, op=op)


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    """Return the pairs of digits in each column, units first."""
    width = max(len(str(a)), len(str(b)))
    return [(int(x), int(y)) for x, y in zip(reversed(f"{a:0{width}}"), reversed(f"{b:0{width}}"), strict=True)]


def addition(a: int, b: int) -> str:
    """Return the steps of ``a + b``."""
    steps, carry = [], 0
    for x, y in _columns(a, b):
        total = x + y + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return ", ".join(steps)


def subtraction(a: int, b: int) -> str:
    """Return the steps of ``a - b``; ``a`` must not be smaller than ``b``."""
    steps, borrow = [], 0
    for x, y in _columns(a, b):
        lends = x - y - borrow < 0
        steps.append(f"{x}-{y}{'-1' if borrow else ''}{'+10' if lends else ''}={x - y - borrow + 10 * lends}")
        borrow = int(lends)
    return ", ".join(steps)
