"""Configuration of ``tandem bench compare``."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config import redaction
from common.config.bench.shared import DEFAULT_OBJECTIVES, ArrivalOptions, LoadOptions
from common.config.options import (
    FLAGS,
    KEY,
    TEXT,
    count,
    option,
    positional,
)
from common.core.errors import StartError


@dataclass(frozen=True, kw_only=True)
class BenchCompareConfig(ArrivalOptions, LoadOptions):
    """``tandem bench compare``: runs the same load on several systems, one after the other, on the same cores."""

    model: str = field(
        metadata=positional("directory or hub id of a Hugging Face checkpoint; without it, the built-in model", "model")
    )
    systems: str | None = option(
        None,
        "what is started in turn: 2p1d has 2 prefill and 1 decode worker, 2c 2 colocated",
        TEXT,
        "systems",
        shown_default="1p1d,1c,2c; on more than two cores 2p1d,1p2d,3c as well",
    )
    up_flags: str | None = option(None, "flags for each tandem up, in one word", FLAGS, "systems")
    runs: int = option(3, "rounds, each with all systems", count(1, 1000), "systems")
    url: str | None = option(None, "a running server to compare with, too", TEXT, "systems")
    api_key: str | None = option(None, "key to send it", KEY, "systems", secret=True)
    served_model_name: str | None = option(
        None, "which of its models is compared", TEXT, "systems", shown_default="the first"
    )
    goodput: str = option(
        DEFAULT_OBJECTIVES, "objectives in ms, or as multiples of the unloaded median: ttft:5x,tpot:3x", TEXT, "results"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            holds_key = redaction.holds_key(self.up_flags or "")
        except ValueError as error:
            raise StartError("--up-flags is no list of flags", str(error), "write it as for a shell") from None
        if holds_key:
            why = "other users of this machine can read it in the list of processes"
            raise StartError("--up-flags holds a key", why, "leave it out: they answer on this machine only")
