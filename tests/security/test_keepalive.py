"""A stream that is silent for longer than proxies wait is kept alive, without breaking what clients read."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.system import READY_S, SMALL, RunningSystem, TandemProcess

pytestmark = pytest.mark.e2e

KEPT_ALIVE_S = 15.0
TOKENS = 200
_CONTROL = re.compile(r"workers at tcp://\S*?:(\d+)\b")


class LoadClient:
    """Reads like ``vllm bench serve``: strips each chunk, splits at blank lines and removes ``data: ``."""

    def __init__(self) -> None:
        self.buffer, self.events = "", list[Any]()
        self.done = False

    def take(self, chunk: bytes) -> None:
        if not (text := chunk.strip().decode()):
            return
        self.buffer += text
        *whole, rest = self.buffer.split("\n\n")
        if rest.startswith("data: ") and (rest == "data: [DONE]" or _is_json(rest.removeprefix("data: "))):
            whole, rest = [*whole, rest], ""
        self.buffer = rest
        for event in whole:
            if not event.startswith(":"):
                data = event.removeprefix("data: ")
                if data == "[DONE]":
                    self.done = True
                else:
                    self.events.append(json.loads(data))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


async def test_a_load_client_reads_every_event_of_a_stream_that_was_silent(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    model = checkpoint("llama")
    named = ("--served-model-name", RunningSystem.name)
    first = TandemProcess.start(
        tmp_path / "coordinator.log", "coordinator", model, *named, "--port", "0", "--control-port", "0"
    )
    processes = [first]
    try:
        system = RunningSystem(first, RunningSystem._find_url(first))
        found = _CONTROL.search(first.text)
        assert found, first.text
        for role in ("prefill", "decode"):  # started without a launcher, which would replace the worker that hangs
            words = [role, model, "--coordinator", f"127.0.0.1:{found[1]}", *named, *SMALL]
            processes.append(TandemProcess.start(tmp_path / f"{role}.log", *words))
        hung = processes[-1].popen.pid
        async with system.client() as client:
            deadline = time.monotonic() + READY_S
            while [worker["state"] for worker in (await client.workers()).values()] != ["ready"] * 2:
                assert time.monotonic() < deadline, first.text
                await asyncio.sleep(0.05)
            body = {"prompt": [5, 6, 7], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
            reader, chunks = LoadClient(), list[bytes]()
            async with await client.post("/v1/completions", **body) as response:
                assert response.status == 200
                stopped, came_at = False, 0.0
                async for chunk in response.content.iter_any():
                    silent_s, came_at = time.monotonic() - (came_at or time.monotonic()), time.monotonic()
                    reader.take(chunk)
                    chunks.append(chunk)
                    if not stopped:
                        os.kill(hung, signal.SIGSTOP)
                        stopped = True
                    elif silent_s > KEPT_ALIVE_S / 2:
                        os.kill(hung, signal.SIGCONT)
            assert any(not chunk.strip() for chunk in chunks), "nothing kept the stream alive"
            assert not any(line.startswith(b":") for line in b"".join(chunks).splitlines())
            assert reader.done and not reader.buffer
            async with await client.post("/v1/completions", **body | {"stream": False}) as response:
                whole = (await response.json())["choices"][0]
            assert "".join(event["choices"][0]["text"] for event in reader.events) == whole["text"]
            assert reader.events[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "length"
        for process in reversed(processes):
            process.stop()
    finally:
        for process in processes:
            process.kill()
