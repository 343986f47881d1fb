"""Directories with the tokenizer and the configuration of a checkpoint as generated files, kept in the cache.

They look as a checkpoint's own directory does, so that every process reads tokenizers and templates from files of one
layout. They are found again by a hash of what they were made from.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash

from common.checkpoint.cache_root import cache_root
from common.core.errors import StartError, reason

VERSION = 3
"""To be raised when other files are generated from the same inputs."""
KEEP_DAYS = 30
"""Days after its last use when a directory is removed."""
SMALL_FILES = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "chat_template.json"),
)
_LIST = ".files"
"""The file with the names of all others of a directory."""
_TEMPLATES = "additional_chat_templates"


def key_of(*parts: str | bytes, files: Iterable[Path] = ()) -> str:
    """Return a hash (16 hex digits) of ``parts`` and the names and contents of ``files``."""
    digest = xxhash.xxh3_64(f"{VERSION}|".encode())
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(f"{len(data)}|".encode() + data)
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name}|{len(content)}|".encode())
        digest.update(content)
    return str(digest.hexdigest())


def text_directory(key: str, write: Callable[[Path], None]) -> Path:
    """Return the directory of ``key``, filled by ``write`` if it is not there yet. Several processes may ask at once:
    each sees either nothing or all files. Exceptions of ``write`` are raised and leave nothing
    behind; StartError if the disk is full."""
    root = cache_root() / "text"
    target = root / key
    if _is_whole(target):
        with contextlib.suppress(OSError):
            os.utime(target)
        return target
    if target.is_dir() and not _is_whole(target):  # asked again, since another process may just have made it
        shutil.rmtree(target, ignore_errors=True)
    try:
        root.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=root, prefix=".new-"))
    except OSError as error:
        raise _unwritable(root, error) from error
    try:
        write(made)
        names = sorted(str(file.relative_to(made)) for file in made.rglob("*") if file.is_file())
        (made / _LIST).write_text("\n".join(names), encoding="utf-8")
        made.chmod(0o755)
        made.rename(target)
    except OSError as error:
        if not _is_whole(target):  # else another process was faster
            raise _unwritable(root, error) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    _remove_old(root)
    return target


def _is_whole(directory: Path) -> bool:
    """Return whether ``directory`` has all files that were written into it: cleaners of caches remove some."""
    try:
        names = (directory / _LIST).read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return all((directory / name).is_file() for name in names)


def _unwritable(root: Path, error: OSError) -> StartError:
    todo = "free space there, or set TANDEM_CACHE to a directory with some"
    return StartError(f"cannot write the cache {root}", reason(error), todo)


def small_files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint with settings and templates."""
    found = [directory / name for name in SMALL_FILES if (directory / name).is_file()]
    return found + sorted((directory / _TEMPLATES).glob("*.jinja"))


def copy_small_files(source: Path, target: Path) -> None:
    """Copy :func:`small_files` of ``source`` to ``target``."""
    for file in small_files(source):
        to = target / file.relative_to(source)
        to.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, to)


def _remove_old(root: Path) -> None:
    before = time.time() - KEEP_DAYS * 86_400
    for each in root.iterdir():
        with contextlib.suppress(OSError):
            if each.stat().st_mtime < before:
                shutil.rmtree(each, ignore_errors=True)
