"""C10, C11: how many requests are served when all are sent at once."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bench.goals.calibration import CHUNK, in_child
from bench.goals.field import COLOCATED, INPUT, OURS, OUTPUT, PLACES, VLLM, VLLM_1P1D, Field, Rates, System, best, good
from bench.goals.figures import GoalTarget, Row, against, by_round
from bench.load.client import Record
from bench.load.comparison import busy_shares
from bench.simulate.cost import CostModel, measure

BALANCED_INPUT = 512


def answer_s(cost: CostModel, prompt: int, tokens: int, streams: int) -> float:
    """Return the seconds of one core for an answer, whose steps ``streams`` answers share."""
    return tokens * cost.decode_s(streams, prompt + tokens / 2) / streams


def balanced_output(cost: CostModel, prompt: int, streams: int) -> int:
    """Return the output tokens with which one prefill and one decode worker take equally long per request: T_P =
    T_D."""
    wanted = cost.prompt_s(prompt, CHUNK)
    return next((tokens for tokens in range(1, 4096) if answer_s(cost, prompt, tokens, streams) >= wanted), 4096)


def most_per_s(cost: CostModel, cores: int, prompt: int, tokens: int, streams: int) -> float:
    """Return the requests per second of so many cores that are always busy with steps that cost what they cost one core
    alone; those of decode have ``streams``."""
    return cores / (cost.prompt_s(prompt, CHUNK) + answer_s(cost, prompt, tokens, streams))


def saturation(
    field: Field, cost: CostModel, systems: Sequence[System], count: int, input_tokens: int, output_tokens: int
) -> tuple[Rates, dict[str, Any]]:
    """Measure the requests per second of each system when ``count`` are sent at once, from the first request to the
    last token, and the other fields of the first row. The limit is :func:`most_per_s` with all places taken. Before
    that each system serves as many requests as it has places, so that its memory is in use, as on a server that has run
    for a while."""
    busy: dict[str, list[float]] = defaultdict(list)

    def fill(system: System) -> list[Record]:
        return good(field.run(system, field.asks(min(count, PLACES), input_tokens, output_tokens), what="warming up"))

    def once(system: System) -> tuple[float, float]:
        run = field.run(system, field.asks(count, input_tokens, output_tokens), what="all at once")
        records = good(run)
        seconds = max(record.moments[-1] for record in records) - min(record.sent_at for record in records)
        if system == OURS:
            for pool, share in busy_shares(run).items():
                busy[pool].append(share)
        return len(records) / seconds, statistics.median(record.tpot for record in records)

    found = field.alternate([*field.alternate(systems, fill, rounds=1)], once)
    each = (f"{1000 * statistics.median(tpot for _, tpot in rounds):.0f} ms ({it})" for it, rounds in found.items())
    rates = {system: [rate for rate, _ in rounds] for system, rounds in found.items()}
    limit = most_per_s(cost, len(field.cores), input_tokens, output_tokens, min(count, PLACES))
    return rates, {
        "limit": limit,
        "share": statistics.median(rates[OURS]) / limit,
        "note": f"median TPOT {', '.join(each)}"
        + "".join(
            f"; {pool} workers busy {statistics.median(shares):.0%} of the time" for pool, shares in busy.items()
        ),
        "detail": {"requests_per_s": by_round(rates), "busy": busy},
    }


def c10(field: Field) -> list[Row]:
    """On a load with equal work for both pools a pair serves as many requests as colocated workers. That includes the
    beginning, when decode waits for prompts, and the end, when no prompt is left; there are enough requests for a while
    in between. vLLM 1P1D, which is slow and has no goal here, is measured in C11."""

    cost = _cost(field)
    output = balanced_output(cost, BALANCED_INPUT, PLACES // 4)
    systems = field.open(OURS, *COLOCATED, VLLM)
    in_time = field.effort.balanced_s * most_per_s(cost, len(field.cores), BALANCED_INPUT, output, PLACES)
    count = max(field.effort.balanced, round(in_time))
    found, first = saturation(field, cost, systems, count, BALANCED_INPUT, output)
    what = f"throughput with all requests sent at once, {BALANCED_INPUT}/{output} (balanced)"
    return [
        _saturated("C10", what, found, best(found, COLOCATED), GoalTarget("ratio", 1.0, 0.95), **first),
        _saturated("C10", what, found, VLLM, GoalTarget("ratio", 1.2, 1.0)),
    ]


def c11(field: Field) -> list[Row]:
    """Where prefill is most of the work, a core that only decodes is mostly idle."""
    cost = _cost(field)  # before there are any servers
    systems = field.open(OURS, *COLOCATED, VLLM, VLLM_1P1D)
    found, first = saturation(field, cost, systems, field.effort.requests, INPUT, OUTPUT)
    what = f"throughput with all requests sent at once, {INPUT:,}/{OUTPUT}"
    return [
        _saturated("C11", what, found, VLLM, GoalTarget("ratio", 1.0), **first),
        _saturated("C11", what, found, best(found, COLOCATED)),
        *([_saturated("C11", what, found, VLLM_1P1D)] if VLLM_1P1D in found else []),
    ]


def _saturated(goal: str, what: str, found: Rates, peer: System, *targets: GoalTarget, **more: Any) -> Row:
    fields = against(str(peer), found[OURS], found.get(peer, []))
    return Row(goal, what, "req/s", statistics.median(found[OURS]), targets, **more, **fields)


def _cost(field: Field) -> CostModel:
    """Return the step costs, measured once for all goals while no server is running."""

    def make() -> CostModel:
        field.open()
        return in_child(_measured_cost, str(field.model), field.cores[0])

    found: CostModel = field.remember("cost", make)
    return found


def _measured_cost(model: str, core: int) -> CostModel:
    os.sched_setaffinity(0, (core,))
    return measure(model, 1, lambda _: None)
