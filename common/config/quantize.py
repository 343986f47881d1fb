"""Configuration of ``tandem quantize``."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config.options import SWITCH, TEXT, count, one_of, option, positional


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """``tandem quantize``: writes a checkpoint with its linear layers in 4 or 8 bits, and a card of what that costs."""

    model: str = field(
        metadata=positional("directory or Hugging Face hub id of an unquantized checkpoint", "model", "none")
    )
    output: str = field(metadata=positional("directory to create", "results", "none"))
    bits: str = option("4", "bits of a weight", one_of("4", "8"), "model")
    group: str = option(
        "64",
        "columns of a weight that share a scale; smaller groups are more exact and larger in memory",
        one_of("16", "32", "64", "128"),
        "model",
    )
    symmetric: bool = option(
        False,
        "4 bits without zero points, which more programs read, such as transformers, and which are less exact; 8 bits "
        "never have any",
        SWITCH,
        "model",
    )
    answers: int = option(
        64, "answers of the golden set on which the card's quality is measured; 0: none", count(0, 310), "evaluation"
    )
    revision: str | None = option(
        None, "branch, tag or commit of a model from the hub", TEXT, "model", shown_default="main"
    )
    trust_remote_code: bool = option(False, "allow and run Python code that comes with the model", SWITCH, "model")
