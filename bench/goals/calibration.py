"""Calibration of one core for C1, C2, C3 and C7: engine steps beside what the core reads from memory and multiplies.

Steps run in a process of their own that is bound to the core, in rounds, in alternation with the measurements of its
limits, so that a slow second of the machine affects both.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from bench.goals.turns import Turn
from bench.goals.turns import measure as turn_by_turn
from bench.load.processes import die_with_parent
from bench.simulate.cost import uniform
from common.checkpoint.files import open_checkpoint
from common.core.errors import StartError

BATCH, CONTEXT = 16, 512
PROMPTS = (1024, 4096)
PRODUCT_ROWS = 1024
"""Rows of the matrix products that give a core's limit."""
CHUNK = 512
"""Prompt tokens of a step: the default of a worker on a CPU."""
STEPS, STEPS_OF_PRODUCT, TURNS = 15, 3, 128
T = TypeVar("T")


class Decoded(NamedTuple):
    """Medians of a round of decode steps, in alternation with their limits: seconds by batch, bytes per second read
    from memory of a step's size, and floating-point operations per second of products of the model's shapes with many
    rows."""

    seconds: dict[int, float]
    bytes_per_s: float
    flops_per_s: float


class Prefilled(NamedTuple):
    """A round of prompts of one length: seconds of the fastest, and the operations per second of products of the
    model's shapes, averaged over just before and just after."""

    seconds: float
    flops_per_s: float


@dataclass
class Calibration:
    """The measurements of one core, by round."""

    weight_bytes: int
    """Bytes of weights that a decode step reads, in the engine's format."""
    kv_bytes: int
    """Bytes of KV of one token."""
    layer_weights: int
    """Elements of all linear layers except the output head."""
    head_weights: int
    last_weights: int
    """Elements of the last layer behind its attention: only the last row of a prompt needs them."""
    attention_width: int
    """Layers times heads times head size."""
    decode: list[Decoded]
    """By round, at ``CONTEXT``."""
    prefill: dict[int, list[Prefilled]]
    """By prompt tokens, then by round."""
    turns: list[list[Turn]] = field(default_factory=list)
    """Turns of a worker's loop with ``BATCH`` streams around ``CONTEXT``, by round."""
    kernels: float = 0.0
    """Seconds of the linear layers and the attention of such a step on their own."""

    def step_bytes(self, batch: int) -> int:
        """Return the bytes that a decode step must read: all weights once, and the KV of every sequence."""
        return self.weight_bytes + batch * CONTEXT * self.kv_bytes

    def reading_s(self, batch: int, limits: Decoded) -> float:
        """Return the seconds in which a decode step could at best read its bytes."""
        return self.step_bytes(batch) / limits.bytes_per_s

    def multiplying_s(self, batch: int, limits: Decoded) -> float:
        """Return the seconds in which a decode step could at best do its multiplications."""
        return 2 * batch * (self.layer_weights + self.head_weights) / limits.flops_per_s

    def prefill_flops(self, tokens: int) -> float:
        """Return the operations that a prompt needs: all rows through all layers, causal attention, and only the last
        row through what follows the last attention."""
        attention = 2 * self.attention_width * tokens**2
        every_row, last_row = self.layer_weights - self.last_weights, self.last_weights + self.head_weights
        return 2 * every_row * tokens + attention + 2 * last_row


