"""``tandem up``: supervises a coordinator and its workers on this machine.

    STARTING ── all ready ──► SERVING ── first signal ──► DRAINING ── all exited ──► exit 0
       │ a worker cannot start    │ a child dies: restarted with backoff
       └──► exit 1, with a three-line error

:mod:`deploy.launcher.preflight` checks all that can be checked before a process is started. Draining stops the
coordinator first: it refuses new requests and finishes the running ones, which needs the workers. Then the workers
stop. A second signal kills all children; the exit code is 130. Children never outlive the supervisor
(:mod:`deploy.launcher.process`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console

from common.config.up import UpConfig
from common.config.worker import WorkerConfig
from common.core.ids import WorkerName
from common.net.hosts import bracketed
from common.platform import service_manager
from common.platform.log import setup_logging
from deploy.launcher import builtin, cores
from deploy.launcher.child import ChildProcess
from deploy.launcher.children import Children
from deploy.launcher.fleet import PlannedWorker, allowed_gpus, plan
from deploy.launcher.hosts import Hosts, ThisMachine
from deploy.launcher.ipc import AbsenceReport, Pools
from deploy.launcher.placement import CorePlacement
from deploy.launcher.preflight import check_up
from deploy.launcher.readiness import CoordinatorProbe
from deploy.launcher.scaling import LEAVE_GRACE_S, Scaling
from deploy.launcher.screen import Lines, Screen, Serving, Terminal, WorkerFacts, chat_ended

STOPPED_AT_ONCE = 130
"""The exit code after a second signal: that of shells for Ctrl-C."""
ONE_SIGNAL_S = 0.5
"""Signals within this time of the first count as the same one. timeout(1), for example, sends SIGTERM to the whole
process group; if it includes make, make forwards the signal and it arrives twice."""


def run(config: UpConfig) -> int:
    """Serve until stopped and return the exit code. Raises StartError if the system cannot start."""
    gpus, why = allowed_gpus(config)
    return serve(config, plan(config, gpus), [why] if why and not gpus else [])


def serve(config: UpConfig, fleet: Sequence[PlannedWorker], facts: Sequence[str], hosts: Hosts | None = None) -> int:
    """Serve with the workers ``fleet`` as :func:`run`. ``facts``: lines to show first. ``hosts``: where processes run,
    else on this machine."""
    console = Console()
    if not console.is_terminal:
        setup_logging(config.log_level, config.log_format, "up", sys.stdout)
    screen: Screen = Terminal(console) if console.is_terminal else Lines()
    config, notice = builtin.with_model(config, os.environ)
    remarks = list[str]()
    places = [member.place for member in fleet] if hosts is None else []  # of this machine
    with check_up(config, places, remarks.append) as (config, chats):
        origin = f" ({config.model})" if config.model != config.served_name else ""
        screen.begin(f"tandem: {config.served_name}{origin}", notice)
        for fact in (*facts, *remarks):
            screen.fact(fact)
        try:
            return asyncio.run(Supervisor(config, fleet, screen, chats, hosts).run())
        finally:
            screen.close()


def reachable(host: str) -> str:
    """Return the host with which a client on this machine reaches a socket bound to ``host``."""
    return bracketed({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host))  # noqa: S104 - looked up, not bound


class Supervisor:
    """All child processes of one ``tandem up``: starts, watches and stops them. :class:`Scaling` changes their number,
    :class:`CorePlacement` their cores."""

    _children: Children
    _scaling: Scaling

    def __init__(
        self,
        config: UpConfig,
        fleet: Sequence[PlannedWorker],
        screen: Screen,
        chats: bool = True,
        hosts: Hosts | None = None,
    ) -> None:
        """``chats``: whether the model has a chat template. ``hosts``: where processes run, else on this machine."""
        self._hosts = hosts or ThisMachine(config)
        self._config, self._fleet, self._screen, self._chats = config, fleet, screen, chats
        colocated = any(member.role == "colocated" for member in fleet)
        self._keys = config.keys("coordinator", *(("colocated",) if colocated else ("prefill", "decode")))
        """Cluster keys by role. They stay the same for the lifetime of the supervisor, so that a replaced child can
        rejoin."""
        self.followers: set[Callable[[AbsenceReport], None]] = set()
        self._placement = CorePlacement(config)
        self._stop, self._kill = asyncio.Event(), asyncio.Event()
        self._stopped_at = 0.0
        self._up = self._chatting = False
        self._url = f"http://{reachable(config.host)}:{config.port}"
        self._keyed = bool(config.api_keys())

    async def run(self) -> int:
        """Start all children, serve until stopped, then drain. Returns the exit code. Raises StartError if a child
        cannot start, or the machines are lost. No child is left when this returns or raises."""
        self._listen_to_signals()
        self._prepare()
        children, scaling = self._children, self._scaling
        for child in children:
            children.keep(child)
        serving = asyncio.create_task(self._serve())
        lost = asyncio.create_task(self._hosts.watch())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            while not self._stop.is_set():
                scaling.grown.clear()
                watched = {task for task in (*self._watched(), serving, lost) if not task.done()}
                grown = asyncio.create_task(scaling.grown.wait())
                done, _ = await asyncio.wait({*watched, stopped, grown}, return_when=asyncio.FIRST_COMPLETED)
                grown.cancel()
                for task in done & watched:
                    task.result()  # a failed start ends everything
            await children.coordinator.close_ipc()
            await self._drain(at_once=not self._up)
            if self._kill.is_set():
                self._screen.fact("stopped at once")
                return STOPPED_AT_ONCE
            self._screen.fact("stopped")
            return 0
        finally:
            children.kill()
            for task in (serving, lost, stopped):
                task.cancel()
            await children.coordinator.close_ipc()
            await asyncio.gather(children.ended(), serving, lost, stopped, return_exceptions=True)
            self._placement.close()

    def _watched(self) -> list[asyncio.Task[None]]:
        """Return the tasks whose failure ends the supervisor. A worker added by scaling is not included until it is
        ready; until then :class:`Scaling` handles its failure."""
        return [self._children.keeper(child) for child in self._children if not self._up or child.facts.done()]

    def _prepare(self) -> None:
        """Make the coordinator and the workers, not started yet, and what scales them."""
        config, roles = self._config, [member.role for member in self._fleet]
        coordinator_config = config.for_coordinator(
            expect_prefill=roles.count("prefill"),
            expect_decode=roles.count("decode"),
            expect_colocated=roles.count("colocated"),
        )
        coordinator = ChildProcess(
            "coordinator",
            coordinator_config,
            cores.CoreShare(None, 0),
            self._screen,
            self._keys["coordinator"],
            self,
            start=self._hosts.start,
        )
        workers = [self._make_worker(member, len(roles)) for member in self._fleet]
        self._placement.settle(coordinator, workers)
        self._children = Children(coordinator, workers)
        self._scaling = Scaling(
            self._config,
            self._children,
            self._placement,
            self._screen,
            self._make_worker,
            self._why_not_scale,
            self._hosts,
        )

    def _make_worker(self, member: PlannedWorker, workers: int) -> ChildProcess:
        """Return one of ``workers`` workers on this machine, not started yet."""
        config = self._config.for_worker(
            member.role,
            WorkerName(member.label),
            coordinator=f"{bracketed(self._config.control_host)}:{self._config.control_port}",
            workers_on_host=workers,
            threads=member.share.threads,
            cpus=member.share.cpus or self._config.cpus,
            device="cpu" if member.place.gpu is None else "cuda",  # it sees only its own
            workers_on_gpu=member.place.sharing,
        )
        return ChildProcess(
            member.label, config, member.share, self._screen, self._keys[member.role],
            lending=self._placement.lending_of(member, config), on_absence=self._report_absence,
            visible_gpus=member.place.visible, start=self._hosts.start,
        )  # fmt: skip

    # -- serving ------------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Wait for the start to complete, then serve until stopped; with ``--chat`` until the chat in this terminal
        ends."""
        await self._come_up()
        if self._config.chat:
            await self._chat()
            self._screen.fact(chat_ended(sys.stdin.isatty()))
            self._stop.set()
        await self._stop.wait()

    async def _come_up(self) -> None:
        """Wait until all children are ready and the coordinator reports that it is ready, then show the summary."""
        config, children = self._config, self._children
        await asyncio.gather(*(asyncio.shield(child.facts) for child in children))
        self._up = True
        probe = CoordinatorProbe(self._url, config.admin_api_key or next(iter(config.api_keys()), None))
        await probe.until_ready()
        workers = tuple(
            WorkerFacts(
                child.label,
                f"cores {child.share.cpus}" if child.share.cpus else "",
                child.facts.result(),
                config.log_level == "debug",
            )
            for child in children
            if isinstance(child.config, WorkerConfig)
        )
        links = await probe.measured_links(len(children.of_role("prefill")) * len(children.of_role("decode")))
        named = Serving(config.served_name, self._url, workers, links, self._keyed, config.chat, self._chats)
        self._screen.serving(named)
        service_manager.ready(f"serving {config.served_name} at {self._url}")

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

    # -- for the coordinator, over IPC --------------------------------------------------------------------------------

    async def scale(self, prefill: int | None, decode: int | None) -> Pools:
        """Resize the pools as :meth:`Scaling.scale`."""
        return await self._scaling.scale(prefill, decode)

    def _why_not_scale(self) -> str:
        if self._stop.is_set():
            return "is stopping"
        return "" if self._up else "is still starting"

    def place_coordinator(self, deep: bool) -> None:
        """Pin the coordinator to the cores for when prompts pile up (``deep``), or for when they do not."""
        self._placement.place(self._children.coordinator, deep)

    def replace(self, name: str, pid: int, why: str) -> None:
        """Replace the worker ``name``, which hangs. Does nothing if it is not a child, or is no longer process
        ``pid``."""
        for child in self._children.workers:
            if child.label == name:
                child.replace(pid, why)

    def serving(self) -> dict[WorkerName, int]:
        """Return the names and process ids of the ready workers. A coordinator that starts now expects them to connect,
        and reports one that does not as hanging."""
        return {
            WorkerName(child.label): pid for child in self._children.workers if (pid := child.serving()) is not None
        }

    def _report_absence(self, report: AbsenceReport) -> None:
        """Report a worker process that has ended to the coordinator, which shows it in ``tandem status``."""
        for follow in self.followers:
            follow(report)

    # -- stop ---------------------------------------------------------------------------------------------------------

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._chatting:
            return  # the chat process handles Ctrl-C: it stops an answer
        if not self._stop.is_set():
            self._stopped_at = time.monotonic()
            self._stop.set()
        elif time.monotonic() - self._stopped_at > ONE_SIGNAL_S:
            self._kill.set()

    async def _drain(self, at_once: bool) -> None:
        """Drain the coordinator, then the workers, until all have exited or their time limits have passed. With
        ``at_once``, while the system is still starting, there is nothing to drain."""
        if at_once:
            self._screen.fact("a signal came before all processes were ready: stopping at once")
            return
        service_manager.stopping()
        self._screen.fact("stopping: waiting for running requests; a second Ctrl-C or SIGTERM stops at once")
        children = self._children
        for child in children:
            child.leave()
        killed = asyncio.create_task(self._kill.wait())
        limits_s = (self._config.drain_timeout + LEAVE_GRACE_S, LEAVE_GRACE_S)
        for group, limit_s in zip(([children.coordinator], children.workers), limits_s, strict=True):
            for child in group:
                child.send(signal.SIGTERM)
            gone = asyncio.create_task(asyncio.wait([children.keeper(child) for child in group]))
            await asyncio.wait((gone, killed), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if self._kill.is_set():
                break
        killed.cancel()
