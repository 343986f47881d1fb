"""Clients that send long texts to the tokenizer and hang up neither delay other clients nor fill the memory."""

from __future__ import annotations

import asyncio
import io
import json
import random
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.e2e.system import ApiClient, RunningSystem
from tests.fakes.checkpoint import fake_checkpoint
from tests.pace import scaled

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.alone]

MIB = 1 << 20
BODY = 7 * MIB
MOST_RSS = 400 * MIB
MOST_LATER_S = 0.5
"""Most seconds by which the median call of other clients may be delayed; under ONE_PROMPT the slowest one, too."""
WORST_LATER_S = 3.0
"""Most seconds by which the slowest call of other clients may be delayed under any attack."""
MOST_SCALE = 4.0
"""The largest factor by which the bounds above grow on a slower machine."""
ONE_PROMPT = "one prompt"
"""Four clients with a prompt of 7 MiB each."""
ASKED_S, LEAST_CALLS = 2.0, 8
ATTACKERS = 4
HUNG_UP_AFTER_S = 0.3
PROSE = "the block has holders and the sender holds it until the receiver has it. "
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def long_text(chars: int) -> str:
    """Return text that does not repeat one word."""
    words = PROSE.split()
    dice = random.Random(7)
    text = " ".join(dice.choice(words) + str(dice.randrange(1000)) for _ in range(20_000))
    return (text * (chars // len(text) + 1))[:chars]


def chat_of(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def call_with(arguments: str, count: int = 1) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "content": "", "tool_calls": [call] * count}]}


