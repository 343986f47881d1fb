"""Configuration of ``tandem bench grammar``."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config.bench.shared import SaveOption
from common.config.options import count, option
from common.config.shared import MODEL


@dataclass(frozen=True, kw_only=True)
class BenchGrammarConfig(SaveOption):
    """``tandem bench grammar``: the cost of token masks, and what hostile grammars do to the streams beside them."""

    model: str = field(metadata=MODEL)
    tokens: int = option(4000, "tokens of constrained output per grammar", count(1, 1 << 16), "load")
    rounds: int = option(10, "seconds of decode steps with and without each hostile grammar", count(1), "load")
    streams: int = option(8, "streams without a grammar", count(1, 64), "load")
    hostile: int = option(4, "sequences with a hostile grammar beside them", count(1, 64), "load")
