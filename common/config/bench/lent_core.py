"""Configuration of ``tandem bench lent-core``."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config.bench.shared import SaveOption
from common.config.options import count, option
from common.config.shared import MODEL


@dataclass(frozen=True, kw_only=True)
class BenchLentCoreConfig(SaveOption):
    """``tandem bench lent-core``: engine steps with and without a core lent by an idle worker."""

    model: str = field(metadata=MODEL)
    repeats: int = option(15, "number of measured steps of each kind; the median is shown", count(1), "load")
