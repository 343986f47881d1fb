"""Tensor parallelism over GPUs: ranks meet in a process group, each has its own slab, and hand-offs see one pool.

The GPUs are fake: tensors are on the CPU, the process group is one of gloo, and memory is a fake device's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.core.errors import DeviceLost, StartError
from common.core.ids import BlockId, new_request_id, pack_tokens
from common.core.request import Request
from common.core.sequence import Batch, Segment
from common.engine import prepared, rank_follower, rank_pools
from common.engine.parallel import LeadingEngine
from common.engine.runner import sequence_of
from common.kv.cache import BlockCopy
from common.kv.gpu_budget import CONTEXT_BYTES
from common.kv.storage.cuda import CudaMemory
from common.kv.storage.device_calls import DeviceBuffer, DeviceFailed
from common.kv.storage.slab import SlabStore
from common.model import gpu_layers
from deploy.ranks.channel import FollowerChannel
from tests.fakes.device_calls import FakeDevice
from tests.fakes.stand_in_gpu import MIB
from tests.models import make_model, spread_kv
from tests.ranks import KINDS, SHARDS, TOLERANCE, logits_of, split_engine
from tests.reference import Reference, greedy
from tests.unit.workers import Bench

pytestmark = pytest.mark.usefixtures("one_thread")
BATCH = Batch((Segment(sequence_of([*range(8, 48)]), 0, 40),), ([BlockId(3), BlockId(1), BlockId(2)],))
SHORT = {("llama", 2), ("llama", 4), ("one KV head", 2), ("qwen3-moe", 2), ("phi3, which gathers", 2)}
"""Models and numbers of ranks in ``make test``."""
FUSED = {"llama", "qwen3", "one KV head", "biases"}
"""Models whose layers have merged linears on GPUs; the other parts need Triton (:mod:`tests.triton.ranks`)."""


@pytest.fixture
def stack(gpus: list[FakeDevice]) -> Iterator[ExitStack]:
    """Closes its engines after the workers that use them, if it is requested before ``bench``."""
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=() if (name, ranks) in SHORT else pytest.mark.whole)
        for name in KINDS
        for ranks in (2, 4)
    ],
)
def test_logits_equal_those_of_one_process(
    model: Callable[[str], Path], gpus: list[FakeDevice], name: str, ranks: int
) -> None:
    with split_engine(model(name), 1) as engine:
        expected = logits_of(engine)
    with split_engine(model(name), ranks, gpu=True) as engine:
        assert isinstance(engine, LeadingEngine) and isinstance(engine.memory, CudaMemory)
        assert engine.memory.ranks == ranks and engine.layout.head_shards == SHARDS.get(name, 2)
        notes = " ".join(engine.notes)
        assert f"tensor parallel: {ranks} GPUs" in notes
        assert ("3 layers with fused linears" in notes) == (name in FUSED) and "not fused" not in notes
        assert f"the first 2 layers give the same logits in {ranks} ranks as in one" in notes
        worst = float((logits_of(engine) - expected).abs().max())
    assert worst < TOLERANCE * max(1.0, float(expected.std()))


def test_all_ranks_fuse_their_layers_or_none(
    model: Callable[[str], Path], gpus: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial fails on the other rank only, and there in the first layer: the exchanges of later ones come all the
    same."""
    met, fused = gpu_layers._Trial.is_met_by, dict[str, int]()
    fuse = gpu_layers.fuse_gpu_layers

    def fails(trial: Any, layer: gpu_layers.GpuLayer, *rest: Any) -> bool:
        here = met(trial, layer, *rest)
        return here and (layer.layer_idx > 0 or threading.current_thread().name != "rank-1")

    def counted(*arguments: Any) -> int:
        fused[threading.current_thread().name] = fuse(*arguments)
        return fused[threading.current_thread().name]

    monkeypatch.setattr(prepared, "fuse_gpu_layers", counted)
    with split_engine(model("llama"), 2, gpu=True) as engine:
        assert sorted(fused.values()) == [3, 3]
        expected = logits_of(engine)
    monkeypatch.setattr(gpu_layers._Trial, "is_met_by", fails)
    with split_engine(model("llama"), 2, gpu=True) as engine:
        assert sorted(fused.values()) == [0, 0] and "fused" not in " ".join(engine.notes)
        assert float((logits_of(engine) - expected).abs().max()) < TOLERANCE


def test_kv_in_fp8_has_the_scales_of_each_gpus_heads(tmp_path: Path, gpus: list[FakeDevice]) -> None:
    path = spread_kv(make_model("llama", tmp_path))
    with split_engine(path, 1, kv_cache_dtype="fp8") as engine:
        expected, fingerprint = logits_of(engine), engine.fingerprint
    with split_engine(path, 2, gpu=True, kv_cache_dtype="fp8") as engine:
        assert engine.fingerprint == fingerprint, "the scales differ"
        error = (logits_of(engine) - expected).pow(2).mean(dim=-1).sqrt() / expected.std(dim=-1)
    assert float(error.median()) < 0.02


