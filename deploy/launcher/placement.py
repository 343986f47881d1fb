"""The cores of ``tandem up``: which ones workers lend each other, and on which ones the coordinator runs."""

from __future__ import annotations

from collections.abc import Sequence

from common.config.up import UpConfig
from common.config.worker import WorkerConfig
from common.platform.core_lease import CoreLease, Lending
from deploy.launcher import cores, fleet
from deploy.launcher.child import ChildProcess
from deploy.launcher.children import role_of
from deploy.launcher.fleet import PlannedWorker


class CorePlacement:
    """Lends cores between workers, and pins the coordinator to where its preempting threads disturb the least."""

    def __init__(self, config: UpConfig) -> None:
        self._config = config
        self._lent = CoreLease.create() if config.lend_cores else None
        self._piling_up = False
        self._homes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        """The coordinator's cores while prompts do not pile up, and while they do. None if the workers are not
        pinned."""

    def lending_of(self, member: PlannedWorker, config: WorkerConfig) -> Lending | None:
        """Return what ``member`` needs to lend and borrow cores; None if it does neither."""
        alone = config.tensor_parallel_size == 1 and member.place.gpu is None  # one process, which computes on the CPU
        if self._lent is None or member.share.cores is None or not alone:
            return None
        return Lending(self._lent.descriptor, tuple(fleet.machine(self._config)[0]))

    def settle(self, coordinator: ChildProcess, workers: Sequence[ChildProcess]) -> None:
        """Update core lending and the coordinator's cores for the new set of ``workers``. A worker may lend cores that
        it does not share."""
        if self._lent is not None:
            self._lent.settle(child.share.cores or () for child in workers)
        if all(child.share.cores for child in workers):  # else the workers are not pinned
            mine, everybody = fleet.machine(self._config)[0], [child.share for child in workers]
            beside_prompts, beside_streams = (
                cores.beside(mine, everybody, [child.share for child in workers if role_of(child) == undisturbed])
                for undisturbed in ("decode", "prefill")
            )
            self._homes = beside_prompts, beside_streams
            self._bind(coordinator)

    def place(self, coordinator: ChildProcess, deep: bool) -> None:
        """Pin the coordinator to the cores for the current load. Usually it shares cores with prefill workers, so that
        it delays no stream. While prompts pile up (``deep``), prefill is the bottleneck and it shares cores with decode
        workers."""
        self._piling_up = deep
        self._bind(coordinator)

    def _bind(self, coordinator: ChildProcess) -> None:
        if self._homes is not None:
            home = self._homes[self._piling_up]
            # real-time threads only where it cannot run on all cores: Linux does not move them to an idle core
            coordinator.bind(home, at_once=len(home) < len(fleet.machine(self._config)[0]))

    def close(self) -> None:
        """Unmap the shared memory of lent cores; all workers must have ended."""
        if self._lent is not None:
            self._lent.close()
