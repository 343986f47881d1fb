"""C1, C2, C3, C7: steps of one core, against what that core reads from memory and multiplies.

The engine's own figures come from :mod:`bench.goals.calibration`. The peer's steps are visible only from outside, so
the ratio to the peer compares times that one client measured of both, each with its compute thread on that core.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.goals.calibration import BATCH, CONTEXT, PROMPTS, Calibration, calibrate, in_child
from bench.goals.field import OURS_ONE_CORE, VLLM_ONE_CORE, Field, System, good
from bench.goals.figures import GoalTarget, Row, against, by_round


def calibration(field: Field) -> Calibration:
    """Return the calibration, measured once for all goals while no server is running."""

    def make() -> Calibration:
        field.open()
        field.console.print("calibrating one core")
        return in_child(calibrate, str(field.model), field.cores[0], field.effort.rounds, PROMPTS)

    found: Calibration = field.remember("calibration", make)
    return found


# -- what a client sees -----------------------------------------------------------------------------------------------


def gap_s(field: Field, system: System, batch: int) -> float:
    """Measure the median time between tokens of ``batch`` streams with a mean context of ``CONTEXT``."""
    tokens = field.effort.streamed_tokens
    run = field.run(system, field.asks(batch, CONTEXT - tokens // 2, tokens), what=f"{batch} streams")
    return statistics.median(gap for record in good(run) for gap in record.itls)


def gaps(field: Field, batch: int) -> dict[System, list[float]]:
    """Measure that of both systems on one core, by round, once for all goals."""

    def make() -> dict[System, list[float]]:
        systems = field.open(OURS_ONE_CORE, VLLM_ONE_CORE)
        return field.alternate(systems, lambda system: gap_s(field, system, batch))

    found: dict[System, list[float]] = field.remember(f"gaps {batch}", make)
    return found


def c1(field: Field) -> list[Row]:
    """Decode of one stream is bound by how fast the weights are read."""
    return [_decode(field, "C1", 1, GoalTarget("share", 0.85, 0.75), GoalTarget("ratio", 1.15))]


def c2(field: Field) -> list[Row]:
    """Decode of 16 streams is bound by reading the weights and their KV."""
    return [_decode(field, "C2", BATCH, GoalTarget("share", 0.80, 0.65), GoalTarget("ratio", 1.2))]


def _decode(field: Field, goal: str, batch: int, *targets: GoalTarget) -> Row:
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
                (GoalTarget("share", 0.85, 0.75), GoalTarget("ratio", 1.15)),
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
    """Measure the median time to the first token of prompts sent one after another."""
    asks = field.asks(field.effort.singles, tokens, 2)
    run = field.run(system, asks, concurrency=1, what=f"prompts of {tokens} tokens")
    return statistics.median(record.ttft for record in good(run))


def c7(field: Field) -> list[Row]:
    """The share of a worker's decode turn outside the model's kernels: planning, sampling, messages, and the time
    between turns."""
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
            (GoalTarget("value", 4, at_most=True),),
            note=f"a turn takes {1000 * seconds:.2f} ms, the kernels {1000 * model:.2f} ms; with linear layers and "
            f"attention measured on their own the share is {1 - core.kernels / seconds:.1%}",
            detail={"percent": [100 * each for each in overheads]},
        )
    ]
