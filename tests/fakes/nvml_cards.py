"""NVML without a GPU, for the monitor: what pynvml tells of scripted cards, and how they fail.

A value that a card does not have raises NotSupported, as on a real one. Numbers of errors, fields and enumerations are
those of the NVML API reference.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

H100: dict[str, Any] = {
    "utilization": 87,
    "memory": (60 << 30, 80 << 30),
    "power": 412_000,
    "power_limit": 700_000,
    "temperature": 64,
    "clocks": {1: 1755, 2: 2619},
    "reasons": 0x4 | 0x1,
    "links": [1] * 18,
    "throughput": {138: 1024, 139: 2048},
    "ecc": {0: 3, 1: 0},
    "rows": (1, 0, 0, 0),
    "recovery": 0,
}
"""A data center card. It has no retired pages, whose place remapped rows have taken."""
BARE: dict[str, Any] = {"memory": (1 << 30, 8 << 30), "utilization": 5, "temperature": 40}
"""A card without ECC, NVLink, power readings and events."""


class NvmlError(Exception):
    """pynvml's NVMLError."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class FakeCard:
    """One card: its ``values`` (missing ones are not supported), whether it has Xid events, and the error that every
    call for it raises now (0 for none). A part of a card (MIG) has the ``whole``."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    values: dict[str, Any] = field(default_factory=lambda: dict(H100))
    has_events: bool = True
    error: int = 0
    whole: FakeCard | None = None


class FakeNvml:
    """The module. ``error`` is raised by every call while it is set; ``report`` makes an Xid event."""

    NVMLError: ClassVar[type[NvmlError]] = NvmlError
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION, NVML_ERROR_NOT_FOUND = 3, 4, 6
    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_TIMEOUT = 2, 9, 10
    NVML_ERROR_FUNCTION_NOT_FOUND, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED = 13, 15, 16
    NVML_ERROR_NO_DATA, NVML_ERROR_DEPRECATED, NVML_ERROR_GPU_NOT_FOUND, NVML_ERROR_UNKNOWN = 21, 26, 28, 999
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_VOLATILE_ECC, NVML_FEATURE_ENABLED = 0, 1, 2, 0, 1
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_NVLINK_MAX_LINKS, NVML_VALUE_TYPE_UNSIGNED_INT = 18, 1
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
    nvmlEventTypeXidCriticalError = 8  # noqa: N815 - NVML's name

    def __init__(self, *cards: FakeCard) -> None:
        self.cards = {card.uuid: card for card in cards}
        self.error = 0
        self.opened = 0
        self.events: queue.Queue[tuple[str, int]] = queue.Queue()

    def report(self, uuid: str, xid: int) -> None:
        """Make the event of an Xid error."""
        self.events.put((uuid, xid))

    # -- the library --------------------------------------------------------------------------------------------------

    def nvmlInit(self) -> None:
        self._check()
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened = 0

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeCard:
        self._check()
        if uuid not in self.cards:
            raise NvmlError(self.NVML_ERROR_NOT_FOUND)
        return self._card(self.cards[uuid])

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, card: FakeCard) -> FakeCard:
        assert card.whole is not None
        return card.whole

    def nvmlDeviceGetIndex(self, card: FakeCard) -> int:
        return list(self.cards).index(self._card(card).uuid)

    def nvmlDeviceGetName(self, card: FakeCard) -> str:
        return self._card(card).name

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str:
        return self._card(card).uuid

    # -- readings -----------------------------------------------------------------------------------------------------

    def nvmlDeviceGetUtilizationRates(self, card: FakeCard) -> Any:
        return SimpleNamespace(gpu=self._value(card, "utilization"))

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard) -> Any:
        used, total = self._value(card, "memory")
        return SimpleNamespace(used=used, total=total)

    def nvmlDeviceGetPowerUsage(self, card: FakeCard) -> Any:
        return self._value(card, "power")

    def nvmlDeviceGetEnforcedPowerLimit(self, card: FakeCard) -> Any:
        return self._value(card, "power_limit")

    def nvmlDeviceGetTemperature(self, card: FakeCard, sensor: int) -> Any:
        return self._value(card, "temperature")

    def nvmlDeviceGetClockInfo(self, card: FakeCard, clock: int) -> Any:
        return self._value(card, "clocks")[clock]

    def nvmlDeviceGetCurrentClocksEventReasons(self, card: FakeCard) -> Any:
        return self._value(card, "reasons")

    def nvmlDeviceGetNvLinkState(self, card: FakeCard, link: int) -> Any:
        links = self._value(card, "links")
        if link >= len(links):
            raise NvmlError(self.NVML_ERROR_INVALID_ARGUMENT)
        return links[link]

    def nvmlDeviceGetTotalEccErrors(self, card: FakeCard, kind: int, counter: int) -> Any:
        return self._value(card, "ecc")[kind]

    def nvmlDeviceGetRemappedRows(self, card: FakeCard) -> Any:
        return self._value(card, "rows")

    def nvmlDeviceGetRetiredPages(self, card: FakeCard, cause: int) -> Any:
        return self._value(card, "pages")[cause]

    def nvmlDeviceGetFieldValues(self, card: FakeCard, fields: list[tuple[int, int]]) -> Any:
        found = []
        for number, scope in fields:
            values = self._card(card).values
            if number == self.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION:
                value = values.get("recovery")
            else:
                assert scope == 0xFFFFFFFF, "the sum over all links"
                value = values.get("throughput", {}).get(number)
            narrow = number == self.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
            union = SimpleNamespace(uiVal=value if narrow else 0, ullVal=-1 if narrow else value)
            failed = self.NVML_ERROR_NOT_SUPPORTED if value is None else 0
            found.append(SimpleNamespace(nvmlReturn=failed, valueType=1 if narrow else 3, value=union))
        return found

    # -- events -------------------------------------------------------------------------------------------------------

    def nvmlEventSetCreate(self) -> set[str]:
        self._check()
        return set()

    def nvmlDeviceRegisterEvents(self, card: FakeCard, kinds: int, events: set[str]) -> None:
        if not self._card(card).has_events:
            raise NvmlError(self.NVML_ERROR_NOT_SUPPORTED)
        events.add(card.uuid)

    def nvmlEventSetWait_v2(self, events: set[str], timeout_ms: int) -> Any:
        self._check()
        try:
            uuid, xid = self.events.get(timeout=timeout_ms / 1000)
        except queue.Empty:
            raise NvmlError(self.NVML_ERROR_TIMEOUT) from None
        assert uuid in events, "an event of a card that was not registered"
        return SimpleNamespace(device=self.cards[uuid], eventType=8, eventData=xid)

    def nvmlEventSetFree(self, events: set[str]) -> None:
        self._check()

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.error:
            raise NvmlError(self.error)

    def _card(self, card: FakeCard) -> FakeCard:
        self._check()
        if card.error:
            raise NvmlError(card.error)
        return card

    def _value(self, card: FakeCard, name: str) -> Any:
        if name not in self._card(card).values:
            raise NvmlError(self.NVML_ERROR_NOT_SUPPORTED)
        return card.values[name]
