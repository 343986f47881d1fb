"""Hardware limits and the kernels' figures: what is counted, and that the timed work is really done."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.commands import kernels, roofline
from bench.commands.kernels import Heads, attend
from bench.commands.roofline import LLAMA_82M, LinearShape, product, read_rates, shapes
from common.config.bench.kernels import BenchKernelsConfig
from common.config.bench.roofline import BenchRooflineConfig
from common.core.errors import StartError
from common.kernels import cpu

library = cpu.library()


def timed(work: Callable[[], object], rounds: int = 5) -> float:
    """Do the work and return half a second."""
    work()
    return 0.5


def test_kernels_command_defaults_to_goal_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(kernels, "measure", lambda *given: seen.extend(given) or {"slower_than_torch": []})
    assert kernels.run(BenchKernelsConfig(dtype="float32")) == 0
    assert seen[:3] == [Heads(12, 4, 64), shapes(LLAMA_82M), "float32"]


def test_the_shapes_are_all_weights_of_a_step() -> None:
    """Weight bytes of a decode step: 2 * (L * (2*h*H*d + 2*h*KVH*d + 3*h*ff) + h*V), with two bytes per element."""
    h, ff, layers, vocabulary = 768, 2048, 12, 8192
    expected = layers * (2 * h * 12 * 64 + 2 * h * 4 * 64 + 3 * h * ff) + h * vocabulary
    assert sum(each.outputs * each.inputs * each.count for each in shapes(LLAMA_82M)) == expected


@pytest.mark.skipif(library is None, reason="no compiled kernels")
@pytest.mark.parametrize("threads", [1, 3])
def test_every_word_is_read(threads: int) -> None:
    assert library is not None
    for variant in library.variants:
        library.use(variant)
        words = roofline.random_words(32 * 8 * 7)
        before = library.read(words.data_ptr(), words.numel(), threads)
        for index in range(words.numel()) if threads == 1 else (0, 75, 150, 223):
            words[index] ^= 1 << index % 60
            assert library.read(words.data_ptr(), words.numel(), threads) != before
            words[index] ^= 1 << index % 60
    library.use(library.variants[0])


def test_rates_use_requested_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (roofline, kernels):
        monkeypatch.setattr(module, "best_s", timed)
    monkeypatch.setattr(roofline, "READ_MIB", (1, 2))
    assert read_rates() == {1: 2 * roofline.MIB, 2: 4 * roofline.MIB}
    found = product([LinearShape("a", 64, 32, 3), LinearShape("b", 128, 32, 1)], torch.bfloat16, 4)
    assert found.flops_per_s == 2 * 4 * (3 * 64 * 32 + 128 * 32) / 0.5
    assert found.bytes_per_s == 2 * (3 * 64 * 32 + 128 * 32) / 0.5
    halved = product([LinearShape("a", 64, 32, 3)], torch.float32, 4, int8=True)
    assert halved.bytes_per_s == 3 * 64 * (32 + 1) / 0.5 and halved.rates(halved.way) == (
        halved.flops_per_s, halved.bytes_per_s
    )  # fmt: skip
    attended = attend(Heads(6, 2, 32), "bfloat16", 3, 100, lambda size: 1e6)
    assert attended.kv_bytes == 3 * 100 * 2 * 2 * 32 * 2 and attended.seconds["cpu"] == 0.5 / 12
    assert attended.share == attended.kv_bytes / (0.5 / 12) / 1e6


def test_one_ways_weights_are_gone_before_the_next_ones_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[weakref.ref[object]] = []
    ways, made = roofline.ways, 0

    def timed_once(work: Callable[[], object], rounds: int = 5) -> float:
        passes.append(weakref.ref(work))
        return 0.5

    def watched(make: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def first_look(weight: torch.Tensor) -> Any:
            nonlocal made
            made += 1
            assert not any(ran() for ran in passes)
            return make(weight)

        return first_look

    monkeypatch.setattr(roofline, "best_s", timed_once)
    monkeypatch.setattr(roofline, "ways", lambda *how: {name: watched(make) for name, make in ways(*how).items()})
    product([LinearShape("a", 64, 32, 3)], torch.float32, 4)  # float32 has several ways on every CPU
    assert made == 3 * len(passes) >= 6


def test_shares_use_serving_kernel_not_fastest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where torch is faster, the shares are still those of our kernels, and the last line of the table says so."""

    def attended(heads: Heads, dtype: str, batch: int, context: int, read: object) -> kernels.Attended:
        return kernels.Attended(batch, context, 1000, {"native": 0.002, "cpu": 0.001 if batch == 4 else 0.004}, 1e6)

    def linear(layers: object, dtype: torch.dtype, rows: int, int8: bool) -> roofline.Product:
        if int8:
            quantised = {"torch": 0.1 if rows == 64 else 2.0, "native": 0.5}
            return roofline.Product("bfloat16", rows, 1e9 * rows, 5e8, "native", quantised, int8)
        ways = {"torch": 0.5 if rows == 16 else 3.0, "onednn": 0.25 if rows == 64 else 2.0, "native": 1.0}
        way = min(ways, key=ways.__getitem__)
        return roofline.Product("bfloat16", rows, 1e9 * rows / ways[way], 1e9 / ways[way], way, ways)

    monkeypatch.setattr(kernels, "attend", attended)
    monkeypatch.setattr(kernels, "product", linear)
    monkeypatch.setattr(kernels, "read_rates", lambda: {512: 4e9, 1024: 2e9})
    monkeypatch.setattr(kernels, "square_rate", lambda dtype: 1e12)
    monkeypatch.setattr(kernels, "CONTEXTS", (128,))
    saved = tmp_path / "kernels.json"
    bfloat16 = BenchKernelsConfig(dtype="bfloat16", save=str(saved))  # auto is float32 on some machines
    assert kernels.run(bfloat16) == 1
    slower = [
        "attention of batch 4 at 128 (0.50)", "linear layers of 16 rows (0.50)", "linear layers of 64 rows (0.25)",
        "int8 layers of 64 rows (0.20)",
    ]  # fmt: skip
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == f"slower than torch: {', '.join(slower)}"
    assert "50% of" in shown[1] and " 2.00 x torch" in shown[1]
    assert "1.0 GB/s" in shown[5] and "50%" in shown[5] and " 2.00 x torch" in shown[5], "oneDNN is torch's, too"
    assert "1.0 GB/s" in shown[8] and "50%" in shown[8], "a quarter of what the fastest way has"
    assert shown[10].startswith("int8          1 rows") and " 4.00 x torch   2.00 x bfloat16" in shown[10]
    figures = json.loads(saved.read_text())
    assert figures["slower_than_torch"] == slower and figures["attention"][1]["share"] == 0.5
    assert [each["share"] for each in figures["linear"][:5]] == [0.5, 0.5, 0.5, 0.5, 0.512]
    assert "of 4.0 GB/s" in shown[10], "weights of half the size are read faster"
    assert "50% of 2.0 GB/s" in shown[5] and "51% of 1000 GFLOP/s" in shown[9], "whichever limit is the nearer"


