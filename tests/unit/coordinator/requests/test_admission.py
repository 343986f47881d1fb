"""Admission to the queue and the retry times of refused clients, on virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from common.core.errors import RequestError
from coordinator.requests.admission import MAX_RETRY_S, MIN_RETRY_S, RETRY_GRACE_S, Admission
from coordinator.requests.errors import RETRY_JITTER
from coordinator.requests.residence import ASSUMED_S, ENOUGH, REMEMBERED, Residence, Running

Service = Callable[[random.Random], float]
MAX_RETRIES = 2
"""Default of the openai client, which obeys a retry time of up to one minute (two minutes since version 3.0)."""


def test_admission_is_bounded_and_says_when_to_come_back() -> None:
    admission = Admission(max_requests=2, max_tokens=100)
    admission.enter(1, 500, 0.0)  # longer than the limit, but the queue was empty
    with pytest.raises(RequestError) as refused:
        admission.enter(1, 10, 0.0)
    assert refused.value.status == 429 and refused.value.code == "server_is_overloaded"
    with pytest.raises(RequestError, match="queues at most 2 requests") as hopeless:
        admission.enter(3, 10, 0.0)
    assert hopeless.value.status == 400 and hopeless.value.param == "prompt"
    assert 0 < (refused.value.retry_after_s or 0) <= MAX_RETRY_S
    admission.leave(500, 0.0, placed=True)
    admission.enter(2, 100, 0.0)
    with pytest.raises(RequestError):
        admission.enter(1, 0, 0.0)
    admission.back(10)
    assert (admission.requests, admission.tokens) == (3, 110), "a retry was admitted before"
    for now in range(3):
        admission.leave(0, float(now), placed=True)
    assert admission.requests == 0


def test_admission_refuses_request_that_would_miss_deadline() -> None:
    admission = Admission(max_requests=1000, max_tokens=1 << 20)
    for _ in range(100):
        admission.enter(1, 100, 0.0, within_s=0.01)  # no rate is known yet
    for step in range(11):
        admission.leave(100, step / 10, placed=True)  # 1,000 tokens per second
        admission.served(0.5)
    with pytest.raises(RequestError, match="but its deadline is in") as refused:
        admission.enter(1, 100, 0.0, within_s=5.0)
    earliest_s = (1 - RETRY_JITTER) * (refused.value.retry_after_s or 0)
    assert refused.value.status == 429 and 3 < earliest_s < 6, "an earlier retry would miss its deadline as well"
    admission.enter(1, 100, 0.0, within_s=20.0)
    admission.enter(1, 100, 0.0, within_s=1.0, priority=-1)  # no request has a higher priority
    for _ in range(90):
        admission.leave(100, 2.0, placed=False)
    admission.leave(100, 2.0, placed=False, priority=-1)
    assert (admission.requests, admission.tokens, admission._by_priority) == (0, 0, {})
    admission.enter(1, 100, 0.0, within_s=0.1)


def test_admission_does_not_judge_by_first_placements() -> None:
    admission = Admission(100, 1_000_000)
    admission.enter(6, 600, 0.0)
    for second in (0.0, 1.0, 2.0):  # three placements: a rate of 100 tokens per second
        admission.leave(100, second, placed=True)
    admission.enter(1, 100, 0.0, within_s=0.5)


# -- forecast of free places -------------------------------------------------------------------------------------------


def first(times: Iterator[float], count: int) -> list[float]:
    return list(itertools.islice(times, count))


def aged(*ages: float, limit_s: float = math.inf) -> list[Running]:
    return [Running(age, lambda: limit_s) for age in ages]


def measured(*seconds: float) -> Residence:
    residence = Residence()
    for each in seconds:
        residence.ended(each)
    return residence


def test_places_free_one_after_the_other_and_again() -> None:
    times = measured(*[3.0] * ENOUGH).forecast(aged(0.5, 2.0, 1.0))
    assert first(times, 6) == pytest.approx([1.0, 2.0, 2.5, 4.0, 5.0, 5.5])


def test_places_of_requests_without_a_memory_free_at_a_steady_rate() -> None:
    """For exponential service times, 32 requests of 3 s on average free a place every 94 ms, whatever their ages."""
    rng = random.Random(1)
    residence = measured(*(rng.expovariate(1 / 3) for _ in range(REMEMBERED)))
    ages = [rng.expovariate(1 / 3) for _ in range(32)]
    times = first(residence.forecast(aged(*ages)), 64)
    assert 0.7 < times[31] / 3 < 1.4 and 1.4 < times[63] / 3 < 2.6, times


def test_before_anything_was_measured_a_request_is_expected_to_take_seconds() -> None:
    assert first(measured().forecast(()), 1) == [ASSUMED_S]
    assert first(measured().forecast(aged(1.0)), 1) == [ASSUMED_S - 1.0]
    few = first(measured(0.01).forecast(aged(0.1, 0.1)), 1)
    assert few == [pytest.approx(ASSUMED_S - 0.1)], "a short request that tried the system says little"


def test_a_request_that_is_older_than_all_that_ended_runs_on_up_to_its_own_limit() -> None:
    residence = measured(*[1.0] * ENOUGH)
    assert first(residence.forecast(aged(4.0)), 1) == [8.0]
    assert first(residence.forecast(aged(4.0, limit_s=3.0)), 1) == [3.0]


# -- refused requests --------------------------------------------------------------------------------------------------


def refusal(admission: Admission, now: float, key: int = 0, *, first_try: bool = False, priority: int = 0) -> float:
    """Return the retry time before jitter of a request that must be refused."""
    with pytest.raises(RequestError, match="are waiting") as refused:
        admission.enter(1, 10, now, key=key, first_try=first_try, priority=priority)
    assert refused.value.status == 429 and refused.value.retry_after_s is not None
    return refused.value.retry_after_s


def full(queue: int, ages: tuple[float, ...], service_s: float) -> Admission:
    """Return an admission whose queue is full, with running requests of these ages, each taking ``service_s``."""
    admission = Admission(queue, 1 << 20)
    admission.running = lambda: aged(*ages)
    for _ in range(REMEMBERED):
        admission.freed(service_s)
    for _ in range(queue):
        admission.enter(1, 10, 0.0, key=-1)
    return admission


def test_refused_clients_get_the_times_of_one_place_after_the_other() -> None:
    admission = full(3, (1.0, 2.0, 3.0), 10.0)
    earliest = [(1 - RETRY_JITTER) * refusal(admission, 0.0, key) for key in range(1, 5)]
    assert earliest == pytest.approx([7.0, 8.0, 9.0, 17.0])
    assert (1 - RETRY_JITTER) * refusal(admission, 0.0, 2) > 8.0, "its own turn, and later as it found no place"


def test_retry_times_stay_within_client_limits() -> None:
    slow, fast = full(1, (0.0,), 1000.0), full(1, (0.0,), 0.001)
    assert (1 + RETRY_JITTER) * refusal(slow, 0.0) == pytest.approx(60) and refusal(slow, 0.0, 5) == MAX_RETRY_S
    assert refusal(fast, 0.0) == MIN_RETRY_S


def test_a_place_is_kept_for_a_refused_client_until_it_is_overdue() -> None:
    admission = full(2, (9.0, 9.0), 10.0)
    delay_s = refusal(admission, 0.0, key=7, first_try=True)
    admission.leave(10, 1.0, placed=True)
    refusal(admission, 1.0, key=8, first_try=True)  # the only free place is kept for key 7
    refusal(admission, 1.0, key=7, first_try=True)  # a second first try with the same key is another request
    admission.enter(1, 10, 1.0, key=11, first_try=True, priority=-1)  # a request of higher priority goes first here too
    admission.leave(10, 1.1, placed=True, priority=-1)
    admission.enter(1, 10, 1.2, key=7)
    admission.leave(10, 1.3, placed=True)
    refusal(admission, 1.3, key=9)
    admission.leave(10, 1.4, placed=True)
    assert admission.requests == 0
    admission.enter(1, 10, 1.5, key=9, first_try=True)  # an empty queue accepts any request
    overdue = 1.3 + 10 * delay_s + 10 * RETRY_GRACE_S
    admission.enter(1, 10, overdue, key=10, first_try=True)


def test_a_flood_of_refused_clients_is_not_remembered_one_by_one() -> None:
    admission = full(2, (9.0, 9.0), 10.0)
    times = [refusal(admission, 0.0, key=key, first_try=True) for key in range(5_000)]
    assert len(admission._expected) == 2_048
    assert times[-1] == MAX_RETRY_S, "one that is not remembered is behind all that are"


def test_no_places_are_kept_where_clients_do_not_come_back() -> None:
    admission, now = full(4, (9.0,) * 4, 10.0), 0.0
    for key in range(100):
        now += MAX_RETRY_S + RETRY_GRACE_S + 11.0
        refusal(admission, now, key=1000 + key)
    for _ in range(3):
        admission.leave(10, now, placed=True)
    for key in range(3):
        admission.enter(1, 10, now, key=2000 + key)


def test_prompts_that_do_not_fit_get_the_times_at_which_enough_others_were_placed() -> None:
    admission = Admission(100, 1000)
    admission.running = lambda: aged(0.0, 2.0, 4.0, 6.0)
    for _ in range(REMEMBERED):
        admission.freed(10.0)
    for _ in range(10):
        admission.enter(1, 100, 0.0, key=-1)
    earliest = []
    for key in range(1, 5):
        with pytest.raises(RequestError) as refused:
            admission.enter(1, 250, 0.0, key=key)
        earliest.append((1 - RETRY_JITTER) * (refused.value.retry_after_s or 0))
    assert earliest == pytest.approx([8.0, 14.0, 16.0, 20.0]), "the third place (of 100 tokens each), 5th, 7th, 9th"


# -- simulation: clients with two retries ------------------------------------------------------------------------------


@dataclass
class ClosedLoop:
    """``clients`` clients send ``requests`` requests each, the next when the last has ended or was given up."""

    slots: int
    queue: int
    service: Service
    requests: int
    same: bool = False
    """All requests have the same key, and clients report whether they were refused before."""
    seed: int = 0
    by_tokens: bool = False
    """Whether the queue is bounded by tokens instead of requests."""
    surge_s: float = 0.0
    """If not 0, requests arrive at random for this long, 1.5 times as fast as they are served, not from clients."""

    @property
    def clients(self) -> int:
        """1.5 times as many clients as there are slots and places in the queue."""
        return math.ceil(1.5 * (self.slots + self.queue))

    def run(self) -> tuple[int, int, float]:
        """Return the number of served requests, the number given up, and the share of the slots' time that was used
        until half of all requests were over."""
        rng, numbers = random.Random(self.seed), itertools.count()
        bounds = (1 << 20, 10 * self.queue) if self.by_tokens else (self.queue, 1 << 30)
        admission = Admission(*bounds)
        running: dict[int, float] = {}
        waiting: deque[tuple[int, int]] = deque()
        events: list[tuple[float, int, str, int, int, int]] = []
        admission.running = lambda: [Running(now - since, lambda: math.inf) for since in running.values()]

        def at(when: float, what: str, request: int, nth: int, refusals: int = 0) -> None:
            heapq.heappush(events, (when, next(numbers), what, request, nth, refusals))

        served = given_up = 0
        now = busy_s = used = 0.0
        if self.surge_s:
            mean_s = sum(self.service(rng) for _ in range(1000)) / 1000
            came = 0.0
            while (came := came + rng.expovariate(1.5 * self.slots / mean_s)) < self.surge_s:
                at(came, "ask", next(numbers), self.requests)
        else:
            for _ in range(self.clients):
                at(0.05 * rng.random(), "ask", next(numbers), 1)
        while events:
            when, _, what, request, nth, refusals = heapq.heappop(events)
            busy_s += len(running) * (when - now)
            now = when
            if 2 * (served + given_up) <= self.clients * self.requests:
                used = busy_s / (self.slots * now)
            over = what == "end"
            if over:
                admission.freed(now - running.pop(request))
                served += 1
            else:
                key, first_try = (0, refusals == 0) if self.same else (request, False)
                try:
                    admission.enter(1, 10, now, key=key, first_try=first_try)
                    waiting.append((request, nth))
                except RequestError as error:
                    delay_s = (error.retry_after_s or 0) * rng.uniform(1 - RETRY_JITTER, 1 + RETRY_JITTER)
                    if refusals < MAX_RETRIES and 0 < delay_s <= 60:
                        at(now + delay_s + 0.01 * rng.random(), "ask", request, nth, refusals + 1)
                    else:
                        given_up += 1
                        over = True
            if over and nth < self.requests:
                at(now + 0.003, "ask", next(numbers), nth + 1)
            while waiting and len(running) < self.slots:
                placed, its_nth = waiting.popleft()
                admission.leave(10, now, placed=True)
                running[placed] = now
                at(now + self.service(rng), "end", placed, its_nth)
        return served, given_up, used


SERVICES: dict[str, Service] = {
    "all of 3 s": lambda rng: 3.0,
    "2 to 4 s": lambda rng: rng.uniform(2, 4),
    "without a memory": lambda rng: rng.expovariate(1 / 3),
    "few long ones": lambda rng: 3 * math.exp(rng.gauss(-0.5, 1)),
    "short": lambda rng: rng.uniform(0.05, 0.15),
    "slower than assumed": lambda rng: rng.uniform(15, 25),
}


def served_share(
    slots: int, queue: int, service: str, requests: int, same: bool, seeds: int = 4
) -> tuple[float, float]:
    """Return the share of requests that were served, and the lowest use of the slots' time of all runs."""
    runs = [ClosedLoop(slots, queue, SERVICES[service], requests, same, seed).run() for seed in range(seeds)]
    served = sum(run[0] for run in runs)
    return served / (served + sum(run[1] for run in runs)), min(run[2] for run in runs)


