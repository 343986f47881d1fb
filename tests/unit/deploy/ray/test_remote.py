"""Processes that actors run, with actors of this process in place of Ray's."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from common.config.up import UpConfig
from common.config.worker import WorkerConfig
from common.core.errors import StartError
from common.net import keys
from deploy.launcher import cores, process
from deploy.launcher.child import ChildProcess
from deploy.launcher.screen import Lines
from deploy.ray import actor as actors
from deploy.ray import placement, remote, session
from deploy.ray.actor import Event, Launch, NodeFacts, ProcessHost
from deploy.ray.hosts import MAX_LAUNCH_BYTES, RayHosts, bounded
from deploy.ray.placement import Group
from deploy.ray.remote import ActorGone, ActorUnreachable, RemoteProcess
from tests.leaked_keys import new_key

SERVING = """
import os, signal, sys
message = sys.stdin.read()
status = os.fdopen(int(sys.argv[3]), "w")
print("it reads", len(message), "characters", flush=True)
if len(sys.argv) > 4:
    ipc = int(sys.argv[4])
    os.write(ipc, os.read(ipc, 100).upper())
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print('{"ready": {"kv_tokens": 5}}', file=status, flush=True)
signal.sigwait([signal.SIGTERM])
"""


@pytest.fixture
def child_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make child processes run SERVING instead of a worker."""
    start = asyncio.create_subprocess_exec

    async def run(*words: str, **options: Any) -> asyncio.subprocess.Process:
        assert words[1:3] == ("-m", "deploy.launcher.process")
        return await start(sys.executable, "-S", "-c", SERVING, *words[3:], **options)

    monkeypatch.setattr(process.asyncio, "create_subprocess_exec", run)


class LocalActor:
    """The actor of a process, in this process. Calls raise what ``failure`` is, if it is set."""

    def __init__(self, label: str) -> None:
        self.host = ProcessHost(label)
        self.failure: Exception | None = None
        self.interrupted: Exception | None = None
        self.polling: asyncio.Task[list[Event]] | None = None
        self.launches: list[Launch] = []
        self.ended = asyncio.Event()

    async def _call(self, method: Callable[[Any], Coroutine[Any, Any, Any]], argument: object) -> Any:
        if self.failure is not None:
            raise self.failure
        return await method(argument)

    async def start(self, launch: Launch) -> int:
        self.launches.append(launch)
        return int(await self._call(self.host.start, launch))

    async def poll(self, seen: int) -> list[Event]:
        self.polling = asyncio.create_task(self._call(self.host.poll, seen))
        try:
            return await self.polling
        except asyncio.CancelledError:
            if self.interrupted is None:
                raise
            raise self.interrupted from None

    async def write(self, data: bytes) -> None:
        await self._call(self.host.write, data)

    async def signal(self, number: int) -> None:
        await self._call(self.host.signal, number)

    def end(self) -> None:
        if self.host._child is not None and self.host._child.returncode is None:
            self.host._child.kill()
        self.ended.set()

    def fail(self, error: Exception | None) -> None:
        """Make the call in progress and later ones raise ``error``."""
        self.failure = error
        if error is not None and self.polling is not None:
            self.interrupted = error
            self.polling.cancel()


def placed(actor: LocalActor, ipc: bool = False) -> Callable[[], Coroutine[Any, Any, tuple[LocalActor, Launch]]]:
    async def place() -> tuple[LocalActor, Launch]:
        return actor, Launch(b"{}" * 50, {"NAME": "value"}, None, ipc)

    return place


async def ready(ran: RemoteProcess) -> None:
    """Wait until a process has reported that it is ready."""
    async for line in ran.reports:
        if b"kv_tokens" in line:
            return
    raise AssertionError("it has ended")


async def settle(actor: LocalActor) -> None:
    """Wait until the child of ``actor`` is gone and its host has no task left."""
    await asyncio.gather(*actor.host._tasks)


