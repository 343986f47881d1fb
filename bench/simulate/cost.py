"""The cost model of an engine step: a formula with measured coefficients.

    seconds = streams(decode tokens) + context · KV tokens read by decode
                   + token · prompt tokens + square · (prompt tokens x mean context before them)

``streams`` is piecewise linear, given at some batch sizes: small decode batches are bound by reading the weights, large
ones by arithmetic. Prefill is bound by arithmetic and has its own coefficients. All coefficients are fitted to steps of
the real engine by least squares of the relative error, and none is negative. One more number, ``turn``, is a serving
worker's overhead per step: its loop and messages, and the time that a coordinator and a client take on the same cores.
Workers that share memory bandwidth are slower than one measured alone; the model does not include that. A cost file
also records the model and machine that it was measured with.
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
from rich.console import Console

from bench.load import results
from bench.load.progress import stepped
from common.checkpoint.files import open_checkpoint
from common.core.errors import StartError
from common.core.ids import BlockId
from common.core.sequence import Batch, Segment

BATCHES, CONTEXTS = (1, 4, 16, 48), (64, 512, 1536)
CHUNKS, STARTS = (32, 128, 512), (0, 1024)
POOL_BLOCKS, REPEATS = 1600, 5
"""``POOL_BLOCKS`` blocks of 16 tokens hold 16 sequences of the longest context with separate blocks."""
SOURCE = ("date", "commit", "machine", "model", "fingerprint")
"""Keys in a cost file that record where its costs come from."""
TODO = "leave --cost out, or name another file to measure into"
Step = tuple[int, int, int, int]
"""Decode tokens, KV tokens that they read, prompt tokens, and prompt tokens times their mean context."""


@dataclass(frozen=True)
class CostModel:
    """The coefficients of the formula above in seconds per unit, and the KV bytes per token and layers for hand-offs.

    ``streams`` holds pairs (number of streams, ascending; seconds of a step without reading their KV); the entry for 0
    streams is the fixed cost of a step that only prefills. ``error`` is the median relative error of the fit.
    ``threads`` and ``dtype`` describe the measured engine. ``turn`` is in seconds per step, 0 if not measured."""

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
        """Return the seconds that a step with ``batch`` takes."""
        decode, read, prompt, square = shape(batch)
        return self._streams_s(decode) + self.context * read + self.token * prompt + self.square * square

    def _streams_s(self, count: int) -> float:
        shares = hats(count, [number for number, _ in self.streams])
        return sum(share * seconds for share, (_, seconds) in zip(shares, self.streams, strict=True))

    def decode_s(self, streams: int, context: float) -> float:
        """Return the seconds of a step that decodes ``streams`` streams with a mean context of ``context`` tokens."""
        return self._streams_s(streams) + self.context * streams * context

    def prompt_s(self, tokens: int, chunk: int) -> float:
        """Return the seconds of all steps that prefill one prompt alone, in chunks of ``chunk`` tokens."""
        lengths = [(start, min(chunk, tokens - start)) for start in range(0, tokens, chunk)]
        tokens_s = sum(self.token * length + self.square * length * (start + length // 2) for start, length in lengths)
        return len(lengths) * self._streams_s(0) + tokens_s

    def exposed(self, prompt: int, prefill_s: float, link_bytes_per_s: float) -> float:
        """Return the seconds by which a hand-off of ``prompt`` tokens outlasts their prefill.

        Layers are sent as they are computed, so this is the time to send the last layer, or the backlog of the link if
        that is longer."""
        total = prompt * self.kv_bytes / link_bytes_per_s
        return max(total / self.layers, total - prefill_s * (self.layers - 1) / self.layers)

    @classmethod
    def of(cls, found: dict[str, Any]) -> CostModel:
        """Build a cost model from :meth:`as_json`. Raises LookupError, TypeError or ValueError for anything else."""
        values = {field.name: found[field.name] for field in fields(cls)}
        return cls(**values | {"streams": tuple((int(count), float(each)) for count, each in found["streams"])})

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON types; the inverse of :meth:`of`."""
        return asdict(self)


