"""Configuration of ``tandem bench serve``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.config.bench.shared import ArrivalOptions, LoadOptions, RampStrategy, TargetOptions
from common.config.options import (
    LIST,
    NUMBERS,
    PAIRS,
    RATE,
    SWITCH,
    TEXT,
    one_of,
    option,
)
from common.config.shared import LabelOption
from common.core.errors import StartError


@dataclass(frozen=True, kw_only=True)
class BenchServeConfig(TargetOptions, ArrivalOptions, LoadOptions, LabelOption):
    """``tandem bench serve``: sends one run of load to an OpenAI-compatible server."""

    ramp_up_strategy: RampStrategy | None = option(
        None,
        "how the request rate grows during the run; needs --ramp-up-start-rps and --ramp-up-end-rps",
        one_of("linear", "exponential"),
        "load",
    )
    ramp_up_start_rps: float | None = option(None, "requests per second at the start of the ramp", RATE, "load")
    ramp_up_end_rps: float | None = option(None, "requests per second at the end of the ramp", RATE, "load")
    goodput: str | None = option(
        None, "latency objectives in ms, such as ttft:1000,tpot:40; metrics are ttft, tpot and e2el", LIST, "results"
    )
    metadata: dict[str, str] | None = option(None, "additional values to save with the results", PAIRS, "results")
    percentile_metrics: str = option(
        "ttft,tpot,itl,e2el,client_queue_time,e2el_including_client_queue",
        "metrics to show, separated by commas; client_queue_time needs --max-concurrency, "
        "e2el_including_client_queue also --request-rate",
        TEXT,
        "results",
    )
    metric_percentiles: tuple[float, ...] = option(
        (99.0,), "percentiles to show of each metric, separated by commas", NUMBERS, "results"
    )
    save_detailed: bool = option(False, "save every request too, not only the totals; needs --save", SWITCH, "results")

    @property
    def drawn(self) -> bool:
        return super().drawn or self.ramp_up_strategy is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        ramp = (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        if any(ramp) and not all(ramp):
            why = "a ramp needs a strategy, a start rate and an end rate"
            todo = "give --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps"
            raise StartError("the ramp is incomplete", why, todo)
        if any(ramp) and (math.isinf(ramp[1] or 0) or math.isinf(ramp[2] or 0)):
            raise StartError(
                "a ramp cannot have an infinite rate", "its requests need arrival times", "give finite rates"
            )
        if self.save_detailed and not self.save:
            raise StartError("--save-detailed needs --save", "no file is named", "give --save FILE")
        if any(not 0 <= percent <= 100 for percent in self.metric_percentiles):
            raise StartError("--metric-percentiles is out of range", "it takes 0 to 100", "correct it")
