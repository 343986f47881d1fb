"""Linear layers, norms and decoder layers in C equal those of torch and transformers, on every instruction set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.checkpoint.files import open_checkpoint
from common.core.ids import BlockId
from common.core.sequence import Batch, Segment
from common.engine.loading import load_engine
from common.engine.runner import sequence_of
from common.kernels import cpu
from common.model import linears
from common.model.compact import CompactLinear
from common.model.layers import FusedLayer, NativeNorm, fuse_layers
from common.model.linears import NativeLinear, PackedLinear, pack_linears
from common.model.load import load_model
from common.platform import memory

library = cpu.library()
VARIANTS = library.variants if library else ()
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    assert library is not None
    library.use(request.param)
    yield request.param
    library.use(VARIANTS[0])


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    error = (got.double() - expected).abs().max()
    assert error <= TOLERANCE[got.dtype] * max(1.0, float(expected.abs().max())), float(error)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "shape", [(1, 1, 2), (5, 7, 16), (6, 64, 64), (13, 200, 130), (27, 80, 94), (40, 96, 48), (77, 130, 66)], ids=str
)
@pytest.mark.sampled
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer(
    variant: str, threads: int, dtype: torch.dtype, shape: tuple[int, int, int], bias: bool
) -> None:
    rows, out, in_features = shape
    torch.manual_seed(0)
    weight, x = torch.randn(out, in_features).to(dtype), torch.randn(rows, in_features).to(dtype)
    offset = torch.randn(out).to(dtype) if bias else None
    linear = NativeLinear(weight, offset)
    expected = x.double() @ weight.double().t() + (0 if offset is None else offset.double())
    assert_near(linear(x[None])[0], expected)
    assert_near(linear.rows(x.t().contiguous().t()), expected)
    residual = torch.randn(rows, out).to(dtype)
    total = residual.clone()
    linear.add_to(total, x)
    assert_near(total, residual.double() + expected)
    assert linear(x[:0]).shape == (0, out)


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [1, 4, 7, 16, 77, 400])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_float32_weights_that_are_bfloat16_take_half_of_the_room(
    variant: str, threads: int, rows: int, activation: str | None
) -> None:
    """The results are bit-identical to those of weights kept as float32."""
    torch.manual_seed(7)
    weight, x = torch.randn(2 * 112, 514).bfloat16().float(), torch.randn(rows, 514)
    more = torch.cat([weight[:112], torch.randn(16, 514), weight[112:], torch.randn(16, 514)])  # full float32 precision
    half, whole = NativeLinear(weight, None, activation), NativeLinear(more, None, activation)
    assert (half.packed.dtype, whole.packed.dtype) == (torch.bfloat16, torch.float32)
    got, expected = half.rows(x), whole.rows(x)
    if activation is None:
        expected = torch.cat([expected[:, :112], expected[:, 128:240]], dim=1)
    assert torch.equal(got, expected[:, : half.out_features])


def test_no_bit_of_a_float32_is_lost(variant: str) -> None:
    """Each row holds one number and each weight is 1 or -1: numbers survive, also the largest, infinities and NaN."""
    torch.manual_seed(8)
    numbers = torch.randint(-(2**31), 2**31 - 1, (514,), dtype=torch.int32).view(torch.float32)
    numbers = torch.where(numbers.isfinite() & (numbers.abs() > 1e-30), numbers, torch.tensor(torch.pi))
    odd = [torch.inf, -torch.inf, torch.finfo(torch.float32).max, torch.finfo(torch.float32).min, 0.0, -1e-30, 1 / 3]
    numbers[: len(odd)] = torch.tensor(odd)
    signs = torch.tensor([1.0, -1.0]).repeat(257)
    got = NativeLinear(torch.diag(signs), None).rows(torch.diag(numbers))
    finite = numbers.isfinite()
    assert torch.equal(got.diagonal()[finite], (numbers * signs)[finite])
    assert not got[~finite].isfinite().any(), "infinity times zero is no number"
    none = torch.tensor([0x7F800001, 0x7FC00000], dtype=torch.int32).view(torch.float32)[:, None].repeat(1, 64)
    assert NativeLinear(torch.ones(32, 64), None).rows(none).isnan().all()


@pytest.mark.parametrize("features", [768, 4096])
@pytest.mark.parametrize("signed", [True, False])
def test_whole_float32_weights_are_multiplied_as_exactly_as_by_torch(variant: str, signed: bool, features: int) -> None:
    """The error bound also holds if all products have one sign, so that truncation errors add up.

    The rounding error of a sum of n numbers of size s is about sqrt(n) u s (Higham and Mary, "A new approach to
    probabilistic rounding error analysis", 2019), and the largest of some thousand such sums hardly exceeds it. If b
    numbers at a time are summed from zero and m such sums are then added up, it is about sqrt(b + m) u s. Vectors sum
    64 products from zero (KC_STEPS of native.c); tiles sum 16 even and 16 odd ones, each of six pairs of parts, and
    leave out parts below 2^-22 of a product. The bound is not taken from torch, whose implementation depends on the
    machine.
    """
    if variant == "amx_bf16" and features > 768:
        pytest.skip("the smallest parts are lost alike in a large sum, not at random")
    torch.manual_seed(9)
    weight, x = torch.randn(96, features), torch.randn(40, features)
    if not signed:
        weight, x = weight.abs(), x.abs()
    exact = x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t()
    error = ((NativeLinear(weight, None).rows(x).double() - exact).abs() / size).max()
    if variant == "amx_bf16":
        assert error <= (16 + 6 * features / 32) ** 0.5 * 2**-24 + 2**-22
    else:
        assert error <= (64 + features / 64) ** 0.5 * 2**-24


@pytest.mark.parametrize("kept", ["whole", "bfloat16"])
def test_an_infinite_weight_makes_its_column_infinite_or_no_number(variant: str, kept: str) -> None:
    """No other column is affected."""
    torch.manual_seed(10)
    weight, x = torch.randn(96, 64), torch.randn(40, 64)
    weight = weight.bfloat16().float() if kept == "bfloat16" else weight
    expected = x.double() @ weight.double().t()
    weight[[3, 40, 95], [0, 17, 63]] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    got = NativeLinear(weight, None).rows(x)
    odd = [3, 40, 95]
    assert not got[:, odd].isfinite().any()
    rest = [column for column in range(96) if column not in odd]
    assert_near(got[:, rest], expected[:, rest])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kept", ["whole", "bfloat16"])
@pytest.mark.parametrize("inputs", [322, 4514])
def test_a_row_does_not_depend_on_those_beside_it(variant: str, dtype: torch.dtype, kept: str, inputs: int) -> None:
    """Long rows are summed in chunks if there are many, and short ones at once, in the same order."""
    torch.manual_seed(6)
    weight, x = torch.randn(2 * 48, inputs), torch.randn(80, inputs).to(dtype)
    weight = (weight.bfloat16() if kept == "bfloat16" else weight).to(dtype)
    for activation in (None, "silu"):
        linear = NativeLinear(weight, None, activation)
        together = linear.rows(x)
        for rows in (1, 5, 16, 17, 32, 33, 79):
            assert torch.equal(linear.rows(x[:rows]), together[:rows])
            assert torch.equal(linear.rows(x[-rows:]), together[-rows:])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("columns", [288, 300, 370])
@pytest.mark.parametrize("inputs", [64, 66])
@pytest.mark.parametrize("rows", [5, 70])
def test_two_threads_have_the_bits_of_one(
    variant: str, dtype: torch.dtype, columns: int, inputs: int, rows: int
) -> None:
    """Also with a column count that is no multiple of the vector width: one thread computes only whole vectors."""
    torch.manual_seed(7)
    linear = NativeLinear(torch.randn(columns, inputs).to(dtype), None)
    x, residual = torch.randn(rows, inputs).to(dtype), torch.randn(rows, columns).to(dtype)
    before, totals = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            linear.add_to(total := residual.clone(), x)
            totals.append(total)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*totals)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kept", ["whole", "bfloat16"])
@pytest.mark.parametrize("shape", [(400, 70, 2048), (33, 90, 4160), (390, 2900, 2112), (70, 48, 20002)], ids=str)
def test_many_and_long_rows_go_in_runs_and_chunks(
    variant: str, threads: int, dtype: torch.dtype, kept: str, shape: tuple[int, int, int]
) -> None:
    """Also with so many columns that not all sums are kept at once, and with rows that are whole pages apart."""
    rows, out, inputs = shape
    torch.manual_seed(1)
    weight, x, offset = torch.randn(out, inputs), torch.randn(rows, inputs).to(dtype), torch.randn(out).to(dtype)
    weight = weight.bfloat16().float().to(dtype) if kept == "bfloat16" else weight.to(dtype)
    linear = NativeLinear(weight, offset)
    total = torch.ones(rows, out).to(dtype)
    linear.add_to(total, x)
    assert_near(total, x.double() @ weight.double().t() + offset.double() + 1)


@pytest.mark.skipif(not VARIANTS, reason="no compiled kernels")
def test_gathered_weights_lie_behind_one_another_in_large_pages() -> None:
    torch.manual_seed(3)
    layers = [NativeLinear(torch.randn(rows, 510), None) for rows in (33, 4096, 2048)]
    x = torch.randn(7, 510)
    before = [layer.rows(x) for layer in layers]
    linears.gather(layers)
    starts = [layer.packed.data_ptr() for layer in layers]
    assert starts[0] % memory.LARGE_PAGE == 0
    for layer, start, following in zip(layers, starts, starts[1:], strict=False):
        assert 0 <= following - start - layer.packed.nbytes < 64
    assert all(torch.equal(layer.rows(x), expected) for layer, expected in zip(layers, before, strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", linears.ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(9, 64), (45, 2560)], ids=str)
def test_a_gated_linear_layer(variant: str, dtype: torch.dtype, name: str, bias: bool, shape: tuple[int, int]) -> None:
    torch.manual_seed(2)
    rows, inputs = shape
    weight, x = torch.randn(2 * 112, inputs).to(dtype), (torch.randn(rows, inputs) * 3).to(dtype)
    x[0] = 0
    x[1] *= 30  # an exponential would overflow
    offset = torch.randn(2 * 112).to(dtype) if bias else None
    gate, up = (x.double() @ weight.double().t() + (0 if offset is None else offset.double())).chunk(2, dim=-1)
    activation = nn.SiLU() if name == "silu" else nn.GELU("tanh")
    assert_near(NativeLinear(weight, offset, name).rows(x), activation(gate) * up)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [1, 16, 77, 768])
def test_a_norm(variant: str, dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(3)
    x, weight = (torch.randn(2, 5, dim) * 4).to(dtype), torch.randn(dim).to(dtype)
    exact = x.double()
    expected = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_near(NativeNorm(weight, 1e-5)(x), expected)


def load(path: Path, dtype: str = "float32") -> Any:
    return load_model(open_checkpoint(str(path)), dtype)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use our own layers even if they are not the faster ones on this machine."""
    monkeypatch.setattr("common.model.layers.native_pays", lambda dtype: True)
    monkeypatch.setattr(linears, "native_pays", lambda dtype: True)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoder_layers_of_the_common_shape_are_fused(
    kind: str, dtype: str, variant: str, everywhere: None, checkpoint: Callable[[str], Path]
) -> None:
    """That fusing changes no result is checked by :func:`fuse_layers` itself and by the logits in test_logits.py."""
    model = load(checkpoint(kind), dtype)
    assert fuse_layers(model) == len(model.model.layers) > 0
    assert all(isinstance(layer, FusedLayer) for layer in model.model.layers)
    assert isinstance(model.model.norm, NativeNorm)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_quantised_engine(compiled: bool, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Int8 weights need a quarter of float32's bytes, give similar logits, and change the fingerprint, so that KV of
    the two engines is never exchanged."""
    path = open_checkpoint(str(checkpoint("llama-untied")))
    options = {"num_kv_blocks": 8, "dtype": "float32", "max_batched_tokens": 64, "max_num_seqs": 4, "batch_hint": 4}
    whole = load_engine(path, **options)
    if not compiled:
        monkeypatch.setattr(cpu, "library", lambda: None)
    small = load_engine(path, **options, quantization="int8")
    assert small.fingerprint.startswith(whole.fingerprint + ".")
    assert any("int8" in note for note in small.notes)
    batch = Batch((Segment(sequence_of(list(range(20, 60))), 0, 40),), ([BlockId(0), BlockId(1), BlockId(2)],))
    one, other = whole.logits(batch).double(), small.logits(batch).double()
    error = float((one - other).pow(2).mean().sqrt() / one.std())
    assert 0 < error < 0.1
    found = [module for module in small.model.modules() if isinstance(module, CompactLinear)]
    assert found and all(bool(layer.address) is compiled for layer in found)
    assert not any(isinstance(module, NativeLinear | PackedLinear | nn.Linear) for module in small.model.modules())
    for engine in (whole, small):
        engine.close()


OPTIONS: Any = {"num_kv_blocks": 8, "max_batched_tokens": 64, "max_num_seqs": 4, "batch_hint": 4}
AT_ONCE = "all in one call"


def chunk_beside_decode(length: int = 40) -> Batch:
    """Return a batch with a prompt of ``length`` tokens beside a decode row of another sequence."""
    prompt, other = sequence_of(list(range(20, 20 + length))), sequence_of(list(range(90, 107)))
    return Batch(
        (Segment(prompt, 0, length), Segment(other, 16, 1)),
        ([BlockId(4), BlockId(0), BlockId(7)], [BlockId(2), BlockId(5)]),
    )


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_all_layers_in_one_call(
    kind: str,
    dtype: Any,
    quantization: Any,
    threads: int,
    everywhere: None,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The results equal those of one call per layer, and a layer is announced when its keys are written and those of
    later layers are not. The table of rotary angles grows with the highest position."""
    monkeypatch.setattr("common.engine.decoder._LEAST_POSITIONS", 1)
    engine = load_engine(open_checkpoint(str(checkpoint(kind))), dtype=dtype, quantization=quantization, **OPTIONS)
    assert any(AT_ONCE in note for note in engine.notes)
    batch, layers = chunk_beside_decode(), range(len(engine.layout.layers))
    announced: list[list[bool]] = []
    engine.on_layer = lambda layer: announced.append([bool(engine.store.k(each)[7].any()) for each in layers])
    tokens = engine.step(batch).tokens
    assert announced == [[each <= layer for each in layers] for layer in layers]
    at_once, keys = engine.logits(batch), [engine.store.k(each).clone() for each in layers]
    engine.store.clear(range(8))
    engine.decoder = None
    assert engine.step(batch).tokens == tokens
    assert torch.equal(engine.logits(batch), at_once)
    assert all(torch.equal(engine.store.k(each), keys[each]) for each in layers)
    engine.close()


def test_steps_that_keep_more_and_fewer_rows_have_their_own_logits(
    everywhere: None, checkpoint: Callable[[str], Path]
) -> None:
    """All steps share one buffer for logits, and the logits of earlier steps keep their values."""
    engine = load_engine(open_checkpoint(str(checkpoint("llama"))), **OPTIONS)
    assert engine.decoder is not None
    two = chunk_beside_decode()
    alone = [Batch((segment,), (table,)) for segment, table in zip(two.segments, two.tables, strict=True)]
    silent = Batch((Segment(two.segments[0].sequence, 0, 17),), two.tables[:1])  # samples no token
    at_once = [engine.logits(batch) for batch in (alone[1], two, silent, alone[0], two, alone[1])]
    engine.decoder = None
    by_layers = [engine.logits(batch) for batch in (alone[1], two, silent, alone[0], two, alone[1])]
    assert [each.shape[0] for each in at_once] == [1, 2, 0, 1, 2, 1]
    assert all(torch.equal(one, other) for one, other in zip(at_once, by_layers, strict=True))
    engine.close()


@pytest.mark.parametrize("longest", [40, 47], ids=["for nothing of it", "for its logits"])
def test_a_step_for_which_there_is_no_memory_fails_alone(
    everywhere: None, checkpoint: Callable[[str], Path], longest: int
) -> None:
    """The next step of the same size must not use buffers whose allocation failed."""
    engine = load_engine(open_checkpoint(str(checkpoint("llama"))), **OPTIONS)
    assert engine.decoder is not None
    engine.decoder._rows = engine.decoder._kept = engine.decoder._most_kept = 0  # as if nothing had been allocated
    engine.logits(Batch((chunk_beside_decode(longest).segments[0],), (range(3),)))
    two, like = chunk_beside_decode(), engine.decoder._like

    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("not enough memory")

    like.new_empty = refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="not enough memory"):
        engine.logits(two)
    del like.new_empty
    at_once = engine.logits(two)
    assert engine.decoder._rooms[0].shape[0] >= 41 and engine.decoder._all_logits.shape[0] == 2
    engine.decoder = None
    assert torch.equal(engine.logits(two), at_once)
    engine.close()


def test_a_model_that_does_more_around_its_layers_keeps_its_own_code(
    everywhere: None, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_scaled(*args: Any) -> Any:
        model = load_model(*args)
        forward = model.model.forward

        def scaled(*args: Any, **options: Any) -> Any:
            out = forward(*args, **options)
            out.last_hidden_state *= 1.25
            return out

        model.model.forward = scaled
        return model

    monkeypatch.setattr("common.engine.prepared.load_model", load_scaled)
    engine = load_engine(open_checkpoint(str(checkpoint("llama"))), dtype="float32", **OPTIONS)
    assert any("fused" in note for note in engine.notes) and not any(AT_ONCE in note for note in engine.notes)
    engine.close()


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gpt2", "phi3", "mixtral", "deepseek-v3", "gpt-oss"])
def test_other_layers_stay_as_they_are(kind: str, everywhere: None, checkpoint: Callable[[str], Path]) -> None:
    assert fuse_layers(load(checkpoint(kind))) == 0


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("self_attn", lambda attention: setattr(attention, "scaling", attention.scaling * 2)),
        ("mlp", lambda mlp: setattr(mlp, "act_fn", nn.GELU())),
        ("input_layernorm", lambda norm: norm.weight.data.mul_(1.5)),
    ],
)
def test_a_layer_that_does_something_else_is_found_by_trying(
    part: str, change: Callable[[Any], None], everywhere: None, checkpoint: Callable[[str], Path]
) -> None:
    """The fused layer reads some settings from the modules it replaces; the trial detects the changes it cannot
    read."""
    model = load(checkpoint("llama"))
    change(getattr(model.model.layers[1], part))
    taken_over = part != "mlp"
    assert fuse_layers(model) == len(model.model.layers) - (not taken_over)
    assert isinstance(model.model.layers[1], FusedLayer) is taken_over


def test_a_forward_of_its_own_is_found_by_trying(everywhere: None, checkpoint: Callable[[str], Path]) -> None:
    model = load(checkpoint("llama"))
    forward = model.model.layers[0].forward
    model.model.layers[0].forward = lambda *args, **options: forward(*args, **options) * 1.1
    assert fuse_layers(model) == len(model.model.layers) - 1


def test_without_the_kernels_one_dnn_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "library", lambda: None)
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8))
    assert pack_linears(model, 16) == (2 if linears.packing_pays(torch.float32, 16) else 0)
    assert all(isinstance(layer, PackedLinear | nn.Linear) for layer in model)
