"""Changes the number of prefill and decode workers of a running ``tandem up``."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from common.config.coordinator import CoordinatorConfig
from common.config.up import UpConfig
from common.core.errors import StartError
from common.net.messages import Role
from common.platform.gpu import Gpu
from deploy.launcher.child import ChildProcess
from deploy.launcher.children import Children, place_of, role_of
from deploy.launcher.fleet import PlannedWorker
from deploy.launcher.hosts import Hosts
from deploy.launcher.ipc import Pools
from deploy.launcher.placement import CorePlacement
from deploy.launcher.screen import Screen, WorkerFacts

LEAVE_GRACE_S = 5.0
"""Time that a process has to exit after the drain timeout before it is killed."""


def leaves_first(child: ChildProcess) -> tuple[bool, bool, int]:
    """Sort key for scaling down: first workers that are down, then those that are restarting, then ready ones, the
    highest index first. A ready worker is not removed in favor of one that may never become ready."""
    return child.serving() is not None, child.running(), -int(child.label.rpartition("-")[2])


class Scaling:
    """Starts and drains workers among ``children``. ``make_worker`` returns a planned worker as one of so many, not
    started yet. ``why_not`` returns why the pools cannot be changed now, "" if they can."""

    def __init__(
        self,
        config: UpConfig,
        children: Children,
        placement: CorePlacement,
        screen: Screen,
        make_worker: Callable[[PlannedWorker, int], ChildProcess],
        why_not: Callable[[], str],
        hosts: Hosts,
    ) -> None:
        self._config, self._children, self._placement, self._screen = config, children, placement, screen
        self._make_worker, self._why_not, self._hosts = make_worker, why_not, hosts
        self.grown = asyncio.Event()
        """Set when a new worker is ready: from then on its failure concerns the supervisor."""
        self._changing = asyncio.Lock()
        self._coming: list[ChildProcess] = []
        """Workers that are still starting, or about to be started."""

    async def scale(self, prefill: int | None, decode: int | None) -> Pools:
        """Resize the pools and return their sizes. Raises StartError if that is not possible.

        New workers are started before others are drained, which have the usual drain timeout. Changes run one at a
        time, but a new request at once ends workers that are still starting and that it does not want; the request that
        started them fails. A start that hangs can therefore be undone, and repeating a request has no effect.
        """
        self._give_up(self._checked(prefill, decode))
        async with self._changing:
            try:
                return await self._change(self._checked(prefill, decode))
            finally:  # a restarted coordinator must expect the current number of workers
                coordinator = self._children.coordinator
                assert isinstance(coordinator.config, CoordinatorConfig)
                coordinator.config = replace(
                    coordinator.config,
                    expect_prefill=len(self._pool("prefill")),
                    expect_decode=len(self._pool("decode")),
                )

    def _pool(self, role: Role) -> list[ChildProcess]:
        """Return the workers of ``role``, those about to be started included."""
        later = [child for child in self._coming if child not in self._children.workers]
        return self._children.of_role(role) + [child for child in later if role_of(child) == role]

    def _checked(self, prefill: int | None, decode: int | None) -> dict[Role, int]:
        """Return the requested pool sizes, with the current size for None. Raises StartError if they are not possible
        now."""
        if when := self._why_not():
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

    def _give_up(self, wanted: Mapping[Role, int]) -> None:
        """Kill the last of the workers that are still starting, as far as their pool would exceed ``wanted``."""
        for role, count in wanted.items():
            coming = [child for child in self._coming if role_of(child) == role]
            ready = [child for child in self._pool(role) if child not in coming]
            for child in coming[max(0, count - len(ready)) :]:
                child.send(signal.SIGKILL)

    async def _change(self, wanted: Mapping[Role, int]) -> Pools:
        gpus = await asyncio.to_thread(self._hosts.gpus)
        coming, leaving = self._difference(wanted, gpus)
        places = [place_of(child, gpus) for child in coming]
        await asyncio.to_thread(self._hosts.check, places, len(self._children.workers) + len(coming))
        self._screen.fact("scaling to " + ", ".join(f"{role} {count}" for role, count in wanted.items()))
        at_once = asyncio.Semaphore(self._hosts.starts_at_once)

        async def grow(child: ChildProcess) -> None:
            async with at_once:
                await self._grow(child)

        children = self._children
        self._coming = list(coming)
        self._placement.settle(children.coordinator, [*children.workers, *coming])
        try:
            results = await asyncio.gather(*map(grow, coming), return_exceptions=True)
        finally:
            self._coming = []
        await asyncio.gather(*map(self._shrink, leaving))
        self._placement.settle(children.coordinator, children.workers)
        for failure in results:
            if isinstance(failure, BaseException):
                raise failure
        sizes = len(self._pool("prefill")), len(self._pool("decode"))
        self._screen.fact(f"scaled: prefill {sizes[0]}, decode {sizes[1]}")
        return sizes

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
        workers = self._children.workers
        staying = [child.share for child in workers if child not in leaving]
        pinned = [child.visible_gpus for child in workers if child.visible_gpus]
        coming = self._hosts.plan(names, pinned, staying, gpus)
        return [self._make_worker(member, len(staying) + len(coming)) for member in coming], leaving

    async def _grow(self, child: ChildProcess) -> None:
        """Start a worker and wait until it is ready. Raises StartError and forgets it if it cannot start, or if a later
        scale request has ended it."""
        self._children.workers.append(child)
        keeper = self._children.keep(child)
        await asyncio.wait((keeper, child.facts), return_when=asyncio.FIRST_COMPLETED)
        if keeper.done() and not child.facts.done():
            self._children.forget(child)
            self._hosts.release(child.label)
            await keeper
            raise StartError(
                f"{child.label} did not start", "a later request to scale removed it", "look at GET /admin/workers"
            )
        self._coming.remove(child)
        self.grown.set()
        facts = WorkerFacts(child.label, f"cores {child.share.cpus}" if child.share.cpus else "", child.facts.result())
        self._screen.fact(f"{child.label} is ready: {facts.budget} ({facts.compute})")

    async def _shrink(self, child: ChildProcess) -> None:
        """Drain a worker and wait until it has exited; kill it after the drain timeout. One that waits for its restart
        has exited already."""
        child.send(signal.SIGTERM)
        keeper = self._children.keeper(child)
        _, late = await asyncio.wait((keeper,), timeout=self._config.drain_timeout + LEAVE_GRACE_S)
        if late:
            child.send(signal.SIGKILL)
            await asyncio.wait((keeper,))
        self._children.forget(child)
        self._hosts.release(child.label)
        self._screen.fact(f"{child.label} has stopped")
