"""Loading for a GPU: what is measured, how its memory is divided, and what is refused.

The GPU is a stand-in whose tensors are on the CPU; torch's questions about its memory have prepared answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.attention.registry import Wanted
from common.checkpoint.files import open_checkpoint
from common.core.errors import StartError
from common.core.ids import BlockId, new_request_id, pack_tokens
from common.core.request import Request
from common.core.sequence import Batch, Segment, Sequence
from common.engine import loading, prepared
from common.engine.cuda_graphs import KINDS, sizes_of
from common.engine.gpu_memory import measure_use
from common.engine.graph_capture import DRIVER_BYTES
from common.engine.loading import load_engine
from common.engine.runner import ModelEngine
from common.kv.gpu_budget import CONTEXT_BYTES, GpuShare
from common.kv.storage.slab import SlabStore
from tests.fakes.late_graphs import LateAttention, LateCalls, PaddedStore
from tests.fakes.stand_in_gpu import MIB, stand_in
from tests.reference import Reference, greedy


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """torch.cuda's answers about memory, and the peak of what was run, which is 300 MiB above 100 MiB of weights."""
    answers: dict[str, Any] = {"free": 1600 * MIB, "total": 2048 * MIB, "peak": 400 * MIB, "reset": 0}
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 99 * MIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: answers["peak"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (answers["free"], answers["total"]))
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: answers.update(reset=answers["reset"] + 1)
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield answers
    torch.set_num_threads(threads)


@pytest.fixture
def load(checkpoint: Callable[[str], Path], cuda: dict[str, Any]) -> Iterator[Callable[..., ModelEngine]]:
    engines: list[ModelEngine] = []

    def load(**options: Any) -> ModelEngine:
        fields: dict[str, Any] = {"machine": stand_in(), "dtype": "float32", "attention": Wanted("torch")}
        fields |= {"max_batched_tokens": 64, "max_num_seqs": 4, "batch_hint": 4}
        engines.append(load_engine(open_checkpoint(str(checkpoint("llama"))), **(fields | options)))
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()


