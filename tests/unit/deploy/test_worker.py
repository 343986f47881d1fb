"""What a worker's role decides about its engine."""

from __future__ import annotations

from typing import Any

import pytest

from common.config.worker import WorkerConfig
from common.engine import loading
from common.platform.device import probe_cpu
from deploy import worker

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("role", "decodes"), [("prefill", False), ("decode", True), ("colocated", True)])
def test_a_prefill_worker_does_not_decode(role: Any, decodes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(loading, "load_engine", lambda checkpoint, **options: given.update(options))
    checkpoint: Any = None
    worker._load(WorkerConfig(model="m", role=role, device="cpu"), checkpoint, probe_cpu(), 512, None)
    assert given["decodes"] == decodes
