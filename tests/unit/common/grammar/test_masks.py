"""The grammar of a sequence: what costs too much fails it, and what others did does not."""

from __future__ import annotations

import random
from typing import Any

import pytest
from llguidance import LLParserLimits

from common.core.ids import new_request_id, pack_tokens
from common.core.request import Request, SamplingParams
from common.core.sequence import Sequence
from common.grammar import compiled, limits, masks
from common.grammar.compiled import CompiledGrammars
from common.grammar.masks import OutputTokens, SequenceGrammar
from tests.fakes.constrained import EOS, TOKENIZER, TOKENS, allowed
from tests.unit.common.grammar.test_matcher import THREADS


def grammars() -> CompiledGrammars:
    return CompiledGrammars(TOKENIZER, TOKENS, (EOS,), THREADS)


def whole(output: list[int]) -> OutputTokens:
    return OutputTokens(output, 0, len(output))


def follow(one: SequenceGrammar, rng: random.Random, count: int) -> list[int]:
    """Let ``one`` take ``count`` random tokens, and return them; less if it is refused."""
    output: list[int] = []
    for _ in range(count):
        one.compute(whole(output))
        if one.refusal is not None:
            break
        output.append(rng.choice([token for token in allowed(one.mask) if token != EOS]))
    return output


def begin(source: CompiledGrammars, grammar: str) -> SequenceGrammar:
    sampling = SamplingParams(99, 0, grammar=grammar, eos_token_ids=(EOS,))
    return SequenceGrammar(source, Sequence(Request(new_request_id(), pack_tokens([5]), sampling), 0))


def test_what_other_sequences_did_counts_against_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matchers of one compiled grammar share a lexer, whose states are limited for all of them together."""
    monkeypatch.setattr(compiled, "parser_limits", lambda: LLParserLimits(max_lexer_states=2500, verbose_errors=False))
    monkeypatch.setattr(limits, "LIMIT_S", 60.0)
    monkeypatch.setattr(limits, "TOKEN_LIMIT_S", 60.0)
    monkeypatch.setattr(limits, "FOLLOW_LIMIT_S", (60.0, 0.0))
    source, grammar = grammars(), "start: /[a-z]*a[a-z]{200}c/"
    for seed in range(6):
        one = begin(source, grammar)
        output = follow(one, random.Random(seed), 30)
        assert len(output) == 30 and one.refusal is None
    endless = begin(source, grammar)
    assert len(follow(endless, random.Random(7), 150)) < 150
    assert endless.refusal is not None and endless.refusal.code == "grammar_too_complex"
    assert "too many states" in endless.refusal.words


@pytest.mark.parametrize("limit", ["LIMIT_S", "TOKEN_LIMIT_S"])
def test_two_slow_masks_fail_a_sequence(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(limits, limit, 0.0)
    one = begin(grammars(), "start: /[a-z]+/")
    assert len(follow(one, random.Random(1), 9)) == 1
    assert one.refusal is not None and "take too long" in one.refusal.words


def test_following_an_output_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FOLLOW_LIMIT_S", (0.0, 0.0))
    one = begin(grammars(), "start: /[a-z]+/")
    assert len(follow(one, random.Random(1), 9)) <= 1
    assert one.refusal is not None and "take too long" in one.refusal.words


def test_a_hostile_grammar_fails_by_its_cost() -> None:
    one = begin(grammars(), 'start: x\nx: x x | x x x | "a" | "b" | "ab" | "ba"')
    output = follow(one, random.Random(1), 400)
    assert len(output) < 200 and one.suspect
    assert one.refusal is not None and one.refusal.code == "grammar_too_complex"


def test_a_suspect_is_one_until_a_mask_was_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    one = begin(grammars(), 'start: "{" /[a-z]+/ "and so on and so on"')
    assert one.suspect
    monkeypatch.setattr(masks, "SUSPECT_S", 0.0)
    output = follow(one, random.Random(1), 2)
    assert one.suspect and one.force(whole(output)) == [] and one.refusal is None
    monkeypatch.setattr(masks, "SUSPECT_S", 60.0)
    one.compute(whole(output))
    assert not one.suspect


def test_an_unexpected_failure_fails_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("Already borrowed")

    one = begin(grammars(), 'start: "a"')
    monkeypatch.setattr(masks.Matcher, "fill", fails)
    with pytest.raises(RuntimeError):
        one.compute(whole([]))
    assert one.refusal is not None and one.refusal.code == "grammar_failed" and not one.busy
