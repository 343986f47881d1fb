"""Configuration of ``tandem bench quality``."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config.bench.shared import SaveOption
from common.config.options import TEXT, option
from common.config.shared import MODEL


@dataclass(frozen=True, kw_only=True)
class BenchQualityConfig(SaveOption):
    """``tandem bench quality``: perplexity and agreement of bfloat16, int8 and fp8 (weights, KV, both) with float32."""

    model: str = field(metadata=MODEL)
    golden: str | None = option(
        None, "file of the golden set, JSON lines with reference answers", TEXT, "evaluation",
        shown_default="the built-in model's",
    )  # fmt: skip
    text: str | None = option(
        None, "text file that is predicted, token by token, in pieces of 512, instead of the golden answers", TEXT,
        "evaluation", shown_default="the golden answers",
    )  # fmt: skip
