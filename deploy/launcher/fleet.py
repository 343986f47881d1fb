"""Plans the workers of ``tandem up``: their number and names, and the cores and GPUs of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.config.up import UpConfig
from common.core.errors import StartError
from common.net.messages import Role
from common.platform.device import usable_gpus
from common.platform.gpu import Gpu
from deploy.launcher import cores
from deploy.launcher.gpus import Place, deal_ranks


class PlannedWorker(NamedTuple):
    """A planned worker: its name, role and cores, and the device that it computes on."""

    label: str
    role: Role
    share: cores.CoreShare
    place: Place


def plan(config: UpConfig, gpus: Sequence[Gpu] = ()) -> list[PlannedWorker]:
    """Return the workers to start, their cores and their places on ``gpus``. Raises StartError if ``--cpus`` names no
    usable core."""
    mine, quota = machine(config)
    prefill, decode, colocated = config.pools(min(len(mine), quota or len(mine)))
    counts: tuple[tuple[Role, int], ...] = (("prefill", prefill), ("decode", decode), ("colocated", colocated))
    names: list[tuple[str, Role]] = [(f"{role}-{index}", role) for role, count in counts for index in range(count)]
    ranks = [config.ranks_of(role) for _, role in names]
    shares = cores.deal(mine, sum(ranks), quota, config.threads)
    return planned_workers(names, ranks, shares, deal_ranks(gpus, ranks))


def planned_workers(
    names: Sequence[tuple[str, Role]], ranks: Sequence[int], shares: Sequence[cores.CoreShare], places: Sequence[Place]
) -> list[PlannedWorker]:
    """Return the workers called ``names`` at ``places``; ``shares`` are those of all their ranks, one worker after
    another."""
    rest = iter(shares)
    joined = [cores.joined([next(rest) for _ in range(count)]) for count in ranks]
    return [PlannedWorker(*name, share, place) for name, share, place in zip(names, joined, places, strict=True)]


def allowed_gpus(config: UpConfig) -> tuple[list[Gpu], str]:
    """Return the GPUs for workers, none for the CPU, and the reason, as :func:`usable_gpus`; if a worker has several
    ranks, ``cuda:N`` and the visible ones after it."""
    ranks = max(config.ranks_of(role) for role in ("prefill", "decode", "colocated"))
    return usable_gpus(config.device, and_after=ranks > 1)


def machine(config: UpConfig) -> tuple[list[int], int | None]:
    """Return the cores that workers may use, and the container's CPU limit in cores if there is one. Raises StartError
    if ``--cpus`` names no usable core."""
    allowed = cores.usable_cores()
    mine = [core for core in config.cores or allowed if core in allowed]
    if not mine:
        raise StartError(f"--cpus {config.cpus} names no usable core", f"usable are {list(allowed)}", "correct --cpus")
    return mine, cores.core_quota()
