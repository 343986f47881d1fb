"""C1, C2, C3, C7: steps of one core, against what that core reads from memory and multiplies.

Steps run in a process of their own that is bound to the first core, in rounds, each between two calibrations of that
core: a slow second of the machine is shared. The peer's steps are seen only from outside, so the ratio to it is that
of times which the same client has measured of both, each with its compute thread on that core.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from bench.cost import uniform
from bench.goals.field import OURS_ONE_CORE, VLLM_ONE_CORE, Field, System, good
from bench.goals.figures import Row, Target, against, by_round
from bench.goals.turns import Turn
from bench.goals.turns import measure as turn_by_turn
from common.checkpoint import open_checkpoint
from common.errors import StartError

BATCH, CONTEXT = 16, 512
PROMPTS = (1024, 4096)
PRODUCT_ROWS = 1024
"""Of the products that give a core's limit."""
CHUNK = 512
"""Prompt tokens of a step, as a worker on a CPU has them by default."""
STEPS, TURNS = 15, 128
T = TypeVar("T")


class Measured(NamedTuple):
    """Something that a core did, and what it could do at best just before and just after, on average: bytes per second
    read from memory of a step's size, or floating-point operations per second of products of the model's shapes with
    many rows."""

    seconds: float
    rate: float

    def share(self, amount: float) -> float:
        """Of the rate, by who did ``amount`` bytes or operations."""
        return amount / self.seconds / self.rate


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
    attention_width: int
    """Layers times heads times head size."""
    decode: dict[int, list[Measured]]
    """By batch: a step at ``CONTEXT``."""
    prefill: dict[int, list[Measured]]
    """By prompt tokens."""
    turns: list[list[Turn]] = field(default_factory=list)
    """Of a worker's loop with ``BATCH`` streams around ``CONTEXT``, by round."""
    kernels: float = 0.0
    """Linear layers and attention alone, in such a step."""

    def step_bytes(self, batch: int) -> int:
        """Bytes that a decode step cannot do without: all weights once, the KV of every sequence."""
        return self.weight_bytes + batch * CONTEXT * self.kv_bytes

    def step_s(self, batch: int, bytes_per_s: float) -> float:
        """The least that a decode step takes: for what it reads, or where that is longer for what it multiplies."""
        flops_per_s = statistics.median(run.rate for runs in self.prefill.values() for run in runs)
        multiplied = 2 * batch * (self.layer_weights + self.head_weights)
        return max(self.step_bytes(batch) / bytes_per_s, multiplied / flops_per_s)

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a prompt: its rows through all layers, causal attention, one row through the last layer."""
        attention = 2 * self.attention_width * tokens**2
        return 2 * self.layer_weights * tokens + attention + 2 * self.head_weights


def in_child(work: Callable[..., T], *given: Any) -> T:
    """``work(*given)`` in a fresh process: its affinity, threads and memory are its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def calibrate(model: str, core: int, rounds: int, prompts: tuple[int, ...]) -> Calibration:
    """Measures this process, which it binds to ``core``."""
    from common import device

    device.pin((core,), 1)
    import torch

    from bench import kernels, roofline
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
        attention_width=config["num_hidden_layers"] * heads * dim,
        decode={1: [], BATCH: []},
        prefill={tokens: [] for tokens in prompts},
    )
    forwards = _watched(engine)

    def turns() -> list[Turn]:
        found = turn_by_turn(engine, forwards, BATCH, CONTEXT - TURNS // 2, TURNS, CHUNK)
        if not found:
            raise StartError("a worker's turns could not be measured", "its streams did not run together", "try again")
        return found

    def decode_s(batch: int) -> float:
        made = uniform(size, batch, CONTEXT - 1, 1)
        engine.step(made)
        return statistics.median(engine.step(made).seconds for _ in range(STEPS))

    def prefill_s(tokens: int) -> float:
        chunks = [uniform(size, 1, start, min(CHUNK, tokens - start)) for start in range(0, tokens, CHUNK)]
        return min(sum(engine.step(chunk).seconds for chunk in chunks) for _ in range(2))

    def read_rate() -> float:
        return roofline.read_rates([mib])[mib]

    def flop_rate() -> float:
        return operations / min(roofline.best_s(run, 3) for run in products.values())

    def measure(work: Callable[[int], float], rate: Callable[[], float], into: dict[int, list[Measured]]) -> None:
        before = rate()
        for what, rounds in into.items():
            seconds = work(what)
            after = rate()
            rounds.append(Measured(seconds, (before + after) / 2))
            before = after

    mib = next((mib for mib in roofline.READ_MIB if mib * roofline.MIB >= found.weight_bytes), max(roofline.READ_MIB))
    operations = 2 * PRODUCT_ROWS * (found.layer_weights + head)
    with torch.inference_mode():
        products = dict(roofline.passes(layers, engine.store.dtype, PRODUCT_ROWS))
        for _ in range(rounds):
            measure(decode_s, read_rate, found.decode)
            found.turns.append(turns())
            measure(prefill_s, flop_rate, found.prefill)
    linear = roofline.product(layers, engine.store.dtype, BATCH)
    shape = kernels.Heads(heads, config.get("num_key_value_heads") or heads, dim)
    attention = kernels.attend(shape, engine.layout.dtype, BATCH, CONTEXT, lambda _: 1.0)
    count = len(engine.layout.layers)
    found.kernels = min(linear.seconds.values()) + count * min(attention.seconds.values())
    engine.close()
    return found


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
    size, steps = core.step_bytes(batch), core.decode[batch]
    seen = gaps(field, batch)
    served = [size / seconds / 1e9 for seconds in seen[OURS_ONE_CORE]]
    least = [core.step_s(batch, step.rate) for step in steps]
    multiplied = [least_s > size / step.rate for least_s, step in zip(least, steps, strict=True)]
    read = statistics.median(size / step.rate / step.seconds for step in steps)
    bound = f", the limit is what the core multiplies, of what it reads {read:.1%}" if all(multiplied) else ""
    peer = [size / seconds / 1e9 for seconds in seen.get(VLLM_ONE_CORE, [])]
    return Row(
        goal,
        f"decode, batch {batch}, context {CONTEXT}, one core",
        "GB/s",
        size / statistics.median(step.seconds for step in steps) / 1e9,
        targets,
        limit=statistics.median(size / least_s for least_s in least) / 1e9,
        share=statistics.median(least_s / step.seconds for least_s, step in zip(least, steps, strict=True)),
        note=f"as a client sees it {statistics.median(served):.2f} GB/s, which the ratio is about{bound}",
        detail=_by_round(steps) | {"client_s": by_round(seen)},
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
                limit=1000 * statistics.median(operations / run.rate for run in runs),
                share=statistics.median(run.share(operations) for run in runs),
                note=f"TTFT {1000 * statistics.median(seen[OURS_ONE_CORE]):.0f} ms, which the ratio is about",
                detail=_by_round(runs) | {"client_s": by_round(seen)},
                **_in_ms(against(
                    str(VLLM_ONE_CORE), seen[OURS_ONE_CORE], seen.get(VLLM_ONE_CORE, []), less_is_better=True
                )),
            )
        )  # fmt: skip
    return rows


def _by_round(measured: Sequence[Measured]) -> dict[str, list[float]]:
    """As a row's detail."""
    return {"core_s": [each.seconds for each in measured], "rate_per_s": [each.rate for each in measured]}


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
            f"of a worker's turn that decodes at batch {BATCH}, what is not the model's kernels",
            "%",
            100 * statistics.median(overheads),
            (Target("value", 4, at_most=True),),
            note=f"a turn takes {1000 * seconds:.2f} ms, the kernels {1000 * model:.2f} ms; linear layers and attention"
            f" alone, measured apart, leave {1 - core.kernels / seconds:.1%}",
            detail={"percent": [100 * each for each in overheads]},
        )
    ]
