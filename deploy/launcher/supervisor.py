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
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import Console

from common.checkpoint.files import open_checkpoint
from common.config.coordinator import CoordinatorConfig
from common.config.up import UpConfig
from common.config.worker import WorkerConfig
from common.core.errors import StartError
from common.core.ids import WorkerName
from common.net.hosts import bracketed
from common.net.http_client import HttpClient
from common.net.messages import Role
from common.platform.core_lease import CoreLease, Lending
from common.platform.device import usable_gpus
from common.platform.gpu import Gpu
from common.platform.log import setup_logging
from deploy.launcher import builtin, cores
from deploy.launcher.child import ChildProcess
from deploy.launcher.gpus import Place, deal
from deploy.launcher.ipc import AbsenceReport, Pools
from deploy.launcher.preflight import check_memory, check_up
from deploy.launcher.screen import Lines, Screen, Serving, Terminal, WorkerFacts, chat_ended

STOPPED_AT_ONCE = 130
"""The exit code after a second signal: that of shells for Ctrl-C."""
POLL_S = 0.1
JOIN_TIMEOUT_S = 30.0
"""Maximum time from the last worker's "ready" report until the coordinator answers /ready with 200."""
LINKS_TIMEOUT_S = 2.0
LEAVE_GRACE_S = 5.0
"""Time that a process has to exit after the drain timeout before it is killed."""
ONE_SIGNAL_S = 0.5
"""Signals within this time of the first count as the same one. timeout(1), for example, sends SIGTERM to the whole
process group; if it includes make, make forwards the signal and it arrives twice."""


def run(config: UpConfig) -> int:
    """Serve until stopped and return the exit code. Raises StartError if the system cannot start."""
    console = Console()
    if not console.is_terminal:
        setup_logging(config.log_level, config.log_format, "up", sys.stdout)
    screen: Screen = Terminal(console) if console.is_terminal else Lines()
    config, notice = builtin.with_model(config, os.environ)
    gpus, why = usable_gpus(config.device)
    fleet = plan(config, gpus)
    with check_up(config, [member.place for member in fleet]) as config:
        origin = f" ({config.model})" if config.model != config.served_name else ""
        screen.begin(f"tandem: {config.served_name}{origin}", notice)
        if why and not gpus:
            screen.fact(why)
        try:
            return asyncio.run(Supervisor(config, fleet, screen).run())
        finally:
            screen.close()


def reachable(host: str) -> str:
    """Return the host with which a client on this machine reaches a socket bound to ``host``."""
    return bracketed({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host))  # noqa: S104 - looked up, not bound


def leaves_first(child: ChildProcess) -> tuple[bool, bool, int]:
    """Sort key for scaling down: first workers that are down, then those that are restarting, then ready ones, the
    highest index first. A ready worker is not removed in favor of one that may never become ready."""
    return child.serving() is not None, child.running(), -int(child.label.rpartition("-")[2])


def _role(child: ChildProcess) -> Role | None:
    return child.config.role if isinstance(child.config, WorkerConfig) else None


def _place(child: ChildProcess, gpus: Sequence[Gpu]) -> Place:
    """Return where ``child`` computes."""
    if not isinstance(child.config, WorkerConfig):
        return Place()
    gpu = next((each for each in gpus if each.uuid == child.visible_gpus), None)
    return Place(child.config.device, gpu, child.config.workers_on_gpu)


class Member(NamedTuple):
    """A planned worker: its name, role and cores, and the device that it computes on."""

    label: str
    role: Role
    share: cores.Share
    place: Place


def plan(config: UpConfig, gpus: Sequence[Gpu] = ()) -> list[Member]:
    """Return the workers to start, their cores and their places on ``gpus``. Raises StartError if ``--cpus`` names no
    usable core."""
    mine, quota = machine(config)
    prefill, decode, colocated = config.pools(min(len(mine), quota or len(mine)))
    counts: tuple[tuple[Role, int], ...] = (("prefill", prefill), ("decode", decode), ("colocated", colocated))
    names: list[tuple[str, Role]] = [(f"{role}-{index}", role) for role, count in counts for index in range(count)]
    ranks = [config.ranks_of(role) for _, role in names]
    return members(names, ranks, cores.deal(mine, sum(ranks), quota, config.threads), deal(gpus, len(names)))


