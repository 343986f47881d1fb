"""Configuration of ``tandem bench pages``."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.options import TEXT, option


@dataclass(frozen=True, kw_only=True)
class BenchPagesConfig:
    """``tandem bench pages``: the tables of the benchmark pages."""

    results: str = option(
        "bench/results", "directory with one subdirectory of saved results per machine", TEXT, "results"
    )
    docs: str = option("docs/benchmarks", "directory of the benchmark pages", TEXT, "results")
