"""C1, C2, C3, C7: steps of one core, against what that core reads from memory and multiplies.

Steps run in a process of their own that is bound to the first core, in rounds, in turn with what calibrates that core:
a slow second of the machine is shared. The peer's steps are seen only from outside, so the ratio to it is that
of times which the same client has measured of both, each with its compute thread on that core.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from bench.goals.field import OURS_ONE_CORE, VLLM_ONE_CORE, Field, System, good
from bench.goals.figures import Row, Target, against, by_round
from bench.goals.turns import Turn
from bench.goals.turns import measure as turn_by_turn
from bench.simulate.cost import uniform
from common.checkpoint.files import open_checkpoint
from common.core.errors import StartError

BATCH, CONTEXT = 16, 512
PROMPTS = (1024, 4096)
PRODUCT_ROWS = 1024
"""Of the products that give a core's limit."""
CHUNK = 512
"""Prompt tokens of a step, as a worker on a CPU has them by default."""
STEPS, STEPS_OF_PRODUCT, TURNS = 15, 3, 128
T = TypeVar("T")


class Decoded(NamedTuple):
    """A round of decode steps, in turn with what limits them, all medians: seconds by batch, bytes per second read from
    memory of a step's size, and floating-point operations per second of products of the model's shapes with many
    rows."""

    seconds: dict[int, float]
    bytes_per_s: float
    flops_per_s: float


class Prefilled(NamedTuple):
    """A round of prompts of one length: the fastest, and the products of the model's shapes in a second, the most just
    before and just after, on average."""

    seconds: float
    flops_per_s: float


@dataclass
class Calibration:
    """What a core did, by round."""

    weight_bytes: int
    """That a decode step reads, as the engine keeps them."""
    kv_bytes: int
    """Of one token."""
    layer_weights: int
    """Elements of all linear layers without the last."""
    head_weights: int
    last_weights: int
    """Of the last layer, behind its attention: there nobody needs more of a prompt than its last row."""
    attention_width: int
    """Layers times heads times head size."""
    decode: list[Decoded]
    """By round, at ``CONTEXT``."""
    prefill: dict[int, list[Prefilled]]
    """By prompt tokens."""
    turns: list[list[Turn]] = field(default_factory=list)
    """Of a worker's loop with ``BATCH`` streams around ``CONTEXT``, by round."""
    kernels: float = 0.0
    """Linear layers and attention alone, in such a step."""

    def step_bytes(self, batch: int) -> int:
        """Bytes that a decode step cannot do without: all weights once, the KV of every sequence."""
        return self.weight_bytes + batch * CONTEXT * self.kv_bytes

    def reading_s(self, batch: int, limits: Decoded) -> float:
        """The least that a decode step takes for what it reads."""
        return self.step_bytes(batch) / limits.bytes_per_s

    def multiplying_s(self, batch: int, limits: Decoded) -> float:
        """The same for what it multiplies."""
        return 2 * batch * (self.layer_weights + self.head_weights) / limits.flops_per_s

    def prefill_flops(self, tokens: int) -> float:
        """Operations that a prompt cannot do without: its rows through all layers, causal attention, and only its last
        row through what stands behind the last attention."""
        attention = 2 * self.attention_width * tokens**2
        every_row, last_row = self.layer_weights - self.last_weights, self.last_weights + self.head_weights
        return 2 * every_row * tokens + attention + 2 * last_row


