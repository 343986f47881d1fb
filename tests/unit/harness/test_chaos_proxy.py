"""The fault proxy injects the faults that it claims to, and counts them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.net.wire import seal
from kvtransfer.frames import MAGIC
from tests.chaos.proxy import Action, FaultProxy, Parts, Rule, _Parser, framed, is_a, is_frame
from tests.pace import scaled

SOON_S = scaled(5.0)
_WIRE = json.loads((Path(__file__).parents[2] / "golden" / "wire.json").read_text())["messages"]
GOLDEN = {tag: bytes.fromhex(data) for tag, data in _WIRE.items()}
GREETING = b"\xff" + bytes(8) + b"\x7f\x03" + bytes(53)
_READY = b"\x05READY\x08Identity\x00\x00\x00\x06me|one"
READY = bytes([4, len(_READY)]) + _READY
FRAME = [MAGIC + bytes(60), bytes(range(256)) * 3]
COMMIT = [seal(b"\x95\xa6commit" + bytes(40))]
OTHER = [seal(b"\x93\xa4open")]


def test_messages_come_out_whole_however_the_bytes_come_in() -> None:
    stream = GREETING + READY + framed(FRAME) + framed(OTHER) + framed([b"", b"x" * 255, b"y" * 256])
    for size in (*range(1, 80), 300, len(stream)):
        parser, raw, messages = _Parser(), b"", []
        for at in range(0, len(stream), size):
            for what in parser.feed(stream[at : at + size]):
                if isinstance(what, bytes):
                    raw += what
                else:
                    messages.append(what)
        assert raw == GREETING + READY
        assert messages == [FRAME, OTHER, [b"", b"x" * 255, b"y" * 256]]
        assert parser.identity == "me|one"


def test_proxy_distinguishes_messages() -> None:
    assert is_frame(FRAME) and not is_frame(COMMIT) and not is_frame(FRAME[:1])
    assert is_a("open", "commit")(COMMIT) and not is_a("open")(COMMIT) and not is_a("commit")([*COMMIT, b""])
    for tag, data in GOLDEN.items():
        assert [each for each in GOLDEN if is_a(each)([data])] == [tag]


@dataclass
class ProxiedLine:
    """A client, the proxy, and a listener that records what it receives."""

    proxy: FaultProxy
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    got: bytearray = field(default_factory=bytearray)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    ended: str = ""
    listener: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.listener = writer
        try:
            while data := await reader.read(1 << 16):
                self.got += data
                self.news.set()
            self.ended = "closed"
        except ConnectionResetError:
            self.ended = "reset"
        self.news.set()

    async def say(self, *messages: Parts) -> None:
        self.writer.write(b"".join(framed(parts) for parts in messages))
        await self.writer.drain()

    async def until(self, wanted: bytes | str) -> None:
        """Wait until the listener has received the handshake and exactly these bytes, or until the connection has ended
        in this way ("closed", "reset")."""
        if isinstance(wanted, bytes):
            wanted = GREETING + READY + wanted
        async with asyncio.timeout(SOON_S):
            while wanted not in (self.ended, bytes(self.got)):
                self.news.clear()
                await self.news.wait()


@contextlib.asynccontextmanager
async def line() -> AsyncIterator[ProxiedLine]:
    proxy = await FaultProxy(random.Random(1)).start()
    at = ProxiedLine(proxy, None, None)  # type: ignore[arg-type]
    server = await asyncio.start_server(lambda *ends: at.serve(*ends), "127.0.0.1", 0)
    proxy.aim(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    at.reader, at.writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        at.writer.write(GREETING + READY)
        await at.until(b"")
        yield at
    finally:
        for writer in (at.writer, at.listener):
            assert writer is not None
            writer.transport.abort()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        server.close()
        await proxy.close()


@pytest.mark.parametrize(
    ("action", "arrives"),
    [
        ("drop", [OTHER, COMMIT]),
        ("duplicate", [FRAME, FRAME, OTHER, COMMIT]),
        ("reorder", [OTHER, FRAME, COMMIT]),
    ],
)
async def test_proxy_rule_applies_up_to_its_limit(action: Action, arrives: list[Parts]) -> None:
    async with line() as at:
        rule = Rule(action, is_frame, limit=1)
        at.proxy.rules.append(rule)
        await at.say(FRAME, OTHER, COMMIT)
        await at.until(b"".join(map(framed, arrives)))
        await at.say(FRAME)
        await at.until(b"".join(map(framed, [*arrives, FRAME])))
        assert rule.hits == at.proxy.done[action] == 1


@pytest.mark.parametrize("action", ["corrupt", "truncate"])
async def test_one_part_of_a_message_is_broken(action: Action) -> None:
    async with line() as at:
        at.proxy.rules.append(Rule(action, is_frame, limit=1))
        await at.say(FRAME, OTHER)
        async with asyncio.timeout(SOON_S):
            while not at.got.endswith(framed(OTHER)):
                at.news.clear()
                await at.news.wait()
        got = list(_Parser().feed(bytes(at.got)))[2]
        [(broken, sent)] = [(part, whole) for part, whole in zip(got, FRAME, strict=True) if part != whole]
        if action == "truncate":
            assert len(broken) < len(sent) and sent.startswith(broken)
        else:
            assert sum((a ^ b).bit_count() for a, b in zip(broken, sent, strict=True)) == 1
        assert at.proxy.done[action] == 1


async def test_other_directions_and_other_peers_are_left_alone() -> None:
    async with line() as at:
        at.proxy.rules.append(Rule("drop", is_frame, "down"))
        await at.say(FRAME)
        await at.until(framed(FRAME))
        at.proxy.rules[:] = [Rule("drop", is_frame)]
        at.proxy.only = "another|"
        at.proxy.black_hole = True
        await at.say(FRAME)
        await at.until(framed(FRAME) * 2)
        assert not at.proxy.reset() and not at.proxy.half_close()
        assert not at.proxy.done["drop"] and not at.proxy.done["black_hole"]


async def test_proxy_delivers_held_messages_after_release() -> None:
    async with line() as at:
        held = at.proxy.hold_at(is_frame)
        await at.say(OTHER, FRAME, COMMIT)
        async with asyncio.timeout(SOON_S):
            await held.wait()
        assert FRAME[1] not in bytes(at.got)
        at.proxy.release()
        await at.until(framed(OTHER) + framed(FRAME) + framed(COMMIT))


async def test_a_black_hole_swallows_and_leaves_the_connection() -> None:
    async with line() as at:
        at.proxy.black_hole = True
        await at.say(FRAME)
        deadline = time.monotonic() + SOON_S
        while at.proxy.done["black_hole"] < len(framed(FRAME)):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert not at.ended
        assert bytes(at.got) == GREETING + READY
        at.proxy.heal()
        await at.until("reset")


async def test_proxy_resets_black_holed_connection_when_healed() -> None:
    async with line() as at:
        at.proxy.black_hole = True
        reader, writer = await asyncio.open_connection("127.0.0.1", at.proxy.port)
        writer.write(GREETING)
        async with asyncio.timeout(SOON_S):
            while at.proxy.done["black_hole"] < len(GREETING):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
            at.proxy.heal()
            assert await reader.read() == b""
        writer.close()


async def test_a_severed_connection_carries_nothing_in_one_direction_and_the_next_one_does() -> None:
    async with line() as at:
        assert at.proxy.sever("up", beats=True) == 0, "no heartbeats pass over it"
        assert at.proxy.sever("up", beats=False) == 1
        await at.say(FRAME)
        assert at.listener is not None
        at.listener.write(GREETING)
        async with asyncio.timeout(SOON_S):
            assert await at.reader.readexactly(len(GREETING)) == GREETING, "answers pass"
            while not at.proxy.done["severed"]:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        assert not at.ended and bytes(at.got) == GREETING + READY
        dead, at.listener = at.listener, None
        at.got.clear()
        _, again = await asyncio.open_connection("127.0.0.1", at.proxy.port)
        again.write(GREETING + READY + framed(FRAME))
        await at.until(framed(FRAME))
        at.proxy.heal()
        await at.until("reset")
        for writer in (dead, again):
            writer.transport.abort()


async def test_a_reset_ends_both_sides() -> None:
    async with line() as at:
        assert at.proxy.reset() == at.proxy.done["reset"] == 1
        await at.until("reset")
        with pytest.raises(ConnectionResetError):
            await at.reader.read(1)


async def test_half_closed_answers_still_pass() -> None:
    async with line() as at:
        at.proxy.half_close()
        await at.until("closed")
        assert at.proxy.done["half_close"] == 1
        assert at.listener is not None
        at.listener.write(GREETING)
        async with asyncio.timeout(SOON_S):
            assert await at.reader.readexactly(len(GREETING)) == GREETING


@pytest.mark.parametrize(
    ("knob", "value", "counter", "least_s"),
    [("latency_s", 0.1, "latency", 0.1), ("bytes_per_s", 10_000.0, "bandwidth", 0.08), ("slice_bytes", 7, "slices", 0)],
)
async def test_slow_lines_deliver_everything_late(knob: str, value: float, counter: str, least_s: float) -> None:
    async with line() as at:
        setattr(at.proxy, knob, value)
        started = time.monotonic()
        await at.say(FRAME, OTHER)
        await at.until(framed(FRAME) + framed(OTHER))
        if knob == "latency_s":
            assert time.monotonic() - started >= least_s
        assert at.proxy.done[counter] > 0
