"""The coordinator's answers to the requests of :mod:`tests.golden.requests`, without the values that vary by run."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import tempfile
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.golden import adapter
from tests.golden.labels import seen
from tests.golden.requests import SERVERS, Call, calls
from tests.golden.store import HERE, Digest, Lines, compact, flat, read_digests, write_digests

FILE = HERE / "transcripts.txt"
PATIENCE_S = 60.0
UNSEEN_HEADERS = ("date", "content-length")
REASONS = {"Request Entity Too Large": "Content Too Large", "Unprocessable Entity": "Unprocessable Content"}
"""HTTP reason phrases that newer versions of Python have changed."""
VOLATILE_KEYS = {
    **dict.fromkeys(("created", "created_at", "completed_at"), int),
    "version": str,
    "system_fingerprint": str,
    "incarnation": str,
    "trace_id": str,
    "latency_us": float,
    "arrived": float,
    **dict.fromkeys(("running", "waiting", "free", "held"), int),  # of a worker, as of its last heartbeat
}
"""Keys whose values differ from run to run, and the types of these."""
_ENDS = re.compile(r"\b(outcome|reason|finished_reason)=")
EVENT_END = b"\n\n"
IDS = re.compile(r"\b((?:chatcmpl|cmpl|req)-|(?:resp|msg|rs|fc)_)[0-9a-f]{24,36}\b")
LEFT = re.compile(r"(?<=the deadline is in )[\d.]+")
_CHOICE = re.compile(r'"index": ?(\d+)')
MEASURED = re.compile(r"_(ms|s)(_mean|_max|_p\d+)?$")
"""Matches the keys of measured times."""


def exchange(call: Call, port: int) -> bytes:
    """Return the bytes of the HTTP request."""
    if call.raw is not None:
        return call.raw
    headers = {"Host": f"127.0.0.1:{port}", "Connection": "close"} | call.headers
    if call.body is not None:
        headers["Content-Length"] = str(len(call.body))
    lines = [f"{call.method} {call.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (call.body or b"")


async def answer(call: Call, port: int) -> bytes:
    """Send a request, and return everything that the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(exchange(call, port))
        async with asyncio.timeout(PATIENCE_S):
            await writer.drain()
            if call.leaves:
                return await reader.readuntil(b"\r\n\r\n") + await reader.readuntil(EVENT_END + b"\r\n")
            begun = b""
            if call.later:
                begun = await reader.readuntil(b"\r\n\r\n")
                writer.write(call.later)
                await writer.drain()
            return begun + await reader.read(-1)
    except ConnectionError:  # the server refused the request before it had read all of it
        return b""
    finally:
        writer.close()


def transcript(call: Call, data: bytes, port: int) -> Lines:
    """Return the lines of one or more responses on one connection."""
    lines: Lines = []
    while data:
        head, there, data = data.partition(b"\r\n\r\n")
        if not there or not head.startswith(b"HTTP/"):
            lines += [f"beyond: {steady_text(head.decode('latin-1'), port)!r}"]
            break
        status, *fields = head.decode("latin-1").split("\r\n")
        version, number, reason = (*status.split(" ", 2), "")[:3]
        lines.append(f"{version} {number} {REASONS.get(reason, reason)}")
        headers = sorted(tuple(field.split(": ", 1)) for field in fields)
        names = {name.lower(): value for name, value in headers}
        for name, value in ((name.lower(), value) for name, value in headers):
            if name in UNSEEN_HEADERS:
                continue
            lines.append(f"{name}: {steady_text(value, port)}")
        if status.split(" ")[1] == "100" or call.method == "HEAD":
            continue
        if names.get("transfer-encoding") == "chunked":
            chunks, data = dechunked(data)
            lines += chunk_lines(chunks, call)
            lines += body_lines(b"".join(chunks), names, call, port)
        else:
            size = int(names.get("content-length", len(data)))
            body, data = data[:size], data[size:]
            lines += body_lines(body, names, call, port)
    return lines


def dechunked(data: bytes) -> tuple[list[bytes], bytes]:
    chunks = []
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        chunk, data = data[:length], data[length + 2 :]
        if not length:
            break
        chunks.append(chunk)
    return chunks, data


def chunk_lines(chunks: list[bytes], call: Call) -> Lines:
    """Return whether all chunks of a stream end with an event, and the number of events in each.

    The numbers are left out for several prompts, whose tokens arrive in any order."""
    whole = all(chunk.endswith(EVENT_END) for chunk in chunks)
    counts = "" if several_prompts(call) else " ".join(str(chunk.count(EVENT_END)) for chunk in chunks)
    return [f"{'whole' if whole else 'broken'} events in chunks: {counts}"]


def several_prompts(call: Call) -> int:
    """Return the number of prompts in the request's array; 0 if it has a single prompt."""
    prompt = json.loads(call.body or b"{}").get("prompt")
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int | float) else 0


