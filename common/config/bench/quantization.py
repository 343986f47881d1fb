"""Configuration of ``tandem bench quantization``."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config.bench.shared import SaveOption
from common.config.options import TEXT, count, option, positional
from common.core.errors import StartError

KNOWN = ("none", "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class BenchQuantizationConfig(SaveOption):
    """``tandem bench quantization``: a checkpoint served as it is and with its weights quantized, in turn."""

    model: str = field(
        metadata=positional("model, as for tandem up; without it, a Llama of random weights", "model", "generated")
    )
    ways: str = option(
        "none,int8,int4", "values of --quantization to measure; others are compared with the first", TEXT, "model"
    )
    threads: int = option(2, "compute threads of each server", count(1, 4096), "cores")
    rounds: int = option(3, "rounds, of which the medians are shown", count(1), "load")

    @property
    def way_names(self) -> list[str]:
        """The names in ``ways``. Raises StartError."""
        names = [name.strip() for name in self.ways.split(",")]
        if strange := set(names) - set(KNOWN):
            raise StartError(f"{min(strange)} cannot be measured", f"known are {', '.join(KNOWN)}", "correct --ways")
        if len(set(names)) < len(names):
            raise StartError(f"{self.ways} cannot be measured", "a name is there twice", "correct --ways")
        return names
