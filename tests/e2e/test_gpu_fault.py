"""A worker process whose GPU fails in the middle of a stream: it leaves in words, the stream goes on, it waits longer
before each start, and it is back once the GPU is healthy. The GPU is scripted; the worker computes on the CPU."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.spawner import PRELOADED
from tests.e2e.system import RunningSystem, tandem
from tests.e2e.test_tokens import check, metrics, prompt_of
from tests.pace import scaled
from tests.reference import Reference

pytestmark = pytest.mark.e2e

HEALTHY, NEEDS_RESET = {"recovery": 0}, {"recovery": 1}
FAULT = "GPU 0 (NVIDIA H100 80GB HBM3) reports Xid 95: an uncorrectable memory error that was not contained"
REFUSED = "GPU 0 (NVIDIA H100 80GB HBM3) needs a reset of the GPU, says its driver"


async def until(condition: Callable[[], bool], what: Callable[[], str], seconds: float = 30.0) -> None:
    async with asyncio.timeout(scaled(seconds)):
        while not condition():  # noqa: ASYNC110 - what is waited for is the log of another process
            await asyncio.sleep(0.02)
    assert condition(), what()


async def test_a_gpu_that_fails_takes_its_worker_out_and_no_stream_with_it(
    checkpoint: Callable[[str], Path],
    oracle: Callable[[str], Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = tmp_path / "gpu"
    script.mkdir()
    os.mkfifo(script / "xids")
    (script / "values.json").write_text(json.dumps(HEALTHY))
    for name, value in ((PRELOADED, "tests.fakes.gpu_worker"), ("GPU_WORKER", "decode-0"), ("GPU_SCRIPT", str(script))):
        monkeypatch.setenv(name, value)
    fields = {"temperature": 0.0, "max_tokens": 600, "ignore_eos": True}
    with RunningSystem.up(tmp_path, checkpoint("llama"), "--prefill", "1", "--decode", "2") as system:
        async with system.client() as client:
            gpu = 'tandem_gpu_temperature_celsius{gpu="0",worker="decode-0"}'
            async with asyncio.timeout(scaled(10.0)):
                while gpu not in await metrics(client):  # noqa: ASYNC110 - a report comes once a second
                    await asyncio.sleep(0.05)
            begun = [asyncio.get_running_loop().create_future() for _ in range(4)]
            streams = [
                asyncio.create_task(client.stream(prompt_of(20 + at, at), begun=each, **fields))
                for at, each in enumerate(begun)
            ]
            decoders = [(await each)["x-tandem-decode"] for each in begun]
            assert "decode-0" in decoders, decoders
            (script / "values.json").write_text(json.dumps(NEEDS_RESET))
            pipe = os.open(script / "xids", os.O_WRONLY | os.O_NONBLOCK)  # an error if no worker listens
            os.write(pipe, b"13\n95\n")
            os.close(pipe)
            answers = await asyncio.gather(*streams)
            for answer in answers:
                assert len(answer.ids) == 600
                check(oracle("llama"), answer, fields)
            await until(lambda: system.process.text.count(REFUSED) >= 2, lambda: system.process.text)
            text = system.process.text
            assert re.search(rf"worker decode-0 leaves: {re.escape(FAULT)}", text)
            assert re.search(rf"decode-0 exited \([^\n]*{re.escape(FAULT)}[^\n]*\); restarting it in 0.5 s", text)
            waits = re.findall(rf"decode-0 exited \([^\n]*{re.escape(REFUSED)}[^\n]*\); restarting it in (\S+) s", text)
            assert waits[0] == "1", text
            shown = await asyncio.to_thread(tandem, "status", "--url", system.url)
            assert shown.returncode == 1 and REFUSED in shown.stdout
            assert re.search(r"decode-0 is absent for \d+ s: .*(restarted in \d+ s|being restarted)", shown.stdout)
            assert gpu not in await metrics(client)
            (script / "values.json").write_text(json.dumps(HEALTHY))
            began = time.monotonic()
            async with asyncio.timeout(scaled(30.0)):
                while "decode-0" not in await client.workers():  # noqa: ASYNC110 - the launcher waits, then it loads
                    await asyncio.sleep(0.1)
            assert time.monotonic() - began < scaled(20.0)
            shown = await asyncio.to_thread(tandem, "status", "--url", system.url)
            assert shown.returncode == 0 and "decode-0" in shown.stdout and "absent" not in shown.stdout
