"""Configuration of ``tandem bench crosscheck``."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.bench.shared import SaveOption
from common.config.options import TEXT, option


@dataclass(frozen=True, kw_only=True)
class BenchCrosscheckConfig(SaveOption):
    """``tandem bench crosscheck``: whether other load generators report what ``tandem bench serve`` reports."""

    vllm: str | None = option(None, "path of an installed vllm program", TEXT, "systems", shown_default="not checked")
    guidellm: str | None = option(
        None, "path of an installed guidellm program", TEXT, "systems", shown_default="not checked"
    )
