"""Tokenizers in which the markers of a family are control tokens."""

from __future__ import annotations

import functools
import json

from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer

from coordinator.grammar.vocabulary import ModelVocabulary
from tests.unit.coordinator.grammar.matching import DIRECTORY, Model


@functools.cache
def model_with(control: tuple[str, ...]) -> Model:
    """Return the built-in model's tokenizer with its own tool markers replaced by the control tokens ``control``."""
    settings = json.loads((DIRECTORY / "tokenizer.json").read_text())
    replaced = {"<tool_call>", "</tool_call>", *control}
    settings["added_tokens"] = [each for each in settings["added_tokens"] if each["content"] not in replaced]
    tokenizer = Tokenizer.from_str(json.dumps(settings))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    ends = [tokenizer.token_to_id("<|eos|>")]
    made = LLTokenizer(tokenizer.to_str(), eos_token=ends)
    return Model(made, ModelVocabulary(made))