def calls_of_lists() -> dict[str, Any]:
    """Return tool calls, each with as many lists in its arguments as one body may have."""
    lists = "[" * 60 + "]" * 60
    arguments = '{"x":[' + ",".join([lists] * (131_000 // 60)) + "]}"
    return call_with(arguments, BODY // len(arguments))


def deep_numbers(count: int) -> bytes:
    """Return a body with a tool that contains ``count`` numbers, nested so deeply that an indenting template writes
    each on a line of its own of about 240 characters."""
    numbers = b"[" * 57 + b",".join([b"1"] * count) + b"]" * 57
    tool = b'{"type": "function", "function": {"name": "f", "parameters": {"x": ' + numbers + b"}}}"
    return json.dumps(chat_of("x"))[:-1].encode() + b', "tools": [' + tool + b"]}"


def array(item: str) -> bytes:
    """Return a body with a JSON array that repeats ``item`` as often as there is room."""
    start = json.dumps(chat_of("x"))[:-1].encode() + b', "chat_template_kwargs": {"x": ['
    return start + b",".join([item.encode()] * (BODY // (len(item) + 1))) + b"]}}"


def keys(count: int) -> bytes:
    """Return a body with an object of ``count`` members and a colon in a string, so that keys are checked one by
    one."""
    members = b",".join(b'"%06d":1' % number for number in range(count))
    return json.dumps(chat_of("a:b"))[:-1].encode() + b', "chat_template_kwargs": {"x": {' + members + b"}}}"


def attacks() -> dict[str, tuple[str, bytes]]:
    """Return path and body of each attack. The first LONG_TEXTS are long texts that a context may have room for; the
    last GROWING become larger when they are parsed or rendered."""
    text = long_text(BODY)
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    plain: dict[str, tuple[str, dict[str, Any]]] = {
        "prompt": ("/tokenize", {"prompt": text}),
        "chat": ("/tokenize", chat_of(text)),
        "prompts": (TEXT, {"prompt": [text[:110_000]] * 64, "max_tokens": 1}),
        "generated": (CHAT, chat_of(text, max_tokens=1)),
        "tools": (CHAT, chat_of("x", tools=[tool], max_tokens=1)),
        "one word": ("/tokenize", {"prompt": "x" * BODY}),
        "astral": ("/tokenize", chat_of("\N{SLIGHTLY SMILING FACE}" + text)),
        "brackets": ("/tokenize", {"prompt": '[{"' * (BODY // 4)}),
        "many messages": ("/tokenize", {"messages": chat_of(text[:400])["messages"] * 16_000}),
        "arguments": ("/tokenize", call_with('{"x":[' + "[]," * (BODY // 3) + "[]]}")),
    }
    bodies = {name: (path, json.dumps(body, ensure_ascii=False).encode()) for name, (path, body) in plain.items()}
    for name, item in {"arrays": "[]", "objects": '{"a":1}', "strings": '"ab"', "numbers": "1.5"}.items():
        bodies[name] = ("/tokenize", array(item))
    bodies["keys"] = ("/tokenize", keys(BODY // 11))
    bodies["allowed keys"] = ("/tokenize", keys(120_000))
    bodies["ids"] = ("/detokenize", b'{"tokens":[' + b",".join([b"500"] * (BODY // 4)) + b"]}")
    bodies["calls"] = ("/tokenize", json.dumps(calls_of_lists()).encode())
    bodies["deep numbers"] = ("/tokenize", deep_numbers(BODY // 4))
    return bodies


LONG_TEXTS, GROWING = 6, 2
INDENTING = """{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}
{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}"""
"""A chat template that indents tools, as Llama 3.1's does."""


@pytest.fixture(scope="module", name="attacks")
def made_attacks() -> dict[str, tuple[str, bytes]]:
    return attacks()


def raw(url: str, path: str, data: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def send_and_leave(url: str, request: bytes) -> None:
    """Send a whole request and hang up without waiting for its answer."""
    place = urlsplit(url)
    _, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        writer.write(request)
        await writer.drain()
        await asyncio.sleep(HUNG_UP_AFTER_S)  # part of the attack: processing has begun when the client leaves
    except ConnectionError:
        pass  # rejected before everything was sent
    finally:
        writer.close()


@asynccontextmanager
async def under_attack(url: str, *requests: bytes) -> AsyncIterator[None]:
    """Run ATTACKERS clients that send ``requests`` in turn for the duration of the block."""

    async def attacker(first: int) -> None:
        at = first
        while True:
            await send_and_leave(url, requests[at % len(requests)])
            at += 1

    tasks = [asyncio.create_task(attacker(first)) for first in range(ATTACKERS)]
    try:
        await asyncio.sleep(2 * HUNG_UP_AFTER_S)  # until there are requests whose clients have left
        assert not [task for task in tasks if task.done()]
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def coordinator_of(system: RunningSystem) -> psutil.Process:
    """Return the process that listens at ``system.url``."""
    port = urlsplit(system.url).port
    mine = psutil.Process(system.process.popen.pid)
    listening = [
        each
        for each in (mine, *mine.children(recursive=True))
        if any(place.laddr.port == port and place.status == psutil.CONN_LISTEN for place in each.net_connections())
    ]
    return listening[-1]


class PeakMemory:
    """Peak resident bytes of a process while it is watched."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self.most = 0

    async def __aenter__(self) -> PeakMemory:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        self._look()

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(0.02)

    def _look(self) -> None:
        self.most = max(self.most, self._process.memory_info().rss)


async def waiting_times(ask: Callable[[], Awaitable[None]]) -> list[float]:
    """Return the seconds of each call of ``ask``, one after another for ASKED_S and at least LEAST_CALLS times."""
    took: list[float] = []
    first = time.monotonic()
    while len(took) < LEAST_CALLS or time.monotonic() - first < ASKED_S:
        began = time.monotonic()
        await asyncio.wait_for(ask(), 60)
        took.append(time.monotonic() - began)
    return took


class Waits:
    """Times of the same call, without and with attackers, in seconds."""

    def __init__(self, quiet: list[float]) -> None:
        self.quiet = quiet
        self.took: dict[str, list[float]] = {}

    def check(self) -> None:
        """Check that the median call takes as long as without attackers, and that none takes much longer."""
        median, worst, scale = statistics.median(self.quiet), max(self.quiet), min(MOST_SCALE, scaled(1))
        for name, took in self.took.items():
            worst_later_s = MOST_LATER_S if name == ONE_PROMPT else WORST_LATER_S
            assert statistics.median(took) - median <= MOST_LATER_S * scale, f"{name}: {self}"
            assert max(took) - worst <= worst_later_s * scale, f"{name}: {self}"

    def __str__(self) -> str:
        shown = {"quiet": self.quiet, **self.took}
        return ", ".join(f"{name} {statistics.median(took):.2f}..{max(took):.2f} s" for name, took in shown.items())


async def check(
    system: RunningSystem, attacks: dict[str, tuple[str, bytes]], ask: Callable[[], Awaitable[None]]
) -> None:
    """Check that ``ask`` takes as long as without attackers, and that the coordinator's memory stays small."""
    requests = [raw(system.url, *attack) for attack in attacks.values()]
    waves = {
        ONE_PROMPT: requests[:1],
        "long texts": requests[:LONG_TEXTS],
        "many values": requests[LONG_TEXTS:-GROWING],
    }
    waves["values that grow"] = requests[-GROWING:]
    async with PeakMemory(coordinator_of(system)) as memory:
        waits = Waits(await waiting_times(ask))
        for name, sent in waves.items():
            async with under_attack(system.url, *sent):
                waits.took[name] = await waiting_times(ask)
        waits.quiet += await waiting_times(ask)
    waits.check()
    assert memory.most < MOST_RSS, f"{waits}, {memory.most // MIB} MiB"


# -- the built-in model: chats go on -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    """``tandem up`` with the built-in model."""
    words = ("up", "--port", "0", "--control-port", "0", "--served-model-name", RunningSystem.name)
    small = ("--threads", "1", "--num-kv-blocks", "1024")
    with RunningSystem.running(tmp_path_factory.mktemp("served") / "up.log", *words, *small) as system:
        yield system


async def first_token(client: ApiClient) -> None:
    """Send a chat of 4,600 characters and wait for the start of its answer."""
    content = (f"{secrets.token_hex(8)}: {PROSE * 70}")[:4_600]  # unique, so that no prefix is cached
    async with await client.post(CHAT, **chat_of(content), stream=True, max_tokens=4) as response:
        assert response.status == 200, await response.text()
        await response.content.readline()


async def test_chats_do_not_wait_for_long_texts(served: RunningSystem, attacks: dict[str, tuple[str, bytes]]) -> None:
    async with served.client() as client:
        await check(served, attacks, lambda: first_token(client))


SMALL_REQUESTS = {
    "many messages": (256, {"messages": chat_of("a")["messages"] * 440}),
    "texts of one step": (64, {"prompt": long_text(16_000)}),
}
"""Number of clients, and the body that each posts to /tokenize again and again."""


async def test_chats_do_not_wait_for_many_small_requests(served: RunningSystem) -> None:
    async def attacker(body: bytes) -> None:
        while True:
            async with client.session.post("/tokenize", data=body) as response:
                assert response.status in (200, 429), await response.text()

    async with served.client() as client, PeakMemory(coordinator_of(served)) as memory:
        waits = Waits(await waiting_times(lambda: first_token(client)))
        for name, (clients, asked) in SMALL_REQUESTS.items():
            body = json.dumps(asked).encode()
            tasks = [asyncio.create_task(attacker(body)) for _ in range(clients)]
            try:
                waits.took[name] = await waiting_times(lambda: first_token(client))
                assert not [task for task in tasks if task.done()]
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        waits.quiet += await waiting_times(lambda: first_token(client))
    waits.check()
    assert memory.most < MOST_RSS, f"{waits}, {memory.most // MIB} MiB"


async def test_many_choices_and_stop_strings_do_not_delay_other_requests(served: RunningSystem) -> None:
    """One request of 50 KB asks for 1,024 choices with 16 stop strings that have nothing in common. Workers compute
    them until the client hangs up, so the test times /health instead of a chat."""
    letters = "".join(chr(0x4E00 + at) for at in range(16 * 1024))
    stops = [letters[at : at + 1024] for at in range(0, len(letters), 1024)]
    body = {"model": RunningSystem.name, "prompt": ["a"] * 64, "n": 16, "max_tokens": 2, "stop": stops}
    request = raw(served.url, TEXT, json.dumps(body, ensure_ascii=False).encode())

    async def health() -> None:
        async with client.session.get("/health") as response:
            assert response.status == 200

    async with served.client() as client, PeakMemory(coordinator_of(served)) as memory:
        waits = Waits(await waiting_times(health))
        async with under_attack(served.url, request):
            waits.took[ONE_PROMPT] = await waiting_times(health)
    waits.check()
    assert memory.most < MOST_RSS, f"{waits}, {memory.most // MIB} MiB"


async def test_text_beyond_context_length_is_refused_early(
    served: RunningSystem, attacks: dict[str, tuple[str, bytes]]
) -> None:
    async with served.client() as client:
        for name, (path, body) in attacks.items():
            async with client.session.post(path, data=io.BytesIO(body)) as response:
                error = (await response.json())["error"]
            assert response.status == 400, (name, error)
            too_long = error["code"] == "context_length_exceeded" and "2048" in error["message"]
            too_many = error["code"] == "invalid_value" and "are allowed" in error["message"]
            assert too_long or too_many, (name, error)
        async with client.session.post("/detokenize", json={"tokens": [5] * 2049}) as response:
            error = (await response.json())["error"]
        assert response.status == 400 and error["code"] == "context_length_exceeded", error


# -- a context that has room for them ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    """A coordinator without workers, whose model has a context longer than any body; only its tokenizer is used."""
    directory: Path = tmp_path_factory.mktemp("large")
    model = fake_checkpoint(directory / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 20}))
    words = ["coordinator", model, "--port", "0", "--control-port", "0", "--served-model-name", RunningSystem.name]
    with RunningSystem.running(directory / "log", *words, "--chat-template", INDENTING, until_ready=False) as system:
        yield system


async def test_long_texts_do_not_delay_other_requests(
    large: RunningSystem, attacks: dict[str, tuple[str, bytes]]
) -> None:
    async def tokenize() -> None:
        async with client.session.post("/tokenize", json=chat_of((PROSE * 70)[:4_600])) as response:
            assert response.status == 200, await response.text()

    async with large.client() as client:
        await check(large, attacks, tokenize)
        text = long_text(60_000)
        async with asyncio.timeout(scaled(10)):  # the attackers' abandoned requests must have been dropped
            async with client.session.post("/tokenize", json={"prompt": text}) as response:
                assert (await response.json())["count"] > len(text) / 10


async def test_chats_do_not_wait_for_small_bodies_that_the_template_makes_long(large: RunningSystem) -> None:
    body = deep_numbers(8_000)

    async def attacker() -> None:
        while True:
            async with client.session.post("/tokenize", data=body) as response:
                assert response.status in (200, 400, 429), await response.text()

    async def tokenize() -> None:
        async with client.session.post("/tokenize", json=chat_of((PROSE * 70)[:4_600])) as response:
            assert response.status == 200, await response.text()

    async with large.client() as client, PeakMemory(coordinator_of(large)) as memory:
        waits = Waits(await waiting_times(tokenize))
        tasks = [asyncio.create_task(attacker()) for _ in range(64)]
        try:
            waits.took[ONE_PROMPT] = await waiting_times(tokenize)
            assert not [task for task in tasks if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    waits.check()
    assert memory.most < MOST_RSS, f"{waits}, {memory.most // MIB} MiB"
