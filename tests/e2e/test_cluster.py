"""Parts started one by one, with a key file, on an address that other machines can reach too."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from common import builtin
from common.net.hosts import is_loopback
from tests.e2e.system import READY_S, SMALL, RunningSystem, TandemProcess, sampling_of
from tests.e2e.test_tokens import travelled
from tests.leaked_keys import keygen
from tests.reference import Reference

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_CONTROL = re.compile(r"workers at tcp://(\S+)")
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
SEEDED = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "seed": 7, "max_tokens": 24, "ignore_eos": True}


def own_address() -> str:
    """Return an address of this machine that is not loopback; skip the test if there is none."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not is_loopback(each.address):
                return each.address
    pytest.skip("this machine has no address but loopback")


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(builtin.path())


@contextlib.contextmanager
def worker(directory: Path, role: str, system: RunningSystem, *flags: str) -> Iterator[TandemProcess]:
    found = _CONTROL.search(system.process.text)
    assert found is not None, system.process.text
    process = TandemProcess.start(
        directory / f"{role}.log", role, "--coordinator", found[1], "--name", role, *SMALL, *flags
    )
    try:
        yield process
    except BaseException:
        process.kill()
        raise
    process.stop()


async def until_serving(system: RunningSystem, *workers: TandemProcess) -> None:
    async with system.client() as client:
        deadline = time.monotonic() + READY_S
        while [each["state"] for each in (await client.workers()).values()] != ["ready"] * len(workers):
            for process in workers:
                process.check_alive()
            assert time.monotonic() < deadline, [process.text for process in workers]
            await asyncio.sleep(0.1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("encryption", ["curve", "none"])
async def test_keyed_parts_hand_over_across_an_open_address(
    encryption: str, tmp_path: Path, reference: Reference
) -> None:
    host, keys = own_address(), keygen(tmp_path / "cluster.key")
    keyed = "--cluster-key-file", str(keys)
    name = "--served-model-name", "model"
    words = "coordinator", "--port", "0", "--control-host", host, "--control-port", "0", "--local-prefill", "never"
    flags = "--host", host, "--kv-transport", "zmq", "--kv-encryption", encryption, *name, *keyed
    with (
        RunningSystem.running(tmp_path / "coordinator.log", *words, *name, *keyed, until_ready=False) as system,
        worker(tmp_path, "prefill", system, *flags) as prefill,
        worker(tmp_path, "decode", system, *flags) as decode,
    ):
        await until_serving(system, prefill, decode)
        async with system.client() as client:
            for fields in (GREEDY, SEEDED):
                answer = await client.complete([100 + 3 * index for index in range(150)], **fields)
                assert answer.path == "disagg"
                reference.check(answer.prompt, answer.ids, sampling_of(fields))
            assert set(await travelled(client)) == {"zmq"}
            await client.until_idle(10)


@pytest.mark.timeout(300)
async def test_ends_that_disagree_about_encryption_are_refused_in_words(tmp_path: Path) -> None:
    host, keys = own_address(), keygen(tmp_path / "cluster.key")
    keyed = "--cluster-key-file", str(keys)
    words = "coordinator", "--port", "0", "--control-host", host, "--control-port", "0"
    with (
        RunningSystem.running(tmp_path / "coordinator.log", *words, *keyed, until_ready=False) as system,
        worker(tmp_path, "prefill", system, "--host", host, *keyed) as prefill,
    ):
        async with system.client() as client:
            deadline = time.monotonic() + READY_S
            while "prefill" not in await client.workers():
                prefill.check_alive()
                assert time.monotonic() < deadline, prefill.text
                await asyncio.sleep(0.1)
        with (
            pytest.raises(AssertionError, match="exit code 1") as caught,
            worker(tmp_path, "decode", system, "--host", host, *keyed, "--kv-encryption", "none") as other,
        ):
            await asyncio.to_thread(other.popen.wait, READY_S)
        assert "--kv-encryption none, but curve of prefill" in str(caught.value)
        assert "Traceback" not in str(caught.value)
