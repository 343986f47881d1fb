"""The directory in which processes of this user keep what they have generated from checkpoints."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import tempfile
from pathlib import Path

log = logging.getLogger("tandem.cache")


def configured_root() -> Path:
    """Return ``$TANDEM_CACHE``, else ``$XDG_CACHE_HOME/tandem``, else ``~/.cache/tandem``, whether it exists or not."""
    given, base = os.environ.get("TANDEM_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(given) if given else (Path(base) if base else Path.home() / ".cache") / "tandem"


def cache_root() -> Path:
    """Return :func:`configured_root`, created if needed. If it cannot be written, a temporary directory that is removed
    when this process ends; child processes that are started afterwards use the same."""
    path = configured_root()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        return _temporary(str(path), str(error.strerror or error))


@functools.cache
def _temporary(instead_of: str, why: str) -> Path:
    path = Path(tempfile.mkdtemp(prefix="tandem-cache-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    os.environ["TANDEM_CACHE"] = str(path)  # a child that is killed could not remove one of its own
    log.warning("%s cannot be used (%s): generated files are kept in %s until this process ends", instead_of, why, path)
    return path
