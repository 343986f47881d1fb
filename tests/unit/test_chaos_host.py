"""When something is played again: late while the host took the cores, and for no other reason."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.chaos import host
from tests.chaos.host import TAKEN, TRIES, Taken, undisturbed


class Times(NamedTuple):
    user: float
    nice: float
    system: float
    idle: float
    steal: float


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[Times]:
    """What the system says that it spent so far, the last entry for ever."""
    monkeypatch.setattr(host, "CALM_S", 0.01)
    said = [Times(5.0, 1.0, 2.0, 100.0, 3.0)]
    monkeypatch.setattr(host.psutil, "cpu_times", lambda: said[-1])
    return said


def spend(clock: list[Times], busy_s: float, stolen_s: float) -> None:
    then = clock[-1]
    clock.append(then._replace(user=then.user + busy_s, idle=then.idle + 50.0, steal=then.steal + stolen_s))


def test_a_share_is_of_the_time_for_which_somebody_wanted_a_core(clock: list[Times]) -> None:
    taken = Taken()
    assert taken.share() == 0.0
    spend(clock, 3.0, 1.0)
    assert taken.share() == 0.25


@pytest.mark.parametrize(
    ("late", "share", "plays"),
    [("late", 2 * TAKEN, TRIES), ("late", TAKEN / 2, 1), ("", 0.9, 1)],
    ids=["the host's fault", "our fault", "in time"],
)
async def test_what_is_late_while_the_host_takes_the_cores_is_played_again(
    clock: list[Times], late: str, share: float, plays: int
) -> None:
    played = 0

    async def play() -> int:
        nonlocal played
        played += 1
        spend(clock, 1.0 - share, share)
        return played

    assert await undisturbed(play, lambda _: late) == plays == played


async def test_the_first_undisturbed_play_counts(clock: list[Times]) -> None:
    shares = iter([0.9, 0.0, 0.9])

    async def play() -> float:
        share = next(shares)
        spend(clock, 1.0 - share, share)
        return share

    assert await undisturbed(play, lambda share: "late") == 0.0
