"""Configuration of ``tandem bench gpu``."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.options import SWITCH, TEXT, option


@dataclass(frozen=True, kw_only=True)
class BenchGpuConfig:
    """``tandem bench gpu``: kernels against their oracle and the goals G1 to G8, on one GPU."""

    dry: bool = option(False, "run every stage on the CPU with tiny shapes; its figures mean nothing", SWITCH, "load")
    only: str | None = option(
        None, "stages to run, separated by commas, such as kernels,decode", TEXT, "load", shown_default="all"
    )
    checkpoints: str = option(".cache/gpu", "directory for the generated checkpoints (17 GB)", TEXT, "load")
    save: str | None = option(
        None,
        "JSON file to save the results in; the table is saved beside it",
        TEXT,
        "results",
        shown_default="bench/results/local/gpu.json",
    )
    resume: bool = option(False, "run only the stages that the saved file lacks", SWITCH, "results")
