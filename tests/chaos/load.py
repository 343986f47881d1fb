"""Faults under load: many concurrent requests, one fault among them, and figures of what clients observed.

Every answer is compared with the oracle's. Gaps are measured at the clients, including the wait for a first token: only
that one shows the failure of a prefill worker. The time at which blocks were freed comes from the workers' events.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp

from tests.chaos.cells import HELD_S
from tests.chaos.cluster import FREE_WITHIN_S, ChaosCluster, ChaosWorker, state_of
from tests.chaos.host import undisturbed
from tests.chaos.proxy import Action, Rule, is_frame
from tests.chaos.request import ChaosRequest, clock

KILLED_S, STOPPED_S, DRAINED_S = 2.0, 3.5, 1.0
Proof = Callable[[], Awaitable[bool]]
Break = Callable[[ChaosCluster], Awaitable[tuple[float, Proof]]]
"""Breaks something under load; returns the time, and the proof, to be evaluated at the end."""


@dataclass
class LoadFigures:
    """The outcome of one run. Times are in seconds.

    After a fault, ``gap_s`` is the largest gap between two tokens, and ``first_s`` the longest wait for a first token,
    from the fault or from sending the request. A first token may take ``queued_s`` longer than the allowed gap, its
    time without a fault."""

    name: str
    verdicts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    """Bounds of time that were missed; other failures are in ``wrong``."""
    gap_s: float = 0.0
    first_s: float = 0.0
    allowed_gap_s: float = 0.0
    queued_s: float = 0.0
    free_s: float = 0.0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def allowed_first_s(self) -> float:
        return self.allowed_gap_s and self.allowed_gap_s + self.queued_s

    @property
    def passed(self) -> bool:
        return not (self.wrong or self.late)

    def row(self) -> str:
        verdicts = ", ".join(f"{count} {name}" for name, count in self.verdicts.most_common())
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.items()))
        gap = _of(self.gap_s, self.allowed_gap_s)
        first = _of(self.first_s, self.allowed_first_s) if self.first_s else ""
        note = "ok" if self.passed else "FAILED: " + "; ".join(self.wrong + self.late)
        times = f"{gap} | {first} | {self.free_s:.2f} | {self.seconds:.0f}"
        return f"| {self.name} | {faults} | {verdicts} | {times} | {note} |"


def _of(measured_s: float, allowed_s: float) -> str:
    return f"{measured_s:.2f}" + (f" of {allowed_s:.3g}" if allowed_s else "")


HEADER = """\
| scenario | faults that happened | answers | largest gap (s) | to a first token (s) | all free after (s) | took (s) | |
|---|---|---|---|---|---|---|---|"""


async def crowd(
    cluster: ChaosCluster,
    asks: Sequence[ChaosRequest],
    at_once: int,
    *,
    leave: Mapping[int, Callable[[ChaosRequest], Awaitable[str]]] | None = None,
) -> None:
    """Send all requests, ``at_once`` at a time.

    ``leave`` maps a request's seed to what its client waits for before it disconnects; that returns the phase."""
    waiting = iter(asks)

    async def client() -> None:
        async with cluster.session() as session:
            for ask in waiting:
                if leave is not None and ask.seed in leave:
                    await _hang_up(ask, session, leave[ask.seed])
                else:
                    await ask.send(session)

    await asyncio.gather(*(client() for _ in range(at_once)))


async def _hang_up(
    ask: ChaosRequest, session: aiohttp.ClientSession, come: Callable[[ChaosRequest], Awaitable[str]]
) -> None:
    task, moment = asyncio.ensure_future(ask.send(session)), asyncio.ensure_future(come(ask))
    try:
        await asyncio.wait([task, moment], return_when=asyncio.FIRST_COMPLETED)
        if moment.done() and task.cancel():
            ask.left = moment.result()
    finally:
        moment.cancel()
        await asyncio.gather(task, moment, return_exceptions=True)


async def scenario(
    cluster: ChaosCluster,
    name: str,
    breaking: Break | None,
    *,
    requests: int,
    at_once: int,
    allowed_gap_s: float,
) -> LoadFigures:
    """Run a load of ``requests`` random requests with one fault in the middle; afterwards the cluster needs repair."""
    asks = [cluster.any_ask(cluster.rng.randrange(40, 120), cluster.rng.randrange(16, 40)) for _ in range(requests)]
    return await answered(cluster, asks, LoadFigures(name, allowed_gap_s=allowed_gap_s), breaking, at_once)


