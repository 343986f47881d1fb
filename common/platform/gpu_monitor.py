"""Watches the GPUs of one worker through NVML, in a thread of its own.

The thread waits for Xid errors in NVML's event set and reads the state of each GPU about once a second in between, so
that the worker's loop does nothing for it. All calls of NVML release the interpreter lock. A GPU that
:mod:`common.platform.gpu_health` finds unhealthy, or that is gone from the bus, is a fault: it is reported once, and
for good. An NVML that does not answer is none: the worker computes on while its readings are absent.

    WATCHING ── a GPU is unhealthy or lost ──► FAULTY
      │  ▲
      ▼  │ NVML answers again
     BLIND
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from common.core.gpu import MAX_XIDS, GpuState
from common.platform.gpu_health import fault_of, lost
from common.platform.gpu_readings import Card, GpuLost, Nvml, NvmlFailed, read

log = logging.getLogger("tandem.gpu")

EVERY_S = 1.0
"""Interval between two readings."""
SLICE_S = 0.2
"""Longest wait for events, after which :meth:`GpuMonitor.stop` is noticed."""
RETRY_S = 5.0
"""Interval between attempts to reach an NVML that has failed."""
GRACE_S = 1.5
"""Time that a worker has to leave after a fault. It needs more only if its loop is stuck in a call of CUDA."""


class GpuMonitor:
    """The state and the health of the GPUs ``uuids``.

    ``nvml`` is the module pynvml. ``states`` are the latest readings, one per GPU; ``fault`` is why the worker must
    leave, "" while all are healthy. Both are swapped whole and may be read from any thread.
    """

    def __init__(
        self,
        nvml: Any,
        uuids: Sequence[str],
        *,
        every_s: float = EVERY_S,
        retry_s: float = RETRY_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._nvml, self._uuids = Nvml(nvml), tuple(uuids)
        self._every_s, self._retry_s, self._grace_s = every_s, retry_s, grace_s
        self.states: tuple[GpuState, ...] = ()
        self.fault = ""
        self.readings = 0
        """How often :attr:`states` or :attr:`fault` has been written."""
        self.on_fault: Callable[[str], None] | None = None
        """Called with the fault by the monitor's thread. A fault that came before this was set is in :attr:`fault`."""
        self.on_stuck: Callable[[str], None] | None = None
        """Called with the fault if :meth:`stop` does not follow within ``grace_s`` seconds."""
        self._cards: dict[str, Card] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Read the state once, then go on in a thread. Raises NvmlFailed if NVML does not answer now. An unhealthy GPU
        is reported in :attr:`fault`, without a thread."""
        self._open()
        self._read_all()
        if not self.fault:
            self._thread = threading.Thread(target=self._run, name="gpu-monitor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait until it has ended."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not (self._stopping.is_set() or self.fault):
            try:
                self._watch()
            except NvmlFailed as error:
                self._blind(error)
        if not self.fault:
            return
        log.error("%s", self.fault)
        if self.on_fault is not None:
            self.on_fault(self.fault)
        if not self._stopping.wait(self._grace_s) and self.on_stuck is not None:
            self.on_stuck(self.fault)

    def _watch(self) -> None:
        """Read and wait for events in turn until stopped, or until a GPU is unhealthy. Raises NvmlFailed."""
        events = self._register()
        due = time.monotonic() + self._every_s
        try:
            while not (self._stopping.is_set() or self.fault):
                if (rest_s := due - time.monotonic()) > 0:
                    self._wait(events, min(SLICE_S, rest_s))
                else:
                    due += self._every_s
                    self._read_all()
        finally:
            if events is not None:
                self._nvml.try_to(self._nvml.module.nvmlEventSetFree, events)

    def _blind(self, error: NvmlFailed) -> None:
        """Look whether a GPU is lost; else report that nothing is known, until NVML answers again or the monitor is
        stopped. NVML is started anew each time: an exchanged driver needs that."""
        with contextlib.suppress(NvmlFailed):
            self._read_all()
        if self.fault:
            return
        log.warning("the state of the GPUs cannot be read: %s (trying again every %g s)", error, self._retry_s)
        blank = tuple(card.blank for card in self._cards.values())
        self._publish(blank, next((why for each in blank if (why := fault_of(each, None))), ""))
        while not (self._stopping.is_set() or self.fault):
            self._nvml.try_to(self._nvml.module.nvmlShutdown)
            self._stopping.wait(self._retry_s)
            try:
                self._open()
                self._read_all()
            except NvmlFailed:
                continue
            log.info("the state of the GPUs can be read again")
            return

    # -- NVML ---------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Start NVML and find the GPUs; one that it does not know is lost. Raises NvmlFailed."""
        self._nvml.must(self._nvml.module.nvmlInit)
        for uuid in self._uuids:
            known = self._cards.get(uuid)
            try:
                found = self._nvml.find(uuid)
            except GpuLost as error:
                label = known.blank.label if known is not None else f"GPU {uuid}"
                self._publish(self.states, lost(label, error.by_reset))
                return
            if known is None:
                self._cards[uuid] = found
            else:
                known.handle = found.handle

    def _register(self) -> Any:
        """Return an event set that gets the Xid errors of the GPUs; None if none of them has events."""
        module = self._nvml.module
        events = self._nvml.ask(module.nvmlEventSetCreate)
        if events is None:
            return None
        kind = module.nvmlEventTypeXidCriticalError
        handles = [card.handle for card in self._cards.values()]
        registered = [self._nvml.try_to(module.nvmlDeviceRegisterEvents, each, kind, events) for each in handles]
        if any(registered):
            return events
        self._nvml.try_to(module.nvmlEventSetFree, events)
        return None

    def _wait(self, events: Any, seconds: float) -> None:
        """Wait for an Xid error for at most ``seconds``, and count it. Raises NvmlFailed."""
        if events is None:
            self._stopping.wait(seconds)
            return
        module = self._nvml.module
        try:
            event = module.nvmlEventSetWait_v2(events, max(1, int(1000 * seconds)))
        except module.NVMLError as error:
            if self._nvml.is_one(error, "TIMEOUT"):
                return
            raise self._nvml.sorted(error) from error
        if not event.eventType & module.nvmlEventTypeXidCriticalError:
            return
        xid = int(event.eventData)
        for card in self._meant(event):
            if xid in card.xids or len(card.xids) < MAX_XIDS:
                card.xids[xid] = card.xids.get(xid, 0) + 1
            log.warning("GPU %d (%s) reports Xid %d", card.index, card.name, xid)
        self._read_all()

    def _meant(self, event: Any) -> list[Card]:
        """Return the GPU of an event; all of them if NVML no longer says which it is."""
        try:
            uuid = str(self._nvml.module.nvmlDeviceGetUUID(event.device))
        except self._nvml.module.NVMLError:
            uuid = ""
        return [card for card in self._cards.values() if card.uuid == uuid] or list(self._cards.values())

    def _read_all(self) -> None:
        """Read and judge every GPU. Raises NvmlFailed."""
        if self.fault:
            return
        states, fault = [], ""
        for card in self._cards.values():
            try:
                state, why = read(self._nvml, card), ""
            except GpuLost as error:
                state, why = card.blank, lost(card.blank.label, error.by_reset)
            if card.uncorrected_before is None:
                card.uncorrected_before = state.ecc_uncorrected
            states.append(state)
            fault = fault or fault_of(state, card.uncorrected_before) or why
        self._publish(tuple(states), fault)

    def _publish(self, states: tuple[GpuState, ...], fault: str = "") -> None:
        self.states, self.fault = states, fault
        self.readings += 1