def members(
    names: Sequence[tuple[str, Role]], ranks: Sequence[int], shares: Sequence[cores.Share], places: Sequence[Place]
) -> list[Member]:
    """Return the workers called ``names`` at ``places``; ``shares`` are those of all their ranks, one worker after
    another."""
    rest = iter(shares)
    joined = [cores.joined([next(rest) for _ in range(count)]) for count in ranks]
    return [Member(*name, share, place) for name, share, place in zip(names, joined, places, strict=True)]


def machine(config: UpConfig) -> tuple[list[int], int | None]:
    """Return the cores that workers may use, and the container's CPU limit in cores if there is one. Raises StartError
    if ``--cpus`` names no usable core."""
    allowed = cores.usable_cores()
    mine = [core for core in config.cores or allowed if core in allowed]
    if not mine:
        raise StartError(f"--cpus {config.cpus} names no usable core", f"usable are {list(allowed)}", "correct --cpus")
    return mine, cores.core_quota()


class Supervisor:
    """All child processes of one ``tandem up``: starts, watches, scales and stops them."""

    def __init__(self, config: UpConfig, fleet: Sequence[Member], screen: Screen) -> None:
        self._config, self._fleet, self._screen = config, fleet, screen
        colocated = any(member.role == "colocated" for member in fleet)
        self._keys = config.keys("coordinator", *(("colocated",) if colocated else ("prefill", "decode")))
        """Cluster keys by role. They stay the same for the lifetime of the supervisor, so that a replaced child can
        rejoin."""
        self._children: list[ChildProcess] = []
        self.followers: set[Callable[[AbsenceReport], None]] = set()
        self._lent = CoreLease.create() if config.lend_cores else None
        self._stop, self._kill = asyncio.Event(), asyncio.Event()
        self._stopped_at = 0.0
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._grown = asyncio.Event()
        self._up = self._chatting = self._piling_up = False
        self._homes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        """The coordinator's cores while prompts do not pile up, and while they do. None if the workers are not
        pinned."""
        self._scaling = asyncio.Lock()
        self._coming: list[ChildProcess] = []
        self._url = f"http://{reachable(config.host)}:{config.port}"
        self._keyed = bool(config.api_keys())

    async def run(self) -> int:
        """Start all children, serve until stopped, then drain. Returns the exit code. Raises StartError if a child
        cannot start. No child is left when this returns or raises."""
        self._listen_to_signals()
        self._children = self._make_children()
        for child in self._children:
            self._keep(child)
        serving = asyncio.create_task(self._serve())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            while not self._stop.is_set():
                self._grown.clear()
                watched = {task for task in (*self._watched(), serving) if not task.done()}
                grown = asyncio.create_task(self._grown.wait())
                done, _ = await asyncio.wait({*watched, stopped, grown}, return_when=asyncio.FIRST_COMPLETED)
                grown.cancel()
                for task in done & watched:
                    task.result()  # a failed start ends everything
            await self._children[0].close_ipc()
            await self._drain(at_once=not self._up)
            if self._kill.is_set():
                self._screen.fact("stopped at once")
                return STOPPED_AT_ONCE
            self._screen.fact("stopped")
            return 0
        finally:
            for child in self._children:
                child.send(signal.SIGKILL)
            for task in (serving, stopped):
                task.cancel()
            await self._children[0].close_ipc()
            await asyncio.gather(*self._keepers.values(), serving, stopped, return_exceptions=True)
            if self._lent is not None:
                self._lent.close()

    def _watched(self) -> list[asyncio.Task[None]]:
        """Return the tasks whose failure ends the supervisor. A worker added by scaling is not included until it is
        ready; until then :meth:`_grow` handles its failure."""
        return [self._keepers[child.label] for child in self._children if not self._up or child.facts.done()]

    def _keep(self, child: ChildProcess) -> asyncio.Task[None]:
        task = self._keepers[child.label] = asyncio.create_task(child.keep())
        return task

    def _make_children(self) -> list[ChildProcess]:
        """Return the coordinator and the workers, not started yet."""
        config, roles = self._config, [member.role for member in self._fleet]
        coordinator_config = config.for_coordinator(
            expect_prefill=roles.count("prefill"),
            expect_decode=roles.count("decode"),
            expect_colocated=roles.count("colocated"),
        )
        coordinator = ChildProcess(
            "coordinator", coordinator_config, cores.Share(None, 0), self._screen, self._keys["coordinator"], self
        )
        workers = [self._make_worker(member, len(roles)) for member in self._fleet]
        self._settle_cores(coordinator, workers)
        return [coordinator, *workers]

    def _make_worker(self, member: Member, workers: int) -> ChildProcess:
        """Return one of ``workers`` workers on this machine, not started yet."""
        config = self._config.for_worker(
            member.role,
            WorkerName(member.label),
            coordinator=f"{bracketed(self._config.control_host)}:{self._config.control_port}",
            workers_on_host=workers,
            threads=member.share.threads,
            cpus=member.share.cpus or self._config.cpus,
            device="cpu" if member.place.gpu is None else "cuda",  # the only GPU that it sees
            workers_on_gpu=member.place.sharing,
        )
        lending = None  # only one process of a worker on the CPU could lend or borrow
        alone = config.tensor_parallel_size == 1 and member.place.gpu is None
        if self._lent is not None and member.share.cores is not None and alone:
            lending = Lending(self._lent.descriptor, tuple(machine(self._config)[0]))
        return ChildProcess(
            member.label, config, member.share, self._screen, self._keys[member.role], lending=lending,
            on_absence=self._report_absence, visible_gpus=member.place.visible,
        )  # fmt: skip

    def _report_absence(self, report: AbsenceReport) -> None:
        """Report a worker process that has ended to the coordinator, which shows it in ``tandem status``."""
        for follow in self.followers:
            follow(report)

    def _settle_cores(self, coordinator: ChildProcess, workers: Sequence[ChildProcess]) -> None:
        """Update core lending and the coordinator's cores for the new set of ``workers``. A worker may lend cores that
        it does not share. The coordinator is placed where its preempting threads disturb the least."""
        if self._lent is not None:
            self._lent.settle(child.share.cores or () for child in workers)
        if all(child.share.cores for child in workers):  # else the workers are not pinned
            mine, everybody = machine(self._config)[0], [child.share for child in workers]
            beside_prompts, beside_streams = (
                cores.beside(mine, everybody, [child.share for child in workers if _role(child) == undisturbed])
                for undisturbed in ("decode", "prefill")
            )
            self._homes = beside_prompts, beside_streams
            self._bind(coordinator)

    def _bind(self, coordinator: ChildProcess) -> None:
        if self._homes is not None:
            home = self._homes[self._piling_up]
            # real-time threads only where it cannot run on all cores: Linux does not move them to an idle core
            coordinator.bind(home, at_once=len(home) < len(machine(self._config)[0]))

    def place_coordinator(self, deep: bool) -> None:
        """Pin the coordinator to the cores for the current load. Usually it shares cores with prefill workers, so that
        it delays no stream. While prompts pile up (``deep``), prefill is the bottleneck and it shares cores with decode
        workers."""
        self._piling_up = deep
        self._bind(self._children[0])

    # -- start --------------------------------------------------------------------------------------------------------

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
        await asyncio.gather(*(asyncio.shield(child.facts) for child in self._children))
        self._up = True
        await self._until_ready()
        workers = tuple(
            WorkerFacts(
                child.label,
                f"cores {child.share.cpus}" if child.share.cpus else "",
                child.facts.result(),
                self._config.log_level == "debug",
            )
            for child in self._children
            if isinstance(child.config, WorkerConfig)
        )
        links = await self._measured_links()
        config = self._config
        self._screen.serving(Serving(config.served_name, self._url, workers, links, self._keyed, config.chat))

    async def _until_ready(self) -> None:
        server, reason = HttpClient(self._url, timeout_s=2.0), ""
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
        """Return the KV links between the pools with their measurements, or only the transports' names if measuring
        takes longer than LINKS_TIMEOUT_S."""
        pairs = len(self._pool("prefill")) * len(self._pool("decode"))
        deadline = time.monotonic() + LINKS_TIMEOUT_S
        while True:
            links = tuple(await asyncio.to_thread(self._links))
            if sum(isinstance(link, dict) for link in links) >= pairs or time.monotonic() > deadline:
                return links
            await asyncio.sleep(POLL_S)

    def _links(self) -> Iterable[object]:
        """Return the KV links that the coordinator has measured, else the preferred transport of each prefill
        worker."""
        config = self._config
        key = config.admin_api_key or next(iter(config.api_keys()), None)
        try:
            code, body = HttpClient(self._url, key, timeout_s=2.0).get("/admin/workers")
        except OSError:
            return ()
        workers: list[dict[str, Any]] = body["workers"] if code == 200 else []
        sends = [worker for worker in workers if worker.get("role") == "prefill"]
        measured = [{**link, "from": worker["id"]} for worker in sends for link in worker["links"]]
        return measured or [best for worker in sends for best in worker["transports"][:1]]

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

    def replace(self, name: str, pid: int, why: str) -> None:
        """Replace the worker ``name``, which hangs. Does nothing if it is not a child, or is no longer process
        ``pid``."""
        for child in self._children[1:]:
            if child.label == name:
                child.replace(pid, why)

    def serving(self) -> dict[WorkerName, int]:
        """Return the names and process ids of the ready workers. A coordinator that starts now expects them to connect,
        and reports one that does not as hanging."""
        return {WorkerName(child.label): pid for child in self._children[1:] if (pid := child.serving()) is not None}

    # -- scaling ------------------------------------------------------------------------------------------------------

    async def scale(self, prefill: int | None, decode: int | None) -> Pools:
        """Resize the pools and return their sizes. Raises StartError if that is not possible.

        New workers are started before others are drained, which have the usual drain timeout. Changes run one at a
        time, but a new request at once ends workers that are still starting and that it does not want; the request that
        started them fails. A start that hangs can therefore be undone, and repeating a request has no effect.
        """
        self._give_up(self._checked(prefill, decode))
        async with self._scaling:
            try:
                return await self._change(self._checked(prefill, decode))
            finally:  # a restarted coordinator must expect the current number of workers
                coordinator = self._children[0]
                assert isinstance(coordinator.config, CoordinatorConfig)
                coordinator.config = replace(
                    coordinator.config,
                    expect_prefill=len(self._pool("prefill")),
                    expect_decode=len(self._pool("decode")),
                )

    def _give_up(self, wanted: Mapping[Role, int]) -> None:
        """Kill the last of the workers that are still starting, as far as their pool would exceed ``wanted``."""
        for role, count in wanted.items():
            coming = [child for child in self._coming if _role(child) == role]
            ready = [child for child in self._pool(role) if child not in coming]
            for child in coming[max(0, count - len(ready)) :]:
                child.send(signal.SIGKILL)

    async def _change(self, wanted: Mapping[Role, int]) -> Pools:
        gpus, _ = await asyncio.to_thread(usable_gpus, self._config.device)
        coming, leaving = self._difference(wanted, gpus)
        await asyncio.to_thread(self._check_memory, coming, gpus)
        self._screen.fact("scaling to " + ", ".join(f"{role} {count}" for role, count in wanted.items()))
        at_once = asyncio.Semaphore(os.cpu_count() or 1)  # each start uses a core

        async def grow(child: ChildProcess) -> None:
            async with at_once:
                await self._grow(child)

        self._coming = list(coming)
        self._settle_cores(self._children[0], [*self._children[1:], *coming])
        try:
            results = await asyncio.gather(*map(grow, coming), return_exceptions=True)
        finally:
            self._coming = []
        await asyncio.gather(*map(self._shrink, leaving))
        self._settle_cores(self._children[0], self._children[1:])
        for failure in results:
            if isinstance(failure, BaseException):
                raise failure
        sizes = len(self._pool("prefill")), len(self._pool("decode"))
        self._screen.fact(f"scaled: prefill {sizes[0]}, decode {sizes[1]}")
        return sizes

    def _pool(self, role: Role) -> list[ChildProcess]:
        """Return the workers of ``role``, those about to be started included."""
        later = [child for child in self._coming if child not in self._children]
        return [child for child in (*self._children, *later) if _role(child) == role]

    def _checked(self, prefill: int | None, decode: int | None) -> dict[Role, int]:
        """Return the requested pool sizes, with the current size for None. Raises StartError if they are not possible
        now."""
        if not self._up or self._stop.is_set():
            when = "is stopping" if self._stop.is_set() else "is still starting"
            raise StartError("the pools cannot be changed now", f"the server {when}", "wait until it is ready")
        if self._pool("colocated"):
            why = "a colocated worker does the work of both"
            raise StartError("there are no pools to change", why, "start with --prefill N --decode M")
        if prefill == 0 and self._config.no_prefill_policy != "local":
            why = f"without one, --no-prefill-policy {self._config.no_prefill_policy} stops all serving"
            raise StartError(
                "the last prefill worker cannot be removed", why, "keep one, or start with --no-prefill-policy local"
            )
        wanted: dict[Role, int | None] = {"prefill": prefill, "decode": decode}
        return {role: len(self._pool(role)) if count is None else count for role, count in wanted.items()}

    def _difference(
        self, wanted: Mapping[Role, int], gpus: Sequence[Gpu]
    ) -> tuple[list[ChildProcess], list[ChildProcess]]:
        """Return the workers to start, not started yet, and the workers to drain."""
        names: list[tuple[str, Role]] = []
        leaving: list[ChildProcess] = []
        for role, count in wanted.items():
            pool = self._pool(role)
            taken = {child.label for child in pool}
            free = (label for index in itertools.count() if (label := f"{role}-{index}") not in taken)
            names += [(label, role) for label in itertools.islice(free, max(0, count - len(pool)))]
            pool.sort(key=leaves_first)
            leaving += pool[: max(0, len(pool) - count)]
        staying = [child.share for child in self._children[1:] if child not in leaving]
        mine, quota = machine(self._config)
        ranks = [self._config.ranks_of(role) for _, role in names]
        shares = cores.deal_more(mine, staying, sum(ranks), quota, self._config.threads) if names else []
        pinned = [child.visible_gpus for child in self._children[1:] if child.visible_gpus]
        if names and pinned and not gpus:
            todo = "look at nvidia-smi, and scale up when they are back"
            raise StartError("there is no GPU for more workers", "this machine's are gone", todo)
        places = deal(gpus, len(names), pinned)
        coming = members(names, ranks, shares, places)
        return [self._make_worker(member, len(staying) + len(coming)) for member in coming], leaving

    def _check_memory(self, coming: Sequence[ChildProcess], gpus: Sequence[Gpu]) -> None:
        if coming:
            config, workers = self._config, len(self._children) - 1 + len(coming)
            checkpoint = open_checkpoint(config.model, config.revision, config.trust_remote_code)
            check_memory(checkpoint, config, workers, [_place(child, gpus) for child in coming])

    async def _grow(self, child: ChildProcess) -> None:
        """Start a worker and wait until it is ready. Raises StartError and forgets it if it cannot start, or if a later
        scale request has ended it."""
        self._children.append(child)
        keeper = self._keep(child)
        await asyncio.wait((keeper, child.facts), return_when=asyncio.FIRST_COMPLETED)
        if keeper.done() and not child.facts.done():
            self._forget(child)
            await keeper
            raise StartError(
                f"{child.label} did not start", "a later request to scale removed it", "look at GET /admin/workers"
            )
        self._coming.remove(child)
        self._grown.set()  # wakes run(), which now watches it as the others
        facts = WorkerFacts(child.label, f"cores {child.share.cpus}" if child.share.cpus else "", child.facts.result())
        self._screen.fact(f"{child.label} is ready: {facts.budget} ({facts.compute})")

    async def _shrink(self, child: ChildProcess) -> None:
        """Drain a worker and wait until it has exited; kill it after the drain timeout. One that waits for its restart
        has exited already."""
        child.send(signal.SIGTERM)
        keeper = self._keepers[child.label]
        _, late = await asyncio.wait((keeper,), timeout=self._config.drain_timeout + LEAVE_GRACE_S)
        if late:
            child.send(signal.SIGKILL)
            await asyncio.wait((keeper,))
        self._forget(child)
        self._screen.fact(f"{child.label} has stopped")

    def _forget(self, child: ChildProcess) -> None:
        self._children.remove(child)
        del self._keepers[child.label]

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
        self._screen.fact("stopping: waiting for running requests; a second Ctrl-C or SIGTERM stops at once")
        for child in self._children:
            child.leave()
        killed = asyncio.create_task(self._kill.wait())
        limits_s = (self._config.drain_timeout + LEAVE_GRACE_S, LEAVE_GRACE_S)
        for group, limit_s in zip((slice(0, 1), slice(1, None)), limits_s, strict=True):
            for child in self._children[group]:
                child.send(signal.SIGTERM)
            gone = asyncio.create_task(asyncio.wait([self._keepers[child.label] for child in self._children[group]]))
            await asyncio.wait((gone, killed), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if self._kill.is_set():
                break
        killed.cancel()
