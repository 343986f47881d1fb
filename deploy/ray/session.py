"""The connection to a Ray cluster. The only module that calls Ray, apart from the actor's own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

from common.core.errors import StartError, reason
from common.net.hosts import parse_address
from deploy.ray.actor import Event, Launch, NodeFacts, ProcessActor
from deploy.ray.placement import Group, coordinator_group, needed, no_room
from deploy.ray.remote import ActorGone, ActorUnreachable

_CALLS = 8
"""Calls of an actor that run at the same time: a poll, a poll that was repeated, and short ones."""
CONNECT_S = 5.0
"""Time in which the head of a cluster must accept a connection."""
WATCH_S = 2.0
"""Interval at which the head and the node of this machine are watched."""
HEAD_LOST_S, NODE_LOST_S = 45.0, 5.0
"""Times after which a head or a node that cannot be reached counts as lost. A head may be restarted; Ray ends this
process when it has been away for 60 s."""
_RETRIES = "RAY_NUM_REDIS_GET_RETRIES"
"""How often Ray looks for a head that does not answer, 40 s each time; by default 20 times."""


@contextlib.contextmanager
def connected(address: str) -> Iterator[Session]:
    """Connect to the Ray cluster at ``address`` within the block; at its end all that was made in the cluster is
    removed. Raises StartError if Ray is not installed or the cluster cannot be used."""
    os.environ.setdefault(_RETRIES, "1")  # read when Ray is imported
    try:
        import ray
        import ray.exceptions
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise StartError("--ray needs the package ray", reason(error), "pip install 'tandem[ray]'") from error
    try:
        if address != "auto":
            host, port = parse_address(address)
            with socket.create_connection((host.strip("[]"), port), CONNECT_S):
                pass
        ray.init(address, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        where = "on this machine" if address == "auto" else f"at {address}"
        raise StartError(f"cannot use a Ray cluster {where}", reason(error), _todo(error)) from error
    try:
        yield Session(ray)
    finally:
        ray.shutdown()


def _todo(error: Exception) -> str:
    """Return what to do about an error of the start of Ray in this process."""
    if "Version mismatch" in str(error):
        return "install the same versions of Ray and Python on every node"
    if type(error) is ConnectionError:  # Ray's own: there is something at the address
        return "give the address of ray start --head; if the cluster has tokens, set RAY_AUTH_MODE and the token here"
    return "ray start --head on one machine and ray start --address on the others, then tandem up on one of them"


class Session:
    """A connection to a Ray cluster. ``node_id`` and ``address`` are those of this machine's node."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self.node_id: str = ray.get_runtime_context().get_node_id()
        self.address: str = ray.util.get_node_ip_address()
        self._class = ray.remote(ProcessActor)

    async def watch(self) -> None:
        """Wait until the head of the cluster or the node of this machine is lost, and raise StartError. Ray itself does
        not report either to a process that only waits for calls of actors."""
        head = self._ray.get_runtime_context().gcs_address
        node = f"{self.address}:{self._here()['NodeManagerPort']}"
        await asyncio.gather(
            lost(parse_address(head), HEAD_LOST_S, f"the head of the Ray cluster, {head}"),
            lost(parse_address(node), NODE_LOST_S, f"Ray's node of this machine, {node}"),
        )

    def _here(self) -> dict[str, Any]:
        """Return what Ray knows about the node of this machine."""
        found: dict[str, Any] = next(node for node in self._ray.nodes() if node["NodeID"] == self.node_id)
        return found

    def resources(self) -> dict[str, float]:
        """Return the resources of all nodes together."""
        return dict(self._ray.cluster_resources())

    def coordinator_group(self, label: str) -> Group:
        """Return the group of the coordinator, on this machine's node."""
        return coordinator_group(label, self.node_id, self._here()["Resources"])

    def group(self, group: Group) -> Any:
        """Return Ray's handle of a new placement group. Does not wait until there is room for it."""
        bundles = [each.amounts() for each in group.bundles]
        labels = [each.labels for each in group.bundles]
        more: dict[str, Any] = {"bundle_label_selector": labels} if any(labels) else {}
        try:
            return self._ray.util.placement_group(bundles, strategy="PACK", **more)
        except (TypeError, ValueError) as error:
            asked = "; ".join(map(needed, group.bundles))
            raise StartError(f"Ray refuses to place {asked}", reason(error), "correct --ray-labels") from error

    def remove_group(self, handle: Any) -> None:
        """Remove a placement group, and with it the actors that are still in it."""
        self._ray.util.remove_placement_group(handle)

    async def actor_in(
        self, handle: Any, group: Group, label: str, patience_s: float | None
    ) -> tuple[RayActor, NodeFacts]:
        """Return a new actor for ``label`` in its placement group, and its node. Raises StartError if there is no room
        within ``patience_s`` seconds; None waits without limit."""
        index = group.labels.index(label)
        bundle = group.bundles[index]
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=handle, placement_group_bundle_index=index
        )
        options = self._class.options(
            num_cpus=bundle.cpus,
            num_gpus=bundle.gpus,
            resources=bundle.resources or None,
            scheduling_strategy=strategy,
            max_concurrency=_CALLS,
            max_restarts=0,  # the launcher replaces it: a restarted actor would have no keys
            enable_task_events=False,
        )
        actor = RayActor(self._ray, options.remote(label))
        try:
            async with asyncio.timeout(patience_s):
                return actor, NodeFacts(*await actor.node())
        except TimeoutError:
            actor.end()
            raise no_room(group, patience_s or 0.0) from None
        except BaseException:
            actor.end()
            raise


