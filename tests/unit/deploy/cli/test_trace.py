"""``tandem trace``: the waterfall in text."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from common.config.trace import TraceConfig
from common.core.errors import StartError
from deploy.cli.trace import ASCII, run, table, waterfall


def span(name: str, start: float, end: float | None, worker: str = "", parent: int | None = None, **detail: Any) -> Any:
    return {
        "name": name, "start_ms": start, "end_ms": end, "attempt": 0, "worker": worker or None, "parent": parent,
        "detail": detail,
    }  # fmt: skip


def placed(start: float, prefill: str, decode: str | None, path: str = "disagg") -> Any:
    return span("place", start, start, prefill=prefill, decode=decode, path=path, why="least loaded")


def prefilled(start: float, end: float, worker: str, parent: int | None = None) -> Any:
    return span("prefill", start, end, worker, parent, queue_ms=1.0, compute_ms=9.0, cached_tokens=16, chunks=2)


REQUEST: dict[str, Any] = {
    "id": "chatcmpl-1", "request_id": "mine", "trace_id": None, "endpoint": "/v1/chat/completions", "arrived": 1000.0,
    "state": "done", "path": "disagg", "stream": True, "prompt_tokens": 40, "cached_tokens": 16, "output_tokens": 9,
    "choices": 1, "finish": ["stop"], "error": None, "retries": 0, "migrations": 1, "ttft_ms": 20.0, "total_ms": 100.0,
    "itl_ms": {"mean": 10.0, "p99": 30.0, "max": 30.0},
    "spans": [
        span("tokenize", 0.0, 2.0, grammar_ms=1.5),
        span("queue", 2.0, 10.0, why="no decode worker is ready"),
        placed(10.0, "prefill-0", "decode-0"),
        prefilled(10.0, 20.0, "prefill-0"),
        span("prefill_chunk", 11.0, 14.0, "prefill-0", 3, tokens=10),
        span("prefill_chunk", 15.0, 20.0, "prefill-0", 3, tokens=14, steps=3),
        span(
            "transfer", 15.0, 25.0, "prefill-0", to="decode-0", link="shm", bytes=4_096_000, hidden_ms=5.0,
            exposed_ms=5.0, wait_ms=0.0,
        ),
        span("decode", 25.0, 50.0, "decode-0", wait_ms=1.0, tokens=4),
        span("stall", 30.0, 40.0, "decode-0", 7, gap_ms=10.0),
        span("migration", 50.0, 70.0, **{"from": "decode-0"}, why="its connection broke", silent_ms=4.0),
        span("queue", 50.0, 55.0, parent=9),
        span("prefill", 55.0, 70.0, "decode-1", 9, queue_ms=None, compute_ms=None, cached_tokens=0, chunks=0),
        span("decode", 70.0, 100.0, "decode-1", wait_ms=None, tokens=5),
    ],
}  # fmt: skip


def test_a_waterfall_has_a_bar_for_each_span() -> None:
    lines = list(waterfall(REQUEST, 200, ASCII))
    assert lines[0] == "chatcmpl-1  /v1/chat/completions  done (stop), path disagg"
    assert lines[1] == (
        "40 prompt tokens (16 cached), 9 output tokens; first token after 20.0 ms; total 100.0 ms; "
        "between tokens mean 10.0 ms, p99 30.0 ms, longest 30.0 ms"
    )
    assert lines[2] == "1 migration"
    rows = {line.partition("|")[0].rstrip(): line for line in lines[4:]}
    assert list(rows) == [
        "tokenize", "queue", "place", "prefill   prefill-0", "  chunks", "transfer  prefill-0", "decode    decode-0",
        "  stalls", "migration", "  queue", "  prefill   decode-1", "decode    decode-1",
    ]  # fmt: skip
    bars = {name: row.split("|", 1)[1].rsplit("|", 1)[0] for name, row in rows.items()}
    assert {len(bar) for bar in bars.values()} == {60}
    assert bars["transfer  prefill-0"].strip() == "---###" and bars["transfer  prefill-0"].index("-") == 9
    assert bars["  chunks"] == " " * 6 + "##" + " " + "###" + " " * 48
    assert bars["decode    decode-1"] == " " * 42 + "#" * 18
    assert bars["place"].strip() == "|"
    assert (
        "no decode worker is ready" in rows["queue"]
        and "lost decode-0: its connection broke, noticed after 4.0 ms" in rows["migration"]
    )
    assert (
        "24 tokens in 4 steps" in rows["  chunks"] and "1 gap between tokens, the longest 10.0 ms" in rows["  stalls"]
    )
    assert "to decode-0, by shm, 4.1 MB, hidden 5.0 ms, exposed 5.0 ms" in rows["transfer  prefill-0"]
    assert "prefill-0 > decode-0 (disagg): least loaded" in rows["place"]
    assert "of which 1.5 ms for the grammar of the output" in rows["tokenize"]


def test_what_does_not_fit_behind_a_bar_is_below_it() -> None:
    lines = list(waterfall(REQUEST, 80, ASCII))
    at = next(place for place, line in enumerate(lines) if line.startswith("transfer"))
    assert lines[at + 1].strip() == "to decode-0, by shm, 4.1 MB, hidden 5.0 ms, exposed 5.0 ms"
    assert all(len(line) <= 80 for line in lines if "|" in line)


def test_a_request_that_runs_or_fails() -> None:
    running = REQUEST | {
        "state": "decoding", "finish": [None], "total_ms": None, "itl_ms": None, "migrations": 0,
        "spans": [*REQUEST["spans"][:7], span("decode", 25.0, None, "decode-0", wait_ms=None, tokens=4)],
    }  # fmt: skip
    lines = list(waterfall(running, 120))
    assert "decoding" in lines[0] and "total" not in lines[1] and lines[-1].rstrip().endswith("4 tokens")
    assert "+ running" in lines[-1]
    assert lines[2].endswith(" 25.0 ms"), "an older coordinator does not say what time it is"
    until_now = list(waterfall(running | {"now_ms": 100.0}, 120, ASCII))
    assert until_now[1].endswith("running for 100.0 ms") and until_now[2].endswith(" 100.0 ms")
    assert until_now[-1].split("|")[1] == " " * 15 + "#" * 45
    failed = REQUEST | {
        "state": "failed", "path": None, "error": "No decode worker is ready.", "ttft_ms": None, "itl_ms": None,
        "spans": REQUEST["spans"][:2],
    }  # fmt: skip
    assert "error: No decode worker is ready." in list(waterfall(failed, 100))


def test_the_list() -> None:
    lines = list(table([REQUEST, REQUEST | {"path": None, "ttft_ms": None, "total_ms": None, "migrations": 0}]))
    assert lines[0].split()[0] == "id" and lines[1].endswith("   1 migration")
    assert lines[2].split() == ["chatcmpl-1", "done", "-", "40", "9", "-", "-"]


@contextmanager
def server(answers: dict[str, tuple[int, Any]]) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers[self.path]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}"
        finally:
            listening.shutdown()
            thread.join()


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    answers: dict[str, tuple[int, Any]] = {
        "/admin/requests/a%2Fb": (200, REQUEST | {"error": "bell \a"}),
        "/admin/requests?limit=20": (200, {"requests": [REQUEST]}),
        "/admin/requests/gone": (404, {}),
        "/admin/requests/closed": (403, {}),
    }
    with server(answers) as url:
        assert run(TraceConfig(url=url), "a/b") == 0
        shown = capsys.readouterr().out
        assert "chatcmpl-1" in shown and "bell ?" in shown
        assert run(TraceConfig(url=url)) == 0
        assert "first token" in capsys.readouterr().out
        with pytest.raises(StartError, match="knows no request gone"):
            run(TraceConfig(url=url), "gone")
        with pytest.raises(StartError, match="HTTP status 403") as refused:
            run(TraceConfig(url=url), "closed")
        assert "give the server's admin key" in refused.value.todo
    with pytest.raises(StartError, match="cannot reach"):
        run(TraceConfig(url=url), "x")
