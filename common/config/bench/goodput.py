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
        DEFAULT_OBJECTIVES,
        "latency objectives in ms, or as multiples of the unloaded median such as ttft:5x,tpot:3x",
        LIST,
        "results",
    )
    attainment: float = option(
        0.9, "fraction of requests that must meet the objectives, from 0.01 to 1", decimal(0.01, 1), "results"
    )
    rates: tuple[float, ...] | None = option(
        None, "request rates to try, per second", RATES, "load", shown_default="found by a search"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_concurrency is not None:
            why = "the objectives do not count the time that requests wait in the client, so no rate would be too high"
            raise StartError("--max-concurrency cannot be given here", why, "limit the server (--max-num-seqs)")
