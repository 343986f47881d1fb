"""Recovery of requests whose worker dies, falls silent, leaves or sends invalid messages."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from common.core.ids import Incarnation, RequestId, unpack_transfers
from common.core.request import Request
from common.core.timeouts import FailureTimes
from common.net.messages import (
    Abort,
    Generate,
    Goodbye,
    Lease,
    LeaseAck,
    Prefill,
    Rejoin,
    RequestFailed,
    Resend,
    Reserve,
    Role,
    Timing,
    Tokens,
    Welcome,
)
from common.net.wire import MAX_REPORT_BYTES, seal
from coordinator.cluster.registry import WorkerHandle
from coordinator.requests import wait_limits
from coordinator.requests.record import RequestRecord
from coordinator.requests.state import MAX_BREAKS, MAX_MIGRATIONS, MAX_RETRIES, State
from coordinator.routing.breakers import FAILURES
from coordinator.routing.router import Router
from tests.fakes.checkpoint import EOS
from tests.fakes.worker import FakeWorker, formula
from tests.pace import scaled
from tests.unit.coordinator.fake_cluster import CHAT, HELLO, TEXT, FakeCluster, letters, open_cluster, until


async def stream_over(cluster: FakeCluster, loss: Any, path: str = "disagg") -> None:
    """Run a stream during which ``loss(cluster)`` happens, and check that no token is missing or repeated."""
    async with cluster.client.post(
        f"{cluster.url}{CHAT}", json={**HELLO, "max_tokens": 40, "stream": True, "return_token_ids": True}
    ) as response:
        lines: list[str] = []
        async for line in response.content:
            if line.startswith(b"data: {"):
                lines.append(line.decode().removeprefix("data: "))
            if len(lines) == 10:
                await loss(cluster)
    events = [json.loads(line) for line in lines]
    assert "error" not in events[-1], events[-1]
    ids = [event["choices"][0]["token_ids"][0] for event in events[:-1]]
    request = next(w for w in cluster.workers if w.got(Prefill) or w.got(Generate)).received
    sent = next(message for message in request if isinstance(message, Prefill | Generate)).request
    assert ids == [formula(sent, 0, position) for position in range(40)]


async def test_a_dead_decode_worker_is_replaced_in_mid_stream(model: Path) -> None:
    async with open_cluster(model, "prefill") as cluster:
        first = await cluster.add("decode", step_s=0.01)
        await cluster.add("decode", step_s=0.01)

        async def kill(_: FakeCluster) -> None:
            first.stop()

        await stream_over(cluster, kill)
        migrated = [sent for sent in cluster.workers[0].got(Prefill) if sent.attempt == 1]
        assert migrated and len(migrated[0].request.emitted_tokens(0)) >= 10


def as_shown(events: list[Any]) -> list[tuple[str, list[Any], str]]:
    """Return text, log-probabilities and finish reason of each choice of a streamed chat, independent of its chunks."""
    shown = []
    for index in range(1 + max(event["choices"][0]["index"] for event in events)):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        text = "".join(choice["delta"].get("content") or "" for choice in mine)
        entries = [entry for choice in mine if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        shown.append((text, entries, mine[-1]["finish_reason"]))
    return shown


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("before", ["S", "STO"])
async def test_a_stop_string_of_which_two_decode_workers_have_a_part_each(
    model: Path, before: str, n: int, *, stream: bool
) -> None:
    """With two choices, the second has met its stop string before the first worker dies."""
    talks = [letters("some text STOP and more of it"), letters("bySTOP and more of it")]
    said = len("some text " + before)
    asked = {**HELLO, "stop": ["xyz", "STOP"], "logprobs": True, "top_logprobs": 1, "n": n}

    def talk(request: Request, choice: int, position: int) -> int:
        return int(talks[choice](request, choice, position))

    async with open_cluster(model) as cluster:
        await cluster.add("prefill", script=talk)
        first = await cluster.add("decode", script=talk)

        def talk_no_further(request: Request, choice: int, position: int) -> int:
            if position == said - 1:
                first.step_s = 30.0  # before the next token
            return talk(request, choice, position)

        async def ask() -> Any:
            if stream:
                return as_shown((await cluster.stream(CHAT, asked))[1])
            _, body = await cluster.post(CHAT, asked)
            return body["choices"], body["usage"]["completion_tokens"]

        undisturbed = await ask()
        first.script = talk_no_further
        disturbed = asyncio.create_task(ask())
        await until(lambda: cluster.dispatcher.records, "it runs")
        [record] = cluster.dispatcher.records.values()
        await until(lambda: len(record.progress.output[0]) == said, "its first part is here")
        await cluster.add("decode", script=talk)
        first.stop()
        assert await disturbed == undisturbed
        assert cluster.services.metrics.registry.get_sample_value("tandem_migrations_total") == 1
    if stream:
        shown = [(text, finish) for text, _, finish in undisturbed]
    else:
        shown = [(choice["message"]["content"], choice["finish_reason"]) for choice in undisturbed[0]]
    assert shown == [("some text ", "stop"), ("by", "stop")][:n]


async def test_a_silent_decode_worker_is_replaced_in_mid_stream(model: Path) -> None:
    async with open_cluster(model, "prefill", failure_timeout=0.5) as cluster:
        first = await cluster.add("decode", step_s=0.01)
        await cluster.add("decode", step_s=0.01)

        async def hang(_: FakeCluster) -> None:
            first.fall_silent()

        await stream_over(cluster, hang)


@pytest.mark.parametrize("cut_off", ["it hears nothing", "it is not heard"])
@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
async def test_worker_with_dead_control_connection_is_replaced_despite_heartbeats(
    model: Path, role: Role, cut_off: str
) -> None:
    """Also before the first token: no message would ever fail the request, and the heartbeats continue."""
    others: dict[Role, tuple[Role, ...]] = {"prefill": ("decode",), "decode": ("prefill",), "colocated": ()}
    async with open_cluster(model, *others[role], failure_timeout=0.5) as cluster:
        dead = await cluster.add(role, name="dead", rejoins=False)
        await cluster.add(role, name="alive")
        if cut_off == "it hears nothing":
            dead.deaf = True
        else:
            dead.drop |= {Tokens, Timing, LeaseAck}
        asked = [cluster.post(CHAT, {**HELLO, "max_tokens": 4}) for _ in range(6)]
        async with asyncio.timeout(scaled(5)):
            answers = await asyncio.gather(*asked)
        assert [response.status for response, _ in answers] == [200] * 6
        known = cluster.dispatcher.registry
        await until(lambda: [worker.hello.name for worker in known.ready(role)] == ["alive"], "it is gone")


async def test_a_shorter_failure_timeout_notices_silence_sooner_than_the_usual_one_could(model: Path) -> None:
    async with open_cluster(model, failure_timeout=0.5) as cluster:
        worker = await cluster.add("colocated")
        (welcome,) = worker.got(Welcome)
        assert (welcome.heartbeat_ms, welcome.lease_ms, welcome.patience_ms) == (125, 2000, 500)
        worker.fall_silent()
        silent_at = time.monotonic()
        await until(lambda: not len(cluster.dispatcher.registry), "it is gone")
        assert time.monotonic() - silent_at < 0.5 + scaled(FailureTimes().silence_s - 0.5)


async def test_a_worker_that_leaves_politely(model: Path) -> None:
    async with open_cluster(model, "prefill") as cluster:
        first = await cluster.add("decode", step_s=0.01)
        await cluster.add("decode", step_s=0.01)

        async def leave(_: FakeCluster) -> None:
            first.say(Goodbye(first.hello.incarnation, "drained"))

        await stream_over(cluster, leave)


async def test_the_last_words_of_a_worker_are_read_before_it_is_called_lost(model: Path) -> None:
    """The Goodbye is still unread when the worker's connection is gone and sending to it fails."""
    async with open_cluster(model, "colocated", "colocated") as cluster:
        for worker in cluster.workers:
            worker.step_s = 0.02
        asked = asyncio.create_task(cluster.post(TEXT, {"prompt": "wait", "max_tokens": 50, "ignore_eos": True}))
        await until(lambda: any(worker.busy for worker in cluster.workers), "a worker has it")
        leaving = next(worker for worker in cluster.workers if worker.busy)
        record = next(iter(cluster.dispatcher.records.values()))
        registered = cluster.services.registry.get(leaving.hello.incarnation)
        assert registered is not None
        leaving.say(Goodbye(leaving.hello.incarnation, "drained"))
        time.sleep(0.3)  # noqa: ASYNC251 - the event loop is to be away while both happen
        leaving.stop()
        time.sleep(0.2)  # noqa: ASYNC251
        assert not cluster.dispatcher.gateway.send(registered, Abort(record.id, 99))
        response, body = await asked
        assert response.status == 200 and body["usage"]["completion_tokens"] == 50
        assert (
            record.progress.attempt == 1
            and not record.progress.crashes
            and record.progress.migrations == record.progress.retries == 0
        )


