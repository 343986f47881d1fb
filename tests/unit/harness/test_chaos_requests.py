"""A client of the chaos tests notices a constrained answer that is not the one of an undisturbed system."""

from __future__ import annotations

import pytest

from tests.chaos.request import ChaosRequest, grammar_of, prompt_logprobs
from tests.fakes.checkpoint import EOS
from tests.fakes.constraints import LONG, SHORT, Constraint, vocabulary


def answered(**options: object) -> ChaosRequest:
    """Return a request that got the whole answer that it wants."""
    ask = ChaosRequest([5, 6, 7, 8], 60, 3, done=True, **options)  # type: ignore[arg-type]
    ask.ids = [*ask.wanted]
    ask.text = vocabulary().decode_str([token for token in ask.ids if token != EOS])
    return ask


@pytest.mark.parametrize("constraint", [*SHORT, *LONG])
def test_another_token_or_another_text_is_wrong(constraint: Constraint) -> None:
    ask = answered(constraint=constraint)
    assert ask.verdict() == "exact"
    ask.text = ask.text[:-1]
    assert ask.verdict() == "wrong"
    ask = answered(constraint=constraint)
    ask.ids[-2] += 1
    assert ask.verdict() == "wrong"


@pytest.mark.parametrize("constraint", [*SHORT, *LONG])
def test_only_beginnings_and_whole_texts_match_a_constraint(constraint: Constraint) -> None:
    ids, grammar = answered(constraint=constraint).ids, grammar_of(constraint)
    ended = ids[-1] == EOS
    assert constraint.object_to(ids, grammar, ended=ended) == ""
    assert constraint.object_to(ids[:3], grammar, ended=False) == ""
    assert constraint.object_to([*ids[:-1], EOS, *ids[:3]], grammar, ended=False).startswith("leaves its grammar")
    if constraint.field != "choice":
        assert constraint.object_to([*ids[:3], EOS], grammar, ended=True).startswith("is not whole")
    assert constraint.object_to(ids[:3], grammar, ended=True) == "ends without an end of sequence"


def test_restricted_outputs_and_log_probabilities_of_prompts() -> None:
    ask = answered(restricted=True)
    assert ask.verdict() == "exact" and set(ask.text) <= set("abcdefg") and "ab" not in ask.text
    ask = answered(scores=True)
    assert ask.verdict() == "wrong"
    ask.prompt_logprobs = prompt_logprobs(ask.prompt)
    assert ask.verdict() == "exact"
    ask.prompt_logprobs[2] = None
    assert ask.verdict() == "wrong"
