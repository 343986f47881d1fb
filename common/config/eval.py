"""Configuration of ``tandem eval``."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.options import (
    TEXT,
    count,
    decimal,
    option,
)
from common.config.shared import ClientOptions, LabelOption


@dataclass(frozen=True, kw_only=True)
class EvalConfig(ClientOptions, LabelOption):
    """``tandem eval``: asks an OpenAI-compatible server the questions of a golden set and scores its answers."""

    served_model_name: str | None = option(
        None, "which of its models is asked", TEXT, "evaluation", shown_default="the first"
    )
    golden: str | None = option(
        None, "golden set to ask, JSON lines", TEXT, "evaluation", shown_default="the built-in model's"
    )
    skills: str | None = option(None, "ask only these, with commas between", TEXT, "evaluation", shown_default="all")
    concurrency: int = option(4, "requests in flight", count(1), "evaluation")
    save: str | None = option(None, "file to save the figures in, as a baseline", TEXT, "evaluation")
    compare: str | None = option(None, "baseline to compare with; a drop exits with 1", TEXT, "evaluation")
    tolerance: float = option(0.01, "drop of the share over all items that is no drop yet", decimal(0, 1), "evaluation")
    skill_tolerance: float = option(0.05, "the same for one skill", decimal(0, 1), "evaluation")
    failures: int = option(0, "wrong answers to show", count(0), "evaluation")
