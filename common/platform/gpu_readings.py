"""Reads the state of one GPU through NVML (the module pynvml), whatever its card, driver and library offer.

A value that is not there is None. A GPU that is gone raises :class:`GpuLost`; an NVML that does not answer raises
:class:`NvmlFailed`, which says nothing about the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.core.gpu import GpuState

_ABSENT = ("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION", "INVALID_ARGUMENT", "NO_DATA", "DEPRECATED")
"""Errors of NVML for a value that this card, this driver or this user does not have."""
_LOST = ("GPU_IS_LOST", "GPU_NOT_FOUND", "RESET_REQUIRED")
"""Errors of NVML for a GPU that was there and is gone, or is unusable until a reset."""
_ALL_LINKS = 0xFFFFFFFF
"""The scope of an NVLink counter that sums all links."""


class NvmlFailed(Exception):
    """NVML does not answer."""


class GpuLost(NvmlFailed):
    """A GPU is gone, or (``by_reset``) unusable until a reset."""

    def __init__(self, text: str, by_reset: bool = False) -> None:
        super().__init__(text)
        self.by_reset = by_reset


@dataclass
class Card:
    """One watched GPU. ``handle`` is NVML's, ``xids`` the Xid errors seen so far, ``uncorrected_before`` its
    uncorrected ECC errors when it was first read (None: unknown)."""

    handle: Any
    index: int
    uuid: str
    name: str
    xids: dict[int, int] = field(default_factory=dict)
    uncorrected_before: int | None = None

    @property
    def blank(self) -> GpuState:
        """A state without any reading."""
        return GpuState(self.index, self.uuid, self.name, xids=dict(self.xids))


class Nvml:
    """NVML with its errors sorted into absent values, lost GPUs and failures."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def ask(self, function: Callable[..., Any] | None, *arguments: Any) -> Any:
        """Call ``function``; None if it, or the value, does not exist here. Raises GpuLost and NvmlFailed."""
        if function is None:
            return None
        try:
            return function(*arguments)
        except self.module.NVMLError as error:
            if self.is_one(error, *_ABSENT):
                return None
            raise self.sorted(error) from error

    def must(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function`` for a value that every card has. Raises GpuLost and NvmlFailed."""
        try:
            return function(*arguments)
        except self.module.NVMLError as error:
            raise self.sorted(error) from error

    def find(self, uuid: str) -> Card:
        """Return the GPU of this UUID, for a part of a GPU (MIG) the whole one, whose health they share. Raises GpuLost
        if NVML does not know it, and NvmlFailed."""
        try:
            handle = self.module.nvmlDeviceGetHandleByUUID(uuid)
        except self.module.NVMLError as error:
            raise (GpuLost(str(error)) if self.is_one(error, "NOT_FOUND") else self.sorted(error)) from error
        if uuid.startswith("MIG-"):
            handle = self.must(self.module.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
            uuid = str(self.must(self.module.nvmlDeviceGetUUID, handle))
        index = int(self.must(self.module.nvmlDeviceGetIndex, handle))
        return Card(handle, index, uuid, str(self.must(self.module.nvmlDeviceGetName, handle)))

    def try_to(self, function: Callable[..., Any], *arguments: Any) -> bool:
        """Call ``function`` and return whether it succeeded."""
        try:
            function(*arguments)
        except self.module.NVMLError:
            return False
        return True

    def sorted(self, error: Any) -> NvmlFailed:
        """Return an error of NVML as one of ours."""
        if self.is_one(error, *_LOST):
            return GpuLost(str(error), self.is_one(error, "RESET_REQUIRED"))
        return NvmlFailed(str(error))

    def is_one(self, error: Any, *names: str) -> bool:
        """Return whether ``error`` is one of these errors of NVML, named without their prefix."""
        return error.value in {getattr(self.module, f"NVML_ERROR_{name}", None) for name in names}


def read(nvml: Nvml, card: Card) -> GpuState:
    """Return the state of one GPU. Raises GpuLost and NvmlFailed."""
    module, handle = nvml.module, card.handle

    def call(name: str, *rest: Any) -> Any:
        return nvml.ask(getattr(module, name, None), handle, *rest)

    memory, rates = call("nvmlDeviceGetMemoryInfo"), call("nvmlDeviceGetUtilizationRates")
    rows = call("nvmlDeviceGetRemappedRows") or (None,) * 4
    reasons = call("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = call("nvmlDeviceGetCurrentClocksThrottleReasons")  # its name before driver 535
    retired = [call("nvmlDeviceGetRetiredPages", cause) for cause in (0, 1)]
    sent = _field(nvml, card, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", _ALL_LINKS)
    received = _field(nvml, card, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", _ALL_LINKS)
    return GpuState(
        index=card.index,
        uuid=card.uuid,
        name=card.name,
        utilization=None if rates is None else int(rates.gpu),
        memory_used=None if memory is None else int(memory.used),
        memory_total=None if memory is None else int(memory.total),
        power_mw=call("nvmlDeviceGetPowerUsage"),
        power_limit_mw=call("nvmlDeviceGetEnforcedPowerLimit"),
        temperature=call("nvmlDeviceGetTemperature", module.NVML_TEMPERATURE_GPU),
        sm_mhz=call("nvmlDeviceGetClockInfo", module.NVML_CLOCK_SM),
        memory_mhz=call("nvmlDeviceGetClockInfo", module.NVML_CLOCK_MEM),
        throttle=reasons,
        nvlinks_active=_active_links(nvml, card),
        nvlink_sent=None if sent is None else 1024 * sent,
        nvlink_received=None if received is None else 1024 * received,
        ecc_corrected=_ecc(nvml, card, module.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        ecc_uncorrected=_ecc(nvml, card, module.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        remapped_corrected=rows[0],
        remapped_uncorrected=rows[1],
        remap_pending=None if rows[2] is None else bool(rows[2]),
        remap_failed=None if rows[3] is None else bool(rows[3]),
        retired_corrected=None if retired[0] is None else len(retired[0]),
        retired_uncorrected=None if retired[1] is None else len(retired[1]),
        recovery=_field(nvml, card, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", 0),
        xids=dict(card.xids),
    )


def _ecc(nvml: Nvml, card: Card, kind: int) -> int | None:
    """Return the ECC errors of one kind since the driver was loaded."""
    found = nvml.ask(nvml.module.nvmlDeviceGetTotalEccErrors, card.handle, kind, nvml.module.NVML_VOLATILE_ECC)
    return None if found is None else int(found)


def _active_links(nvml: Nvml, card: Card) -> int | None:
    """Return how many NVLinks are active; None for a card without any."""
    found = None
    for link in range(nvml.module.NVML_NVLINK_MAX_LINKS):
        state = nvml.ask(nvml.module.nvmlDeviceGetNvLinkState, card.handle, link)
        if state is None:
            break
        found = (found or 0) + int(state == nvml.module.NVML_FEATURE_ENABLED)
    return found


def _field(nvml: Nvml, card: Card, name: str, scope: int) -> int | None:
    """Return the field value ``name``, None where this library, driver or card does not have it."""
    number = getattr(nvml.module, name, None)
    if number is None:
        return None
    values = nvml.ask(nvml.module.nvmlDeviceGetFieldValues, card.handle, [(number, scope)])
    if values is None or values[0].nvmlReturn != 0:
        return None
    narrow = values[0].valueType == nvml.module.NVML_VALUE_TYPE_UNSIGNED_INT
    return int(values[0].value.uiVal if narrow else values[0].value.ullVal)
