"""Log-probabilities of prompts equal transformers', however the prompt is cut, and never need all logits at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.checkpoint.files import open_checkpoint
from common.core.ids import BlockId, new_request_id, pack_tokens
from common.core.prompt_span import PromptSpan
from common.core.request import Request, SamplingParams
from common.core.sequence import Batch, Segment, Sequence
from common.engine import prompt_scores
from common.engine.loading import load_engine
from common.engine.prompt_scores import score
from common.engine.runner import ModelEngine
from tests.models import SERVED, make_model
from tests.ranks import split_engine
from tests.reference import Reference
from tests.unit.common.engine.test_device_steps import make_engine as make_plain_engine

TOLERANCE = 1e-4
LENGTH = 150


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the logits of 7 rows of 512 at once, so that chunks are cut."""
    monkeypatch.setattr(prompt_scores, "MOST_LOGITS", 7 * 512)


@contextmanager
def loaded(path: Path, **options: Any) -> Iterator[ModelEngine]:
    fields = {"num_kv_blocks": 64, "dtype": "float32", "max_batched_tokens": 256, "max_num_seqs": 4, "batch_hint": 4}
    engine = load_engine(open_checkpoint(str(path)), **(fields | {"max_model_len": 512} | options))
    yield engine
    engine.close()


def tokens_of(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(8, 512) for _ in range(length)]


def scored_sequence(tokens: list[int], tops: int | None = 3, scored: int = 0) -> Sequence:
    sampling = SamplingParams(4, 0, temperature=0.0, prompt_logprobs=tops)
    return Sequence(Request(new_request_id(), pack_tokens(tokens), sampling, scored=scored), 0)


def compute(engine: ModelEngine, sequence: Sequence, ends: list[int], beside: int = 0) -> list[PromptSpan]:
    """Run the prompt of ``sequence`` in chunks that end at ``ends``, beside a prompt of ``beside`` tokens."""
    spans, table = [], [BlockId(block) for block in range(20)]
    for end in ends:
        segments = [Segment(sequence, sequence.computed, end - sequence.computed)]
        if beside:
            segments.insert(0, Segment(scored_sequence(tokens_of(beside, 9), None), 0, beside))
        tables = [[BlockId(block) for block in range(30, 50)]] * (len(segments) - 1) + [table]
        result = engine.step(Batch(tuple(segments), tuple(tables)))
        assert not result.errors
        if (span := result.prompts.get(len(segments) - 1)) is not None:
            spans.append(span)
            sequence.scored = span.end - 1
        sequence.computed = end
    return spans


def check(reference: Reference, tokens: list[int], spans: list[PromptSpan], tops: int = 3) -> None:
    expected = torch.from_numpy(reference.logits(tokens)).log_softmax(dim=-1)
    at = spans[0].start
    for span in spans:
        assert span.start == at and span.tops == tops
        for place in range(len(span.logprobs)):
            row = expected[at - 1]
            own = float(row[tokens[at]])
            assert abs(span.logprobs[place] - own) < TOLERANCE
            near = sorted(float(value) for value in row[(row - own).abs() < TOLERANCE])
            rank = int((row >= own).sum())
            assert abs(span.ranks[place] - rank) < len(near)
            best = row.topk(tops).values
            got = span.top[place * tops : (place + 1) * tops]
            assert torch.allclose(torch.tensor(list(got), dtype=torch.float64), best, atol=TOLERANCE)
            assert sorted(got, reverse=True) == list(got)
            for value, token in zip(got, span.top_ids[place * tops : (place + 1) * tops], strict=True):
                assert abs(float(row[token]) - value) < TOLERANCE
            at += 1
    assert at == len(tokens)


@pytest.mark.usefixtures("short_slices")
@pytest.mark.parametrize("kind", SERVED)
def test_every_family_gives_the_log_softmax_of_transformers(kind: str, checkpoint: Callable[[str], Path]) -> None:
    tokens = tokens_of(LENGTH)
    with loaded(checkpoint(kind)) as engine:
        engine.shorten(tokens[:32])
        whole = compute(engine, scored_sequence(tokens), [LENGTH], beside=11)
        parts = compute(engine, scored_sequence(tokens), [1, 17, 100, 101, LENGTH - 1, LENGTH])
    reference = Reference(checkpoint(kind), 512)
    check(reference, tokens, whole)
    check(reference, tokens, parts)
    assert [(span.start, span.end) for span in parts] == [(1, 2), (2, 18), (18, 101), (101, 102), (102, LENGTH)]


