"""``tandem up``: a coordinator and its workers on this machine, under one plain supervisor.

    STARTING ── everybody ready ──► SERVING ── first signal ──► DRAINING ── all gone ──► exit 0
       │ a worker cannot start          │ a child dies: started again, with backoff
       └──► exit 1, in at most five lines

What can be found wrong without starting anything is found before (:mod:`deploy.preflight`). Draining stops the
coordinator first: it refuses new requests and finishes the running ones, which needs the workers; then those go. A
second signal kills everybody, exit 130. Children never outlive the supervisor (:mod:`deploy.process`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from common.config import UpConfig, WorkerConfig
from common.errors import StartError
from common.ids import WorkerName
from common.log import setup_logging
from common.messages import Role
from deploy import builtin, cores
from deploy.client import Server
from deploy.preflight import check_up
from deploy.screen import Lines, Screen, Serving, Terminal, WorkerFacts
from deploy.unit import Unit

STOPPED_AT_ONCE = 130
"""The exit code after a second signal, as shells have it for Ctrl-C."""
POLL_S = 0.1
JOIN_TIMEOUT_S = 30.0
"""From the last worker's "ready" to the coordinator's."""
LINKS_TIMEOUT_S = 2.0
LEAVE_GRACE_S = 5.0
"""What a process may take to end beyond the drain timeout, before it is killed."""


def run(config: UpConfig) -> int:
    """Serves until told to stop; the exit code. StartError when it cannot start."""
    console = Console()
    if not console.is_terminal:
        setup_logging(config.log_level, config.log_format, "up", sys.stdout)
    screen: Screen = Terminal(console) if console.is_terminal else Lines()
    config, notice = builtin.with_model(config, os.environ)
    fleet = plan(config)
    config = check_up(config, len(fleet))
    origin = f" ({config.model})" if config.model != config.served_name else ""
    screen.begin(f"tandem: {config.served_name}{origin}", notice)
    try:
        return asyncio.run(Supervisor(config, fleet, screen).run())
    finally:
        screen.close()


def reachable(host: str) -> str:
    """How a client on this machine writes the address of a socket bound to ``host``."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - looked up, not bound
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


class Member(NamedTuple):
    """One worker of the fleet."""

    label: str
    role: Role
    share: cores.Share


def plan(config: UpConfig) -> list[Member]:
    """Which workers there will be, and which cores each gets."""
    allowed = cores.usable_cores()
    mine = [core for core in config.cores or allowed if core in allowed]
    if not mine:
        raise StartError(f"--cpus {config.cpus} names no usable core", f"usable are {list(allowed)}", "correct --cpus")
    quota = cores.core_quota()
    prefill, decode, colocated = config.pools(min(len(mine), quota or len(mine)))
    counts: tuple[tuple[Role, int], ...] = (("prefill", prefill), ("decode", decode), ("colocated", colocated))
    names: list[tuple[str, Role]] = [(f"{role}-{index}", role) for role, count in counts for index in range(count)]
    shares = cores.deal(mine, len(names), quota, config.threads)
    return [Member(label, role, share) for (label, role), share in zip(names, shares, strict=True)]


