"""Configuration of ``tandem bench pages``."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.options import TEXT, option


@dataclass(frozen=True, kw_only=True)
class BenchPagesConfig:
    """``tandem bench pages``: the tables of the benchmark pages."""

    results: str = option("bench/results", "folder with one folder of saved figures per machine", TEXT, "results")
    docs: str = option("docs/benchmarks", "folder of the pages", TEXT, "results")