async def test_streams_move_from_workers_that_leave_more_often_than_they_could_after_losses(model: Path) -> None:
    """A planned move uses none of the retry budget, and the stream equals an undisturbed one."""
    body = {"prompt": "moved about", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    async with open_cluster(model, "decode", "decode") as cluster:
        for worker in cluster.workers:
            worker.step_s = 0.0
        _, quiet = await cluster.stream(TEXT, body)
        for worker in cluster.workers:
            worker.step_s = 0.02
        asked = asyncio.create_task(cluster.stream(TEXT, body))
        for _ in range(MAX_MIGRATIONS + 2):
            await until(
                lambda: cluster.dispatcher.records and any(worker.busy for worker in cluster.workers), "a worker has it"
            )
            leaving = next(worker for worker in cluster.workers if worker.busy)
            record = next(iter(cluster.dispatcher.records.values()))
            attempt = record.progress.attempt
            leaving.say(Goodbye(leaving.hello.incarnation, "drained"))
            await until(lambda before=attempt, record=record: record.progress.attempt > before, "it moves on")
            leaving._jobs.clear()
            await until(lambda: len(cluster.services.registry.ready("decode")) == 2, "the one that left is back")
        for worker in cluster.workers:
            worker.step_s = 0.0
        _, events = await asked
        assert record.progress.migrations == 0
        texts = ["".join(event["choices"][0]["text"] for event in each if event["choices"]) for each in (quiet, events)]
        assert texts[0] == texts[1] and texts[0]


async def test_a_dead_prefill_worker_costs_a_retry_only(model: Path) -> None:
    async with open_cluster(model, "decode") as cluster:
        cluster.workers[0].delay_s = 30
        slow = await cluster.add("prefill", delay_s=30)
        asked = asyncio.create_task(cluster.post(CHAT, {**HELLO, "max_tokens": 3}))
        await until(lambda: slow.busy, "it prefills")
        await cluster.add("prefill")
        cluster.workers[0].delay_s = 0
        slow.stop()
        response, body = await asked
        assert response.status == 200 and body["usage"]["completion_tokens"] == 3
        assert response.headers["x-tandem-prefill"] == "prefill-2"


async def test_a_tick_that_fails_is_not_the_last(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(now_s: float) -> None:
        calls.append(now_s)
        raise RuntimeError("this time only, let us say")

    monkeypatch.setattr(cluster.dispatcher.gateway, "sweep", fail)
    await until(lambda: len(calls) > 1, "it is called again")


async def test_unread_messages_do_not_count_as_stalls(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages wait behind one of too many parts. The time until it is dropped counts as the coordinator's lag."""
    sweeps, looks = list[float](), list[Any]()
    gateway, sweep = cluster.dispatcher.gateway, cluster.dispatcher.gateway.sweep
    monkeypatch.setattr(cluster.dispatcher._silence, "look_for_stalls", lambda worker, now: looks.append(worker))
    with monkeypatch.context() as patch:
        patch.setattr(gateway, "sweep", lambda now: sweeps.append(now) or sweep(now))
        patch.setattr(gateway._socket, "dropping", True)
        patch.setattr(gateway._socket, "recv_multipart", lambda *_, **__: [])
        await until(lambda: len(sweeps) > 10, "it looks again and again, for longer than a worker may be silent")
        assert not looks
    await until(lambda: len(looks) > 1, "and looks for stalls again")
    assert len(cluster.services.registry) == 2


@pytest.mark.parametrize("policy", ["wait", "reject"])
async def test_failed_handoff_is_retried_without_delay(model: Path, policy: str) -> None:
    async with open_cluster(model, "decode", no_prefill_policy=policy) as cluster:
        broken = RequestFailed(RequestId(bytes(16)), 0, "transfer_failed", "connection reset", retriable=True)
        prefill = await cluster.add("prefill", refuse=broken)
        asked = asyncio.create_task(cluster.post(CHAT, {**HELLO, "max_tokens": 2}))
        await until(lambda: prefill.got(Prefill), "it tries")
        prefill.refuse = None
        async with asyncio.timeout(scaled(5)):
            assert (await asked)[0].status == 200
            assert (await cluster.post(CHAT, {**HELLO, "max_tokens": 2}))[0].status == 200


async def test_stopped_coordinator_does_not_count_own_absence_as_silence(model: Path) -> None:
    async with open_cluster(model, "prefill") as cluster:
        await cluster.add("decode", step_s=0.05)
        asked = asyncio.create_task(cluster.post(CHAT, {**HELLO, "max_tokens": 20, "ignore_eos": True}))
        await until(
            lambda: any(t.progress.state is State.DECODING for t in cluster.dispatcher.records.values()), "it runs"
        )
        [record] = cluster.dispatcher.records.values()
        loop_lag = cluster.services.registry.loop_lag
        await until(lambda: loop_lag._looked_at is not None, "it has looked once")
        for worker in cluster.services.registry:  # as if this process had been stopped for 5 s
            worker.heard_at -= 5.0
        record.heard_at -= 5.0
        assert loop_lag._looked_at is not None and not asked.done()
        loop_lag._looked_at -= 5.0
        cluster.dispatcher._tick()
        assert (await asked)[0].status == 200 and record.progress.attempt == 0


async def test_requests_whose_clients_left_do_not_stay_behind_one_that_waits(model: Path) -> None:
    async with open_cluster(model, "decode", no_prefill_policy="wait", max_queued_requests=1000) as cluster:
        first = asyncio.create_task(cluster.post(CHAT, HELLO))
        for _ in range(4):
            tasks = [asyncio.create_task(cluster.post(CHAT, HELLO)) for _ in range(50)]
            await until(lambda: len(cluster.dispatcher.records) == 51, "all wait")
            for task in tasks:
                task.cancel()
            await until(lambda: len(cluster.dispatcher.records) == 1, "they are forgotten")
        assert len(cluster.dispatcher._queue) < 100
        await cluster.add("prefill")
        response, _ = await first
        assert response.status == 200


async def test_how_a_stream_went_on_elsewhere_is_no_part_of_its_usage(model: Path) -> None:
    async with open_cluster(model, "prefill") as cluster:
        decode = await cluster.add("decode", step_s=0.05)
        asked = asyncio.create_task(cluster.post(CHAT, {**HELLO, "max_tokens": 20}))
        await until(
            lambda: any(t.progress.state is State.DECODING for t in cluster.dispatcher.records.values()), "it runs"
        )
        [record] = cluster.dispatcher.records.values()
        [worker] = [each for each in cluster.dispatcher.registry if each.id == decode.hello.incarnation]
        record.progress.attempt += 1
        cluster.dispatcher.timing(worker, Timing(record.id, record.progress.attempt, {"cached_tokens": 80.0}))
        record.progress.attempt -= 1
        _, body = await asked
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_two_crashes_are_enough(model: Path) -> None:
    async with open_cluster(model) as cluster:
        workers = [await cluster.add("colocated", delay_s=30, name=f"c{n}") for n in range(3)]
        asked = asyncio.create_task(cluster.post(CHAT, HELLO))
        for _ in range(2):
            await until(lambda: any(worker.busy for worker in workers), "it runs somewhere")
            victim = next(worker for worker in workers if worker.busy)
            workers.remove(victim)
            victim.stop()
        response, body = await asked
        assert response.status == 500 and body["error"]["code"] == "request_quarantined"


async def test_broken_connections_cost_no_attempt_while_their_workers_live(model: Path) -> None:
    """The first MAX_BREAKS breaks are free; a request that meets more of them uses retries."""
    async with open_cluster(model) as cluster:
        for n in range(2):
            await cluster.add("colocated", delay_s=30, name=f"c{n}")
        asked = asyncio.create_task(cluster.post(CHAT, HELLO))
        await until(lambda: cluster.dispatcher.records, "it has come")
        [record] = cluster.dispatcher.records.values()

        def runs_on() -> list[WorkerHandle]:
            known = cluster.dispatcher.registry
            return [each for each in known if each.id in record.progress.workers and each.answered >= record.asked]

        for broken in range(MAX_BREAKS + MAX_RETRIES + 1):
            await until(runs_on, "it runs somewhere")
            assert record.progress.retries == max(0, broken - MAX_BREAKS)
            cluster.dispatcher.gateway._lose(runs_on()[0])
            lost = functools.partial(lambda at: record.progress.attempt > at or record.progress.over, broken)
            await until(lost, "it has lost its worker")
        response, body = await asked
        assert response.status == 500 and body["error"]["code"] == "worker_lost"


async def test_a_new_request_waits_for_a_worker_that_may_have_lost_only_its_connection(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_limits, "WORKERLESS_WAIT_S", scaled(30.0))
    async with open_cluster(model, "prefill") as cluster:
        decode = await cluster.add("decode")
        [worker] = [each for each in cluster.dispatcher.registry if each.role == "decode"]
        cluster.dispatcher.gateway._lose(worker)
        assert (await cluster.post(CHAT, HELLO))[0].status == 200
        decode.stop()
        await until(lambda: not cluster.dispatcher.registry.ready("decode"), "it is missed")
        asked = [asyncio.create_task(cluster.post(CHAT, HELLO)) for _ in range(2)]
        await until(lambda: len(cluster.dispatcher.records) == 2, "they wait")
        async with asyncio.timeout(wait_limits.WORKERLESS_WAIT_S / 2):  # only until its death is known
            for response, body in await asyncio.gather(*asked):
                assert response.status == 503 and body["error"]["code"] == "no_decode_workers"
        response, _ = await cluster.post(CHAT, HELLO)
        assert response.status == 503


async def test_request_does_not_wait_for_missing_worker_that_hangs(model: Path) -> None:
    """A worker is waited for while its heartbeats report a turn that may still end; then the launcher replaces it."""
    async with open_cluster(model, "prefill", failure_timeout=0.5) as cluster:
        decode = await cluster.add("decode", rejoins=False)
        gateway, replaced = cluster.dispatcher.gateway, []
        gateway.supervise(lambda name, pid, why: replaced.append((name, why)), {})
        [worker] = cluster.dispatcher.registry.ready("decode")
        gateway._lose(worker)
        asked = asyncio.create_task(cluster.post(CHAT, HELLO))
        await until(lambda: cluster.dispatcher.records, "it waits")
        decode.turn_ms = 10_000
        async with asyncio.timeout(scaled(5)):
            response, body = await asked
        assert response.status == 503 and body["error"]["code"] == "no_decode_workers"
        assert (await cluster.post(CHAT, HELLO))[0].status == 503
        await until(lambda: replaced, "it is replaced")
        [(name, why)] = replaced
        assert name == decode.name and why.startswith("no Hello since its connection broke for 2")


async def test_request_for_missing_worker_is_sized_by_its_pool(model: Path) -> None:
    """A request without a length gets as many tokens as fit, as with a worker that is connected."""
    async with open_cluster(model, "prefill") as cluster:
        await cluster.add("decode", changes={"kv_blocks": 16, "max_model_len": 200})
        usages = []
        for lost in (False, True):
            for worker in list(cluster.dispatcher.registry) if lost else ():
                cluster.dispatcher.gateway._lose(worker)
            response, body = await cluster.post(CHAT, {**HELLO, "n": 2})
            assert response.status == 200, body
            usages.append(body["usage"])
        assert usages[0] == usages[1]


async def test_request_that_waited_for_missing_worker_may_wait_again(model: Path) -> None:
    async with open_cluster(model) as cluster:
        worker = await cluster.add("colocated", delay_s=30, changes={"max_num_seqs": 1})
        [known] = cluster.dispatcher.registry
        cluster.dispatcher.gateway._lose(known)
        asked = [asyncio.create_task(cluster.post(CHAT, HELLO)) for _ in range(2)]
        await until(lambda: worker.busy == 1 and len(cluster.dispatcher.records) == 2, "one runs, the other waits")
        worker.stop()
        await until(lambda: not len(cluster.dispatcher.registry), "it is missed")
        await until(lambda: not cluster.dispatcher.gateway.may_return("decode"), "it has died")
        looked_at = cluster.dispatcher._clock() + 2 * cluster.dispatcher.times.sweep_s
        await until(lambda: cluster.dispatcher._clock() > looked_at, "a request that may not wait would have ended")
        await cluster.add("colocated")
        assert [(await each)[0].status for each in asked] == [200, 200]


async def test_suspects_do_not_wait_for_ever_where_no_worker_is_left(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_limits, "WORKERLESS_WAIT_S", 0.2)
    async with open_cluster(model) as cluster:
        first = await cluster.add("colocated", delay_s=30)
        asked = [asyncio.create_task(cluster.post(CHAT, HELLO)) for _ in range(2)]
        await until(lambda: first.busy == 2, "both run")
        second = await cluster.add("colocated", delay_s=30)
        first.stop()
        await until(lambda: second.busy == 2, "both run elsewhere")
        second.stop()
        async with asyncio.timeout(scaled(10)):
            for response, body in await asyncio.gather(*asked):
                assert response.status == 503 and body["error"]["code"] == "no_decode_workers"


async def test_death_before_receipt_does_not_suspect_request(model: Path) -> None:
    """Several workers are killed at once; some connections close only after the request has moved there."""
    async with open_cluster(model) as cluster:
        dying = [await cluster.add("colocated", delay_s=30, name=f"c{n}") for n in range(4)]
        asked = asyncio.create_task(cluster.post(CHAT, {**HELLO, "max_tokens": 4}))
        await until(lambda: any(worker.busy for worker in dying), "it runs somewhere")
        for worker in dying:
            worker.fall_silent()
        [record] = cluster.dispatcher.records.values()
        while dying:
            await until(lambda: any(on_it(record, worker) for worker in dying), "the next one gets it")
            victim = next(worker for worker in dying if on_it(record, worker))
            victim.stop()
            dying.remove(victim)
        await cluster.add("colocated", name="new")
        response, _ = await asked
        assert response.status == 200
        assert len(record.progress.crashes) == 1, "that of the one that died with it"


async def test_death_before_receipt_does_not_suspect_request_after_earlier_ping(model: Path) -> None:
    """Both workers are killed. The second one had acknowledged a ping while the request waited for room there."""
    one = {"changes": {"max_num_seqs": 1}, "step_s": 0.01}
    async with open_cluster(model) as cluster:
        workers = [await cluster.add("colocated", name=f"c{n}", **one) for n in range(2)]
        asked = [asyncio.create_task(cluster.post(CHAT, {**HELLO, "max_tokens": 150})) for _ in range(2)]
        await until(lambda: all(worker.busy for worker in workers), "both run")
        bereft, leaving = cluster.dispatcher.records.values()
        dies, dies_too = sorted(workers, key=lambda worker: not on_it(bereft, worker))
        dies.stop()
        pings = cluster.dispatcher._pings
        shortages = pings.shortages
        await until(lambda: pings.shortages > shortages, "the other one has answered, and has no room")
        dies_too.answers = False  # a killed process sends nothing more
        asked[1].cancel()
        await until(lambda: leaving.id not in cluster.dispatcher.records, "a place is free")
        await until(lambda: on_it(bereft, dies_too), "it has that")
        dies_too.stop()
        await cluster.add("colocated", name="new")
        response, _ = await asked[0]
        assert response.status == 200


async def test_unanswered_ping_is_repeated(model: Path) -> None:
    """Without a new ping, all later deaths of a worker would count as deaths before it got the request. An
    acknowledgement meant for an earlier coordinator, with a higher number, does not count."""
    async with open_cluster(model) as cluster:
        workers = [await cluster.add("colocated", delay_s=30, name=f"c{n}") for n in range(3)]
        asked = asyncio.create_task(cluster.post(CHAT, HELLO))
        await until(lambda: any(worker.busy for worker in workers), "it runs somewhere")
        victim = next(worker for worker in workers if worker.busy)
        others = [worker for worker in workers if worker is not victim]
        for worker in others:
            worker.answers = False
        victim.stop()
        await until(lambda: any(worker.busy for worker in others), "it is given to another, which has not answered")
        victim = next(worker for worker in others if worker.busy)
        known = cluster.dispatcher.registry.get(victim.hello.incarnation)
        assert known is not None
        victim.say(victim.beat(99))
        heard_at = known.heard_at
        await until(lambda: known.heard_at > heard_at + 2 * victim.beat_s, "it has beaten")
        assert known.answered == 0
        victim.answers = True
        await until(lambda: known.answered == 1, "it has answered")
        victim.stop()
        response, body = await asked
        assert response.status == 500 and body["error"]["code"] == "request_quarantined"


async def test_retry_is_placed_before_newer_requests(model: Path) -> None:
    """Also while it is unknown which other workers live: a place that becomes free goes to the older request."""
    one = {"changes": {"max_num_seqs": 1}, "step_s": 0.01}
    async with open_cluster(model) as cluster:
        workers = [await cluster.add("colocated", name=f"c{n}", **one) for n in range(2)]
        long = [asyncio.create_task(cluster.post(CHAT, {**HELLO, "max_tokens": 60})) for _ in range(2)]
        await until(lambda: all(worker.busy for worker in workers), "both run")
        later = asyncio.create_task(cluster.post(CHAT, {**HELLO, "max_tokens": 60}))
        await until(lambda: len(cluster.dispatcher.records) == 3, "one waits")
        bereft, leaving, waiting = cluster.dispatcher.records.values()
        dies, lives = sorted(workers, key=lambda worker: not on_it(bereft, worker))
        lives.answers = False
        dies.stop()
        await until(lambda: bereft.queued, "it has lost its worker")
        long[1].cancel()
        await until(lambda: leaving.id not in cluster.dispatcher.records, "a place is free")
        await until(lambda: on_it(bereft, lives), "it has that")
        assert waiting.queued
        assert [response.status for response, _ in await asyncio.gather(long[0], later)] == [200, 200]


async def test_it_does_so_too_when_another_worker_dies_meanwhile(model: Path) -> None:
    """The other death concerns a suspect, which waits until its part in it is known."""
    one = {"changes": {"max_num_seqs": 1}, "step_s": 0.01}
    async with open_cluster(model) as cluster:
        workers = [await cluster.add("colocated", name=f"c{n}", **one) for n in range(3)]
        long = [asyncio.create_task(cluster.post(CHAT, {**HELLO, "max_tokens": 150})) for _ in range(3)]
        await until(lambda: all(worker.busy for worker in workers), "all run")
        bereft, leaving, suspect = cluster.dispatcher.records.values()
        later = asyncio.create_task(cluster.post(CHAT, {**HELLO, "max_tokens": 60}))
        await until(lambda: len(cluster.dispatcher.records) == 4, "one waits")
        waiting = list(cluster.dispatcher.records.values())[3]
        suspect.progress.crashes.add(Incarnation("one that died before"))
        dies, lives, dies_too = (next(each for each in workers if on_it(t, each)) for t in (bereft, leaving, suspect))
        lives.answers = False
        dies.stop()
        await until(lambda: bereft.queued, "it has lost its worker")
        dies_too.stop()
        await until(lambda: suspect.queued, "the other one, too")
        long[1].cancel()
        await until(lambda: leaving.id not in cluster.dispatcher.records, "a place is free")
        await until(lambda: on_it(bereft, lives), "it has that")
        assert waiting.queued
        later.cancel()
        for answer in long:
            answer.cancel()


def on_it(record: RequestRecord, worker: FakeWorker) -> bool:
    return worker.hello.incarnation in record.progress.workers


async def test_a_stream_that_is_held_and_never_served_moves(model: Path) -> None:
    """The decode worker lives and lists the request, but sends no token of it."""
    async with open_cluster(model, "prefill", failure_timeout=0.5) as cluster:
        stuck = await cluster.add("decode", step_s=30.0)
        await cluster.add("decode", step_s=0.001, name="other")
        answers = [await cluster.post(CHAT, {**HELLO, "max_tokens": 4}) for _ in range(2)]
        assert [response.status for response, _ in answers] == [200, 200]
        await until(lambda: not stuck.busy, "the stuck worker gets the Abort")


async def test_lost_token_messages_are_asked_for_again(model: Path) -> None:
    async with open_cluster(model, "prefill") as cluster:
        decode = await cluster.add("decode", step_s=0.02)
        asked = asyncio.create_task(cluster.stream(CHAT, {**HELLO, "max_tokens": 60, "return_token_ids": True}))
        await until(lambda: decode.busy, "it decodes")
        decode.drop.add(Tokens)
        await until(lambda: decode.dropped > 2, "some are lost")
        decode.drop.clear()
        _, events = await asked
        sent = cluster.workers[0].got(Prefill)[0].request
        ids = [event["choices"][0]["token_ids"][0] for event in events[:-1]]
        assert ids == [formula(sent, 0, position) for position in range(60)]
        assert decode.got(Resend)


async def test_lost_last_tokens_are_asked_for_when_heartbeats_omit_the_request(model: Path) -> None:
    async with open_cluster(model, "prefill") as cluster:
        decode = await cluster.add("decode", drop={Tokens})
        asked = asyncio.create_task(cluster.post(CHAT, {**HELLO, "max_tokens": 5, "n": 2}))
        await until(lambda: decode.got(Reserve) and not decode.busy, "it has finished")
        decode.drop.clear()
        response, body = await asked
        assert response.status == 200 and body["usage"]["completion_tokens"] == 10
        assert len(decode.got(Reserve)) == 1, "nothing was computed again"
        assert {message.choice for message in decode.got(Resend)} == {0, 1}


async def test_the_lost_end_of_one_choice_is_asked_for_while_another_goes_on(model: Path) -> None:
    def script(request: Request, choice: int, position: int) -> int:
        worker.drop = {Tokens} if position == 20 else set()  # both choices, and the end of one
        return EOS if (choice, position) == (0, 20) else formula(request, choice, position)

    async with open_cluster(model) as cluster:
        worker = await cluster.add("colocated", script=script, step_s=0.02)
        body = {**HELLO, "n": 2, "max_tokens": 500, "stream": True, "return_token_ids": True}
        tokens: dict[int, list[int]] = {0: [], 1: []}
        async with cluster.client.post(cluster.url + CHAT, json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {") and (choices := json.loads(line[6:])["choices"]):
                    tokens[choices[0]["index"]] += choices[0].get("token_ids") or []
                    if choices[0]["finish_reason"]:
                        break
        assert choices[0]["index"] == 0 and choices[0]["finish_reason"] == "stop", "the other would go on for seconds"
        [request] = [message.request for message in worker.got(Generate)]
        assert tokens[0] == [*(formula(request, 0, position) for position in range(20)), EOS]
        assert tokens[1] == [formula(request, 1, position) for position in range(len(tokens[1]))]
        assert (0, 20) in {(message.choice, message.start) for message in worker.got(Resend)}


async def test_request_is_retried_without_answer_to_resend(model: Path) -> None:
    async with open_cluster(model, "prefill") as cluster:
        decode = await cluster.add("decode", drop={Tokens})
        asked = asyncio.create_task(cluster.post(CHAT, {**HELLO, "max_tokens": 5}))
        await until(lambda: len(decode.got(Reserve)) > 1, "it is given again")
        decode.drop.clear()
        response, body = await asked
        assert response.status == 200 and body["usage"]["completion_tokens"] == 5


async def test_decode_alone_is_enough_when_prefills_token_is_lost(model: Path) -> None:
    async with open_cluster(model, "decode") as cluster:
        await cluster.add("prefill", drop={Tokens, Timing})
        _, body = await cluster.post(CHAT, {**HELLO, "max_tokens": 4, "return_token_ids": True})
        assert len(body["choices"][0]["token_ids"]) == 4


async def test_a_pair_that_keeps_failing_is_left_alone_until_it_works_again(model: Path) -> None:
    async def path() -> str:
        response, _ = await cluster.post(CHAT, {**HELLO, "max_tokens": 2})
        return response.headers["x-tandem-path"]

    async with open_cluster(model) as cluster:
        await cluster.add("decode", delay_s=0.2)  # long enough for prefill's failure to arrive first
        broken = RequestFailed(RequestId(bytes(16)), 0, "transfer_failed", "connection reset", retriable=True)
        prefill = await cluster.add("prefill", refuse=broken)
        assert [await path() for _ in range(FAILURES + 1)] == ["local"] * (FAILURES + 1), "decode does it all"
        assert len(prefill.got(Prefill)) == FAILURES, "the last one did not even try"
        _, body = await cluster.get("/admin/workers")
        assert {worker["id"]: worker["avoids"] for worker in body["workers"]}["prefill-1"] == ["decode-0"]
        async with cluster.client.get(f"{cluster.url}/metrics") as response:
            assert "tandem_open_breakers 1.0" in await response.text()
        prefill.refuse = None
        async with asyncio.timeout(scaled(10)):
            while await path() == "local":  # noqa: ASYNC110 - the cool-down is the coordinator's own
                await asyncio.sleep(0.05)
        _, body = await cluster.get("/admin/workers")
        assert not any(worker["avoids"] for worker in body["workers"]), "one success is enough"


async def test_leases_list_attempts_of_worker(model: Path) -> None:
    def listed(worker: FakeWorker) -> set[int]:
        return {transfer.attempt for transfer in unpack_transfers(worker.got(Lease)[-1].live)}

    async with open_cluster(model) as cluster:
        first = await cluster.add("colocated", name="a", delay_s=60.0)
        asked = asyncio.create_task(cluster.post(CHAT, {**HELLO, "max_tokens": 2}))
        await until(lambda: first.got(Lease) and listed(first) == {0}, "its lease lists the request")
        second = await cluster.add("colocated", name="b", delay_s=60.0)
        first.say(
            RequestFailed(first.got(Generate)[0].request.id, 0, "draining", "this worker is leaving", retriable=True)
        )
        await until(lambda: second.got(Lease) and listed(second) == {1}, "the other may hold the next attempt")
        await until(lambda: listed(first) == set(), "the first may not")
        asked.cancel()
        await until(lambda: listed(second) == set(), "its lease lists nothing any more")


async def test_a_worker_that_refuses(model: Path) -> None:
    async with open_cluster(model) as cluster:
        failure = RequestFailed(RequestId(bytes(16)), 0, "no_memory", "full", retriable=True)
        unwilling = await cluster.add("colocated", refuse=failure, name="a")
        asked = asyncio.create_task(cluster.post(CHAT, {**HELLO, "max_tokens": 2}))
        await until(lambda: unwilling.got(Generate), "it was asked")
        unwilling.refuse = None
        assert (await asked)[0].status == 200
        unwilling.refuse = RequestFailed(RequestId(bytes(16)), 0, "too_long", "9 tokens, 5 fit", retriable=False)
        response, body = await cluster.post(CHAT, HELLO)
        assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("name", ["cached_tokens", "kv_bytes"])
async def test_a_time_that_is_no_number_keeps_no_answer_from_its_end(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    async with open_cluster(model) as cluster:
        worker = await cluster.add("colocated")
        monkeypatch.setattr(worker, "_timings", lambda: {name: value})
        asked = {**HELLO, "max_tokens": 3, "return_metrics": True}
        async with asyncio.timeout(scaled(3.0)):
            response, _ = await cluster.post(CHAT, asked)
            assert response.status == 200
            await cluster.stream(CHAT, asked)


async def test_an_answer_whose_end_cannot_be_written_ends_all_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.http.reply.StreamReply._complete", lambda reply: 1 // 0)
    async with open_cluster(model) as cluster:
        await cluster.add("colocated")
        async with asyncio.timeout(scaled(3.0)):
            _, events = await cluster.stream(CHAT, {**HELLO, "max_tokens": 3})
        assert events[-1]["error"]["code"] == "internal_error"


async def test_a_request_that_cannot_be_placed_is_gone_once_it_is_answered(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher = cluster.dispatcher
    with monkeypatch.context() as broken:
        broken.setattr(Router, "place", lambda router, demand: 1 // 0)
        response, body = await cluster.post(CHAT, {**HELLO, "max_tokens": 3})
        assert response.status == 500 and body["error"]["code"] == "internal_error"
    assert not dispatcher.records and not dispatcher.admission.requests
    response, _ = await cluster.post(CHAT, {**HELLO, "max_tokens": 3})
    assert response.status == 200


async def test_workers_that_leave_cost_a_request_nothing(model: Path) -> None:
    """More workers leave than there are retries, and the request is the first to get each of their refusals."""
    async with open_cluster(model) as cluster:
        draining = RequestFailed(RequestId(bytes(16)), 0, "draining", "this worker is leaving", retriable=True)
        leaving = [
            await cluster.add("colocated", refuse=draining, name=f"a{index}") for index in range(MAX_RETRIES + 2)
        ]
        await cluster.add("colocated", name="z")
        response, _ = await cluster.post(CHAT, {**HELLO, "max_tokens": 2})
        assert response.status == 200
        assert [len(worker.got(Generate)) for worker in leaving] == [1] * len(leaving), "each is asked once"
        await cluster.post(CHAT, {**HELLO, "max_tokens": 2})
        assert all(len(worker.got(Generate)) == 1 for worker in leaving), "and never again"


async def test_worker_of_other_model_is_refused(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    stranger = await cluster.add("decode", fingerprint="other")
    assert stranger.turned and "fingerprint" not in stranger.turned, "it has shown no key"
    assert "decode-2" in caplog.text and "fingerprint other" in caplog.text
    _, body = await cluster.get("/admin/workers")
    assert [worker["id"] for worker in body["workers"]] == ["prefill-0", "decode-1"]


async def test_an_unknown_worker_is_asked_to_say_hello_again(cluster: FakeCluster) -> None:
    decode = cluster.workers[1]
    worker = cluster.services.registry.get(decode.hello.incarnation)
    assert worker is not None
    cluster.services.registry.gone(worker)
    await until(lambda: decode.got(Rejoin), "it gets a Rejoin")
    await until(lambda: cluster.services.registry.ready("decode"), "it is back")


async def test_more_than_any_worker_says_is_not_read(cluster: FakeCluster) -> None:
    gateway = cluster.dispatcher.gateway
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        closed = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(gateway.address)
        socket.send(bytes(2 * MAX_REPORT_BYTES))
        await until(lambda: closed.poll(0), "its connection is closed")
        socket.disable_monitor()
        closed.close()
    assert not gateway.bad_messages and len(cluster.services.registry) == 2
    assert (await cluster.post(CHAT, {**HELLO, "max_tokens": 1}))[0].status == 200


async def test_rubbish_on_the_control_socket_is_counted_and_survived(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.cluster.complaints.COMPLAIN_EVERY_S", 0.5)
    gateway = cluster.dispatcher.gateway
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(gateway.address)
        packed = (b"\x80\x04\x95", b"\x91\xa5hello", b"\xdd\xff\xff\xff\xff")
        frames = ([b""], [b"x"], [b"a", b"b"], *([seal(data)] for data in packed))
        for parts in frames:
            socket.send_multipart(parts)
        await until(lambda: gateway.bad_messages == len(frames), "all are counted")
    await until(lambda: f"dropped {len(frames) - 1} bad messages" in caplog.text, "the rest is logged together")
    assert caplog.text.count("bad messages") == 2, "not a line for each"
    async with cluster.client.get(f"{cluster.url}/metrics") as response:
        assert 'tandem_cut_off_peers_total{source="coordinator"} 1.0' in await response.text()
    assert (await cluster.post(CHAT, {**HELLO, "max_tokens": 1}))[0].status == 200
