"""The logits of any batch equal those of transformers' eager attention on each sequence alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from common.checkpoint.files import open_checkpoint
from common.core.sequence import Batch, Segment
from common.engine.loading import load_engine
from common.engine.runner import ModelEngine, sequence_of
from common.kv.cache import BlockCopy
from tests.models import KINDS, SERVED
from tests.reference import Reference

pytestmark = pytest.mark.usefixtures("one_thread")
TOLERANCE = 1e-4
MAX_LEN = 1024
MakeEngine = Callable[..., ModelEngine]


@pytest.fixture
def make_engine(checkpoint: Callable[[str], Path]) -> Iterator[MakeEngine]:
    engines: list[ModelEngine] = []

    def make(kind: str, dtype: str = "float32", block_size: int = 16) -> ModelEngine:
        engines.append(
            load_engine(
                open_checkpoint(str(checkpoint(kind))), dtype=dtype, max_model_len=MAX_LEN,
                num_kv_blocks=4096 // block_size, block_size=block_size,
                max_batched_tokens=512, max_num_seqs=8, batch_hint=16,
            )
        )  # fmt: skip
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


class ChunkRunner:
    """Runs sequences chunk by chunk over random block tables."""

    def __init__(self, engine: ModelEngine, seed: int) -> None:
        self.engine, self.rng = engine, random.Random(seed)
        self.free = list(range(engine.memory.blocks))
        self.rng.shuffle(self.free)

    def table(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(self.engine.layout.blocks_for(tokens))]

    def step(self, parts: list[tuple[list[int], int, int, list[int]]]) -> list[torch.Tensor]:
        """Run one step of ``parts``, which are (tokens, start, end, table); return the logits after ``end`` of each."""
        segments = tuple(Segment(sequence_of(tokens[:end]), start, end - start) for tokens, start, end, _ in parts)
        logits = self.engine.logits(Batch(segments, tuple(part[3] for part in parts)))  # type: ignore[misc]
        return list(logits.float())


def tokens_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(8, 512) for _ in range(length)]


def assert_same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    scale = max(1.0, float(expected.std()))
    worst = float((got.double() - expected).abs().max()) / scale
    assert worst < TOLERANCE, f"{what}: logits differ by {worst:.2e}"


@pytest.mark.parametrize("kind", SERVED)
def test_every_composition_gives_the_reference_logits(
    kind: str, checkpoint: Callable[[str], Path], make_engine: MakeEngine
) -> None:
    path = checkpoint(kind)
    engine = make_engine(kind)
    reference = Reference(path, MAX_LEN)
    rng = random.Random(kind)
    run = ChunkRunner(engine, 1)
    sequences = [tokens_of(rng, n) for n in (1, 15, 16, 17, 70, 190)]
    expected = [torch.from_numpy(reference.logits(tokens)) for tokens in sequences]
    tables = [run.table(len(tokens)) for tokens in sequences]

    for tokens, rows in zip(sequences, expected, strict=True):  # each sequence alone
        assert_same(run.step([(tokens, 0, len(tokens), run.table(len(tokens)))])[0], rows[-1], f"{len(tokens)} alone")

    cuts = [sorted({0, n // 3, n * 4 // 5, n - 2, n - 1, n} & set(range(n + 1))) for n in map(len, sequences)]
    done = [0] * len(sequences)
    while any(len(cut) > 1 for cut in cuts):  # chunks and decode steps, mixed
        parts, rows = [], []
        for index in rng.sample(range(len(sequences)), k=4):
            if len(cuts[index]) > 1:
                start, end = cuts[index].pop(0), cuts[index][0]
                assert start == done[index]
                parts.append((sequences[index], start, end, tables[index]))
                rows.append(expected[index][end - 1])
                done[index] = end
        for got, row in zip(run.step(parts) if parts else [], rows, strict=True):
            assert_same(got, row, "mixed")

    decode = [(tokens, len(tokens) - 1, len(tokens), table) for tokens, table in zip(sequences, tables, strict=True)]
    for got, rows in zip(run.step(decode), expected, strict=True):  # decode rows only, of very different lengths
        assert_same(got, rows[-1], "decode")

    long, table = sequences[-1], tables[-1]
    hit = [*table[:5], *run.table(len(long) - 80)]
    assert_same(run.step([(long, 80, len(long), hit)])[0], expected[-1][-1], "after a prefix hit")
    copies = list(zip(table, run.table(len(long)), strict=True))
    engine.copy_blocks(BlockCopy(a, b) for a, b in copies)  # type: ignore[arg-type]
    copied = [target for _, target in copies]
    assert_same(run.step([(long, len(long) - 1, len(long), copied)])[0], expected[-1][-1], "in copied blocks")


@pytest.mark.parametrize("kind", SERVED)
def test_logits_after_a_hand_off_and_after_preemption(
    kind: str, checkpoint: Callable[[str], Path], make_engine: MakeEngine
) -> None:
    """Prefill on one engine, decode on another with larger blocks; then the blocks are lost and all is recomputed."""
    sender, receiver = make_engine(kind), make_engine(kind, block_size=32)
    reference, rng = Reference(checkpoint(kind), MAX_LEN), random.Random(kind)
    one, other = ChunkRunner(sender, 1), ChunkRunner(receiver, 2)
    for length in (17, 150):
        tokens = tokens_of(rng, length + 3)
        expected = torch.from_numpy(reference.logits(tokens))
        source, target = one.table(length), other.table(length + 3)
        for start, end in ((0, length // 2), (length // 2, length)):
            one.step([(tokens, start, end, source)])
        for layer in range(len(sender.layout.layers)):  # in frames of one layer and an uneven range of tokens
            for part in (range(5), range(5, length)):
                layers = range(layer, layer + 1)
                receiver.memory.write(target, part, layers, sender.memory.read(source, part, layers))
        for end in range(length + 1, length + 4):
            assert_same(other.step([(tokens, end - 1, end, target)])[0], expected[end - 1], "after a hand-off")
        again = other.table(length + 3)
        neighbour = tokens_of(rng, 40)
        got = other.step([(neighbour, 0, 40, other.table(40)), (tokens, 0, length + 3, again)])[1]
        assert_same(got, expected[-1], "after preemption, beside a neighbour")


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128])
def test_every_block_size_starts_and_computes(
    block_size: int, checkpoint: Callable[[str], Path], make_engine: MakeEngine
) -> None:
    engine = make_engine("llama", block_size=block_size)
    tokens = tokens_of(random.Random(block_size), 200)
    expected = torch.from_numpy(Reference(checkpoint("llama"), MAX_LEN).logits(tokens))
    run = ChunkRunner(engine, 3)
    table = run.table(200)
    run.step([(tokens, 0, 77, table)])
    assert_same(run.step([(tokens, 77, 200, table)])[0], expected[-1], f"blocks of {block_size}")


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_bfloat16_works(kind: str, checkpoint: Callable[[str], Path], make_engine: MakeEngine) -> None:
    path = checkpoint(kind)
    engine = make_engine(kind, "bfloat16")
    run = ChunkRunner(engine, 2)
    tokens = tokens_of(random.Random(5), 100)
    expected = torch.from_numpy(Reference(path, MAX_LEN).logits(tokens))[-1]
    table = run.table(100)
    run.step([(tokens, 0, 60, table)])
    got = run.step([(tokens, 60, 100, table)])[0]
    assert engine.layout.dtype == "bfloat16"
    assert float((got.double() - expected).pow(2).mean().sqrt() / expected.std()) < 0.25


@pytest.mark.parametrize("kind", ["llama-dynamic", "phi3-longrope"])
def test_a_long_neighbour_does_not_change_a_short_request(
    kind: str, checkpoint: Callable[[str], Path], make_engine: MakeEngine
) -> None:
    assert kind in KINDS
    engine = make_engine(kind)
    run = ChunkRunner(engine, 3)
    rng = random.Random(6)
    short, long = tokens_of(rng, 20), tokens_of(rng, 1000)
    alone = run.step([(short, 0, 20, run.table(20))])[0]
    beside = run.step([(long, 0, 1000, run.table(1000)), (short, 0, 20, run.table(20))])[1]
    assert_same(beside, alone.double(), "beside a long one")
    assert any("frozen" in note for note in engine.notes)
    checkpoints, weights, frozen = engine.fingerprint.split(".")
    assert checkpoints == open_checkpoint(str(checkpoint(kind))).fingerprint and weights and frozen
