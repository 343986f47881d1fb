"""The groups of modules of a compressed-tensors checkpoint: its ``quantization_config`` has settings for each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]


def groups_of(settings: Settings) -> list[Settings]:
    """Return the groups of ``settings``, a ``quantization_config``."""
    groups = settings.get("config_groups")
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def weights_of(settings: Settings) -> list[Settings]:
    """Return how each group quantizes its weights, without groups that leave them whole."""
    return [group["weights"] for group in groups_of(settings) if group.get("weights")]


def arguments_of(settings: Settings, module: str) -> Settings:
    """Return how the weight of ``module`` is quantized: by the group that has its name, else by one whose pattern fits
    it, else by that of all linear layers, else by one of another class."""
    named, fitting, of_class = list[Settings](), list[Settings](), dict[str, Settings]()
    for group in groups_of(settings):
        weights: Settings = group.get("weights") or {}
        for target in group.get("targets") or ():
            if module == target or module.endswith(f".{target}"):
                named.append(weights)
            elif target.startswith("re:") and re.match(target[3:], module):
                fitting.append(weights)
            elif target[:1].isupper():
                of_class.setdefault(target, weights)
    return next(iter([*named, *fitting]), None) or of_class.get("Linear") or next(iter(of_class.values()), {})
