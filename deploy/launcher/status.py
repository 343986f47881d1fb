"""Status reports of a child process to its supervisor: one JSON object per line on a pipe.

    {"stage": "weights", "done": 3, "total": 12, "text": "shard 3 of 12"}        any number of these
    {"ready": {"kv_tokens": 65536, "max_model_len": 8192, ...}}                  then one of these two
    {"error": {"what": ..., "why": ..., "todo": ...}}

Without a supervisor (a worker started by hand) the same facts are logged. A failed write is ignored: the death of the
supervisor is handled elsewhere (:mod:`deploy.launcher.process`).
"""

from __future__ import annotations

import logging
import os

import msgspec

from common.core.errors import StartError
from common.platform import service_manager

log = logging.getLogger(__name__)
Fact = int | float | str | bool | list[str]
_MAX_TEXT = 600
"""Maximum characters of a text. Keeps a line below the size of an atomic pipe write (4,096 bytes)."""


class Reason(msgspec.Struct, frozen=True):
    """The wire form of a StartError."""

    what: str
    why: str
    todo: str

    @classmethod
    def of(cls, error: StartError) -> Reason:
        """Convert ``error``; each text is cut to _MAX_TEXT characters."""
        return cls(*(text[:_MAX_TEXT] for text in (error.what, error.why, error.todo)))

    def error(self) -> StartError:
        """Convert back to a StartError."""
        return StartError(self.what, self.why, self.todo)


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line: progress (``done`` of ``total`` in ``stage``), or the end of the start (``ready`` or ``error``)."""

    stage: str = ""
    done: int = 0
    total: int = 0
    text: str = ""
    ready: dict[str, Fact] | None = None
    error: Reason | None = None


class _Sink:
    """The destination of this process's reports, and the last stage that was logged without one."""

    fd: int | None = None
    stage = ""


def attach(fd: int) -> None:
    """Send further reports to the pipe ``fd``."""
    os.set_inheritable(fd, False)  # processes that this one starts must not hold the pipe open
    _Sink.fd = fd


def supervised() -> bool:
    """Return whether a launcher started this process."""
    return _Sink.fd is not None


def report(stage: str, done: int = 0, total: int = 0, text: str = "") -> None:
    """Report the progress of ``stage``. May be called often: without a supervisor only its beginning and end are
    logged."""
    if _Sink.fd is not None:
        _write(Report(stage, done, total, text[:_MAX_TEXT]))
    elif stage != _Sink.stage or (total and done == total):
        _Sink.stage = stage
        line = f"{stage}{f' {done}/{total}' if done and total else ''}{f': {text}' if text else ''}"
        log.info("%s", line)
        service_manager.progress(line)


def ready(**facts: Fact) -> None:
    """Report that the process serves. Workers give ``kv_tokens``, ``max_model_len``, ``device``, ``dtype``,
    ``notes``."""
    if _Sink.fd is not None:
        _write(Report(ready=facts))
    else:
        notes = facts.pop("notes", [])
        for note in notes if isinstance(notes, list) else []:
            log.info("%s", note)
        line = ", ".join(f"{name} {value}" for name, value in facts.items())
        log.info("ready: %s", line)
        service_manager.ready(line)


def failed(error: StartError) -> None:
    """Report that the process cannot start. The supervisor prints ``error``."""
    if _Sink.fd is not None:
        _write(Report(error=Reason.of(error)))


def read(line: bytes) -> Report | None:
    """Decode one line of the pipe. None if it is incomplete because the process was killed."""
    try:
        return msgspec.json.decode(line, type=Report)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _write(line: Report) -> None:
    assert _Sink.fd is not None
    try:
        os.write(_Sink.fd, msgspec.json.encode(line) + b"\n")
    except OSError:
        _Sink.fd = None
