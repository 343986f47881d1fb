"""``tandem eval`` against a server that knows the answers, and against one that was damaged."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.eval import evaluate as module
from bench.eval.evaluate import GOLDEN, EvaluationReport, comparable, drops, evaluate, read_golden, table
from common.core.errors import StartError
from deploy.cli import main as cli

Serve = Callable[[Callable[[dict[str, Any]], dict[str, Any]]], Any]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Return an async function that starts a server with ``answer(record)`` for each golden record; it returns the
    URL."""
    servers: list[TestServer] = []

    async def start(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
        known = {json.dumps(record["messages"]): record for record in read_golden(GOLDEN)[0]}

        async def complete(request: web.Request) -> web.Response:
            body = await request.json()
            assert body["temperature"] == 0 and body["stream"] is False and body["model"] == "tiny"
            record = known[json.dumps(body["messages"])]
            assert body.get("tools") == record.get("tools")
            message = answer(record)
            if "error" in message:
                return web.json_response(message, status=503)
            return web.json_response({"choices": [{"message": message}], "system_fingerprint": "fp"})

        async def models(_: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": "tiny"}]})

        app = web.Application()
        app.router.add_post("/v1/chat/completions", complete)
        app.router.add_get("/v1/models", models)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return str(servers[-1].make_url("/"))

    yield start
    for server in servers:
        await server.close()


def knows(record: dict[str, Any]) -> dict[str, Any]:
    return dict(record["reference"])


def unparsed(record: dict[str, Any]) -> dict[str, Any]:
    """Answer like a server without a tool parser: the call is text."""
    message = knows(record)
    for call in message.pop("tool_calls", ()):
        arguments = call["function"]["arguments"]
        message["content"] = (
            f'<tool_call>{{"name": "{call["function"]["name"]}", "arguments": {arguments}}}</tool_call>'
        )
    return message


@pytest.mark.parametrize("answer", [knows, unparsed])
async def test_right_answers_are_all_right(serve: Serve, answer: Callable[..., dict[str, Any]]) -> None:
    report = await evaluate(await serve(answer))
    assert report.total.right == report.total.items == len(read_golden(GOLDEN)[0])
    assert report.failures == []
    assert report.fingerprint == "fp"


async def test_a_damaged_server_shows_as_a_drop(serve: Serve, tmp_path: Path) -> None:
    good = await evaluate(await serve(knows))
    (tmp_path / "base.json").write_text(json.dumps(good.as_json()))
    baseline = EvaluationReport.load(tmp_path / "base.json")
    bad = await evaluate(await serve(lambda record: {"content": "It is blue blue blue"}))
    assert bad.total.right == 0
    assert len(drops(bad, baseline, 0.01, 0.05)) == len(good.skills) + 1
    assert drops(good, baseline, 0.01, 0.05) == []
    assert table(bad, baseline).row_count == len(good.skills) + 1


async def test_small_changes_are_tolerated_and_larger_ones_are_not(serve: Serve) -> None:
    good = await evaluate(await serve(knows), skills=["world"])
    first = read_golden(GOLDEN, ["world"])[0][0]["messages"]
    near = await evaluate(
        await serve(lambda r: {"content": "No."} if r["messages"] == first else knows(r)), skills=["world"]
    )
    assert near.failures[0]["said"] == "No."
    assert drops(near, good, 0.03, 0.05) == []
    assert drops(near, good, 0.01, 0.05) == ["all fell from 100.0% to 98.0%"]


async def test_a_refused_request_counts_as_wrong_and_says_why(serve: Serve) -> None:
    busy = {"error": {"message": "busy"}}
    url = await serve(lambda record: busy if record["skill"] == "copy" else knows(record))
    report = await evaluate(url, skills=["copy", "sort"])
    assert report.total.right == report.skills["sort"].items and report.skills["copy"].right == 0
    assert report.failures[0]["why"] == "HTTP 503: busy"
    with pytest.raises(StartError, match="busy"):
        await evaluate(url, skills=["copy"])


async def test_some_skills_are_compared_with_the_same_ones_of_a_whole_baseline(serve: Serve) -> None:
    whole = await evaluate(await serve(lambda r: knows(r) if r["skill"] == "copy" else {"content": "No."}))
    good, bad = [
        await evaluate(await serve(answer), skills=["copy"]) for answer in (knows, lambda record: {"content": "No."})
    ]
    baseline = comparable(whole, good)
    assert list(baseline.skills) == ["copy"] and baseline.total.share == 1.0 and not baseline.failures
    assert drops(good, whole, 0.01, 0.05) == []
    assert drops(bad, whole, 0.01, 0.05) == ["copy fell from 100.0% to 0.0%", "all fell from 100.0% to 0.0%"]
    assert table(bad, whole).row_count == 2


async def test_drops_refuses_skill_missing_from_baseline(serve: Serve) -> None:
    url = await serve(knows)
    world, copying = await evaluate(url, skills=["world"]), await evaluate(url, skills=["copy"])
    with pytest.raises(StartError, match="the baseline lacks world"):
        drops(world, copying, 0.01, 0.05)
    with pytest.raises(StartError, match="another golden set"):
        drops(world, replace(world, golden="another"), 0.01, 0.05)


async def test_no_server_is_said_in_words() -> None:
    with pytest.raises(StartError, match="no model answers"):
        await evaluate("http://127.0.0.1:9")


@pytest.mark.parametrize(("key", "why"), [("", "none was given"), ("wrong", "rejects the given key")])
async def test_a_server_that_wants_a_key_is_no_server_that_is_not_there(key: str, why: str) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=401)

    app = web.Application()
    app.router.add_get("/v1/models", refuse)
    async with TestServer(app) as server:
        with pytest.raises(StartError, match="requires an API key") as refused:
            await evaluate(str(server.make_url("/")), api_key=key)
    assert why in refused.value.why and refused.value.todo == "give --api-key or set TANDEM_API_KEY"


def test_an_unknown_skill_lists_the_known_ones() -> None:
    with pytest.raises(StartError, match="arithmetic"):
        read_golden(GOLDEN, ["copy", "flying"])


def test_an_empty_golden_set_is_no_figure(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(StartError, match="cannot read the golden set"):
        read_golden(tmp_path / "empty.jsonl")


@pytest.mark.processes
def test_the_command_saves_compares_and_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = EvaluationReport("tiny", "x", skills={"world": module.Figures(10, 10, 10)})
    bad = EvaluationReport("tiny", "x", skills={"world": module.Figures(10, 5, 10)})
    reports = [good, good, bad]

    async def found(*_: Any, **__: Any) -> EvaluationReport:
        return reports.pop(0)

    monkeypatch.setattr(module, "evaluate", found)
    base = str(tmp_path / "base.json")
    assert cli.main(["eval", "--save", base, "--label", "tandem up --quantization int8"]) == 0
    assert json.loads(Path(base).read_text())["label"] == "tandem up --quantization int8"
    assert cli.main(["eval", "--compare", base]) == 0
    assert cli.main(["eval", "--compare", base]) == 1


async def test_a_server_that_closes_its_connections_costs_no_item() -> None:
    """Each item uses a new connection, because a kept one may be closed while the next question is on its way."""
    connections = []

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        body = b'{"data": [{"id": "tiny"}], "choices": [{"message": {"content": "?"}}]}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body))
        writer.write(body)
        if head.startswith(b"POST"):
            with contextlib.suppress(asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")  # a second request gets no answer
        writer.close()

    server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
    async with server:
        report = await evaluate(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", concurrency=1)
    assert all("Server disconnected" not in failure["why"] for failure in report.failures)
    assert len(connections) == report.total.items + 1
