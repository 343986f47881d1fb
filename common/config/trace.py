"""Configuration of ``tandem trace``."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.shared import ClientOptions


@dataclass(frozen=True, kw_only=True)
class TraceConfig(ClientOptions):
    """``tandem trace``: a client of a running coordinator."""
