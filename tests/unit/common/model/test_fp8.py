"""Linear layers in float8, and whole engines with them and with KV in float8, against slow emulations."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from common.checkpoint.files import open_checkpoint
from common.engine.loading import load_engine
from common.engine.runner import ModelEngine
from common.kernels.e4m3 import E4M3
from common.model.collective import SharedMemoryCollective
from common.model.fp8 import Fp8Linear, round_linears, row_scales
from common.model.parallel_layers import GatheredLinear, SummedLinear
from common.platform.wiring import Wiring

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_kv_blocks": 16, "max_batched_tokens": 64, "max_num_seqs": 4, "batch_hint": 1,
    "max_model_len": 128,
}  # fmt: skip
NUMBERS = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
NUMBERS = NUMBERS[~NUMBERS.isnan()].unique()


ODD = (torch.arange(len(NUMBERS)) - len(NUMBERS) // 2) % 2
"""For each number, whether its code is odd; the one in the middle is 0."""


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Round ``x`` (float32) to the numbers of the type by looking at all of them; the even one of two wins."""
    distance = (x.double().reshape(-1, 1) - NUMBERS).abs()
    return NUMBERS[(distance + ODD * 1e-9).argmin(1)].view(x.shape)


def slowly(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias`` in float64 over numbers that were rounded one by one."""
    by_row, by_token = (each.abs().amax(1, keepdim=True) / 448 for each in (weight, x))
    out = (rounded(x / by_token) @ rounded(weight / by_row).T) * by_token * by_row.T
    return out if bias is None else out + bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 32, 16), (7, 48, 30), (3, 5, 2)], ids=str)
def test_a_linear_layer_multiplies_rounded_numbers(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inner, outer = shape
    torch.manual_seed(sum(shape))
    weight, x = torch.randn(outer, inner).to(dtype), (torch.randn(rows, inner) * 50).to(dtype)
    bias = torch.randn(outer).to(dtype) if outer > 2 else None
    found, wanted = Fp8Linear(weight, bias)(x), slowly(x.float(), weight.float(), bias)
    assert found.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert (found.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_it_equals_torchs_own_operator() -> None:
    """torch implements the operator of GPUs on the CPU, too."""
    torch.manual_seed(3)
    weight, x = torch.randn(32, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    linear = Fp8Linear(weight, None)
    scale = row_scales(x.float())
    theirs = torch._scaled_mm(
        (x.float() / scale).to(E4M3), linear.rounded.t(), scale_a=scale, scale_b=linear.scale[None],
        out_dtype=torch.bfloat16, use_fast_accum=False,
    )  # fmt: skip
    assert (linear(x).float() - theirs.float()).abs().max() <= 2**-7 * theirs.float().abs().max()


def test_a_tokens_result_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(4)
    linear = Fp8Linear(torch.randn(24, 40), None)
    x = torch.randn(9, 40)
    x[3] *= 1e6
    together = linear(x)
    for row in range(9):
        assert torch.allclose(linear(x[row : row + 1])[0], together[row], rtol=1e-5, atol=1e-5)


def test_rows_of_zeros_and_no_rows_are_computed_and_nan_is_seen() -> None:
    linear = Fp8Linear(torch.cat([torch.zeros(1, 8), torch.randn(3, 8)]), None)
    assert linear(torch.zeros(2, 3, 8)).abs().max() == 0 and linear(torch.randn(2, 8))[:, 0].abs().max() == 0
    assert linear(torch.zeros(0, 8)).shape == (0, 4)
    assert linear(torch.full((1, 8), torch.nan)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_multiply_the_slices_of_one_weight(dtype: torch.dtype) -> None:
    """Each has the columns that one process would have, in the same units, and rounds its part of a token."""
    torch.manual_seed(5)
    whole, bias = nn.Linear(64, 24).requires_grad_(False).to(dtype), torch.randn(24).to(dtype)
    whole.weight[3] *= 1e3
    whole.weight[:, 40] *= 20  # the largest numbers of all rows are with the second rank
    x = (torch.randn(2, 5, 64) * 3).to(dtype)
    x[0, 1, 7] = 500.0

    @torch.inference_mode()
    def rank_of(collective: SharedMemoryCollective) -> tuple[Fp8Linear, torch.Tensor]:
        first = collective.rank * 32
        share = nn.Linear(32, 24, dtype=dtype).requires_grad_(False)
        share.weight.copy_(whole.weight[:, first : first + 32])
        share.bias.copy_(bias)
        model = nn.Sequential(SummedLinear(share, collective, (first, first + 32)))
        (linear,) = round_linears(model, collective)
        return linear, model(x)

    with ExitStack() as stack:
        stack.enter_context(closing(wiring := Wiring.create(2)))
        ranks = [stack.enter_context(closing(SharedMemoryCollective(rank, 2, wiring))) for rank in range(2)]
        with ThreadPoolExecutor(2) as threads:
            (one, got), (two, also) = threads.map(rank_of, ranks)
    expected = Fp8Linear(whole.weight, None)
    assert torch.equal(torch.cat([one.rounded.float(), two.rounded.float()], 1), expected.rounded.float())
    assert torch.equal(one.scale, expected.scale) and torch.equal(two.scale, expected.scale)
    assert torch.equal(got, also)
    rows, weight = x.view(-1, 64).float(), whole.weight.float()
    by_row = weight.abs().amax(1, keepdim=True) / 448
    wanted = bias.double().expand(10, 24).clone()
    for part in (slice(32), slice(32, 64)):
        by_token = rows[:, part].abs().amax(1, keepdim=True) / 448
        wanted += (rounded(rows[:, part] / by_token) @ rounded(weight[:, part] / by_row).T) * by_token * by_row.T
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert ((got.view(-1, 24).double() - wanted).abs().amax(0) <= tolerance * wanted.abs().amax(0)).all()


def test_the_output_layer_keeps_its_precision() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 4)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    model = Model()
    assert len(round_linears(model)) == 2 and type(model.head) is nn.Linear
    split = Model()
    split.head = GatheredLinear(split.head, None, [4])  # type: ignore[assignment, arg-type]
    assert len(round_linears(split)) == 2 and type(split.head.linear) is nn.Linear


def engine_of(
    path: Path, quantization: Literal["none", "fp8"] = "none", kv: Literal["auto", "fp8"] = "auto", **more: Any
) -> ModelEngine:
    return load_engine(open_checkpoint(str(path)), **OPTIONS | more, quantization=quantization, kv_cache_dtype=kv)


def test_what_is_in_8_bits_is_said_and_is_part_of_the_fingerprint(checkpoint: Callable[[str], Path]) -> None:
    prints: set[str] = set()
    for quantization, kv, words in (
        ("none", "auto", ""),
        ("fp8", "auto", "linear layers in fp8"),
        ("none", "fp8", "KV in fp8"),
        ("fp8", "fp8", "KV in fp8"),
    ):
        engine = engine_of(checkpoint("llama"), quantization, kv)  # type: ignore[arg-type]
        prints.add(engine.fingerprint)
        assert words in " ".join(engine.notes)
        assert engine.layout.dtype == ("fp8" if kv == "fp8" else "float32")
        assert ("do not know KV in fp8" in " ".join(engine.notes)) == (kv == "fp8")
        engine.close()
    assert len(prints) == 4
    bfloat16 = engine_of(checkpoint("llama"), "none", "fp8", dtype="bfloat16")
    assert bfloat16.fingerprint not in prints, "KV computed in another type is other KV"
    bfloat16.close()
