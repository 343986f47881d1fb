"""G1, G2, G4, G5, G6: steps of an engine on the card, against what the card copies and multiplies."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import torch

from bench.goals.figures import GoalTarget, Row
from bench.gpu.loop import Step, nano_vllm_answers, serve
from bench.gpu.shapes import LlamaShape, make
from bench.gpu.stages import Setting
from bench.gpu.timing import seconds_per_call
from bench.simulate.cost import uniform
from common.checkpoint.files import open_checkpoint
from common.engine.loading import load_engine
from common.platform.device import choose

CONTEXT, TOKENS = 1024, 128
"""Prompt and output tokens of the streams whose decode steps are measured."""
BATCHES = (1, 64, 256)
GAP_BATCH = 32
PROMPT = 4096
BUDGET, SEQUENCES = 8192, 256


def load(setting: Setting, shape: LlamaShape, *, sequences: int, tokens: int, decodes: bool = True) -> Any:
    """Return an engine of ``shape`` with room for ``tokens`` tokens of KV, filled with random values: a GPU reads zeros
    with less power, therefore faster. Only one that ``decodes`` captures graphs, which takes long."""
    checkpoint = open_checkpoint(str(make(shape, setting.folder, torch.device(setting.device))))
    engine = load_engine(
        checkpoint, machine=choose(setting.device)[0], num_kv_blocks=-(-tokens // 16) + sequences,
        max_batched_tokens=_scaled(setting, BUDGET), max_num_seqs=sequences, batch_hint=sequences, decodes=decodes,
    )  # fmt: skip
    engine.warm_up()
    for layer in range(len(engine.layout.layers)):
        engine.store.k(layer).normal_()
        engine.store.v(layer).normal_()
    return engine


def _scaled(setting: Setting, number: int) -> int:
    """Return ``number``, a sixteenth of it in a dry run."""
    return max(1, number // 16) if setting.dry else number


def decoding(steps: list[Step], batch: int) -> list[Step]:
    """Return the steps in which all streams decode."""
    return [step for step in steps if step.rows == batch]


def step_s(steps: list[Step]) -> float:
    """Return the median time from the start of a step to that of the next."""
    return statistics.median(after.start - step.start for step, after in itertools.pairwise(steps))


def decode(setting: Setting) -> list[Row]:
    """Decode steps in a worker's loop: G1 at batch 1, G2 at larger ones."""
    device, shape = torch.device(setting.device), setting.large
    context, tokens = _scaled(setting, CONTEXT), _scaled(setting, TOKENS)
    batches = [_scaled(setting, batch) for batch in BATCHES]
    engine = load(setting, shape, sequences=max(batches), tokens=max(batches) * (context + tokens))
    element = engine.layout.element_bytes
    rows = []
    for name, batch in zip(("G1", "G2", "G2"), batches, strict=True):
        steps = serve(engine, device, [(context, tokens)] * batch, batch, _scaled(setting, BUDGET))
        seconds = step_s(decoding(steps, batch))
        mean = context + tokens // 2
        roof_s = max(
            shape.decode_bytes(batch, mean, element) / setting.ceilings["copy_bytes_per_s"],
            2.0 * batch * shape.linear_weights / setting.ceilings["flops_per_s"],
        )
        target = GoalTarget("share", 0.85 if name == "G1" else 0.78)
        rows.append(
            Row(
                name,
                f"decode, batch {batch}, context about {mean:,}, {shape.name}",
                "tok/s",
                batch / seconds,
                (target,),
                limit=batch / roof_s,
                share=roof_s / seconds,
                note=next((note for note in engine.notes if "CUDA graphs" in note), ""),
                detail={"step_ms": 1e3 * seconds},
            )
        )
    engine.close()
    return rows


def prefill(setting: Setting) -> list[Row]:
    """G4: one prompt in one step."""
    device, shape = torch.device(setting.device), setting.large
    tokens = min(_scaled(setting, PROMPT), _scaled(setting, BUDGET))
    engine = load(setting, shape, sequences=1, tokens=tokens, decodes=False)
    prompt = uniform(engine.layout.block_size, 1, 0, tokens)
    seconds = statistics.median(seconds_per_call(lambda: engine.step(prompt), device))
    engine.close()
    roof_s = shape.prefill_flops(tokens) / setting.ceilings["flops_per_s"]
    return [
        Row("G4", f"prefill of {tokens:,} tokens, {shape.name}", "ms", 1e3 * seconds,
            (GoalTarget("value", 95, at_most=True), GoalTarget("share", 0.82)),
            limit=1e3 * roof_s, share=roof_s / seconds)
    ]  # fmt: skip


def gaps(setting: Setting) -> list[Row]:
    """G6: how long the card has nothing to do between decode steps of a worker's loop."""
    device, shape = torch.device(setting.device), setting.large
    context, tokens, batch = _scaled(setting, CONTEXT), _scaled(setting, TOKENS), _scaled(setting, GAP_BATCH)
    engine = load(setting, shape, sequences=batch, tokens=batch * (context + tokens))
    steps = decoding(serve(engine, device, [(context, tokens)] * batch, batch, _scaled(setting, BUDGET)), batch)
    engine.close()
    idle = [max(0.0, after.start - step.end) for step, after in itertools.pairwise(steps)]
    share = statistics.median(idle) / step_s(steps)
    return [
        Row("G6", f"gap between decode steps, batch {batch}, {shape.name}", "%", 100 * share,
            (GoalTarget("value", 2, at_most=True),), note=f"a step takes {1e3 * step_s(steps):.2f} ms")
    ]  # fmt: skip


def batch(setting: Setting) -> list[Row]:
    """G5: nano-vllm's benchmark in a worker's loop."""
    device, shape = torch.device(setting.device), setting.small
    answers = nano_vllm_answers(32 if setting.dry else 1)
    most = len(answers)
    engine = load(setting, shape, sequences=most, tokens=sum(map(sum, answers)))
    steps = serve(engine, device, answers, most, _scaled(setting, 2 * BUDGET))
    engine.close()
    seconds = max(step.end for step in steps) - min(step.start for step in steps)
    count = sum(tokens for _, tokens in answers)
    return [
        Row("G5", f"{most} requests at once, {count:,} output tokens, {shape.name}", "tok/s", count / seconds,
            (GoalTarget("value", 26_000),))
    ]  # fmt: skip
