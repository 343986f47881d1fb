"""Log lines on standard error, for people (text) or for programs (JSON, one object per line).

The text form is short because the launcher mixes several processes into one terminal. Values passed as ``extra`` become
fields of the JSON form; of these the text form shows ``trace_id``. Callers must not log secrets or request contents.
One record is one line, whatever its message contains, so that a client cannot forge a record by sending a line end. In
the text form the lines of a traceback follow their record, each behind a mark with which no record begins.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_LOUD = ("aiohttp.access", "asyncio", "httpx", "urllib3", "filelock", "huggingface_hub", "transformers")
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {
    ord(end): ascii(end)[1:-1] for end in "\n\r\t\u2028\u2029"
}
"""Control characters and the escapes that replace them."""
MARK = "    | "
"""Prefix of each line of a traceback."""


class TextFormatter(logging.Formatter):
    """Formats records as ``12:00:00 decode-0 warning: text [trace_id=4bf9]``. The level is left out for INFO, the trace
    id for records that are not about a request."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        severity = "" if record.levelno == logging.INFO else f" {record.levelname.lower()}"
        text = f"{clock} {self.process}{severity}: {record.getMessage().translate(_CONTROL)}"
        if trace_id := getattr(record, "trace_id", None):
            text += f" [trace_id={trace_id}]"
        if not record.exc_info:
            return text
        trace = self.formatException(record.exc_info).split("\n")  # an error's text may hold line ends, too
        return "\n".join([text, *(MARK + line.translate(_CONTROL) for line in trace)])


class JsonFormatter(logging.Formatter):
    """Formats records as one JSON object per line, with UTC time."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup_logging(
    level: Literal["debug", "info", "warning", "error"],
    style: Literal["text", "json"],
    process: str,
    stream: TextIO | None = None,
) -> None:
    """Send all log records to ``stream`` (default: standard error) under the name ``process``. Chatty libraries log
    only from WARNING up."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process) if style == "json" else TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    for name in _LOUD:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
