"""The sampling defaults of generation_config.json, with values out of range replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.checkpoint.values import shown

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-9, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
"""The least and the most of each setting, as for requests. A ``top_p`` of 0 means only the most likely token."""
_OFF = {"top_k": -1}
"""Values that mean the same as the least one."""


def clamp(generation_config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings with all sampling defaults in :data:`RANGES`, and a note on each that was changed. Something
    that is no number is removed."""
    settings, notes = dict(generation_config), list[str]()
    for name, (least, most) in RANGES.items():
        value = settings.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            del settings[name]
            notes.append(f"generation_config.json: {name} {shown(value)} is no number, ignored")
        elif not least <= value <= most:
            settings[name] = min(max(value, least), most)
            if value != _OFF.get(name):
                notes.append(
                    f"generation_config.json: {name} {shown(value)} is out of range, {settings[name]:g} is used"
                )
    return settings, tuple(notes)
