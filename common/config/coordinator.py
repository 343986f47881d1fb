"""Configuration of ``tandem coordinator``."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.options import (
    TEXT,
    count,
    option,
)
from common.config.serving import ServingOptions
from common.config.shared import ClusterOptions, ModelOptions, ProcessOptions, check_cluster
from common.net.keys import ClusterKeys


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

    def check_binds(self, keys: ClusterKeys | None = None) -> None:
        """Raise StartError if a socket would be open to other machines without keys and this is not explicitly allowed.
        ``keys`` are those that a launcher gave this process, instead of a file."""
        self._check_http()
        keys = keys or self.keys_of("coordinator")
        check_cluster(self.control_host, "--control-host", self.insecure_cluster or keys is not None)