async def answered(
    cluster: ChaosCluster, asks: Sequence[ChaosRequest], figures: LoadFigures, breaking: Break | None, at_once: int
) -> LoadFigures:
    """As :func:`scenario`, for given requests; fills and returns ``figures``."""
    started = clock()
    load = asyncio.ensure_future(crowd(cluster, asks, at_once))
    struck_at, happened, lost_attempts = started, None, await cluster.lost_attempts()
    if breaking is not None:
        await cluster.until(
            lambda: load.done() or sum(bool(ask.ended_at) for ask in asks) >= len(asks) // 4, 120, "a quarter is done"
        )
        struck_at, happened = await breaking(cluster)
        if load.done():
            figures.wrong.append("the load was over before the fault was")
    await load
    if happened is not None and not await happened():
        figures.wrong.append("the fault did not happen, or no request lost an attempt by it")
    ended = clock()
    figures.seconds = ended - started
    figures.free_s = max(0.0, await cluster.until_free(FREE_WITHIN_S) - ended)
    await asyncio.to_thread(judge, figures, asks)  # slow for a model, and the proxies run on this event loop
    figures.faults["attempts lost"] = round(await cluster.lost_attempts() - lost_attempts)
    _measure(figures, asks, struck_at, struck=breaking is not None)
    return figures


def _measure(figures: LoadFigures, asks: Sequence[ChaosRequest], struck_at: float, *, struck: bool) -> None:
    """Measure the gaps, from ``struck_at`` on, of every request that was running then or came later."""
    there = [ask for ask in asks if ask.ended_at > struck_at]
    begun = [ask for ask in there if ask.arrivals]
    figures.gap_s = max((ask.largest_gap(max(struck_at, ask.arrivals[0])) for ask in begun), default=0.0)
    firsts = [(ask, (ask.arrivals or [ask.ended_at])[0]) for ask in there]
    waited = [first - max(struck_at, ask.started_at) for ask, first in firsts if first > struck_at]
    figures.first_s = max(waited, default=0.0)
    if struck:
        figures.faults["streams running then"] = sum(ask.arrivals[0] < struck_at for ask in begun)
        figures.faults["waiting for a first token then"] = sum(
            ask.started_at < struck_at < first for ask, first in firsts
        )
        if not figures.faults["streams running then"]:
            figures.wrong.append("no stream was running when the fault struck")
    if figures.allowed_gap_s and figures.gap_s > figures.allowed_gap_s:
        figures.late.append(f"a gap of {figures.gap_s:.2f} s")
    if figures.allowed_gap_s and figures.first_s > figures.allowed_first_s:
        figures.late.append(f"{figures.first_s:.2f} s to a first token")


def only_late(*figures: LoadFigures) -> str:
    """Describe the missed bounds of time; empty if there are none or something else is wrong too."""
    late = [f"{each.name}: {what}" for each in figures for what in each.late]
    return "" if any(each.wrong for each in figures) else "; ".join(late)


def judge(figures: LoadFigures, asks: Sequence[ChaosRequest]) -> None:
    """Compare every answer with the oracle's, up to the last token that its client waited for."""
    for ask in asks:
        verdict = ask.verdict()
        figures.verdicts[verdict] += 1
    bad = {name: count for name, count in figures.verdicts.items() if not name.startswith(("exact", "right", "left "))}
    if bad:
        figures.wrong.append(f"answers {bad}")


# -- what breaks ------------------------------------------------------------------------------------------------------


def signalled(name: str, number: int) -> Break:
    """Send a signal to a worker while it has work. Proof: some request lost an attempt."""

    async def strike(cluster: ChaosCluster) -> tuple[float, Proof]:
        worker: ChaosWorker = cluster.workers[name]
        worker.wanted = False
        process, lost_attempts = worker.process, await cluster.lost_attempts()
        assert process is not None
        await cluster.until_busy(worker)
        at = clock()
        worker.signal(number)

        async def happened() -> bool:
            struck = process.returncode == -number if number == signal.SIGKILL else state_of(process.pid) == "T"
            return struck and await cluster.lost_attempts() > lost_attempts

        return at, happened

    return strike


async def reset_links(cluster: ChaosCluster) -> tuple[float, Proof]:
    at = clock()
    struck = sum(worker.data.reset() for worker in cluster.by_role("decode"))

    async def happened() -> bool:
        return struck > 0

    return at, happened


async def swallow_link(cluster: ChaosCluster) -> tuple[float, Proof]:
    """Black-hole the pair prefill-0 and decode-0 from now on."""
    at = clock()
    proxy = cluster.workers["decode-0"].data
    proxy.only = f"{cluster.workers['prefill-0'].incarnation}|"
    proxy.black_hole = True

    async def happened() -> bool:
        return proxy.done["black_hole"] > 0

    return at, happened


