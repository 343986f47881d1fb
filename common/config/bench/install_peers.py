"""Configuration of ``tandem bench install-peers``."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config.options import positional


@dataclass(frozen=True, kw_only=True)
class BenchInstallPeersConfig:
    """``tandem bench install-peers FOLDER``: vLLM, to measure beside Tandem."""

    folder: str = field(
        metadata=positional("directory of the environment to create; takes about 3 minutes and 4 GB", "systems", "none")
    )
