"""The process that screens grammars: hostile ones, its death, its end, and the cache."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from common.core.errors import RequestError
from coordinator.grammar import child, compiler
from coordinator.grammar.compiler import ERROR_S, SLOTS, GrammarCompiler, VerdictCache
from coordinator.grammar.errors import CROWDED_OUT
from coordinator.grammar.screening import LAST_NICENESS, MAX_FORKS, NICENESS, SUSPECT_S
from coordinator.grammar.task import Answer, Task, Tool, Verdict, encode
from coordinator.output.formats import TOOL_FORMATS
from tests.fakes.checkpoint import fake_checkpoint
from tests.pace import scaled
from tests.tiny_tokenizers import KINDS
from tests.unit.coordinator.grammar.matching import DIRECTORY, END_IDS, VOCAB

pytestmark = pytest.mark.processes


@pytest.fixture
async def grammars(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GrammarCompiler]:
    """Grammars with less processor time than makes them suspect, and a minute to get it on a busy machine."""
    monkeypatch.setattr(compiler, "SECONDS", SUSPECT_S * 0.75)
    monkeypatch.setattr(compiler, "WAIT_S", 60.0)
    made = GrammarCompiler(DIRECTORY, VOCAB, END_IDS)
    yield made
    made.close()


@pytest.fixture
async def served() -> AsyncIterator[GrammarCompiler]:
    """Grammars with the limits that are served."""
    made = GrammarCompiler(DIRECTORY, VOCAB, END_IDS)
    yield made
    made.close()


async def screened(grammars: GrammarCompiler, kind: Any, value: Any = None) -> str:
    return (await grammars.compile(encode(Task(Answer(kind, value))), {None: "field"})).text


async def refusal(grammars: GrammarCompiler, kind: Any, value: Any = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await screened(grammars, kind, value)
    return caught.value


async def test_the_process_starts_with_the_first_grammar_and_ends_with_the_compiler(grammars: GrammarCompiler) -> None:
    assert grammars.pid is None
    assert "json" in await screened(grammars, "json")
    process = psutil.Process(grammars.pid)
    assert not any("torch" in mapped.path for mapped in process.memory_maps())
    grammars.close()
    assert not process.is_running()
    assert (await refusal(grammars, "regex", "a")).status == 503


async def test_what_is_left_out_of_tools_is_named(grammars: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    task = Task(tools=(Tool("f", schema, 1),), tool_format=TOOL_FORMATS["hermes"])
    found = await grammars.compile(encode(task), {None: "tools", 1: "tools[1].function.parameters"})
    assert found.text and found.left_out == ("tools[1].function.parameters.properties.a.not",)
    assert await grammars.compile(encode(task), {1: "x"}) == found._replace(left_out=("x.properties.a.not",))


async def test_errors_name_the_field(grammars: GrammarCompiler) -> None:
    error = await refusal(grammars, "json_schema", {"properties": {"a": {"not": {}}}})
    assert (error.status, error.param, error.code) == (400, "field.properties.a.not", "unsupported")
    assert "'not'" in error.message
    long = await refusal(grammars, "json_schema", {"properties": {"x" * 1000: {"not": {}}}})
    assert long.param is not None and len(long.param) <= 256 and len(long.message) < 500


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"anyOf": [{"type": "array", "items": schema}, {"type": "null"}]}
    return schema


HOSTILE: dict[str, tuple[str, Any]] = {
    "repetition": ("regex", "(a{1000}){1000}"),
    "repetitions of repetitions": ("regex", "(((((((a{10}){10}){10}){10}){10}){10}){10}){10}"),
    "nested groups": ("regex", "(" * 5000 + ")" * 5000),
    "a large alternative": ("regex", "|".join(f"{number}x{{{number}}}" for number in range(3000))),
    "an intersection of classes": ("regex", r"(\pL|\d){1,5000}(\w+\s){1,5000}" * 20),
    "a large enum": ("json_schema", {"enum": [f"value {number}" for number in range(100_000)]}),
    "an enum of objects": ("json_schema", {"enum": [{"a": f"v{at}", "b": [at] * 5} for at in range(5000)]}),
    "allOf of anyOf": (
        "json_schema",
        {"allOf": [{"anyOf": [{"required": [f"p{at}"]}, {"required": [f"q{at}"]}]} for at in range(16)]},
    ),
    "patterns": (
        "json_schema",
        {"properties": {f"p{at}": {"type": "string", "pattern": f"(a|b)*a(a|b){{{at}}}"} for at in range(2000)}},
    ),
    "deep nesting": ("json_schema", nested(60)),
    "deep text": ("json_schema", "[" * 1_000_000),
    "a megabyte of schema": ("json_schema", {"properties": {f"p{at}": {"const": "x" * 50} for at in range(20_000)}}),
    "a reference to itself": ("json_schema", {"$ref": "#"}),
    "references in a circle": ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#"}]}}}),
    "a remote reference": ("json_schema", {"$ref": "http://127.0.0.1:9/schema.json"}),
    "long arrays of long arrays": (
        "json_schema",
        {"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6, "items": {"const": 1}}},
    ),
    "a left-recursive grammar": ("lark", "start: start start | start"),
    "a grammar of empty rules": ("lark", "start: a*\na: b*\nb: c*\nc: "),
    "a large grammar": ("lark", "start: a0\n" + "\n".join(f"a{at}: a{at + 1} a{at + 1}" for at in range(5000))),
}
"""Constraints that an attacker may send. Those that llguidance compiles quickly may be accepted."""
HARMLESS = {
    "an enum of objects",
    "repetitions of repetitions",
    "an intersection of classes",
    "long arrays of long arrays",
    "patterns",
    "a large alternative",
    "a grammar of empty rules",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_constraint_is_refused_and_stalls_no_other(grammars: GrammarCompiler, name: str) -> None:
    await screened(grammars, "json")
    pid = grammars.pid
    hostile = asyncio.ensure_future(screened(grammars, *HOSTILE[name]))
    await screened(grammars, "regex", "a+")  # beside it
    if name in HARMLESS:
        await asyncio.wait([hostile])
    else:
        with pytest.raises(RequestError) as caught:
            await hostile
        error = caught.value
        assert error.status == 400 and error.code is not None and error.param is not None
        assert len(error.message) < 600 and "\n" not in error.message
    assert await screened(grammars, "regex", "b+")
    assert grammars.pid == pid and not psutil.Process(pid).children()


async def test_a_grammar_that_takes_long_gets_out_of_the_way_of_workers(served: GrammarCompiler) -> None:
    await screened(served, "json")
    slow = asyncio.ensure_future(refusal(served, *HOSTILE["repetition"]))
    screening = psutil.Process(served.pid)
    assert NICENESS <= screening.nice() < LAST_NICENESS
    while not (forks := screening.children()):  # noqa: ASYNC110 - another process forks
        await asyncio.sleep(0.001)
    while forks[0].nice() != LAST_NICENESS:  # noqa: ASYNC110 - another process sets it
        await asyncio.sleep(0.005)
    await slow


@pytest.mark.parametrize(
    ("seconds", "wait_s", "status", "code"),
    [(0.05, 60.0, 400, "grammar_too_complex"), (60.0, 0.3, 429, "server_is_overloaded")],
)
async def test_time_in_which_others_compute_makes_no_grammar_too_complex(
    monkeypatch: pytest.MonkeyPatch, seconds: float, wait_s: float, status: int, code: str
) -> None:
    monkeypatch.setattr(compiler, "SECONDS", seconds)
    monkeypatch.setattr(compiler, "WAIT_S", wait_s)
    grammars = GrammarCompiler(DIRECTORY, VOCAB, END_IDS)
    try:
        error = await refusal(grammars, *HOSTILE["repetition"])
        assert (error.status, error.code) == (status, code)
    finally:
        grammars.close()


async def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MEMORY", 8 << 20)
    grammars = GrammarCompiler(DIRECTORY, VOCAB, END_IDS)
    try:
        assert await screened(grammars, "regex", "a")
        error = await refusal(grammars, *HOSTILE["an enum of objects"])
        assert error.code == "grammar_too_complex" and "memory" in error.message
        assert await screened(grammars, "regex", "ab")
    finally:
        grammars.close()


async def test_requests_for_one_content_are_one_compilation_and_verdicts_are_kept(grammars: GrammarCompiler) -> None:
    slow = HOSTILE["repetition"]
    waiting = [asyncio.ensure_future(refusal(grammars, *slow)) for _ in range(5)]
    await asyncio.sleep(0)
    assert len(grammars._pending) == 1
    errors = await asyncio.gather(*waiting)
    assert {error.message for error in errors} == {errors[0].message}
    began = time.monotonic()
    assert (await refusal(grammars, *slow)).message == errors[0].message
    assert time.monotonic() - began < scaled(0.5)


async def test_one_client_that_leaves_takes_nothing_from_the_others(grammars: GrammarCompiler) -> None:
    first = asyncio.ensure_future(screened(grammars, "regex", "x+"))
    second = asyncio.ensure_future(screened(grammars, "regex", "x+"))
    await asyncio.sleep(0)
    first.cancel()
    assert "x+" in await second
    alone = asyncio.ensure_future(screened(grammars, "regex", "y+"))
    await asyncio.sleep(0)
    alone.cancel()
    assert "y+" in await screened(grammars, "regex", "y+")


async def test_a_full_queue_refuses_with_429_and_forgets_those_who_left(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_WAITING", 3)
    waiting = [asyncio.ensure_future(screened(grammars, "regex", f"a{number}")) for number in range(3)]
    await asyncio.sleep(0)  # the process is starting, so all of them wait
    error = await refusal(grammars, "regex", "b")
    assert error.status == 429 and error.retry_after_s
    waiting[0].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await screened(grammars, "regex", "c")
    assert len(await asyncio.gather(*waiting[1:])) == 2


async def test_many_that_take_long_hold_up_no_ordinary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are slots and forks: those that take longest are refused, with 429."""
    monkeypatch.setattr(compiler, "SECONDS", 60.0)
    crowded = GrammarCompiler(DIRECTORY, VOCAB, END_IDS)
    try:
        slow = [f"(a{{1000}}){{{1000 + number}}}" for number in range(SLOTS + MAX_FORKS + 2)]
        hostile = [asyncio.ensure_future(refusal(crowded, "regex", each)) for each in slow]
        await asyncio.sleep(0)
        assert await screened(crowded, "regex", "ordinary")
        done, waiting = await asyncio.wait(hostile, return_when=asyncio.FIRST_COMPLETED)
        assert waiting, "it has not waited for them"
        assert {each.result().status for each in done} == {429} and all(each.result().retry_after_s for each in done)
    finally:
        crowded.close()
    await asyncio.wait(hostile)


