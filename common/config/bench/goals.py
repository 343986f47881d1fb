"""Configuration of ``tandem bench goals``."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config.options import SWITCH, TEXT, option, positional


@dataclass(frozen=True, kw_only=True)
class BenchGoalsConfig:
    """``tandem bench goals``: the goals C1 to C12 on two cores, beside this machine's limits and vLLM."""

    model: str = field(
        metadata=positional(
            "checkpoint directory; without it, a generated Llama with 82 million parameters",
            "model",
            "a generated Llama with 82 million parameters",
        )
    )
    only: str | None = option(
        None, "goals to measure, separated by commas, such as C1,C4", TEXT, "load", shown_default="all"
    )
    quick: bool = option(
        False, "use tiny loads to check that everything runs; the results mean nothing", SWITCH, "load"
    )
    peers: str | None = option(
        None, "directory made by tandem bench install-peers; measures vLLM as well", TEXT, "systems"
    )
    save: str | None = option(
        None,
        "JSON file to save the results in; the table and the plots are saved beside it",
        TEXT,
        "results",
        shown_default="bench/results/local/goals.json if all goals are measured",
    )
    resume: bool = option(False, "measure only the goals that the saved file lacks", SWITCH, "results")
