"""Where the processes of ``tandem up`` run: on this machine (:class:`ThisMachine`), or on those of a Ray cluster
(:mod:`deploy.ray`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from common.checkpoint.files import open_checkpoint
from common.config.up import UpConfig
from common.core.errors import StartError
from common.net.messages import Role
from common.platform.gpu import Gpu
from deploy.launcher import cores, fleet
from deploy.launcher.fleet import PlannedWorker
from deploy.launcher.gpus import Place, deal_ranks
from deploy.launcher.preflight import check_memory
from deploy.launcher.process import ChildSpec


class Running(Protocol):
    """A running process, as :class:`asyncio.subprocess.Process` describes one of this machine."""

    stdout: asyncio.StreamReader | None

    @property
    def pid(self) -> int:
        """Its process id on its machine."""

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""

    def send_signal(self, signal: int) -> None:
        """Send a signal to it."""

    def kill(self) -> None:
        """Send SIGKILL to it."""

    async def wait(self) -> int:
        """Wait until it has ended and return the exit code."""


Start = Callable[[ChildSpec], Awaitable[tuple[Running, asyncio.StreamReader]]]
"""Starts a process as :func:`deploy.launcher.process.start` does; returns it and the reading end of its status pipe."""


class Hosts(Protocol):
    """The machines on which processes run, and how they share them."""

    start: Start | None
    """Starts their processes; None: as children of this process."""
    starts_at_once: int
    """How many processes may start at the same time."""

    def gpus(self) -> list[Gpu]:
        """Return the GPUs of this machine that workers may use. Takes long."""

    def plan(
        self,
        names: Sequence[tuple[str, Role]],
        running: Sequence[str],
        staying: Sequence[cores.CoreShare],
        gpus: Sequence[Gpu],
    ) -> list[PlannedWorker]:
        """Return the workers called ``names`` beside those of the shares ``staying``; ``running`` are the GPUs that
        workers have. Raises StartError if there is no place for them."""

    def check(self, places: Sequence[Place], workers: int) -> None:
        """Check the memory for workers at ``places``, as of ``workers`` on this machine. Takes long. Raises
        StartError."""

    def release(self, label: str) -> None:
        """Give up the place of a worker that has ended for good."""

    async def watch(self) -> None:
        """Wait until the machines are lost together, and raise StartError."""


class ThisMachine:
    """Workers are children of this process and share the cores, GPUs and memory of this machine."""

    start: Start | None = None

    def __init__(self, config: UpConfig) -> None:
        self._config = config
        self.starts_at_once = os.cpu_count() or 1  # each uses a core

    def gpus(self) -> list[Gpu]:
        return fleet.allowed_gpus(self._config)[0]

    def plan(
        self,
        names: Sequence[tuple[str, Role]],
        running: Sequence[str],
        staying: Sequence[cores.CoreShare],
        gpus: Sequence[Gpu],
    ) -> list[PlannedWorker]:
        mine, quota = fleet.machine(self._config)
        ranks = [self._config.ranks_of(role) for _, role in names]
        shares = cores.deal_more(mine, staying, sum(ranks), quota, self._config.threads) if names else []
        if names and running and not gpus:
            todo = "look at nvidia-smi, and scale up when they are back"
            raise StartError("there is no GPU for more workers", "this machine's are gone", todo)
        return fleet.planned_workers(names, ranks, shares, deal_ranks(gpus, ranks, running))

    def check(self, places: Sequence[Place], workers: int) -> None:
        config = self._config
        if places:
            checkpoint = open_checkpoint(config.model, config.revision, config.trust_remote_code)
            check_memory(checkpoint, config, workers, places)

    def release(self, label: str) -> None:
        pass

    async def watch(self) -> None:
        await asyncio.Event().wait()  # this process ends with its machine
