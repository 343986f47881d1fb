"""A worker whose coordinator leaves: it joins the next one, and ends what the first has placed."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.ids import RequestId, TransferId, pack_tokens, pack_transfers
from common.net.messages import Lease, Leaving, Logprobs, NameTaken, Rejoin, RequestFailed, Reserve, Timing, Tokens
from common.net.sockets import send
from common.worker.former import MOST_FORMER, FormerCoordinator
from tests.fakes.oracle import OracleEngine
from tests.unit.workers import Bench, make_request


def hand_over(bench: Bench, worker: str) -> bytes:
    """Let the coordinator of ``worker`` leave, and wait until the next one, which is the same socket, has welcomed it.
    Returns the identity of the session that stays; ``bench.routes`` has the new one."""
    before, joins = bench.routes[worker], bench.joins
    bench.send(worker, Leaving())
    bench.until(lambda: bench.joins > joins and bench.workers[worker].membership.joined)
    assert bench.routes[worker] != before, "the old connection must not lose its identity to the new one"
    return before


def test_tokens_go_to_the_coordinator_whose_request_it_is(pair: Bench) -> None:
    first, second = make_request(100, 200), make_request(90, 200)
    pair.place(first, "prefill-0", "decode-1")
    pair.until(lambda: len(pair.streams[first.id, 1, 0]) > 3)
    former = {name: hand_over(pair, name) for name in pair.workers}
    pair.until(lambda: set(former.values()) == pair.moved)
    begun_before = set(pair.begun)
    pair.place(second, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(first, second))
    pair.check(first)
    pair.check(second)
    assert (former["decode-1"], first.id, 1) in pair.begun
    since = pair.begun - begun_before
    assert {identity for identity, request, _ in since if request == second.id} <= set(pair.routes.values())
    assert not any(request == first.id for identity, request, _ in pair.begun if identity in pair.routes.values())


def test_each_coordinator_has_a_lease_of_its_own(pair: Bench) -> None:
    """A Lease lists only what its sender has placed."""
    first, second = make_request(100, 400), make_request(90, 400)
    pair.place(first, "prefill-0", "decode-1")
    pair.until(lambda: len(pair.streams[first.id, 1, 0]) > 3)
    former = hand_over(pair, "decode-1")
    pair.place(second, "prefill-0", "decode-1")
    pair.until(lambda: len(pair.streams[second.id, 1, 0]) > 3)
    decode, renewed = pair.workers["decode-1"], pair.renewed
    pair.send("decode-1", Lease(pack_transfers([TransferId(second.id, 1)]), 0))
    assert send(pair.socket, Lease(pack_transfers([TransferId(first.id, 1)]), 0), former)
    pair.until(lambda: pair.renewed == renewed + 2)
    assert decode.holdings() == {TransferId(first.id, 1), TransferId(second.id, 1)}
    assert send(pair.socket, Lease(b"", 0), former)
    pair.until(lambda: decode.holdings() == {TransferId(second.id, 1)})
    pair.send("decode-1", Lease(b"", 0))
    pair.until(lambda: not decode.holdings())


@pytest.mark.parametrize("end", [Rejoin(), NameTaken("another"), "silent"], ids=["rejoin", "name taken", "silent"])
def test_what_a_coordinator_has_placed_ends_with_it(
    pair: Bench, end: Rejoin | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_request(100, 400), make_request(90, 100)
    pair.place(first, "prefill-0", "decode-1")
    pair.until(lambda: len(pair.streams[first.id, 1, 0]) > 3)
    former = hand_over(pair, "decode-1")
    pair.place(second, "prefill-0", "decode-1")
    decode = pair.workers["decode-1"]
    pair.until(lambda: TransferId(second.id, 1) in decode.holdings())
    (session,) = decode.membership.former
    if isinstance(end, str):
        monkeypatch.setattr(session, "_leased_until", time.monotonic())
    else:
        assert send(pair.socket, end, former)
    pair.until(lambda: not decode.membership.former)
    assert TransferId(first.id, 1) not in decode.holdings()
    pair.until(lambda: pair.done(second))
    pair.check(second)


def test_a_request_placed_late_by_a_coordinator_that_leaves_is_its_own(pair: Bench) -> None:
    """It may place requests until it has stopped accepting them."""
    former = {name: hand_over(pair, name) for name in pair.workers}
    pair.routes, now = former, pair.routes
    late = make_request(100, 20)
    pair.place(late, "prefill-0", "decode-1")
    too_long = make_request(10, 100_000)
    pair.send("decode-1", Reserve(too_long, 1, pair.peer("prefill-0")))
    pair.until(lambda: pair.done(late) and (too_long.id, 1) in pair.failed)
    pair.check(late)
    assert {identity for identity, request, _ in pair.begun if request == late.id} == set(former.values())
    pair.routes = now


def test_it_dials_again_while_the_address_leads_to_the_coordinator_that_leaves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.worker.membership.REDIAL_S", 0.05)
    worker = bench.add("decode", OracleEngine(64))
    bench.until(lambda: worker.membership.joined)
    bench.lost_welcomes = 2
    bench.send("decode-0", Leaving())
    for joins in (2, 3):
        bench.until(lambda: bench.joins == joins)  # noqa: B023
        bench.send("decode-0", Leaving())
    bench.until(lambda: worker.membership.joined)
    assert bench.joins == 4 and len(worker.membership.former) == 1


def test_it_says_goodbye_to_all_and_keeps_no_more_sessions_than_allowed(bench: Bench) -> None:
    worker = bench.add("decode", OracleEngine(64))
    bench.until(lambda: worker.membership.joined)
    for _ in range(MOST_FORMER):
        hand_over(bench, "decode-0")
    joins = bench.joins
    bench.deliver("decode-0", Leaving())
    assert len(worker.membership.former) == MOST_FORMER and worker.membership.joined and bench.joins == joins
    del bench.workers["decode-0"]
    worker.drain(0.0)
    worker.close()
    bench.until(lambda: len(bench.goodbyes) == MOST_FORMER + 1)
    worker.cache.pool.generations = worker.cache.pool.generations.copy()
    worker.engine.close()  # type: ignore[attr-defined]


_SPANS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans()), min_size=1, max_size=12)


@given(_SPANS)
def test_a_message_is_split_by_request_without_loss(spans: list[tuple[int, int, bool]]) -> None:
    ids = [RequestId(bytes([number]) * 16) for number in range(4)]
    noise = random.Random(str(spans))
    tokens = [[noise.randrange(1000) for _ in range(count)] for _, count, _ in spans]
    logprobs = [[Logprobs(-1.0 * token, b"", ()) if wanted else None for token in part]
                for part, (_, _, wanted) in zip(tokens, spans, strict=True)]  # fmt: skip
    columns = [[at, 1, 7 * at, count, at % 3, -1] for at, (_, count, _) in enumerate(spans)]

    def message(which: list[int]) -> Tokens:
        flat = [entry for at in which for entry in logprobs[at]]
        return Tokens(
            b"".join(ids[spans[at][0]] for at in which),
            *(tuple(columns[at][column] for at in which) for column in range(6)),  # type: ignore[arg-type]
            pack_tokens([token for at in which for token in tokens[at]]),  # type: ignore[call-arg]
            tuple(flat) if any(flat) else (),
        )

    former = object.__new__(FormerCoordinator)
    former.requests = {ids[0], ids[2]}
    mine = [at for at, (request, _, _) in enumerate(spans) if request in (0, 2)]
    rest = [at for at in range(len(spans)) if at not in mine]
    assert former.share(message(list(range(len(spans))))) == (
        message(mine) if mine else None,
        message(rest) if rest else None,
    )
    for request in ids:
        for each in (Timing(request, 1, {}), RequestFailed(request, 1, "deadline", "", False)):
            assert former.share(each) == ((each, None) if request in former.requests else (None, each))
