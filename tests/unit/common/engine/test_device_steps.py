"""An engine whose steps run as on a GPU: one upload, one read, no wait between, and what its errors lead to.

Without a GPU the device is the CPU, whose own path is the oracle, or torch's meta device, on which a value cannot be
looked at.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.attention.torch_reference import TorchReference
from common.core.errors import DeviceLost
from common.core.ids import BlockId, new_request_id, pack_tokens
from common.core.request import Request, SamplingParams
from common.core.sequence import Batch, Segment, Sequence
from common.engine import faults
from common.engine.device_steps import DeviceSteps
from common.engine.runner import ModelEngine
from common.kv.layout import KvLayout, LayerLayout
from common.kv.storage.slab import SlabStore
from common.model.load import load_model
from tests.device_watch import DeviceWatch
from tests.reference import greedy

VOCAB, BLOCKS = 512, 32
ILLEGAL = (
    "CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call.\n"
)


def make_engine(path: Path, device: str, *, as_on_gpu: bool, blocks: int = BLOCKS) -> ModelEngine:
    from common.checkpoint.files import open_checkpoint

    checkpoint = open_checkpoint(str(path))
    model = load_model(checkpoint, "float32").to(device)
    layers = checkpoint.kv_layers()
    assert layers is not None and all(isinstance(layer, LayerLayout) for layer in layers)
    store = SlabStore(KvLayout(layers, "float32", 16), blocks, torch.device(device))
    steps = DeviceSteps(torch.device(device), VOCAB, VOCAB) if as_on_gpu else None
    return ModelEngine(model, store, TorchReference(store), "", VOCAB, 256, steps)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def engines(checkpoint: Callable[[str], Path]) -> Iterator[tuple[ModelEngine, ModelEngine]]:
    """The same model with a CPU's steps and with those of a GPU."""
    both = tuple(make_engine(checkpoint("llama"), "cpu", as_on_gpu=each) for each in (False, True))
    yield both[0], both[1]
    for engine in both:
        engine.close()


@pytest.fixture
def gpu(engines: tuple[ModelEngine, ModelEngine]) -> ModelEngine:
    """The engine with a GPU's steps."""
    return engines[1]


MIXED = [
    greedy(20),
    greedy(20, logprobs=2),
    SamplingParams(20, 7, temperature=0.9, top_p=0.9, top_k=30),
    SamplingParams(20, 8, temperature=1.2, min_p=0.02, frequency_penalty=0.5, repetition_penalty=1.2, min_tokens=3),
    SamplingParams(20, 9, temperature=0.0, presence_penalty=1.5, logit_bias={7: 100.0, 9: 99.5}, logprobs=0),
]


def new_sequence(tokens: list[int], sampling: SamplingParams | None = None, n: int = 1) -> Sequence:
    return Sequence(Request(new_request_id(), pack_tokens(tokens), sampling or greedy(50), n=n), 0)


def table(index: int) -> list[BlockId]:
    return [BlockId(block) for block in range(4 * index, 4 * index + 4)]


def whole(sequences: list[Sequence], longest: int = 64) -> Batch:
    segments = (Segment(each, each.computed, min(each.missing, longest)) for each in sequences)
    return Batch(tuple(segments), tuple(table(index) for index in range(len(sequences))))


def play(engine: ModelEngine, *, steps: int) -> list[object]:
    """Run prompts in chunks and then decode steps, with a preemption in the middle, and return every result."""
    rng = random.Random(5)
    sequences = [
        new_sequence([rng.randrange(1, VOCAB) for _ in range(9 + 5 * i)], each) for i, each in enumerate(MIXED)
    ]
    seen: list[object] = []
    for step in range(steps):
        batch = whole(sequences, 12)
        result = engine.step(batch)
        seen.append((result.tokens, result.logprobs, result.errors))
        for segment, tokens, logprobs in zip(batch.segments, result.tokens, result.logprobs, strict=True):
            segment.sequence.computed = segment.end
            if tokens:
                segment.sequence.append(tokens[0], logprobs[0] if logprobs else None)
        if step == steps // 2:
            sequences[3].computed = 0  # preempted: its KV is computed again
    return seen


