"""Masks and forced tokens: what a fresh matcher says that tries every token, whatever is asked of it before."""

from __future__ import annotations

import random
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from common.core.request import SamplingParams
from common.grammar.compiled import CompiledGrammar, CompiledGrammars
from common.grammar.errors import FAILED, GrammarError
from common.grammar.matcher import Matcher
from tests.fakes.constrained import EOS, TOKENIZER, TOKENS, allowed
from tests.schemas import random_schema, schema_grammar


class InLine(Executor):
    """Runs everything at once."""

    def submit(self, call: Any, *args: Any, **fields: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **fields))
        except Exception as error:
            future.set_exception(error)
        return future


THREADS = InLine()
COMPILED = CompiledGrammars(TOKENIZER, TOKENS, (EOS,), THREADS)


def start(grammar: str) -> LLMatcher:
    return COMPILED.request(grammar).result().start


def matcher(grammar: str, **fields: Any) -> Matcher:
    sampling = SamplingParams(99, 0, grammar=grammar, **{"eos_token_ids": (EOS,), **fields})
    return Matcher(COMPILED.request(grammar).result(), sampling, TOKENS)


def mask_of(one: Matcher) -> tuple[list[int], bool]:
    mask = np.empty(TOKENS // 32, np.int32)
    certain = one.fill(mask)
    return allowed(mask), certain


def tried(grammar: str, output: list[int]) -> tuple[list[int], list[int]]:
    """Return the tokens that may follow ``output``, each tried on a fresh matcher, and the forced ones."""
    fresh = start(grammar).deep_copy()
    assert fresh.consume_tokens(output)
    forced = fresh.compute_ff_tokens()
    if fresh.is_stopped():  # it then validates nothing, and takes an end
        return [EOS], [EOS]
    return [token for token in range(TOKENS) if fresh.validate_tokens([token])], forced


@pytest.mark.parametrize("seed", range(25))
def test_masks_are_what_trying_every_token_gives(seed: int) -> None:
    rng = random.Random(seed)
    grammar = schema_grammar(random_schema(rng), spaces=rng.random() < 0.5)
    one, output = matcher(grammar), list[int]()
    for _ in range(25):
        ids, certain = mask_of(one)
        wanted, forced = tried(grammar, output)
        if forced:
            assert ids == forced[:1] and set(ids) <= set(wanted)
        else:
            assert ids == wanted
        assert certain == (bool(output) and bool(forced))
        output.append(rng.choice(ids))
        if output[-1] == EOS:
            break
        one.follow(output[-1:])


@pytest.mark.parametrize("seed", range(40))
def test_forced_tokens_depend_on_the_output_alone(seed: int) -> None:
    """All at once, one by one, or by a matcher that is made anew in the middle: the same tokens."""
    rng = random.Random(seed)
    grammar = schema_grammar(random_schema(rng), spaces=rng.random() < 0.5)
    one, output = matcher(grammar), list[int]()
    while EOS not in output and len(output) < 60:
        ids, certain = mask_of(one)
        assert not certain, "all forced tokens were taken"
        output.append(rng.choice(ids))
        one.follow(output[len(output) - 1 :]) if output[-1] != EOS else None
        run = one.force() if output[-1] != EOS else []
        for at in range(len(run)):
            again = matcher(grammar)
            again.follow(output + run[:at])
            assert mask_of(again) == ([run[at]], True)
        output += run
    assert EOS not in output[:-1]


def test_the_first_token_is_never_forced() -> None:
    one = matcher('start: "only this"')
    ids, certain = mask_of(one)
    assert not certain
    one.follow(ids[:1])
    assert len(one.force()) > 1


def test_the_end_is_forced_where_nothing_can_follow() -> None:
    one = matcher('start: "a" | "ab"')
    first = start("start: /a/").deep_copy()
    token = next(each for each in range(TOKENS) if first.deep_copy().consume_token(each))
    one.follow([token])
    assert one.force() == [] and EOS in mask_of(one)[0]
    other = matcher('start: "a"')
    other.follow([token])
    assert other.force() == [EOS]


def test_a_stop_token_is_allowed_exactly_where_the_grammar_is_complete() -> None:
    stop = 77
    one = matcher("start: /[0-9]{2}[0-9]*/", stop_token_ids=(stop,))
    seen = []
    for _ in range(3):
        ids, _ = mask_of(one)
        seen.append((stop in ids, EOS in ids))
        one.follow([next(token for token in ids if token not in (stop, EOS))])
    assert seen[0] == (False, False) and seen[2] == (True, True)


def test_with_ignore_eos_the_end_comes_only_if_nothing_else_can_follow() -> None:
    one = matcher("start: /a{1,3}/", ignore_eos=True)
    ends = []
    while True:
        ids, _ = mask_of(one)
        ends.append(ids == [EOS])
        assert ends[-1] or EOS not in ids
        if ends[-1]:
            break
        one.follow(ids[:1])
    assert ends[-1] and len(ends) > 1


def test_with_min_tokens_no_end_is_forced() -> None:
    one = matcher('start: "a"', min_tokens=3)
    one.follow(mask_of(one)[0][:1])
    assert one.force() == []


def test_an_output_that_the_grammar_does_not_allow_is_refused_in_words() -> None:
    with pytest.raises(GrammarError, match="does not match") as error:
        matcher('start: "a"').follow([5, 6, 7])
    assert error.value.refusal.code == FAILED


@pytest.mark.parametrize("text", ["start", "start: /(/", "{", '{"grammars": []}'])
def test_a_grammar_that_is_none_is_refused_in_words(text: str) -> None:
    with pytest.raises(GrammarError, match="cannot be compiled"):
        COMPILED.request(text).result()


def test_without_a_tokenizer_only_grammars_fail(tmp_path: Path) -> None:
    none = CompiledGrammars(tmp_path / "tokenizer.json", TOKENS, (EOS,), THREADS)
    with pytest.raises(GrammarError, match=r"tokenizer\.json cannot be read: No such file"):
        none.request('start: "a"').result()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(GrammarError, match="not understood"):
        none.request('start: "b"').result()


def test_first_masks_come_with_the_compiled_grammar() -> None:
    found = COMPILED.request("start: /[ab]/").result()
    sampling = SamplingParams(99, 0, grammar="start: /[ab]/", eos_token_ids=(EOS,))
    known, mask = np.zeros_like(found.first), np.zeros_like(found.first)
    known[0] = 0b1000
    Matcher(CompiledGrammar(found.start, known, 0, COMPILED.memory), sampling, TOKENS).fill(mask)
    assert allowed(mask) == [3]


def test_the_least_recently_used_grammars_are_dropped() -> None:
    few = CompiledGrammars(TOKENIZER, TOKENS, (EOS,), THREADS, kept=2)
    first = few.request('start: "a"')
    second = few.request('start: "b"')
    assert few.request('start: "a"') is first
    few.request('start: "c"')
    assert few.request('start: "a"') is first and few.request('start: "b"') is not second
