"""The monitor of a worker's GPUs, on scripted cards: readings, absent values, faults, and an NVML that vanishes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common.core.gpu import GpuState
from common.platform.gpu_health import FATAL_XIDS, RECOVERY_ACTIONS, fault_of
from common.platform.gpu_monitor import GpuMonitor
from common.platform.gpu_readings import NvmlFailed
from tests.fakes.nvml_cards import BARE, FakeCard, FakeNvml
from tests.pace import scaled

FIRST, SECOND = "GPU-1111", "GPU-2222"


class Watched:
    """A monitor of scripted cards that reads often. ``faults`` and ``stuck`` are what it has called back with."""

    def __init__(self, *cards: FakeCard) -> None:
        self.nvml = FakeNvml(*cards)
        self.monitor = GpuMonitor(self.nvml, [card.uuid for card in cards], every_s=0.02, retry_s=0.05, grace_s=0.1)
        self.faults: list[str] = []
        self.stuck: list[str] = []
        self.reported, self.reported_stuck = threading.Event(), threading.Event()
        self.monitor.on_fault = self._on_fault
        self.monitor.on_stuck = self._on_stuck

    def _on_fault(self, why: str) -> None:
        self.faults.append(why)
        self.reported.set()

    def _on_stuck(self, why: str) -> None:
        self.stuck.append(why)
        self.reported_stuck.set()

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + scaled(5.0)
        while not condition():
            assert time.monotonic() < deadline, self.monitor.states
            self.reported.wait(0.005)

    def fault(self) -> str:
        """Return the fault, once it is reported."""
        assert self.reported.wait(scaled(5.0)), self.monitor.states
        return self.faults[0]


@pytest.fixture
def watch() -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def start(*cards: FakeCard) -> Watched:
        made.append(Watched(*cards))
        made[-1].monitor.start()
        return made[-1]

    yield start
    for each in made:
        each.monitor.stop()


def test_a_data_center_card_is_read_whole(watch: Callable[..., Watched]) -> None:
    (state,) = watch(FakeCard(FIRST)).monitor.states
    assert state == GpuState(
        0, FIRST, "NVIDIA H100 80GB HBM3", utilization=87, memory_used=60 << 30, memory_total=80 << 30,
        power_mw=412_000, power_limit_mw=700_000, temperature=64, sm_mhz=1755, memory_mhz=2619, throttle=5,
        nvlinks_active=18, nvlink_sent=1 << 20, nvlink_received=2 << 20, ecc_corrected=3, ecc_uncorrected=0,
        remapped_corrected=1, remapped_uncorrected=0, remap_pending=False, remap_failed=False, recovery=0,
    )  # fmt: skip
    assert state.throttled_by == ("power_cap",), "idle is no reason to worry"


def test_what_a_card_does_not_have_is_absent_not_zero(watch: Callable[..., Watched]) -> None:
    watched = watch(FakeCard(FIRST, "GeForce", dict(BARE), has_events=False))
    (state,) = watched.monitor.states
    known = {"index", "uuid", "name", "utilization", "memory_used", "memory_total", "temperature", "xids"}
    assert {name for name in state.__struct_fields__ if getattr(state, name) is not None} == known
    watched.nvml.cards[FIRST].values["temperature"] = 77
    watched.until(lambda: watched.monitor.states[0].temperature == 77)  # it is read without events, too


def test_functions_that_an_older_library_lacks_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of driver 535 has the reasons under another name, and no recovery action."""

    older: Any = FakeNvml(FakeCard(FIRST))
    older.nvmlDeviceGetCurrentClocksThrottleReasons = older.nvmlDeviceGetCurrentClocksEventReasons
    older.nvmlDeviceGetCurrentClocksEventReasons = None
    monkeypatch.delattr(FakeNvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", raising=True)
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetFieldValues", lambda *_: pytest.fail("no field is asked for"))
    monkeypatch.delattr(FakeNvml, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX")
    monkeypatch.delattr(FakeNvml, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX")
    monitor = GpuMonitor(older, [FIRST])
    monitor.start()
    monitor.stop()
    (state,) = monitor.states
    assert state.throttle == 5 and state.recovery is None and state.nvlink_sent is None


@pytest.mark.parametrize("xid", FATAL_XIDS)
def test_a_fatal_xid_is_a_fault_in_words(xid: int, watch: Callable[..., Watched]) -> None:
    watched = watch(FakeCard(FIRST), FakeCard(SECOND))
    watched.nvml.report(SECOND, xid)
    assert watched.fault() == f"GPU 1 (NVIDIA H100 80GB HBM3) reports Xid {xid}: {FATAL_XIDS[xid]}"
    assert [state.xids for state in watched.monitor.states] == [{}, {xid: 1}]


def test_an_xid_of_the_application_is_counted_only(watch: Callable[..., Watched]) -> None:
    watched = watch(FakeCard(FIRST))
    for xid in (13, 31, 13, 63, 92):
        watched.nvml.report(FIRST, xid)
    watched.until(lambda: watched.monitor.states[0].xids == {13: 2, 31: 1, 63: 1, 92: 1})
    assert not watched.monitor.fault and not watched.faults


def test_an_uncorrectable_memory_error_is_a_fault_unless_it_is_an_old_one(watch: Callable[..., Watched]) -> None:
    card = FakeCard(FIRST)
    card.values["ecc"] = {0: 3, 1: 2}
    watched = watch(card)
    watched.until(lambda: watched.monitor.readings > 3)
    assert not watched.monitor.fault, "the errors happened before this worker started"
    card.values["ecc"] = {0: 3, 1: 3}
    assert "an uncorrectable memory error" in watched.fault()


@pytest.mark.parametrize(("values", "words"), [
    ({"rows": (0, 1, 0, 1)}, "could not replace a faulty row"),
    *(({"recovery": action}, f"needs {words}") for action, words in RECOVERY_ACTIONS.items()),
])  # fmt: skip
def test_a_card_that_is_unhealthy_at_the_start_is_refused_without_a_thread(values: dict[str, Any], words: str) -> None:
    card = FakeCard(FIRST)
    card.values.update(values)
    watched = Watched(card)
    watched.monitor.start()
    assert words in watched.monitor.fault and watched.monitor._thread is None and not watched.faults


@pytest.mark.parametrize("harmless", [{"rows": (5, 1, 1, 0)}, {"recovery": 3}, {"recovery": 0}, {"recovery": None}])
def test_what_waits_for_the_next_reset_is_no_fault(harmless: dict[str, Any]) -> None:
    card = FakeCard(FIRST)
    card.values.update(harmless)
    monitor = GpuMonitor(FakeNvml(card), [FIRST])
    monitor.start()
    monitor.stop()
    assert not monitor.fault


@pytest.mark.parametrize(
    ("error", "words"), [(15, "is lost: it has fallen off the bus"), (28, "is lost"), (16, "until it is reset")]
)
@pytest.mark.parametrize("has_events", [True, False])
def test_a_lost_gpu_is_a_fault(error: int, words: str, has_events: bool, watch: Callable[..., Watched]) -> None:
    watched = watch(FakeCard(FIRST, has_events=has_events), FakeCard(SECOND))
    watched.nvml.cards[FIRST].error = error
    assert words in watched.fault() and "GPU 0" in watched.fault()


def test_a_gpu_that_nvml_does_not_know_at_the_start_is_lost() -> None:
    monitor = GpuMonitor(FakeNvml(FakeCard(FIRST)), [SECOND])
    monitor.start()
    assert SECOND in monitor.fault and "lost" in monitor.fault


@pytest.mark.parametrize("error", [9, 999])
def test_a_driver_that_vanishes_is_no_fault_and_is_found_again(error: int, watch: Callable[..., Watched]) -> None:
    """The driver is exchanged while the worker runs. Its readings are absent meanwhile, and events come afterwards."""
    watched = watch(FakeCard(FIRST))
    watched.nvml.report(FIRST, 31)
    watched.until(lambda: watched.monitor.states[0].xids)
    watched.nvml.error = error
    watched.until(lambda: watched.monitor.states[0].temperature is None)
    assert watched.monitor.states == (GpuState(0, FIRST, "NVIDIA H100 80GB HBM3", xids={31: 1}),)
    watched.nvml.error = 0
    watched.until(lambda: watched.monitor.states[0].temperature == 64)
    assert watched.nvml.opened == 1 and not watched.monitor.fault
    watched.nvml.report(FIRST, 79)
    assert "Xid 79" in watched.fault()


def test_a_gpu_that_a_new_driver_does_not_find_is_lost(watch: Callable[..., Watched]) -> None:
    watched = watch(FakeCard(FIRST))
    watched.nvml.error = 9
    watched.until(lambda: watched.monitor.states[0].temperature is None)
    watched.nvml.cards.clear()
    watched.nvml.error = 0
    assert "GPU 0 (NVIDIA H100 80GB HBM3) is lost" in watched.fault()


def test_of_a_part_of_a_gpu_the_whole_is_watched(watch: Callable[..., Watched]) -> None:
    whole = FakeCard(FIRST)
    nvml = FakeNvml(whole, FakeCard("MIG-1111", values={}, has_events=False, whole=whole))
    monitor = GpuMonitor(nvml, ["MIG-1111"], every_s=0.02)
    monitor.start()
    monitor.stop()
    assert [(state.uuid, state.ecc_corrected) for state in monitor.states] == [(FIRST, 3)]


def test_a_driver_that_is_not_there_at_the_start_is_reported() -> None:
    nvml = FakeNvml(FakeCard(FIRST))
    nvml.error = 9
    with pytest.raises(NvmlFailed):
        GpuMonitor(nvml, [FIRST]).start()


def test_a_worker_that_does_not_leave_is_reported_as_stuck(watch: Callable[..., Watched]) -> None:
    stuck, leaving = watch(FakeCard(FIRST)), watch(FakeCard(FIRST))
    for each in (stuck, leaving):
        each.nvml.report(FIRST, 79)
        each.fault()
    leaving.monitor.stop()
    assert stuck.reported_stuck.wait(scaled(5.0)) and stuck.stuck == stuck.faults
    assert not leaving.stuck


def test_only_growth_of_uncorrected_errors_counts() -> None:
    state = GpuState(0, FIRST, "card", ecc_uncorrected=2)
    assert not fault_of(state, 2) and not fault_of(state, None) and fault_of(state, 1)
