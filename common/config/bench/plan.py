"""Configuration of ``tandem bench plan``."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config.bench.shared import DEFAULT_OBJECTIVES, ArrivalOptions
from common.config.options import (
    SIZE,
    SWITCH,
    TEXT,
    count,
    decimal,
    option,
    positional,
)
from common.core.errors import StartError


@dataclass(frozen=True, kw_only=True)
class BenchPlanConfig(ArrivalOptions):
    """``tandem bench plan``: simulates systems of several sizes with measured step costs."""

    model: str = field(
        metadata=positional("directory or hub id of a Hugging Face checkpoint; without it, the built-in model", "model")
    )
    systems: str = option(
        "1p1d,2c,2p1d,1p2d,3c,3p1d,2p2d,1p3d,4c", "what is simulated: 2p1d has 2 prefill and 1 decode worker", TEXT,
        "systems",
    )  # fmt: skip
    runs: int = option(3, "simulated rounds, each with arrivals of its own", count(1, 1000), "systems")
    threads: int = option(1, "compute threads of each worker, when costs are measured", count(1, 4096), "systems")
    cost: str | None = option(
        None,
        "file of measured step costs; written if it is not there",
        TEXT,
        "systems",
        shown_default="measured, not kept",
    )
    num_kv_blocks: int = option(4096, "blocks of KV pool of each worker", count(1), "systems")
    block_size: int = option(16, "tokens of a block", count(16, 1 << 16), "systems")
    max_num_seqs: int = option(64, "sequences that a worker decodes together", count(1, 1 << 16), "systems")
    max_num_batched_tokens: int = option(512, "tokens that a worker computes in one step", count(1), "systems")
    link_rate: int = option(
        1 << 30, "bytes of KV per second between two workers", SIZE, "systems", shown_default="1GiB"
    )
    lend_cores: bool = option(True, "workers that rest lend their cores, as those of one machine do", SWITCH, "systems")
    check: str | None = option(
        None, "file of tandem bench compare (or FILE#NAME) to hold the plan against", TEXT, "results"
    )
    tolerance: float = option(0.5, "how far off the check may be", decimal(0, 1), "results")
    goodput: str = option(DEFAULT_OBJECTIVES, "objectives in ms", TEXT, "results")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_batched_tokens < self.max_num_seqs:
            why = "a step has a token of each sequence"
            raise StartError("--max-num-batched-tokens is below --max-num-seqs", why, "raise it, or lower the other")
        if self.block_size % 16:
            why = "the prefix cache works in steps of 16 tokens"
            raise StartError(f"--block-size {self.block_size} cannot be used", why, "give a multiple of 16")