async def test_a_process_that_dies_is_replaced_and_its_tasks_are_tried_again(grammars: GrammarCompiler) -> None:
    await screened(grammars, "json")
    first = grammars.pid
    assert first is not None
    slow = asyncio.ensure_future(refusal(grammars, *HOSTILE["repetition"]))
    while not psutil.Process(first).children():  # noqa: ASYNC110 - another process forks
        await asyncio.sleep(0.001)
    os.kill(first, signal.SIGKILL)
    assert (await slow).code == "grammar_too_complex"
    assert grammars.pid not in (None, first)
    assert await screened(grammars, "regex", "a")


async def test_a_process_that_hangs_is_killed(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "GRACE_S", 0.5 - compiler.WAIT_S)
    await screened(grammars, "json")
    first = grammars.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    asked = asyncio.ensure_future(screened(grammars, "regex", "a"))
    while psutil.pid_exists(first):  # noqa: ASYNC110 - another process ends
        await asyncio.sleep(0.005)
    monkeypatch.setattr(compiler, "GRACE_S", 60.0)  # the next one may be slow
    assert await asked
    assert grammars.pid != first


async def test_a_process_that_cannot_start_is_said(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(child.sys, "executable", str(tmp_path / "nothing"))
    assert (await refusal(grammars, "json")).code == "grammar_compiler_unavailable"
    monkeypatch.setattr(child.sys, "executable", "/bin/false")
    error = await refusal(grammars, "json")
    assert (error.status, error.code) == (503, "grammar_compiler_unavailable") and error.retry_after_s
    monkeypatch.undo()
    assert sys.executable and await screened(grammars, "json")


async def test_a_tokenizer_that_cannot_be_constrained_is_unsupported(tmp_path: Path) -> None:
    KINDS["word_piece"]().save(str(tmp_path / "tokenizer.json"))
    grammars = GrammarCompiler(tmp_path, 600, (0,))
    try:
        for _ in range(2):
            error = await refusal(grammars, "json")
            assert (error.status, error.code, error.param) == (400, "unsupported", "field")
    finally:
        grammars.close()


async def test_the_fake_checkpoint_works_too(tmp_path: Path) -> None:
    grammars = GrammarCompiler(fake_checkpoint(tmp_path / "m"), 512, (1,))
    try:
        assert await screened(grammars, "json")
    finally:
        grammars.close()


def test_the_cache_is_bounded_and_errors_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = VerdictCache()
    monkeypatch.setattr(compiler, "CACHE_BYTES", 100)
    for number in range(10):
        cache.put(bytes([number]), Verdict("x" * 30))
    assert [number for number in range(10) if cache.get(bytes([number]))] == [7, 8, 9]
    cache.get(b"\x07")
    cache.put(b"new", Verdict("x" * 30))
    assert cache.get(b"\x07") and not cache.get(b"\x08")
    cache.put(b"bad", Verdict(error="no"))
    assert cache.get(b"bad")
    cache.put(b"crowded out", Verdict(error="no", code=CROWDED_OUT))
    assert cache.get(b"crowded out") is None
    later = time.monotonic() + ERROR_S + 1
    monkeypatch.setattr(compiler.time, "monotonic", lambda: later)
    assert cache.get(b"bad") is None and cache.get(b"\x07")


def test_a_task_is_the_same_bytes_whenever_it_is_encoded() -> None:
    one = Task(Answer("json_schema", {"b": 1, "a": [None, 2.5]}))
    again = msgspec.msgpack.decode(encode(one).data, type=Task)
    assert again == one and encode(again) == encode(one)


SCRIPT = """
import asyncio, pathlib, sys
from coordinator.grammar.compiler import GrammarCompiler
from coordinator.grammar.task import Answer, Task, encode

async def main() -> None:
    grammars = GrammarCompiler(pathlib.Path(sys.argv[1]), 2048, (7, 1))
    await grammars.compile(encode(Task(Answer("json"))), {None: "field"})
    hostile = asyncio.ensure_future(grammars.compile(encode(Task(Answer("regex", "(a{1000}){1000}"))), {None: "field"}))
    print(grammars.pid, flush=True)
    await hostile

asyncio.run(main())
"""


def test_nothing_outlives_a_coordinator_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, str(DIRECTORY)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout as output:
        screening = psutil.Process(int(output.readline()))
        family = [screening, *screening.children()]
        parent.kill()
        parent.wait()
        assert not psutil.wait_procs(family, scaled(2))[1]


async def test_a_fault_of_the_server_is_no_fault_of_the_client(grammars: GrammarCompiler) -> None:
    error = await refusal(grammars, "regex", 5)  # fails an assertion
    assert (error.status, error.code) == (500, "internal_error")
    assert await screened(grammars, "regex", "a")
