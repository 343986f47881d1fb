"""Trace contexts: what a valid traceparent gives, what is ignored, and which traces are sampled."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.requests.trace_context import MAX_STATE_CHARS, TraceContext, TraceSampler

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


def read(*traceparent: str, state: tuple[str, ...] = (), ratio: float | None = None) -> TraceContext:
    return TraceSampler(ratio).context(traceparent, state)


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True)])
@pytest.mark.parametrize("ratio", [None, 0.0, 1.0])
def test_the_sampled_flag_of_the_caller_wins(flags: str, sampled: bool, ratio: float | None) -> None:
    context = read(f"00-{TRACE}-{SPAN}-{flags}", ratio=ratio)
    assert (context.trace_id, context.parent_id, context.sampled) == (TRACE, SPAN, sampled)
    assert context.span_id not in (SPAN, "0" * 16) and re.fullmatch("[0-9a-f]{16}", context.span_id)
    assert context.headers() == {"traceparent": f"00-{TRACE}-{context.span_id}-0{int(sampled)}"}


@pytest.mark.parametrize(
    "bad",
    [
        "", "00", PARENT.upper(), PARENT[:-1], f"{PARENT}-", f"{PARENT}-00", f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE[:-1]}-{SPAN}-01", f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE}-{SPAN}-01,{PARENT}", f"cc-{TRACE}-{SPAN}-01more", f"00-{TRACE}-{SPAN}-٠١", f"00_{TRACE}_{SPAN}_01",
    ],
)  # fmt: skip
def test_an_invalid_traceparent_begins_a_trace(bad: str) -> None:
    context = read(bad, state=("a=1",), ratio=1.0)
    assert context.trace_id != TRACE and context.parent_id is None and context.state == "" and context.sampled


def test_two_traceparents_begin_a_trace() -> None:
    assert read(PARENT, PARENT).parent_id is None


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    for text in (f"01-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-what-comes-then", f"  {PARENT} "):
        assert read(text).trace_id == TRACE


@pytest.mark.parametrize(
    ("given_state", "kept"),
    [
        (("a=1",), "a=1"),
        (("a=1, b=2", "c@v=3"), "a=1,b=2,c@v=3"),
        (("a=1,,b=2",), "a=1,b=2"),
        (("a=1,a=2",), ""),
        (("A=1",), ""),
        (("a",), ""),
        (("a=",), ""),
        (("a=\u00fc",), ""),
        (("a=" + "x" * 256,), "a=" + "x" * 256),
        (("a=" + "x" * 257,), ""),
        ((",".join(f"k{index}=1" for index in range(32)),), ",".join(f"k{index}=1" for index in range(32))),
        ((",".join(f"k{index}=1" for index in range(33)),), ""),
        (("a=" + "x" * 250, "b=" + "x" * 250, "c=123456789"), ""),
        (("",), ""),
    ],
)
def test_tracestate_is_passed_on_if_valid(given_state: tuple[str, ...], kept: str) -> None:
    context = read(PARENT, state=given_state)
    assert context.state == kept
    assert context.headers().get("tracestate", "") == kept


def test_a_trace_that_begins_here_is_sampled_by_the_ratio() -> None:
    def sampled(ratio: float | None, of: int = 4000) -> int:
        sampler = TraceSampler(ratio)
        return sum(sampler.context().sampled for _ in range(of))

    assert sampled(None) == sampled(0.0) == 0
    assert sampled(1.0) == 4000
    assert 850 < sampled(0.25) < 1150  # six standard deviations
    assert not TraceSampler().records and TraceSampler(0.0).records


def test_the_ratio_selects_the_ids_that_opentelemetry_selects() -> None:
    sampling = pytest.importorskip("opentelemetry.sdk.trace.sampling")
    theirs, ours = sampling.TraceIdRatioBased(0.3), TraceSampler(0.3)
    for context in (ours.context() for _ in range(500)):
        decision = theirs.should_sample(None, int(context.trace_id, 16), "name").decision
        assert context.sampled == decision.is_sampled()


def test_ids_do_not_repeat() -> None:
    contexts = [read(ratio=1.0) for _ in range(500)]
    assert len({context.trace_id for context in contexts}) == len({context.span_id for context in contexts}) == 500


@given(st.lists(st.text(max_size=80), max_size=2), st.lists(st.text(max_size=MAX_STATE_CHARS), max_size=2))
def test_no_header_breaks_it(parents: list[str], states: list[str]) -> None:
    headers = TraceSampler(1.0).context(parents, states).headers()
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", headers["traceparent"])
