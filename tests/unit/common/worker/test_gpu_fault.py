"""A worker whose GPU fails leaves in words and at once; one without a GPU sends nothing about it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import zmq

from common.core.errors import StartError
from common.core.ids import Incarnation
from common.net.messages import FromWorker, Goodbye, Gpus, Heartbeat, Hello, Welcome
from common.net.sockets import bind_router, send
from common.net.wire import decode
from common.platform.gpu_monitor import GpuMonitor
from common.worker.loop import WorkerSettings
from decode.role import DecodeWorker
from tests.fakes.nvml_cards import FakeCard, FakeNvml
from tests.fakes.oracle import OracleEngine, hello_of
from tests.pace import scaled

UUID = "GPU-1111"
FAULT = "GPU 0 (NVIDIA H100 80GB HBM3) reports Xid 79: it has fallen off the bus; restart the machine"


class Coordinator:
    """Welcomes a worker and records what it says, in a thread, since a worker's loop needs the main one. ``reached`` is
    called after each message."""

    def __init__(self, reached: Any) -> None:
        self.said: list[Any] = []
        self._reached = reached
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = bind_router(self._context, "tcp://127.0.0.1:*")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]

    def _run(self) -> None:
        while self._socket.poll(int(1000 * scaled(10.0))):
            identity, body = self._socket.recv_multipart()
            message = decode(body, FromWorker)
            self.said.append(message)
            if isinstance(message, Hello):
                send(self._socket, Welcome(Incarnation("test"), 20, 60_000, 2000), identity)
            self._reached(self)
            if isinstance(message, Goodbye):
                return

    def close(self) -> None:
        self._thread.join()
        self._socket.close(0)
        self._context.destroy(0)


def run_worker(coordinator: Coordinator, monitor: GpuMonitor | None) -> DecodeWorker:
    """Run a worker until it leaves."""
    engine = OracleEngine(64)
    worker = DecodeWorker(engine, WorkerSettings(coordinator.address, "h", 4, 64), hello_of(engine))
    if monitor is not None:
        worker.watch_gpus(monitor)
    try:
        worker.run()
    finally:
        engine.memory.close()
        coordinator.close()
    return worker


def watched(nvml: FakeNvml) -> GpuMonitor:
    monitor = GpuMonitor(nvml, [UUID], every_s=0.05)
    monitor.start()
    return monitor


def test_readings_follow_heartbeats_and_a_fault_ends_it_in_words() -> None:
    nvml = FakeNvml(FakeCard(UUID))
    monitor = watched(nvml)

    def fail(coordinator: Coordinator) -> None:
        if len(coordinator.of(Gpus)) == 3:
            nvml.report(UUID, 79)

    coordinator = Coordinator(fail)
    with pytest.raises(StartError) as left:
        run_worker(coordinator, monitor)
    assert left.value.why == FAULT
    assert [message.reason for message in coordinator.of(Goodbye)] == [FAULT]
    first, *_ = coordinator.of(Gpus)
    assert first.gpus[0].temperature == 64 and not first.fault
    beats = len(coordinator.of(Heartbeat))
    assert beats > len(coordinator.of(Gpus)), "no more often than there are readings"
    kinds = [type(message) for message in coordinator.said if isinstance(message, Heartbeat | Gpus)]
    assert kinds[0] is Heartbeat and all(kinds[at - 1] is Heartbeat for at, kind in enumerate(kinds) if kind is Gpus), (
        "each follows a heartbeat"
    )
    assert monitor._thread is None


def test_a_fault_from_before_the_loop_runs_is_not_forgotten() -> None:
    nvml = FakeNvml(FakeCard(UUID))
    monitor = watched(nvml)
    reported = threading.Event()
    monitor.on_fault = lambda _: reported.set()
    nvml.report(UUID, 79)
    assert reported.wait(scaled(5.0))
    with pytest.raises(StartError, match="Xid 79"):
        run_worker(Coordinator(lambda _: None), monitor)


def test_a_worker_without_a_gpu_sends_nothing_about_it() -> None:
    worker: list[DecodeWorker] = []

    def stop(coordinator: Coordinator) -> None:
        if len(coordinator.of(Heartbeat)) == 5:
            worker[0].drain(0.0)

    coordinator, engine = Coordinator(stop), OracleEngine(64)
    worker.append(DecodeWorker(engine, WorkerSettings(coordinator.address, "h", 4, 64), hello_of(engine)))
    worker[0].run()
    coordinator.close()
    engine.memory.close()
    assert not coordinator.of(Gpus) and [each.reason for each in coordinator.of(Goodbye)] == ["drained"]