def test_pool_gets_what_weights_and_measured_activations_leave(
    load: Callable[..., ModelEngine], cuda: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    largest: list[tuple[int, int]] = []
    run_once = ModelEngine.run_once

    def watched(self: ModelEngine, batch: Batch, *rest: Any) -> Any:
        largest.append((batch.length, len(batch.segments)))
        return run_once(self, batch, *rest)

    monkeypatch.setattr(ModelEngine, "run_once", watched)
    engine = load(max_model_len=256)
    assert isinstance(engine.store, SlabStore) and cuda["reset"] == 1
    assert largest[:2] == [(64, 1), (4, 4)], "the largest prefill step and the largest decode step"
    room = int(2048 * MIB * 0.9) - 99 * MIB - 300 * MIB - CONTEXT_BYTES
    assert engine.store.blocks == room // engine.layout.block_bytes
    notes = "\n".join(engine.notes)
    assert "weights 99.0 MiB" in notes and "activations of 64 tokens 300.0 MiB" in notes


@pytest.mark.parametrize("alone", [True, False])
def test_memory_of_graphs_is_measured_or_on_a_shared_gpu_estimated(
    load: Callable[..., ModelEngine], cuda: dict[str, Any], monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    calls, trial = LateCalls(), load(num_kv_blocks=16, max_model_len=256)
    monkeypatch.setattr(trial, "close", lambda: None)  # the fixture closes it
    trial._attention.store = PaddedStore(trial.store)  # type: ignore[assignment]
    trial._attention.backend = LateAttention(trial.store, calls)
    kinds, sizes = len(KINDS), len(sizes_of(4))

    def mem_get_info(device: object) -> tuple[int, int]:
        return (1600 - 40 * (calls.captured > kinds)) * MIB, 2048 * MIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    (use,) = measure_use(lambda: trial, torch.device("cpu"), 64, 4, lambda: calls, alone)
    assert (use.graphs, use.graph_rows) == (40 * MIB if alone else DRIVER_BYTES * kinds * sizes, 4)
    assert (use.weights, use.activations, use.total) == (99 * MIB, 300 * MIB, 2048 * MIB)


def test_only_an_engine_that_decodes_has_graphs(
    load: Callable[..., ModelEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a prefill worker would take memory from its pool and seconds of its start for nothing."""
    made: list[LateCalls] = []

    def calls() -> LateCalls:
        made.append(LateCalls())
        return made[-1]

    monkeypatch.setattr(loading, "_graph_calls", lambda where: calls)
    load(max_model_len=256)
    assert len(made) == 2, "to measure them, and to capture them"
    load(max_model_len=256, decodes=False)
    assert len(made) == 2


def test_tokens_equal_those_of_transformers(
    load: Callable[..., ModelEngine], checkpoint: Callable[[str], Path]
) -> None:
    engine = load(num_kv_blocks=16, max_model_len=256)
    sequence = Sequence(Request(new_request_id(), pack_tokens(range(10, 40)), greedy(8)), 0)
    for _ in range(8):
        segment = Segment(sequence, sequence.computed, sequence.missing)
        result = engine.step(Batch((segment,), ([BlockId(block) for block in range(4)],)))
        sequence.computed = len(sequence.tokens)
        sequence.append(result.tokens[0][0])
    Reference(checkpoint("llama"), 256).check(sequence.tokens[:30], sequence.output, sequence.request.sampling)


def test_memory_is_not_measured_for_a_pool_of_given_size(
    load: Callable[..., ModelEngine], cuda: dict[str, Any]
) -> None:
    assert load(num_kv_blocks=16).store.blocks == 16
    assert load(kv_bytes=8 * MIB).store.blocks == 8 * MIB // load(num_kv_blocks=1).layout.block_bytes
    assert cuda["reset"] == 0


def test_error_for_too_little_memory_names_a_context_that_fits(
    load: Callable[..., ModelEngine], cuda: dict[str, Any]
) -> None:
    cuda["peak"] = 1190 * MIB
    cuda["free"] = 1091 * MIB
    with pytest.raises(StartError) as caught:
        load(max_model_len=4096)
    assert "4,096 tokens" in caught.value.what and "--max-model-len" in caught.value.todo


def short(*_: Any, **__: Any) -> None:
    """Fail as torch does where a GPU's memory is too small."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...")


@pytest.mark.parametrize(
    ("fails", "what", "flag"),
    [
        ("torch.nn.Module.to", "for the weights", "a smaller model"),
        ("common.model.probe.forward", "for the weights", "a smaller model"),
        ("common.engine.gpu_memory.run_largest", "step of 64 tokens and 4 sequences", "--max-num-batched-tokens"),
        ("common.engine.loading.select_backend", "trial of attention kernels", "--gpu-memory-utilization"),
        ("common.engine.runner.ModelEngine.verify", "to check the model", "--gpu-memory-utilization"),
    ],
)
def test_lack_of_memory_at_the_start_ends_in_words(
    load: Callable[..., ModelEngine], monkeypatch: pytest.MonkeyPatch, fails: str, what: str, flag: str
) -> None:
    monkeypatch.setattr(fails, short)
    with pytest.raises(StartError) as caught:
        load()
    error = caught.value
    assert "too little GPU memory" in error.what and what in error.what and flag in error.todo
    assert error.why == "2.00 GiB more did not fit; 1.6 GiB of 2.0 GiB are free, 100.0 MiB are this worker's"


def test_lack_of_memory_for_quantized_weights_ends_in_words(
    load: Callable[..., ModelEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "_source", lambda *_: object())
    monkeypatch.setattr(prepared, "load_compact", short)
    with pytest.raises(StartError, match="too little GPU memory for the weights"):
        load()


def test_warm_up_steps_that_do_not_fit_end_in_words(
    load: Callable[..., ModelEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(num_kv_blocks=16)
    monkeypatch.setattr(ModelEngine, "run_once", short)
    with pytest.raises(StartError, match="too little GPU memory for the warm-up steps") as caught:
        engine.warm_up()
    for flag in ("--gpu-memory-utilization", "--max-num-batched-tokens", "--max-num-seqs"):
        assert flag in caught.value.todo


def test_another_error_at_the_start_is_not_taken_for_lack_of_memory(
    load: Callable[..., ModelEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any) -> None:
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr("common.engine.gpu_memory.run_largest", wrong)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        load()


def test_weights_that_do_not_fit_are_not_read(
    load: Callable[..., ModelEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.engine.prepared.read_weights", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(StartError, match="too little GPU memory for weights"):
        load(machine=stand_in(free=1 << 10))
    with pytest.raises(StartError, match="shared by 40 workers"):
        load(gpu_share=GpuShare(0.9, 40))


def test_int8_is_refused_on_a_gpu(load: Callable[..., ModelEngine]) -> None:
    with pytest.raises(StartError, match="int8"):
        load(quantization="int8")


def test_the_dtype_is_chosen_for_the_gpu(load: Callable[..., ModelEngine]) -> None:
    engine = load(dtype="auto", num_kv_blocks=16)
    assert engine.notes[0] == "dtype float32: the checkpoint's type" and engine.store.dtype == torch.float32
    assert not engine.store.k(0).any(), "the check before serving leaves nothing in the pool"
