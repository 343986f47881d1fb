"""Names, types, labels and bucket edges of all metrics, as ``/metrics`` shows them."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.golden import adapter
from tests.golden.labels import sample
from tests.golden.requests import CHAT, SERVERS, SOME_CHAT, Call
from tests.golden.store import HERE, Lines, read_whole, write_whole
from tests.golden.transcripts import answer

FILE = HERE / "metrics.txt"


def kept() -> dict[str, Lines]:
    return read_whole(FILE)


def families(page: str) -> dict[str, Lines]:
    """Return, by metric name, its type, the label names of its samples, and its bucket edges."""
    found: dict[str, Lines] = {}
    samples: dict[str, set[str]] = defaultdict(set)
    edges: dict[str, list[str]] = defaultdict(list)
    name = ""
    for line in page.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ")[2]
            found[name] = []
        elif line.startswith("# TYPE "):
            found[name].append("type " + line.split(" ")[3])
        elif shown := sample(line):
            shown_as, labels, _ = shown
            edge = labels.pop("le", None)
            samples[name].add(f"sample {shown_as}{{{','.join(labels)}}}")
            if edge is not None and edge not in edges[name]:
                edges[name].append(edge)
    for name, lines in found.items():
        lines += sorted(samples[name]) + ([f"buckets {' '.join(edges[name])}"] if name in edges else [])
    return found


async def _page(model: Path) -> tuple[str, dict[str, list[tuple[str, ...]]]]:
    roles, options = SERVERS["pair"]
    async with adapter.serve(model, roles, options) as served:
        chat = Call("", "pair", "POST", CHAT, {"Content-Type": "application/json"}, json.dumps(SOME_CHAT).encode())
        answered = await answer(chat, served.port)
        assert answered.startswith(b"HTTP/1.1 200 "), answered
        page = await answer(Call("", "pair", "GET", "/metrics", {}, None), served.port)
        return page.partition(b"\r\n\r\n")[2].decode(), served.labels()


def record(keys: Iterable[str] | None = None) -> Iterator[tuple[str, Lines]]:
    with tempfile.TemporaryDirectory() as folder:
        page, labels = asyncio.run(_page(adapter.fake_model(Path(folder) / "model")))
    for name, lines in sorted(families(page).items()):
        if keys is None or name in keys:
            yield name, lines + [f"labels {' '.join(each)}" for each in labels.get(name, [])]


def freeze() -> str:
    write_whole(FILE, record())
    return f"{len(kept())} metrics"
