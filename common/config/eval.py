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
        None,
        "model to evaluate, one of those that the server lists",
        TEXT,
        "evaluation",
        shown_default="the server's first",
    )
    golden: str | None = option(
        None, "file of the golden set, JSON lines", TEXT, "evaluation", shown_default="the built-in model's"
    )
    skills: str | None = option(None, "skills to test, separated by commas", TEXT, "evaluation", shown_default="all")
    concurrency: int = option(4, "maximum number of requests in flight", count(1), "evaluation")
    save: str | None = option(None, "JSON file to save the results in, for example as a baseline", TEXT, "evaluation")
    compare: str | None = option(
        None, "baseline file to compare with; the exit code is 1 if a score drops", TEXT, "evaluation"
    )
    tolerance: float = option(
        0.01, "largest accepted drop of the total score, as a fraction from 0 to 1", decimal(0, 1), "evaluation"
    )
    skill_tolerance: float = option(
        0.05, "largest accepted drop of the score of one skill, as a fraction from 0 to 1", decimal(0, 1), "evaluation"
    )
    failures: int = option(0, "number of wrong answers to print", count(0), "evaluation")