def test_device_steps_equal_cpu_steps(engines: tuple[ModelEngine, ModelEngine]) -> None:
    cpu, gpu = (play(engine, steps=14) for engine in engines)
    assert gpu == cpu


def test_choices_of_one_prompt_are_sampled_in_one_step(engines: tuple[ModelEngine, ModelEngine]) -> None:
    sampling = SamplingParams(5, 3, temperature=1.5, logprobs=0, frequency_penalty=0.3)
    prompt = list(range(10, 30))
    first, second = (engine.step(whole([new_sequence(prompt, sampling, n=4)])) for engine in engines)
    assert second.tokens == first.tokens and second.logprobs == first.logprobs and len(second.tokens[0]) == 4


def test_an_impossible_token_never_reaches_the_device(gpu: ModelEngine) -> None:
    layers: list[int] = []
    gpu.on_layer = layers.append
    batch = whole([new_sequence([1, 2]), new_sequence([1, VOCAB]), new_sequence([3])])
    result = gpu.step(batch)
    gpu.on_layer = None
    assert list(result.errors) == [1] and "IndexError" in result.errors[1] and layers == [0, 1, 2]
    assert result.tokens[0] and result.tokens[2] and not result.tokens[1]


def test_not_a_number_fails_its_own_request_only(gpu: ModelEngine) -> None:
    sequences = [new_sequence(list(range(5, 20))), new_sequence(list(range(30, 60)), MIXED[2])]
    gpu.step(whole(sequences))
    for each in sequences:
        each.computed = len(each.tokens) - 1
    before = gpu.step(whole(sequences)).tokens
    gpu.store.v(1)[0, 3] = torch.nan
    result = gpu.step(whole(sequences))
    gpu.store.clear([0])
    assert list(result.errors) == [0] and "not finite" in result.errors[0]
    assert result.tokens == [[], before[1]]


