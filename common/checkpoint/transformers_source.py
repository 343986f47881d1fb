"""Reads the source of transformers' models, because importing it is slow."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path


def module_of(kind: str) -> str:
    """Return the folder of transformers' models that has the code of the model type ``kind``."""
    _, _, special = source("auto", "auto_mappings.py").partition("SPECIAL_MODEL_TYPE_TO_MODULE_NAME = ")
    found = re.search(rf'\("{re.escape(kind)}", "(\w+)"\)', special)
    return found[1] if found else kind.replace("-", "_")


def source(*parts: str) -> str:
    """Return the text of a file below transformers' ``models``, "" if it cannot be read."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return ""
    try:
        return Path(spec.origin).parent.joinpath("models", *parts).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