def body_lines(body: bytes, names: dict[str, str], call: Call, port: int) -> Iterator[str]:
    kind = names.get("content-type", "")
    if kind.startswith("application/json"):
        yield from flat(steady(json.loads(body), port))
    elif kind.startswith("text/event-stream"):
        for event in by_choice(body.decode().split("\n\n")):
            yield "event " + "\\n".join(_event_line(line, port) for line in event.split("\n"))
    elif call.path.startswith("/metrics") and len(body) > 10_000:
        yield "a page of metrics"
    else:
        yield from (f"text {line}" for line in steady_text(body.decode("latin-1"), port).splitlines())


def by_choice(events: list[str]) -> list[str]:
    """Return ``events`` sorted by choice: answers to several prompts arrive interleaved at random."""
    choices = [int(found[1]) if (found := _CHOICE.search(event)) else None for event in events]
    places = [at for at, choice in enumerate(choices) if choice is not None]
    in_order = iter(sorted(places, key=lambda at: choices[at] or 0))
    return [event if choice is None else events[next(in_order)] for event, choice in zip(events, choices, strict=True)]


def _event_line(line: str, port: int) -> str:
    name, there, value = line.partition(": ")
    if there and value.startswith("{"):
        return f"{name}: {compact(steady(json.loads(value), port))}"
    return line


def steady(value: Any, port: int, key: str = "") -> Any:
    """Return ``value`` with everything that differs from run to run replaced by placeholders."""
    if key in VOLATILE_KEYS and isinstance(value, VOLATILE_KEYS[key]):
        return f"({key})"
    if isinstance(value, int | float) and not isinstance(value, bool) and MEASURED.search(key):
        return "(measured)"
    match value:
        case dict():
            return {steady_text(name, port): steady(each, port, name) for name, each in value.items()}
        case list():
            return [steady(each, port) for each in value]
        case str():
            return steady_text(value, port)
        case _:
            return value


def steady_text(text: str, port: int) -> str:
    return (
        LEFT.sub("(left)", IDS.sub(r"\1(id)", text))
        .replace(f":{port}", ":(port)")
        .replace(adapter.version(), "(version)")
    )


async def _record(wanted: Container[str] | None, model: Path) -> list[tuple[str, Lines]]:
    found = []
    chosen = [call for call in calls() if wanted is None or call.name in wanted or labels_of(call.server) in wanted]
    for server, group in itertools.groupby(chosen, lambda call: call.server):
        roles, options = SERVERS[server]
        async with adapter.serve(model, roles, options) as served:
            for call in group:
                data = await answer(call, served.port)
                lines = transcript(call, data, served.port)
                found.append((call.name, lines + await _asked(call, lines, served)))
            found.append((labels_of(server), await _labels(served, "trouble" in options)))
    return [(name, lines) for name, lines in found if wanted is None or name in wanted]


async def _labels(served: adapter.ServedSystem, trouble: bool) -> Lines:
    """Return the label values of the metrics. With a ``trouble``, only those about the ends of requests: whether a
    worker is present then is a matter of timing."""
    found = [steady_text(line, served.port) for line in seen(await served.metrics())]
    return [line for line in found if not trouble or _ENDS.search(line)]


def labels_of(server: str) -> str:
    """Return the key of the entry with all label values of metrics after the requests to ``server``."""
    return f"label values: {server}"


async def _asked(call: Call, lines: Lines, served: adapter.ServedSystem) -> Lines:
    """Return, as lines, the requests that workers received, of completions and chats."""
    if call.method != "POST" or not call.path.endswith("/completions"):
        await served.asked(0)  # else the next call would show them
        return []
    count, seeded = 0, False
    if lines and lines[0].startswith("HTTP/1.1 200"):
        seeded = json.loads(call.body or b"{}").get("seed") is not None
        count = several_prompts(call) or 1
    shown = []
    for asked in await served.asked(count):
        if not seeded:
            asked["seed"] = "(drawn)"
        shown.append(f"worker gets {compact(asked)}")
    if "trouble" in SERVERS[call.server][1]:
        shown = list(set(shown))  # the number of attempts that have arrived by now depends on timing
    return sorted(shown)


def kept() -> dict[str, Digest]:
    return read_digests(FILE)


def record(keys: Iterable[str] | None = None) -> Iterator[tuple[str, Lines]]:
    with tempfile.TemporaryDirectory() as directory:
        model = adapter.fake_model(Path(directory) / "model")
        logging.disable()  # hundreds of requests fail on purpose
        try:
            found = asyncio.run(_record(None if keys is None else set(keys), model))
        finally:
            logging.disable(logging.NOTSET)
    yield from found


def freeze() -> str:
    found = list(record())
    write_digests(FILE, ((key, Digest.of(lines)) for key, lines in found))
    return f"{len(found)} transcripts"
