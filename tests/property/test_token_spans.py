"""Spans of output tokens, split into messages that the coordinator accepts however many tokens there are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.core.ids import RequestId, SequenceId, new_request_id, pack_tokens, unpack_tokens
from common.core.request import FinishReason, Request, SamplingParams
from common.core.sequence import Sequence
from common.net.messages import MAX_SPANS, FromWorker, Logprobs, Tokens
from common.net.wire import MAX_REPORT_BYTES, decode, encode
from common.worker.token_spans import TokenSpanEncoder, stop_id
from coordinator.requests.state import Accepted, RequestState, State

LONGEST = 3 * MAX_SPANS


def shown(position: int) -> Logprobs:
    return Logprobs(-float(position))


@given(
    st.lists(st.tuples(st.sampled_from((1, 2, 50, MAX_SPANS - 1, MAX_SPANS, LONGEST)), st.booleans()), max_size=6),
    st.integers(0, 5),
)
def test_encoder_splits_spans_without_loss_or_reordering(spans: list[tuple[int, bool]], skipped: int) -> None:
    """``skipped``: tokens whose log-probabilities another worker has already reported."""
    writer, lives = TokenSpanEncoder(), [RequestState(1) for _ in spans]
    for number, (length, wanted) in enumerate(spans):
        output = list(range(length))
        logprobs = [shown(position) for position in output[skipped:]] if wanted else []
        sequence = SequenceId(RequestId(number.to_bytes(16, "big")), 0, 0)
        writer.again(sequence, 0, output, FinishReason.LENGTH, -1, logprobs)
        lives[number].place("disagg", None, "d")  # type: ignore[arg-type]
        lives[number].move(State.PREFILLING)
    for message in writer.messages():
        back = decode(encode(message), FromWorker, MAX_REPORT_BYTES)
        assert back == message and len(message.requests) // 16 <= MAX_SPANS
        _take(message, lives, spans, skipped)
    for progress, (length, _) in zip(lives, spans, strict=True):
        assert progress.output == [list(range(length))] and progress.finish == [FinishReason.LENGTH]


def _take(message: Tokens, lives: list[RequestState], spans: list[tuple[int, bool]], skipped: int) -> None:
    ids, at = unpack_tokens(message.ids), 0
    for index, count in enumerate(message.counts):
        number = int.from_bytes(message.requests[16 * index : 16 * index + 16], "big")
        start = message.starts[index]
        news = lives[number].accept(0, 0, start, ids[at : at + count], FinishReason(message.finish[index]))
        assert isinstance(news, Accepted) and news.skip == 0
        if message.logprobs:
            first = skipped if spans[number][1] else LONGEST
            reported = [shown(each) if each >= first else None for each in range(start, start + count)]
            assert list(message.logprobs[at : at + count]) == reported
        at += count
    assert at == len(ids)


def test_as_many_spans_as_there_are_sequences() -> None:
    writer = TokenSpanEncoder()
    for number in range(2 * MAX_SPANS + 1):
        writer.again(SequenceId(RequestId(number.to_bytes(16, "big")), 0, 0), 0, [7], FinishReason.RUNNING, -1, [])
    assert [len(message.counts) for message in writer.messages()] == [MAX_SPANS, MAX_SPANS, 1]


def test_encoder_short_path_equals_general_path() -> None:
    """The short path for one new token per step encodes the same spans as the general one, also when a message is
    full."""
    sequence = Sequence(Request(new_request_id(), pack_tokens([1, 2]), SamplingParams(9, 0, stop_token_ids=(7,))), 0)
    for token in (5, 6, 7):
        sequence.append(token)
        short, long = TokenSpanEncoder(), TokenSpanEncoder()
        for _ in range(MAX_SPANS + 1):
            at = sequence.output_length - 1
            short.add(sequence, at)
            long.again(sequence.id, at, sequence.output, sequence.finish, stop_id(sequence), [])
        assert list(short.messages()) == list(long.messages())
    assert sequence.finish is FinishReason.STOP