class Supervisor:
    """All units of one ``tandem up``, from the first process to the last."""

    def __init__(self, config: UpConfig, fleet: Sequence[Member], screen: Screen) -> None:
        self._config, self._fleet, self._screen = config, fleet, screen
        self._units: list[Unit] = []
        self._stop, self._kill = asyncio.Event(), asyncio.Event()
        self._chatting = False
        self._url = f"http://{reachable(config.host)}:{config.port}"
        self._keyed = bool(config.api_keys())

    async def run(self) -> int:
        self._listen_to_signals()
        self._units = self._make_units()
        keepers = [asyncio.create_task(unit.keep()) for unit in self._units]
        serving = asyncio.create_task(self._serve())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            while not self._stop.is_set():
                done, _ = await asyncio.wait({*keepers, serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # a failed start ends everything
            await self._drain(keepers, at_once=not all(unit.facts.done() for unit in self._units))
            if self._kill.is_set():
                self._screen.fact("stopped at once")
                return STOPPED_AT_ONCE
            return 0
        finally:
            for unit in self._units:
                unit.send(signal.SIGKILL)
            for task in (serving, stopped):
                task.cancel()
            await asyncio.gather(*keepers, serving, stopped, return_exceptions=True)

    def _make_units(self) -> list[Unit]:
        """The coordinator and the workers."""
        config, roles = self._config, [member.role for member in self._fleet]
        door = config.for_coordinator(
            expect_prefill=roles.count("prefill"),
            expect_decode=roles.count("decode"),
            expect_colocated=roles.count("colocated"),
        )
        units = [Unit("coordinator", door, cores.Share(None, 0), self._screen)]
        for label, role, share in self._fleet:
            worker = config.for_worker(
                role,
                WorkerName(label),
                coordinator=f"127.0.0.1:{config.control_port}",
                workers_on_host=len(roles),
                threads=share.threads,
                cpus=share.cpus or config.cpus,
            )
            units.append(Unit(label, worker, share, self._screen))
        return units

    # -- coming up ----------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Comes up, and stays until told to stop; with ``--chat``, until the conversation in this terminal ends."""
        await self._come_up()
        if self._config.chat:
            await self._chat()
            self._stop.set()
        await self._stop.wait()

    async def _come_up(self) -> None:
        """Waits until everybody is ready and the coordinator agrees, then shows the first screen."""
        await asyncio.gather(*(asyncio.shield(unit.facts) for unit in self._units))
        await self._until_ready()
        workers = tuple(
            WorkerFacts(
                unit.label,
                f"cores {unit.share.cpus}" if unit.share.cpus else "",
                unit.facts.result(),
                self._config.log_level == "debug",
            )
            for unit in self._units
            if isinstance(unit.config, WorkerConfig)
        )
        links = await self._measured_links()
        config = self._config
        self._screen.serving(Serving(config.served_name, self._url, workers, links, self._keyed, config.chat))

    async def _until_ready(self) -> None:
        server, reason = Server(self._url, timeout_s=2.0), ""
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                code, body = await asyncio.to_thread(server.get, "/ready")
                if code == 200:
                    return
                reason = str(body)
            except OSError as error:
                reason = str(error)
            await asyncio.sleep(POLL_S)
        raise StartError(
            "the workers did not join the coordinator", reason[:300], "look at the log with --log-level debug"
        )

    async def _measured_links(self) -> tuple[object, ...]:
        """How KV travels between the pools and how fast; the mere names when the measuring takes too long."""
        deadline = time.monotonic() + LINKS_TIMEOUT_S
        while True:
            links = tuple(await asyncio.to_thread(self._links))
            if all(isinstance(link, dict) for link in links) or time.monotonic() > deadline:
                return links
            await asyncio.sleep(POLL_S)

    def _links(self) -> Iterable[object]:
        """How KV travels, as the coordinator knows it; nothing when there is nobody to send to."""
        config = self._config
        key = config.admin_api_key or next(iter(config.api_keys()), None)
        try:
            code, body = Server(self._url, key, timeout_s=2.0).get("/admin/workers")
        except OSError:
            return ()
        workers: list[dict[str, Any]] = body["workers"] if code == 200 else []
        sends = [worker for worker in workers if worker.get("role") == "prefill"]
        return [
            {**link, "from": worker["id"]} if isinstance(link, dict) else link
            for worker in sends
            for index, link in enumerate(worker.get("links") or [])
            if isinstance(link, dict) or not index  # of mere names the best one
        ]

    async def _chat(self) -> None:
        self._chatting = True
        key = next(iter(self._config.api_keys()), None)
        environment = {**os.environ, **({"TANDEM_API_KEY": key} if key else {})}
        command = (sys.executable, "-m", "deploy.cli", "chat", "--url", self._url)
        child = await asyncio.create_subprocess_exec(*command, env=environment)
        try:
            await child.wait()
        finally:
            if child.returncode is None:
                child.terminate()
            self._chatting = False

    # -- going down ---------------------------------------------------------------------------------------------------

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._chatting:
            return  # it stops an answer, which is the conversation's business
        (self._kill if self._stop.is_set() else self._stop).set()

    async def _drain(self, keepers: list[asyncio.Task[None]], at_once: bool) -> None:
        """The coordinator finishes what runs, then the workers go; nothing to finish while still starting."""
        if at_once:
            self._screen.fact("told to stop before everybody was ready: stopping at once")
            return
        self._screen.fact("stopping: running requests finish first; once more to stop at once")
        for unit in self._units:
            unit.leave()
        killed = asyncio.create_task(self._kill.wait())
        limits_s = (self._config.drain_timeout + LEAVE_GRACE_S, LEAVE_GRACE_S)
        for group, limit_s in zip((slice(0, 1), slice(1, None)), limits_s, strict=True):
            for unit in self._units[group]:
                unit.send(signal.SIGTERM)
            gone = asyncio.create_task(asyncio.wait(keepers[group]))
            await asyncio.wait((gone, killed), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if self._kill.is_set():
                break
        killed.cancel()
