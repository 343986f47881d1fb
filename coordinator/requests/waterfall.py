"""The spans of a request: what its timeline is shown as, in JSON.

Pure. The top-level spans, without ``transfer``, ``stall`` and ``place``, follow each other without a gap, but for the
part of a hand-off that computation does not hide, which lies between ``prefill`` and ``decode``. So the times of a
request add up: tokenize + queue + prefill is the time to first token; with the exposed transfer and ``decode`` it is
the total. After a loss the time is in ``retry``, or in ``migration`` if there is output, until the first token of the
next attempt, and has that attempt's queue, place and prefill as children.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from coordinator.requests.spec import Json
from coordinator.requests.timeline import BEHIND_OTHERS, Attempt, Facts, Timeline

GRAMMAR_SHOWN_S = 0.001
"""The compilation of a grammar is mentioned if it took this long: not if it was known already."""
QUICK_S = 0.005
"""A stay in the queue of at most this long needs no reason."""


@dataclass(slots=True, eq=False)
class Span:
    """A span of a request, in seconds of ``time.monotonic``; ``end`` is None while it lasts."""

    name: str
    start: float
    end: float | None
    attempt: int
    worker: str | None = None
    parent: Span | None = None
    detail: Json = field(default_factory=dict)


def shown(timeline: Timeline, *, spans: bool = True, intervals: bool = True, now: float | None = None) -> Json:
    """Return a request as JSON, in milliseconds since its arrival; with ``spans``, those too, in order of start. With
    the time ``now``, that too, while the request runs. Without ``intervals``, ``itl_ms`` is null: its percentile takes
    about as long as all the rest."""
    facts = timeline.facts()
    form: Json = {
        "id": timeline.id,
        "request_id": timeline.request_id,
        "trace_id": timeline.trace_id,
        "endpoint": timeline.endpoint,
        "arrived": round(timeline.arrived_unix_s, 3),
        "state": facts.state.value,
        "path": facts.path if timeline.placed else None,
        "stream": timeline.stream,
        "prompt_tokens": facts.prompt_tokens,
        "cached_tokens": cached_tokens(timeline),
        "output_tokens": facts.output_tokens,
        "choices": facts.choices,
        "finish": list(facts.finish),
        "error": timeline.error,
        "retries": timeline.retries,
        "migrations": timeline.migrations,
        "ttft_ms": _since(timeline, facts.first_token_at),
        "total_ms": _since(timeline, facts.finished_at),
        "itl_ms": _intervals(facts) if intervals else None,
    }
    if now is not None and not timeline.over:
        form["now_ms"] = _since(timeline, now)
    if spans:
        found = spans_of(timeline)
        places = {span: place for place, span in enumerate(found)}
        form["spans"] = [
            {
                "name": span.name,
                "start_ms": _since(timeline, span.start),
                "end_ms": _since(timeline, span.end),
                "attempt": span.attempt,
                "worker": span.worker,
                "parent": None if span.parent is None else places[span.parent],
                "detail": span.detail,
            }
            for span in found
        ]
    return form


def spans_of(timeline: Timeline) -> list[Span]:
    """Return the spans of a request in order of start, a parent before its children."""
    facts = timeline.facts()
    grammar: Json = {"grammar_ms": _rounded(1000 * timeline.grammar_s)} if timeline.grammar_s >= GRAMMAR_SHOWN_S else {}
    found = [Span("tokenize", timeline.arrived_at, timeline.tokenized_at, 0, detail=grammar)]
    parent: Span | None = None
    for attempt, later in pairwise([*timeline.attempts, None]):
        if attempt is None:
            break
        until = facts.finished_at if attempt.lost_at is None else attempt.lost_at
        found += _queue(attempt, until, parent)
        if attempt.placed_at is not None:
            found += _placed(attempt, attempt.placed_at, until, facts, parent, timeline.stalls)
        if attempt.lost_at is not None:
            parent = _gap(attempt, attempt.lost_at, later, facts)
            found.append(parent)
    return sorted(found, key=lambda span: span.start)  # stable: a parent was found before its children


def _gap(attempt: Attempt, lost_at: float, later: Attempt | None, facts: Facts) -> Span:
    """Return the time from the loss of an attempt to the first tokens of the next, which was lost before that, or with
    which the request ended. The loss of a worker that decodes may be noticed late, so the gap begins with its last
    token; ``silent_ms`` is the time until the loss was noticed."""
    start = _stopped(attempt, lost_at)
    if later is None:
        end = facts.finished_at
    elif later.first_token_at is not None:
        end = later.first_token_at
    else:
        end = facts.finished_at if later.lost_at is None else later.lost_at
    detail: Json = {
        "from": attempt.lost_from,
        "why": attempt.lost_why,
        "silent_ms": _rounded((lost_at - start) * 1000),
    }
    name = "migration" if attempt.migrates else "retry"
    return Span(name, start, end, attempt.number + 1, detail=detail)


def _stopped(attempt: Attempt, lost_at: float) -> float:
    """Return when the output of a lost attempt stopped: with its last token if it was decoding, else when it was
    lost."""
    began = attempt.first_token_at if attempt.path != "disagg" else attempt.landed_at
    return lost_at if began is None or attempt.first_token_at is None else max(began, attempt.last_token_at)


def _queue(attempt: Attempt, until: float | None, parent: Span | None) -> list[Span]:
    """Return one span for each wait of a stay in the queue."""
    end = until if attempt.placed_at is None else attempt.placed_at
    starts = [(wait.at, wait.why) for wait in attempt.waits]
    if not starts:
        quick = end is not None and end - attempt.entered_at <= QUICK_S
        starts = [(attempt.queued_at, "" if quick else BEHIND_OTHERS)]
    elif starts[0][0] - attempt.entered_at > QUICK_S:
        starts.insert(0, (attempt.queued_at, BEHIND_OTHERS))
    else:
        starts[0] = attempt.queued_at, starts[0][1]
    ends = [start for start, _ in starts[1:]] + [end]
    return [
        Span("queue", start, stop, attempt.number, parent=parent, detail={"why": why} if why else {})
        for (start, why), stop in zip(starts, ends, strict=True)
    ]


def _placed(
    attempt: Attempt,
    placed_at: float,
    until: float | None,
    facts: Facts,
    parent: Span | None,
    stalls: Sequence[tuple[float, float]],
) -> list[Span]:
    """Return the spans of an attempt from its placement on; ``until``: its loss, or the end of the request."""
    number, timings = attempt.number, attempt.timings
    where: Json = {
        "prefill": attempt.prefill,
        "decode": None if attempt.path == "prefill" else attempt.decode,
        "path": attempt.path,
        "why": attempt.why,
    }
    prefill = Span("prefill", placed_at, attempt.first_token_at, number, attempt.prefill, parent)
    if prefill.end is None:
        prefill.end = until
    chunks = _chunks(attempt, prefill)
    prefill.detail = {
        "queue_ms": _rounded(timings.get("queue_ms")),
        "compute_ms": _rounded(timings.get("prefill_ms")),
        "cached_tokens": int(timings.get("cached_tokens", 0)),
        "chunks": sum(chunk.steps for chunk in attempt.chunks),
    }
    found = [Span("place", placed_at, placed_at, number, None, parent, where), prefill, *chunks]
    decodes_from = attempt.first_token_at
    transfer = _transfer(attempt, placed_at, until, facts)
    if transfer is not None:
        found.append(transfer)
        decodes_from = transfer.end
    if (decode := _decode(attempt, decodes_from, until, facts)) is not None:
        found.append(decode)
        for start, end in stalls:
            if decode.start <= start and (decode.end is None or start < decode.end):
                gap: Json = {"gap_ms": _rounded((end - start) * 1000)}
                found.append(Span("stall", start, end, number, attempt.decode, decode, gap))
    return found


def _chunks(attempt: Attempt, prefill: Span) -> list[Span]:
    """Return the steps that computed the prompt. The worker sent its first token when the last one had ended, so their
    times are counted back from the arrival of that token."""
    compute_ms = attempt.timings.get("prefill_ms")
    if attempt.first_token_at is None or compute_ms is None:
        return []
    began = attempt.first_token_at - compute_ms / 1000
    found = []
    for chunk in attempt.chunks:
        start = _within(began + chunk.start_ms / 1000, prefill.start, attempt.first_token_at)
        end = _within(began + (chunk.start_ms + chunk.ms) / 1000, start, attempt.first_token_at)
        detail: Json = {"tokens": chunk.tokens}
        if chunk.steps > 1:
            detail["steps"] = chunk.steps
        found.append(Span("prefill_chunk", start, end, attempt.number, attempt.prefill, prefill, detail))
    return found


def _transfer(attempt: Attempt, placed_at: float, until: float | None, facts: Facts) -> Span | None:
    """Return the hand-off of an attempt; None if it has none, or if nothing is known of it yet.

    It ends when decode has the KV. What of it comes after the first token is exposed; ``wait_ms`` is the part of that
    before decode granted blocks, in which nothing could be sent. Prefill reports the duration later; until then the
    hand-off seems to begin with the first token."""
    first, timings, landed = attempt.first_token_at, attempt.timings, attempt.landed_at
    if attempt.path != "disagg" or first is None:
        return None
    duration_ms = timings.get("transfer_ms")
    if landed is None and attempt.lost_at is None:
        if duration_ms is not None:  # decode's figures were lost
            landed = first + max(0.0, timings.get("transfer_exposed_ms", 0.0)) / 1000
        elif facts.path != "disagg":  # the first token ended the request
            return None
    end = until if landed is None else max(first, landed)
    start = first
    hidden_ms: float | None = None
    wait_ms: float | None = None
    if duration_ms is not None and landed is not None:
        sent_from = _within(landed - duration_ms / 1000, placed_at, max(landed, placed_at))
        start = min(first, sent_from)
        hidden_ms, wait_ms = (first - start) * 1000, max(0.0, sent_from - first) * 1000
    bytes = timings.get("kv_bytes")
    detail: Json = {
        "to": attempt.decode,
        "link": attempt.link or None,
        "bytes": None if bytes is None else int(bytes),
        "hidden_ms": _rounded(hidden_ms),
        "exposed_ms": None if end is None else _rounded((end - first) * 1000),
        "wait_ms": _rounded(wait_ms),
    }
    return Span("transfer", start, end, attempt.number, attempt.prefill, detail=detail)


def _decode(attempt: Attempt, start: float | None, until: float | None, facts: Facts) -> Span | None:
    """Return the span in which an attempt's later tokens are computed; None if it has none."""
    first = attempt.first_token_at
    if first is None or start is None or attempt.path == "prefill":
        return None
    tokens = (facts.output_tokens if attempt.lost_at is None else attempt.tokens_end) - attempt.tokens_first
    if attempt.path == "disagg" and attempt.landed_at is None and not tokens:
        return None
    if not tokens and until is not None and attempt.landed_at is None:
        return None
    if attempt.lost_at is not None:
        until = _stopped(attempt, attempt.lost_at)
    detail: Json = {"wait_ms": _rounded(attempt.timings.get("decode_wait_ms")), "tokens": tokens}
    return Span("decode", max(first, start), until, attempt.number, attempt.decode, detail=detail)


def cached_tokens(timeline: Timeline) -> int:
    """Return the prompt tokens that the attempt which began the answer found in a prefix cache."""
    for attempt in timeline.attempts:
        if "cached_tokens" in attempt.timings and (attempt.first_token_at is not None or attempt.lost_at is None):
            return int(attempt.timings["cached_tokens"])
    return 0


def _intervals(facts: Facts) -> Json | None:
    """Return the mean, the 99th percentile and the maximum of the intervals between tokens of a choice, in
    milliseconds; None before there is one."""
    later = facts.output_tokens - facts.choices
    if later <= 0 or facts.first_token_at is None or not facts.intervals:
        return None
    longest = heapq.nlargest(len(facts.intervals) - len(facts.intervals) * 99 // 100, facts.intervals)
    return {
        "mean": _rounded((facts.last_token_at - facts.first_token_at) * facts.choices / later * 1000),
        "p99": _rounded(longest[-1] * 1000),
        "max": _rounded(longest[0] * 1000),
    }


def _since(timeline: Timeline, time: float | None) -> float | None:
    return None if time is None else round((time - timeline.arrived_at) * 1000, 3)


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 3)


def _within(time: float, least: float, most: float) -> float:
    return max(least, min(most, time))
