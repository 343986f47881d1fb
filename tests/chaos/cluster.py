"""A complete system of processes with a proxy on every connection, and clients that verify their answers.

    client ──► coordinator ◄──(proxy per worker)── workers        prefill ──(proxy per decode worker)──► decode

A :class:`ChaosCluster` starts the system, reports its state (worker events, /admin/workers, /metrics), breaks it,
repairs it between cells, and at the end verifies that no process, socket or shared memory of it is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from common.checkpoint.files import open_checkpoint
from tests import leaked_keys
from tests.chaos.proxy import FaultProxy
from tests.chaos.request import ChaosRequest, clock
from tests.chaos.worker import FIRST_FAULT
from tests.fakes.checkpoint import fake_checkpoint
from tests.fakes.constraints import SHORT
from tests.fakes.oracle import VOCABULARY

ROOT = Path(__file__).parents[2]
START_S = 20.0
FREE_WITHIN_S = 10.0
_SERVING = re.compile(r"serving \S+ at (http://\S+), workers at tcp://(\S+)")
_GAUGE = re.compile(r"^vllm:num_requests_(running|waiting)\{.*\} (\S+)$", re.M)
_POOL = re.compile(r"^\S+ r(.)\S+ \S+ \S+ (\d+) +/memfd:tandem-kv ", re.M)
_SCREENING = "coordinator.grammar.screening"
"""The module of the process in which a coordinator screens grammars; its argument is the coordinator's process id."""
_LOST_ATTEMPTS = re.compile(r"^tandem_(?:retries|migrations)_total (\S+)", re.M)


class Stuck(AssertionError):
    """Raised when something did not happen in time; the message says what."""


