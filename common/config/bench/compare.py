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
)
from common.config.shared import MODEL
from common.core.errors import StartError


@dataclass(frozen=True, kw_only=True)
class BenchCompareConfig(ArrivalOptions, LoadOptions):
    """``tandem bench compare``: runs the same load on several systems, one after the other, on the same cores."""

    model: str = field(metadata=MODEL)
    systems: str | None = option(
        None,
        "systems to start in turn, separated by commas: 2p1d has 2 prefill workers and 1 decode worker, 2c "
        "has 2 colocated workers",
        TEXT,
        "systems",
        shown_default="1p1d,1c,2c; on more than two cores also 2p1d,1p2d,3c",
    )
    up_flags: str | None = option(None, "flags for each tandem up, quoted as one word", FLAGS, "systems")
    runs: int = option(3, "number of rounds; each measures every system once", count(1, 1000), "systems")
    url: str | None = option(None, "URL of a running server to compare with as well", TEXT, "systems")
    api_key: str | None = option(None, "API key of the server at --url", KEY, "systems", secret=True)
    served_model_name: str | None = option(
        None, "model of the server at --url", TEXT, "systems", shown_default="the server's first"
    )
    goodput: str = option(
        DEFAULT_OBJECTIVES,
        "latency objectives in ms, or as multiples of the unloaded median such as ttft:5x,tpot:3x",
        TEXT,
        "results",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            holds_key = redaction.holds_key(self.up_flags or "")
        except ValueError as error:
            raise StartError("--up-flags cannot be parsed", str(error), "quote it as in a shell") from None
        if holds_key:
            why = "other users of this machine can read it in the process list"
            raise StartError("--up-flags holds a key", why, "leave it out: these servers listen on this machine only")
