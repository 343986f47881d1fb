"""The grammar of a sequence: what costs too much fails it, and what others did does not."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLParserLimits

from common.core.ids import new_request_id, pack_tokens
from common.core.request import Request, SamplingParams
from common.core.sequence import Sequence
from common.grammar import compiled, limits, masks
from common.grammar.compiled import CompiledGrammars
from common.grammar.limits import Budget, Pace
from common.grammar.masks import Grammars, OutputTokens, SequenceGrammar
from tests.fakes.constrained import EOS, TOKENIZER, TOKENS, allowed
from tests.pace import scaled
from tests.schemas import schema_grammar
from tests.unit.common.grammar.test_matcher import THREADS


def grammars() -> CompiledGrammars:
    return CompiledGrammars(TOKENIZER, TOKENS, (EOS,), THREADS)


def whole(output: list[int]) -> OutputTokens:
    return OutputTokens(output, 0, len(output))


def follow(one: SequenceGrammar, rng: random.Random, count: int, before: list[int] | None = None) -> list[int]:
    """Let ``one`` take ``count`` random tokens behind ``before``, and return them; less if it is refused."""
    output = [*(before or [])]
    for _ in range(count):
        one.compute(whole(output))
        if one.refusal is not None:
            break
        output.append(rng.choice([token for token in allowed(one.mask) if token != EOS]))
    return output[len(before or []) :]


def sequence_of(grammar: str) -> Sequence:
    sampling = SamplingParams(99, 0, grammar=grammar, eos_token_ids=(EOS,))
    return Sequence(Request(new_request_id(), pack_tokens([5]), sampling, n=2), 0)


def begin(source: CompiledGrammars, grammar: str, budget: Budget | None = None) -> SequenceGrammar:
    return SequenceGrammar(source, sequence_of(grammar), budget)


MANY_STATES = "start: /[a-z]*a[a-z]{200}c/"


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that limits the states of a lexer; CPU time is not limited."""
    for name in ("LIMIT_S", "TOKEN_LIMIT_S"):
        monkeypatch.setattr(limits, name, 60.0)
    for name in ("FOLLOW_LIMIT_S", "BUDGET_S"):
        monkeypatch.setattr(limits, name, (60.0, 0.0))

    def limit(states: int) -> None:
        found = LLParserLimits(max_lexer_states=states, verbose_errors=False)
        monkeypatch.setattr(compiled, "parser_limits", lambda: found)

    return limit


def test_what_other_sequences_did_counts_against_no_limit(few_states: Callable[[int], None]) -> None:
    """Matchers of one compiled grammar share a lexer, whose states are limited for all of them together. Those that
    have begun go on, too, and get the tokens that they would get alone."""
    few_states(2500)
    expected = [follow(begin(grammars(), MANY_STATES), random.Random(seed), 30) for seed in range(6)]
    source = grammars()
    begun = [(begin(source, MANY_STATES), random.Random(seed)) for seed in range(6)]
    outputs = [follow(one, rng, 4) for one, rng in begun]
    assert len(follow(begin(source, MANY_STATES), random.Random(7), 150)) == 150, "it uses up all states, twice"
    for (one, rng), output, wanted in zip(begun, outputs, expected, strict=True):
        assert output + follow(one, rng, 26, output) == wanted and one.refusal is None


def test_where_states_run_out_depends_on_the_output_alone(few_states: Callable[[int], None]) -> None:
    """Not on masks that were computed before."""
    few_states(450)
    one = begin(grammars(), MANY_STATES)
    output = follow(one, random.Random(7), 150)
    assert 3 < len(output) < 150 and one.refusal is not None
    assert one.refusal.code == "grammar_too_complex" and "too many states" in one.refusal.words
    for length in range(len(output) + 1):
        again = begin(grammars(), MANY_STATES)
        again.compute(whole(output[:length]))
        assert (again.refusal is None) == (length < len(output))


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


def test_a_request_has_a_budget_for_all_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUDGET_S", (1.0, 0.5))
    monkeypatch.setattr(limits, "COSTLY_S", (0.5, 0.1))
    budget = Budget()
    budget.spend(0.45, 0)
    assert not budget.costly
    budget.spend(0.5, 0)
    assert budget.costly and not budget.exceeded
    budget.spend(0.1, 0)
    assert budget.exceeded
    budget.spend(0.0, 1)
    assert not budget.exceeded, "another token has come"
    budget.spend(0.0, 5)
    assert not budget.costly
    compiled = Budget()
    compiled.spend(0.0, 0, compiling_s=0.9)
    assert not compiled.costly and not compiled.exceeded, "what is compiled is costly only by its masks"
    compiled.spend(0.2, 0)
    assert compiled.exceeded and not compiled.costly


