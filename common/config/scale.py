"""Configuration of ``tandem scale``."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.options import (
    count,
    option,
)
from common.config.shared import ClientOptions


@dataclass(frozen=True, kw_only=True)
class ScaleConfig(ClientOptions):
    """``tandem scale``: a client of a running ``tandem up``. None leaves a pool as it is."""

    prefill: int | None = option(
        None, "new number of prefill workers", count(0, 4096), "pools", shown_default="unchanged"
    )
    decode: int | None = option(
        None, "new number of decode workers", count(0, 4096), "pools", shown_default="unchanged"
    )