def in_child(work: Callable[..., T], *given: Any) -> T:
    """``work(*given)`` in a fresh process: its affinity, threads and memory are its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def calibrate(model: str, core: int, rounds: int, prompts: tuple[int, ...]) -> Calibration:
    """Measures this process, which it binds to ``core``."""
    from common.platform import device

    device.pin((core,), 1)
    import torch

    from bench.commands import kernels, roofline
    from common.engine.runner import load_engine
    from common.model.linears import weight_bytes

    checkpoint = open_checkpoint(model)
    longest = max(*prompts, BATCH * CONTEXT)
    engine = load_engine(
        checkpoint, num_kv_blocks=2 * longest // 16, max_batched_tokens=CHUNK, max_num_seqs=BATCH, batch_hint=BATCH
    )
    engine.warm_up()
    layers, size = roofline.shapes(checkpoint.text_config), engine.layout.block_size
    weights = {layer.name: layer.outputs * layer.inputs * layer.count for layer in layers}
    head = weights.pop("lm_head")
    config = checkpoint.config
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    found = Calibration(
        weight_bytes=weight_bytes(engine.model),
        kv_bytes=engine.layout.token_bytes,
        layer_weights=sum(weights.values()),
        head_weights=head,
        last_weights=sum(layer.outputs * layer.inputs for layer in layers if layer.name in ("out", "gate_up", "down")),
        attention_width=config["num_hidden_layers"] * heads * dim,
        decode=[],
        prefill={tokens: [] for tokens in prompts},
    )
    forwards = _watched(engine)

    def turns() -> list[Turn]:
        found = turn_by_turn(engine, forwards, BATCH, CONTEXT - TURNS // 2, TURNS, CHUNK)
        if not found:
            raise StartError("a worker's turns could not be measured", "its streams did not run together", "try again")
        return found

    def decoded() -> Decoded:
        steps: dict[int, list[float]] = {batch: [] for batch in batches}
        readings, multiplyings = [], []
        for number in range(STEPS):
            readings.append(seconds_of(read))
            for batch, made in batches.items():
                steps[batch].append(engine.step(made).seconds)
            if number % STEPS_OF_PRODUCT == 0:
                multiplyings.append(seconds_of(multiply))
        return Decoded(
            {batch: statistics.median(each) for batch, each in steps.items()},
            mib * roofline.MIB / statistics.median(readings),
            operations / statistics.median(multiplyings),
        )

    def prefill_s(tokens: int) -> float:
        chunks = [uniform(size, 1, start, min(CHUNK, tokens - start)) for start in range(0, tokens, CHUNK)]
        return min(sum(engine.step(chunk).seconds for chunk in chunks) for _ in range(2))

    def flops_per_s() -> float:
        return operations / roofline.best_s(multiply, 3)

    mib = math.ceil(found.weight_bytes / roofline.MIB)  # the next power of two may be further from a cache
    operations = 2 * PRODUCT_ROWS * (found.layer_weights + head)
    batches = {batch: uniform(size, batch, CONTEXT - 1, 1) for batch in (1, BATCH)}
    with torch.inference_mode():
        read = roofline.reads([mib])[mib]
        ways = dict(roofline.passes(layers, engine.store.dtype, PRODUCT_ROWS))
        multiply = min(ways.values(), key=lambda run: roofline.best_s(run, 2))
        for _ in range(rounds):
            found.decode.append(decoded())
            found.turns.append(turns())
            before = flops_per_s()
            for tokens, each in found.prefill.items():
                seconds, after = prefill_s(tokens), flops_per_s()
                each.append(Prefilled(seconds, (before + after) / 2))
                before = after
    linear = roofline.product(layers, engine.store.dtype, BATCH)
    shape = kernels.Heads(heads, config.get("num_key_value_heads") or heads, dim)
    attention = kernels.attend(shape, engine.layout.dtype, BATCH, CONTEXT, lambda _: 1.0)
    count = len(engine.layout.layers)
    found.kernels = min(linear.seconds.values()) + count * min(attention.seconds.values())
    engine.close()
    return found


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _watched(engine: Any) -> list[float]:
    """Seconds of every pass of ``engine``'s rows through its model from now on: in C, all that is not Python."""
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


def calibration(field: Field) -> Calibration:
    """Measured once for all goals, with no server running beside it."""

    def make() -> Calibration:
        field.open()
        field.console.print("calibrating one core")
        return in_child(calibrate, str(field.model), field.cores[0], field.effort.rounds, PROMPTS)

    found: Calibration = field.remember("calibration", make)
    return found


# -- what a client sees -----------------------------------------------------------------------------------------------


