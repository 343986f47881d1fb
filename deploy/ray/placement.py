"""What each worker reserves in a Ray cluster, and which workers share a placement group. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.config.up import UpConfig
from common.core.errors import StartError
from common.net.messages import Role

NODE_ID = "ray.io/node-id"
"""The label with which Ray marks each node, by its id."""


class Bundle(NamedTuple):
    """The reservation of one process: ``cpus``, ``gpus``, custom ``resources``, and the ``labels`` that its node must
    have (label to selector, in Ray's syntax)."""

    cpus: int
    gpus: int
    resources: dict[str, float]
    labels: dict[str, str]

    def amounts(self) -> dict[str, float]:
        """Return the bundle as Ray's placement groups take it."""
        counted = {"CPU": float(self.cpus), "GPU": float(self.gpus)}
        return {name: amount for name, amount in counted.items() if amount} | self.resources


def needed(bundle: Bundle) -> str:
    """Return a bundle as text."""
    amounts = ", ".join(f"{name} {amount:g}" for name, amount in bundle.amounts().items())
    return amounts + "".join(f", {label}={value}" for label, value in bundle.labels.items())


@dataclass(frozen=True)
class Group:
    """A placement group: processes and their bundles, in the same order. Ray puts them on one node if one has room."""

    labels: tuple[str, ...]
    bundles: tuple[Bundle, ...]


def no_room(group: Group, waited_s: float) -> StartError:
    """Return the error for a group that Ray has not placed, which it does with all of its bundles or with none."""
    if NODE_ID in group.bundles[0].labels:
        wanted = [needed(group.bundles[0]._replace(labels={}))]
        why = f"this machine's node, on which it must run, has not had {wanted[0]} free"
        todo = "end what uses it, or run tandem up on another node"
    else:
        wanted = [f"{needed(each)} for {label}" for each, label in zip(group.bundles, group.labels, strict=True)]
        why, todo = f"no nodes have had {' and '.join(wanted)} free", "add nodes, reserve less, or start fewer workers"
    what = f"the Ray cluster has no room for {' and '.join(group.labels)}"
    return StartError(what, f"{why} for {waited_s:g} s", f"see ray status; {todo}")


def coordinator_group(label: str, node_id: str, resources: Mapping[str, float]) -> Group:
    """Return the group of the coordinator, on the node that has this id and these ``resources``: a CPU if it has any,
    else something of which it has plenty, since Ray refuses to reserve nothing."""
    if resources.get("CPU", 0) >= 1:
        return Group((label,), (Bundle(1, 0, {}, {NODE_ID: node_id}),))
    address = next(name for name in resources if name.startswith("node:") and name != "node:__internal_head__")
    return Group((label,), (Bundle(0, 0, {address: 0.001}, {NODE_ID: node_id}),))


def bundle(config: UpConfig, role: Role, on_gpus: bool) -> Bundle:
    """Return what a worker of ``role`` reserves: for each of its ranks ``--ray-cpus`` CPUs and, with ``on_gpus``, one
    GPU."""
    ranks = config.ranks_of(role)
    resources = {name: float(amount) for name, amount in _of_role(config.ray_resources or {}, role).items()}
    labels = _of_role(config.ray_labels or {}, role)
    return Bundle(config.ray_cpus * ranks, ranks if on_gpus else 0, resources, labels)


def _of_role(values: Mapping[str, str], role: Role) -> dict[str, str]:
    """Return the entries of ``values`` for every role, and those of ``role``, whose names begin with ``role:``."""
    common = {name: value for name, value in values.items() if ":" not in name}
    own = {name.partition(":")[2]: value for name, value in values.items() if name.partition(":")[0] == role}
    return common | own


def groups(config: UpConfig, names: Sequence[tuple[str, Role]], on_gpus: bool) -> list[Group]:
    """Return the placement groups of workers that are started together: the first prefill worker and the first decode
    worker share one, and so on; each worker that is left over has its own."""
    pools = [[name for name in names if name[1] == role] for role in ("prefill", "decode", "colocated")]
    pairs = min(len(pools[0]), len(pools[1]))
    together = [*zip(pools[0][:pairs], pools[1][:pairs], strict=True)]
    alone = [(name,) for pool in (pools[0][pairs:], pools[1][pairs:], pools[2]) for name in pool]
    return [
        Group(tuple(label for label, _ in each), tuple(bundle(config, role, on_gpus) for _, role in each))
        for each in (*together, *alone)
    ]


def on_gpus(config: UpConfig, cluster: Mapping[str, float]) -> bool:
    """Return whether workers compute on GPUs: as ``--device`` says, with ``auto`` if a node of the ``cluster``, whose
    resources these are, has any. Raises StartError for a device that only one machine has."""
    if config.device not in ("auto", "cpu", "cuda"):
        why = "Ray gives each worker its GPUs, and they are not those that another node counts"
        raise StartError(f"--device {config.device} excludes --ray", why, "give --device auto, cpu or cuda")
    return config.device == "cuda" or (config.device == "auto" and cluster.get("GPU", 0) > 0)


def check(config: UpConfig) -> None:
    """Raise StartError if an option cannot be used on several machines."""
    if config.cpus:
        why = "the cores of a node are numbered by themselves, and Ray counts them only"
        raise StartError("--cpus excludes --ray", why, "give --ray-cpus, the number of CPUs of each worker")
