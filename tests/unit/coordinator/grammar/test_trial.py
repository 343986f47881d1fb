"""What passes the trial in screening is followed by a worker; what a worker would stop is refused before."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from common.core.ids import new_request_id, pack_tokens
from common.core.request import Request, SamplingParams
from common.core.sequence import Refusal, Sequence
from common.grammar import limits
from common.grammar.compiled import CompiledGrammars
from common.grammar.masks import OutputTokens, SequenceGrammar
from coordinator.grammar import trial
from coordinator.grammar.task import Answer, Task
from tests.unit.common.grammar.test_matcher import THREADS
from tests.unit.coordinator.grammar.matching import DIRECTORY, END_IDS, VOCAB, builtin, error

COMPILED = CompiledGrammars(DIRECTORY / "tokenizer.json", VOCAB, END_IDS, THREADS)


def on_a_worker(grammar: str, seed: int, tokens: int = 80) -> Refusal | None:
    """Let a worker follow a random output; return why it stops it, None if it does not."""
    sampling = SamplingParams(999, 0, grammar=grammar, eos_token_ids=END_IDS)
    one = SequenceGrammar(COMPILED, Sequence(Request(new_request_id(), pack_tokens([5]), sampling), 0))
    rng, output = random.Random(seed), list[int]()
    while len(output) < tokens and one.refusal is None:
        one.compute(OutputTokens(output, 0, len(output)))
        allowed = np.flatnonzero(np.unpackbits(one.mask.view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        if one.refusal is not None or token in END_IDS:
            break
        output.append(token)
        forced = one.force(OutputTokens(output, 0, len(output)))
        output += forced
        if set(forced) & set(END_IDS):
            break
    return one.refusal


def references(levels: int) -> dict[str, Any]:
    """Return a schema in which each definition refers to the next one."""
    definitions = {f"d{at}": {"type": "array", "items": {"$ref": f"#/$defs/d{at + 1}"}} for at in range(levels)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{levels}": {"type": "integer"}}}


def optional(count: int) -> dict[str, Any]:
    """Return the schema of an object with ``count`` properties, none of them required."""
    return {"type": "object", "properties": {f"property_number_{at}": {"type": "string"} for at in range(count)}}


LARGE: dict[str, tuple[Any, Any]] = {
    "optional properties": ("json_schema", optional(300)),
    "a long repetition": ("regex", "a{5000}"),
    "a long text": ("regex", r"(?s:.{0,50000})"),
    "a pattern of many states": ("regex", "(a|b)*a(a|b){200}"),
    "many choices": ("choice", [f"{'x' * 20}{at}" for at in range(5000)]),
    "a large enum": ("json_schema", {"enum": [f"value {at}" for at in range(9000)]}),
    "many properties": (
        "json_schema",
        {"properties": {f"p{at}": {"type": "string", "maxLength": at} for at in range(200)}, "type": "object"},
    ),
    "deep references": ("json_schema", references(300)),
    "a long array": ("json_schema", {"type": "array", "minItems": 9000, "items": {"type": "integer"}}),
    "a recursive grammar": ("lark", 'start: "(" start* ")" | /[a-z]{1,5}/'),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_passes_is_followed_by_a_worker(name: str) -> None:
    kind, value = LARGE[name]
    grammar = builtin().grammar(Task(Answer(kind, value)))
    assert [refusal for seed in range(3) if (refusal := on_a_worker(grammar, seed)) is not None] == []


HOSTILE: dict[str, tuple[Any, Any, str]] = {
    "a very long repetition": ("regex", "a{100000}", "10 ms of CPU time"),
    "an ambiguous grammar": ("lark", 'start: x\nx: x x | x x x | "a" | "b" | "ab" | "ba"', "is too complex|cannot be"),
    "more optional properties": ("json_schema", optional(600), "items; max is 2000"),
    "states of a lexer": ("regex", r"((((\pL)?)+|((.)+)?)){20000}", "too many|CPU time"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_worker_would_stop_is_refused(name: str) -> None:
    kind, value, text = HOSTILE[name]
    found = error(kind, value)
    assert found.code == "grammar_too_complex"
    assert any(part in found.error for part in text.split("|")), found.error


def test_a_slow_machine_is_given_a_second_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    follow = trial._follow

    def slow_at_first(*arguments: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise trial.TooSlow
        follow(*arguments)

    monkeypatch.setattr(trial, "_follow", slow_at_first)
    assert builtin().grammar(Task(Answer("regex", "[ab]{3}")))
    monkeypatch.setattr(limits, "LIMIT_S", 0.0)
    assert error("regex", "[ab]{3}").code == "grammar_too_complex"
