"""Configuration of ``tandem top``."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.options import SWITCH, option
from common.config.shared import ClientOptions


@dataclass(frozen=True, kw_only=True)
class TopConfig(ClientOptions):
    """``tandem top``: a client of a running coordinator."""

    once: bool = option(
        False, "print one snapshot and exit, as without a terminal", SWITCH, "client", shown_default="off on a terminal"
    )
