"""A coordinator that leaves: it sends its workers to the next one and serves what is left."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import zmq

from common.core.ids import WorkerName
from common.net.messages import Cached, Leaving, Moved, ToWorker
from common.net.sockets import connect_dealer, identity, receive, send
from coordinator.app import hand_over
from tests.pace import scaled
from tests.unit.coordinator.fake_cluster import CHAT, HELLO, FakeCluster, open_cluster, until


async def leaves(cluster: FakeCluster) -> tuple[asyncio.Task[float], asyncio.Event]:
    """Begin the hand-over; return its task, and the event that ends it early."""
    second = asyncio.Event()
    task = asyncio.create_task(hand_over(cluster.services, second))
    await asyncio.sleep(0)
    return task, second


async def test_it_serves_until_the_time_is_over_and_closes_connections(model: Path) -> None:
    async with open_cluster(model, "prefill", "decode", handover_time=60.0) as cluster:
        assert (await cluster.get("/ready"))[0].status == 200
        response, _ = await cluster.post(CHAT, HELLO)
        assert "Connection" not in response.headers
        task, second = await leaves(cluster)
        for worker in cluster.workers:
            await until(lambda: worker.got(Leaving), "it is told")  # noqa: B023
        assert (await cluster.get("/ready"))[0].status == 503
        assert (await cluster.get("/health"))[0].status == 200
        response, _ = await cluster.post(CHAT, HELLO)
        assert response.status == 200 and response.headers["Connection"] == "close"
        stream, events = await cluster.stream(CHAT, HELLO)
        assert stream.headers["Connection"] == "close" and events
        second.set()
        await task


async def test_without_a_time_for_it_nothing_is_handed_over(model: Path) -> None:
    async with open_cluster(model, "colocated") as cluster:
        task, _ = await leaves(cluster)
        assert await task == cluster.services.config.drain_timeout
        assert not cluster.workers[0].got(Leaving) and (await cluster.get("/ready"))[0].status == 200


async def test_it_ends_when_the_workers_have_joined_another(model: Path) -> None:
    async with open_cluster(model, "prefill", "decode", handover_time=0.2, drain_timeout=600.0) as cluster:
        began = time.monotonic()
        task, _ = await leaves(cluster)
        cluster.workers[0].say(Moved(cluster.workers[0].hello.incarnation))
        await asyncio.sleep(0.5)
        assert not task.done() and (await cluster.post(CHAT, HELLO))[0].status == 200
        cluster.workers[1].say(Moved(cluster.workers[1].hello.incarnation))
        rest_s = await task
        assert 599.0 - (time.monotonic() - began) < rest_s < 600.0


async def test_it_does_not_wait_for_ever_for_the_next_one(model: Path) -> None:
    async with open_cluster(model, "colocated", handover_time=0.1, drain_timeout=0.4) as cluster:
        began = time.monotonic()
        task, _ = await leaves(cluster)
        rest_s = await task
        assert 0.3 <= time.monotonic() - began < scaled(2.0) and 0.0 < 0.2 + rest_s < 0.5


async def test_a_worker_that_dials_it_again_is_sent_on_and_stays_joined(model: Path) -> None:
    """The address may lead here for a while. What the new connection sends counts as no misbehaviour."""
    async with open_cluster(model, "colocated", handover_time=60.0) as cluster:
        task, second = await leaves(cluster)
        hello, address = cluster.workers[0].hello, cluster.dispatcher.gateway.address
        with zmq.Context() as context:
            name = identity(hello.name, hello.incarnation, "another secret")
            stranger = identity(WorkerName("new"), hello.incarnation, "third secret")
            for each in name, stranger:
                with connect_dealer(context, address, each) as dealer:
                    sent = hello if each is name else msgspec.structs.replace(hello, name=WorkerName("new"))
                    send(dealer, sent)
                    for _ in range(5):
                        send(dealer, Cached(b"", b""))
                    answers: list[object] = []

                    def answered(dealer: zmq.Socket[bytes] = dealer, answers: list[object] = answers) -> bool:
                        while (answer := receive(dealer, ToWorker)) is not None:
                            answers.append(answer)
                        return bool(answers)

                    await until(answered, "it is answered")
                    assert answers == [Leaving()]
        assert cluster.dispatcher.gateway.bad_messages == 0 and len(cluster.dispatcher.registry) == 1
        assert (await cluster.post(CHAT, HELLO))[0].status == 200
        second.set()
        await task
