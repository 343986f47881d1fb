"""From the timeline of a request to OpenTelemetry spans.

The root is the server span of the HTTP request, with the attributes of the semantic conventions for generative AI.
Below it are the spans of :mod:`coordinator.requests.waterfall` under their names; a placement, which takes no time, is
an event of the root. Nothing that a client wrote and nothing that the model answered is in a span; of an error there is
only its code, since its text may quote the request.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, SpanFlags, Status

from coordinator.requests.state import State
from coordinator.requests.timeline import Facts, Timeline
from coordinator.requests.trace_context import SAMPLED, TraceContext
from coordinator.requests.waterfall import cached_tokens, spans_of
from coordinator.telemetry.attributes import PROVIDER, operation

_LOCAL_PARENT = SAMPLED | SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE_PARENT = _LOCAL_PARENT | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
_SPAN_ID_BYTES = 8
_NS = 1_000_000_000
_SERVER_ERRORS = 500
"""First HTTP status of errors that are the server's; others do not mark a server span as failed."""


def put(attributes: Mapping[str, object], into: Any) -> None:
    """Add ``attributes`` to a repeated field of KeyValue messages, without those that are None. Raises TypeError for a
    value that is neither a string, a number, a truth value nor a list of strings."""
    for key, value in attributes.items():
        match value:
            case None:
                continue
            case str():
                into.add(key=key).value.string_value = value
            case bool():
                into.add(key=key).value.bool_value = value
            case int():
                into.add(key=key).value.int_value = value
            case float():
                into.add(key=key).value.double_value = value
            case list() | tuple():
                values = into.add(key=key).value.array_value.values
                for each in value:
                    values.add(string_value=each)
            case _:
                raise TypeError(f"{key} has a value of type {type(value).__name__}")


class SpanEncoder:
    """Adds the spans of ended requests for the served ``model`` to a message."""

    def __init__(self, model: str) -> None:
        self._model = model

    def encode(self, timeline: Timeline, into: ScopeSpans) -> None:
        """Add the spans of an ended request whose trace is sampled."""
        context, facts = timeline.trace, timeline.facts()
        assert context is not None and facts.finished_at is not None
        finished_at, stages = facts.finished_at, spans_of(timeline)
        zero_ns = round(timeline.arrived_unix_s * _NS)

        def unix_ns(time: float) -> int:
            return zero_ns + round((time - timeline.arrived_at) * _NS)

        trace_id = bytes.fromhex(context.trace_id)
        drawn = os.urandom(_SPAN_ID_BYTES * len(stages))
        ids = [drawn[at : at + _SPAN_ID_BYTES] for at in range(0, len(drawn), _SPAN_ID_BYTES)]
        root = self._root(timeline, facts, context, into)
        root.start_time_unix_nano, root.end_time_unix_nano = zero_ns, unix_ns(finished_at)
        id_of = dict(zip(stages, ids, strict=True))
        for stage, span_id in zip(stages, ids, strict=True):
            attributes: dict[str, object] = {f"tandem.{key}": value for key, value in stage.detail.items()}
            if stage.attempt:
                attributes["tandem.attempt"] = stage.attempt
            if stage.name == "place":
                event = root.events.add(name="place", time_unix_nano=unix_ns(stage.start))
                put(attributes, event.attributes)
                continue
            span = into.spans.add(
                trace_id=trace_id,
                span_id=span_id,
                parent_span_id=root.span_id if stage.parent is None else id_of[stage.parent],
                trace_state=context.state,
                flags=_LOCAL_PARENT,
                name=stage.name,
                kind=Span.SPAN_KIND_INTERNAL,
                start_time_unix_nano=unix_ns(stage.start),
                end_time_unix_nano=unix_ns(finished_at if stage.end is None else stage.end),
            )
            attributes["tandem.worker"] = stage.worker
            put(attributes, span.attributes)
        if facts.first_token_at is not None:
            root.events.add(name="first_token", time_unix_nano=unix_ns(facts.first_token_at))

    def _root(self, timeline: Timeline, facts: Facts, context: TraceContext, into: ScopeSpans) -> Span:
        """Add the server span, without its times."""
        name = operation(timeline.endpoint)
        root: Span = into.spans.add(
            trace_id=bytes.fromhex(context.trace_id),
            span_id=bytes.fromhex(context.span_id),
            parent_span_id=bytes.fromhex(context.parent_id or ""),
            trace_state=context.state,
            flags=_REMOTE_PARENT if context.parent_id else _LOCAL_PARENT,
            name=f"{name} {self._model}",
            kind=Span.SPAN_KIND_SERVER,
        )
        failed = facts.state is State.FAILED
        ttft_s = None if facts.first_token_at is None else facts.first_token_at - timeline.arrived_at
        attributes = {
            "gen_ai.operation.name": name,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": timeline.id,
            "gen_ai.response.finish_reasons": [each for each in facts.finish if each is not None] or None,
            "gen_ai.response.time_to_first_chunk": ttft_s,
            "gen_ai.request.stream": timeline.stream,
            "gen_ai.usage.input_tokens": facts.prompt_tokens,
            "gen_ai.usage.output_tokens": facts.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": cached_tokens(timeline) or None,
            "http.request.method": "POST",
            "http.route": timeline.endpoint,
            "http.response.status_code": _http_status(timeline, facts),
            "error.type": (timeline.error_code or "_OTHER") if failed else None,
            "tandem.request_id": timeline.request_id,
            "tandem.state": facts.state.value,
            "tandem.path": facts.path if timeline.placed else None,
            "tandem.retries": timeline.retries or None,
            "tandem.migrations": timeline.migrations or None,
            **timeline.asked,
        }
        put(attributes, root.attributes)
        if failed and timeline.error_status >= _SERVER_ERRORS:
            root.status.code = Status.STATUS_CODE_ERROR
        return root


def _http_status(timeline: Timeline, facts: Facts) -> int | None:
    """Return the status of the response, None if its client left before there was one. A stream has its status from its
    first token on, whatever happens later."""
    if timeline.stream and facts.first_token_at is not None:
        return 200
    return {State.DONE: 200, State.FAILED: timeline.error_status}.get(facts.state)
