"""Measures what fewer bits per weight or per KV element cost in quality: ``tandem bench quality``.

The engine computes the next-token distributions over the golden chats with their reference answers, or over a text,
token by token as in decoding, in float32 and in each format to be judged. Three figures over these tokens compare a
format with float32: their perplexity, the fraction of positions with the same most likely token, and the
Kullback-Leibler divergence in nats. bfloat16 is included because the 8-bit formats are alternatives to it, of half its
size. Of a checkpoint that is quantized already, integer products are compared with exact ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console

from bench.eval.evaluate import GOLDEN, read_golden
from bench.load import results
from bench.load.progress import stepped
from common import builtin
from common.builtin import smollm2
from common.checkpoint.files import Checkpoint, open_checkpoint
from common.config.bench.quality import BenchQualityConfig
from common.core.errors import RequestError, StartError, reason
from common.core.ids import BlockId
from common.core.sequence import Batch, Segment
from common.engine.loading import load_engine
from common.engine.prepared import Products, Quantization
from common.engine.runner import sequence_of
from common.kv.layout import KvDtype
from coordinator.api.openai import parse_chat
from coordinator.text.tokenizer import TextModel

AT_ONCE, LONGEST = 32, 1024
PIECE = 512
"""Tokens of a piece of a text. The first one is not predicted."""


class Way(NamedTuple):
    """Element type of the computation, quantization of the weights, element type of the KV pool, and products with
    quantized weights."""

    dtype: KvDtype
    quantization: Quantization = "none"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    products: Products = "exact"


REFERENCE = Way("float32")
WAYS = {
    "bfloat16": Way("bfloat16"),
    "int8": Way("bfloat16", "int8", products="integer"),
    "int8, exact": Way("bfloat16", "int8"),
    "int4": Way("bfloat16", "int4", products="integer"),
    "int4, exact": Way("bfloat16", "int4"),
    "fp8": Way("bfloat16", "fp8"),
    "fp8 KV": Way("bfloat16", kv_cache_dtype="fp8"),
    "fp8 and fp8 KV": Way("bfloat16", "fp8", "fp8"),
}
"""Ways to compute with an unquantized checkpoint."""
QUANTIZED_WAYS = {
    "bfloat16": Way("bfloat16"),
    "integer": Way("float32", products="integer"),
    "integer, bfloat16": Way("bfloat16", products="integer"),
    "fp8 KV": Way("bfloat16", kv_cache_dtype="fp8"),
}
"""Ways to compute with one whose weights are quantized already: all are compared with exact products in float32."""


@dataclass(frozen=True, slots=True)
class Chat:
    """The token ids of a chat; the first ``prompt`` of them come before the answer."""

    tokens: list[int]
    prompt: int


@dataclass(frozen=True, slots=True)
class Quality:
    """The figures of one format, compared with float32. ``uncertainty``: twice the standard error of the perplexity's
    relative change, from the spread of the tokens' log-probabilities."""

    perplexity: float
    uncertainty: float
    same_token: float
    divergence: float


def chats(checkpoint: Checkpoint, golden: Path) -> list[Chat]:
    """Render the golden items with the model's chat template, the reference as the answer. Raises StartError if the
    model cannot take them."""
    text = TextModel(checkpoint.path, vocab_size=checkpoint.vocab_size)
    return [rendered(text, record) for record in read_golden(golden)[0]]


