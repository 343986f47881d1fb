"""Steps: sampling, hooks, and one bad request beside good ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint.files import open_checkpoint
from common.core.errors import StartError
from common.core.ids import BlockId, new_request_id, pack_tokens
from common.core.request import Request, SamplingParams
from common.core.sequence import Batch, Segment, Sequence
from common.engine.loading import load_engine
from common.engine.runner import ModelEngine, sequence_of
from common.model.load import detach_from_files
from tests.reference import Reference, greedy


def load(path: Path, **options: Any) -> ModelEngine:
    fields = {"num_kv_blocks": 64, "dtype": "float32", "max_batched_tokens": 64, "max_num_seqs": 4, "batch_hint": 4}
    return load_engine(open_checkpoint(str(path)), **(fields | options))


@pytest.fixture
def engine(checkpoint: Callable[[str], Path]) -> Iterator[ModelEngine]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = load(checkpoint("llama"), max_model_len=512)
    yield engine
    engine.close()
    torch.set_num_threads(threads)


def sequence(tokens: list[int], sampling: SamplingParams | None = None, n: int = 1) -> Sequence:
    return Sequence(Request(new_request_id(), pack_tokens(tokens), sampling or greedy(50), n=n), 0)


def whole(seq: Sequence) -> Segment:
    return Segment(seq, seq.computed, seq.missing)


def blocks(first: int, count: int = 4) -> list[BlockId]:
    return [BlockId(block) for block in range(first, first + count)]


def run(engine: ModelEngine, sequences: list[Sequence], steps: int, tables: list[list[BlockId]] | None = None) -> None:
    for _ in range(steps):
        chosen = tables or [blocks(4 * index) for index in range(len(sequences))]
        result = engine.step(Batch(tuple(whole(s) for s in sequences), tuple(chosen)))
        assert not result.errors and result.seconds > 0
        for seq, tokens in zip(sequences, result.tokens, strict=True):
            seq.computed = len(seq.tokens)
            seq.append(tokens[0])


PROMPTS = [list(range(10, 10 + n)) for n in (1, 16, 33)]


def test_greedy_and_sampled_tokens_are_right(engine: ModelEngine, checkpoint: Callable[[str], Path]) -> None:
    reference = Reference(checkpoint("llama"), 512)
    mixed = [
        greedy(20, logprobs=2),
        SamplingParams(20, 7, temperature=0.9, top_p=0.9, top_k=30, ignore_eos=True),
        SamplingParams(20, 8, temperature=1.2, min_p=0.02, frequency_penalty=0.5, repetition_penalty=1.2, min_tokens=9),
    ]
    sequences = [sequence(prompt, sampling) for prompt, sampling in zip(PROMPTS, mixed, strict=True)]
    run(engine, sequences, 12)
    for seq, sampling in zip(sequences, mixed, strict=True):
        reference.check(seq.tokens[: seq.prompt_length], seq.output, sampling)


def test_several_choices_come_from_one_row(engine: ModelEngine) -> None:
    sampling = SamplingParams(5, 3, temperature=1.5, logprobs=0)
    together = engine.step(Batch((whole(sequence(PROMPTS[1], sampling, n=4)),), (blocks(0),)))
    assert len(together.tokens[0]) == len(together.logprobs[0]) == 4
    one = sequence(PROMPTS[1], sampling, n=4).fork(2)
    alone = engine.step(Batch((Segment(one, 0, 16),), (blocks(8),)))
    assert alone.tokens[0] == [together.tokens[0][2]]


def test_a_chunk_that_wants_no_token_gets_none(engine: ModelEngine) -> None:
    result = engine.step(Batch((Segment(sequence(PROMPTS[2]), 0, 20),), (blocks(0),)))
    assert result.tokens == [[]] and result.logprobs == [[]] and not result.errors
    assert engine.step(Batch((), ())).tokens == []


def test_layers_are_announced_in_order_with_their_kv_in_the_pool(engine: ModelEngine) -> None:
    seen: list[tuple[int, bool]] = []
    engine.on_layer = lambda layer: seen.append((layer, bool(engine.store.k(layer)[5].any())))
    engine.step(Batch((Segment(sequence(PROMPTS[1]), 0, 16),), ([BlockId(5)],)))
    assert seen == [(0, True), (1, True), (2, True)]


def test_an_impossible_token_fails_its_own_request_only(engine: ModelEngine) -> None:
    layers: list[int] = []
    engine.on_layer = layers.append
    good, bad, other = sequence(PROMPTS[0]), sequence([1, 2, 99_999]), sequence(PROMPTS[2])
    result = engine.step(Batch((whole(good), whole(bad), whole(other)), (blocks(0), blocks(4), blocks(8))))
    assert list(result.errors) == [1] and "IndexError" in result.errors[1]
    assert result.tokens[1] == [] and layers == [0, 1, 2]
    engine.on_layer = None
    fresh = engine.step(Batch((whole(good), whole(other)), (blocks(20), blocks(24))))
    assert [result.tokens[0], result.tokens[2]] == fresh.tokens
    assert list(engine.step(Batch((whole(bad),), (blocks(4),))).errors) == [0]


def test_not_a_number_fails_its_own_request_only(engine: ModelEngine) -> None:
    poisoned, good = sequence(PROMPTS[1]), sequence(PROMPTS[2])
    run(engine, [poisoned, good], 1)
    engine.store.v(1)[blocks(0)[0], 3] = torch.nan
    result = engine.step(Batch((whole(poisoned), whole(good)), (blocks(0), blocks(4))))
    assert list(result.errors) == [0] and result.tokens[0] == [] and len(result.tokens[1]) == 1
    table = [*blocks(30, 1), *blocks(0, 1), *blocks(31, 2)]  # reuses the poisoned block, only half filled
    fresh = sequence(PROMPTS[1] + [3])
    assert not engine.step(Batch((Segment(fresh, 0, 17),), (table,))).errors
    fresh.computed = 16
    assert not engine.step(Batch((whole(fresh),), (table,))).errors


def test_warm_up_leaves_no_trace(engine: ModelEngine) -> None:
    told: list[tuple[int, int]] = []
    engine.warm_up(lambda done, total: told.append((done, total)))
    assert told == [(done, len(told)) for done in range(1, len(told) + 1)]
    assert not engine.store.memory.raw.any()


def test_engine_notes_name_chosen_settings(engine: ModelEngine) -> None:
    text = "\n".join(engine.notes)
    assert "dtype float32: as requested" in text and "KV pool" in text and "attention " in text
    assert (engine.vocab_size, engine.max_model_len, engine.layout.block_size) == (512, 512, 16)
    assert engine.memory.blocks == 64


def test_context_is_cut_to_the_pool_or_refused(checkpoint: Callable[[str], Path]) -> None:
    cut = load(checkpoint("llama"), num_kv_blocks=8)
    assert cut.max_model_len == 128
    cut.close()
    with pytest.raises(StartError, match="too little memory"):
        load(checkpoint("llama"), num_kv_blocks=8, max_model_len=129)
    with pytest.raises(StartError, match="made for"):
        load(checkpoint("llama"), max_model_len=5000)
    with pytest.raises(StartError, match="dtype"):
        load(checkpoint("llama"), dtype="int3")


def test_load_reports_progress_in_bytes(checkpoint: Callable[[str], Path]) -> None:
    reported: list[tuple[int, int, str]] = []
    load(checkpoint("llama"), progress=lambda *step: reported.append(step)).close()
    size = (checkpoint("llama") / "model.safetensors").stat().st_size
    assert reported == [(0, size, "model.safetensors"), (size, size, "model.safetensors")]


def test_missing_weights_are_not_made_up(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    path = Path(shutil.copytree(checkpoint("llama"), tmp_path / "copy"))
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartError, match="weights are missing"):
        load(path)


def test_no_weight_stays_in_the_file(engine: ModelEngine) -> None:
    assert detach_from_files(engine.model) == 0


def test_sequence_of_tokens_is_greedy() -> None:
    assert sequence_of([1, 2]).request.sampling.temperature == 0
