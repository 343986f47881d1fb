"""Access lines: one log line for each answered request (``--access-log``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from aiohttp import web

from coordinator.requests.record import RequestRecord

log = logging.getLogger("tandem.access")

RECORDS = web.RequestKey("records", list[RequestRecord])
"""The records of a request that was submitted."""
QUIET_PATHS = frozenset(("/health", "/ping", "/ready", "/metrics"))
"""Paths that monitoring calls every few seconds. They get a line only if they fail."""
LEFT = 499
"""The status of a request whose client disconnected before its answer was complete."""


def log_access(request: web.Request, route: str, status: int, seconds: float, ids: dict[str, str]) -> None:
    """Log the line of a ``request`` for ``route`` that was answered with ``status`` after ``seconds``. ``ids`` are more
    fields of the line."""
    if (route in QUIET_PATHS and status < 400) or not log.isEnabledFor(logging.INFO):
        return
    fields: dict[str, object] = {
        **ids, "client": request.remote, "method": request.method, "route": route, "status": status,
        "duration_ms": round(1000 * seconds, 1),
    }  # fmt: skip
    text = f"{request.remote} {request.method} {route[:128]} {status} in {1000 * seconds:.0f} ms"
    if records := request.get(RECORDS):
        counted = _counted(records)
        fields |= counted
        text += f", {counted['prompt_tokens']} tokens in, {counted['output_tokens']} out"
        if (ttft_ms := counted["ttft_ms"]) is not None:
            text += f", first after {ttft_ms:.0f} ms"
    log.info("%s", text, extra=fields)


def _counted(records: Sequence[RequestRecord]) -> dict[str, float | None]:
    """Return the token counts of a request and the milliseconds to its first token, None if there was none."""
    firsts = [1000 * (each.first_token_at - each.arrived_at) for each in records if each.first_token_at is not None]
    return {
        "prompt_tokens": sum(record.prompt_length for record in records),
        "output_tokens": sum(record.output_length for record in records),
        "ttft_ms": round(min(firsts), 1) if firsts else None,
    }
