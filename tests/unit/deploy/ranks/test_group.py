"""Real processes as ranks: they compute, leave with rank 0, and whatever happens to one is noticed in words."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bench.load.processes import cpu_seconds
from common.attention.registry import Wanted
from common.checkpoint.files import open_checkpoint
from common.config.worker import WorkerConfig
from common.core.errors import StartError
from common.core.ids import BlockId
from common.core.sequence import Batch, Segment
from common.engine.loading import load_engine
from common.engine.parallel import Leader
from common.engine.runner import ModelEngine, sequence_of
from common.kv.storage.cuda import CudaMemory
from common.platform.device import probe_cpu
from deploy.launcher.cores import CoreShare
from deploy.ranks import group
from deploy.ranks.group import HUNG_S, PING_S, RankGroup
from tests.e2e.spawner import PRELOADED, Spawner
from tests.fakes.stand_in_gpu import stand_in
from tests.models import make_model
from tests.pace import scaled
from tests.ranks import fake_gpus, split_engine

pytestmark = pytest.mark.processes
NOTICED_S = 2.0
"""Seconds within which a rank that dies or hangs is noticed."""


class Ended:
    """Stands for the end of rank 0's process, which the group asks for when a rank has failed."""

    def __init__(self) -> None:
        self._event, self.errors = threading.Event(), list[StartError]()

    def __call__(self, error: StartError) -> None:
        self.errors.append(error)
        self._event.set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)

    def why(self) -> str:
        """Wait for the end; return its reason."""
        assert self._event.wait(scaled(NOTICED_S)), "nothing was noticed"
        return str(self.errors[0])


Start = Callable[..., Any]


@pytest.fixture
def start(one_spawner: Spawner, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return ``start(model, end)``: a context in which that model's group runs; ``ranks`` are 2 by default."""
    monkeypatch.setattr(group.subprocess, "Popen", one_spawner.popen())

    @contextmanager
    def start_one(model: Path, end: Ended, ranks: int = 2, gpus: bool = False, **changes: Any) -> Iterator[RankGroup]:
        config = WorkerConfig(model=str(model), role="decode", name="decode-0", dtype="float32", **changes)
        if gpus:
            monkeypatch.setenv(PRELOADED, "tests.fakes.rank_gpus")
            config = replace(config, attention="torch")
        with RankGroup(config, [CoreShare(None, 1)] * ranks, 16, end, ["cuda:0"] * ranks if gpus else ()) as running:
            children = [psutil.Process(pid) for pid in running.pids]
            yield running
        assert not any(child.is_running() for child in children)

    return start_one


def engine_of(model: Path, running: RankGroup, gpus: bool = False) -> ModelEngine:
    machine = stand_in() if gpus else probe_cpu()
    return load_engine(
        open_checkpoint(str(model)), machine=machine, dtype="float32", num_kv_blocks=64, max_batched_tokens=512,
        max_num_seqs=4, batch_hint=16, attention=Wanted("torch" if gpus else "auto"),
        leader=Leader(running.connect(machine), running.channel),
    )  # fmt: skip


def logits_of(engine: ModelEngine) -> torch.Tensor:
    tokens = [8 + 31 * at % 500 for at in range(200)]
    table = [BlockId(block) for block in range(20, 33)]
    return engine.logits(Batch((Segment(sequence_of(tokens), 0, 200),), (table,)))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.whole)])
def test_ranks_compute_and_leave_with_rank_0(start: Start, tmp_path: Path, ranks: int) -> None:
    model = make_model("llama", tmp_path, num_attention_heads=6, num_key_value_heads=3 if ranks == 3 else 2,
                       hidden_size=96)  # fmt: skip
    with split_engine(model, 1) as alone:
        expected = logits_of(alone)
    end = Ended()
    with start(model, end, ranks) as running:
        engine = engine_of(model, running)
        for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 decides when the worker leaves
            for pid in running.pids:
                os.kill(pid, number)
        assert float((logits_of(engine) - expected).abs().max()) < 1e-4
        before = [cpu_seconds(pid) for pid in running.pids]
        assert not end.wait(0.5)
        assert max(cpu_seconds(pid) - used for pid, used in zip(running.pids, before, strict=True)) < 0.1, "it spins"
        processes = [each.process for each in running._ranks]
        engine.close()
    assert [each.returncode for each in processes] == [0] * (ranks - 1)
    assert not end.errors


