"""The child processes of ``tandem up``: one coordinator and its workers, each with a task that keeps it running."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence

from common.config.worker import WorkerConfig
from common.net.messages import Role
from common.platform.gpu import Gpu
from deploy.launcher.child import ChildProcess
from deploy.launcher.gpus import Place


def role_of(child: ChildProcess) -> Role | None:
    """Return the role of a worker; None for the coordinator."""
    return child.config.role if isinstance(child.config, WorkerConfig) else None


def place_of(child: ChildProcess, gpus: Sequence[Gpu]) -> Place:
    """Return where ``child`` computes, some of ``gpus`` or the CPU."""
    if not isinstance(child.config, WorkerConfig):
        return Place()
    by_uuid = {each.uuid: each for each in gpus}
    own = tuple(by_uuid[uuid] for uuid in child.visible_gpus.split(",") if uuid in by_uuid)
    return Place(child.config.device, own, child.config.workers_on_gpu)


class Children:
    """The ``coordinator`` and the ``workers``; iterates over all of them, the coordinator first."""

    def __init__(self, coordinator: ChildProcess, workers: Sequence[ChildProcess]) -> None:
        self.coordinator, self.workers = coordinator, list(workers)
        self._keepers: dict[str, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[ChildProcess]:
        return iter((self.coordinator, *self.workers))

    def of_role(self, role: Role) -> list[ChildProcess]:
        """Return the workers of ``role``."""
        return [child for child in self.workers if role_of(child) == role]

    def keep(self, child: ChildProcess) -> asyncio.Task[None]:
        """Start ``child``; return the task that keeps it running, which raises StartError if it cannot start."""
        task = self._keepers[child.label] = asyncio.create_task(child.keep())
        return task

    def keeper(self, child: ChildProcess) -> asyncio.Task[None]:
        """Return the task that keeps ``child`` running."""
        return self._keepers[child.label]

    def forget(self, child: ChildProcess) -> None:
        """Remove a worker that has ended."""
        self.workers.remove(child)
        del self._keepers[child.label]

    def kill(self) -> None:
        """Send SIGKILL to all; none of them is replaced."""
        for child in self:
            child.send(signal.SIGKILL)

    async def ended(self) -> None:
        """Wait until no process is left, whatever their tasks raise."""
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
