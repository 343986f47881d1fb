"""Configuration of ``tandem bench handoff-cost``."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config.bench.shared import LONGEST_TOKENS, SaveOption
from common.config.options import count, option
from common.config.shared import MODEL


@dataclass(frozen=True, kw_only=True)
class BenchHandoffCostConfig(SaveOption):
    """``tandem bench handoff-cost``: CPU time that fault detection and verification add to a request."""

    model: str = field(metadata=MODEL)
    num_prompts: int = option(24, "number of requests per run", count(1), "load")
    max_concurrency: int = option(4, "maximum number of requests in flight", count(1), "load")
    random_input_len: int = option(512, "length of prompts, in tokens", count(1, LONGEST_TOKENS), "workload")
    random_output_len: int = option(64, "length of answers, in tokens", count(1, LONGEST_TOKENS), "workload")
