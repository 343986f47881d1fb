"""One output as a model writes it, with what it means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PARIS = ("get_weather", {"city": "Paris"})
NOW: tuple[str, dict[str, Any]] = ("now", {})
TYPED = ("get_weather", {"city": 'L"A', "days": 3, "exact": True, "where": {"lat": 1.5}, "tags": ["a", "b"]})


@dataclass(frozen=True)
class Transcript:
    """``tools`` and ``reasoning``: names of formats. ``text``: an output, in which the texts of ``control`` are control
    tokens if the tokenizer has them as such. ``calls``: name and arguments of each call."""

    tools: str
    reasoning: str
    text: str
    content: str = ""
    thought: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    control: tuple[str, ...] = ()
    thinking: bool = False
