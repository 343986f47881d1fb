"""Holdings without a use are distinguished from those of running streams."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.chaos.cluster import ChaosWorker
from tests.chaos.held import orphaned_s
from tests.chaos.proxy import FaultProxy

STRUCK_AT, OVER_AT = 100.0, 150.0
STREAM, OTHER = "aa", "bb"
SEEDS = {STREAM: 1, OTHER: 2}


def worker(role: str, *reported: dict[str, Any], **state: float) -> ChaosWorker:
    rng = random.Random(0)
    taken = [{"event": "taken", "at": 0.0, "request": request, "seed": seed} for request, seed in SEEDS.items()]
    return ChaosWorker(f"{role}-0", role, (), FaultProxy(rng), FaultProxy(rng), events=[*taken, *reported], **state)  # type: ignore[arg-type]


def held(at: float, *by: tuple[str, int]) -> dict[str, Any]:
    return {"event": "held", "at": at, "blocks": len(by), "requests": len(by), "by": [list(each) for each in by]}


def decodes(at: float, request: str, attempt: int) -> dict[str, Any]:
    return {"event": "step", "at": at, "segments": [[request, attempt, 320, 321, True]]}


def kept(*workers: ChaosWorker, **answered: float) -> float:
    ends = {SEEDS[request]: at for request, at in answered.items()}
    return orphaned_s(workers, STRUCK_AT, ends, OVER_AT)


def test_a_stream_that_runs_on_is_held_for_its_client() -> None:
    decode = worker("decode", held(90.0, (STREAM, 0)), held(120.0))
    assert kept(decode, aa=120.0) == 0.0
    assert kept(decode, aa=117.0) == 3.0


def test_orphaned_time_covers_lost_attempt_during_retry() -> None:
    """The bug: decode never freed the blocks that a dead prefill worker was to fill."""
    prefill = worker("prefill", held(90.0, (STREAM, 0)), ended_at=STRUCK_AT)
    decode = worker(
        "decode", held(90.0, (STREAM, 0)), held(102.0, (STREAM, 0), (STREAM, 1)), held(140.0, (STREAM, 0)), held(145.0)
    )
    assert kept(prefill, decode, aa=140.0) == 45.0
    decode.events[-3:] = [held(102.0, (STREAM, 1)), held(140.0)]
    assert kept(prefill, decode, aa=140.0) == 2.0


def test_orphaned_time_covers_disconnected_client_beside_streams() -> None:
    both, one = ((STREAM, 0), (OTHER, 0)), ((STREAM, 0),)
    assert kept(worker("decode", held(90.0, *both), held(112.0, *one), held(140.0)), aa=140.0) == 12.0


def test_orphaned_time_covers_prefill_blocks_after_decode_starts() -> None:
    prefill, decode = (
        worker("prefill", held(99.0, (STREAM, 0)), held(110.0)),
        worker("decode", held(99.0, (STREAM, 0)), decodes(104.0, STREAM, 0), decodes(105.0, STREAM, 0), held(130.0)),
    )
    assert kept(prefill, decode, aa=130.0) == 6.0


def test_orphaned_time_ends_with_process_or_observation() -> None:
    keeps = held(90.0, (OTHER, 0))
    assert kept(worker("decode", keeps)) == OVER_AT - STRUCK_AT
    assert kept(worker("decode", keeps, ended_at=107.0)) == 7.0


@pytest.mark.parametrize(("given_back_at", "seconds"), [(103.5, 0.5), (101.0, 0.0)])
def test_orphaned_time_starts_when_stopped_worker_continues(given_back_at: float, seconds: float) -> None:
    assert kept(worker("decode", held(90.0, (STREAM, 0)), held(given_back_at), awake_since=103.0)) == seconds


def test_a_trial_of_a_link_counts_from_when_it_began() -> None:
    assert kept(worker("prefill", held(110.0, ("cc", 0)), held(115.0))) == 5.0
