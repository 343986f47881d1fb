"""Configuration of ``tandem bench goals``."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config.options import SWITCH, TEXT, option, positional


@dataclass(frozen=True, kw_only=True)
class BenchGoalsConfig:
    """``tandem bench goals``: the goals C1 to C12 on two cores, beside this machine's limits and vLLM."""

    model: str = field(
        metadata=positional(
            "checkpoint folder; without it, an 82 M-parameter Llama that is made once", "model", "an 82 M-parameter one"
        )
    )
    only: str | None = option(None, "goals to measure, such as C1,C4", TEXT, "load", shown_default="all")
    quick: bool = option(False, "tiny loads, to check that everything runs: the figures mean nothing", SWITCH, "load")
    peers: str | None = option(
        None, "environment folder of tandem bench install-peers; vLLM is measured as well", TEXT, "systems"
    )
    save: str | None = option(
        None,
        "JSON file to save the figures in; the table and the pictures go beside it",
        TEXT,
        "results",
        shown_default="bench/results/local/goals.json if all goals are measured",
    )
    resume: bool = option(False, "measure only the goals that the saved file lacks", SWITCH, "results")
