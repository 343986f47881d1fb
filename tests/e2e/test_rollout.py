"""Rolling updates of the Kubernetes manifests under load, by a stand-in that obeys them: no request fails."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.orchestration.cluster import Cluster, changed
from tests.orchestration.kustomize import Manifest, build
from tests.orchestration.pods import KUBERNETES, new_secrets
from tests.pace import scaled

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SMALL = {"dtype": "float32", "threads": 1, "num-kv-blocks": 1000, "max-model-len": 2048}
CLIENTS = 4
LONG_TOKENS = 1200
"""Length of the streams that begin before an update and end after its first steps."""


class Load:
    """Clients that stream answers one after the other over connections that they keep, and never retry."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._answers: dict[tuple[str, int], list[int]] = {}
        self.failures: list[str] = []
        self.finished = Counter[str]()
        """Number of answers by the worker that decoded them."""
        self.first_token_s: list[float] = []
        self._stop = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send requests within the block, until the last one is answered."""
        tasks = [asyncio.create_task(self._client(number)) for number in range(CLIENTS)]
        try:
            yield
        finally:
            self._stop.set()
            await asyncio.gather(*tasks)

    async def _client(self, number: int) -> None:
        chance = random.Random(number)
        while not self._stop.is_set():
            await self.ask(
                f"{chance.randrange(6)} " + "word " * chance.choice((3, 60, 300)), chance.choice((8, 40, 120))
            )

    async def ask(self, prompt: str, tokens: int) -> None:
        """Stream one answer and note why it failed, if it did. In float32 the same prompt has the same answer, whoever
        computes it, and however often it moves."""
        began = time.monotonic()
        try:
            got, worker = await self._stream(prompt, tokens)
        except (aiohttp.ClientError, AssertionError, OSError, TimeoutError) as error:
            self.failures.append(f"after {time.monotonic() - began:.1f} s: {type(error).__name__}: {error}")
            return
        self.finished[worker] += 1
        if got != self._answers.setdefault((prompt, tokens), got):
            self.failures.append(f"another answer to {prompt[:20]!r} ({tokens} tokens)")

    async def _stream(self, prompt: str, tokens: int) -> tuple[list[int], str]:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        began, got, ended = time.monotonic(), list[int](), False
        async with self._session.post("/v1/completions", json=body) as response:
            assert response.status == 200, f"{response.status}: {await response.text()}"
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    ended = True
                    continue
                event = json.loads(data)
                assert "error" not in event, event
                if not got:
                    self.first_token_s.append(time.monotonic() - began)
                for choice in event["choices"]:
                    got += choice.get("token_ids") or []
            assert ended and len(got) == tokens, f"{len(got)} of {tokens} tokens, the end: {ended}"
            return got, response.headers["x-tandem-decode"]


@contextlib.asynccontextmanager
async def load(cluster: Cluster, secrets: list[Manifest]) -> AsyncIterator[Load]:
    """Put load on a cluster's Service within the block."""
    (keys,) = (each["data"]["keys.txt"] for each in secrets if each["metadata"]["name"] == "tandem-api-keys")
    key = base64.b64decode(keys).decode().split()[0]
    async with aiohttp.ClientSession(
        f"http://{cluster.service('tandem').address}",
        headers={"Authorization": f"Bearer {key}"},
        timeout=aiohttp.ClientTimeout(total=180),
        connector=aiohttp.TCPConnector(limit=0),
    ) as session:
        found = Load(session)
        async with found.running():
            yield found


async def update(cluster: Cluster, served: Load, *deployments: str) -> None:
    """Restart Deployments beside each other while two long streams run."""
    before = served.finished.total()
    long = [asyncio.create_task(served.ask(f"long {number}", LONG_TOKENS)) for number in range(2)]
    await asyncio.sleep(0.5)
    for name in deployments:
        cluster.restart(name)
    await cluster.settled()
    await asyncio.gather(*long)
    assert served.finished.total() > before


@pytest.mark.timeout(300)
async def test_a_new_coordinator_takes_over_and_no_request_fails(tmp_path: Path) -> None:
    manifests, secrets = build(KUBERNETES / "overlays" / "cpu"), new_secrets()
    manifests = changed(manifests, {"tandem-prefill": 1, "tandem-decode": 1}, SMALL, handover_time="3")
    async with Cluster(manifests, secrets, tmp_path, hurry=5).running() as cluster:
        async with load(cluster, secrets) as served:
            await update(cluster, served, "tandem-coordinator")
        assert not served.failures, served.failures
        assert not cluster.violations and cluster.service("tandem").refused == 0
        assert max(served.first_token_s) < scaled(20)
        next_one = cluster.of("tandem-coordinator")[0]
        said = next_one.log.read_text()
        assert "bad messages" not in said, "what is left of the old sessions is no misbehaviour"


@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
async def test_all_roles_are_updated_under_load_and_no_request_fails(overlay: str, tmp_path: Path) -> None:
    """One role after the other, then all at once, then a coordinator and a worker of each role are evicted. The
    Deployments of the GPU overlay, which add no pod during an update, compute on CPUs here."""
    manifests, secrets = build(KUBERNETES / "overlays" / overlay), new_secrets()
    manifests = changed(manifests, {}, SMALL, device="cpu")
    for each in manifests:
        if each["kind"] == "ConfigMap":
            each["data"]["tandem.yaml"] = "\n".join(
                line for line in each["data"]["tandem.yaml"].splitlines() if not line.startswith("model:")
            )
    names = ("tandem-decode", "tandem-prefill", "tandem-coordinator")
    async with Cluster(manifests, secrets, tmp_path, hurry=5).running() as cluster:
        async with load(cluster, secrets) as served:
            for restarted in (*((name,) for name in names), names):
                await update(cluster, served, *restarted)
            for name in names:
                cluster.evict(name)
                await asyncio.sleep(1.0)
                await cluster.settled()
        assert not served.failures, served.failures
        assert not cluster.violations and cluster.service("tandem").refused == 0
        assert len(served.finished) >= 4, "workers that were replaced and their successors have served"
        generations = itertools.groupby(sorted(pod.template.name for pod in cluster.pods))
        assert {name: len(list(pods)) for name, pods in generations} == {
            "Deployment tandem-coordinator (coordinator)": 4,
            "Deployment tandem-decode (decode)": 7,
            "Deployment tandem-prefill (prefill)": 7,
        }


@pytest.mark.whole
@pytest.mark.timeout(600)
async def test_a_decode_worker_that_dies_while_the_coordinator_leaves_ends_no_stream(tmp_path: Path) -> None:
    """The coordinator that leaves places its streams on another worker again, over the session that stayed."""
    manifests, secrets = build(KUBERNETES / "overlays" / "cpu"), new_secrets()
    manifests = changed(manifests, {"tandem-prefill": 1}, SMALL, handover_time="10")
    async with Cluster(manifests, secrets, tmp_path, hurry=5).running() as cluster:
        (before,) = cluster.of("tandem-coordinator")
        async with load(cluster, secrets) as served:
            long = [asyncio.create_task(served.ask(f"long {number}", LONG_TOKENS)) for number in range(4)]
            cluster.restart("tandem-coordinator")
            async with asyncio.timeout(scaled(60)):
                while not before.terminating:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                (after,) = cluster.of("tandem-coordinator")
                while "joins: decode" not in after.log.read_text():  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            victim = cluster.of("tandem-decode")[0]
            assert victim.process is not None
            victim.process.kill()
            await cluster.settled()
            await asyncio.gather(*long)
        assert not served.failures, served.failures
        assert cluster.violations == [f"{victim.name} ended with -9"]
