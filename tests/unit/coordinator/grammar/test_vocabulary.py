"""Which added tokens are control tokens in grammars: what llguidance's masks do, for tokenizers of several kinds."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from coordinator.grammar.vocabulary import ModelVocabulary
from tests.tiny_tokenizers import CONTROL, ORDINARY, UNMARKED, byte_level_bpe, sentencepiece_bpe
from tests.unit.coordinator.grammar.matching import END_IDS, builtin

PLAIN = "[PLAIN]"
"""An added token that is neither marked as special nor in angle brackets."""


@pytest.fixture(params=[byte_level_bpe, sentencepiece_bpe], ids=lambda make: make.__name__)
def model(request: pytest.FixtureRequest) -> LLTokenizer:
    tokenizer = request.param()
    tokenizer.add_tokens([AddedToken(PLAIN, special=False, normalized=False)])
    return LLTokenizer(tokenizer.to_str(), eos_token=[tokenizer.token_to_id("</s>")])


def test_special_tokens_and_those_in_angle_brackets_are_control_tokens(model: LLTokenizer) -> None:
    vocabulary = ModelVocabulary(model)
    for text in (*CONTROL, *UNMARKED, *ORDINARY):
        token = vocabulary.control_id(text)
        assert token is not None
        text_only = LLMatcher(model, "start: /(?s:.*)/", log_level=0)
        assert text_only.consume_token(token) == (token in model.eos_tokens)  # an end is no text, but may come
        by_id = LLMatcher(model, f"start: <[{token}]>", log_level=0)
        assert by_id.consume_token(token) and by_id.is_accepting()
    assert vocabulary.control_id(PLAIN) is None and vocabulary.control_id("a") is None
    (token,) = model.tokenize_str(PLAIN, parse_special=True)
    plain = LLMatcher(model, f'start: "{PLAIN}"', log_level=0)
    assert plain.consume_token(token) and plain.is_accepting()


def test_a_token_that_begins_with_the_byte_ff_is_no_control_token() -> None:
    settings = json.loads(byte_level_bpe().to_str())
    settings["model"]["vocab"]["\u00fff"] = 499 + 1  # the letter of byte FF, and an f
    settings["model"]["merges"].append(["\u00ff", "f"])
    for token in settings["added_tokens"]:
        token["id"] += 1
    model = LLTokenizer(Tokenizer.from_str(json.dumps(settings)).to_str())
    assert model.is_special_token(500)
    vocabulary = ModelVocabulary(model)
    assert vocabulary.control_id("f") is None and vocabulary.split("<function=") == ["<function="]
    assert vocabulary.control_id("<think>") is not None


def test_control_tokens_that_a_text_spells_are_found(model: LLTokenizer) -> None:
    vocabulary = ModelVocabulary(model)
    start, think = vocabulary.control_id("[INST]"), vocabulary.control_id("<think>")
    assert vocabulary.split(f"a[INST]<think>b{PLAIN}<thin") == ["a", start, think, f"b{PLAIN}<thin"]
    assert vocabulary.split("") == []


def test_the_builtin_model_s_markers_are_control_tokens() -> None:
    vocabulary = builtin().vocabulary
    assert [vocabulary.control_id(text) for text in ("<tool_call>", "</tool_call>", "<think>")] == [2046, 2047, None]
    assert list(vocabulary.end_ids) == list(END_IDS)
