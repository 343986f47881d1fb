"""Sequences whose token mask is not there yet: the other requests of the worker go on, and nothing else changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from common.core.request import Request
from common.grammar.compiled import CompiledGrammars
from common.grammar.masks import StepMasks
from common.grammar.matcher import Matcher
from common.net.messages import Generate
from tests.fakes.constrained import ConstrainedOracle
from tests.pace import scaled
from tests.unit.decode.test_grammar import again, make, outputs, run_alone
from tests.unit.workers import Bench, make_request

pytestmark = pytest.mark.usefixtures("patient_masks")
ROLES = ("colocated", "prefill", "decode")


@contextmanager
def gated(patch: pytest.MonkeyPatch, where: type, name: str) -> Iterator[threading.Event]:
    """Let ``where.name`` wait in its thread until the event is set."""
    gate, call = threading.Event(), getattr(where, name)
    patch.setattr(where, name, lambda *arguments: (gate.wait(60), call(*arguments))[1])
    try:
        yield gate
    finally:
        gate.set()


def send(bench: Bench, request: Request, path: str) -> None:
    if path == "generate":
        bench.send("colocated-0", Generate(request, 1))
    else:
        bench.place(request, "prefill-1", "decode-2")


@pytest.mark.parametrize("path", ["generate", "hand-off"])
@pytest.mark.parametrize("where", [(CompiledGrammars, "_compile"), (Matcher, "fill")], ids=["compilation", "mask"])
def test_others_go_on_while_a_grammar_takes_long(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, path: str, where: tuple[type, str]
) -> None:
    for role in ROLES:
        bench.add(role, ConstrainedOracle(256))
    expected = run_alone(bench, [make(1, prompt=90)], "colocated-0")
    engine: Any = bench.workers["colocated-0" if path == "generate" else "prefill-1"].engine
    engine.grammars._compiled._compiled.clear()
    late, plain = make(1, prompt=90), [make_request(20 + 30 * at, 5) for at in range(6)]
    with monkeypatch.context() as patch, gated(patch, *where) as gate:
        send(bench, late, path)
        bench.until(lambda: engine.steps > 0 and bench.workers)
        for request in plain:
            send(bench, request, path)
        bench.until(lambda: bench.done(*plain))
        assert not bench.done(late) and not bench.streams[late.id, 1, 0]
        steps = engine.steps
        for _ in range(20):
            bench.turn()
        assert engine.steps - steps <= 2, "a held sequence takes part in no step"
        gate.set()
        bench.until(lambda: bench.done(late) or bench.failed)
    assert [outputs(bench, late)] == expected


@pytest.mark.parametrize("path", ["generate", "hand-off"])
def test_a_stream_whose_mask_is_late_holds_up_no_prompts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    for role in ROLES:
        bench.add(role, ConstrainedOracle(256))
    (expected,) = run_alone(bench, [make(3)], "colocated-0")
    late, plain = make(3), make_request(70, 5)
    send(bench, late, path)
    bench.until(lambda: bench.streams[late.id, 1, 0])
    with monkeypatch.context() as patch, gated(patch, Matcher, "fill") as gate:
        bench.until(lambda: _busy(bench))
        send(bench, plain, path)
        bench.until(lambda: bench.done(plain))
        assert not bench.done(late)
        gate.set()
        bench.until(lambda: bench.done(late) or bench.failed)
    assert outputs(bench, late) == expected


def _constrained(bench: Bench) -> list[Any]:
    planners = (worker.planner for worker in bench.workers.values())
    return [each for planner in planners for each in planner.sequences() if each.matcher is not None]


def test_same_tokens_after_a_hand_off_if_masks_are_late(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of a prompt is then computed twice on prefill; its KV leaves once."""
    for role in ROLES:
        bench.add(role, ConstrainedOracle(256))
    requests = [make(seed, prompt=30 + 17 * seed, n=1 + seed % 2) for seed in range(8)]
    expected = run_alone(bench, requests, "colocated-0")
    finish, left = StepMasks.finish, {"late": 40}

    def late(masks: StepMasks) -> None:
        finish(masks)
        for index in list(masks.ready)[: left["late"]]:
            del masks.ready[index]
            masks.late.add(index)
            left["late"] -= 1

    monkeypatch.setattr(StepMasks, "finish", late)
    moved = [again(request) for request in requests]
    for request in moved:
        bench.place(request, "prefill-1", "decode-2")
    bench.until(lambda: bench.done(*moved) or bench.failed)
    assert [outputs(bench, request) for request in moved] == expected and left["late"] == 0


def test_the_loop_wakes_when_a_late_mask_is_there(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = bench.add("colocated", ConstrainedOracle(64))
    monkeypatch.setattr(worker, "rest_s", lambda: 60.0)
    request = make(4)
    with gated(monkeypatch, CompiledGrammars, "_compile") as gate, worker._waker.attached():
        bench.send("colocated-0", Generate(request, 1))
        bench.until(lambda: _busy(bench))
        assert worker.turn() == 60.0
        opener = threading.Timer(0.05, gate.set)
        opener.start()
        began = time.monotonic()
        worker._wait(scaled(30.0))
        assert gate.is_set() and time.monotonic() - began < scaled(20.0)
        opener.join()
        bench.until(lambda: bench.done(request))


def _busy(bench: Bench) -> bool:
    return any(each.matcher.busy for each in _constrained(bench))