@pytest.mark.parametrize("same", [False, True], ids=["others", "the same"])
@pytest.mark.parametrize("requests", [1, 10])
@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize(("slots", "queue"), [(8, 3), (32, 3)])
def test_clients_with_two_retries_are_served_at_one_and_a_half_times_the_capacity(
    slots: int, queue: int, service: str, requests: int, same: bool
) -> None:
    """Capacity is slots plus queue places. Each client has one request at a time, which makes a load of 1.5 times the
    capacity. At that load all can be served; requests that kept arriving faster than they are served could not be."""
    share, used = served_share(slots, queue, service, requests, same)
    assert share >= 0.95
    if requests > 1:
        assert used > 0.9, "no slot waits for a client that was asked to come back"


@pytest.mark.parametrize("service", SERVICES)
def test_so_they_are_with_a_long_queue(service: str) -> None:
    share, used = served_share(16, 64, service, 6, False, seeds=1)
    assert share >= 0.95 and used > 0.9


@pytest.mark.parametrize("service", SERVICES)
def test_so_they_are_if_tokens_bound_the_queue(service: str) -> None:
    runs = [ClosedLoop(8, 3, SERVICES[service], 6, seed=seed, by_tokens=True).run() for seed in range(4)]
    served, given_up = sum(run[0] for run in runs), sum(run[1] for run in runs)
    assert served >= 0.95 * (served + given_up) and min(run[2] for run in runs) > 0.9


@pytest.mark.parametrize("service", ["all of 3 s", "2 to 4 s", "without a memory", "few long ones"])
@pytest.mark.parametrize("slots", [8, 32])
def test_requests_that_come_faster_than_they_are_served_for_half_a_minute_are_served(slots: int, service: str) -> None:
    """The excess requests retry in turn: two retries give a client two minutes."""
    runs = [ClosedLoop(slots, 3, SERVICES[service], 1, seed=seed, surge_s=30.0).run() for seed in range(2)]
    served, given_up = sum(run[0] for run in runs), sum(run[1] for run in runs)
    assert served >= 0.95 * (served + given_up), (served, given_up)


@pytest.mark.parametrize("service", SERVICES)
def test_most_of_them_are_with_the_shortest_queue(service: str) -> None:
    """A queue of one place keeps none for retries; an answer that takes four times the assumed time costs a retry."""
    share, used = served_share(4, 1, service, 10, False)
    assert share >= (0.88 if service == "slower than assumed" else 0.94) and used > 0.9
