"""The nodes of a Ray cluster as :class:`deploy.launcher.hosts.Hosts`: placement groups, and the actors in them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common.config.up import UpConfig
from common.config.worker import WorkerConfig
from common.core.errors import StartError
from common.net.hosts import bracketed
from common.net.messages import Role
from common.platform.gpu import Gpu
from deploy.launcher.cores import CoreShare
from deploy.launcher.fleet import PlannedWorker
from deploy.launcher.gpus import Place
from deploy.launcher.hosts import Start
from deploy.launcher.process import ChildSpec
from deploy.ray import placement
from deploy.ray.actor import Launch, NodeFacts, version
from deploy.ray.placement import Group
from deploy.ray.remote import Actor, RemoteProcess
from deploy.ray.session import Session

MAX_LAUNCH_BYTES = 64 << 10
"""Maximum size of a launch message with its variables. Ray puts arguments of 100 KiB and more into its object store,
where other processes of the node can read them."""
_PASSED_ON = ("HF_", "OTEL_", "TANDEM_CACHE")
"""Prefixes of the variables of this process that the coordinator gets too; it runs on the same node."""


class RayHosts:
    """Places the coordinator, and each worker or pair of workers, in a placement group of its own."""

    starts_at_once = 4096  # each on its own CPUs

    def __init__(self, config: UpConfig, session: Session, on_gpus: bool) -> None:
        self._config, self._session, self._on_gpus = config, session, on_gpus
        self.start: Start | None = self._start
        self._groups: dict[str, tuple[Group, Any]] = {}
        """The placement group of each process and Ray's handle of it, None until its first start."""
        self._started: set[str] = set()
        self._nodes: dict[str, str] = {}
        """The node of each worker."""
        self._placing: dict[str, asyncio.Future[None]] = {}
        """Resolved when the worker has a node for the first time, or gets none."""

    def gpus(self) -> list[Gpu]:
        """Return no GPUs: Ray counts those of its nodes."""
        return []

    def plan(
        self,
        names: Sequence[tuple[str, Role]],
        running: Sequence[str] = (),
        staying: Sequence[CoreShare] = (),
        gpus: Sequence[Gpu] = (),
    ) -> list[PlannedWorker]:
        """Return the workers called ``names``, paired as :func:`placement.groups`. The other arguments concern this
        machine only."""
        fresh = [name for name in names if name[0] not in self._groups]  # others' bundle is still there
        for group in placement.groups(self._config, fresh, self._on_gpus):
            self._groups |= dict.fromkeys(group.labels, (group, None))
        share = CoreShare(None, self._config.threads or self._config.ray_cpus)
        return [PlannedWorker(label, role, share, Place()) for label, role in names]

    def check(self, places: Sequence[Place], workers: int) -> None:
        """Check nothing: each worker checks the memory of its node."""

    def release(self, label: str) -> None:
        """Give up the place of a worker. A placement group is removed with the last worker of a pair."""
        self._started.discard(label)
        self._nodes.pop(label, None)
        self._placing.pop(label, None)
        group, _ = self._groups[label]
        if any(other in self._placing for other in group.labels):
            return
        _, handle = self._groups[group.labels[0]]
        for each in group.labels:
            self._groups.pop(each, None)
        if handle is not None:
            self._session.remove_group(handle)

    async def watch(self) -> None:
        """Raise StartError when the cluster is lost."""
        await self._session.watch()

    async def _start(self, child: ChildSpec) -> tuple[RemoteProcess, asyncio.StreamReader]:
        """Start a process in an actor. Returns at once; a lack of room for it is reported like a failed start."""
        label, config = child.label, child.config
        child = replace(child, lending=None, at_once=False)  # Ray shares the cores

        async def place() -> tuple[Actor, Launch]:
            if isinstance(config, WorkerConfig):
                actor, node = await self._placed(label)
                own = replace(child, config=self._on(node, config))
                return actor, bounded(Launch(own.message(), dict(child.environment)))
            passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
            environment = {**passed, **child.environment}
            launch = bounded(Launch(child.message(), environment, os.getcwd(), child.ipc_socket is not None))
            if label not in self._groups:
                self._groups[label] = (self._session.coordinator_group(label), None)
            return (await self._actor(label))[0], launch

        process = RemoteProcess(label, place, child.ipc_socket)
        return process, process.reports

    async def _placed(self, label: str) -> tuple[Actor, NodeFacts]:
        """Return the actor of a worker on its node, once all workers that are being started have a node. Raises
        StartError if there is no room at its first start; later it waits for some."""
        placing = self._placing.setdefault(label, asyncio.get_running_loop().create_future())
        try:
            actor, node = await self._actor(label)
            self._nodes[label] = node.id
        finally:
            if not placing.done():
                placing.set_result(None)
        try:
            if node.version != version():
                why = f"the node {node.address} has {node.version}, and this one {version()}"
                raise StartError(f"{label} would run another version of Tandem", why, "install the same on every node")
            await asyncio.gather(*map(asyncio.shield, self._placing.values()))
        except BaseException:
            actor.end()
            raise
        return actor, node

    async def _actor(self, label: str) -> tuple[Actor, NodeFacts]:
        """Return the actor of a process in its placement group, and its node. Waits for room as long as configured at
        its first start, and then raises StartError; later without limit."""
        patience_s = None if label in self._started else self._config.ray_timeout
        self._started.add(label)
        group, handle = self._groups[label]
        if handle is None:
            handle = self._session.group(group)
            self._groups |= dict.fromkeys(group.labels, (group, handle))
        return await self._session.actor_in(handle, group, label, patience_s)

    def _on(self, node: NodeFacts, config: WorkerConfig) -> WorkerConfig:
        """Return ``config`` for a worker on ``node``: the address at which it listens, its device, and the number of
        workers among which the memory of the node is divided."""
        beside = list(self._nodes.values()).count(node.id)
        device = "cuda" if self._on_gpus else "cpu"
        return replace(config, host=bracketed(node.address), device=device, workers_on_host=max(1, beside))


def bounded(launch: Launch) -> Launch:
    """Return ``launch``. Raises StartError if it is so large that Ray would not keep it in memory of two processes."""
    size = len(launch.message) + sum(len(name) + len(value) for name, value in launch.environment.items())
    if size > MAX_LAUNCH_BYTES:
        why = f"it takes {size} bytes, and what is longer than {MAX_LAUNCH_BYTES} would be stored by Ray"
        raise StartError("the configuration is too long for Ray", why, "give files instead of long texts")
    return launch
