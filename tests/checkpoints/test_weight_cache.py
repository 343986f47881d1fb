"""Packed weights in a file: written once, mapped by all workers, and never mistaken for others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint.files import open_checkpoint
from common.core.ids import BlockId
from common.core.sequence import Batch, Segment
from common.engine import prepared
from common.engine.loading import load_engine
from common.engine.runner import ModelEngine, sequence_of
from common.kernels import cpu
from common.model.load_compact import SHARED
from common.quantization import cache
from common.quantization.cache import Entry, kept
from common.quantization.panels import Panels
from common.quantization.weight import QuantizedWeight, quantize
from tests.checkpoints.format_cases import Case

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="no compiled kernels")
OPTIONS: Any = {"dtype": "float32", "num_kv_blocks": 8, "max_batched_tokens": 64, "max_num_seqs": 4, "batch_hint": 4}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prepared, "SMALLEST_KEPT", 0)
    return tmp_path / "cache" / "weights"


@pytest.fixture
def engine_of() -> Iterator[Callable[..., ModelEngine]]:
    with ExitStack() as stack:

        def load(path: Path, **options: Any) -> ModelEngine:
            return stack.enter_context(closing(load_engine(open_checkpoint(str(path)), **OPTIONS, **options)))

        yield load


def logits_of(engine: ModelEngine) -> torch.Tensor:
    ids = list(range(20, 60))
    return engine.logits(Batch((Segment(sequence_of(ids), 0, 40),), ([BlockId(at) for at in range(3)],))).clone()


@pytest.mark.parametrize(
    ("form", "kind"), [("Q4_1 as SmolLM2", "llama"), ("Q4_K_M", "qwen3-moe"), ("MXFP4", "gpt-oss"), ("Q8_0", "gemma3")]
)
def test_an_engine_from_the_file_is_the_same(
    form: str, kind: str, engine_of: Callable[..., ModelEngine], folder: Path, tmp_path: Path
) -> None:
    path = Case(form, kind).make(tmp_path).model
    plain = engine_of(path, weight_cache="none")
    assert not folder.exists() and SHARED not in plain.notes
    first = engine_of(path)
    (file,) = folder.glob(f"*{cache.SUFFIX}")
    before = file.stat()
    second = engine_of(path)
    assert file.stat().st_ino == before.st_ino and len([*folder.glob("*.tandem")]) == 1
    assert str(file) in Path("/proc/self/maps").read_text()
    for engine in (first, second):
        assert SHARED in engine.notes and engine.fingerprint == plain.fingerprint
        assert torch.equal(logits_of(engine), logits_of(plain))


def test_other_weights_and_other_rounding_have_files_of_their_own(
    checkpoint: Callable[[str], Path], engine_of: Callable[..., ModelEngine], folder: Path
) -> None:
    for kind, way in (("llama", "int8"), ("llama", "int4"), ("qwen3", "int4"), ("llama", "int8")):
        engine_of(checkpoint(kind), quantization=way)
    assert len([*folder.glob("*.tandem")]) == 3


def weights() -> list[tuple[str, QuantizedWeight]]:
    return [(name, quantize(torch.randn(40, 128), bits, 64)) for name, bits in (("a", 4), ("b", 8))]  # type: ignore[arg-type]


def entries(read: list[tuple[str, QuantizedWeight]]) -> list[Entry]:
    return [Entry(name, weight) for name, weight in read]


def dense(entry: Entry) -> torch.Tensor:
    assert isinstance(entry.weight, Panels)
    return entry.weight.weight().dequantize()


def test_a_damaged_file_is_written_anew(folder: Path) -> None:
    made = weights()
    for damage in (b"", b"\x00" * 8, b"{}" + (2).to_bytes(8, "little"), b"[]x" * 9 + b"\xff" * 8):
        found = kept("key", lambda: entries(made), lambda: ["said"], 0)
        assert found is not None and found.notes == ["said"]
        assert all(
            torch.equal(dense(one), weight.dequantize()) for one, (_, weight) in zip(found.entries, made, strict=True)
        )
        (file,) = folder.glob("*.tandem")
        file.write_bytes(damage)


def test_tensors_that_have_changed_are_written_anew(folder: Path) -> None:
    """As after a crash of the machine: the file has its length and its index, but zeros in its middle."""
    made = weights()
    kept("key", lambda: entries(made), list, 0)
    (file,) = folder.glob("*.tandem")
    whole = file.read_bytes()
    file.write_bytes(whole[:256] + bytes(64) + whole[320:])
    found = kept("key", lambda: entries(made), list, 0)
    assert found is not None and torch.equal(dense(found.entries[0]), made[0][1].dequantize())
    assert file.read_bytes() == whole


def test_a_reader_that_fails_leaves_nothing_behind(folder: Path) -> None:
    def read() -> Iterator[Entry]:
        yield from entries(weights()[:1])
        raise RuntimeError("damaged")

    with pytest.raises(RuntimeError, match="damaged"):
        kept("key", read, list, 0)
    assert [path.suffix for path in folder.iterdir()] == [".lock"]


def test_what_a_killed_process_left_is_removed_by_the_next(folder: Path) -> None:
    """Ctrl-C during the first start leaves a file as large as the weights. Those of other models may be in work."""
    assert kept("key", lambda: entries(weights()), list, 0) is not None
    (file,) = folder.glob("*.tandem")
    file.unlink()
    left, other = folder / f".new-{file.stem}-abc", folder / ".new-other-abc"
    for each in (left, other):
        each.write_bytes(bytes(100))
    assert kept("key", lambda: entries(weights()), list, 0) is not None
    assert file.is_file() and other.is_file() and not left.exists()
    assert [*folder.glob(".new-*")] == [other]


def test_without_room_nothing_is_written(folder: Path) -> None:
    assert kept("key", lambda: entries(weights()), list, 1 << 60) is None
    assert not [*folder.glob("*.tandem")]


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file")
    assert kept("key", lambda: entries(weights()), list, 0) is None


def test_one_writes_and_the_others_wait(folder: Path) -> None:
    made, reads = weights(), list[int]()
    begun = threading.Event()

    def read() -> Iterator[Entry]:
        reads.append(1)
        begun.set()
        yield from entries(made)

    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(kept("key", read, list, 0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(reads) == 1 and len(found) == 4
    assert all(torch.equal(dense(each.entries[0]), made[0][1].dequantize()) for each in found)


def test_the_least_recently_used_file_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for at, key in enumerate(("old", "used", "new")):
        if key == "new":
            monkeypatch.setattr(cache, "LIMIT_BYTES", 20_000)
        assert kept(key, lambda: entries(weights()), list, 0) is not None
        for path in folder.glob("*.tandem"):
            if path.stat().st_mtime > 1e6:
                os.utime(path, (at + 1, at + 1))
        left = {path.stat().st_mtime for path in folder.glob("*.tandem")}
    assert 1 not in left and 3 in left
