"""Configuration of ``tandem bench gguf``."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config.bench.shared import SaveOption
from common.config.options import TEXT, count, option, positional
from common.core.errors import StartError

SHAPE = "layers, hidden, feed-forward, heads, key-value heads, vocabulary"


@dataclass(frozen=True, kw_only=True)
class BenchGgufConfig(SaveOption):
    """``tandem bench gguf``: a GGUF file served by Tandem and by llama.cpp, on the same cores in turn."""

    file: str = field(
        metadata=positional("GGUF file; without it, generated Llamas of random weights", "model", "generated Llamas")
    )
    peers: str | None = option(
        None, "directory made by tandem bench install-peers --peer llamacpp", TEXT, "systems", shown_default="required"
    )
    threads: int = option(2, "compute threads of each server", count(1, 4096), "cores")
    rounds: int = option(3, "rounds, of which the medians are shown", count(1), "load")
    shape: str = option("22/2048/5632/32/4/32000", f"shape of generated models: {SHAPE}", TEXT, "model")
    types: str = option("q8_0,q4_k_m", "types of generated models, such as q4_0", TEXT, "model")
    models: str | None = option(
        None, "directory to keep generated models in", TEXT, "model", shown_default="a temporary one"
    )

    @property
    def shape_numbers(self) -> tuple[int, ...]:
        """The numbers of ``shape``. Raises StartError."""
        words = self.shape.split("/")
        if len(words) != len(SHAPE.split(",")) or not all(word.isdecimal() and int(word) for word in words):
            raise StartError(f"{self.shape} is no shape", f"it needs six numbers: {SHAPE}", "correct --shape")
        return tuple(map(int, words))

    @property
    def type_names(self) -> list[str]:
        """The names in ``types``. Raises StartError."""
        names = [name.strip() for name in self.types.lower().split(",")]
        if strange := set(names) - {"f32", "bf16", "q8_0", "q4_0", "q4_k_m"}:
            raise StartError(
                f"no models of type {min(strange)} are generated", "known are f32, bf16, q8_0, q4_0 and q4_k_m",
                "correct --types",
            )  # fmt: skip
        return names
