"""Flow-control credit of many transfers at once: totals are never exceeded, no transfer starves, all credit is
returned."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.core.ids import RequestId, TransferId
from kvtransfer.flow_control import CreditBook

TOTAL, PEER, EACH = 1000, 600, 100


def transfer(number: int) -> TransferId:
    return TransferId(RequestId(number.to_bytes(16, "big")), 1)


steps = st.lists(st.tuples(st.sampled_from(["open", "landed", "close"]), st.integers(0, 30), st.integers(1, 150)))


@settings(deadline=None)
@given(steps)
def test_no_sum_is_ever_exceeded_and_limits_only_move_forward(steps: list[tuple[str, int, int]]) -> None:
    book = CreditBook(TOTAL, PEER, EACH)
    landed: dict[int, int] = {}
    limits: dict[int, int] = {}
    for what, number, size in steps:
        if what == "open" and number not in landed:
            landed[number], limits[number] = 0, book.open(transfer(number), number % 3)
        elif what == "landed" and number in landed:
            landed[number] += size  # may exceed the limit: the last frame may cross it
            limit = landed[number] + book.landed(transfer(number), landed[number])
            assert limit >= limits[number]
            limits[number] = limit
        elif what == "close":
            book.close(transfer(number))
            landed.pop(number, None)
        assert book.held() <= TOTAL and all(book.held(peer) <= PEER for peer in range(3))
        assert all(max(0, limits[n] - landed[n]) <= EACH for n in landed)
        assert book.held() == sum(max(0, limits[n] - landed[n]) for n in landed)
    for number in landed:
        book.close(transfer(number))
    assert len(book) == 0 and book.held() == 0


@given(st.integers(1, 200), st.integers(1, 12))
def test_credit_divides_half_equally_among_senders(waiting: int, sending: int) -> None:
    book = CreditBook(TOTAL, TOTAL, EACH)
    for number in range(waiting + sending):
        book.open(transfer(number), "peer")
    senders = [transfer(number) for number in range(waiting, waiting + sending)]
    landed = dict.fromkeys(senders, 0)
    for _ in range(3):  # all granted bytes land, one sender after the other
        for each in senders:
            landed[each] += max(1, book.open(each, "peer"))
            book.landed(each, landed[each])
    shares = [book.open(each, "peer") for each in senders]
    assert min(shares) >= min(EACH, TOTAL // 2 // sending)
    assert max(shares) - min(shares) <= 1


def test_credit_repeats_grant_for_repeated_announcement() -> None:
    book = CreditBook(TOTAL, PEER, EACH)
    assert book.open(transfer(1), "a") == book.open(transfer(1), "a") == EACH
    assert book.landed(transfer(1), 30) == book.landed(transfer(1), 30) == book.landed(transfer(1), 10) == EACH
