"""Configuration of ``tandem up``, and how those of its coordinator and workers derive from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from common.config.coordinator import CoordinatorConfig
from common.config.engine import PLAIN_TRANSPORTS, EngineOptions
from common.config.options import (
    SWITCH,
    TEXT,
    count,
    option,
)
from common.config.ray import RayOptions
from common.config.serving import ServingOptions
from common.config.shared import ClusterOptions, ModelOptions, ProcessOptions
from common.config.worker import WorkerConfig
from common.core.errors import StartError
from common.core.ids import WorkerName
from common.net.hosts import bracketed, is_loopback, is_unspecified
from common.net.keys import ClusterKeys, Party
from common.net.keys import load as load_keys
from common.net.keys import mint as mint_keys
from common.net.messages import Role


@dataclass(frozen=True, kw_only=True)
class UpConfig(ModelOptions, EngineOptions, ServingOptions, ClusterOptions, ProcessOptions, RayOptions):
    """``tandem up``: a coordinator and its workers, on this machine or in a Ray cluster. :meth:`pools` says how many
    workers."""

    control_host: str = option(
        "127.0.0.1",
        "address to which workers connect, and on which workers of this machine receive KV hand-offs",
        TEXT,
        "network and keys",
    )
    prefill: int | None = option(
        None, "number of prefill workers", count(0, 4096), "pools", shown_default="1, or none with colocated workers"
    )
    decode: int | None = option(
        None, "number of decode workers", count(0, 4096), "pools", shown_default="1, or none with colocated workers"
    )
    colocated: int | None = option(
        None,
        "number of workers that do both prefill and decode, instead of the two pools",
        count(1, 4096),
        "pools",
        shown_default="1 on a single core, else none",
    )
    prefill_tensor_parallel_size: int | None = option(
        None, "ranks of each prefill worker", count(1, 64), "pools", shown_default="--tensor-parallel-size"
    )
    decode_tensor_parallel_size: int | None = option(
        None, "ranks of each decode worker", count(1, 64), "pools", shown_default="--tensor-parallel-size"
    )
    chat: bool = option(False, "start a chat in this terminal once the server is ready", SWITCH, "pools")
    lend_cores: bool = option(
        True, "let idle workers lend their cores to workers that compute many tokens", SWITCH, "cores"
    )

    def __post_init__(self) -> None:
        ServingOptions.__post_init__(self)
        if self.colocated is not None and (self.prefill or self.decode):
            raise StartError(
                "--colocated excludes --prefill and --decode",
                "a colocated worker does the work of both pools",
                "give either --colocated K, or --prefill N --decode M",
            )
        if self.decode == 0 and self.colocated is None:
            raise StartError(
                "--decode 0 cannot serve requests",
                "tokens after the first come from a decode worker",
                "give --decode 1 or more, or --colocated K",
            )

    def check_binds(self) -> None:
        """Raise StartError if the system would be open to other machines, or to other users of this one, and this is
        not explicitly allowed. The processes always have keys, so ``insecure_cluster`` matters only for what keys
        cannot protect (UCX, NCCL)."""
        self._check_http()
        self._check_ports(self.control_host)
        if self.kv_transport in PLAIN_TRANSPORTS and not (self.insecure_cluster and is_loopback(self.control_host)):
            raise StartError(
                f"--kv-transport {self.kv_transport} is not protected by keys",
                f"{PLAIN_TRANSPORTS[self.kv_transport]} accepts connections without keys: every user of this machine "
                "could read and write the workers' memory",
                "give another --kv-transport, or, where all users are trusted, --insecure-cluster on loopback",
            )
        if is_loopback(self.control_host):
            return
        if not (self.cluster_key_file or self.ray):  # a Ray cluster hands keys to the workers of other machines
            raise StartError(
                f"--control-host {self.control_host} needs --cluster-key-file",
                "workers on other machines need a key file to join, and none is given",
                "run tandem keygen, and give --cluster-key-file here and to those workers",
            )
        if is_unspecified(self.control_host):
            raise StartError(
                f"--control-host {self.control_host} is not an address to which other machines can connect",
                "decode workers on this machine receive hand-offs at that address and announce it to other workers",
                "give the address at which other machines reach this one",
            )

    def keys(self, *parties: Party) -> dict[Party, ClusterKeys]:
        """Return the keys of each of ``parties``, from the key file, else newly minted ones for all roles. Raises
        StartError as :func:`common.net.keys.load`."""
        if not self.cluster_key_file:
            return mint_keys()
        return {party: load_keys(Path(self.cluster_key_file), party) for party in parties}

    def pools(self, cores: int) -> tuple[int, int, int]:
        """Return the number of prefill, decode and colocated workers on a machine with ``cores`` usable cores: as
        configured, else one prefill and one decode worker, on a single core one colocated worker."""
        if self.colocated is not None:
            return 0, 0, self.colocated
        if self.prefill is None and self.decode is None and cores == 1:
            return 0, 0, 1
        return 1 if self.prefill is None else self.prefill, 1 if self.decode is None else self.decode, 0

    def ranks_of(self, role: Role) -> int:
        """Return the number of ranks of each worker of ``role``."""
        own = {"prefill": self.prefill_tensor_parallel_size, "decode": self.decode_tensor_parallel_size}.get(role)
        return own or self.tensor_parallel_size

    def for_coordinator(self, **changes: Any) -> CoordinatorConfig:
        """Return the configuration of the coordinator, which gets its keys from the launcher, not from the file."""
        return CoordinatorConfig(**_shared(self, CoordinatorConfig, {"cluster_key_file": None, **changes}))

    def for_worker(self, role: Role, name: WorkerName, **changes: Any) -> WorkerConfig:
        """Return the configuration of a worker. Its data socket listens on the host of the control socket, and it gets
        its keys from the launcher, not from the file."""
        host = bracketed(self.control_host)
        mine: dict[str, Any] = {"role": role, "name": name, "host": host, "cluster_key_file": None}
        mine |= {"tensor_parallel_size": self.ranks_of(role), **changes}
        return WorkerConfig(**_shared(self, WorkerConfig, mine))


def _shared(config: UpConfig, other: type[Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``other`` that ``config`` has too, overridden by ``changes``."""
    mine = {item.name for item in fields(config)}
    return {item.name: getattr(config, item.name) for item in fields(other) if item.name in mine} | dict(changes)
