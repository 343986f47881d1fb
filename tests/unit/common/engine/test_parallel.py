"""A model split among ranks computes what the whole model computes, and its KV travels between any numbers of ranks."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.attention.interface import Span
from common.core.errors import StartError
from common.core.ids import BlockId, new_request_id, pack_tokens
from common.core.request import Request
from common.core.sequence import Batch, Segment
from common.engine.batch import FlatStep
from common.engine.packed_step import pack, unpack
from common.engine.parallel import LeadingEngine
from common.engine.runner import sequence_of
from common.kernels.e4m3 import to_e4m3
from common.kv.storage.tensors import KvStore
from common.model.fp8 import Fp8Linear, row_scales
from tests.fakes.device_calls import FakeDevice
from tests.models import make_model, spread_kv
from tests.ranks import KINDS, SHARDS, TOLERANCE, logits_of, split_engine
from tests.reference import FLOAT32, Reference, Tolerance, greedy
from tests.unit.workers import Bench

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = {*((name, 2) for name in KINDS if name not in ("mixtral", "gemma3")), ("llama", 4), ("qwen3-moe", 4)}
"""Models and numbers of ranks in ``make test``."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
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
def test_logits_equal_those_of_one_process(model: Callable[[str], Path], name: str, ranks: int) -> None:
    with split_engine(model(name), 1) as engine:
        expected = logits_of(engine)
    with split_engine(model(name), ranks) as engine:
        assert isinstance(engine, LeadingEngine)
        assert engine.layout.head_shards == SHARDS.get(name, 2)
        assert f"the first 2 layers give the same logits in {ranks} ranks as in one" in " ".join(engine.notes)
        worst = float((logits_of(engine) - expected).abs().max())
    assert worst < TOLERANCE * max(1.0, float(expected.std()))


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_other_formats_are_split_too(model: Callable[[str], Path], options: dict[str, Any]) -> None:
    """Rounding differs between one process and two; the engine itself compares logits with eager attention."""
    with split_engine(model("llama"), 1, **options) as engine:
        expected = logits_of(engine).float()
    with split_engine(model("llama"), 2, **options) as engine:
        error = (logits_of(engine).float() - expected).pow(2).mean(dim=-1).sqrt() / expected.std(dim=-1)
    assert float(error.median()) < 0.15


