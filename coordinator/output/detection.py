"""Choice of the output format from a model's chat template."""

from __future__ import annotations

from collections.abc import Collection

from coordinator.output.formats import REASONING_FORMATS, TOOL_FORMATS, OutputFormat


def detect(template_source: str, special: Collection[str]) -> OutputFormat:
    """Return the format whose markers the template writes. ``special``: texts of the tokenizer's control tokens."""
    tools = TOOL_FORMATS["hermes"] if "<tool_call>" in template_source else None
    reasoning = REASONING_FORMATS["qwen3"] if "</think>" in template_source or "<think>" in special else None
    return OutputFormat(tools, reasoning)
