"""Configuration of ``tandem coordinator``."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.options import (
    SECONDS,
    TEXT,
    count,
    option,
)
from common.config.serving import ServingOptions
from common.config.shared import ClusterOptions, ModelOptions, ProcessOptions, check_cluster
from common.net.keys import ClusterKeys

STARTING_WAIT_S = 3.0
"""Default of ``--starting-wait``: three times what the workers of a previous coordinator need to join."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig(ModelOptions, ServingOptions, ClusterOptions, ProcessOptions):
    """``tandem coordinator``."""

    control_host: str = option("127.0.0.1", "address to which workers connect", TEXT, "network and keys")
    expect_prefill: int = option(
        0, "number of prefill workers that must have joined once before /ready reports ready", count(), "routing"
    )
    expect_decode: int = option(
        0, "number of decode workers that must have joined once before /ready reports ready", count(), "routing"
    )
    expect_colocated: int = option(
        0, "number of colocated workers that must have joined once before /ready reports ready", count(), "routing"
    )

    starting_wait: float = option(
        STARTING_WAIT_S,
        "seconds after the start in which requests wait for the first worker instead of failing: the workers of a "
        "previous coordinator come back within a second",
        SECONDS,
        "queue",
    )
    handover_time: float = option(
        0.0,
        "least number of seconds after SIGTERM in which requests are still accepted, while workers join another "
        "coordinator that listens at the same address; until they have, half of --drain-timeout is added; then this "
        "one drains",
        SECONDS,
        "queue",
    )

    def check_binds(self, keys: ClusterKeys | None = None) -> None:
        """Raise StartError if a socket would be open to other machines without keys and this is not explicitly allowed.
        ``keys`` are those that a launcher gave this process, instead of a file."""
        self._check_http()
        self._check_ports(self.control_host)
        keys = keys or self.keys_of("coordinator")
        check_cluster(self.control_host, "--control-host", self.insecure_cluster or keys is not None)
