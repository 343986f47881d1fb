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
)
from common.config.shared import MODEL
from common.core.errors import StartError


@dataclass(frozen=True, kw_only=True)
class BenchPlanConfig(ArrivalOptions):
    """``tandem bench plan``: simulates systems of several sizes with measured step costs."""

    model: str = field(metadata=MODEL)
    systems: str = option(
        "1p1d,2c,2p1d,1p2d,3c,3p1d,2p2d,1p3d,4c",
        "systems to simulate, separated by commas: 2p1d has 2 prefill workers and 1 decode worker, "
        "2c has 2 colocated workers",
        TEXT,
        "systems",
    )
    runs: int = option(3, "number of simulated rounds, each with its own arrivals", count(1, 1000), "systems")
    threads: int = option(1, "compute threads of a worker while step costs are measured", count(1, 4096), "systems")
    cost: str | None = option(
        None,
        "file of measured step costs; if it does not exist, they are measured and saved there",
        TEXT,
        "systems",
        shown_default="measured and not saved",
    )
    num_kv_blocks: int = option(4096, "number of KV blocks of each simulated worker", count(1), "systems")
    block_size: int = option(
        16, "tokens per KV block of simulated workers; a multiple of 16", count(16, 1 << 16, 16), "systems"
    )
    max_num_seqs: int = option(
        64, "maximum number of sequences that a simulated worker decodes together", count(1, 1 << 16), "systems"
    )
    max_num_batched_tokens: int = option(
        512, "maximum number of tokens that a simulated worker computes in one step", count(1), "systems"
    )
    link_rate: int = option(
        1 << 30,
        "KV transfer rate between two workers per second, in bytes or such as 1GiB",
        SIZE,
        "systems",
        shown_default="1GiB",
    )
    lend_cores: bool = option(
        True, "let idle simulated workers lend their cores, as on a single machine", SWITCH, "systems"
    )
    check: str | None = option(
        None, "results of tandem bench compare, as FILE or FILE#NAME, to check the plan against", TEXT, "results"
    )
    tolerance: float = option(
        0.5, "largest accepted relative error of the check; beyond it the exit code is 1", decimal(0, 1), "results"
    )
    goodput: str = option(DEFAULT_OBJECTIVES, "latency objectives in ms", TEXT, "results")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_batched_tokens < self.max_num_seqs:
            why = "a step computes a token of every sequence"
            raise StartError("--max-num-batched-tokens is below --max-num-seqs", why, "raise it, or lower the other")
