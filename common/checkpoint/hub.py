"""Downloads from the hub: small files first, then only the weights that will be loaded."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from common.checkpoint.download_progress import counting
from common.checkpoint.formats import OTHER_FILES
from common.checkpoint.weights import ADAPTER, IGNORED, INDEX, indexed_files
from common.core.errors import StartError, reason

FIRST = ("config.json", INDEX, ADAPTER, *OTHER_FILES)
"""Small files that tell whether the weights are worth a download, and which."""
TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
TEMPLATES = ("additional_chat_templates/*.jinja",)
LEFT_OUT = (
    *IGNORED,
    *("original/*", "checkpoint-*/*", "onnx/*", "openvino/*", "coreml/*", "metal/*", "runs/*", "*/*.safetensors"),
)
"""Duplicates of the weights, in other layouts or of earlier steps of a training."""
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_GGUF = b"GGUF"
_OTHER_GGUF = re.compile(r"mmproj|imatrix", re.IGNORECASE)
"""In the names of GGUF files that hold no language model: encoders of images, and statistics for quantizers."""
_SHOWN = 20
"""Most names of files in an error."""
_PREFERRED = (
    *("Q4_K_M", "Q4_0", "Q4_K_S", "Q4_1", "IQ4_NL", "IQ4_XS", "MXFP4", "Q5_K_M", "Q5_K_S", "Q5_0", "Q5_1", "Q6_K"),
    *("Q8_0", "BF16", "F16", "F32"),
)
"""Types of GGUF files with at least 4 bits, the preferred one first."""
TIMEOUT_S = 4.0
"""Timeout of the hub's answer about one file, in seconds; downloads themselves have none."""


def local_path(model: str) -> Path:
    """Return ``model`` as a path of this machine. Raises StartError if it cannot be one nor the id of a repository."""
    path = Path(model).expanduser()
    try:
        path.exists()
    except (OSError, ValueError) as error:  # too long, or with a null character
        todo = "check the path, or give a hub id (owner/name)"
        raise StartError(f"cannot open {model[:100]}…", reason(error), todo) from error
    return path