def maps_of(pid: int) -> str:
    """Return the memory maps of a process from /proc; empty if it is gone or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def pools_of(pid: int) -> tuple[set[int], set[int]]:
    """Return the inodes of the shared-memory pools that a process maps: its own, and those of others, mapped
    read-only."""
    found = [(may_write == "w", int(inode)) for may_write, inode in _POOL.findall(maps_of(pid))]
    return {inode for own, inode in found if own}, {inode for own, inode in found if not own}


def words_of(process: Path) -> list[str]:
    """Return the command line of a process, given its directory in /proc; empty if it is gone."""
    try:
        return process.joinpath("cmdline").read_text().split("\0")
    except OSError:
        return []


def oracle_checkpoint(directory: Path) -> tuple[Path, str]:
    """Make a checkpoint with the oracle's vocabulary that the coordinator can open; return its path and fingerprint."""
    fake_checkpoint(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": VOCABULARY}))
    return directory, open_checkpoint(str(directory), None).fingerprint


# -- clients ----------------------------------------------------------------------------------------------------------


async def _note_sent(_: object, trace: Any, __: object) -> None:
    """Trace callback: the body of a request has been sent."""
    trace.trace_request_ctx.sent.set()


# -- processes --------------------------------------------------------------------------------------------------------


def state_of(pid: int) -> str:
    """Return the state of a process from /proc: T is stopped, R is running or runnable."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@dataclass
class ChaosWorker:
    """One worker process, the proxies in front of its sockets, and its events.

    ``awake_since`` is when it last continued after it was stopped or hung, ``ended_at`` when its process was found
    gone, both in monotonic seconds. ``wanted`` is False while a fault keeps it away."""

    name: str
    role: str
    flags: tuple[str, ...]
    control: FaultProxy
    data: FaultProxy
    process: Process | None = None
    incarnation: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    stopped: bool = False
    awake_since: float = 0.0
    ended_at: float = float("inf")
    wanted: bool = True
    reading: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def holds(self) -> tuple[int, int]:
        """The numbers of blocks and requests it holds, as last reported."""
        reported = [event for event in self.events if event["event"] == "held"]
        return (reported[-1]["blocks"], reported[-1]["requests"]) if reported else (0, 0)

    @property
    def holders(self) -> set[str]:
        """The ids, in hex, of the requests for which it holds anything, as last reported."""
        reported = [event for event in self.events if event["event"] == "held"]
        return {request for request, _ in reported[-1]["by"]} if reported else set()

    def steps(self) -> Iterable[tuple[float, str, int, int, int, bool]]:
        """Yield (time, request, attempt, start, end, wants a token) for every segment computed."""
        for event in self.events:
            if event["event"] == "step":
                for segment in event["segments"]:
                    yield event["at"], *segment

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if self.stopped and number == signal.SIGCONT:
            self.awake_since = clock()
        self.stopped = number == signal.SIGSTOP or (self.stopped and number != signal.SIGCONT)

    def command(self, **values: Any) -> None:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(json.dumps(values).encode() + b"\n")


class ChaosCluster:
    """One coordinator with ``prefills`` and ``decodes`` workers, or with ``colocated`` ones.

    ``flags`` are passed to every worker, ``coordinator_flags`` to the coordinator. ``planted`` is a bug of the
    coordinator (:mod:`tests.chaos.planted`) that the harness must detect."""

    def __init__(
        self,
        directory: Path,
        *,
        prefills: int = 2,
        decodes: int = 2,
        colocated: int = 0,
        flags: tuple[str, ...] = (),
        coordinator_flags: tuple[str, ...] = (),
        planted: str = "",
        seed: int = 0,
    ) -> None:
        self.directory, self.flags, self.coordinator_flags = directory, flags, coordinator_flags
        self._command = ("tests.chaos.planted", planted) if planted else ("deploy.cli",)
        self.rng = random.Random(seed)
        self.workers: dict[str, ChaosWorker] = {}
        self.coordinator: Process | None = None
        self.url = self.control = ""
        self.beyond_repair = False
        self.listeners: list[Callable[[ChaosWorker, dict[str, Any]], None]] = []
        """Called with each event of a worker."""
        self._shape = {"prefill": prefills, "decode": decodes, "colocated": colocated}
        self._news = asyncio.Event()
        self._pids: set[int] = set()
        self._logs: set[Path] = set()
        self._pools: set[int] = set()
        self._incarnations: set[str] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, directory: Path, **options: Any) -> AsyncIterator[ChaosCluster]:
        directory.mkdir(parents=True, exist_ok=True)
        cluster = cls(directory, **options)
        try:
            await cluster.start()
            yield cluster
        except BaseException:
            await cluster.kill()
            raise
        await cluster.close()

    # -- coming and going ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self.find_model()
        await self.start_coordinator()
        for role, count in self._shape.items():
            for number in range(count):
                name = f"{role}-{number}"
                control, data = await FaultProxy(self.rng).start(), await FaultProxy(self.rng).start()
                self.workers[name] = ChaosWorker(name, role, self.flags, control, data)
        await asyncio.gather(*(self.start_worker(worker) for worker in self.workers.values()))
        await self.until_ready()

    def find_model(self) -> None:
        self.model, self.fingerprint = oracle_checkpoint(self.directory / "model")

    async def start_coordinator(self) -> None:
        """Start the coordinator, at the addresses of the previous one if there was one."""
        ports = ("0", "0")
        if self.url:
            ports = (self.url.rpartition(":")[2], self.control.rpartition(":")[2])
        log = self.watched("coordinator")
        log.write_text("")
        with log.open("ab") as out:
            self.coordinator = await self._spawn(
                "-m", *self._command, "coordinator", str(self.model), "--served-model-name", "oracle",
                "--port", ports[0], "--control-port", ports[1], *self.coordinator_flags,
                stdin=DEVNULL, stdout=out, stderr=STDOUT,
            )  # fmt: skip
        deadline = clock() + START_S
        while not (found := _SERVING.search(log.read_text())):
            if self.coordinator.returncode is not None or clock() > deadline:
                raise Stuck(f"the coordinator does not serve:\n{log.read_text()}")
            await asyncio.sleep(0.02)
        self.url, self.control = found.groups()

    async def start_worker(self, worker: ChaosWorker, *flags: str) -> None:
        worker.control.aim(self.control)
        worker.incarnation, worker.stopped, worker.events = "", False, []
        worker.awake_since, worker.ended_at = 0.0, float("inf")
        with self.watched(worker.name).open("ab") as log:
            worker.process = await self._spawn(
                "-m", "tests.chaos.worker", "--role", worker.role, "--name", worker.name,
                "--coordinator", worker.control.address, "--advertise", worker.data.address,
                "--fingerprint", self.fingerprint, "--tokenizer", str(self.model / "tokenizer.json"),
                *worker.flags, *flags, stdin=PIPE, stdout=PIPE, stderr=log,
            )  # fmt: skip
        worker.reading = asyncio.ensure_future(self._read(worker, worker.process))

    async def start_stranger(self) -> tuple[Process, Path]:
        """Start a worker with another model; return its process and its log."""
        log = self.watched("stranger")
        with log.open("wb") as out:
            stranger = await self._spawn(
                "-m", "tests.chaos.worker", "--role", "decode", "--name", "stranger", "--coordinator", self.control,
                "--advertise", "127.0.0.1:9", "--fingerprint", "another", stdin=PIPE, stdout=DEVNULL, stderr=out,
            )  # fmt: skip
        return stranger, log

    def watched(self, name: str) -> Path:
        """Return the path of a process's log, which is checked at the end for leaked keys. What an earlier process of
        this name has logged is checked now."""
        log = self.directory / f"{name}.log"
        leaked_keys.search(log)
        leaked_keys.watch(log)
        self._logs.add(log)
        return log

    async def _spawn(self, *words: str, **pipes: Any) -> Process:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        process = await asyncio.create_subprocess_exec(sys.executable, *words, cwd=ROOT, env=environment, **pipes)
        self._pids.add(process.pid)
        return process

    async def _read(self, worker: ChaosWorker, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "listening":
                worker.incarnation = event["incarnation"]
                self._incarnations.add(worker.incarnation)
                self._pools |= pools_of(process.pid)[0]
                if event["address"]:
                    worker.data.aim(event["address"])
            if event["event"] == "unstuck":
                worker.awake_since = event["at"]
            worker.events.append(event)
            for listener in self.listeners:
                listener(worker, event)
            self._report()
        worker.ended_at = clock()
        await process.wait()
        self._report()

    def _report(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def close(self) -> None:
        """Stop everything with SIGTERM. Raises if a process does not exit, exits with an error, or leaves anything."""
        if self.beyond_repair:
            return
        for worker in self.workers.values():
            if worker.alive:
                worker.signal(signal.SIGCONT)
                worker.signal(signal.SIGTERM)
        codes = {}
        try:
            async with asyncio.timeout(20):
                for worker in self.workers.values():
                    if worker.process is not None:
                        code = await worker.process.wait()
                        codes[worker.name] = code if worker.wanted else 0
                if self.coordinator is not None:
                    if self.coordinator.returncode is None:
                        self.coordinator.terminate()
                    codes["coordinator"] = await self.coordinator.wait()
        finally:
            await self.kill()
        assert not any(codes.values()), f"exit codes {codes}; logs in {self.directory}"
        self.check_nothing_left()

    async def kill(self) -> None:
        """Kill every process, close the proxies, and check the logs for leaked keys."""
        processes = [worker.process for worker in self.workers.values()] + [self.coordinator]
        for process in processes:
            if process is not None and process.returncode is None:
                process.kill()
        for process in processes:
            if process is not None:
                await process.wait()
        for worker in self.workers.values():
            if worker.reading is not None:
                await worker.reading
            await worker.control.close()
            await worker.data.close()
        for log in self._logs:
            leaked_keys.search(log)

    def check_nothing_left(self) -> None:
        left = [pid for pid in self._pids if Path(f"/proc/{pid}").exists()]
        assert not left, f"processes left: {left}"
        screening = [words for words in map(words_of, Path("/proc").glob("[0-9]*")) if _SCREENING in words]
        orphans = [words for words in screening if self._pids & {int(word) for word in words if word.isdecimal()}]
        assert not orphans, f"processes of a coordinator left: {orphans}"
        sockets = Path("/proc/net/unix").read_text()
        endpoints = [each for each in self._incarnations if f"@tandem-kv-{each}" in sockets]
        assert not endpoints, f"endpoints of shared pools left: {endpoints}"
        mapped = [pid.name for pid in Path("/proc").glob("[0-9]*") if self._pools & set.union(*pools_of(int(pid.name)))]
        assert not mapped, f"processes that still map a pool of this cluster: {mapped}"

    # -- looking ------------------------------------------------------------------------------------------------------

    def by_role(self, role: str) -> list[ChaosWorker]:
        return [worker for worker in self.workers.values() if worker.role == role]

    def id_of(self, ask: ChaosRequest) -> str | None:
        """Return the request's id in hex; None before a worker has accepted it."""
        events = (event for worker in self.workers.values() for event in worker.events)
        return next((each["request"] for each in events if each["event"] == "taken" and each["seed"] == ask.seed), None)

    async def until(self, true: Callable[[], Any], within_s: float, what: str) -> Any:
        """Wait, on worker events, until ``true()`` is truthy, and return its value. Raises Stuck after ``within_s``."""
        deadline = clock() + within_s
        while not (value := true()):
            if clock() > deadline:
                raise Stuck(f"not within {within_s:g} s: {what}")
            try:
                async with asyncio.timeout(0.25):
                    await self._news.wait()
            except TimeoutError:
                pass
        return value

    async def poll(self, true: Callable[[], Any], within_s: float, what: str) -> Any:
        """As :meth:`until`, by polling: ``true`` returns an awaitable."""
        deadline = clock() + within_s
        while not (value := await true()):
            if clock() > deadline:
                raise Stuck(f"not within {within_s:g} s: {what}")
            await asyncio.sleep(0.03)
        return value

    async def get(self, path: str) -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(self.url, timeout=timeout) as session, session.get(path) as response:
            return response.status, await response.text()

    async def admin(self) -> dict[str, dict[str, Any]]:
        status, text = await self.get("/admin/workers")
        assert status == 200, text
        return {worker["id"]: worker for worker in json.loads(text)["workers"]}

    async def requests(self) -> dict[str, int]:
        """Return the numbers of requests that the coordinator reports as ``running`` and ``waiting``."""
        found = _GAUGE.findall((await self.get("/metrics"))[1])
        return {name: int(float(value)) for name, value in found}

    async def lost_attempts(self) -> float:
        """Return the number of attempts lost so far: retries and migrations."""
        return sum(map(float, _LOST_ATTEMPTS.findall((await self.get("/metrics"))[1])))

    async def until_busy(self, worker: ChaosWorker, within_s: float = START_S) -> None:
        """Wait until ``worker`` reports that it has a request."""
        await self.until(lambda: worker.holds[1], within_s, f"{worker.name} has something to do")

    async def until_ready(self, within_s: float = START_S) -> None:
        """Wait until every wanted worker has joined with its current incarnation."""

        async def ready() -> bool:
            try:
                shown = await self.admin()
            except (aiohttp.ClientError, TimeoutError):
                return False
            return all(
                worker.incarnation
                and name in shown
                and worker.incarnation.startswith(shown[name]["incarnation"])
                and shown[name]["state"] == "ready"
                for name, worker in self.workers.items()
                if worker.wanted
            )

        await self.poll(ready, within_s, f"every worker is ready (logs in {self.directory})")

    async def until_free(self, within_s: float = FREE_WITHIN_S) -> float:
        """Wait until no request is left and no living worker holds anything. Returns the time of the last such report
        of a worker; raises Stuck after ``within_s``."""
        living = [worker for worker in self.workers.values() if worker.alive and not worker.stopped]
        await self.until(
            lambda: all(worker.holds == (0, 0) for worker in living if worker.alive),
            within_s,
            f"blocks are free: {[(worker.name, worker.holds) for worker in living]}",
        )
        at = max((event["at"] for worker in living for event in worker.events if event["event"] == "held"), default=0.0)

        async def idle() -> bool:
            try:
                shown = await self.admin()
            except aiohttp.ClientError:  # the coordinator is gone, and its requests with it
                return True
            for name, worker in shown.items():
                blocks = worker["kv_blocks"]
                assert blocks["free"] + blocks["cached"] + blocks["held"] == blocks["total"], (name, blocks)
                assert not worker["counters"].get("leaked_blocks"), (name, worker["counters"])
            held = [name for name, each in shown.items() if each["kv_blocks"]["held"] or each["running"]]
            try:
                return not held and not any((await self.requests()).values())
            except aiohttp.ClientError:
                return True

        if self.coordinator is not None and self.coordinator.returncode is None:
            await self.poll(idle, within_s, "the coordinator knows of nothing held and of no request")
        return at

    async def links(self) -> set[str]:
        """Wait until every link between prefill and decode workers is measured; return the transports in use."""
        decodes = {worker.name for worker in self.by_role("decode")}

        async def tried() -> set[str]:
            shown = await self.admin()
            links = [shown[worker.name]["links"] for worker in self.by_role("prefill")]
            if not all(decodes == {link["to"] for link in each} for each in links):
                return set()
            return {link["transport"] for each in links for link in each}

        found: set[str] = await self.poll(tried, START_S, "every link is measured")
        return found

    async def until_unmapped(self, within_s: float) -> float:
        """Wait until no process maps the pool of a dead process, which would keep its memory allocated.

        Returns the seconds waited. Raises AssertionError if a process maps named shared memory, which would outlive its
        creator."""
        started = clock()

        async def unmapped() -> bool:
            pools = [pools_of(worker.process.pid) for worker in self.workers.values() if worker.process is not None]
            return not set().union(*(read for _, read in pools)) - set().union(*(own for own, _ in pools))

        named = [pid for pid in self._pids if "/dev/shm/" in maps_of(pid)]
        assert not named, f"processes that map files of shared memory: {named}"
        await self.poll(unmapped, within_s, "no process maps the pool of a worker that is gone")
        return clock() - started

    # -- breaking and repairing ---------------------------------------------------------------------------------------

    def wake(self) -> bool:
        """Continue every stopped worker; return whether there was one."""
        stopped = [worker for worker in self.workers.values() if worker.alive and worker.stopped]
        for worker in stopped:
            worker.wanted = True
            worker.signal(signal.SIGCONT)
        return bool(stopped)

    async def restore(self) -> None:
        """End all faults and restart dead processes; requests may keep running meanwhile."""
        for worker in self.workers.values():
            worker.wanted = True
            worker.control.heal()
            worker.data.heal()
        self.wake()
        assert self.coordinator is not None
        if self.coordinator.returncode is None:
            self.coordinator.send_signal(signal.SIGCONT)
        else:
            await self.start_coordinator()
        for worker in self.workers.values():
            if not worker.alive:
                if worker.reading is not None:
                    await worker.reading
                await self.start_worker(worker)

    async def repair(self) -> None:
        """Return to the initial state: no fault, every process running, nothing held, no excluded pairs."""
        await self.restore()
        await self.until_ready()
        await self.until_free()
        for name, shown in (await self.admin()).items():
            if shown["avoids"]:
                worker = self.workers[name]
                worker.signal(signal.SIGKILL)
                assert worker.process is not None and worker.reading is not None
                await worker.process.wait()
                await worker.reading
                await self.start_worker(worker)
        await self.until_ready()
        for worker in self.workers.values():
            worker.events = [event for event in worker.events if event["event"] == "held"][-1:]
            worker.control.done.clear()
            worker.data.done.clear()
            worker.command(step_s=0.0, token_s=0.0, slows_at=None)

    # -- asking -------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[aiohttp.ClientSession]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=120)
        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(_note_sent)
        async with aiohttp.ClientSession(
            self.url, connector=connector, timeout=timeout, trace_configs=[trace]
        ) as session:
            yield session

    def ask(self, tokens: int, max_tokens: int, **options: Any) -> ChaosRequest:
        """Return a request with a random prompt of ``tokens`` tokens."""
        prompt = [self.rng.randrange(FIRST_FAULT) for _ in range(tokens)]
        return ChaosRequest(prompt, max_tokens, self.rng.getrandbits(63), **options)

    def any_ask(self, tokens: int, max_tokens: int) -> ChaosRequest:
        """As :meth:`ask`, with a constraint, restrictions or log-probabilities of the prompt for some requests."""
        kind = self.rng.randrange(10)
        options: dict[str, Any] = {}
        if kind < 2:
            options["constraint"] = self.rng.choice(SHORT)
        elif kind == 2:
            options["restricted"] = True
        elif kind == 3:
            options["scores"] = True
        return self.ask(tokens, max_tokens, **options)
