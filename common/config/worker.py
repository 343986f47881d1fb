"""Configuration of ``tandem prefill`` and ``tandem decode``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.config.engine import PLAIN_TRANSPORTS, EngineOptions
from common.config.options import (
    ADDRESS,
    PORT,
    TEXT,
    count,
    one_of,
    option,
)
from common.config.shared import DEFAULT_CONTROL_PORT, ClusterOptions, ModelOptions, ProcessOptions, check_cluster
from common.core.errors import StartError
from common.core.ids import MAX_NAME_BYTES
from common.net.hosts import is_loopback
from common.net.keys import ClusterKeys
from common.net.messages import Role

KvEncryption = Literal["curve", "none"]


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(ModelOptions, EngineOptions, ClusterOptions, ProcessOptions):
    """A prefill, decode or colocated worker."""

    role: Role
    coordinator: str = option(
        f"127.0.0.1:{DEFAULT_CONTROL_PORT}", "address of the coordinator's control port", ADDRESS, "network and keys"
    )
    name: str | None = option(
        None,
        "name of this worker, unique in the cluster",
        TEXT,
        "network and keys",
        shown_default="its role, host and process id",
    )
    host: str = option(
        "127.0.0.1", "address at which other workers reach this one for KV hand-offs", TEXT, "network and keys"
    )
    health_port: int | None = option(
        None,
        "port on --host on which GET /health and GET /ready answer an orchestrator's probes, without a key; 0 picks a "
        "free one",
        PORT,
        "network and keys",
        shown_default="none: no such port",
    )
    kv_encryption: KvEncryption | None = option(
        None,
        "encryption of KV that travels over the network: curve, or none, which only authenticates both "
        "ends of each hand-off",
        one_of("curve", "none"),
        "transfer",
        shown_default="curve with --cluster-key-file, else none",
    )
    workers_on_host: int = option(
        1,
        "number of workers on this machine, among which the default memory and threads are divided",
        count(1, 4096),
        "memory",
    )
    workers_on_gpu: int = option(
        1,
        "number of workers that share this one's GPU, among which --gpu-memory-utilization is divided",
        count(1, 4096),
        "memory",
    )

    def __post_init__(self) -> None:
        if self.name is not None and len(self.name.encode()) > MAX_NAME_BYTES:
            raise StartError(
                f"--name {self.name[:32]}... is too long",
                f"a worker's name has at most {MAX_NAME_BYTES} bytes",
                "give a shorter one",
            )

    def check_binds(self, keys: ClusterKeys | None = None) -> None:
        """Raise StartError if this worker would communicate in plain text beyond this machine and this is not
        explicitly allowed. ``keys`` are those that a launcher gave this process, instead of a file."""
        keys = keys or self.keys_of(self.role)
        if self.kv_encryption == "curve" and keys is None:
            raise StartError(
                "--kv-encryption curve needs keys",
                "workers cannot authenticate each other without keys",
                "run tandem keygen and give --cluster-key-file",
            )
        accepted = self.insecure_cluster and is_loopback(self.host) and is_loopback(self._dialled)
        if self.kv_transport in PLAIN_TRANSPORTS and self.encrypts_kv(keys) and not accepted:
            raise StartError(
                f"--kv-transport {self.kv_transport} cannot encrypt KV",
                f"{PLAIN_TRANSPORTS[self.kv_transport]} sends it in plain text, and there are cluster keys",
                "give --kv-encryption none on all prefill and decode workers, or another --kv-transport",
            )
        for host, flag in ((self.host, "--host"), (self._dialled, "--coordinator")):
            check_cluster(host, flag, self.insecure_cluster or keys is not None)

    @property
    def out_of_reach(self) -> bool:
        """Whether prefill workers of other machines may exist that cannot send KV here: the coordinator is on another
        machine, but hand-offs arrive on loopback."""
        return self.role != "prefill" and is_loopback(self.host) and not is_loopback(self._dialled)

    @property
    def _dialled(self) -> str:
        return self.coordinator.rpartition(":")[0]

    def encrypts_kv(self, keys: ClusterKeys | None) -> bool:
        """Return whether a worker with these keys encrypts KV."""
        return keys is not None and self.kv_encryption != "none"
