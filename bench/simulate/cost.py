"""What a step of the engine costs, as a formula with measured coefficients.

    seconds = streams(decode tokens) + context · KV tokens that they read
                   + token · prompt tokens + square · (prompt tokens x mean context before them)

Few streams are bound by reading the weights, many by arithmetic, so ``streams`` is no straight line: it is given for
some numbers, and between two of them it is one. Prefill is bound by arithmetic, and has coefficients of its own. All
are fitted to steps of the real engine by least squares of the relative error, none below 0. What a turn of a serving
worker takes besides is one number more: its loop and messages, and the time on the same cores of a coordinator and a
client. Workers that share memory bandwidth are slower than one measured alone. A file of costs says what they are of.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from bench.load import results
from common.checkpoint.files import open_checkpoint
from common.core.errors import StartError
from common.core.ids import BlockId
from common.core.sequence import Batch, Segment

BATCHES, CONTEXTS = (1, 4, 16, 48), (64, 512, 1536)
CHUNKS, STARTS = (32, 128, 512), (0, 1024)
POOL_BLOCKS, REPEATS = 1600, 5
"""Blocks of 16 tokens: enough for 16 sequences of the longest context, each with blocks of its own."""
SOURCE = ("date", "commit", "machine", "model", "fingerprint")
"""Keys that say where costs come from, beside them in their file."""
TODO = "leave --cost out, or name another file to measure into"
Step = tuple[int, int, int, int]
"""Decode tokens, KV tokens that they read, prompt tokens, and prompt tokens times the mean context before each."""


@dataclass(frozen=True)
class CostModel:
    """Seconds per unit (see the module), and what a hand-off needs: bytes of KV per token, layers. ``streams`` are
    numbers of streams, rising, each with the seconds of a step without their KV; of none it is what a prompt's step
    takes beside its tokens. ``error`` is the median relative error of the fit, ``threads`` and ``dtype`` say what was
    measured. ``turn``: seconds, 0 where it was not measured."""

    streams: tuple[tuple[int, float], ...]
    context: float
    token: float
    square: float
    kv_bytes: int
    layers: int
    threads: int
    dtype: str
    error: float
    turn: float = 0.0

    def step(self, batch: Batch) -> float:
        """Seconds of a step."""
        decode, read, prompt, square = shape(batch)
        return self._streams_s(decode) + self.context * read + self.token * prompt + self.square * square

    def _streams_s(self, count: int) -> float:
        shares = hats(count, [number for number, _ in self.streams])
        return sum(share * seconds for share, (_, seconds) in zip(shares, self.streams, strict=True))

    def decode_s(self, streams: int, context: float) -> float:
        """Seconds of a step that decodes ``streams`` streams of this context on average."""
        return self._streams_s(streams) + self.context * streams * context

    def prompt_s(self, tokens: int, chunk: int) -> float:
        """Seconds of the steps for one prompt with nothing beside it."""
        lengths = [(start, min(chunk, tokens - start)) for start in range(0, tokens, chunk)]
        tokens_s = sum(self.token * length + self.square * length * (start + length // 2) for start, length in lengths)
        return len(lengths) * self._streams_s(0) + tokens_s

    def exposed(self, prompt: int, prefill_s: float, link_bytes_per_s: float) -> float:
        """Seconds by which a hand-off of ``prompt`` tokens outlasts their prefill, its layers leaving as they are
        computed: the last layer at least, and whatever the link could not carry meanwhile."""
        total = prompt * self.kv_bytes / link_bytes_per_s
        return max(total / self.layers, total - prefill_s * (self.layers - 1) / self.layers)

    @classmethod
    def of(cls, found: dict[str, Any]) -> CostModel:
        """From :meth:`as_json`. LookupError, TypeError or ValueError if it is no cost model."""
        values = {field.name: found[field.name] for field in fields(cls)}
        return cls(**values | {"streams": tuple((int(count), float(each)) for count, each in found["streams"])})

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def source(model: str, fingerprint: str) -> dict[str, Any]:
    """Where costs that are measured now come from. The model is named as it was given, but of an absolute path only the
    last name is kept: the others are of this machine alone."""
    made = results.provenance()
    named = Path(model).name if Path(model).is_absolute() else model
    return {name: made[name] for name in ("date", "commit", "machine")} | {"model": named, "fingerprint": fingerprint}


def load_costs(path: Path, wanted: dict[str, Any], threads: int) -> tuple[CostModel, dict[str, Any]]:
    """The costs in a file and their source. StartError if it has none, or those of another model or number of threads
    than ``wanted``, the source of costs that were measured now."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        cost = CostModel.of(found)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StartError(f"cannot read the costs in {path}", repr(error), TODO) from error
    made = {name: found.get(name) for name in SOURCE}
    if not (made["model"] and made["fingerprint"] and isinstance(made["machine"], dict)):
        why = "it does not say which model and machine they are of: files of earlier versions do not"
        raise StartError(f"cannot use the costs in {path}", why, TODO)
    if made["fingerprint"] != wanted["fingerprint"]:
        theirs, mine = (f"{each['model']} ({each['fingerprint']})" for each in (made, wanted))
        raise StartError(f"{path} has the costs of another model", f"of {theirs}, and the plan is for {mine}", TODO)
    if cost.threads != threads:
        why = f"its workers have {cost.threads} compute thread(s), and the plan's {threads} (--threads)"
        raise StartError(f"{path} has the costs of other workers", why, f"give --threads {cost.threads}, {TODO}")
    return cost, made


