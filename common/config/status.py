"""Configuration of ``tandem status``."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.options import SWITCH, option
from common.config.shared import ClientOptions


@dataclass(frozen=True, kw_only=True)
class StatusConfig(ClientOptions):
    """``tandem status``: a client of a running coordinator."""

    json: bool = option(False, "print one JSON object instead of text", SWITCH, "client")
