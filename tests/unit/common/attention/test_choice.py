"""Which attention backends are chosen for prompts and for single tokens, and what must be true before they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.attention import registry
from common.attention.composite import CompositeAttention
from common.attention.cpu import CpuAttention
from common.attention.flash import VERSIONS, find_flash
from common.attention.interface import LayerCall, Params, Span
from common.attention.registry import Wanted, select_backend
from common.attention.torch_reference import TorchReference, attend_one
from common.attention.trial import find_fault
from common.core.errors import StartError
from common.kernels import cpu as native
from common.kv.layout import KvDtype, KvLayout, LayerLayout
from common.kv.scales import KvScales, LayerScales
from common.kv.storage.fp8 import Fp8Codec
from common.kv.storage.host import KvMemory
from common.kv.storage.tensors import KvStore

SHAPE = LayerLayout(2, 16, 16)
CALLS = (
    LayerCall(4, Params(0.25)),
    LayerCall(4, Params(0.25, window=20)),
    LayerCall(4, Params(0.25, window=20, softcap=5.0)),
)
SINKS = LayerCall(4, Params(0.25, sinks=torch.randn(4)))
SCALES = KvScales((LayerScales((0.5, 64.0), (16.0, 2.0**-9)),) * len(CALLS))
PACKAGES = {version.name: version.module for version in VERSIONS}
Attend = Callable[..., torch.Tensor]
MakeStore = Callable[..., KvStore]


@pytest.fixture
def make_store() -> Iterator[MakeStore]:
    made: list[KvStore] = []

    def make(
        size: int = 256,
        dtype: KvDtype = "bfloat16",
        layer: LayerLayout = SHAPE,
        blocks: int = 8,
        codec: Fp8Codec | None = None,
    ) -> KvStore:
        made.append(KvStore(KvMemory(KvLayout((layer,) * len(CALLS), dtype, size), blocks), codec=codec))
        return made[-1]

    yield make
    for store in made:
        store.close()


def right(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: Params) -> torch.Tensor:
    """What a version of flash-attn has to compute for one sequence, whose last rows ``query`` has."""
    return attend_one(query, key, value, key.shape[0] - query.shape[0], params)


def without_window(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: Params) -> torch.Tensor:
    return right(query, key, value, Params(params.scaling, None, params.softcap, params.sinks))


def late(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: Params) -> torch.Tensor:
    """Read the last block's slots behind the sequence too, as zeros."""
    pad = (0, 0, 0, 0, 0, 1)
    return right(query, torch.nn.functional.pad(key, pad), torch.nn.functional.pad(value, pad), params)


def failing(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: Params) -> torch.Tensor:
    raise RuntimeError("no kernel image is available for this GPU")


