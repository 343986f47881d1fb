"""Options of what the coordinator reports about requests."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.options import SWITCH, option


@dataclass(frozen=True, kw_only=True)
class TelemetryOptions:
    """Options of access lines."""

    access_log: bool = option(False, "log a line for each answered request", SWITCH, "logs")
