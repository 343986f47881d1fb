"""Configuration of ``tandem bench install-peers``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from common.config.options import one_of, option, positional


@dataclass(frozen=True, kw_only=True)
class BenchInstallPeersConfig:
    """``tandem bench install-peers FOLDER``: vLLM or llama.cpp, to measure beside Tandem."""

    folder: str = field(
        metadata=positional(
            "directory of the environment to create; vLLM takes about 3 minutes and 4 GB", "systems", "none"
        )
    )
    peer: Literal["vllm", "llamacpp"] = option(
        "vllm",
        "what to install: vllm with NIXL, or llamacpp (a minute and 200 MB)",
        one_of("vllm", "llamacpp"),
        "systems",
    )