def pieces(checkpoint: Checkpoint, file: Path) -> list[Chat]:
    """Cut the text of ``file`` into pieces. Raises StartError if it cannot be read or has fewer than two tokens."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"cannot read {file}", reason(error), "name a text file in UTF-8") from error
    ids = TextModel(checkpoint.path, vocab_size=checkpoint.vocab_size).encode(text, add_special_tokens=False)
    if len(ids) < 2:
        raise StartError(f"cannot predict {file}", "it has fewer than two tokens", "name a longer text")
    return [Chat(ids[at : at + PIECE], 1) for at in range(0, len(ids) - 1, PIECE)]


def rendered(text: TextModel, record: dict[str, Any]) -> Chat:
    """Render a golden item. Raises StartError if the model cannot take it."""

    def ids(answer: Sequence[Any] = ()) -> list[int]:
        tools = {"tools": record["tools"]} if "tools" in record else {}
        body = {"messages": [*record["messages"], *answer], "add_generation_prompt": not answer, **tools}
        return text.encode_chat(parse_chat(body))

    try:
        prompt, whole = ids(), ids([record["reference"]])
    except RequestError as error:
        raise StartError("this model cannot take the golden set", str(error), "name another model") from error
    if whole[: len(prompt)] != prompt or len(whole) > LONGEST:
        asked = record["messages"][-1]["content"]
        raise StartError(
            "a golden item cannot be used",
            f"{asked!r}: the chat does not begin with its prompt, or is too long",
            "correct the item",
        )
    return Chat(whole, len(prompt))


def log_probabilities(checkpoint: Checkpoint, way: Way, asked: Sequence[Chat]) -> torch.Tensor:
    """Return the log probabilities of each token of each answer, given those before it: [answer tokens, vocabulary],
    float32, in order."""
    found: list[list[torch.Tensor]] = [[] for _ in asked]
    for place, row in rows(checkpoint, way, asked):
        found[place].append(row)
    return torch.stack([row for each in found for row in each])


def rows(checkpoint: Checkpoint, way: Way, asked: Sequence[Chat]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the log probabilities [vocabulary] of each token of each answer, float32, with the index of the chat: those
    of several chats in turn, those of one chat in order."""
    blocks = AT_ONCE * -(-LONGEST // 16)
    engine = load_engine(
        checkpoint, num_kv_blocks=blocks, max_batched_tokens=AT_ONCE * LONGEST, max_num_seqs=AT_ONCE,
        batch_hint=AT_ONCE, **way._asdict(),
    )  # fmt: skip
    try:
        for first in range(0, len(asked), AT_ONCE):
            for batch, places in _steps(asked[first : first + AT_ONCE]):
                logits = engine.logits(batch).float().log_softmax(-1)
                yield from ((first + place, row) for place, row in zip(places, logits, strict=True))
    finally:
        engine.close()


def _steps(asked: Sequence[Chat]) -> Iterator[tuple[Batch, list[int]]]:
    """Yield the steps that process these chats, prompts first, and the indices of the chats in each step."""
    each = -(-LONGEST // 16)
    tables = [[BlockId(index * each + block) for block in range(each)] for index in range(len(asked))]
    for number in range(max(len(chat.tokens) - chat.prompt for chat in asked)):
        places = [place for place, chat in enumerate(asked) if chat.prompt + number < len(chat.tokens)]
        segments = []
        for place in places:
            chat = asked[place]
            end = chat.prompt + number
            start = end - 1 if number else 0
            segments.append(Segment(sequence_of(chat.tokens[:end]), start, end - start))
        yield Batch(tuple(segments), tuple(tables[place] for place in places)), places


def judge(found: torch.Tensor, reference: torch.Tensor, answers: torch.Tensor) -> Quality:
    """Compare ``found`` with ``reference``, both from :func:`log_probabilities`; ``answers`` are the reference answers'
    token ids, int64 [answer tokens]."""
    likelihood = found.gather(1, answers[:, None])
    change = likelihood - reference.gather(1, answers[:, None])
    return Quality(
        perplexity=float((-likelihood.mean()).exp()),
        uncertainty=2 * float(change.std() / len(change) ** 0.5),
        same_token=float((found.argmax(1) == reference.argmax(1)).float().mean()),
        divergence=float((reference.exp() * (reference - found)).sum(1).mean()),
    )


def run(config: BenchQualityConfig) -> int:
    """Print the perplexity of each way, its change from float32's, and the agreement."""
    checkpoint = open_checkpoint(smollm2.resolved(config.model) or str(builtin.path()))
    if config.text:
        asked = pieces(checkpoint, Path(config.text))
    else:
        asked = chats(checkpoint, Path(config.golden) if config.golden else GOLDEN)
    answers = torch.tensor([token for chat in asked for token in chat.tokens[chat.prompt :]])
    console = Console(stderr=True, highlight=False)
    ways = {"float32": REFERENCE} | (QUANTIZED_WAYS if checkpoint.format.method else WAYS)
    found, reference = dict[str, Quality](), None
    for name, way in stepped(console, "measuring formats", list(ways.items())):
        made = log_probabilities(checkpoint, way, asked)
        reference = made if reference is None else reference
        found[name] = judge(made, reference, answers)
    print(f"{len(answers):,} tokens of {len(asked)} {'pieces of text' if config.text else 'answers'}")
    print(f"{'format':<17} {'perplexity':>11} {'change':>8} {'±':>7} {'same token':>11} {'divergence':>11}")
    for name, each in found.items():
        change = each.perplexity / found["float32"].perplexity - 1
        print(
            f"{name:<17} {each.perplexity:>11.4f} {change:>+8.2%} {each.uncertainty:>7.2%} {each.same_token:>11.2%} "
            f"{each.divergence:>11.5f}"
        )
    if config.save:
        figures = {"model_id": config.model or "built-in", "tokens": len(answers), "answers": len(asked)}
        results.save(Path(config.save), figures | {name: asdict(each) for name, each in found.items()})
    return 0