async def lost(address: tuple[str, int], patience_s: float, what: str) -> None:
    """Raise StartError when ``address`` has not accepted a connection for ``patience_s`` seconds. ``what`` is there."""
    reached_at = time.monotonic()
    while True:
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(*address)
            writer.close()
            reached_at = time.monotonic()
        except OSError as error:  # a timeout is one
            if time.monotonic() - reached_at > patience_s:
                why = f"it has not accepted a connection for {patience_s:g} s ({reason(error)})"
                raise StartError(f"{what}, is lost", why, "start the cluster, then tandem up, again") from error
        await asyncio.sleep(WATCH_S)


class RayActor:
    """Calls of an actor. Each raises ActorGone or ActorUnreachable."""

    def __init__(self, ray: Any, handle: Any) -> None:
        self._ray, self._handle = ray, handle

    async def node(self) -> NodeFacts:
        """Return the node of the actor, as soon as it has one."""
        return NodeFacts(*await self._call("node"))

    async def start(self, launch: Launch) -> int:
        """As :meth:`deploy.ray.actor.ProcessHost.start`."""
        return int(await self._call("start", launch))

    async def poll(self, seen: int) -> list[Event]:
        """As :meth:`deploy.ray.actor.ProcessHost.poll`."""
        return [Event(*event) for event in await self._call("poll", seen)]

    async def write(self, data: bytes) -> None:
        """As :meth:`deploy.ray.actor.ProcessHost.write`."""
        await self._call("write", data)

    async def signal(self, number: int) -> None:
        """As :meth:`deploy.ray.actor.ProcessHost.signal`."""
        await self._call("signal", number)

    def end(self) -> None:
        """End the actor and its process. Returns without waiting."""
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._handle)

    async def _call(self, method: str, *arguments: object) -> Any:
        errors = self._ray.exceptions
        try:
            return await asyncio.wrap_future(getattr(self._handle, method).remote(*arguments).future())
        except errors.ActorUnavailableError as error:
            raise ActorUnreachable(reason(error)) from None
        except errors.RayError as error:
            raise ActorGone(_short(error)) from None


def _short(error: Exception) -> str:
    """Return what an error of Ray says about the cause, without ids, counters and advice."""
    if (cause := getattr(error, "cause", None)) is not None:  # what the method raised
        return f"{type(cause).__name__}: {cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = next((line for line in lines if "because" in line), lines[0] if lines else type(error).__name__)
    detail = re.search(r"exit detail: (.+?)(?:\.\s|\.?$)", line)
    return line.split(". ")[0].rstrip(".") + (f": {detail[1]}" if detail else "")