def test_a_rank_that_hangs_is_noticed(start: Start, checkpoint: Callable[[str], Path]) -> None:
    assert HUNG_S + 2 * PING_S <= NOTICED_S
    end = Ended()
    with start(checkpoint("llama"), end) as running:
        engine = engine_of(checkpoint("llama"), running)
        (pid,) = running.pids
        os.kill(pid, signal.SIGSTOP)
        step = threading.Thread(target=logits_of, args=(engine,))
        step.start()
        assert f"rank 1 of 2 (process {pid}) hangs: it has not answered" in end.why()
        assert step.is_alive(), "the step waits for the rank"
        for each in running.wiring.signals.values():  # rank 0 would have ended: let its step end instead
            os.write(each, (1 << 20).to_bytes(8, "little"))
        step.join()
        engine.close()


def test_ranks_on_gpus_compute_in_slabs_of_their_own(start: Start, checkpoint: Callable[[str], Path]) -> None:
    """The exchange is a process group, and rank 0 maps the slab of the other process."""
    with split_engine(checkpoint("llama"), 1) as alone:
        expected = logits_of(alone)
    end = Ended()
    with fake_gpus(), start(checkpoint("llama"), end, gpus=True) as running:
        engine = engine_of(checkpoint("llama"), running, gpus=True)
        assert isinstance(engine.memory, CudaMemory) and engine.memory.ranks == 2
        assert float((logits_of(engine) - expected).abs().max()) < 1e-4
        processes = [each.process for each in running._ranks]
        engine.close()
    assert [each.returncode for each in processes] == [0] and not end.errors


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_on_a_gpu_that_dies_or_hangs_in_a_step_is_noticed(
    start: Start, checkpoint: Callable[[str], Path], number: signal.Signals
) -> None:
    end, ended = Ended(), list[Exception]()
    with fake_gpus(), start(checkpoint("llama"), end, gpus=True) as running:
        engine = engine_of(checkpoint("llama"), running, gpus=True)
        (pid,) = running.pids
        os.kill(pid, signal.SIGSTOP)

        def compute() -> None:
            try:
                logits_of(engine)
            except StartError as error:
                ended.append(error)

        step = threading.Thread(target=compute)
        step.start()
        os.kill(pid, number)
        what = "has died: SIGKILL" if number == signal.SIGKILL else "hangs: it has not answered"
        assert f"rank 1 of 2 (process {pid}) {what}" in end.why()
        step.join(scaled(NOTICED_S))
        assert not step.is_alive() and "rank 0 of 2 failed in a step" in str(ended[0])
        engine.close()


def test_a_rank_that_dies_is_noticed_with_its_end(start: Start, tmp_path: Path) -> None:
    end, heads = Ended(), {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    with start(make_model("llama", tmp_path, **heads), end, 3) as running:
        second, third = running.pids
        os.kill(third, signal.SIGKILL)
        assert f"rank 2 of 3 (process {third}) has died: SIGKILL" in end.why()
        assert not psutil.pid_exists(second), "the others are killed, too"


def test_a_rank_that_cannot_load_says_why(start: Start, tmp_path: Path) -> None:
    end = Ended()
    with start(tmp_path / "nothing", end):
        assert "there is no such directory" in end.why()


def test_an_error_of_rank_0_leaves_no_rank(start: Start, checkpoint: Callable[[str], Path]) -> None:
    """Rank 0 refuses the model while the other rank still waits for it."""
    with pytest.raises(StartError, match="too little memory"), start(checkpoint("llama"), Ended()):
        raise StartError("too little memory", "the test says so", "nothing")
