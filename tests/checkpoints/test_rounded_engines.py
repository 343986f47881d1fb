"""``--quantization int8`` and ``int4`` at load, and ``--products``: what is rounded, and how far results are off."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.eval.agreement import sample
from bench.eval.quality import Way, rows
from common import builtin
from common.checkpoint.files import open_checkpoint
from common.core.ids import BlockId
from common.core.sequence import Batch, Segment
from common.engine.loading import load_engine
from common.engine.prepared import Quantization
from common.engine.runner import ModelEngine, sequence_of
from common.model.probe import deviation
from common.quantization.rounded import open_rounded
from tests.checkpoints import quantized_maker as maker
from tests.models import VOCAB, make_model

OPTIONS: Any = {"dtype": "float32", "num_kv_blocks": 8, "max_batched_tokens": 64, "max_num_seqs": 4, "batch_hint": 4}
IDS = [(7 + 13 * at * at) % VOCAB for at in range(60)]
KINDS = ("llama", "llama-untied", "gemma2", "gemma3", "qwen3-moe", "gpt-oss", "gpt2", "phi3")
ROUNDINGS = (("int8", 0.06), ("int4", 0.5))
"""Kinds of rounding, with the largest deviation of the logits."""


@pytest.fixture
def engine_of(checkpoint: Callable[[str], Path]) -> Iterator[Callable[..., ModelEngine]]:
    with ExitStack() as stack:

        def load(kind: str | Path, **options: Any) -> ModelEngine:
            path = checkpoint(kind) if isinstance(kind, str) else kind
            return stack.enter_context(closing(load_engine(open_checkpoint(str(path)), **OPTIONS, **options)))

        yield load


def logits_of(engine: ModelEngine, ids: list[int] = IDS) -> torch.Tensor:
    blocks = [BlockId(at) for at in range(-(-len(ids) // 16))]
    return engine.logits(Batch((Segment(sequence_of(ids), 0, len(ids)),), (blocks,)))[0][None].clone()


def all_logits(engine: ModelEngine, ids: list[int]) -> torch.Tensor:
    """Return the logits after each of ``ids`` [len(ids), vocab]."""
    blocks = [BlockId(at) for at in range(-(-len(ids) // 16))]
    rows = []
    for at in range(len(ids)):
        start = at if at else 0
        rows.append(engine.logits(Batch((Segment(sequence_of(ids[: at + 1]), start, 1),), (blocks,)))[0].clone())
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("kind", "quantization", "most"),
    [
        pytest.param(kind, *rounding, marks=() if (number + at) % 2 == 0 or kind == "llama" else pytest.mark.whole)
        for number, kind in enumerate(KINDS)
        for at, rounding in enumerate(ROUNDINGS)
    ],
)
def test_rounded_models_are_near_the_whole_one(
    kind: str, quantization: str, most: float, engine_of: Callable[..., ModelEngine]
) -> None:
    most *= 3 if kind in ("qwen3-moe", "gpt-oss") else 1  # a router may choose another expert
    whole = all_logits(engine_of(kind), IDS[:20])
    small = engine_of(kind, quantization=quantization)
    off = deviation(all_logits(small, IDS[:20]), whole)
    assert 0 < off < most
    (note,) = (note for note in small.notes if "stay quantized" in note)
    assert f"in {quantization} in groups of 64" in note and "integer" in note
    assert small.model.get_output_embeddings().terms == [2], "logits need finer activations"


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3-moe"])
def test_exact_products_are_those_of_the_rounded_weights(
    kind: str, checkpoint: Callable[[str], Path], engine_of: Callable[..., ModelEngine], tmp_path: Path
) -> None:
    path = checkpoint(kind)
    source, weights = open_rounded(open_checkpoint(str(path)), 4), load_file(path / "model.safetensors")
    dense = {name: make().dequantize().contiguous() for name, make in source.compact().items()}
    shutil.copytree(path, tmp_path / "dense")
    save_file({**weights, **dense}, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    expected = all_logits(engine_of(tmp_path / "dense"), IDS[:20])
    exact = all_logits(engine_of(kind, quantization="int4", products="exact"), IDS[:20])
    integer = all_logits(engine_of(kind, quantization="int4"), IDS[:20])
    assert deviation(exact, expected) < 1e-3 < deviation(integer, expected) < 0.1


def test_a_fingerprint_tells_what_was_rounded(
    checkpoint: Callable[[str], Path], engine_of: Callable[..., ModelEngine], tmp_path: Path
) -> None:
    """KV of workers that compute differently is never exchanged."""
    ways = [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"quantization": "int4", "products": "exact"}]
    found = [engine_of("llama", **way).fingerprint for way in ways]
    assert len({*found}) == 4 and all(each.startswith(found[0]) for each in found)
    assert engine_of("llama", products="exact").fingerprint == found[0], "nothing is quantized"
    pair = maker.quantized_hub(
        checkpoint("llama"), tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 32}, maker.gptq
    )
    integer, exact = (engine_of(pair.model, products=products).fingerprint for products in ("auto", "exact"))
    assert integer.startswith(f"{exact}.")


def test_what_a_quantized_checkpoint_leaves_whole_is_rounded(
    engine_of: Callable[..., ModelEngine], tmp_path: Path
) -> None:
    original = make_model("llama-untied", tmp_path / "original")
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    pair = maker.quantized_hub(original, tmp_path, settings, maker.gptq)
    engine = engine_of(pair.model, quantization="int8")
    assert any("21 in GPTQ 4-bit, 1 in int8 in groups of 64" in note for note in engine.notes), "the output layer"


@pytest.mark.parametrize("quantization", [pytest.param("int8", marks=pytest.mark.whole), "int4"])
def test_integer_products_agree_with_exact_ones_on_real_text(quantization: Quantization) -> None:
    """98 % of the built-in model's most likely tokens are the same; perplexity changes by at most 0.5 %."""
    model = open_checkpoint(str(builtin.path()))
    chats, _ = sample(model, 48)
    answers = torch.tensor([token for chat in chats for token in chat.tokens[chat.prompt :]])
    found = []
    for products in ("exact", "integer"):
        by_chat: list[list[torch.Tensor]] = [[] for _ in chats]
        for place, row in rows(model, Way("float32", quantization, products=products), chats):
            by_chat[place].append(row)
        found.append(torch.stack([row for each in by_chat for row in each]))
    exact, integer = found
    assert float((exact.argmax(1) == integer.argmax(1)).float().mean()) >= 0.98
    before, after = (float(-each.gather(1, answers[:, None]).mean()) for each in found)
    assert abs(math.exp(after - before) - 1) <= 0.005
