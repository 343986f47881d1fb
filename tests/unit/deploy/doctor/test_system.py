"""The checks of a running system: what /admin/workers shows that is late, broken, slow or far."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from common.core.errors import StartError
from deploy.doctor import system
from deploy.doctor.finding import Finding
from deploy.running_system import Answers, ask


def worker(name: str, **changes: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "id": name, "role": name.partition("-")[0], "state": "ready", "host": "a", "device": "cpu", "dtype": "float32",
        "kv_blocks": {"total": 100, "free": 70, "cached": 10, "held": 20}, "block_size": 16, "heard_ms": 40,
        "links": [], "transports": ["shm", "zmq"], "avoids": [], "gpus": [], "counters": {},
    }  # fmt: skip
    return known | changes


def link(to: str, rate: float = 1.0, transport: str = "shm") -> dict[str, Any]:
    return {"to": to, "transport": transport, "gb_per_s": rate, "latency_us": 300.0}


def answers(*workers: dict[str, Any], absent: tuple[dict[str, Any], ...] = (), not_ready: str = "") -> Answers:
    return Answers("1.0", not_ready, workers, absent)


def told(findings: Iterator[Finding]) -> dict[str, str]:
    """Return the level of each text."""
    return {each.text: each.level for each in findings}


def test_a_healthy_system() -> None:
    found = answers(worker("prefill-0", links=[link("decode-0")]), worker("decode-0", clock_ms=3))
    assert told(system.system("http://a", found, "1.0")) == {"http://a serves with 1 prefill, 1 decode": "good"}
    assert set(told(system.workers(found)).values()) == {"good"}
    assert told(system.clocks(found)) == {"a: as the coordinator's, within 3 ms": "good"}
    assert told(system.links(found)) == {"prefill-0 to decode-0: shm, 1.0 GB/s, 300 µs": "good"}


def test_a_system_that_is_not_ready_or_of_another_version() -> None:
    found = told(system.system("http://a", answers(not_ready="No decode worker is ready."), "2.0"))
    assert found == {
        "http://a is not ready: No decode worker is ready.": "bad",
        "it runs version 1.0, this is 2.0": "warning",
    }


@pytest.mark.parametrize(
    ("changes", "text", "level"),
    [
        ({"state": "draining"}, "prefill-0 is draining", "warning"),
        ({"heard_ms": 1500}, "silent for 1500 ms", "warning"),
        ({"counters": {"leaked_blocks": 2.0}}, "has lost 2 KV blocks", "bad"),
        ({"counters": {"bad_messages": 1.0, "cut_off_peers": 0.0}}, "dropped 1 invalid", "warning"),
        ({"counters": {"cut_off_peers": 1.0}}, "ignores 1 peers", "warning"),
        ({"gpus": [{"index": 0, "throttled_by": ["power_cap"]}]}, "slowed down by power_cap", "warning"),
        ({"dtype": "bfloat16"}, "different types (bfloat16, float32)", "warning"),
    ],
)
def test_a_worker_with_a_problem(changes: dict[str, Any], text: str, level: str) -> None:
    found = told(system.workers(answers(worker("prefill-0", **changes), worker("decode-0"))))
    assert [each for each, its in found.items() if text in each and its == level], found


def test_an_absent_worker_is_bad() -> None:
    gone = {"id": "decode-0", "why": "exited (signal 9)", "for_s": 3.2, "restart_in_s": 2.0}
    found = told(system.workers(answers(worker("prefill-0"), absent=(gone,))))
    assert found["decode-0 is absent for 3 s: exited (signal 9); started again in 2 s"] == "bad"


def test_clocks_of_several_hosts() -> None:
    """Of several workers of a host, the heartbeat that was the least late."""
    found = answers(
        worker("prefill-0", host="a", clock_ms=-900), worker("prefill-1", host="a", clock_ms=-4),
        worker("decode-0", host="b", clock_ms=2400), worker("decode-1", host="c", clock_ms=None),
    )  # fmt: skip
    assert told(system.clocks(found)) == {
        "a: as the coordinator's, within 4 ms": "good",
        "b: 2400 ms ahead of the coordinator: lines of its logs are hard to order": "warning",
    }


def test_links_of_all_pairs() -> None:
    rates = {"decode-0": 4.0, "decode-1": 4.2, "decode-2": 0.4}
    sends = worker("prefill-0", links=[link(to, rate, "zmq") for to, rate in rates.items()], avoids=["decode-1"])
    others = [worker(f"decode-{number}", host="b") for number in range(4)]
    found = told(system.links(answers(sends, *others)))
    assert found["prefill-0 to decode-0: zmq, 4.0 GB/s, 300 µs"] == "good"
    slow = "prefill-0 to decode-2: zmq, 0.4 GB/s, 300 µs: the median of its kind is 3.7 GiB/s"
    assert found[slow] == "warning"
    (todo,) = (each.do for each in system.links(answers(sends, *others)) if each.text == slow)
    assert "network" in todo
    here = [worker(f"decode-{number}") for number in range(3)]
    (todo,) = (each.do for each in system.links(answers(sends, *here)) if "0.4 GB/s" in each.text)
    assert "network" not in todo
    assert [each for each in found if each.startswith("1 of 4 pairs were not measured")]
    assert [each for each in found if "does not hand over to decode-1" in each]


def test_a_slow_transport_on_one_host_is_noticed() -> None:
    found = answers(worker("prefill-0", links=[link("decode-0", 0.02, "zmq")]), worker("decode-0"))
    ((text, level),) = told(system.links(found)).items()
    assert level == "warning" and "zmq, 20.0 MB/s" in text and "though both are on a" in text


def test_many_links_are_summed_up() -> None:
    sends = [worker(f"prefill-{at}", links=[link(f"decode-{to}") for to in range(5)]) for at in range(5)]
    found = told(system.links(answers(*sends, *(worker(f"decode-{at}") for at in range(5)))))
    assert list(found) == ["25 pairs measured, medians: shm 953.7 MiB/s"]


def test_without_pools_there_are_no_links() -> None:
    assert list(told(system.links(answers(worker("colocated-0"))))) == [
        "no prefill or no decode worker: nothing is handed over"
    ]


@contextmanager
def server(pages: dict[str, tuple[int, Any]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = pages[self.path]
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{served.server_address[1]}"
        served.shutdown()
        thread.join()


def test_what_a_server_answers() -> None:
    pages = {
        "/admin/workers": (200, {"workers": [worker("decode-0")], "absent": []}),
        "/ready": (503, {"error": {"message": "No prefill worker is ready."}}),
        "/version": (200, {"version": "9"}),
    }
    with server(pages) as url:
        found = ask(url, None)
    assert found.version == "9" and found.not_ready == "No prefill worker is ready." and len(found.workers) == 1
    assert found.model == worker("decode-0").get("model", "") and found.empty_pools == ["prefill"]
    listed = {"workers": [], "absent": [], "model": "tiny", "expected": {"prefill": 0, "decode": 1, "colocated": 0}}
    with server(pages | {"/admin/workers": (200, listed)}) as url:
        found = ask(url, None)
    assert (found.model, found.empty_pools) == ("tiny", ["decode"])
    with server(pages | {"/admin/workers": (403, {})}) as url:
        with pytest.raises(StartError, match="does not list") as refused:
            ask(url, None, "--admin-api-key")
        assert refused.value.why == "it wants a key" and "--admin-api-key or TANDEM_ADMIN" in refused.value.todo
        with pytest.raises(StartError, match="it wants another key"):
            ask(url, "key")
    found_out = system.unreachable(url, refused.value, False)
    assert found_out.level == "warning" and "none runs" not in found_out.text, (
        "a system runs that keeps its workers secret"
    )
    with pytest.raises(StartError, match="cannot reach") as refused:
        ask(url, None)
    assert system.unreachable(url, refused.value, True).level == "bad"
    assert system.unreachable(url, refused.value, False).level == "good"
