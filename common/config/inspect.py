"""Configuration of ``tandem inspect``."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config.options import SWITCH, TEXT, count, option
from common.config.shared import MODEL


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """``tandem inspect``: says what a model is and needs, without loading or downloading its weights. An empty
    ``model`` means the built-in one."""

    model: str = field(metadata=MODEL)
    revision: str | None = option(
        None, "branch, tag or commit of a model from the hub", TEXT, "model", shown_default="main"
    )
    max_model_len: int | None = option(
        None, "maximum length of prompt plus output, in tokens", count(1), "model", shown_default="the model's"
    )
    trust_remote_code: bool = option(False, "allow and run Python code that comes with the model", SWITCH, "model")
    json: bool = option(False, "print one JSON object instead of text", SWITCH, "model")
