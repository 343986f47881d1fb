"""Statistics of links: when the coordinator measures a link, and what it learns."""

from __future__ import annotations

from common.core.ids import Incarnation
from common.net.messages import Measured
from coordinator.cluster.link_stats import LATENCY_TOKENS, MAX_PEERS, LinkStats, Trial
from coordinator.cluster.registry import Registry, WorkerHandle
from tests.unit.coordinator.cluster.test_registry import join


def pairs(trials: list[Trial]) -> list[tuple[str, str]]:
    return [(trial.prefill.hello.name, trial.decode.hello.name) for trial in trials]


def prefill(registry: Registry, number: int) -> WorkerHandle:
    return join(registry, f"p{number}", f"prefill {number}", "prefill")


def decode(registry: Registry, number: int) -> WorkerHandle:
    return join(registry, f"d{number}", f"decode {number}", "decode")


def test_each_pair_is_tried_when_its_second_end_joins() -> None:
    registry, links = Registry(None), LinkStats()
    assert links.trials(prefill(registry, 0), registry) == []
    assert pairs(links.trials(decode(registry, 0), registry)) == [("p0", "d0")]
    assert pairs(links.trials(decode(registry, 1), registry)) == [("p0", "d1")]
    assert pairs(links.trials(prefill(registry, 1), registry)) == [("p1", "d0"), ("p1", "d1")]


def test_a_joining_worker_is_tried_with_a_few_others() -> None:
    registry, links = Registry(None), LinkStats()
    for number in range(MAX_PEERS + 2):
        assert links.trials(decode(registry, number), registry) == []
    assert len(links.trials(prefill(registry, 0), registry)) == MAX_PEERS


def test_second_link_trial_measures_rate_and_third_latency() -> None:
    registry, links = Registry(None), LinkStats()
    ends = prefill(registry, 0), decode(registry, 0)

    def reported(count: int, seconds: float) -> Trial | None:
        return links.measured(*ends, Measured(Incarnation("decode 0"), "shm", count, seconds))

    rate = reported(1, 9.0)
    assert rate is not None and rate.tokens > LATENCY_TOKENS and links.of(ends[0]) == []
    latency = reported(2_000_000, 0.001)
    assert latency is not None and latency.tokens == LATENCY_TOKENS
    assert reported(1000, 0.00005) is None
    (link,) = links.of(ends[0])
    assert (link.transport, link.gb_per_s, link.latency_us) == ("shm", 2.0, 50.0)


def test_a_pair_that_is_measured_anew_keeps_its_figures_until_then() -> None:
    registry, links = Registry(None), LinkStats()
    ends = prefill(registry, 0), decode(registry, 0)

    def reported(link: str, count: int, seconds: float) -> Trial | None:
        return links.measured(*ends, Measured(Incarnation("decode 0"), link, count, seconds))

    first = links.again(*ends)
    assert first is not None and pairs([first]) == [("p0", "d0")]
    assert reported("shm", 1, 9.0) is not None, "pages are touched first"
    assert reported("shm", 2_000_000, 0.001) is not None
    assert reported("shm", 1000, 0.00005) is None
    again = links.again(*ends)
    assert again is not None and again.tokens == first.tokens
    assert links.again(*ends) is not None, "one that was lost"
    latency = reported("zmq", 1_000_000, 0.001)
    assert latency is not None and latency.tokens == LATENCY_TOKENS
    (link,) = links.of(ends[0])
    assert (link.transport, link.gb_per_s, link.latency_us) == ("shm", 2.0, 50.0)
    assert reported("zmq", 1000, 0.0001) is None
    (link,) = links.of(ends[0])
    assert (link.transport, link.gb_per_s, link.latency_us) == ("zmq", 1.0, 100.0)
    assert links.again(*ends) is not None
    links.forget(ends[1])
    assert links.of(ends[0]) == []