def is_gguf(path: Path) -> bool:
    """Return whether ``path`` is a file that is named as a GGUF file or, whatever its name, begins as one does."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(_GGUF)) == _GGUF
    return False


def check_id(model: str, path: Path) -> None:
    """Raise StartError if ``model``, which is neither a directory nor a GGUF file (``path``), cannot be the id of a hub
    repository."""
    if path.exists():
        why = "it is a file, but no GGUF file"
        todo = "give a GGUF file, the directory of a transformers checkpoint, or a hub id (owner/name)"
        raise StartError(f"cannot open {model}", why, todo)
    if address := re.match(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+(?::[\w.-]+)?)", model):
        raise StartError(f"cannot open {model}", "it is an address, not an id", f"give the id: {address[1]}")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith("."):
        todo = "check the path, or give a hub id (owner/name)"
        raise StartError(f"cannot open {model}", "there is no such directory", todo)


def split_tag(model: str) -> tuple[str, str]:
    """Return the id and the tag of ``owner/name:TAG``, "" if there is none."""
    found = re.fullmatch(r"([\w.-]+/[\w.-]+):([\w.-]+)", model)
    return (found[1], found[2]) if found else (model, "")


def choose_gguf(names: Sequence[str], tag: str) -> tuple[str, str]:
    """Return which of the files ``names`` (the first shard of several) is that of ``tag``, whole words of its name in
    any case, and a note if one of several was chosen without a tag: Q4_K_M, else the smallest type with at least 4
    bits. ("", "") if there is none."""
    files = [name for name in names if name.lower().endswith(".gguf") and not _OTHER_GGUF.search(name)]
    firsts = [name for name in files if not (shard := _SHARD.search(name)) or int(shard[1]) == 1]
    if tag:
        return _shortest(firsts, tag), ""
    found = next((each for quant in _PREFERRED if (each := _shortest(firsts, quant))), firsts[0] if firsts else "")
    return found, f"{Path(found).name} was chosen of {len(firsts)} files" if len(firsts) > 1 else ""


def _shortest(names: Sequence[str], tag: str) -> str:
    """Return the shortest of ``names`` that has ``tag`` as whole words, "" if none has."""
    whole = re.compile(rf"(?:^|[-._/]){re.escape(tag)}(?=[-._/])", re.IGNORECASE)
    return min((name for name in names if whole.search(name)), key=len, default="")


def find_gguf(model: str, revision: str | None, tag: str, first: Path) -> tuple[str, str]:
    """Return the GGUF file of the repository ``model`` to be served, and a note as :func:`choose_gguf`; ("", "") if its
    weights are others. Without a ``tag`` that is one of a repository without safetensors weights, also if it has a
    config.json. ``first``: its snapshot with the configuration. Raises StartError if no file has the ``tag``."""
    if not tag and _has_safetensors(model, revision, first):
        return "", ""
    names = gguf_names(model, revision, first)
    file, note = choose_gguf(names, tag)
    if tag and not file:
        raise no_such_gguf(f"{model}:{tag}", tag, names)
    return file, note


def _has_safetensors(model: str, revision: str | None, first: Path) -> bool:
    if not (first / "config.json").is_file():
        return False
    return bool(indexed_files(first)) or any(first.glob("*.safetensors")) or bool(weight_names(model, revision))


def gguf_names(model: str, revision: str | None, first: Path) -> list[str]:
    """Return the names of the GGUF files of a repository; without a network, of those in its local snapshot ``first``.
    Raises StartError if the hub says that they cannot be listed."""
    from huggingface_hub import list_repo_files

    try:
        names = list_repo_files(model, revision=revision)
    except Exception:  # offline: what was downloaded before is served
        names = [str(file.relative_to(first)) for file in first.rglob("*.gguf")]
    return sorted(name for name in names if name.lower().endswith(".gguf"))


def no_such_gguf(model: str, tag: str, names: Sequence[str]) -> StartError:
    """Return the error for a tag that is in none of ``names``."""
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    why = f"its repository has no GGUF file named {tag}, but {shown or 'none at all'}"
    return StartError(f"cannot open {model}", why, "give another part of a file's name, or leave it out")


def gguf_shards(name: str) -> list[str]:
    """Return the names of all shards of the GGUF file ``name``; [``name``] if it is whole."""
    found = _SHARD.search(name)
    if found is None:
        return [name]
    start, count = name[: found.start()], int(found[2])
    return [f"{start}-{at + 1:05d}-of-{found[2]}.gguf" for at in range(count)]


def download_gguf(model: str, revision: str | None, name: str) -> Path:
    """Return the local path of the GGUF file ``name``, downloaded if needed with all its shards. Raises StartError."""
    pattern = _SHARD.sub(r"-*-of-\2.gguf", name)
    return _download(model, revision, (pattern,)) / name


def download_first(model: str, revision: str | None) -> Path:
    """Return the local snapshot of a hub repository with its configuration. Raises StartError."""
    return _download(model, revision, FIRST)


def download_rest(model: str, revision: str | None, first: Path, code: bool) -> Path:
    """Return the local snapshot with all files that are needed: of the weights, those that the index in ``first``
    names, or all at the top level. ``code``: Python files, too. Raises StartError."""
    weights = indexed_files(first) or ("*.safetensors",)
    return _download(model, revision, (*TEXT_FILES, *TEMPLATES, *weights, *(("*.py",) if code else ())), LEFT_OUT)


def download_text(model: str, revision: str | None) -> Path:
    """Return the local snapshot with the configuration, the tokenizer and the templates. Raises StartError."""
    return _download(model, revision, (*TEXT_FILES, *TEMPLATES), LEFT_OUT)


def weight_names(model: str, revision: str | None) -> list[str]:
    """Return the names of the safetensors files of a repository without an index, [] if it cannot be listed."""
    from huggingface_hub import list_repo_files

    try:
        names = list_repo_files(model, revision=revision)
    except Exception:  # its errors (offline, absent, gated) have no common base class
        return []
    top = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    return [name for name in top if not any(map(Path(name).match, IGNORED))]


@contextlib.contextmanager
def open_remote(model: str, revision: str | None, name: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file of a repository; of it only what is read is fetched. Yield it and its length in bytes. Raises
    StartError."""
    from huggingface_hub import HfFileSystem

    try:
        with HfFileSystem().open(f"{model}/{name}", "rb", revision=revision, block_size=1 << 20) as file:
            yield file, int(file.size)
    except StartError:
        raise
    except Exception as error:  # its errors have no common base class
        raise _unreachable(model, error) from error


def _download(model: str, revision: str | None, patterns: tuple[str, ...], left_out: tuple[str, ...] = ()) -> Path:
    """Return the local snapshot of a hub repository with the files that match ``patterns`` and none of ``left_out``,
    downloaded if needed. Raises StartError if they cannot be downloaded."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import snapshot_download  # here, since the import takes half a second

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns if a repository has none of the files
    try:
        with counting(model) as bars:
            found = snapshot_download(
                model, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(left_out) or None,
                etag_timeout=TIMEOUT_S, tqdm_class=bars,
            )  # fmt: skip
        return Path(found)
    except Exception as error:  # its errors (offline, absent, gated, bad revision) have no common base class
        raise _unreachable(model, error) from error


def _unreachable(model: str, error: Exception) -> StartError:
    said = str(error).strip().splitlines()[0].removeprefix("Got: ") if str(error).strip() else type(error).__name__
    return StartError(
        f"cannot open {model}",
        f"there is no such directory, and the download from the hub failed: {said[:200]}",
        "check the path or the hub id, the network, and HF_TOKEN for gated models",
    )