@pytest.mark.parametrize("tiles", [True, False])
def test_whole_float32_weights_are_judged_too(tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are judged by their own speed against torch's, not by that of weights kept as bfloat16."""

    class StubLibrary:
        variants = ("amx_bf16" if tiles else "avx512_bf16",)

    def linear(layers: object, dtype: torch.dtype, rows: int, int8: bool) -> roofline.Product:
        ways = {"torch": 1.0, "native": 0.4} if int8 else {"torch": 1.0, "native": 1.1, roofline.HALVES: 0.4}
        return roofline.Product("float32", rows, 2.5e9 * rows, 0.5e9, list(ways)[-1], ways, int8)

    monkeypatch.setattr(cpu, "library", StubLibrary)
    monkeypatch.setattr(kernels, "product", linear)
    monkeypatch.setattr(kernels, "attend", lambda *_: kernels.Attended(1, 128, 1000, {"native": 0.1, "cpu": 1.0}, 1e6))
    monkeypatch.setattr(kernels, "read_rates", lambda: {512: 1e15})
    monkeypatch.setattr(kernels, "square_rate", lambda dtype: 3e12 if dtype == torch.bfloat16 else 5e11)
    lines: list[str] = []
    figures = kernels.measure(Heads(4, 2, 16), shapes(LLAMA_82M), "float32", 1, lines.append)
    slower = [f"whole layers of {rows} rows (0.91)" for rows in kernels.ROWS]
    assert lines[-1] == f"slower than torch: {', '.join(slower)}" and figures["slower_than_torch"] == slower
    assert figures["most_flops_per_s"] == {"whole": 5.12e11, "in parts": 1e12 if tiles else 5.12e11}
    found = {(each["way"], each["int8"], each["rows"]): each for each in figures["linear"]}
    assert found["native", False, 512]["share"] == pytest.approx(1 / 1.1)
    assert found[roofline.HALVES, False, 512]["share"] == pytest.approx(1.28 if tiles else 2.5)
    assert found["native", True, 512]["times_torch"] == 2.5 and len(found) == 15


def test_the_tables_are_saved_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (roofline, kernels):
        monkeypatch.setattr(module, "best_s", timed)
    for name in ("_COPY_BYTES", "_SOCKET_BYTES"):
        monkeypatch.setattr(roofline, name, 8 * roofline.MIB)
    monkeypatch.setattr(roofline, "_SQUARE", 64)
    monkeypatch.setattr(roofline.wire, "measure", lambda transport, tokens, repeats: [1e6, 2e6, 3e6])
    monkeypatch.setattr(roofline, "READ_MIB", (1,))
    monkeypatch.setattr(roofline, "ROWS", (2,))
    monkeypatch.setattr(kernels, "BATCHES", (1, 2))
    monkeypatch.setattr(kernels, "CONTEXTS", (40,))
    monkeypatch.setattr(roofline, "LLAMA_82M", {**LLAMA_82M, "num_hidden_layers": 1, "vocab_size": 64})
    saved = tmp_path / "limits.json"
    assert roofline.run(BenchRooflineConfig(model="", save=str(saved))) == 0
    limits = json.loads(saved.read_text())
    assert {"commit", "machine", "read_bytes_per_s", "copy_bytes_per_s", "linear"} <= limits.keys()
    assert limits["copy_bytes_per_s"]["loopback socket"] == 16 * roofline.MIB
    assert limits["links"]["ZeroMQ over TCP"]["share"] == 2e6 / (16 * roofline.MIB)
    assert len(limits["linear"]) == 2
    for each in limits["linear"]:
        assert each["share"] > 0
        assert each["best_flops_per_s"] == max(each["square_flops_per_s"], each["flops_per_s"]), "nothing exceeds it"
    assert kernels.run(BenchKernelsConfig(heads="4/2/16", layers="48/96/1/64", save=str(saved))) == 0
    figures = json.loads(saved.read_text())
    assert [(each["outputs"], each["inputs"]) for each in figures["layers"]] == [
        (128, 48), (48, 64), (192, 48), (48, 96), (64, 48)
    ]  # fmt: skip
    assert [each["batch"] for each in figures["attention"]] == [1, 2]
    with pytest.raises(StartError, match="many") as refused:
        kernels.run(BenchKernelsConfig(heads="many"))
    for heads in ("4/3/64", "4/0/64", "0/1/64"):
        with pytest.raises(StartError, match="cannot be"):
            kernels.run(BenchKernelsConfig(heads=heads))
    for layers in ("49/96/1/64", "48/97/1/64"):
        with pytest.raises(StartError, match="even"):
            kernels.run(BenchKernelsConfig(layers=layers))
    for layers in ("48/96/1", "48/96/0/64", "48/96/a/64", "48/96/1/64/2"):
        with pytest.raises(StartError, match="--layers"):
            kernels.run(BenchKernelsConfig(layers=layers))
    with pytest.raises(StartError, match="--threads"):
        kernels.run(BenchKernelsConfig(threads=1000))
    with pytest.raises(StartError, match="float16"):
        kernels.run(BenchKernelsConfig(heads="4/2/16", dtype="float16"))
    assert "12/4/64" in refused.value.todo