def test_each_gpu_has_the_heads_of_its_rank(model: Callable[[str], Path], gpus: list[FakeDevice]) -> None:
    """The slabs of two ranks together have the bytes of one pool, those of ranks with the same head are equal."""
    whole = BATCH.tables[0], range(40)
    with split_engine(model("llama"), 1) as engine:
        engine.step(BATCH)
        expected = engine.memory.read(*whole, range(3)).view("float32").copy()
    with split_engine(model("llama"), 4, gpu=True) as engine:
        engine.step(BATCH)
        memory = engine.memory
        assert memory.slab.size == memory.layout.block_bytes * memory.blocks // 2, "one of two shards"
        for places in memory._written:  # the copies of both heads, one after the other
            memory._places = places
            size = memory.layout.range_bytes(0, 3, 40)
            landing = memory.calls.allocate(size)
            memory.gather(*whole, range(3), landing)
            memory.calls.wait(memory.calls.record_event())
            got = memory.calls.array(landing)[:size].view("float32").copy()
            memory.calls.free(landing)
            assert np.abs(got - expected).max() < 1e-4
        assert len(memory._written) == 2


def test_blocks_are_copied_and_cleared_on_every_gpu(model: Callable[[str], Path], gpus: list[FakeDevice]) -> None:
    fork = Batch((Segment(sequence_of([*range(8, 49)]), 40, 1),), ([BlockId(3), BlockId(1), BlockId(9)],))
    with split_engine(model("llama"), 2, gpu=True) as engine:
        engine.step(BATCH)
        expected = engine.logits(Batch(fork.segments, BATCH.tables))
        engine.copy_blocks([BlockCopy(BlockId(2), BlockId(9))])
        assert torch.equal(engine.logits(fork), expected)
        engine.store.clear([BlockId(9)])
        assert not torch.equal(engine.logits(fork), expected)


