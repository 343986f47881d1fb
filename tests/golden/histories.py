"""Simulated histories: each message by tag and fields, and the end of each request."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import msgspec

from tests.golden import adapter
from tests.golden.store import ADVICE, HERE, Digest, Lines, difference, read_digests, write_digests

FILE = HERE / "histories.txt"
SEEDS = 2000
SPACING = 16
"""Number of lines between the marks of a digest."""
PROTOCOL_SHOWN = 12
"""Shown in each Hello in place of the protocol's number: to raise that alone changes no history, and ``wire.json`` has
it."""
_COUNTERS_HIDDEN = frozenset(adapter.step_sizes())
"""Counters of heartbeats that are not shown: only monitoring reads them."""
FIELDS_SHOWN = {"timing": 4, "heartbeat": 16}
"""Number of fields that are shown of some messages. Later ones only report, and ``wire.json`` has them."""
SAMPLING_SHOWN = 17
"""Number of sampling parameters that are always shown. Later ones are if they are set: to add one changes no history,
and ``wire.json`` has it."""
CHUNK = 20
_SAMPLING_FIELDS = adapter.sampling_fields()


@contextlib.contextmanager
def recorded() -> Iterator[Lines]:
    """Record one line per event simulated in the block: microsecond, sender and receiver, tag, fields."""
    lines: Lines = []

    def sent(now: float, sender: str, receiver: str, parts: list[bytes]) -> None:
        if len(parts) == 1:
            tag, *fields = msgspec.msgpack.decode(parts[0])
            if tag == "hello":
                fields[0] = PROTOCOL_SHOWN
            elif tag in FIELDS_SHOWN:
                del fields[FIELDS_SHOWN[tag] :]
        else:
            header, payload = parts
            tag, fields = "frame", [header, len(payload), hashlib.blake2b(payload, digest_size=6).hexdigest()]
        lines.append(f"{now * 1e6:.0f} {sender}>{receiver} {tag} {_shown(fields)}")

    def ended(now: float, number: int, how: str, output: list[list[int]]) -> None:
        lines.append(f"{now * 1e6:.0f} request-{number} end {_shown([how, output])}")

    with adapter.watched(sent, ended):
        yield lines


def _shown(fields: list[Any]) -> str:
    """Return JSON with bytes in hexadecimal and floats rounded to six digits, since their last bits vary by machine."""
    return json.dumps([_steady(each) for each in fields], default=bytes.hex, separators=(",", ":"))


def _steady(value: Any) -> Any:
    kind = type(value)
    if kind is float:
        return float(f"{value:.6g}")
    if kind is list and len(value) == _SAMPLING_FIELDS:
        while len(value) > SAMPLING_SHOWN and not value[-1]:
            value = value[:-1]
    if kind is list:
        return [_steady(each) for each in value]
    if kind is dict:
        return {key: _steady(each) for key, each in value.items() if key not in _COUNTERS_HIDDEN}
    return value


def history(seed: int) -> Lines:
    with recorded() as lines:
        adapter.play(seed)
    return lines


def changed(frozen: dict[str, Digest], seed: int, lines: Lines) -> str:
    """Describe how a history of ``seed`` differs from the frozen one; "" if it does not, or if none is frozen."""
    if (kept := frozen.get(str(seed))) is None or not (words := difference(kept, lines, 3)):
        return ""
    return f"this history is not the frozen one: {words}\n{ADVICE.format(part='histories', key=seed)}"


def kept() -> dict[str, Digest]:
    return read_digests(FILE)


def record(keys: Iterable[str] | None = None) -> Iterator[tuple[str, Lines]]:
    for key in kept() if keys is None else keys:
        yield key, history(int(key))


def _play(chunk: range) -> tuple[list[Digest], set[str]]:
    """Play histories; return their digests, and the tags of all messages."""
    gc.freeze()
    gc.disable()  # garbage of all histories is collected at the end
    played = [history(seed) for seed in chunk]
    tags = {line.split(" ", 3)[2] for lines in played for line in lines}
    digests = [Digest.of(lines, SPACING) for lines in played]
    gc.collect()
    return digests, tags


def freeze(jobs: int | None = None) -> str:
    chunks = [range(at, at + CHUNK) for at in range(0, SEEDS, CHUNK)]
    found: list[Digest] = []
    tags: set[str] = set()
    with ProcessPoolExecutor(jobs or len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        for digests, seen in pool.map(_play, chunks):
            found += digests
            tags |= seen
    write_digests(FILE, ((str(seed), digest) for seed, digest in enumerate(found)))
    absent = sorted(set(adapter.tags()) - tags)
    words = f"{sum(each.count for each in found):,} events of {SEEDS} histories"
    return f"{words}; messages that none has: {', '.join(absent) or 'none'}"
