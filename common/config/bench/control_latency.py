"""Configuration of ``tandem bench control-latency``."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.bench.shared import SaveOption
from common.config.options import SWITCH, count, decimal, option


@dataclass(frozen=True, kw_only=True)
class BenchControlLatencyConfig(SaveOption):
    """``tandem bench control-latency``: round trips of control messages while KV streams."""

    mib: int = option(1024, "MiB of KV to stream", count(1), "load")
    idle_s: float = option(2.0, "seconds to measure without KV", decimal(0.1, 3600, "SECONDS"), "load")
    encrypted: bool = option(False, "encrypt control messages and KV", SWITCH, "load")
