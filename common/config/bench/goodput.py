"""Configuration of ``tandem bench goodput``."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.bench.shared import DEFAULT_OBJECTIVES, LoadOptions, TargetOptions
from common.config.options import (
    LIST,
    RATES,
    decimal,
    option,
)
from common.core.errors import StartError


@dataclass(frozen=True, kw_only=True)
class BenchGoodputConfig(TargetOptions, LoadOptions):
    """``tandem bench goodput``: finds the highest request rate at which most requests meet the objectives."""

    goodput: str = option(
        DEFAULT_OBJECTIVES, "objectives in ms, or as multiples of the unloaded median: ttft:5x,tpot:3x", LIST, "results"
    )
    attainment: float = option(0.9, "share of requests that must be inside them", decimal(0.01, 1), "results")
    rates: tuple[float, ...] | None = option(
        None, "requests per second to try", RATES, "load", shown_default="searched for"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_concurrency is not None:
            why = "no objective counts what waits in the client, so no rate would ever be too high"
            raise StartError("--max-concurrency cannot be given here", why, "limit the server (--max-num-seqs)")
