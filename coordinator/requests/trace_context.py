"""The W3C trace context of a request: parsed from its headers, or made anew, and written to the response.

Needs no OpenTelemetry package: whether or not spans are exported, a request has a trace id, which its log lines and its
timeline show. Source: https://www.w3.org/TR/trace-context/.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
SAMPLED = 1
"""Bit of the flags in ``traceparent``: the caller records spans of this trace."""
MAX_STATE_CHARS = 512
MAX_STATE_MEMBERS = 32
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_MEMBER = re.compile(
    r"(?:[a-z0-9][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_RATIO_BITS = 64


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The place of one request in a trace. Ids are lowercase hexadecimal: 32 digits of a trace, 16 of a span."""

    trace_id: str
    span_id: str
    """The server span of the request."""
    parent_id: str | None = None
    """The caller's span; None if the trace begins here."""
    sampled: bool = False
    """Whether spans of the trace are recorded."""
    state: str = ""
    """The caller's ``tracestate``, which is passed on unchanged; "" for none."""

    def sibling(self) -> TraceContext:
        """Return the context of another server span with the same parent."""
        return replace(self, span_id=secrets.token_hex(8))

    def headers(self) -> dict[str, str]:
        """Return the headers with which a response, or a request to another service, names this context."""
        headers = {TRACEPARENT: f"00-{self.trace_id}-{self.span_id}-{SAMPLED if self.sampled else 0:02x}"}
        if self.state:
            headers[TRACESTATE] = self.state
        return headers


class TraceSampler:
    """Makes the trace context of each request. It obeys the sampled flag of a caller; of the traces that begin here it
    samples ``ratio``, from 0 to 1, chosen by the trace id as OpenTelemetry's ``TraceIdRatioBased`` does. ``ratio`` is
    None if no spans are recorded."""

    def __init__(self, ratio: float | None = None) -> None:
        self.records = ratio is not None
        self._below = round((ratio or 0.0) * (1 << _RATIO_BITS))

    def context(self, traceparent: Sequence[str] = (), tracestate: Sequence[str] = ()) -> TraceContext:
        """Return the context of a request with these values of its two headers, in order. A ``traceparent`` that is
        invalid or repeated is ignored, with its ``tracestate``: a trace begins then."""
        if len(traceparent) == 1 and (parent := _parse_parent(traceparent[0].strip())) is not None:
            trace_id, parent_id, sampled = parent
            return TraceContext(trace_id, secrets.token_hex(8), parent_id, sampled, _parse_state(tracestate))
        drawn = secrets.token_bytes(24)
        sampled = int.from_bytes(drawn[8:16], "big") < self._below
        return TraceContext(drawn[:16].hex(), drawn[16:].hex(), sampled=sampled)


def _parse_parent(text: str) -> tuple[str, str, bool] | None:
    """Return the trace id, the caller's span id and the sampled flag; None if ``text`` is not a valid ``traceparent``.

    Of a version after 00 the known fields are read, and it may have more of them."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None:
        return None
    version, trace_id, parent_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or trace_id == _NO_TRACE or parent_id == _NO_SPAN:
        return None
    return trace_id, parent_id, bool(int(flags, 16) & SAMPLED)


def _parse_state(values: Sequence[str]) -> str:
    """Return the values of ``tracestate`` headers as one; "" if they are invalid or too long."""
    joined = ",".join(values)
    if not joined or len(joined) > MAX_STATE_CHARS:
        return ""
    members = [member for member in (each.strip(" \t") for each in joined.split(",")) if member]
    keys = {member.partition("=")[0] for member in members}
    if len(members) > MAX_STATE_MEMBERS or len(keys) < len(members) or not all(map(_MEMBER.fullmatch, members)):
        return ""
    return ",".join(members)