def test_blocks_are_copied_everywhere_before_something_else_may_write_them(
    model: Callable[[str], Path], gpus: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank copies late."""
    copy, late, copied = SlabStore.copy_blocks, threading.Event(), list[str]()

    def copy_late(store: SlabStore, copies: Any) -> None:
        name = threading.current_thread().name
        if name == "rank-1":
            late.wait(0.05)  # nothing sets it: long enough for rank 0 to go on if it could
        copy(store, copies)
        copied.append(name)

    monkeypatch.setattr(rank_follower, "wait_for", lambda where: copied.append("its GPU, too"))
    with split_engine(model("llama"), 2, gpu=True) as engine:
        monkeypatch.setattr(SlabStore, "copy_blocks", copy_late)
        engine.copy_blocks([BlockCopy(BlockId(2), BlockId(9))])
        assert copied[:2] == ["rank-1", "its GPU, too"]


ENDS = {
    "2x2": ((2, True), (2, True)),
    "2x1": ((2, True), (1, True)),
    "1x4": ((1, True), (4, True)),
    "2 GPUs to a CPU": ((2, True), (1, False)),
    "2 CPU ranks to 2 GPUs": ((2, False), (2, True)),
}
"""Ranks of prefill and of decode, and whether they are on GPUs."""
BEST = {"2 GPUs to a CPU": "zmq", "2 CPU ranks to 2 GPUs": "shm"}
"""The link that auto takes, if not cuda-ipc."""
MODELS = (("llama", "auto"), ("one KV head", "auto"), ("llama", "zmq"))
"""Models and links; ``make test`` has one of them with each of :data:`ENDS`."""


@pytest.mark.parametrize(
    ("name", "transport", "ends"),
    [
        pytest.param(name, transport, ends, marks=() if (name, transport) == kept else pytest.mark.whole)
        for ends, kept in zip(ENDS, [*MODELS, *MODELS], strict=False)
        for name, transport in MODELS
    ],
)
def test_kv_travels_between_gpus_of_any_numbers_of_ranks(
    model: Callable[[str], Path], stack: ExitStack, bench: Bench, name: str, transport: str, ends: str
) -> None:
    """Two choices per request: decode copies blocks on every GPU. Each token is right given everything before it."""
    reference, requests = Reference(model(name)), []
    for role, (ranks, gpu), block_size in zip(("prefill", "decode"), ENDS[ends], (32, 16), strict=True):
        engine = stack.enter_context(split_engine(model(name), ranks, gpu=gpu, block_size=block_size))
        bench.add(role, engine, kv_transport=transport, max_num_batched_tokens=24)  # type: ignore[arg-type]
    for length in (1, 33, 50):
        prompt = [8 + (31 * at * at + length) % 500 for at in range(length)]
        requests.append(Request(new_request_id(), pack_tokens(prompt), greedy(8), n=2))
        bench.place(requests[-1], "prefill-0", "decode-1")
    bench.until(lambda: bench.done(*requests))
    for request in requests:
        for choice in range(2):
            stream = bench.streams[request.id, 1, choice]
            reference.check(request.prompt_tokens(), stream, request.sampling, choice=choice)
        wanted = transport if transport != "auto" else BEST.get(ends, "cuda-ipc")
        assert bench.shipped(request)[0].link == wanted
    assert not bench.failed


def test_the_fullest_gpu_decides_on_the_pool(
    model: Callable[[str], Path], gpus: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_rank(leading: int, following: int) -> Callable[..., int]:
        return lambda device: following if threading.current_thread().name == "rank-1" else leading

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", on_rank(99 * MIB, 120 * MIB))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", on_rank(150 * MIB, 200 * MIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 * MIB, 1024 * MIB))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    options = {"num_kv_blocks": None, "max_model_len": 256, "max_batched_tokens": 64, "max_num_seqs": 4}
    with split_engine(model("llama"), 2, gpu=True, **options) as engine:
        room = int(1024 * MIB * 0.9) - 120 * MIB - 100 * MIB - CONTEXT_BYTES
        assert engine.store.blocks == 2 * room // engine.layout.block_bytes
        assert "the fullest of 2 GPUs" in " ".join(engine.notes)


def test_gpus_that_cannot_reach_each_other_are_refused_in_words(
    model: Callable[[str], Path], gpus: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> DeviceBuffer:
        raise DeviceFailed("cuMemSetAccess: peer access is not supported (217)")

    monkeypatch.setattr(FakeDevice, "attach", refuse)
    with (
        pytest.raises(StartError, match=r"cannot share a KV pool.*memory of the GPU of rank 1: cuMemSetAccess"),
        split_engine(model("llama"), 2, gpu=True),
    ):
        pass


def test_a_gpu_with_too_little_memory_is_named(
    model: Callable[[str], Path], gpus: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = FakeDevice.allocate

    def short(self: FakeDevice, size: int) -> DeviceBuffer:
        if threading.current_thread().name == "rank-1":
            raise DeviceFailed("cuMemCreate: out of memory (2)")
        return allocate(self, size)

    monkeypatch.setattr(FakeDevice, "allocate", short)
    with pytest.raises(StartError, match="out of memory"), split_engine(model("llama"), 2, gpu=True):
        pass


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), StartError),
        (RuntimeError("CUDA error: unspecified launch failure"), DeviceLost),
    ],
    ids=["memory", "lost"],
)
def test_an_error_of_the_gpu_inside_a_step_ends_the_worker(
    model: Callable[[str], Path],
    gpus: list[FakeDevice],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    raised: type[Exception],
) -> None:
    with split_engine(model("llama"), 2, gpu=True) as engine:

        def fails(*_: Any) -> None:
            raise error

        monkeypatch.setattr(engine._attention.backend, "attend", fails)
        monkeypatch.setattr(engine._leader.channel, "share_step", lambda _: None)  # type: ignore[attr-defined]
        with pytest.raises(raised, match=str(error)) as caught:
            engine.step(BATCH)
    if isinstance(caught.value, StartError):
        assert "lower --max-num-batched-tokens" in caught.value.todo


def test_a_token_outside_the_vocabulary_leaves_the_ranks_in_step(
    model: Callable[[str], Path], gpus: list[FakeDevice]
) -> None:
    """It is found before the step is sent."""
    wrong = Batch((Segment(sequence_of([10_000]), 0, 1),), ([BlockId(5)],))
    with split_engine(model("llama"), 2, gpu=True) as engine:
        expected = engine.step(BATCH).tokens
        assert "outside the vocabulary" in engine.step(wrong).errors[0]
        assert engine.step(BATCH).tokens == expected


def test_the_drivers_calls_are_made_once_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from common.engine import pool

    opened: list[int] = []
    monkeypatch.setattr(pool, "torch_driver", lambda index: opened.append(index) or FakeDevice())
    pool.device_calls.cache_clear()
    where = torch.device("cuda:1")
    assert pool.device_calls(where) is rank_pools.device_calls(where) and opened == [1]
    pool.device_calls.cache_clear()


def test_another_rank_lets_its_gpu_be_checked(
    gpus: list[FakeDevice], model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own thread waits for messages, and would not notice that the GPU has failed."""
    checks: list[Callable[[], None]] = []

    def check() -> None:
        raise DeviceLost("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(rank_follower, "sentinel", lambda where: check)
    monkeypatch.setattr(FollowerChannel, "watch", lambda channel, check: checks.append(check))
    with split_engine(model("llama"), 2, gpu=True) as engine:
        engine.logits(BATCH)
        assert checks == [check]
