"""C4, C5: what it costs a request that its KV is transferred from one worker to another."""

from __future__ import annotations

import statistics
from typing import Any

from bench.goals.calibration import in_child
from bench.goals.field import INPUT, OURS_ONE_CORE, OUTPUT, VLLM_1P1D, VLLM_ONE_CORE, Field, System, good
from bench.goals.figures import GoalTarget, Row, by_round
from bench.micro import wire

HIDDEN_INPUTS = (1024, 4096)
"""Prompt tokens. With short prompts the last layer and the messages of the hand-off are most of the time."""
ON_ITS_CORE = System("1p1d", flags=("--no-lend-cores",))
"""Prefill on one core only, as the single worker that it is compared with. With a core lent by decode its first token
would come sooner."""
OVER_TCP = System("1p1d", flags=("--kv-transport", "zmq"))
WIRE_TOKENS, WIRE_REPEATS = 2048, 3


def c4(field: Field) -> list[Row]:
    """How much later the first token comes than from one worker that does everything on one core, and how long the gap
    before the second token is, which only the hand-off delays. One request at a time."""
    systems = field.open(ON_ITS_CORE, OURS_ONE_CORE, VLLM_1P1D, VLLM_ONE_CORE)
    gaps: dict[System, list[float]] = {system: [] for system in systems}

    def first_s(system: System, count: int) -> float:
        run = field.run(system, field.asks(count, INPUT, OUTPUT), concurrency=1, what="one at a time")
        records = good(run)
        gaps[system] += [record.itls[0] / statistics.median(record.itls) for record in records]
        return statistics.median(record.ttft for record in records)

    # the difference is smaller than that between two seconds of a machine, so these two alternate request by request
    ours, theirs = ([system for system in systems if system.is_peer is peer] for peer in (False, True))
    firsts = field.alternate(ours, lambda system: first_s(system, 1), field.effort.hand_offs)
    firsts |= field.alternate(theirs, lambda system: first_s(system, field.effort.singles))
    added = _added(firsts[ON_ITS_CORE], firsts[OURS_ONE_CORE])
    of_peer = _added(firsts[VLLM_1P1D], firsts[VLLM_ONE_CORE]) if {VLLM_1P1D, VLLM_ONE_CORE} <= firsts.keys() else []
    lower, _, upper = statistics.quantiles(added, n=4)
    shape = f"{INPUT:,}/{OUTPUT} tokens, one request at a time"
    return [
        Row(
            "C4",
            f"time to first token added by the hand-off, {shape}",
            "%",
            statistics.median(added),
            (GoalTarget("value", 1, 3, at_most=True),),
            note=f"{_ms(firsts[ON_ITS_CORE])} with the hand-off, {_ms(firsts[OURS_ONE_CORE])} from one worker on one "
            f"core; quartiles of {len(added)} pairs of requests {lower:.2f} and {upper:.2f} %",
            detail={"added_percent": added, "first_token_s": by_round(firsts)},
            **_peer(of_peer),
        ),
        Row(
            "C4",
            f"gap before the second token in median gaps, {shape}",
            "",
            statistics.median(gaps[ON_ITS_CORE]),
            (GoalTarget("value", 1.5, at_most=True),),
            detail={"in_usual_times": by_round(gaps)},
            **_peer(gaps[VLLM_1P1D] if VLLM_1P1D in firsts else []),
        ),
    ]


def _peer(values: list[float]) -> dict[str, Any]:
    return {"against": str(VLLM_1P1D), "peer": statistics.median(values)} if values else {}


def _added(with_it: list[float], without: list[float]) -> list[float]:
    """Return the added time of each pair, in percent."""
    return [100 * (one / other - 1) for one, other in zip(with_it, without, strict=True)]


def _ms(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.1f} ms"


def c5(field: Field) -> list[Row]:
    """The rate of KV through ZeroMQ over TCP beside that of a plain socket, and how much of the transfer prefill
    hides."""
    field.open()
    raw, carried = [], []
    for _ in range(field.effort.rounds):
        raw.append(in_child(_socket_rate) / 1e9)
        carried.append(statistics.median(wire.measure("zmq", WIRE_TOKENS, WIRE_REPEATS)) / 1e9)
    shares = [mine / most for mine, most in zip(carried, raw, strict=True)]
    field.open(OVER_TCP)
    link = 1e9 * statistics.median(carried)
    hidden = [_hidden(tokens, _hand_offs(field, tokens), link) for tokens in HIDDEN_INPUTS]
    return [
        Row(
            "C5",
            "KV over ZeroMQ TCP between two processes",
            "GB/s",
            statistics.median(carried),
            (GoalTarget("share", 0.5),),
            limit=statistics.median(raw),
            share=statistics.median(shares),
            detail={"socket": raw, "carried": carried},
        ),
        *hidden,
    ]


def _hand_offs(field: Field, tokens: int) -> list[dict[str, Any]]:
    """Return the server's times of the hand-offs of prompts sent one after another."""
    run = field.run(OVER_TCP, field.asks(field.effort.singles, tokens, OUTPUT), concurrency=1, what="one at a time")
    return [stages for record in good(run) if (stages := record.stages or {}).get("transfer_ms")]


def _hidden(tokens: int, stages: list[dict[str, Any]], bytes_per_s: float) -> Row:
    """Return the share of the link time of a prompt's bytes that passes before the end of its prefill. The rest lasts
    from that end until decode has accepted everything, including the messages of the hand-off and both loops."""
    links = [1000 * each["kv_bytes"] / bytes_per_s for each in stages]
    left = [each["transfer_exposed_ms"] for each in stages]
    hidden = [max(0.0, 1 - each / link) for each, link in zip(left, links, strict=True)]
    return Row(
        "C5",
        f"link time of KV hidden behind prefill, {tokens:,} tokens",
        "%",
        100 * statistics.median(hidden) if hidden else 0.0,
        (GoalTarget("value", 80),),
        note=f"the link takes {statistics.median(links):.2f} ms, {statistics.median(left):.2f} ms of the hand-off come "
        f"after prefill, medians of {len(left)}"
        if left
        else "the server reported no hand-off",
        detail={"left_ms": left, "link_ms": links},
    )


def _socket_rate() -> float:
    from bench.commands.roofline import socket_rate  # it imports torch

    return socket_rate()
