"""The capture audit: what it finds, and that it finds nothing in a decode step of any architecture that is served.

Each architecture is run twice: on the CPU, where data-dependent operations run, and on the meta device as a stand-in
for a GPU, where everything that the modelling code makes on the host shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from common.attention.interface import ATTENTION, Params, bind, from_transformers
from common.engine.capture_audit import COPY, EXPERTS, HOST_READ, SHAPE, audit, choose_experts, experts_of
from common.model.probe import forward
from common.model.rotary import freeze_rotary
from tests.models import KINDS, POSITIONS, SERVED

pytestmark = pytest.mark.usefixtures("one_thread")
EAGER: dict[str, str] = {}
"""Architectures of the e2e suite whose decode steps cannot be captured, and why. They run eagerly on GPUs."""
EXPERT_KINDS = ("qwen3-moe", "mixtral", "gpt-oss", "deepseek-v3")
ROWS = 4


class _NoAttention:
    """Attention that returns zeros: the backends' kernels are audited with the engine's own step."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: Params
    ) -> torch.Tensor:
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def model_of(kind: str, device: str, dtype: torch.dtype) -> Any:
    transformers.AttentionInterface.register(ATTENTION, from_transformers)
    model_type, fields = KINDS[kind]
    config = transformers.AutoConfig.for_model(model_type, **fields)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=dtype, attn_implementation=ATTENTION).eval().requires_grad_(False)
    freeze_rotary(model, POSITIONS)
    bind(model, _NoAttention())
    return model.to(device)


def step_of(model: Any, device: str = "cpu") -> Callable[[], torch.Tensor]:
    ids, positions = torch.arange(ROWS, device=device)[None], torch.arange(ROWS, device=device)[None] + 7

    def step() -> torch.Tensor:
        with torch.inference_mode():
            return forward(model, ids, positions, None)

    step()  # the first run may fill caches
    return step


def first_blocker(model: Any) -> Callable[[], str]:
    step = step_of(model)
    return lambda: next((each.why for each in audit(step)), "")


@pytest.mark.parametrize("kind", SERVED)
def test_a_decode_step_of_every_served_architecture_can_be_captured(kind: str) -> None:
    model = model_of(kind, "cpu", torch.float32)
    assert choose_experts(model, first_blocker(model)) == EAGER.get(kind, "")
    on_device = model_of(kind, "meta", torch.bfloat16)
    if experts := experts_of(model):
        on_device.set_experts_implementation(experts)
    assert bool(experts) == (kind in EXPERT_KINDS)
    if kind not in EAGER:
        assert audit(step_of(on_device, "meta")) == []


@pytest.mark.parametrize("kind", ["qwen3-moe", "gpt-oss"])
def test_a_loop_over_experts_is_replaced(kind: str) -> None:
    """The loop reads the routing on the host. Each other way computes the same."""
    model = model_of(kind, "cpu", torch.float32)
    model.set_experts_implementation("eager")
    step = step_of(model)
    expected = step()
    why = {blocker.why for blocker in audit(step)}
    assert SHAPE in why and HOST_READ in why
    assert choose_experts(model, first_blocker(model)) == ""
    assert experts_of(model) == EXPERTS[0]
    for experts in EXPERTS:
        model.set_experts_implementation(experts)
        assert audit(step) == []
        torch.testing.assert_close(step(), expected, atol=1e-5, rtol=1e-4)


def test_the_second_way_is_taken_where_the_first_fails() -> None:
    """Some GPUs have no kernel for grouped products, which shows only when a capture fails."""
    model = model_of("mixtral", "cpu", torch.float32)
    tried: list[str] = []

    def obstacle() -> str:
        tried.append(experts_of(model))
        return "" if tried[-1] == works else f"no capture with {tried[-1]}"

    works = "batched_mm"
    assert choose_experts(model, obstacle) == "" and experts_of(model) == "batched_mm"
    assert tried == ["grouped_mm", "batched_mm"]
    works = "none"
    model.set_experts_implementation("eager")
    assert choose_experts(model, obstacle) == "no capture with eager" and experts_of(model) == "eager"


X, MASK, COUNTS = torch.arange(6.0), torch.tensor([True, False] * 3), torch.tensor([1, 2, 0, 1, 1, 1])


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda: X.sum().item(), HOST_READ),
        (lambda: bool(X[0] > 0), HOST_READ),
        (lambda: torch.equal(X, X), HOST_READ),
        (lambda: X[1:].tolist(), None),  # torch reads the memory itself: only capture finds it
        (lambda: X.nonzero(), SHAPE),
        (lambda: X[MASK], SHAPE),
        (lambda: torch.masked_select(X, MASK), SHAPE),
        (lambda: X.unique(), SHAPE),
        (lambda: X.repeat_interleave(COUNTS), SHAPE),
        (lambda: X.repeat_interleave(COUNTS, output_size=6), None),
        (lambda: X.repeat_interleave(2), None),
        (lambda: X.clone().index_put_((MASK,), torch.arange(3.0)), SHAPE),
        (lambda: X.clone().masked_fill_(MASK, 0), None),
        (lambda: X[COUNTS], None),
        (lambda: X.clone().index_put_((COUNTS,), X), None),
        (lambda: torch.where(MASK, X, 0.0), None),
        (lambda: X.to("meta"), COPY),
        (lambda: torch.empty(6, device="meta").copy_(X), COPY),
        (lambda: torch.tensor([1.0]), COPY),
        (lambda: torch.ones(3, device="meta") + 1, None),
        (lambda: X.to(torch.bfloat16), None),
    ],
)
def test_audit_finds_operation_that_stops_capture(step: Callable[[], object], why: str | None) -> None:
    found = audit(step)
    assert [blocker.why for blocker in found] == ([] if why is None else [why])
    assert all(f"{Path(__file__).name}:" in blocker.place and blocker.times == 1 for blocker in found)


def test_a_blocker_is_described_in_words() -> None:
    (blocker,) = audit(lambda: [X.sum().item() for _ in range(3)])
    assert blocker.times == 3
    assert str(blocker).startswith("the host reads a number (aten._local_scalar_dense.default at common/engine/test_")
