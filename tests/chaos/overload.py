"""Overload at two and three times the peak: goodput stays near the peak, and served requests are served in time.

Goodput is the number of requests per second that end correctly within the deadline. The others are rejected on arrival,
at once, or time out. They do not affect running streams, whose inter-token latency stays as at the peak.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from tests.chaos.cluster import ChaosCluster
from tests.chaos.faults import REFUSED_S
from tests.chaos.load import LoadFigures, crowd
from tests.chaos.request import ChaosRequest, clock

DEADLINE_S = 3.0
SECONDS = 20.0
SHARE = 0.9
SLOWER = 1.5
"""Allowed factor between the p99 inter-token latency in overload and that at the peak."""
FLAGS = ("--max-num-seqs", "8", "--step-s", "0.02", "--blocks", "2048", "--max-num-batched-tokens", "256")
COORDINATOR_FLAGS = ("--request-timeout", str(DEADLINE_S))
IN_FLIGHT = 24
"""Number of clients that keep two decode workers with eight slots each busy without any request timing out."""
REFUSED = ("error server_is_overloaded", "error request_timeout")


def _asks(cluster: ChaosCluster, count: int) -> list[ChaosRequest]:
    return [cluster.ask(cluster.rng.randrange(40, 120), cluster.rng.randrange(16, 40)) for _ in range(count)]


async def _arriving(
    cluster: ChaosCluster, session: aiohttp.ClientSession, asks: Sequence[ChaosRequest], rate: float
) -> None:
    """Send ``asks`` as a Poisson process of ``rate`` per second, however many are still running."""
    started, due = clock(), 0.0
    running = []
    for ask in asks:
        due += cluster.rng.expovariate(rate)
        await asyncio.sleep(max(0.0, started + due - clock()))
        running.append(asyncio.ensure_future(ask.send(session)))
    await asyncio.gather(*running)


async def overload(
    directory: Path, *, factors: Sequence[float] = (1.0, 2.0, 3.0), seconds: float = SECONDS
) -> list[LoadFigures]:
    """Measure the peak goodput with ``IN_FLIGHT`` clients in a closed loop, then run open-loop arrivals at multiples of
    it, ``seconds`` each."""
    figures = []
    async with ChaosCluster.running(
        directory / "overload", flags=FLAGS, coordinator_flags=COORDINATOR_FLAGS
    ) as cluster:
        peak = usual_s = 0.0
        for factor in (0.0, *factors):
            name = f"{factor:g} times the peak" if factor else "the peak, closed loop"
            done = LoadFigures(name)
            started = clock()
            if factor:
                asks = _asks(cluster, round(factor * peak * seconds))
                async with cluster.session() as session:
                    await _arriving(cluster, session, asks, factor * peak)
            else:
                asks = _asks(cluster, 400)
                await crowd(cluster, asks, IN_FLIGHT)
            ended = max(ask.ended_at for ask in asks)
            done.seconds = ended - started
            for ask in asks:
                done.verdicts[ask.verdict()] += 1
            goodput = done.verdicts["exact"] / done.seconds
            peak = peak or goodput
            done.faults.update({"per second in time": round(goodput), "% of the peak": round(100 * goodput / peak)})
            bad = {verdict: n for verdict, n in done.verdicts.items() if verdict not in ("exact", *REFUSED)}
            if bad:
                done.wrong.append(f"answers {bad}")
            if not factor and done.verdicts["exact"] < len(asks):
                done.wrong.append("it is no peak: not all were served")
            if factor >= 2 and goodput < SHARE * peak:
                done.late.append(f"goodput {goodput / peak:.0%} of the peak")
            _judge_refusals(done, asks, due=factor >= 2)
            itl_s = judge_gaps(done, asks, usual_s if factor >= 2 else 0.0)
            usual_s = usual_s or itl_s
            done.free_s = max(0.0, await cluster.until_free() - ended)
            print(done.row(), flush=True)
            figures.append(done)
    return figures


def _judge_refusals(figures: LoadFigures, asks: Sequence[ChaosRequest], *, due: bool) -> None:
    """Judge the time until requests were rejected, as clients see it. With ``due``, some must have been rejected."""
    times = sorted(ask.ended_at - ask.started_at for ask in asks if ask.status in (429, 503))
    if not times:
        figures.wrong += ["no request was refused"] if due else []
        return
    p99_s = times[math.ceil(0.99 * len(times)) - 1]
    figures.faults[f"ms to a refusal (p99, of {1000 * REFUSED_S:.0f})"] = round(1000 * p99_s)
    if p99_s > REFUSED_S:
        figures.late.append(f"refusals took {p99_s:.2f} s (p99)")


def judge_gaps(figures: LoadFigures, asks: Sequence[ChaosRequest], usual_s: float) -> float:
    """Judge the inter-token latencies, including the time from the last token to the end of a stream that timed out.

    Returns their p99 in seconds, which is compared with ``usual_s`` unless that is 0."""
    begun = [ask for ask in asks if ask.arrivals]
    moments = [ask.arrivals if ask.done else [*ask.arrivals, ask.ended_at] for ask in begun]
    gaps = sorted(after - before for each in moments for before, after in itertools.pairwise(each))
    if not gaps:
        return 0.0
    p99_s = gaps[math.ceil(0.99 * len(gaps)) - 1]
    figures.gap_s = gaps[-1]
    figures.first_s = max(ask.arrivals[0] - ask.started_at for ask in begun)
    figures.faults["ms between tokens (p99)"] = round(1000 * p99_s)
    if usual_s and p99_s > SLOWER * usual_s:
        figures.late.append(f"{1000 * p99_s:.0f} ms between tokens, {1000 * usual_s:.0f} at the peak (p99)")
    return p99_s