def in_child(work: Callable[..., T], *given: Any) -> T:
    """Return ``work(*given)``, computed in a fresh process with its own affinity, threads and memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=die_with_parent) as pool:
        return pool.submit(work, *given).result()


class Core:
    """The engine on the core of this process, and the measurements of one round."""

    def __init__(self, model: str, prompts: tuple[int, ...]) -> None:
        from bench.commands import roofline
        from common.engine.loading import load_engine

        checkpoint = open_checkpoint(model)
        longest = max(*prompts, BATCH * CONTEXT)
        self._engine = load_engine(
            checkpoint, num_kv_blocks=2 * longest // 16, max_batched_tokens=CHUNK, max_num_seqs=BATCH, batch_hint=BATCH
        )
        self._engine.warm_up()
        config = checkpoint.config
        self._heads = config["num_attention_heads"]
        self._kv_heads = config.get("num_key_value_heads") or self._heads
        self._dim = config.get("head_dim") or config["hidden_size"] // self._heads
        self._layers = roofline.shapes(checkpoint.text_config)
        self.found = self._calibration(config["num_hidden_layers"], prompts)
        self._forwards = _watched(self._engine)
        self._block_size = self._engine.layout.block_size
        self._batches = {batch: uniform(self._block_size, batch, CONTEXT - 1, 1) for batch in (1, BATCH)}
        # as many bytes as the weights have: the next power of two may be further from a cache
        self._read_bytes = math.ceil(self.found.weight_bytes / roofline.MIB) * roofline.MIB
        self._operations = 2 * PRODUCT_ROWS * (self.found.layer_weights + self.found.head_weights)
        self._read: Callable[[], object]
        self._multiply: Callable[[], object]

    def _calibration(self, hidden_layers: int, prompts: tuple[int, ...]) -> Calibration:
        """Make a calibration with the sizes of the model and no measurements."""
        from common.model.compact import weight_bytes

        weights = {layer.name: layer.outputs * layer.inputs * layer.count for layer in self._layers}
        head = weights.pop("lm_head")
        after_attention = [layer for layer in self._layers if layer.name in ("out", "gate_up", "down")]
        return Calibration(
            weight_bytes=weight_bytes(self._engine.model),
            kv_bytes=self._engine.layout.token_bytes,
            layer_weights=sum(weights.values()),
            head_weights=head,
            last_weights=sum(layer.outputs * layer.inputs for layer in after_attention),
            attention_width=hidden_layers * self._heads * self._dim,
            decode=[],
            prefill={tokens: [] for tokens in prompts},
        )

    def prepare_limits(self) -> None:
        """Prepare the memory read and the matrix product that measure the limits. The product is computed in the
        fastest way that this machine has."""
        from bench.commands import roofline

        mib = self._read_bytes // roofline.MIB
        self._read = roofline.reads([mib])[mib]
        ways = dict(roofline.passes(self._layers, self._engine.store.dtype, PRODUCT_ROWS))
        self._multiply = min(ways.values(), key=lambda run: roofline.best_s(run, 2))

    def round(self) -> None:
        """Measure everything once and add it to ``found``."""
        self.found.decode.append(self._decode())
        self.found.turns.append(self._turns())
        before = self._flops_per_s()
        for tokens, each in self.found.prefill.items():
            seconds, after = self._prefill_s(tokens), self._flops_per_s()
            each.append(Prefilled(seconds, (before + after) / 2))
            before = after

    def _decode(self) -> Decoded:
        steps: dict[int, list[float]] = {batch: [] for batch in self._batches}
        readings, multiplyings = [], []
        for number in range(STEPS):
            readings.append(seconds_of(self._read))
            for batch, made in self._batches.items():
                steps[batch].append(self._engine.step(made).seconds)
            if number % STEPS_OF_PRODUCT == 0:
                multiplyings.append(seconds_of(self._multiply))
        return Decoded(
            {batch: statistics.median(each) for batch, each in steps.items()},
            self._read_bytes / statistics.median(readings),
            self._operations / statistics.median(multiplyings),
        )

    def _turns(self) -> list[Turn]:
        found = turn_by_turn(self._engine, self._forwards, BATCH, CONTEXT - TURNS // 2, TURNS, CHUNK)
        if not found:
            raise StartError("a worker's turns could not be measured", "its streams did not run together", "try again")
        return found

    def _prefill_s(self, tokens: int) -> float:
        starts = range(0, tokens, CHUNK)
        chunks = [uniform(self._block_size, 1, start, min(CHUNK, tokens - start)) for start in starts]
        return min(sum(self._engine.step(chunk).seconds for chunk in chunks) for _ in range(2))

    def _flops_per_s(self) -> float:
        from bench.commands import roofline

        return self._operations / roofline.best_s(self._multiply, 3)

    def kernels_s(self) -> float:
        """Measure the linear layers and the attention of a decode step on their own, and return their sum in
        seconds."""
        from bench.commands import kernels, roofline

        linear = roofline.product(self._layers, self._engine.store.dtype, BATCH)
        shape = kernels.Heads(self._heads, self._kv_heads, self._dim)
        attention = kernels.attend(shape, self._engine.layout.dtype, BATCH, CONTEXT, lambda _: 1.0)
        count = len(self._engine.layout.layers)
        return min(linear.seconds.values()) + count * min(attention.seconds.values())

    def close(self) -> None:
        """Release the engine's KV pool; no measurement is possible afterwards."""
        self._engine.close()


def calibrate(model: str, core: int, rounds: int, prompts: tuple[int, ...]) -> Calibration:
    """Bind this process to ``core`` and measure it, ``rounds`` times."""
    from common.platform import device

    device.pin((core,), 1)
    import torch

    measured = Core(model, prompts)
    with torch.inference_mode():
        measured.prepare_limits()
        for _ in range(rounds):
            measured.round()
    measured.found.kernels = measured.kernels_s()
    measured.close()
    return measured.found


def seconds_of(work: Callable[[], object]) -> float:
    """Return the wall-clock seconds of one call of ``work``."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _watched(engine: Any) -> list[float]:
    """Return a list that receives the seconds of every pass of ``engine`` through its model from now on: the part of a
    turn that runs in C."""
    found: list[float] = []

    def timed(run: Callable[..., Any]) -> Callable[..., Any]:
        def pass_rows(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            out = run(*given, **named)
            found.append(time.perf_counter() - began)
            return out

        return pass_rows

    if engine.decoder is None:
        engine.model.forward = timed(engine.model.forward)
    else:
        engine.decoder._run = timed(engine.decoder._run)
    return found
