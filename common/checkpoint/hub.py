"""Downloads from the hub: small files first, then only the weights that will be loaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

from common.checkpoint.weights import ADAPTER, IGNORED, INDEX, indexed_files
from common.core.errors import StartError

FIRST = ("config.json", INDEX, ADAPTER)
"""Small files that tell whether the weights are worth a download, and which."""
TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
TEMPLATES = ("additional_chat_templates/*.jinja",)
LEFT_OUT = (
    *IGNORED,
    *("original/*", "checkpoint-*/*", "onnx/*", "openvino/*", "coreml/*", "metal/*", "runs/*", "*/*.safetensors"),
)
"""Duplicates of the weights, in other layouts or of earlier steps of a training."""
TIMEOUT_S = 4.0
"""Timeout of the hub's answer about one file, in seconds; downloads themselves have none."""


def check_id(model: str, path: Path) -> None:
    """Raise StartError if ``model``, which is no directory (``path``), cannot be the id of a hub repository."""
    if path.exists():
        why, todo = "it is a file", "give the directory of a transformers checkpoint, or a hub id (owner/name)"
        raise StartError(f"cannot open {model}", why, todo)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith("."):
        todo = "check the path, or give a hub id (owner/name)"
        raise StartError(f"cannot open {model}", "there is no such directory", todo)


def download_first(model: str, revision: str | None) -> Path:
    """Return the local snapshot of a hub repository with its configuration. Raises StartError."""
    return _download(model, revision, FIRST)


def download_rest(model: str, revision: str | None, first: Path, code: bool) -> Path:
    """Return the local snapshot with all files that are needed: of the weights, those that the index in ``first``
    names, or all at the top level. ``code``: Python files, too. Raises StartError."""
    weights = indexed_files(first) or ("*.safetensors",)
    return _download(model, revision, (*TEXT_FILES, *TEMPLATES, *weights, *(("*.py",) if code else ())), LEFT_OUT)


def _download(model: str, revision: str | None, patterns: tuple[str, ...], left_out: tuple[str, ...] = ()) -> Path:
    """Return the local snapshot of a hub repository with the files that match ``patterns`` and none of ``left_out``,
    downloaded if needed. Raises StartError if they cannot be downloaded."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import snapshot_download  # here, since the import takes half a second

    try:
        found = snapshot_download(
            model, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(left_out) or None,
            etag_timeout=TIMEOUT_S,
        )  # fmt: skip
        return Path(found)
    except Exception as error:  # its errors (offline, absent, gated, bad revision) have no common base class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StartError(
            f"cannot open {model}",
            f"there is no such directory, and the download from the hub failed: {reason[:200]}",
            "check the path or the hub id, the network, and HF_TOKEN for gated models",
        ) from error
