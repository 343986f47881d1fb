"""Fixtures shared by the tests of several packages."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from common.grammar import masks
from tests.fakes.oracle import OracleEngine
from tests.leaked_keys import keygen
from tests.unit.gateway_harness import GatewayHarness
from tests.unit.workers import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


@pytest.fixture(
    params=[
        "shm",
        "zmq",
        pytest.param(
            "nixl",
            marks=[
                pytest.mark.skipif(find_spec("nixl") is None, reason="the extra nixl is not installed"),
                pytest.mark.torch,
            ],
        ),
    ]
)
def pair(request: pytest.FixtureRequest, bench: Bench) -> Bench:
    """A prefill worker with blocks of 16 tokens and a decode worker with blocks of 32."""
    bench.add("prefill", OracleEngine(256, 16), kv_transport=request.param)
    bench.add("decode", OracleEngine(128, 32), kv_transport=request.param)
    return bench


@pytest.fixture
def patient_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give token masks a minute: on a busy machine, threads of low priority may wait for seconds."""
    monkeypatch.setattr(masks, "GIVE_UP_S", 60.0)


@pytest.fixture(scope="module")
def cluster_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return keygen(tmp_path_factory.mktemp("keys") / "cluster.key")


@pytest.fixture
def harness(cluster_key: Path) -> Iterator[GatewayHarness]:
    harness = GatewayHarness(cluster_key)
    yield harness
    harness.close()


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The key file of another cluster."""
    return keygen(tmp_path / "other.key")