def source(model: str, fingerprint: str) -> dict[str, Any]:
    """Return the provenance of costs that are measured now.

    The model is named as given, except that an absolute path is cut to its last name: the rest is specific to this
    machine."""
    made = results.provenance()
    named = Path(model).name if Path(model).is_absolute() else model
    return {name: made[name] for name in ("date", "commit", "machine")} | {"model": named, "fingerprint": fingerprint}


def load_costs(path: Path, wanted: dict[str, Any], threads: int) -> tuple[CostModel, dict[str, Any]]:
    """Load the costs in a file, and their source.

    ``wanted`` is the source that costs measured now would have. Raises StartError if the file cannot be read or holds
    costs of another model or number of threads."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        cost = CostModel.of(found)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StartError(f"cannot read the costs in {path}", repr(error), TODO) from error
    made = {name: found.get(name) for name in SOURCE}
    if not (made["model"] and made["fingerprint"] and isinstance(made["machine"], dict)):
        why = "it does not record their model and machine, like files of earlier versions"
        raise StartError(f"cannot use the costs in {path}", why, TODO)
    if made["fingerprint"] != wanted["fingerprint"]:
        theirs, mine = (f"{each['model']} ({each['fingerprint']})" for each in (made, wanted))
        raise StartError(
            f"{path} has the costs of another model", f"they are for {theirs}, the plan is for {mine}", TODO
        )
    if cost.threads != threads:
        why = f"its workers have {cost.threads} compute thread(s), those of the plan {threads} (--threads)"
        raise StartError(f"{path} has the costs of other workers", why, f"give --threads {cost.threads}, {TODO}")
    return cost, made


def machines_differ(there: dict[str, Any], here: dict[str, Any]) -> str:
    """Describe the differences between two machines in words; empty if there are none."""
    names = [name for name in here | there if there.get(name) != here.get(name)]
    return ", ".join(f"{name} {_words(there.get(name))} there and {_words(here.get(name))} here" for name in names)


def _words(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def shape(batch: Batch) -> Step:
    """Return the quantities of a step that the formula multiplies. A segment of one token counts as decode."""
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
    """Return a step of ``count`` sequences that compute tokens [start, start + length), each in separate blocks."""
    from common.engine.runner import sequence_of  # imports torch

    sequence = sequence_of([1] * (start + length))
    each = -(-(start + length) // block_size)
    tables = [[BlockId(index * each + block) for block in range(each)] for index in range(count)]
    return Batch((Segment(sequence, start, length),) * count, tuple(tables))


def hats(count: int, numbers: Sequence[int]) -> list[float]:
    """Return the weight of each of ``numbers`` (ascending) in the linear interpolation at ``count``.

    Outside their range, the line through the two nearest is extrapolated."""
    found = [0.0] * len(numbers)
    if len(numbers) == 1:
        return [1.0]
    right = min(max(1, bisect.bisect_left(numbers, count)), len(numbers) - 1)
    found[right] = (count - numbers[right - 1]) / (numbers[right] - numbers[right - 1])
    found[right - 1] = 1 - found[right]
    return found


def fit(steps: Sequence[Step], seconds: Sequence[float]) -> tuple[tuple[tuple[int, float], ...], list[float], float]:
    """Fit the formula to measured steps.

    Returns the cost per number of streams, the three other coefficients, and the median relative error. No coefficient
    is negative."""
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


def measure(model: str, threads: int, say: Callable[[str], None], console: Console | None = None) -> CostModel:
    """Load the model into this process and time its steps on ``threads`` threads and as many cores.

    A worker that runs beside others has no more cores than threads. The compute threads stay bound to these cores
    afterwards. Raises StartError if the model cannot be loaded."""
    cores = os.sched_getaffinity(0)
    try:
        return _measure(model, threads, sorted(cores)[:threads], say, console)
    finally:
        os.sched_setaffinity(0, cores)


def _measure(
    model: str, threads: int, cores: Sequence[int], say: Callable[[str], None], console: Console | None
) -> CostModel:
    from common.platform import device

    checkpoint = open_checkpoint(model)
    say(f"measuring steps of {checkpoint.name} on {threads} thread(s)")
    device.pin(cores, threads)
    from common.engine.loading import load_engine  # imports torch

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
    for count, start, length in stepped(console, "measuring steps", [*decodes, *chunks]):
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