class Package:
    """A package of flash-attn with the signatures of all versions; each sequence is computed by ``attend``."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self.calls = 0

    def _paged(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, row_ends: list[int], lengths: list[int],
        tables: torch.Tensor, params: Params,
    ) -> torch.Tensor:  # fmt: skip
        self.calls += 1
        assert tables.dtype == torch.int32 and tables.stride(1) == 1
        rows = []
        for first, last, length, table in zip(row_ends[:-1], row_ends[1:], lengths, tables.long(), strict=True):
            key, value = (part[table].flatten(0, 1)[:length] for part in (keys, values))
            rows.append(self._attend(query[first:last], key, value, params))
        return torch.cat(rows).to(query.dtype)

    def _params(self, options: dict[str, Any]) -> Params:
        assert options["causal"] is True
        left = options["window_size"][0]
        window = None if left in (None, -1) else left + 1
        return Params(options["softmax_scale"], window, options["softcap"] or None, options.get("learnable_sink"))

    def flash_attn_varlen_func(self, query: Any, keys: Any, values: Any, *places: Any, **options: Any) -> Any:
        if places:  # version 2
            row_ends, ends, most_rows, longest = places
            lengths, tables = ends.diff(), options["block_table"]
            assert (most_rows, longest) == (int(row_ends.diff().max()), int(lengths.max()))
        else:  # version 4
            row_ends, lengths, tables = options["cu_seqlens_q"], options["seqused_k"], options["page_table"]
        params = self._params(options)
        out = self._paged(query, keys, values, row_ends.tolist(), lengths.tolist(), tables, params)
        return out if places else (out, None)

    def flash_attn_with_kvcache(self, query: Any, keys: Any, values: Any, **options: Any) -> Any:
        lengths, params = options["cache_seqlens"].tolist(), self._params(options)
        if "page_table" in options:  # version 3
            ends = options["cu_seqlens_q"].tolist()
            return self._paged(query, keys, values, ends, lengths, options["page_table"], params)
        ends = [*range(len(lengths) + 1)]
        return self._paged(query[:, 0], keys, values, ends, lengths, options["block_table"], params)[:, None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Attend], Package]:
    """Return ``install(version, attend)``, which makes a version importable and the others not."""
    for module in PACKAGES.values():
        monkeypatch.setitem(sys.modules, module, None)

    def put(version: str, attend: Attend) -> Package:
        package = Package(attend)
        monkeypatch.setitem(sys.modules, PACKAGES[version], package)
        return package

    return put


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[KvStore], Any]:
    """Return a function that makes a pool in host memory look like one on a GPU without Triton."""
    monkeypatch.setattr(registry.triton_kernels, "unusable", lambda device: "the package triton is not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    class OnGpu:
        def __init__(self, store: KvStore) -> None:
            self._store, self.device = store, SimpleNamespace(type="cuda")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

    return OnGpu


@pytest.mark.parametrize("version", PACKAGES)
def test_every_version_of_flash_attn_that_is_right_passes_its_trial(
    version: str, install: Callable[[str, Attend], Package], make_store: MakeStore
) -> None:
    package, store = install(version, right), make_store()
    chosen = select_backend(store, Wanted("flash"), CALLS)
    assert (chosen.backend.name, chosen.notes) == (version, (f"attention {version}: as requested",))
    assert package.calls == 2 * len(CALLS), "both phases were tried in every kind of layer"
    for layer in range(len(CALLS)):
        assert not store.k(layer).any() and not store.v(layer).any(), "the trial left something in the pool"


@pytest.mark.parametrize("version", PACKAGES)
@pytest.mark.parametrize(
    ("attend", "words"),
    [
        (without_window, "gives wrong numbers"),
        (late, "gives wrong numbers"),
        (failing, "fails with RuntimeError: no kernel image"),
    ],
)
def test_a_version_that_is_wrong_is_refused(
    version: str, attend: Attend, words: str, install: Callable[[str, Attend], Package], make_store: MakeStore
) -> None:
    install(version, attend)
    with pytest.raises(StartError, match=words):
        select_backend(make_store(), Wanted("flash"), CALLS)


def test_a_pool_that_flash_attn_cannot_read_is_refused_before_a_trial(
    install: Callable[[str, Attend], Package], make_store: MakeStore
) -> None:
    package = install("flash-attn 2", right)
    for store, words in (
        (make_store(16), "multiple of 256"),
        (make_store(dtype="float32"), "16 bits"),
        (make_store(layer=LayerLayout(1, 24, 16)), "keys and values of one size"),
        (make_store(layer=LayerLayout(1, 264, 264)), "at most 256"),
    ):
        with pytest.raises(StartError, match=words):
            select_backend(store, Wanted("flash"), CALLS)
    with pytest.raises(StartError, match="knows no attention sinks"):
        select_backend(make_store(), Wanted("flash"), (SINKS,) * len(CALLS))
    assert package.calls == 0


def test_flash_attn_is_not_used_without_its_package(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in PACKAGES.values():
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StartError, match="no package of flash-attn"):
        select_backend(make_store(), Wanted("flash"), CALLS)


def test_a_gpu_takes_what_passes_its_trial_and_says_why(
    install: Callable[[str, Attend], Package], make_store: MakeStore, on_gpu: Callable[[KvStore], Any]
) -> None:
    install("flash-attn 3", right)
    chosen = select_backend(on_gpu(make_store()), calls=CALLS)
    assert chosen.backend.name == "flash-attn 3"
    assert chosen.notes == (
        "prefill attention flash-attn 3: it passed its trial",
        "decode attention flash-attn 3: it passed its trial; not triton: the package triton is not installed",
    )
    install("flash-attn 3", without_window)
    chosen = select_backend(on_gpu(make_store()), calls=CALLS)
    assert chosen.backend.name == "torch"
    assert all("not flash: its trial gives wrong numbers" in note for note in chosen.notes)


def test_a_backend_is_not_tried_on_nothing(make_store: MakeStore) -> None:
    store = make_store(blocks=8)
    assert find_fault(TorchReference(store), store, CALLS, prefill=True) is None
    assert "not known" in (find_fault(TorchReference(store), store, (), prefill=True) or "")
    small = make_store(blocks=5)
    assert "too small" in (find_fault(TorchReference(small), small, CALLS, prefill=False) or "")


class WrongHead(TorchReference):
    """Reads keys or values with the scale of the other KV head."""

    def __init__(self, store: KvStore, part: int) -> None:
        super().__init__(store)
        self._part = part

    def attend(self, plan: Sequence[Span], layer: int, query: torch.Tensor, params: Params) -> torch.Tensor:
        assert self.store.codec is not None
        scale = self.store.codec.scales_of(layer)[self._part]
        factor = (scale.flip(0) / scale).repeat_interleave(2, 0).to(query.dtype)
        if self._part == 0:
            return super().attend(plan, layer, query * factor, params)
        return super().attend(plan, layer, query, params) * factor


@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
def test_a_trial_over_kv_in_fp8_sees_a_wrong_scale(make_store: MakeStore, computed: torch.dtype) -> None:
    store = make_store(16, "fp8", blocks=16, codec=Fp8Codec(SCALES, computed, torch.device("cpu")))
    for prefill in (True, False):
        assert find_fault(TorchReference(store), store, CALLS, prefill) is None
        for part in (0, 1):
            assert "wrong numbers" in (find_fault(WrongHead(store, part), store, CALLS, prefill) or "")


def test_triton_reads_kv_in_fp8_on_gpus_that_convert_it(
    make_store: MakeStore, on_gpu: Callable[[KvStore], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kernels(TorchReference):
        name = "triton"

        def __init__(self, store: Any, splits: int | None) -> None:
            super().__init__(store)
            self.splits = splits

    store = on_gpu(make_store(16, "fp8", blocks=16, codec=Fp8Codec(SCALES, torch.bfloat16, torch.device("cpu"))))
    monkeypatch.setattr(registry.triton_kernels, "unusable", lambda device: None)
    monkeypatch.setitem(sys.modules, "common.attention.triton", SimpleNamespace(TritonAttention=Kernels))
    for capability in ((8, 9), (9, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        chosen = select_backend(store, calls=CALLS)
        assert chosen.notes == (
            "prefill attention triton: it passed its trial; not flash: flash-attn is not used for KV in fp8",
            "decode attention triton: it passed its trial",
        )
        assert chosen.backend.splits is None  # type: ignore[attr-defined]
    chosen = select_backend(store, Wanted(splits=4), CALLS)
    assert chosen.backend.splits == 4  # type: ignore[attr-defined]
    assert chosen.notes[1] == "decode attention triton: it passed its trial; in 4 splits, whatever the batch"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    why = "it cannot read KV in fp8: float8 needs a GPU of compute capability 8.9 or later, and this one has 8.6"
    with pytest.raises(StartError, match=f"no triton attention for prefill.*{why}"):
        select_backend(store, Wanted("triton"), CALLS)
    chosen = select_backend(store, calls=CALLS)
    assert chosen.backend.name == "torch" and f"not triton: {why}" in chosen.notes[0]


@pytest.mark.skipif(native.library() is None, reason="no compiled kernels")
def test_each_phase_has_the_backend_that_was_asked_for(make_store: MakeStore) -> None:
    store = make_store()
    chosen = select_backend(store, Wanted("auto", decode="torch"))
    assert isinstance(chosen.backend, CompositeAttention)
    assert (chosen.backend.prefill.name, chosen.backend.decode.name) == ("native", "torch")
    assert [note.split(":")[0].split(" for ")[0] for note in chosen.notes] == [
        "prefill attention native",
        "decode attention torch",
    ]
    assert select_backend(store, Wanted("torch", prefill="cpu", decode="cpu")).backend.name == "cpu"


def test_a_number_of_splits_is_refused_by_other_backends(make_store: MakeStore) -> None:
    with pytest.raises(StartError, match="--decode-splits is for triton only: decode attention is torch"):
        select_backend(make_store(), Wanted("torch", splits=2))


@pytest.mark.parametrize("shapes", [[(0, 5), (9, 1), (30, 3), (0, 1)], [(4, 1)], [(4, 2)]], ids=str)
def test_two_backends_share_a_step(shapes: list[tuple[int, int]], make_store: MakeStore) -> None:
    store = make_store(16, "float32")
    for part in (store.k(0), store.v(0)):
        part.copy_(torch.randn(part.shape))
    spans, row = [], 0
    for index, (start, length) in enumerate(shapes):
        spans.append(Span(row, length, start, [2 * index, 2 * index + 1, 7][: -(-(start + length) // 16)]))
        row += length
    query, params = torch.randn(row, 4, 16), Params(0.25)
    both = CompositeAttention(TorchReference(store), CpuAttention(store), torch.device("cpu"))
    expected = TorchReference(store).attend(spans, 0, query, params)
    torch.testing.assert_close(both.attend(both.plan(spans), 0, query, params), expected, atol=1e-5, rtol=1e-5)


def test_spans_out_of_order_are_refused(install: Callable[[str, Attend], Package], make_store: MakeStore) -> None:
    install("flash-attn 3", right)
    with pytest.raises(ValueError, match="in order"):
        find_flash(make_store()).plan([Span(1, 1, 0, [0]), Span(0, 1, 0, [1])])
