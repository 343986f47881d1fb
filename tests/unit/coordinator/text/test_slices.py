"""Tokenizing a long text in slices gives the tokens of the whole text, for any tokenizer and any cuts."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain

import pytest
from tokenizers import Tokenizer

from common import builtin
from coordinator.text.slices import OVERLAP_CHARS, SLICE_CHARS, encode_slices
from tests.tiny_tokenizers import CONTROL, CORPUS, KINDS, ORDINARY


def of_the_built_in_model() -> Tokenizer:
    return Tokenizer.from_file(str(builtin.path() / "tokenizer.json"))


MAKERS: dict[str, Callable[[], Tokenizer]] = {**KINDS, "built-in": of_the_built_in_model}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return MAKERS[request.param]()


def mixed_text(seed: int, chars: int) -> str:
    """Return random words, numbers, runs of one letter or of white space, four-byte characters and control tokens."""
    dice = random.Random(seed)
    words = " ".join(CORPUS).split()
    makers: list[Callable[[], str]] = [
        lambda: dice.choice(words) + " ",
        lambda: dice.choice(words),
        lambda: str(dice.randrange(10**9)),
        lambda: dice.choice((*CONTROL, *ORDINARY)),
        lambda: dice.choice(" \n\t") * dice.randrange(1, 90),
        lambda: dice.choice("aé世🙂=") * dice.randrange(1, 90),
    ]
    weights = [50, 10, 5, 3, 1, 1]
    text = ""
    while len(text) < chars:
        text += "".join(make() for make in dice.choices(makers, weights, k=500))
    return text


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    longest = max(map(len, tokenizer.get_vocab()))
    return list(chain.from_iterable(encode_slices(tokenizer, text, longest)))


@pytest.mark.parametrize("seed", range(4))
def test_slices_have_the_tokens_of_the_whole(tokenizer: Tokenizer, seed: int) -> None:
    text = mixed_text(seed, SLICE_CHARS * 4 + seed * OVERLAP_CHARS // 3)
    assert encoded(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_slices_are_bounded_and_a_short_text_is_one(tokenizer: Tokenizer) -> None:
    text = mixed_text(7, SLICE_CHARS * 4)
    parts = list(encode_slices(tokenizer, text))
    assert len(parts) >= 4
    assert list(encode_slices(tokenizer, text[:1000])) == [tokenizer.encode(text[:1000], add_special_tokens=False).ids]


@pytest.mark.parametrize("run", ["a", "ab", " ", "\n", "=", "7", "é", "🙂", "🙂a", "<|im_", "a\u0301"])
def test_a_text_without_words_ends_and_keeps_its_text(tokenizer: Tokenizer, run: str) -> None:
    text = run * (SLICE_CHARS * 3 // len(run))
    ids = encoded(tokenizer, text)
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    unknown = {tokenizer.token_to_id("<unk>"), tokenizer.token_to_id("[UNK]")}
    if ids != whole and not unknown & {*ids, *whole}:
        assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.decode(whole, skip_special_tokens=False)
