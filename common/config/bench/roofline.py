"""Configuration of ``tandem bench roofline``."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config.bench.shared import LimitOptions
from common.config.shared import MODEL


@dataclass(frozen=True, kw_only=True)
class BenchRooflineConfig(LimitOptions):
    """``tandem bench roofline``: measures the limits of this machine."""

    model: str = field(metadata=MODEL)
