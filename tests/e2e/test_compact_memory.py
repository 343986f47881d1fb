"""What a system takes in memory for a quantized file of 1.1 billion parameters, and how soon it answers."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from common import builtin
from common.kernels import cpu
from tests.e2e.spawner import Spawner
from tests.e2e.system import RunningSystem, TandemProcess
from tests.pace import scaled

pytestmark = [pytest.mark.e2e, pytest.mark.whole, pytest.mark.alone]
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 22, 2048, 5632, 32, 4, 32000
KV_BLOCKS, BLOCK = 64, 16
BESIDE = 300 << 20
"""Bytes that a worker may take beside the weights and the KV pool: torch, transformers, buffers."""
SMALL = ("--num-kv-blocks", str(KV_BLOCKS), "--max-model-len", "512")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 1.1 billion random weights in Q4_0."""
    path, draw = tmp_path_factory.mktemp("large") / "large.gguf", np.random.default_rng(1)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    _add_vocabulary(writer)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (VOCABULARY, HIDDEN), "output": (VOCABULARY, HIDDEN)}
    for at in range(LAYERS):
        shapes |= {
            f"blk.{at}.attn_q": (HIDDEN, HIDDEN), f"blk.{at}.attn_k": (kv, HIDDEN), f"blk.{at}.attn_v": (kv, HIDDEN),
            f"blk.{at}.attn_output": (HIDDEN, HIDDEN), f"blk.{at}.ffn_gate": (INNER, HIDDEN),
            f"blk.{at}.ffn_up": (INNER, HIDDEN), f"blk.{at}.ffn_down": (HIDDEN, INNER),
        }  # fmt: skip
    for name, (rows, columns) in shapes.items():
        blocks = draw.integers(0, 256, (rows, columns // 32, 18), np.uint8)
        blocks[:, :, :2] = np.frombuffer(np.float16(0.004).tobytes(), np.uint8)  # the scale of a block
        kind = gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=kind)
    for name in ("output_norm", *(f"blk.{at}.{norm}" for at in range(LAYERS) for norm in ("attn_norm", "ffn_norm"))):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Add the built-in model's tokenizer, filled up with words that no text is split into."""
    tokenizer: dict[str, Any] = json.loads((builtin.path() / "tokenizer.json").read_text())
    tokens = [text for text, _ in sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])]
    tokens += [f"word{at}" for at in range(len(tokens), VOCABULARY)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def size_of(file: Path) -> int:
    return file.stat().st_size


def in_memory(process: int) -> tuple[int, int]:
    """Return the bytes of a process in memory, and its share of them: a page of several processes counts in part."""
    shown = Path(f"/proc/{process}/smaps_rollup").read_text()
    whole, share = (re.search(rf"^{name}: +(\d+) kB", shown, re.MULTILINE) for name in ("Rss", "Pss"))
    assert whole and share
    return int(whole[1]) << 10, int(share[1]) << 10


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_spawner: Spawner) -> None:
    """Keep packed weights in a directory of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    TandemProcess.spawner = None  # the spawner has another environment


@pytest.mark.skipif(cpu.library() is None, reason="no compiled kernels")
async def test_two_workers_take_little_more_than_the_file(file: Path, tmp_path: Path, kept: None) -> None:
    kv = 2 * LAYERS * HIDDEN // HEADS * KV_HEADS * 4 * BLOCK * KV_BLOCKS
    seconds, size = list[float](), size_of(file)
    for name in ("first", "again"):  # the first start packs the weights
        (tmp_path / name).mkdir()
        began = time.monotonic()
        with RunningSystem.up(tmp_path / name, file, "--prefill", "1", "--decode", "1", small=SMALL) as system:
            async with system.client() as client:
                answer = await client.complete(list(range(20, 200)), max_tokens=8, ignore_eos=True)
                seconds.append(time.monotonic() - began)
                workers = [in_memory(worker["pid"]) for worker in (await client.workers()).values()]
        assert len(answer.ids) == 8 and len(workers) == 2
        for whole, _ in workers:
            assert whole <= 1.15 * size + kv + BESIDE, f"{whole >> 20} MiB for a file of {size >> 20}"
        together = sum(share for _, share in workers)
        assert together <= 1.15 * size + 2 * (kv + BESIDE), f"{together >> 20} MiB: the weights are not shared"
    print(f"first answer after {seconds[0]:.1f} s, with packed weights after {seconds[1]:.1f} s")
    assert seconds[1] < scaled(60), "whatever the machine"
