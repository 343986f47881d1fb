"""Files that hold secrets: read once, and only if no other user could have read or written them.

What counts is the file that was opened, behind every symbolic link. A pipe (``<(pass show key)``, /dev/stdin, a FIFO)
keeps nothing that others could read later: of it only the owner counts.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.core.errors import StartError, reason

MAX_BYTES = 1 << 20
NOTICE_S = 2.0
"""For how long a pipe is waited for without a word."""


def read_secret(path: Path, flag: str) -> bytes:
    """The content of ``path``. StartError if others can read or write it, or if it cannot be read; it names ``flag``.

    The mode is 0600 or less. A file that root has handed to a group of ours (a Kubernetes secret with ``fsGroup`` and
    ``defaultMode: 0440``) may be readable by that group, as this process could not change that.
    """
    try:
        with _notice(path), open(path, "rb") as file:
            check(os.fstat(file.fileno()), path)
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise StartError(f"cannot read {shown(path)}", reason(error), f"correct {flag}") from None
    if len(content) > MAX_BYTES:
        raise StartError(f"will not use {path}", f"it has more than {MAX_BYTES:,} bytes", f"correct {flag}")
    return content


@contextmanager
def _notice(path: Path) -> Iterator[None]:
    """Says on standard error that a pipe is waited for, if that takes long: without a writer it takes for ever."""
    text = f"waiting for a writer to {path}, which is a pipe"
    timer = threading.Timer(NOTICE_S, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    if path.is_fifo():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def shown(path: Path) -> str:
    """``path`` as an error names it, unless it may be a key that was given where a file belongs: of a path that is
    missing, only one in a directory that is there is shown."""
    directory = os.path.dirname(path)
    known = os.path.lexists(path) or (directory and os.path.isdir(directory))
    return str(path) if known else "the file that was given"


def check(status: os.stat_result, path: Path) -> None:
    """StartError if the file at ``path``, of which the open one's ``status`` is, can be read or written by others."""
    if status.st_uid not in (0, os.geteuid()):
        raise StartError(f"will not use {path}", "it belongs to another user", f"make it yours: chown $USER {path}")
    if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode) or stat.S_ISCHR(status.st_mode):
        return
    open_to_others = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if status.st_uid == 0 != os.geteuid() and status.st_gid in (0, os.getegid(), *os.getgroups()):
        open_to_others &= ~stat.S_IRGRP
    if open_to_others:
        raise StartError(f"will not use {path}", "other users can read or write it", f"chmod 600 {path}")
