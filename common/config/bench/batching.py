"""Configuration of ``tandem bench batching``."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.bench.shared import PromptOptions, RequestOptions, TargetOptions
from common.config.options import (
    count,
    option,
)
from common.config.shared import LabelOption


@dataclass(frozen=True, kw_only=True)
class BenchBatchingConfig(TargetOptions, RequestOptions, PromptOptions, LabelOption):
    """``tandem bench batching``: compares static with continuous batching on one server."""

    batch_size: int = option(8, "number of requests in a static batch", count(1), "load")
    runs: int = option(3, "number of rounds", count(1, 1000), "load")
