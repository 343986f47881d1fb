"""``tandem bench crosscheck`` compares a tool's figures with those of the times at which the server wrote the
tokens."""

from __future__ import annotations

import pytest

from bench.micro import crosscheck
from common.core.errors import StartError

MOMENTS = [[0.1, 0.2, 0.4], [0.3, 0.4, 0.6]]
"""Times at which each request's tokens were written, in seconds after the request came."""
WRITTEN = {"ttft": 200.0, "tpot": 150.0, "e2el": 500.0}


@pytest.fixture(autouse=True)
def _two_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crosscheck, "REQUESTS", 2)


def test_written_moments_start_at_request() -> None:
    assert crosscheck._written(MOMENTS) == pytest.approx(WRITTEN)
    with pytest.raises(StartError, match="1 requests were answered instead of 2"):
        crosscheck._written(MOMENTS[:1])


def test_guidellm_calls_the_same_by_other_names() -> None:
    """GuideLLM has other names for the same figures; its time per output token includes the first token."""
    requests = [
        {
            "time_to_first_token_ms": 1000 * first,
            "inter_token_latency_ms": 1000 * (last - first) / 2,
            "time_per_output_token_ms": 1000 * last / 3,
            "output_tokens": 3,
        }
        for first, _, last in MOMENTS
    ]
    saved = {"benchmarks": [{"requests": {"successful": requests}}]}
    assert crosscheck.guidellm("guidellm").read(saved) == pytest.approx(WRITTEN)


@pytest.mark.parametrize("tool", [crosscheck.tandem(), crosscheck.vllm("vllm")])
def test_bench_serve_reports_means(tool: crosscheck.Tool) -> None:
    saved = {f"mean_{name}_ms": value for name, value in WRITTEN.items()} | {"median_ttft_ms": 1.0}
    assert tool.read(saved) == pytest.approx(WRITTEN)
