"""Compiled grammars: how much memory is kept for them, and that it is given back."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from common.grammar import compiled, limits, masks
from common.grammar.compiled import CompiledGrammars
from common.grammar.memory import BASE_BYTES, BYTES_PER_CHAR, GrammarMemory, estimate
from tests.pace import scaled
from tests.unit.common.grammar.test_masks import begin, follow, grammars

MIB = 1 << 20


def settled(memory: GrammarMemory, most: int) -> bool:
    """Wait until at most ``most`` bytes are counted; return whether they are."""
    give_up = time.monotonic() + scaled(10.0)
    while memory.bytes > most and time.monotonic() < give_up:
        time.sleep(0.002)
    return memory.bytes <= most


def words(count: int, turn: int) -> str:
    """Return a grammar of overlapping words, whose lexer gets about a thousand states per token."""
    rules = (f"t{at}: /[a-z]*{chr(97 + (at + turn) % 26)}[a-z]{{{at % 17 + 1}}}/ start?" for at in range(count))
    return "\n".join([f"start: {' | '.join(f't{at}' for at in range(count))}", *rules])


def is_kept(source: CompiledGrammars, grammar: str) -> bool:
    return grammar in source._compiled


def test_grammars_are_kept_up_to_their_estimated_size(monkeypatch: pytest.MonkeyPatch) -> None:
    source, texts = grammars(), [f'start: "{at:04}"' for at in range(9)]
    one = BASE_BYTES + BYTES_PER_CHAR * len(texts[0]) + 2048 // 8
    monkeypatch.setattr(compiled, "KEPT_BYTES", 4 * one)
    for text in texts:
        source.request(text).result()
    assert [is_kept(source, text) for text in texts] == [False] * 5 + [True] * 4
    assert settled(source.memory, 4 * one) and source.memory.bytes == 4 * one
    large = f'start: "{"x" * 9000}"'
    source.request(large).result()
    source.request(texts[0]).result()
    assert is_kept(source, texts[0]) and not is_kept(source, large), "the newest is always kept"


def test_a_grammar_that_has_grown_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    source, text = grammars(), "start: /[a-z]+/"
    one, other, rng = begin(source, text), begin(source, text), random.Random(1)
    monkeypatch.setattr(masks, "estimate", lambda cpu_s: 3 * MIB)
    output = follow(one, rng, 2)
    assert is_kept(source, text)
    output += follow(one, rng, 1, output)
    assert not is_kept(source, text)
    fresh = source.request(text)
    output += follow(one, rng, 1, output)
    assert len(output) == 4 and source.request(text) is fresh, "only the old one is forgotten"
    assert len(follow(other, random.Random(1), 3)) == 3 and other.refusal is None
    assert source.memory.bytes > 15 * MIB
    del one
    assert source.memory.bytes > 15 * MIB, "the other sequence still has it"
    del other
    assert settled(source.memory, MIB)


def test_a_refused_sequence_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUDGET_S", (0.0, 0.0))
    monkeypatch.setattr(compiled, "GROWN_BYTES", -1)
    monkeypatch.setattr(masks, "estimate", lambda cpu_s: MIB)
    source = grammars()
    one = begin(source, "start: /[a-z]+/")
    follow(one, random.Random(1), 3)
    assert one.refusal is not None and settled(source.memory, 0)


def test_grammars_that_have_grown_fail_where_all_have_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "LIVE_BYTES", 30 * MIB)
    source = grammars()
    monkeypatch.setattr(masks, "estimate", lambda cpu_s: 5 * MIB)
    running = [begin(source, f"start: /[a-{last}]+/") for last in "wxyz"]
    for one in running:
        follow(one, random.Random(1), 2)
    failed = [one.refusal.words for one in running if one.refusal is not None]
    assert len(failed) == 2 and "too much memory" in failed[0]
    monkeypatch.setattr(masks, "estimate", lambda cpu_s: 0)
    small = begin(source, "start: /[0-9]+/")
    assert len(follow(small, random.Random(1), 5)) == 5


def test_masks_that_need_no_new_states_count_nothing() -> None:
    assert estimate(0.00005) == 0 and estimate(0.1) > 20 * MIB


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / MIB


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not report memory so")
def test_hostile_grammars_leave_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes some 20 MiB, which the system gets back once its sequence is over."""
    for name in ("LIMIT_S", "TOKEN_LIMIT_S"):
        monkeypatch.setattr(limits, name, 60.0)
    for name in ("FOLLOW_LIMIT_S", "BUDGET_S"):
        monkeypatch.setattr(limits, name, (60.0, 0.0))
    source = grammars()
    taken = [_once(source, turn) for turn in range(7)]
    assert settled(source.memory, 2 * MIB)
    give_up = time.monotonic() + scaled(10.0)
    while (left := _resident()) > taken[0] + 30 and time.monotonic() < give_up:
        time.sleep(0.01)
    assert left < taken[0] + 30


def _once(source: CompiledGrammars, turn: int) -> float:
    one = begin(source, words(80, turn))
    follow(one, random.Random(1), 25)
    return _resident()
