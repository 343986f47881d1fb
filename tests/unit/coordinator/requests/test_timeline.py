"""Timelines: their spans add up to the times of the request, whatever happens to it, and little is kept."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from common.core.ids import RequestId
from common.core.request import FinishReason
from common.net.messages import PromptChunk
from coordinator.requests.state import State
from coordinator.requests.timeline import (
    BEHIND_OTHERS,
    MAX_ATTEMPTS,
    MAX_INTERVALS,
    MAX_STALLS,
    MAX_WAITS,
    STALL_S,
    Event,
    Timeline,
    Timelines,
)
from coordinator.requests.waterfall import shown
from coordinator.routing.router import Placement


@dataclass
class FakeRecord:
    """The fields of a record that a timeline reads."""

    id: RequestId = RequestId(b"\1" * 16)  # noqa: RUF009 - bytes do not change
    n: int = 1
    arrived_at: float = 100.0
    tokenized_at: float = 100.002
    first_token_at: float | None = None
    last_token_at: list[float] = field(default_factory=lambda: [0.0])
    intervals: array[float] = field(default_factory=lambda: array("f"))
    prompt_length: int = 512
    output_length: int = 0
    path: str = "disagg"
    state: State = State.QUEUED
    finish: list[FinishReason] = field(default_factory=lambda: [FinishReason.RUNNING])

    @property
    def progress(self) -> Any:
        return SimpleNamespace(state=self.state, finish=self.finish)


def placement(prefill: str | None, decode: str, path: Any = "disagg", why: str = "least loaded") -> Placement:
    def worker(name: str) -> Any:
        return SimpleNamespace(hello=SimpleNamespace(name=name))

    return Placement(path, worker(prefill) if prefill else None, worker(decode), why)


class Story:
    """A request whose events the test tells; times are milliseconds since its arrival."""

    def __init__(self, **fields: Any) -> None:
        self.record = FakeRecord(**fields)
        self.timeline = Timeline(id="chatcmpl-1", request_id="mine", arrived_unix_s=1_000.0)
        self.timelines = Timelines()
        self.events: list[Event] = []
        self.timelines.listeners.append(lambda timeline, event: self.events.append(event))
        self.timelines.open(self.timeline, self.record, self.record.tokenized_at)

    @staticmethod
    def at(ms: float) -> float:
        return 100.0 + ms / 1000

    def place(
        self, ms: float, prefill: str | None = "prefill-0", decode: str = "decode-0", path: str = "disagg"
    ) -> None:
        self.record.state, self.record.path = State.PREFILLING, path
        self.timeline.place(self.at(ms), placement(prefill, decode, path))

    def first_token(self, ms: float) -> None:
        self.record.output_length += 1
        self.timeline.first_tokens(self.at(ms), self.record.output_length)
        if self.record.first_token_at is None:
            self.record.first_token_at = self.at(ms)
        self.record.last_token_at = [self.at(ms)]

    def tokens(self, count: int, until_ms: float) -> None:
        self.record.state = State.DECODING
        self.record.output_length += count
        self.record.last_token_at = [self.at(until_ms)]

    def lose(self, ms: float, worker: str, why: str = "it died") -> None:
        self.record.state = State.QUEUED
        self.timeline.lose(self.at(ms), worker, why, migrates=self.record.output_length > 0)

    def end(self, ms: float, state: State = State.DONE) -> dict[str, Any]:
        self.record.state, self.record.finish = state, [FinishReason.LENGTH]
        self.timelines.end(self.timeline, self.at(ms))
        return shown(self.timeline)


def spans(request: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [span for span in request["spans"] if span["name"] == name]


def one(request: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = spans(request, name)
    return found


def check(request: dict[str, Any]) -> None:
    """Check the rules of spans: nested, in order, and without gap or overlap from the arrival to the end."""
    starts = [span["start_ms"] for span in request["spans"]]
    assert starts == sorted(starts)
    for span in request["spans"]:
        if span["parent"] is not None:
            parent = request["spans"][span["parent"]]
            assert parent["start_ms"] <= span["start_ms"], (parent, span)
            assert parent["end_ms"] is None or span["end_ms"] <= parent["end_ms"] + 0.002, (parent, span)
        assert span["end_ms"] is None or span["end_ms"] >= span["start_ms"]
    now_ms = 0.0
    covering = [
        (span["start_ms"], span["end_ms"], span["name"])
        for span in request["spans"]
        if span["parent"] is None and span["name"] not in ("stall", "place", "transfer")
    ]
    exposed = [
        (max(span["start_ms"], span["end_ms"] - span["detail"]["exposed_ms"]), span["end_ms"], "exposed")
        for span in spans(request, "transfer")
        if span["end_ms"] is not None and span["detail"]["exposed_ms"]
    ]
    for start_ms, end_ms, name in sorted([*covering, *exposed]):
        assert start_ms == pytest.approx(now_ms, abs=0.01), f"a gap or overlap before {name}"
        now_ms = end_ms
    if request["total_ms"] is not None:
        assert now_ms == pytest.approx(request["total_ms"], abs=0.01)


def test_spans_of_a_hand_off_add_up() -> None:
    story = Story()
    story.place(5)
    values = {"queue_ms": 1.0, "prefill_ms": 30.0, "cached_tokens": 128.0, "unknown": 1.0}
    chunks = PromptChunk(0.0, 12.0, 256), PromptChunk(15.0, 15.0, 128)
    story.timeline.report(0, values, chunks=chunks)
    story.first_token(38)
    story.timeline.report(0, {"decode_wait_ms": 2.0})
    story.timeline.land(story.at(45))
    story.tokens(9, 90)
    story.timeline.report(0, {"transfer_ms": 20.0, "transfer_exposed_ms": 6.0, "kv_bytes": 4096.0}, "shm")
    running = shown(story.timeline)
    assert running["state"] == "decoding" and running["total_ms"] is None and one(running, "decode")["end_ms"] is None
    request = story.end(90)
    check(request)
    assert request["ttft_ms"] == 38.0 and request["total_ms"] == 90.0 and request["arrived"] == 1000.0
    assert request["cached_tokens"] == 128 and request["output_tokens"] == 10 and request["finish"] == ["length"]
    assert (one(request, "tokenize")["end_ms"], one(request, "queue")["end_ms"]) == (2.0, 5.0)
    prefill, transfer, decode = (one(request, name) for name in ("prefill", "transfer", "decode"))
    assert (prefill["start_ms"], prefill["end_ms"], prefill["worker"]) == (5.0, 38.0, "prefill-0")
    assert prefill["detail"] == {"queue_ms": 1.0, "compute_ms": 30.0, "cached_tokens": 128, "chunks": 2}
    found = [(span["start_ms"], span["end_ms"], span["detail"]) for span in spans(request, "prefill_chunk")]
    assert found == [(8.0, 20.0, {"tokens": 256}), (23.0, 38.0, {"tokens": 128})]
    assert all(request["spans"][span["parent"]] is prefill for span in spans(request, "prefill_chunk"))
    assert (transfer["start_ms"], transfer["end_ms"]) == (23.0, 43.0)
    assert transfer["detail"] == {
        "to": "decode-0", "link": "shm", "bytes": 4096, "hidden_ms": 15.0, "exposed_ms": 5.0, "wait_ms": 0.0,
    }  # fmt: skip
    assert (decode["start_ms"], decode["end_ms"], decode["worker"]) == (43.0, 90.0, "decode-0")
    assert decode["detail"] == {"wait_ms": 2.0, "tokens": 9}
    place = one(request, "place")["detail"]
    assert place == {"prefill": "prefill-0", "decode": "decode-0", "path": "disagg", "why": "least loaded"}
    assert story.events == ["start", "placed", "first_token", "end"]


def test_a_migration_shows_both_workers_and_the_gap() -> None:
    story = Story()
    story.place(4)
    story.first_token(20)
    story.timeline.land(story.at(25))
    story.tokens(10, 100)
    story.lose(150, "decode-0", "its connection broke")
    story.timeline.wait(story.at(151), "waiting for the other workers to answer a ping")
    story.place(180, "prefill-0", "decode-1")
    story.timeline.report(1, {"queue_ms": 0.0, "prefill_ms": 15.0, "cached_tokens": 500.0})
    story.first_token(200)
    story.timeline.land(story.at(204))
    story.tokens(5, 260)
    request = story.end(260)
    check(request)
    assert (request["retries"], request["migrations"]) == (0, 1)
    assert [span["worker"] for span in spans(request, "decode")] == ["decode-0", "decode-1"]
    assert [span["detail"]["tokens"] for span in spans(request, "decode")] == [10, 5]
    gap = one(request, "migration")
    assert (gap["start_ms"], gap["end_ms"], gap["attempt"]) == (100.0, 200.0, 1), "from token to token"
    assert gap["detail"] == {"from": "decode-0", "why": "its connection broke", "silent_ms": 50.0}
    inside = [span["name"] for span in request["spans"] if span["parent"] == request["spans"].index(gap)]
    assert inside == ["queue", "place", "prefill"]
    assert [span["detail"].get("why") for span in spans(request, "queue")][1:] == [
        "waiting for the other workers to answer a ping"
    ]
    assert story.events == ["start", "placed", "first_token", "retried", "placed", "resumed", "end"]


def test_losses_before_the_first_token_are_retries() -> None:
    story = Story()
    story.place(4)
    story.lose(10, "prefill-0")
    story.place(12, "prefill-1")
    story.lose(30, "prefill-1")
    story.place(31, None, "decode-0", "local")
    story.first_token(60)
    request = story.end(60)
    check(request)
    assert request["ttft_ms"] == 60.0 and request["retries"] == 2 and request["path"] == "local"
    assert [(span["start_ms"], span["end_ms"]) for span in spans(request, "retry")] == [(10.0, 30.0), (30.0, 60.0)]
    assert [span["worker"] for span in spans(request, "prefill")] == ["prefill-0", "prefill-1", "decode-0"]
    assert not spans(request, "transfer") and not spans(request, "decode")


def test_a_request_that_never_finds_a_worker() -> None:
    story = Story()
    story.timeline.wait(story.at(40), "512 tokens are queued for prefill")
    story.timeline.wait(story.at(50), "640 tokens are queued for prefill")
    story.timeline.wait(story.at(60), "no decode worker is ready")
    story.timeline.error = "No decode worker is ready."
    request = story.end(100, State.FAILED)
    check(request)
    assert request["path"] is None and request["ttft_ms"] is None and request["itl_ms"] is None
    assert request["error"] == "No decode worker is ready." and request["state"] == "failed"
    waits = [(span["start_ms"], span["end_ms"], span["detail"]["why"]) for span in spans(request, "queue")]
    assert waits == [
        (2.0, 40.0, BEHIND_OTHERS),
        (40.0, 60.0, "640 tokens are queued for prefill"),
        (60.0, 100.0, "no decode worker is ready"),
    ]


@pytest.mark.parametrize(("ms", "detail"), [(6.5, {}), (8.0, {"why": BEHIND_OTHERS})])
def test_a_quick_placement_needs_no_reason(ms: float, detail: dict[str, str]) -> None:
    story = Story()
    story.place(ms)
    assert one(shown(story.timeline), "queue")["detail"] == detail


def test_the_first_token_may_end_a_request() -> None:
    story = Story()
    story.place(5)
    story.first_token(20)
    story.record.path = "prefill"
    request = story.end(20)
    check(request)
    assert not spans(request, "transfer") and not spans(request, "decode")


def test_figures_of_a_hand_off_that_come_late_or_not_at_all() -> None:
    story = Story()
    story.place(5)
    story.first_token(20)
    story.timeline.land(story.at(30))
    story.tokens(2, 40)
    request = story.end(40)
    check(request)
    transfer = one(request, "transfer")
    assert (transfer["start_ms"], transfer["end_ms"], transfer["detail"]["bytes"]) == (20.0, 30.0, None)
    assert transfer["detail"]["hidden_ms"] is None and transfer["detail"]["exposed_ms"] == 10.0
    story.timeline.report(0, {"transfer_ms": 25.0, "transfer_exposed_ms": 11.0, "kv_bytes": 10.0}, "shm")
    assert story.events[-1] == "late"
    request = shown(story.timeline)
    check(request)
    assert (one(request, "transfer")["start_ms"], one(request, "transfer")["detail"]["hidden_ms"]) == (5.0, 15.0)


def test_a_hand_off_that_waits_for_blocks_on_decode() -> None:
    story = Story()
    story.place(5)
    story.first_token(20)
    story.timeline.land(story.at(100))
    story.timeline.report(0, {"transfer_ms": 8.0, "transfer_exposed_ms": 8.0, "kv_bytes": 10.0}, "shm")
    story.tokens(2, 120)
    request = story.end(120)
    check(request)
    transfer = one(request, "transfer")
    assert (transfer["start_ms"], transfer["end_ms"]) == (20.0, 100.0)
    assert (transfer["detail"]["hidden_ms"], transfer["detail"]["exposed_ms"]) == (0.0, 80.0)
    assert transfer["detail"]["wait_ms"] == 72.0


def test_worker_figures_that_cannot_be_true_stay_inside_their_spans() -> None:
    story = Story()
    story.place(5)
    chunks = PromptChunk(-1e17, 1e18, 1), PromptChunk(1e18, -1e18, 1)
    story.timeline.report(0, {"prefill_ms": 1e18, "decode_wait_ms": -1e18, "transfer_ms": -1e18}, chunks=chunks)
    story.first_token(20)
    story.timeline.land(story.at(30))
    story.tokens(2, 40)
    check(story.end(40))


@pytest.mark.parametrize(
    ("gap_ms", "usual_s", "intervals", "stalls"),
    [(260, 0.01, 3, 1), (240, 0.01, 3, 0), (260, 0.04, 3, 0), (260, 0.01, 2, 0)],
)
def test_a_long_gap_between_tokens_is_a_stall(gap_ms: float, usual_s: float, intervals: int, stalls: int) -> None:
    story = Story()
    story.place(5)
    story.first_token(20)
    story.timeline.land(story.at(30))
    if gap_ms / 1000 > STALL_S:  # the caller's condition
        story.timeline.gap(story.at(100), story.at(100 + gap_ms), usual_s, intervals)
        story.timeline.gap(story.at(101), story.at(100 + gap_ms), usual_s, intervals)  # of another choice
    story.tokens(5, 500)
    request = story.end(500)
    check(request)
    assert len(spans(request, "stall")) == stalls
    for stall in spans(request, "stall"):
        assert (stall["start_ms"], stall["end_ms"], stall["detail"]) == (100.0, 360.0, {"gap_ms": 260.0})
        assert request["spans"][stall["parent"]]["name"] == "decode"


def test_a_gap_that_a_migration_or_a_hand_off_explains_is_no_stall() -> None:
    story = Story()
    story.place(5)
    story.first_token(20)
    story.timeline.land(story.at(400))
    story.timeline.gap(story.at(20), story.at(410), 0.01, 5)
    story.lose(500, "decode-0")
    story.place(510, None, "decode-1", "local")
    story.first_token(900)
    story.timeline.gap(story.at(480), story.at(900), 0.01, 5)
    assert not story.timeline.stalls


def test_intervals_are_summed_up() -> None:
    story = Story()
    story.place(5)
    story.first_token(20)
    story.record.intervals.extend([0.01] * 98 + [0.02, 0.05])
    story.tokens(100, 1120)
    assert story.end(1120)["itl_ms"] == {"mean": 11.0, "p99": 50.0, "max": 50.0}


def test_of_very_many_intervals_the_percentiles_are_kept() -> None:
    story = Story()
    story.place(5)
    story.first_token(20)
    story.record.intervals.extend(number / 1e6 for number in range(100_000))
    story.tokens(100_000, 1e6)
    found = story.end(1e6)["itl_ms"]
    assert len(story.timeline.facts().intervals) == MAX_INTERVALS
    assert found["p99"] == pytest.approx(99.0, rel=0.01) and found["max"] == pytest.approx(99.999)


def test_what_a_timeline_keeps_is_bounded() -> None:
    story = Story()
    for number in range(3 * MAX_WAITS):
        story.timeline.wait(story.at(number), "x" * number)
    assert len(story.timeline.attempts[0].waits) == MAX_WAITS
    for number in range(3 * MAX_ATTEMPTS):
        story.place(10 * number + 5)
        story.lose(10 * number + 7, "prefill-0")
    assert len(story.timeline.attempts) == MAX_ATTEMPTS
    story.place(1000)
    story.first_token(1001)
    for number in range(2 * MAX_STALLS):
        story.timeline.gap(story.at(2000 + 1000 * number), story.at(2900 + 1000 * number), 0.01, 9)
    assert len(story.timeline.stalls) == MAX_STALLS
    request = story.end(1e6)
    assert request["retries"] == 3 * MAX_ATTEMPTS and len(request["spans"]) < 400


def test_an_ended_request_does_not_keep_its_record() -> None:
    story = Story()
    story.place(5)
    story.end(50, State.ABORTED)
    assert story.timeline._record is None and story.timeline.facts().prompt_tokens == 512


def test_the_last_ended_requests_are_found_by_any_of_their_ids() -> None:
    timelines = Timelines(most=3)
    made = []
    for number in range(6):
        record = FakeRecord(id=RequestId(bytes([number]) * 16), arrived_at=100.0 + number)
        timeline = Timeline(id=f"chatcmpl-{number}", request_id="same" if number > 3 else f"req-{number}")
        timelines.open(timeline, record, 200.0)
        made.append(timeline)
    for timeline in made[:5]:
        timelines.end(timeline, 200.0)
    assert timelines.find("chatcmpl-0") is timelines.find("req-1") is None
    assert timelines.find("chatcmpl-2") is timelines.find("req-2") is timelines.find("02" * 16) is made[2]
    assert timelines.find("same") is made[5], "the latest"
    assert timelines.get(RequestId(bytes([5]) * 16)) is made[5]
    assert timelines.recent(3) == made[:-4:-1]


def test_the_first_of_several_prompts_is_found_by_the_request_id() -> None:
    timelines = Timelines()
    for number in range(3):
        id = f"cmpl-7.{number}" if number else "cmpl-7"
        timelines.open(Timeline(id=id, request_id="mine"), FakeRecord(id=RequestId(bytes([number]) * 16)), 200.0)
    found = timelines.find("mine")
    assert found is not None and found.id == "cmpl-7"


def test_a_listener_that_fails_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    timelines, seen = Timelines(), list[Event]()

    def fail(timeline: Timeline, event: Event) -> None:
        raise ValueError("broken")

    timelines.listeners += [fail, lambda timeline, event: seen.append(event)]
    timelines.open(Timeline(), FakeRecord(), 200.0)
    assert seen == ["start"] and "a listener of requests failed" in caplog.text