@pytest.mark.processes
async def test_a_remote_process_has_output_reports_ipc_and_an_exit_code(child_program: None) -> None:
    actor = LocalActor("decode-0")
    ours, theirs = socket.socketpair()
    ran = RemoteProcess("decode-0", placed(actor, ipc=True), theirs)
    theirs.close()
    assert ran.returncode is None and ran.stdout is not None
    reader, writer = await asyncio.open_connection(sock=ours)
    writer.write(b"scale up\n")
    assert await reader.readline() == b"SCALE UP\n"
    assert await ran.stdout.readline() == b"it reads 100 characters\n"
    lines = [await ran.reports.readline() for _ in range(2)]
    assert b"waiting" in lines[0] and b"kv_tokens" in lines[1]
    os.kill(ran.pid, 0)  # it is that of the process
    ran.send_signal(signal.SIGTERM)
    assert await ran.wait() == 0
    assert await ran.stdout.read() == await ran.reports.read() == b""
    assert await reader.read() == b""
    writer.close()
    assert actor.ended.is_set()
    await settle(actor)


@pytest.mark.processes
async def test_a_process_survives_its_actor_being_out_of_reach(
    child_program: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RETRY_S", 0.01)
    actor = LocalActor("decode-0")
    ran = RemoteProcess("decode-0", placed(actor))
    await ready(ran)
    actor.fail(ActorUnreachable("the network"))
    await asyncio.sleep(0)
    assert ran.returncode is None
    actor.fail(None)
    await actor.signal(signal.SIGTERM)
    assert await ran.wait() == 0, "the exit code arrives once the actor can be reached again"
    await settle(actor)


@pytest.mark.processes
async def test_a_process_whose_node_fails_has_ended(child_program: None) -> None:
    actor = LocalActor("decode-0")
    ran = RemoteProcess("decode-0", placed(actor))
    await ready(ran)
    actor.fail(ActorGone(""))
    assert await ran.wait() == -9
    assert b"the actor of decode-0 is gone" in await ran.reports.read()
    await settle(actor)


@pytest.mark.processes
async def test_a_killed_process_that_does_not_answer_is_given_up(
    child_program: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RETRY_S", 0.01)
    monkeypatch.setattr(remote, "KILL_S", 0.1)
    actor = LocalActor("decode-0")
    ran = RemoteProcess("decode-0", placed(actor))
    await ready(ran)
    actor.fail(ActorUnreachable("the network"))
    ran.kill()
    assert await ran.wait() == -9 and actor.ended.is_set()
    await settle(actor)


async def test_a_process_without_a_node_can_be_killed_and_cannot_start() -> None:
    waiting = asyncio.Event()

    async def place() -> tuple[LocalActor, Launch]:
        await waiting.wait()
        raise AssertionError

    ran = RemoteProcess("decode-0", place)
    await asyncio.sleep(0)
    ran.kill()
    assert await ran.wait() == -9

    async def no_room() -> tuple[LocalActor, Launch]:
        raise StartError("the Ray cluster has no room for decode-0", "no node", "add one")

    ran = RemoteProcess("decode-0", no_room)
    assert await ran.wait() == 1
    assert b"no room for decode-0" in await ran.reports.read()


async def test_old_log_lines_are_dropped_and_reports_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "MAX_LINES", 3)
    host = ProcessHost("decode-0")
    host._add("status", b"s")
    for number in range(5):
        host._add("log", b"%d" % number)
    assert [event.data for event in await host.poll(0)] == [b"s", b"3", b"4"]
    assert [event.data for event in await host.poll(5)] == [b"4"]
    waiting = asyncio.create_task(host.poll(6))
    await asyncio.sleep(0)
    assert not waiting.done()
    host._add("exit", b"0")
    assert await waiting == [Event(7, "exit", b"0")]


async def test_the_log_of_an_actor_has_output_and_how_the_start_ended(capsys: pytest.CaptureFixture[str]) -> None:
    host = ProcessHost("decode-0")
    output, reports = asyncio.StreamReader(), asyncio.StreamReader()
    output.feed_data(b"a line\n")
    reports.feed_data(b'{"stage": "loading"}\nnot a report\n{"ready": {}}\n')
    reports.feed_data(b'{"error": {"what": "the GPU has failed", "why": "it fell off", "todo": "restart"}}\n')
    for pipe in (output, reports):
        pipe.feed_eof()
    await host._lines("log", output)
    await host._lines("status", reports)
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["a line", "decode-0 is ready"]
    assert shown[2].startswith("decode-0 cannot serve: the GPU has failed") and len(shown) == 3


async def test_an_answer_stays_below_the_size_that_ray_stores() -> None:
    host = ProcessHost("decode-0")
    for _ in range(10):
        host._add("log", b"x" * 30_000)
    answers = [await host.poll(0)]
    while answers[-1][-1].number < 10:
        answers.append(await host.poll(answers[-1][-1].number))
    assert [len(answer) for answer in answers] == [3, 3, 3, 1]


# -- keys -------------------------------------------------------------------------------------------------------------


class OneNode:
    """A session of a cluster whose nodes always have room; the node of each actor is ``node_of`` its label."""

    def __init__(self, node_of: Mapping[str, str]) -> None:
        self.node_of = node_of
        self.made: dict[str, LocalActor] = {}
        self.given: list[tuple[object, ...]] = []
        self.groups: list[Group] = []
        self.removed: list[Group] = []

    def group(self, group: Group) -> Group:
        self.groups.append(group)
        return group

    def remove_group(self, handle: Group) -> None:
        self.removed.append(handle)

    async def actor_in(
        self, handle: Group, group: Group, label: str, patience_s: float | None
    ) -> tuple[LocalActor, NodeFacts]:
        assert handle is group and label in group.labels
        self.given.append((group, label, patience_s))
        self.made[label] = LocalActor(label)
        await asyncio.sleep(0)
        return self.made[label], NodeFacts(self.node_of[label], "10.0.0.7", actors.version())

    def coordinator_group(self, label: str) -> Group:
        return placement.coordinator_group(label, "a", {"CPU": 1})


def seen_by_others(pid: int) -> str:
    """Return the command line and the environment of a process."""
    return "".join(Path(f"/proc/{pid}/{name}").read_text() for name in ("cmdline", "environ"))


@pytest.mark.processes
async def test_keys_reach_only_standard_input_of_the_process(child_program: None) -> None:
    minted, admin_key = keys.mint(), new_key()
    config = UpConfig(model="m", ray="auto", control_host="10.0.0.1", admin_api_key=admin_key)
    cluster = OneNode({"coordinator": "a", "prefill-0": "a", "decode-0": "a", "decode-1": "b"})
    hosts = RayHosts(config, cluster, on_gpus=False)  # type: ignore[arg-type]
    fleet = hosts.plan([("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")])
    children = [
        ChildProcess("coordinator", config.for_coordinator(), cores.CoreShare(None, 0), Lines(), minted["coordinator"],
                     start=hosts.start),
        *(
            ChildProcess(member.label, config.for_worker(member.role, member.label, coordinator="10.0.0.1:8001"),
                         member.share, Lines(), minted[member.role], start=hosts.start)
            for member in fleet
        ),
    ]  # fmt: skip
    keeping = [asyncio.create_task(child.keep()) for child in children]
    await asyncio.gather(*(child.facts for child in children))
    encoded = {role: base64.b64encode(pair.secret).decode() for role, pair in minted.items()}  # as in JSON
    secrets = [*encoded.values(), *(pair.secret.decode() for pair in minted.values()), admin_key]
    for label, actor in cluster.made.items():
        (launch,) = actor.launches
        sent = launch.message.decode()
        role = label.partition("-")[0]
        assert [each for each, secret in encoded.items() if secret in sent] == [role], "its own and no other"
        shown = repr((launch, vars(actor.host), cluster.given)) + str(launch)
        assert actor.host._child is not None
        shown += seen_by_others(actor.host._child.pid)
        assert not [secret for secret in secrets if secret in shown]
    prefill = process.msgspec.json.decode(cluster.made["prefill-0"].launches[0].message)["config"]
    alone = process.msgspec.json.decode(cluster.made["decode-1"].launches[0].message)["config"]
    assert (prefill["host"], prefill["device"], prefill["workers_on_host"]) == ("10.0.0.7", "cpu", 2)
    assert alone["workers_on_host"] == 1
    placed = [group.labels for group in cluster.groups]
    assert placed == [("coordinator",), ("prefill-0", "decode-0"), ("decode-1",)], "no worker takes its only node"
    for child in children:
        child.send(signal.SIGTERM)
    await asyncio.gather(*keeping)
    await asyncio.gather(*map(settle, cluster.made.values()))
    hosts.release("decode-0")
    assert not cluster.removed, "the other worker of the pair is still there"
    assert [member.label for member in hosts.plan([("decode-0", "decode")])] == ["decode-0"]
    hosts.release("decode-1")
    hosts.release("prefill-0")
    assert [group.labels for group in cluster.removed] == [("decode-1",), ("prefill-0", "decode-0")]


def test_a_launch_that_ray_would_store_is_refused() -> None:
    bounded(Launch(b"x" * 1000, {}))
    with pytest.raises(StartError, match="too long for Ray"):
        bounded(Launch(b"x" * MAX_LAUNCH_BYTES, {"A": "b"}))


@pytest.mark.processes
async def test_another_version_on_a_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = OneNode({"decode-0": "a"})
    config = UpConfig(model="m", ray="auto", prefill=0)
    hosts = RayHosts(config, cluster, on_gpus=False)  # type: ignore[arg-type]
    (member,) = hosts.plan([("decode-0", "decode")])
    monkeypatch.setattr("deploy.ray.hosts.version", lambda: "9.9")
    child = ChildProcess("decode-0", WorkerConfig(role="decode", model="m"), member.share, Lines(), start=hosts.start)
    with pytest.raises(StartError, match="another version"):
        await child.keep()
    assert cluster.made["decode-0"].ended.is_set()


def test_a_missing_package_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(StartError, match="needs the package ray") as caught, contextlib.ExitStack() as stack:
        stack.enter_context(session.connected("auto"))
    assert "tandem[ray]" in caught.value.todo


# -- the connection to Ray --------------------------------------------------------------------------------------------


async def test_a_head_that_accepts_no_connection_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "WATCH_S", 0.0)
    connected = asyncio.Semaphore(0)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        connected.release()

    head = await asyncio.start_server(accept, "127.0.0.1", 0)
    address = head.sockets[0].getsockname()
    watching = asyncio.create_task(session.lost(address, 0.0, "the head"))
    for _ in range(3):
        await connected.acquire()
    assert not watching.done()
    head.close()
    with pytest.raises(StartError, match="the head, is lost") as caught:
        await watching
    assert caught.value.why == "it has not accepted a connection for 0 s (Connection refused)"


@pytest.mark.parametrize(
    ("text", "short"),
    [
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: ProcessActor\n\tactor_id: 4ec6\n"
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
            "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1)",
            "The actor is dead because its worker process has died: Worker unexpectedly exits with a connection error "
            "code 2",
        ),
        (
            "The actor died unexpectedly before finishing this task.\n\tactor_id: 4ec6\n"
            "The actor died because its node has died. Node Id: 81bb\n\tthe actor's node was terminated unexpectedly",
            "The actor died because its node has died",
        ),
        ("It is gone.", "It is gone"),
        ("", "Exception"),
    ],
)
def test_errors_of_ray_are_told_by_their_cause(text: str, short: str) -> None:
    assert session._short(Exception(text)) == short