@pytest.mark.parametrize("name", ["heads of different size", "one KV head"])
def test_kv_in_fp8_is_that_of_one_process(model: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """Every rank has the scales of its heads; a head that ranks have in common has one scale."""
    path = model(name) if name in KINDS else spread_kv(make_model("llama", tmp_path))
    found = []
    for ranks in (1, 2):
        with split_engine(path, ranks, kv_cache_dtype="fp8") as engine:
            logits = logits_of(engine)
            kv = engine.memory.read([BlockId(block) for block in range(9, 0, -2)], range(75), range(3))
            found.append((engine.fingerprint, logits, torch.from_numpy(kv)))
            scaled = next(note for note in engine.notes if "scales differ" in note)
    assert ("12 of 12 scales differ from 1" in scaled) == (name not in KINDS), scaled
    (whole, expected, codes), (split, logits, others) = found
    assert whole == split, "the fingerprint has the scales in it"
    assert float((codes == others).float().mean()) > 0.99
    error = (logits - expected).pow(2).mean(dim=-1).sqrt() / expected.std(dim=-1)
    assert float(error.median()) < 0.02


class _InParts(nn.Module):
    """A linear layer in fp8 that rounds the halves of each token as two ranks do."""

    def __init__(self, whole: Fp8Linear) -> None:
        super().__init__()
        self._whole = whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half, whole = self._whole.in_features // 2, self._whole
        parts = []
        for columns in (slice(half), slice(half, None)):
            part = x[..., columns]
            scale = row_scales(part.reshape(-1, half)).view(*x.shape[:-1], 1)
            product = to_e4m3(part / scale).float() @ whole.rounded[:, columns].float().T
            parts.append(product * scale * whole.scale)
        out = sum(parts[1:], parts[0])
        return out if whole.bias is None else out + whole.bias


@pytest.mark.parametrize(("name", "gpu"), [("qwen3", False), ("one KV head", True), ("biases", False)])
def test_weights_in_fp8_are_rounded_as_by_one_process(
    model: Callable[[str], Path], gpus: list[FakeDevice], name: str, gpu: bool
) -> None:
    """A number that falls between two of float8 may be rounded to either: few do, and only then do logits differ."""
    with split_engine(model(name), 1, quantization="fp8") as engine:
        fingerprint, plain = engine.fingerprint, logits_of(engine)
        for layer in engine.model.model.layers:  # type: ignore[union-attr]
            for parent, last in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
                setattr(parent, last, _InParts(getattr(parent, last)))
        expected = logits_of(engine)
    with split_engine(model(name), 2, gpu=gpu, quantization="fp8") as engine:
        assert engine.fingerprint == fingerprint
        notes = " ".join(engine.notes)
        assert "linear layers in fp8" in notes and "(in 6, of which each rank has some columns, per rank, too)" in notes
        found = logits_of(engine)
    spread = expected.std(dim=-1)
    error = (found - expected).abs().amax(dim=-1) / spread
    assert float(error.median()) < TOLERANCE and float(error.max()) < 0.5
    assert float(((found - plain).pow(2).mean(dim=-1).sqrt() / spread).max()) < 0.3


DEGREES = [(1, 2), (2, 1), (2, 2)]
HANDED_OVER = {
    ("llama", (1, 2), "shm"), ("llama", (2, 1), "zmq"), ("gemma2", (2, 2), "shm"), ("qwen3-moe", (2, 2), "zmq"),
    ("one KV head", (1, 2), "zmq"), ("one KV head", (2, 1), "shm"),
}  # fmt: skip
"""Models, ranks of prefill and of decode, and links in ``make test``."""


@pytest.mark.parametrize(
    ("name", "degrees", "link"),
    [
        pytest.param(
            name, degrees, link, marks=() if (name, degrees, link) in HANDED_OVER else pytest.mark.whole,
            id=f"{name}-{degrees[0]}x{degrees[1]}-{link}",
        )
        for name in ("llama", "qwen3", "gemma2", "qwen3-moe", "one KV head")
        for degrees in DEGREES
        for link in ("shm", "zmq")
    ],
)  # fmt: skip
def test_kv_travels_between_any_numbers_of_ranks(
    model: Callable[[str], Path], stack: ExitStack, bench: Bench, name: str, degrees: tuple[int, int], link: str
) -> None:
    """Prefill and decode also differ in block size. Each token is right given everything before it."""
    hand_over(model(name), stack, bench, degrees, link)


@pytest.mark.parametrize("degrees", [(1, 2), (2, 1)], ids=lambda each: f"{each[0]}x{each[1]}")
def test_kv_in_fp8_travels_between_any_numbers_of_ranks(
    tmp_path: Path, stack: ExitStack, bench: Bench, degrees: tuple[int, int]
) -> None:
    path = spread_kv(make_model("llama", tmp_path))
    hand_over(path, stack, bench, degrees, "zmq", Tolerance(greedy_stds=0.25), kv_cache_dtype="fp8")


def hand_over(
    path: Path,
    stack: ExitStack,
    bench: Bench,
    degrees: tuple[int, int],
    link: str,
    tolerance: Tolerance = FLOAT32,
    **options: Any,
) -> None:
    """Serve three requests whose prompts are computed by the first number of ranks, and their tokens by the second."""
    reference, requests = Reference(path), []
    for role, ranks, block_size in zip(("prefill", "decode"), degrees, (32, 16), strict=True):
        engine = stack.enter_context(split_engine(path, ranks, block_size=block_size, **options))
        bench.add(role, engine, kv_transport=link, max_num_batched_tokens=24)  # type: ignore[arg-type]
    for length in (1, 33, 50):
        prompt = [8 + (31 * at * at + length) % 500 for at in range(length)]
        requests.append(Request(new_request_id(), pack_tokens(prompt), greedy(8)))
        bench.place(requests[-1], "prefill-0", "decode-1")
    bench.until(lambda: bench.done(*requests))
    for request in requests:
        ids = bench.streams[request.id, 1, 0]
        reference.check(request.prompt_tokens(), ids, request.sampling, tolerance=tolerance)
        assert bench.shipped(request)[0].link == link
    assert not bench.failed


def test_a_layer_is_announced_when_every_rank_has_written_it(
    model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank writes each layer late. What rank 0 announces is nevertheless complete."""
    written, late = KvStore.write, threading.Event()

    def write(store: KvStore, *arguments: Any) -> None:
        if threading.current_thread().name == "rank-1":
            late.wait(0.05)  # nothing sets it: long enough for rank 0 to run ahead if it could
        written(store, *arguments)

    seen: list[tuple[int, bytes]] = []
    tokens, table = [*range(8, 48)], [BlockId(each) for each in (3, 1, 2)]
    with split_engine(model("llama"), 2) as engine:
        monkeypatch.setattr(KvStore, "write", write)

        def layer_of(layer: int) -> bytes:
            return engine.memory.read(table, range(40), range(layer, layer + 1)).tobytes()

        engine.on_layer = lambda layer: seen.append((layer, layer_of(layer)))
        engine.step(Batch((Segment(sequence_of(tokens), 0, 40),), (table,)))
        assert [layer for layer, _ in seen] == [0, 1, 2]
        for layer, at_once in seen:
            assert at_once == layer_of(layer) and any(at_once), f"layer {layer} was announced too early"


def test_a_request_that_fails_by_itself_leaves_the_ranks_in_step(
    model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error while sampling, which only rank 0 does, fails the request and not the worker."""
    from common.engine import runner

    real, faults = runner.peaks, [RuntimeError("no numbers")]

    def peaks(logits: torch.Tensor) -> list[int]:
        if faults:
            raise faults.pop()
        return real(logits)

    batch = Batch((Segment(sequence_of([*range(8, 28)]), 0, 20),), ([BlockId(0), BlockId(1)],))
    with split_engine(model("llama"), 2) as engine:
        expected = engine.step(batch)
        monkeypatch.setattr(runner, "peaks", peaks)
        assert engine.step(batch).errors == {0: "RuntimeError: no numbers"}
        assert engine.step(batch).tokens == expected.tokens


def test_an_error_inside_the_model_ends_the_worker_in_words(
    model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch((Segment(sequence_of([*range(8, 28)]), 0, 20),), ([BlockId(0), BlockId(1)],))
    with split_engine(model("llama"), 2) as engine:

        def fails(*_: Any) -> None:
            raise MemoryError("no memory for attention")

        monkeypatch.setattr(engine._attention.backend, "attend", fails)
        monkeypatch.setattr(engine._leader.channel, "share_step", lambda _: None)  # type: ignore[attr-defined]
        with pytest.raises(StartError, match="rank 0 of 2 failed in a step: MemoryError: no memory for attention"):
            engine.step(batch)


@pytest.mark.parametrize(
    ("kind", "overrides", "ranks", "why"),
    [
        ("gpt2", {}, 2, "transformers has no tensor-parallel plan for GPT2LMHeadModel"),
        ("llama", {}, 3, "4 attention heads cannot be divided among 3 ranks"),
        (
            "llama",
            {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
            2,
            "3 KV heads can neither be divided",
        ),
        ("qwen3-moe", {"num_experts": 3}, 2, "3 experts cannot be divided among 2 ranks"),
        ("llama", {"intermediate_size": 97}, 2, "of 97 rows cannot be divided among 2 ranks"),
    ],
    ids=lambda each: str(each) if isinstance(each, str | int) else "",
)
def test_what_cannot_be_split_is_refused_in_words(
    tmp_path: Path, kind: str, overrides: dict[str, Any], ranks: int, why: str
) -> None:
    with pytest.raises(StartError, match=why), split_engine(make_model(kind, tmp_path, **overrides), ranks):
        pass


def test_a_plan_that_splits_wrongly_is_refused(model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is right for the heads that each rank has, but they are not those of its queries."""
    monkeypatch.setattr("common.model.parallel._kv_rows", lambda plan, rows, dim, config: (0, rows // plan.size))
    with (
        pytest.raises(StartError, match="its first 2 layers, split, give logits that are off by"),
        split_engine(model("llama"), 2),
    ):
        pass


def test_a_step_arrives_as_it_was_sent() -> None:
    spans = [Span(0, 3, 17, array("i", [5, 9])), Span(3, 1, 0, [2])]
    columns = (array("q", numbers) for numbers in ([7, 8, 9, 1], [17, 18, 19, 0], [9, 9, 9, 2], [1, 2, 3, 0], [2, 3]))
    step = FlatStep(*columns, spans, [0, 1])
    data = b"".join(column.tobytes() for column in pack(step))
    got = unpack(memoryview(data))
    for name in ("ids", "positions", "blocks", "offsets", "kept"):
        assert getattr(got, name) == getattr(step, name)
    assert [(*span[:3], [*span.blocks]) for span in got.spans] == [(*span[:3], [*span.blocks]) for span in spans]
    assert got.sampled == []
