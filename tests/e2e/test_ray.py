"""``tandem up --ray`` on a Ray cluster of several nodes, all on this machine: nodes are killed and added under load,
added by Ray's autoscaler, and chosen by labels and resources."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import aiohttp
import psutil

from tests.e2e.ray_cluster import MARKS, cluster, gone, until, up
from tests.leaked_keys import keygen, new_key, register_cluster_keys

pytestmark = MARKS


async def request(session: aiohttp.ClientSession, url: str, prompt: str) -> int:
    """Stream one answer of 60 tokens; return the number of its tokens. Raises if it fails or ends early."""
    body = {"model": "tandem-builtin", "prompt": prompt, "max_tokens": 60, "ignore_eos": True, "stream": True,
            "temperature": 0, "stream_options": {"include_usage": True}}  # fmt: skip
    tokens, ended = 0, False
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            ended |= line.startswith(b"data: [DONE]")
    assert ended
    return tokens


def load(url: str, while_running: Callable[[], object]) -> int:
    """As :func:`_load`, in an event loop of its own."""
    return asyncio.run(_load(url, while_running))


async def _load(url: str, while_running: Callable[[], object]) -> int:
    """Send requests from six clients until ``while_running``, run in a thread, has returned; return their number."""
    working = asyncio.create_task(asyncio.to_thread(while_running))
    async with aiohttp.ClientSession() as session:

        async def client(name: int) -> int:
            sent = 0
            while not working.done():
                assert await request(session, url, f"Story {sent} of {name}:") == 60
                sent += 1
            return sent

        counts = await asyncio.gather(*map(client, range(6)))
    await working
    return sum(counts)


def test_a_killed_node_fails_no_request_and_an_added_one_is_used(tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    with cluster(tmp_path, 1) as nodes:
        for _ in range(2):  # each with room for a pair of workers
            nodes.do("add", num_cpus=2)
        with up(nodes.address, log, "--prefill", "2", "--decode", "2") as system:
            before = system.pids()
            assert sorted(before) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]

            def kill_one() -> None:
                nodes.do("kill", 1)
                until(lambda: system.said(r"up: \S+ (?:exited|hangs) \("), "the loss of the node is noticed")

            assert load(system.url, kill_one) > 20
            left = {name: pid for name, pid in before.items() if psutil.pid_exists(pid)}
            assert sorted(name.partition("-")[0] for name in left) == ["decode", "prefill"], "pairs were on one node"
            assert len({name.partition("-")[2] for name in left}) == 1

            def said_back() -> list[str]:
                return re.findall(r"(\S+) is back", system.text())

            def add_one() -> None:
                nodes.do("add", num_cpus=2)
                until(lambda: len(said_back()) == 2, "the lost workers are back, on the new node")

            assert load(system.url, add_one) > 0
            assert sorted(said_back()) == sorted(before.keys() - left.keys())

            def scale_up() -> None:
                nodes.do("add", num_cpus=2)
                assert system.server.post("/admin/scale", {"prefill": 3, "decode": 3}) == {"prefill": 3, "decode": 3}

            assert load(system.url, scale_up) > 0
            after = system.pids()
            assert len(after) == 6
            system.interrupt()
            until(gone(after.values()), "all workers have ended")
            assert nodes.do("actors") == nodes.do("groups") == 0


def test_the_autoscaler_adds_nodes_for_the_start_and_for_more_workers(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, 2) as nodes:  # the head has room for the coordinator only
        assert nodes.do("nodes") == 1
        with up(nodes.address, tmp_path / "up.log") as system:
            assert nodes.do("nodes") > 1  # under load Ray may start the next one before it is asked for
            assert system.server.post("/admin/scale", {"prefill": 2, "decode": 2}) == {"prefill": 2, "decode": 2}
            assert nodes.do("nodes") == 3
            workers = system.pids().values()
            assert len(workers) == 4 and len({raylet_of(pid) for pid in workers}) == 2 and system.answers()
            system.interrupt()
        started = [each.pid for each in psutil.Process(nodes.process.pid).children(recursive=True)]
    until(gone(started), "the processes of added nodes have ended")


# -- where workers run, what Ray keeps of them ------------------------------------------------------------------------


def raylet_of(pid: int) -> int:
    """Return the process id of the node on which the actor of a worker is."""
    actor = psutil.Process(pid).parent()
    raylet = actor.parent() if actor is not None else None
    assert raylet is not None and raylet.name() == "raylet"
    return raylet.pid


def memory(pid: int) -> bytes:
    """Return the readable memory of a process, shared memory included."""
    found = []
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            extent, access, *_ = line.split()
            start, end = (int(each, 16) for each in extent.split("-"))
            if access.startswith("r") and end - start < 1 << 28:
                try:
                    memory.seek(start)
                    found.append(memory.read(end - start))
                except (OSError, OverflowError):  # pages of the kernel, of devices, or beyond the end of a file
                    continue
    return b"".join(found)


def test_labels_and_resources_choose_nodes_and_ray_has_logs_but_no_keys(tmp_path: Path) -> None:
    keys, admin_key = keygen(tmp_path / "keys.json"), new_key()
    secrets = [admin_key, *register_cluster_keys(keys)]
    labels = ("--ray-labels", "decode:zone=b", "--ray-resources", "prefill:disk=1")
    with cluster(tmp_path, 1) as nodes:
        disk = nodes.do("add", num_cpus=2, resources={"disk": 1}, labels={"zone": "a"})
        zone = nodes.do("add", num_cpus=2, labels={"zone": "b"})
        admin = {"TANDEM_ADMIN_API_KEY": admin_key}
        with up(nodes.address, tmp_path / "up.log", *labels, "--cluster-key-file", keys, environment=admin) as system:
            pids = system.pids(admin_key)
            assert {name: raylet_of(pid) for name, pid in pids.items()} == {"prefill-0": disk, "decode-0": zone}
            kept = nodes.do("kept")
            assert "ProcessActor" in kept and not [secret for secret in secrets if secret in kept]
            of_ray = [each for each in psutil.Process(nodes.process.pid).children(recursive=True)
                      if each.name() in ("raylet", "gcs_server")]  # fmt: skip
            assert len(of_ray) == 4
            for each in of_ray:
                seen = memory(each.pid)
                assert b"placement_group" in seen, "its memory was read"
                assert not [secret for secret in secrets if secret.encode() in seen], each.name()
            actor = psutil.Process(pids["decode-0"]).parent()
            assert actor is not None and any(secret.encode() in memory(actor.pid) for secret in secrets)
            system.interrupt()
        logs = {path.name: path.read_bytes() for path in nodes.logs.parent.rglob("*") if path.is_file()}
        assert not [(name, secret) for name, text in logs.items() for secret in secrets if secret.encode() in text]
        for name in ("coordinator", "prefill-0", "decode-0"):
            mark = f":actor_name:tandem {name}\n".encode()
            (lines,) = (text for file, text in logs.items() if file.endswith(".out") and mark in text)
            assert f"\n{name} is ready\n".encode() in lines and f" {name}: draining".encode() in lines
