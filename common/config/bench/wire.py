"""Configuration of ``tandem bench wire``."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.bench.shared import SaveOption
from common.config.options import count, option


@dataclass(frozen=True, kw_only=True)
class BenchWireConfig(SaveOption):
    """``tandem bench wire``: KV transfer rate between two processes, by link."""

    tokens: int = option(2048, "tokens per transfer, 128 KiB each", count(1, 1 << 16), "load")
    repeats: int = option(10, "number of measured transfers per link", count(1), "load")