@pytest.mark.usefixtures("short_slices")
def test_what_an_earlier_attempt_has_given_is_not_computed_again(checkpoint: Callable[[str], Path]) -> None:
    tokens = tokens_of(60)
    with loaded(checkpoint("llama")) as engine:
        (span,) = compute(engine, scored_sequence(tokens, scored=20), [15, 60])
        assert compute(engine, scored_sequence(tokens, scored=59), [60]) == []
        assert compute(engine, scored_sequence(tokens, None), [60]) == []
    check(Reference(checkpoint("llama"), 512), tokens, [span])
    assert (span.start, span.end) == (21, 60)


@pytest.mark.usefixtures("short_slices")
def test_a_model_split_among_ranks_gives_the_same(tmp_path: Path) -> None:
    path, tokens = make_model("gemma2", tmp_path), tokens_of(LENGTH)
    with split_engine(path, 2) as engine:
        spans = compute(engine, scored_sequence(tokens), [33, LENGTH])
    check(Reference(path, 512), tokens, spans)


@pytest.mark.usefixtures("short_slices")
def test_steps_of_a_gpu_give_the_same(checkpoint: Callable[[str], Path]) -> None:
    tokens = tokens_of(60)
    engine = make_plain_engine(checkpoint("llama"), "cpu", as_on_gpu=True)
    spans = compute(engine, scored_sequence(tokens), [33, 60])
    engine.close()
    check(Reference(checkpoint("llama"), 256), tokens, spans)


def test_numbers_that_are_not_finite_fail_their_own_request(checkpoint: Callable[[str], Path]) -> None:
    poisoned, good = scored_sequence(tokens_of(40)), scored_sequence(tokens_of(40, 2))
    tables = [BlockId(block) for block in range(4)], [BlockId(block) for block in range(8, 12)]
    with loaded(checkpoint("llama")) as engine:
        engine.step(Batch((Segment(poisoned, 0, 20), Segment(good, 0, 20)), tables))
        engine.store.v(1)[tables[0][0], 3] = torch.nan
        poisoned.computed = good.computed = poisoned.scored = good.scored = 20
        result = engine.step(Batch((Segment(poisoned, 20, 20), Segment(good, 20, 20)), tables))
    assert list(result.errors) == [0] and list(result.prompts) == [1]


def test_ranks_count_the_tokens_that_are_at_least_as_likely() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 5.0], [0.0, float("nan"), 0.0, 0.0]])
    packed = score(logits, torch.tensor([2, 3, 0]), 0)
    assert packed[:, 1].tolist() == [3, 1, 0] and packed.shape == (3, 2)


class LargestTensor(TorchDispatchMode):
    """Notes the largest number of elements of any tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return out


def test_the_logits_of_a_long_prompt_never_exist_at_once(tmp_path: Path) -> None:
    """20,000 tokens and a vocabulary of 30,000: the logits of a chunk of 2,048 would be 61 million numbers."""
    vocabulary, length, chunk = 30_000, 20_000, 2048
    path = make_model("llama", tmp_path, vocab_size=vocabulary, num_hidden_layers=1, max_position_embeddings=32_768)
    sizes = {"num_kv_blocks": 1300, "max_batched_tokens": chunk, "max_model_len": 20_480}
    sequence, table = scored_sequence(tokens_of(length), 1), [BlockId(block) for block in range(1250)]
    with loaded(path, **sizes) as engine:
        largest = LargestTensor()
        for start in (0, 8 * chunk):  # two of ten chunks, since each takes a while
            sequence.computed = sequence.scored = start
            with largest:
                result = engine.step(Batch((Segment(sequence, start, chunk),), (table,)))
            assert len(result.prompts[0].logprobs) == chunk
    assert largest.elements <= 2 * prompt_scores.MOST_LOGITS
