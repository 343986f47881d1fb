"""The state of one GPU, as workers read it and coordinators show it."""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_GPUS = 64
MAX_XIDS = 64
"""Most GPUs of one worker, and most different Xid errors of one GPU, that a report can have."""
_Name = Annotated[str, msgspec.Meta(max_length=128)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Degrees = Annotated[int, msgspec.Meta(ge=-1000, le=1000)]
_Xids = Annotated[dict[_Count, _Count], msgspec.Meta(max_length=MAX_XIDS)]

THROTTLE_REASONS: dict[int, str] = {
    0x004: "power_cap",
    0x008: "hardware_slowdown",
    0x010: "sync_boost",
    0x020: "software_thermal",
    0x040: "hardware_thermal",
    0x080: "power_brake",
}
"""Bits of :attr:`GpuState.throttle` that mean lower clocks than the work could use, and their names. The other bits of
NVML's mask (idle, clocks set by an operator) are no sign of trouble. Source: NVML API reference, clocks event
reasons."""


class GpuState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One reading of one GPU. A field is None where NVML does not offer it on this card: absent is not zero.

    ``index`` and ``uuid`` are NVML's. ``utilization`` is the percentage of the last sample period in which a kernel
    ran. Memory is in bytes, power in milliwatts, temperature in degrees Celsius, clocks in MHz. ``throttle`` is NVML's
    mask of clocks event reasons. NVLink bytes count from the load of the driver, and so do ECC errors. ``xids`` counts
    Xid errors by number since the worker started. ``recovery`` is NVML's GPU recovery action, 0 for none.
    """

    index: _Count
    uuid: _Name
    name: _Name
    utilization: _Count | None = None
    memory_used: _Count | None = None
    memory_total: _Count | None = None
    power_mw: _Count | None = None
    power_limit_mw: _Count | None = None
    temperature: _Degrees | None = None
    sm_mhz: _Count | None = None
    memory_mhz: _Count | None = None
    throttle: _Count | None = None
    nvlinks_active: _Count | None = None
    nvlink_sent: _Count | None = None
    nvlink_received: _Count | None = None
    ecc_corrected: _Count | None = None
    ecc_uncorrected: _Count | None = None
    remapped_corrected: _Count | None = None
    remapped_uncorrected: _Count | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retired_corrected: _Count | None = None
    retired_uncorrected: _Count | None = None
    recovery: _Count | None = None
    xids: _Xids = {}

    @property
    def label(self) -> str:
        """The GPU in words."""
        return f"GPU {self.index} ({self.name})"

    @property
    def throttled_by(self) -> tuple[str, ...]:
        """The names of the reasons why its clocks are lowered now."""
        return tuple(name for bit, name in THROTTLE_REASONS.items() if (self.throttle or 0) & bit)
