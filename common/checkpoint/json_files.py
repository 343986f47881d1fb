"""Reads the JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.core.errors import StartError, reason

RESTORE = "restore the file from where the model came from"


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in the file ``path``, None if there is no such file. Raises StartError if it cannot be
    read or is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise StartError(f"cannot read {path}", reason(error), RESTORE) from error
    if not isinstance(content, dict):
        raise StartError(f"cannot read {path}", "it is not a JSON object", RESTORE)
    return content
