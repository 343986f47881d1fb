"""Configuration of ``tandem bench kernels``."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.bench.shared import LimitOptions
from common.config.engine import Dtype
from common.config.options import (
    TEXT,
    one_of,
    option,
)


@dataclass(frozen=True, kw_only=True)
class BenchKernelsConfig(LimitOptions):
    """``tandem bench kernels``: compares attention and linear layers with the machine's limits."""

    dtype: Dtype = option(
        "auto",
        "element type; auto is bfloat16, or float32 on CPUs without bf16 instructions",
        one_of("auto", "float32", "bfloat16", "float16"),
        "model",
    )
    heads: str = option("12/4/64", "query heads, KV heads and head size, as Q/KV/SIZE", TEXT, "model")
    layers: str = option(
        "768/2048/12/8192",
        "hidden size, intermediate size, number of layers and vocabulary size, separated by slashes",
        TEXT,
        "model",
    )