def test_what_a_mask_may_take_from_others_grows_with_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COSTLY_S", (0.0, 0.001))
    pace = Pace()
    budget = Budget(pace=pace)
    budget.spend(0.0015, 1)
    assert budget.costly
    for _ in range(100):
        pace.note(limits.LONGEST_STEP_S * 9)
    assert not budget.costly and pace.step_s <= limits.LONGEST_STEP_S


def test_a_costly_sequence_holds_up_no_step_even_if_each_mask_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    one = begin(grammars(), 'start: "{" /[a-z]+/ "and so on and so on"')
    monkeypatch.setattr(masks, "SUSPECT_S", 60.0)
    follow(one, random.Random(1), 2)
    assert not one.suspect and not one.aside
    monkeypatch.setattr(limits, "COSTLY_S", (0.0, 0.0))
    monkeypatch.setattr(limits, "COSTLY_SHARE", 0.0)
    assert not one.suspect and one.aside


def test_choices_spend_the_budget_of_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "thread_time", itertools.count(0.0, 0.01).__next__)  # each mask takes 20 ms in all
    monkeypatch.setattr(limits, "LIMIT_S", 60.0)
    monkeypatch.setattr(limits, "FOLLOW_LIMIT_S", (60.0, 0.0))
    monkeypatch.setattr(limits, "TOKEN_LIMIT_S", 60.0)
    monkeypatch.setattr(limits, "BUDGET_S", (0.2, 0.0))
    source = grammars()
    alone = follow(begin(source, "start: /[a-z]+/"), random.Random(1), 99)
    assert 4 < len(alone) < 12
    budget = Budget()
    choices = [begin(source, "start: /[a-z]+/", budget) for _ in range(4)]
    outputs = [follow(one, random.Random(1), 2) for one in choices[:3]]
    last = follow(choices[3], random.Random(1), 99)
    assert sum(map(len, outputs)) + len(last) == len(alone)
    assert choices[3].refusal is not None and "take too long" in choices[3].refusal.words


def test_each_token_raises_the_budget_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that were forced, and those that are followed again by another matcher."""
    spent: list[int] = []
    monkeypatch.setattr(Budget, "spend", lambda self, seconds, tokens, compiling_s: spent.append(tokens))
    one, output, rng = begin(grammars(), schema_grammar({"const": "a long text" * 3})), list[int](), random.Random(1)
    while one.refusal is None and EOS not in output:
        one.compute(whole(output))
        output.append(rng.choice(allowed(one.mask)))
        one.suspect = False
        output += one.force(whole(output)) if output[-1] != EOS else []
        one._matcher = None if len(output) % 2 else one._matcher
    assert sum(spent) in (len(output) - 1, len(output))


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no such scheduling")
def test_costly_requests_have_one_thread_that_takes_only_idle_time() -> None:
    made = Grammars(TOKENIZER, TOKENS, (EOS,))
    sequences = [sequence_of("start: /[a-z]+/") for _ in range(6)]
    names: list[tuple[str, int]] = []
    try:
        for each, costly in zip(sequences, (False, True) * 3, strict=True):
            one = made._of(each)
            assert one.compiled is not None
            one.compiled.result(30)
            one._spending.budget.spend(0.06 * costly, 0)
            compute = one.compute
            one.compute = lambda output, compute=compute: (  # type: ignore[method-assign, misc]
                names.append((threading.current_thread().name.rsplit("_")[0], os.sched_getscheduler(0))),
                compute(output),
            )
            made.begin([(0, each)], others=False).finish()
    finally:
        made.close()
    assert names == [("suspect-masks", os.SCHED_OTHER), ("costly-masks", os.SCHED_IDLE)] * 3


def test_grammars_close_while_one_waits_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, compile_ = threading.Event(), CompiledGrammars._compile
    monkeypatch.setattr(CompiledGrammars, "_compile", lambda self, text: (gate.wait(60), compile_(self, text))[1])
    made = Grammars(TOKENIZER, TOKENS, (EOS,))
    made.wait_s = 0.0
    for at in range(6):
        made.begin([(0, sequence_of(f'start: "{at}"'))], others=False).finish()
    closing = threading.Thread(target=made.close, daemon=True)
    closing.start()
    closing.join(scaled(20.0))
    gate.set()
    assert not closing.is_alive()


def test_choices_of_one_request_have_one_budget() -> None:
    made, one, other = Grammars(TOKENIZER, TOKENS, (EOS,)), sequence_of("start: /a/"), sequence_of("start: /a/")
    try:
        budget = made._of(one)._spending.budget
        assert made._of(one.fork(1))._spending.budget is budget
        assert made._of(other)._spending.budget is not budget
    finally:
        made.close()


def test_an_unexpected_failure_fails_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("Already borrowed")

    one = begin(grammars(), 'start: "a"')
    monkeypatch.setattr(masks.Matcher, "fill", fails)
    with pytest.raises(RuntimeError):
        one.compute(whole([]))
    assert one.refusal is not None and one.refusal.code == "grammar_failed" and not one.busy
