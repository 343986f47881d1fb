"""Files that hold secrets: read once, and only if no other user could have read or written them.

The check applies to the file that was opened, behind every symbolic link. A pipe (``<(pass show key)``, /dev/stdin, a
FIFO) stores nothing that others could read later, so only its owner is checked.
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
"""Seconds to wait for a pipe's writer before a notice is printed."""


def read_secret(path: Path, flag: str) -> bytes:
    """Return the content of ``path``. StartError if other users can read or write the file, or, naming ``flag``, if it
    cannot be read or has more than MAX_BYTES bytes.

    The mode must be 0600 or stricter. A file of root that belongs to a group of ours (a Kubernetes secret with
    ``fsGroup`` and ``defaultMode: 0440``) may be readable by that group, since this process could not change that.
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
    """Print a notice on standard error if reading a pipe takes long: without a writer it never ends."""
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
    """Return ``path`` as an error message may show it. A path that neither exists nor lies in an existing directory is
    not shown: it may be a key that was given in place of a file name."""
    directory = os.path.dirname(path)
    known = os.path.lexists(path) or (directory and os.path.isdir(directory))
    return str(path) if known else "the file that was given"


def check(status: os.stat_result, path: Path, key: str | None = None) -> None:
    """Raise StartError if other users can read or write the open file at ``path``, whose status is ``status``. ``key``:
    the key of a configuration file whose value is secret, which the error names."""
    if status.st_uid not in (0, os.geteuid()):
        raise StartError(f"will not use {path}", "it belongs to another user", f"make it yours: chown $USER {path}")
    if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode) or stat.S_ISCHR(status.st_mode):
        return
    open_to_others = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if status.st_uid == 0 != os.geteuid() and status.st_gid in (0, os.getegid(), *os.getgroups()):
        open_to_others &= ~stat.S_IRGRP
    if open_to_others:
        secret = f", and {key} in it is secret" if key else ""
        raise StartError(f"will not use {path}", f"other users can read or write it{secret}", f"chmod 600 {path}")
