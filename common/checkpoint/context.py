"""How many tokens of context a model was made for, and how many its rotary scaling reaches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from common.checkpoint.values import LENGTHS

_FALLBACK = 2048
_MOST = 2**31 - 1
_ALREADY_SCALED = ("gemma3", "gemma3_text")
"""Model types whose ``max_position_embeddings`` includes the factor of their linear scaling."""


def made_for(config: Mapping[str, Any]) -> int:
    """Return the model's own context length in tokens. ``config``: that of the language model."""
    return next((int(config[key]) for key in LENGTHS if isinstance(config.get(key), int)), _FALLBACK)


def limit(config: Mapping[str, Any]) -> tuple[int, str]:
    """Return the longest context that can be served in tokens, and why it is longer than :func:`made_for` ("" if it is
    not).

    With ``yarn`` it is the original length times the factor, with ``linear`` and ``dynamic`` scaling the model's length
    times the factor; ``llama3`` and ``longrope`` models have the scaled length in their configuration. vLLM has the
    same rules."""
    own = most = made_for(config)
    kind = ""
    for scaling in scalings(config):
        name, factor = str(scaling.get("rope_type", scaling.get("type", ""))), scaling.get("factor")
        if not isinstance(factor, int | float) or not factor > 1:
            continue
        start = own
        if name == "yarn":
            names = (scaling, config)  # transformers takes it from either
            given = (each.get("original_max_position_embeddings") for each in names)
            start = next((each for each in given if isinstance(each, int)), own)
        elif name not in ("linear", "dynamic") or config.get("model_type") in _ALREADY_SCALED:
            continue
        if start * factor > most:
            most, kind = int(min(start * factor, _MOST)), name
    return most, f"its {kind} scaling reaches {most:,}" if kind else ""


def scalings(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary parameters: one set, or one per type of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        found = config.get(key)
        if isinstance(found, dict) and found:
            nested = [each for each in found.values() if isinstance(each, dict)]
            yield from nested or [found]
            return
