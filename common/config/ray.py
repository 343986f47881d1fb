"""Options of ``tandem up --ray``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from common.config.options import SECONDS, OptionKind, count, option
from common.net.hosts import parse_address
from common.net.messages import Role

_RESERVED = ("CPU", "GPU", "memory", "object_store_memory")


def _parse_ray(text: str) -> str:
    if "/" in text:  # ray:// is a client whose machine is no node
        raise ValueError(text)
    if text != "auto":
        parse_address(text)
    return text


def _parse_of_roles(check: Callable[[str, str], object]) -> Callable[[str], dict[str, str]]:
    """Return the parser of lines ``[ROLE:]NAME=VALUE``; ``check`` raises ValueError for a name or value that cannot
    be."""

    def parse(text: str) -> dict[str, str]:
        pairs = dict(line.strip().split("=", 1) for line in text.splitlines() if line.strip())
        for name, value in pairs.items():
            role, colon, rest = name.rpartition(":")
            if not (rest and value) or (colon and role not in get_args(Role)):
                raise ValueError(text)
            check(rest, value)
        if not pairs:
            raise ValueError(text)
        return pairs

    return parse


def _check_amount(name: str, value: str) -> None:
    if name in _RESERVED or not 0 < float(value) < 1e9:
        raise ValueError(value)


RAY = OptionKind("ADDRESS", "auto or an address such as 10.0.0.1:6379", _parse_ray, bare="auto")
RESOURCES = OptionKind(
    "[ROLE:]NAME=AMOUNT",
    "a custom resource and its amount, such as fast_disk=1 or decode:l4=0.5; several: the flag again (in a variable or "
    "file: by lines)",
    _parse_of_roles(_check_amount),
    "\n",
)
LABELS = OptionKind(
    "[ROLE:]LABEL=VALUE",
    "a label and its value, such as zone=a or prefill:ray.io/accelerator-type=H100; several: the flag again (in a "
    "variable or file: by lines)",
    _parse_of_roles(lambda name, value: None),
    "\n",
)


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Where ``tandem up`` runs its processes in a Ray cluster, and what each worker reserves there."""

    ray: str | None = option(
        None,
        "run the processes on the nodes of the Ray cluster at this address; without one, of that which runs on this "
        "machine",
        RAY,
        "ray",
        shown_default="on this machine, without Ray",
    )
    ray_cpus: int = option(
        1, "number of CPUs that each worker, or each of its ranks, reserves and computes with", count(1, 4096), "ray"
    )
    ray_resources: dict[str, str] | None = option(
        None, "custom resources that each worker, or each of ROLE, reserves", RESOURCES, "ray"
    )
    ray_labels: dict[str, str] | None = option(
        None, "labels that the node of each worker, or of each of ROLE, must have", LABELS, "ray"
    )
    ray_timeout: float = option(
        300.0, "seconds to wait for room for new workers, such as nodes that an autoscaler adds", SECONDS, "ray"
    )
