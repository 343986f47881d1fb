"""A transport that a worker cannot use is refused before its model is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.config.worker import WorkerConfig
from common.core.errors import StartError
from common.platform import device
from common.platform.gpu import Gpu
from deploy import worker
from deploy.ranks import group

GPU = device.probe_gpu(Gpu(0, "GPU-1", "NVIDIA H200", 1 << 37, 1 << 37, (9, 0)))


@pytest.mark.parametrize(
    ("role", "transport", "machine", "ranks", "why"),
    [
        ("decode", "cuda-ipc", device.probe_cpu(), 1, "cuda-ipc needs a GPU"),
        ("prefill", "nccl", device.probe_cpu(), 2, "nccl needs a GPU"),
        ("prefill", "shm", GPU, 1, "in the memory of a GPU"),
        ("decode", "nccl", GPU, 2, "cannot carry the KV of a tensor-parallel worker"),
    ],
)
def test_a_transport_is_refused_before_anything_is_loaded(
    role: Any, transport: Any, machine: device.Device, ranks: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(*_: Any) -> None:
        raise AssertionError("it is loaded first")

    monkeypatch.setattr(worker, "open_checkpoint", lambda *_: None)
    monkeypatch.setattr(worker, "_devices", lambda _: [machine] * ranks)
    monkeypatch.setattr(worker, "build", too_late)
    monkeypatch.setattr(group, "RankGroup", too_late)
    config = WorkerConfig(model="m", role=role, kv_transport=transport, device="cpu")
    with pytest.raises(StartError, match=why):
        worker.run(replace(config, tensor_parallel_size=ranks))