@pytest.mark.parametrize("sampled", [True, False])
def test_a_step_reads_the_device_once_and_waits_nowhere_else(
    sampled: bool, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On meta tensors the whole step runs, up to the read, which has nothing to read."""
    meta = torch.device("meta")
    engine = make_engine(checkpoint("llama"), "meta", as_on_gpu=True)
    steps = engine._device_steps
    assert steps is not None
    waits: list[torch.device] = []
    monkeypatch.setattr("common.engine.device_steps.wait_for", waits.append)
    prompts = [new_sequence(list(range(1, 20)), sampling) for sampling in MIXED]
    if not sampled:
        for each in prompts:
            each.tokens.append(5)  # a chunk ends before the last token
    segments = tuple(Segment(each, 0, 19) for each in prompts)
    batch = Batch(segments, tuple(table(index) for index in range(len(prompts))))
    reads: list[torch.Size] = []

    def read(packed: torch.Tensor, *_: Any) -> None:
        assert packed.device == meta
        reads.append(packed.shape)
        raise KeyboardInterrupt  # as far as a step without values goes

    upload = steps._staging.upload

    def upload_outside(columns: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return upload(columns)

    monkeypatch.setattr(steps._staging, "upload", upload_outside)
    monkeypatch.setattr(torch.Tensor, "to", _to_unless_cpu(read))
    with DeviceWatch(meta):
        if sampled:
            with pytest.raises(KeyboardInterrupt):
                engine.step(batch)
        else:
            assert engine.step(batch).tokens == [[]] * len(prompts)
    assert len(reads) == int(sampled) and len(waits) == int(not sampled)


def _to_unless_cpu(read: Callable[..., None]) -> Callable[..., torch.Tensor]:
    """Return ``Tensor.to``, but with ``read`` called where it copies to the CPU."""
    original = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and args[0] == "cpu":
            read(self)
        return original(self, *args, **kwargs)

    return to


# -- errors -----------------------------------------------------------------------------------------------------------


def failing(engine: ModelEngine, fails: Callable[[int], Exception | None], patch: pytest.MonkeyPatch) -> list[int]:
    """Make the model raise ``fails(rows)`` where that is an error; return the list of the rows of each call."""
    calls: list[int] = []
    forward = engine.model.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        rows = int(kwargs["input_ids"].shape[1])
        calls.append(rows)
        if (error := fails(rows)) is not None:
            raise error
        return forward(*args, **kwargs)

    patch.setattr(engine.model, "forward", call)
    return calls


def test_too_little_memory_shrinks_the_batch(gpu: ModelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [new_sequence([5 + index] * 4, MIXED[index % 5]) for index in range(7)]
    expected = gpu.step(whole(sequences))
    freed: list[torch.device] = []
    monkeypatch.setattr(faults, "free_cached", freed.append)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    calls = failing(gpu, lambda rows: error if rows > 8 else None, monkeypatch)
    layers: list[int] = []
    gpu.on_layer = layers.append
    result = gpu.step(whole(sequences))
    gpu.on_layer = None
    assert not result.errors and result.tokens == expected.tokens and layers == [0, 1, 2]
    assert calls == [28, 16, 8, 8, 12, 8, 4] and len(freed) == 3


def test_a_request_that_is_too_large_by_itself_fails_alone(gpu: ModelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [new_sequence([1] * 4), new_sequence([2] * 40), new_sequence([3] * 4)]
    error = torch.AcceleratorError("CUDA error: out of memory")
    failing(gpu, lambda rows: error if rows > 30 else None, monkeypatch)
    result = gpu.step(whole(sequences))
    assert list(result.errors) == [1] and "too little GPU memory" in result.errors[1]
    assert result.tokens[0] and result.tokens[2]


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(ILLEGAL),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
    ],
)
def test_a_dead_device_is_not_tried_again(error: Exception, gpu: ModelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = failing(gpu, lambda rows: error, monkeypatch)
    with pytest.raises(DeviceLost) as caught:
        gpu.step(whole([new_sequence([1]), new_sequence([2])]))
    assert len(calls) == 1 and str(caught.value) == str(error).partition("\n")[0]


def test_a_device_that_dies_in_the_second_try_is_lost_too(gpu: ModelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError(ILLEGAL)])
    calls = failing(gpu, lambda rows: next(errors), monkeypatch)
    with pytest.raises(DeviceLost):
        gpu.step(whole([new_sequence([1]), new_sequence([2])]))
    assert len(calls) == 2


def test_counts_are_right_after_a_step_that_failed(
    engines: tuple[ModelEngine, ModelEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may fail before or behind the sampler has counted its tokens."""
    sampling = SamplingParams(20, 9, temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.5)
    outputs = []
    for engine in engines:
        sequence = new_sequence([4, 4, 5], sampling)
        for step in range(6):
            with monkeypatch.context() as patch:
                if step == 3:
                    failing(engine, _once(), patch)
                elif step == 4 and engine._device_steps is not None:
                    patch.setattr(engine._device_steps, "sample", _fail_once(engine._device_steps.sample))
                result = engine.step(whole([sequence, new_sequence([7])]))
            assert not result.errors
            sequence.computed = len(sequence.tokens)
            sequence.append(result.tokens[0][0])
        outputs.append(sequence.output)
    assert outputs[0] == outputs[1]


def _once() -> Callable[[int], Exception | None]:
    errors = iter([ValueError("once")])
    return lambda rows: next(errors, None)


def _fail_once(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``sample``, of which the first result is lost."""
    first = [True]

    def call(*args: Any) -> Any:
        result = sample(*args)
        if first.pop() if first else False:
            raise ValueError("once")
        return result

    return call


def test_a_device_that_has_failed_is_found_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [True, False, RuntimeError("CUDA error: an illegal memory access was encountered\nmore words")]
    asked: list[torch.device] = []

    class Event:
        def record(self, stream: object) -> None: ...

        def query(self) -> bool:
            if isinstance(answer := answers.pop(0), RuntimeError):
                raise answer
            return bool(answer)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    device = torch.device("cuda:3")
    check = faults.sentinel(device)
    check()
    check()  # work is under way
    with pytest.raises(DeviceLost, match=r"^CUDA error: an illegal memory access was encountered$"):
        check()
    assert asked == [device] * 3, "another GPU would give memory to a thread that names none"
