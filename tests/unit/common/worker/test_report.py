"""The counters that heartbeats report."""

from __future__ import annotations

import mmap
from bisect import bisect_left

from common.net.messages import STEP_SIZES, STEPS_OF
from common.platform.process_usage import process_usage
from common.worker.report import USAGE_S
from tests.fakes.oracle import OracleEngine
from tests.unit.workers import Bench, make_request

MOST_COUNTERS = 64
"""Most entries of a heartbeat's counters; a heartbeat with more is refused."""


def test_steps_are_counted_by_size(pair: Bench) -> None:
    requests = [make_request(length, 20) for length in (5, 30, 100)]
    for request in requests:
        pair.place(request, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(*requests))
    pair.until(pair.quiet)
    for worker in pair.workers.values():
        counters = worker.report.counters
        assert sum(counters.get(name, 0) for name in STEPS_OF) == counters["steps"] > 0
        assert counters["step_seconds"] >= 0
    assert pair.workers["prefill-0"].report.counters["step_tokens"] == 135
    assert pair.workers["decode-1"].report.counters["step_tokens"] == 3 * 19


def test_a_size_is_counted_at_its_bound(bench: Bench) -> None:
    report = bench.add("decode", OracleEngine(512)).report
    sizes = [1, 2, 8, 9, 16_384, 16_385, 1 << 20]
    for tokens in sizes:
        report.stepped(tokens, 0.5)
    found = {name: count for name, count in report.counters.items() if name in STEPS_OF}
    assert found == {"steps_of_1": 1, "steps_of_8": 2, "steps_of_16": 1, "steps_of_16384": 1, "steps_of_more": 2}
    assert [STEPS_OF[bisect_left(STEP_SIZES, size)] for size in STEP_SIZES] == list(STEPS_OF[:-1])
    assert report.counters["step_seconds"] == 3.5


def test_what_the_process_uses_is_read_once_per_interval(bench: Bench) -> None:
    worker = bench.add("decode", OracleEngine(512))
    now, read = 100.0, list[float]()

    def usage() -> dict[str, float]:
        read.append(now)
        return {"process_cpu_seconds": float(len(read))}

    worker.report.usage, worker.clock = usage, lambda: now
    for _ in range(50):
        worker.report.publish()
        now += 0.05
    assert 2 <= len(read) <= 2.5 / USAGE_S + 1
    assert worker.membership.snapshot.counters["process_cpu_seconds"] == len(read)


def test_a_heartbeat_has_room_for_all_counters(bench: Bench) -> None:
    worker = bench.add("decode", OracleEngine(512))
    worker.report.usage = process_usage
    for size in (*STEP_SIZES, 1 << 20):
        worker.report.stepped(size, 0.1)
    worker.report.count("reaped_requests")
    worker.report.publish()
    assert len(worker.report.counters) + len(["borrowed_core_seconds"]) <= MOST_COUNTERS // 2


def test_the_process_uses_time_and_memory() -> None:
    before = process_usage()
    assert before["process_resident_bytes"] > 1 << 20
    with mmap.mmap(-1, 64 << 20) as block:  # new pages: an allocator may return memory that it already had
        block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])
        after = process_usage()
    assert after["process_resident_bytes"] - before["process_resident_bytes"] > 32 << 20
    assert after["process_cpu_seconds"] > before["process_cpu_seconds"]
