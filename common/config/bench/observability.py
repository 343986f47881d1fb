"""Configuration of ``tandem bench observability``."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config.bench.shared import LONGEST_TOKENS, SaveOption
from common.config.options import TEXT, count, option
from common.config.shared import MODEL


@dataclass(frozen=True, kw_only=True)
class BenchObservabilityConfig(SaveOption):
    """``tandem bench observability``: what tracing, the live page and access lines cost the coordinator."""

    model: str = field(metadata=MODEL)
    rounds: int = option(10, "number of rounds, each with every setting in turn", count(1), "load")
    only: str | None = option(
        None,
        "settings beside plain, separated by commas: traces, page, access-lines, all",
        TEXT,
        "load",
        shown_default="each",
    )
    max_concurrency: int = option(64, "number of streams at a time", count(1), "load")
    random_input_len: int = option(64, "length of prompts, in tokens", count(1, LONGEST_TOKENS), "workload")
    random_output_len: int = option(512, "length of answers, in tokens", count(1, LONGEST_TOKENS), "workload")
