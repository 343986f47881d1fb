"""The lines of ``tandem top``: they fit the terminal, show what matters, and nothing that could drive the terminal."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.top.lines import BAR, Size, block_bar, chart, plain_text, view
from deploy.top.state import MAX_CHANGES, MAX_REQUESTS, MAX_ROWS, State
from tests.fakes.live_server import request, system, worker

CHANGE = {"name": "decode-0", "state": "lost", "why": "silent for 2 s", "t": 1764571200.0}


def state(*requests: dict[str, Any], **changes: Any) -> State:
    found = State("http://here:1")
    found.take("system", system(**changes))
    found.take_requests(list(requests))
    return found


def text(found: State, size: Size | None = None, focus: str = "0", plain: bool = False) -> str:
    return plain_text(view(found, size or Size(120), focus, plain))


def test_a_snapshot_shows_every_section() -> None:
    history = [{"t": 1.0 * at, "output_tokens_s": 10.0 * at, "ttft_ms": {"p99": 5.0}} for at in range(9)]
    shown = text(state(request("r-1"), history=history, worker_events=[CHANGE]))
    for part in (
        "tandem 1.0  tiny  http://here:1", "requests 1.5/s", "output 190 tok/s", "queued 2 (4,096 tokens)",
        "TTFT p50 12.2  p90 40  p99 80.5 ms", "output tok/s ▁", "max 80", "prefill-0  prefill  ready  cpu",
        "25% held", "shm        0.81 GB/s  0.31 ms", "silent for 2 s",
        "r-1      decoding  disagg  1,024   16      7       34.5     -         prefill-0 > decode-0",
    ):  # fmt: skip
        assert part in shown, part


@pytest.mark.parametrize("width", [1, 20, 80, 300])
@pytest.mark.parametrize("height", [1, 2, 5, 12, 24, 200])
@pytest.mark.parametrize("focus", "01234")
def test_a_view_has_the_size_of_the_terminal(width: int, height: int, focus: str) -> None:
    links = [
        {"from": f"prefill-{at}", "to": "decode-0", "transport": "zmq", "mb_s": 1.0, "ms": 1.0} for at in range(30)
    ]
    found = state(
        *(request(f"r-{at}") for at in range(90)), links=links, workers=[worker(f"decode-{at}") for at in range(40)],
        worker_events=[CHANGE] * 20,
    )  # fmt: skip
    lines = view(found, Size(width, height), focus)
    assert len(lines) == height
    assert max(line.cell_len for line in lines) <= width


def test_a_section_that_is_too_long_says_how_much_is_left_out() -> None:
    found = state(*(request(f"r-{at}") for at in range(90)), workers=[worker("decode-0")])
    lines = text(found, Size(120, 30)).splitlines()
    assert lines[-2].startswith("… ") and lines[-2].endswith(" more") and lines[-1].startswith("q quit")
    shown = sum(line.startswith("r-") for line in lines)
    assert int(lines[-2].split()[1]) == 90 - shown
    assert lines[[line.startswith("r-") for line in lines].index(True)].startswith("r-89"), "the newest first"


def test_one_section_can_have_the_height() -> None:
    found = state(*(request(f"r-{at}") for at in range(90)), worker_events=[CHANGE] * 20)
    assert "transport" not in text(found, Size(120, 30), "3") and "silent" in text(found, Size(120, 30), "3")
    assert "silent" not in text(found, Size(120, 30), "1") and "transport" in text(found, Size(120, 30), "2")


def test_refused_requests_are_shown_while_there_are_some() -> None:
    assert "refused" not in text(state())
    assert "refused 2.5/s" in text(state(rates={"requests_s": 1.0, "refused_s": 2.5}))


def test_many_workers_leave_room_for_requests_and_show_those_in_trouble() -> None:
    workers = [worker(f"decode-{at}", state="draining" if at == 58 else "ready") for at in range(60)]
    gone = {"id": "decode-60", "why": "exited", "restart_in_s": 2.0}
    found = state(*(request(f"r-{at}") for at in range(90)), workers=workers, absent=[gone], worker_events=[CHANGE])
    for focus in "01":
        lines = text(found, Size(120, 30), focus).splitlines()
        assert sum(line.startswith("r-") for line in lines) >= 4, "the last requests"
        (cut,) = (line for line in lines if line.startswith("… ") and line.endswith(" workers"))
        shown = [line.split()[0] for line in lines if line.startswith("decode-") and "CPU" not in line]
        assert shown[:3] == ["decode-60", "decode-58", "decode-0"], "trouble first"
        assert int(cut.split()[1]) == 61 - len(shown)
    lines = text(found, Size(120, 30), "4").splitlines()
    assert sum(line.startswith("decode-") for line in lines) > 20 and not any(line.startswith("r-") for line in lines)
    assert sum(line.startswith("decode-") for line in text(found, Size(120, 200)).splitlines()) == 61, "all fit"


def test_what_the_server_sends_cannot_drive_the_terminal() -> None:
    evil = "\x1b[2J\x1b]0;x\x07\r\n"
    found = state(
        request(f"r{evil}", error=evil, path=evil), model=evil, version=evil, workers=[worker(f"w{evil}", device=evil)],
        links=[{"from": evil, "to": evil, "transport": evil}], worker_events=[{**CHANGE, "why": evil}],
        absent=[{"id": evil, "why": evil, "restart_in_s": None}],
    )  # fmt: skip
    found.trouble = evil
    for line in view(found, Size(200)):
        assert line.plain.isprintable(), repr(line.plain)


def test_fields_that_are_missing_or_of_other_types_are_left_out() -> None:
    found = State("http://here:1")
    assert text(found)
    found.take("system", {})
    assert text(found)
    wrong: Any = [None, 1, "x", [], {}, [{}], [1]]
    for value in wrong:
        found.take("system", dict.fromkeys(system(), value) | {"history": value, "row": value, "worker_events": value})
        found.take("request", {"id": value, "spans": value, "ttft_ms": value, "retries": value})
        found.take("worker", {"name": value, "t": value, "why": value})
        found.take("other", {})
        assert text(found, Size(80, 24))


def test_the_state_is_bounded() -> None:
    found = state()
    for at in range(1000):
        found.take("request", request(f"r-{at}"))
        found.take("worker", CHANGE)
        found.take("system", system(row={"t": at}))
    assert (len(found.requests), len(found.changes), len(found.rows)) == (MAX_REQUESTS, MAX_CHANGES, MAX_ROWS)
    assert "r-999" in found.requests and "r-0" not in found.requests


def test_a_request_is_replaced_by_its_latest_state() -> None:
    found = state(request("r-1"), request("r-2"))
    found.take("request", request("r-1", state="done"))
    assert [each["state"] for each in found.requests.values()] == ["done", "decoding"]


def test_workers_of_requests_have_a_column_only_if_they_are_known() -> None:
    """Spans of requests that ended before the view was opened are not sent."""
    before = {key: value for key, value in request("r-1").items() if key != "spans"}
    assert "total ms  workers" in text(state(before, request("r-2")))
    assert "total ms" in text(state(before)) and "total ms  workers" not in text(state(before))


def test_a_migrated_and_a_failed_request() -> None:
    shown = text(state(request("r-1", retries=1, migrations=2), request("r-2", error="worker lost")))
    assert "1 retried, 2 migrated" in shown and "worker lost" in shown


def test_absent_and_silent_workers_and_a_lost_connection_are_seen() -> None:
    gone = {"id": "decode-1", "why": "exited (signal 9)", "for_s": 2.0, "restart_in_s": 3.2}
    throttled = [{"utilization": 97, "throttled_by": ["power_cap"]}]
    found = state(absent=[gone], workers=[worker("decode-0", heard_ms=2500, gpus=throttled)], draining=True)
    found.trouble, found.is_paused = "refused", True
    shown = text(found)
    for part in (
        "decode-1          absent", "exited (signal 9), again in 3 s", "silent 2.5 s", "GPU 97%  throttled",
        "no connection: refused", "draining", "paused",
    ):  # fmt: skip
        assert part in shown, part


@pytest.mark.parametrize(
    ("blocks", "bar"),
    [
        ({"total": 100, "held": 25, "cached": 25}, "#####=====.........."),
        ({"total": 100, "held": 100, "cached": 0}, "#" * BAR),
        ({"total": 3, "held": 0, "cached": 0}, "." * BAR),
        ({"total": 10, "held": 99, "cached": 99}, "#" * BAR),
        ({"total": 0}, ""),
        ({}, ""),
    ],
)
def test_the_bar_of_blocks(blocks: dict[str, int], bar: str) -> None:
    assert block_bar(blocks, plain=True) == bar


def test_charts() -> None:
    assert chart([0, 4, 8], plain=False) == "▁▅█"
    assert chart([0.0, 0.0], plain=True) == "  "
    assert chart([], plain=True) == ""


def test_without_unicode_only_ascii_is_written() -> None:
    history = [{"output_tokens_s": 1.0}] * 5
    assert text(state(request("r-é"), history=history, model="mödel"), Size(100, 9), plain=True).isascii()
