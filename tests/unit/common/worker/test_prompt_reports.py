"""Log-probabilities of prompts leave a worker once each and in order, and can be sent again."""

from __future__ import annotations

import itertools

import pytest

from common.core.errors import WireError
from common.core.ids import TransferId
from common.net.messages import MAX_PROMPT_ENTRIES, FromWorker, Generate, PromptLogprobs, Resend, ResendPrompt
from common.net.prompt_columns import from_message, to_messages
from common.net.wire import MAX_REPORT_BYTES, decode, encode
from common.worker import prompt_reports
from tests.fakes.oracle import OracleEngine, oracle_prompt
from tests.unit.workers import Bench, make_request


def test_prompts_are_scored_on_prefill_while_they_are_computed(pair: Bench) -> None:
    asked = ((1, 1, 2), (300, 2, 1), (70, 1, 0))
    requests = [make_request(length, 5, n=n, prompt_logprobs=tops) for length, n, tops in asked]
    for request in requests:
        pair.place(request, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(*requests))
    for request in requests:
        pair.check_prompt(request)
        pair.check(request)
    assert len(pair.prompts[requests[1].id, 1]) > 3, "one message per chunk"


def test_a_cached_prefix_is_computed_again_for_its_log_probabilities(pair: Bench) -> None:
    first = make_request(200, 3, seed=5)
    again = make_request(200, 3, seed=5, prompt_logprobs=1)
    rest = make_request(200, 3, seed=5, prompt_logprobs=1, scored=100)
    for request in (first, again, rest):
        pair.place(request, "prefill-0", "decode-1")
        pair.until(lambda request=request: pair.done(request))
        pair.check(request)
    pair.check_prompt(again)
    pair.check_prompt(rest)
    cached = [each.values["cached_tokens"] for each in pair.timings if "prefill_ms" in each.values]
    assert cached[:1] + [each for each in cached if each] != [0.0] and 0.0 in cached and 96.0 in cached


@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_request_without_output_ends_with_its_prompt(bench: Bench, role: str, n: int) -> None:
    worker = bench.add(role, OracleEngine(64))
    requests = [make_request(length, 0, n=n, prompt_logprobs=1) for length in (1, 2, 65, 200)]
    for request in requests:
        bench.send(f"{role}-0", Generate(request, 1))
    bench.until(lambda: bench.done(*requests))
    for request in requests:
        bench.check_prompt(request)
        bench.check(request)
    bench.until(bench.quiet)
    bench.finished.clear()
    for choice in range(n):  # the end can be sent again, although there is no token
        bench.send(f"{role}-0", Resend(requests[0].id, 1, choice, 0))
    bench.until(lambda: bench.done(requests[0]))
    assert worker.planner.running == 0


def test_a_prefill_worker_refuses_to_decode(bench: Bench) -> None:
    worker = bench.add("prefill", OracleEngine(64))
    bench.send("prefill-0", Generate(make_request(10, 2), 1))
    bench.until(lambda: worker.membership.bad_messages)
    assert not worker.holdings()


@pytest.mark.parametrize("n", [1, 3])
def test_a_prefill_worker_computes_a_single_token_alone(bench: Bench, n: int) -> None:
    worker = bench.add("prefill", OracleEngine(64))
    request = make_request(100, 1, n=n)
    bench.send("prefill-0", Generate(request, 1))
    bench.until(lambda: bench.done(request))
    bench.check(request)
    bench.until(bench.quiet)
    assert worker.planner.running == 0 and not worker.holdings()


def test_lost_log_probabilities_are_sent_again(bench: Bench) -> None:
    worker = bench.add("prefill", OracleEngine(64))
    request = make_request(300, 0, prompt_logprobs=2)
    bench.send("prefill-0", Generate(request, 1))
    bench.until(lambda: bench.done(request))
    bench.prompts.clear()
    bench.begun.clear()
    bench.send("prefill-0", ResendPrompt(request.id, 1, 130))
    bench.until(lambda: (spans := bench.prompts[request.id, 1]) and spans[-1].end == 300)
    spans = bench.prompts[request.id, 1]
    assert spans[0].start == 130 and all(a.end == b.start for a, b in itertools.pairwise(spans))
    worker.prompt_reports.forget(worker.clock() + prompt_reports.KEPT_S + 1)
    worker.prompt_reports.resend(TransferId(request.id, 1), 1)
    assert not worker.prompt_reports._kept and worker.prompt_reports._bytes == 0


def test_what_is_kept_is_bounded_in_bytes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_reports, "KEPT_BYTES", 3000)
    worker = bench.add("prefill", OracleEngine(64))
    requests = [make_request(150, 0, prompt_logprobs=0) for _ in range(6)]
    for request in requests:
        bench.send("prefill-0", Generate(request, 1))
    bench.until(lambda: bench.done(*requests))
    for request in requests:
        bench.check_prompt(request)
    assert 0 < worker.prompt_reports._bytes <= 3000


@pytest.mark.parametrize("colocated", [False, True])
def test_a_preempted_prompt_loses_and_repeats_nothing(bench: Bench, colocated: bool) -> None:
    """Streams of higher priority take the blocks of a prompt that is half computed."""
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 8}
    worker = bench.add("colocated" if colocated else "decode", OracleEngine(21), **small)
    name = next(iter(bench.workers))
    prompt = make_request(190, 3, prompt_logprobs=1, priority=5)
    streams = [make_request(20, 80, priority=0) for _ in range(3)]
    for request in (*streams, prompt):
        bench.deliver(name, Generate(request, 1))
    bench.until(lambda: bench.done(prompt, *streams))
    for request in (prompt, *streams):
        bench.check(request)
    bench.check_prompt(prompt)
    assert worker.planner.preemptions


@pytest.mark.parametrize("tops", [0, 1, 20])
def test_messages_are_small_and_keep_every_number(tops: int) -> None:
    prompt = list(range(5000))
    span = oracle_prompt(prompt, 1, 5000, tops)
    messages = list(to_messages(TransferId(make_request(1, 1).id, 3), span))
    back = [from_message(decode(encode(message), FromWorker, MAX_REPORT_BYTES)) for message in messages]
    assert b"".join(each.logprobs.tobytes() for each in back) == span.logprobs.tobytes()
    assert [(each.start, each.end) for each in back] == [
        (start, min(start + MAX_PROMPT_ENTRIES // (1 + tops), 5000))
        for start in range(1, 5000, MAX_PROMPT_ENTRIES // (1 + tops))
    ]
    assert back[-1] == span.part(back[-1].start, 5000)


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": b"\1\0\0\0"},
        {"logprobs": b""},
        {"top": b"\0\0\0\0"},
        {"top_ids": b"123"},
        {"logprobs": bytes(8), "ranks": bytes(8)},
        {"logprobs": b"\0\0\xc0\x7f" * 2},
        {"logprobs": b"\0\0\x80\x7f" * 2},
        {"top": b"\0\0\xc0\x7f" * 4},
        {"top": b"\0\0\x80\x7f" * 4},
    ],
    ids=str,
)
def test_messages_that_contradict_themselves_are_refused(changes: dict[str, bytes]) -> None:
    fields = {"logprobs": bytes(8), "ranks": b"\1\0\0\0" * 2, "top_ids": bytes(16), "top": bytes(16)}
    from_message(PromptLogprobs(make_request(1, 1).id, 1, 1, **fields))
    with pytest.raises(WireError):
        from_message(PromptLogprobs(make_request(1, 1).id, 1, 1, **(fields | changes)))