async def rolling_restart(cluster: ChaosCluster) -> tuple[float, Proof]:
    """Stop every worker with SIGTERM and start it again, one after another."""
    at, codes = clock(), []
    for worker in cluster.workers.values():
        process = worker.process
        assert process is not None and worker.reading is not None
        worker.wanted = False
        worker.signal(signal.SIGTERM)
        codes.append(await process.wait())
        await worker.reading
        await cluster.start_worker(worker)
        worker.wanted = True
        await cluster.until_ready()

    async def happened() -> bool:
        return codes == [0] * len(cluster.workers)

    return at, happened


SCENARIOS: dict[str, tuple[Break | None, float]] = {
    "no fault": (None, 0.0),
    "SIGKILL of one decode worker": (signalled("decode-0", signal.SIGKILL), KILLED_S),
    "SIGKILL of one prefill worker": (signalled("prefill-0", signal.SIGKILL), KILLED_S),
    "SIGSTOP of one decode worker": (signalled("decode-0", signal.SIGSTOP), STOPPED_S),
    "SIGSTOP of one prefill worker": (signalled("prefill-0", signal.SIGSTOP), STOPPED_S),
    "reset of every P-D link": (reset_links, KILLED_S),
    "black hole between one pair": (swallow_link, STOPPED_S),
    "rolling restart of every worker": (rolling_restart, DRAINED_S),
}
COLOCATED: dict[str, tuple[Break | None, float]] = {
    "SIGKILL of one of two colocated workers": (signalled("colocated-0", signal.SIGKILL), KILLED_S),
    "SIGSTOP of one of two colocated workers": (signalled("colocated-0", signal.SIGSTOP), STOPPED_S),
}
LOAD_FLAGS = ("--max-num-seqs", "64", "--step-s", "0.01", "--blocks", "2048", "--max-num-batched-tokens", "256")
LINKS = {"zmq": "ZeroMQ", "shm": "shared memory"}


async def load(directory: Path, *, requests: int, at_once: int, only: str = "") -> list[LoadFigures]:
    """Run every scenario in turn: in one cluster per link and one with colocated workers, repaired between them."""
    figures: list[LoadFigures] = []
    knobs = {"requests": requests, "at_once": at_once}
    for link, name in LINKS.items():
        scenarios = {f"{each}, {name}": fault for each, fault in SCENARIOS.items() if only in f"{each}, {name}"}
        if scenarios:
            async with ChaosCluster.running(directory / link, flags=(*LOAD_FLAGS, "--kv-transport", link)) as cluster:
                assert await cluster.links() == {link}
                figures += await _in_turn(cluster, scenarios, **knobs)
    if scenarios := {name: fault for name, fault in COLOCATED.items() if only in name}:
        pools = {"prefills": 0, "decodes": 0, "colocated": 2}
        async with ChaosCluster.running(directory / "colocated", flags=LOAD_FLAGS, **pools) as cluster:
            figures += await _in_turn(cluster, scenarios, **knobs)
    return figures


async def _in_turn(
    cluster: ChaosCluster, scenarios: Mapping[str, tuple[Break | None, float]], *, requests: int, at_once: int
) -> list[LoadFigures]:
    async def once(name: str, breaking: Break | None, gap: float) -> LoadFigures:
        for worker in cluster.workers.values():
            worker.command(step_s=0.01)
        count = requests * (3 if breaking is rolling_restart else 1)  # the load must outlast four restarts
        done = await scenario(cluster, name, breaking, requests=count, at_once=at_once, allowed_gap_s=gap)
        done.free_s += await cluster.until_unmapped(HELD_S)
        await cluster.repair()
        return done

    figures = []
    for name, (breaking, gap) in scenarios.items():
        figures.append(await undisturbed(partial(once, name, breaking, gap), only_late))
        print(figures[-1].row(), flush=True)
    return figures


async def tampered(directory: Path, *, requests: int, at_once: int, rate: float) -> list[LoadFigures]:
    """Run a load during which frames are corrupted, truncated, dropped, duplicated and reordered, at ``rate`` each."""
    actions: tuple[Action, ...] = ("corrupt", "truncate", "drop", "duplicate", "reorder")
    async with ChaosCluster.running(directory / "frames", flags=(*LOAD_FLAGS, "--kv-transport", "zmq")) as cluster:
        for worker in cluster.by_role("decode"):
            worker.data.rules += [Rule(action, is_frame, rate=rate) for action in actions]
        name = f"frames broken, {rate:.0%} of each kind"
        figures = await scenario(cluster, name, None, requests=requests, at_once=at_once, allowed_gap_s=0.0)
        for worker in cluster.by_role("decode"):
            figures.faults.update({action: worker.data.done[action] for action in actions})
        missing = [action for action in actions if not figures.faults[action]]
        if missing:
            figures.wrong.append(f"never happened: {missing}")
        print(figures.row(), flush=True)
        return [figures]