def machines_differ(there: dict[str, Any], here: dict[str, Any]) -> str:
    """In what, in words; empty if in nothing."""
    names = [name for name in here | there if there.get(name) != here.get(name)]
    return ", ".join(f"{name} {_words(there.get(name))} there and {_words(here.get(name))} here" for name in names)


def _words(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def shape(batch: Batch) -> Step:
    """What of a step costs."""
    decode = read = prompt = square = 0
    for segment in batch.segments:
        if segment.length == 1:
            decode += 1
            read += segment.end
        else:
            prompt += segment.length
            square += segment.length * (segment.start + segment.length // 2)
    return decode, read, prompt, square


def uniform(block_size: int, count: int, start: int, length: int) -> Batch:
    """A step of ``count`` sequences that compute tokens [start, start + length), each in blocks of its own."""
    from common.engine.runner import sequence_of  # imports torch

    sequence = sequence_of([1] * (start + length))
    each = -(-(start + length) // block_size)
    tables = [[BlockId(index * each + block) for block in range(each)] for index in range(count)]
    return Batch((Segment(sequence, start, length),) * count, tuple(tables))


def hats(count: int, numbers: Sequence[int]) -> list[float]:
    """The weights of what is known of each of ``numbers``, which rise, in a straight line's value at ``count``: between
    its two neighbours, or through the last two beyond them."""
    found = [0.0] * len(numbers)
    if len(numbers) == 1:
        return [1.0]
    right = min(max(1, bisect.bisect_left(numbers, count)), len(numbers) - 1)
    found[right] = (count - numbers[right - 1]) / (numbers[right] - numbers[right - 1])
    found[right - 1] = 1 - found[right]
    return found


def fit(steps: Sequence[Step], seconds: Sequence[float]) -> tuple[tuple[tuple[int, float], ...], list[float], float]:
    """What numbers of streams cost, the three other coefficients, none negative, and the median relative error."""
    numbers, measured = sorted({decode for decode, *_ in steps}), np.asarray(seconds)
    columns = [[*hats(decode, numbers), *others] for decode, *others in steps]
    features = np.asarray(columns, float) / measured[:, None]
    kept = list(range(features.shape[1]))
    while True:
        found = np.linalg.lstsq(features[:, kept], np.ones(len(steps)), rcond=None)[0]
        if (found >= 0).all():
            break
        kept.pop(int(found.argmin()))
    coefficients = [0.0] * features.shape[1]
    for index, value in zip(kept, found, strict=True):
        coefficients[index] = float(value)
    errors = np.abs(features @ np.asarray(coefficients) - 1)
    streams = tuple(zip(numbers, coefficients[: len(numbers)], strict=True))
    return streams, coefficients[len(numbers) :], float(np.median(errors))


def measure(model: str, threads: int, say: Callable[[str], None]) -> CostModel:
    """Loads the model into this process and times its steps on ``threads`` threads, on as many of its cores: a worker
    beside others has no more. (The threads that compute stay there.) StartError if it cannot be."""
    cores = os.sched_getaffinity(0)
    try:
        return _measure(model, threads, sorted(cores)[:threads], say)
    finally:
        os.sched_setaffinity(0, cores)


def _measure(model: str, threads: int, cores: Sequence[int], say: Callable[[str], None]) -> CostModel:
    from common.platform import device

    checkpoint = open_checkpoint(model)
    say(f"measuring steps of {checkpoint.name} on {threads} thread(s)")
    device.pin(cores, threads)
    from common.engine.runner import load_engine  # imports torch

    engine = load_engine(
        checkpoint, num_kv_blocks=POOL_BLOCKS, max_batched_tokens=max(CHUNKS), max_num_seqs=max(BATCHES),
        batch_hint=16,
    )  # fmt: skip
    engine.warm_up()
    size = engine.layout.block_size
    longest = min(engine.max_model_len, POOL_BLOCKS * size)
    decodes = [(count, context - 1, 1) for count, context in itertools.product(BATCHES, CONTEXTS)]
    chunks = [(1, start, length) for start, length in itertools.product(STARTS, CHUNKS)]
    steps: list[Step] = []
    seconds: list[float] = []
    for count, start, length in [*decodes, *chunks]:
        if start + length > longest or count * -(-(start + length) // size) > POOL_BLOCKS:
            continue
        made = uniform(size, count, start, length)
        engine.step(made)
        seconds.append(statistics.median(engine.step(made).seconds for _ in range(REPEATS)))
        steps.append(shape(made))
    streams, (context, token, square), error = fit(steps, seconds)
    layout = engine.layout
    return CostModel(
        streams, context, token, square, layout.token_bytes, len(layout.layers), threads, layout.dtype, error
    )
