"""Configuration of ``tandem bench mock-server``."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.options import PORT, SWITCH, option


@dataclass(frozen=True, kw_only=True)
class BenchMockServerConfig:
    """``tandem bench mock-server``: a server that answers on a scripted schedule, without a model."""

    port: int = option(0, "port to listen on; 0 is any free one, whose URL is printed", PORT, "network and keys")
    role_first: bool = option(False, "begin a chat with a chunk that has only a role", SWITCH, "load")