def gap_s(field: Field, system: System, batch: int) -> float:
    """The median time between tokens of ``batch`` streams whose mean context is ``CONTEXT``."""
    tokens = field.effort.streamed_tokens
    run = field.run(system, field.asks(batch, CONTEXT - tokens // 2, tokens), what=f"{batch} streams")
    return statistics.median(gap for record in good(run) for gap in record.itls)


def gaps(field: Field, batch: int) -> dict[System, list[float]]:
    """The same of both systems on one core, by round."""

    def make() -> dict[System, list[float]]:
        systems = field.open(OURS_ONE_CORE, VLLM_ONE_CORE)
        return field.alternate(systems, lambda system: gap_s(field, system, batch))

    found: dict[System, list[float]] = field.remember(f"gaps {batch}", make)
    return found


def c1(field: Field) -> list[Row]:
    """Decode of one stream is bound by how fast weights are read."""
    return [_decode(field, "C1", 1, Target("share", 0.85, 0.75), Target("ratio", 1.15))]


def c2(field: Field) -> list[Row]:
    """So is that of 16, with their KV."""
    return [_decode(field, "C2", BATCH, Target("share", 0.80, 0.65), Target("ratio", 1.2))]


def _decode(field: Field, goal: str, batch: int, *targets: Target) -> Row:
    core = calibration(field)
    size, rounds = core.step_bytes(batch), core.decode
    seen = gaps(field, batch)
    served = [size / seconds / 1e9 for seconds in seen[OURS_ONE_CORE]]
    reading = [core.reading_s(batch, each) for each in rounds]
    least = [max(read_s, core.multiplying_s(batch, each)) for read_s, each in zip(reading, rounds, strict=True)]
    seconds = [each.seconds[batch] for each in rounds]

    def share(limits: Sequence[float]) -> float:
        return statistics.median(limit / took for limit, took in zip(limits, seconds, strict=True))

    note = f"the ratio compares what a client measures: {statistics.median(served):.2f} GB/s"
    if least != reading:
        note += f"; the limit is the core's multiplication rate, the share of its read rate is {share(reading):.1%}"
    peer = [size / each / 1e9 for each in seen.get(VLLM_ONE_CORE, [])]
    return Row(
        goal,
        f"decode, batch {batch}, context {CONTEXT}, one core",
        "GB/s",
        size / statistics.median(seconds) / 1e9,
        targets,
        limit=statistics.median(size / limit for limit in least) / 1e9,
        share=share(least),
        note=note,
        detail={
            "core_s": seconds,
            "bytes_per_s": [each.bytes_per_s for each in rounds],
            "flops_per_s": [each.flops_per_s for each in rounds],
            "client_s": by_round(seen),
        },
        **against(str(VLLM_ONE_CORE), served, peer),
    )


def c3(field: Field) -> list[Row]:
    """Prefill is bound by how fast the model's shapes are multiplied."""
    core = calibration(field)
    systems = field.open(OURS_ONE_CORE, VLLM_ONE_CORE)
    rows = []
    for tokens in PROMPTS:
        operations, runs = core.prefill_flops(tokens), core.prefill[tokens]
        seen = field.alternate(systems, lambda system, tokens=tokens: first_token_s(field, system, tokens))  # type: ignore[misc]
        rows.append(
            Row(
                "C3",
                f"prefill of {tokens:,} tokens, one core",
                "ms",
                1000 * statistics.median(run.seconds for run in runs),
                (Target("share", 0.85, 0.75), Target("ratio", 1.15)),
                limit=1000 * statistics.median(operations / run.flops_per_s for run in runs),
                share=statistics.median(operations / run.flops_per_s / run.seconds for run in runs),
                note=f"the ratio compares TTFT: {1000 * statistics.median(seen[OURS_ONE_CORE]):.0f} ms",
                detail={
                    "core_s": [run.seconds for run in runs],
                    "flops_per_s": [run.flops_per_s for run in runs],
                    "client_s": by_round(seen),
                },
                **_in_ms(against(
                    str(VLLM_ONE_CORE), seen[OURS_ONE_CORE], seen.get(VLLM_ONE_CORE, []), less_is_better=True
                )),
            )
        )  # fmt: skip
    return rows


def _in_ms(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {"peer": 1000 * fields["peer"]} if fields else fields


def first_token_s(field: Field, system: System, tokens: int) -> float:
    """The median time to the first token of prompts that come one after another."""
    asks = field.asks(field.effort.singles, tokens, 2)
    run = field.run(system, asks, concurrency=1, what=f"prompts of {tokens} tokens")
    return statistics.median(record.ttft for record in good(run))


def c7(field: Field) -> list[Row]:
    """What of a worker's turn in decode is not the model's kernels, all of them: planning, sampling, messages, and what
    lies between turns."""
    core = calibration(field)
    overheads = [statistics.median(1 - turn.model / turn.seconds for turn in each) for each in core.turns]
    turns = [turn for each in core.turns for turn in each]
    seconds, model = (statistics.median(column) for column in zip(*turns, strict=True))
    return [
        Row(
            "C7",
            f"share of a worker's turn outside the model's kernels, decode at batch {BATCH}",
            "%",
            100 * statistics.median(overheads),
            (Target("value", 4, at_most=True),),
            note=f"a turn takes {1000 * seconds:.2f} ms, the kernels {1000 * model:.2f} ms; with linear layers and "
            f"attention measured on their own the share is {1 - core.kernels / seconds:.1%}",
            detail={"percent": [100 * each for each in overheads]},
        )
    ]
