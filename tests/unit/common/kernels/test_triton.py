"""The Triton kernels: right in the interpreter, wrong with a planted fault, and absent from a CPU worker."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.pace import scaled

ROOT = Path(__file__).parents[4]
SHARES = 2
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]


def run(*words: str, seconds: float = 150, **environment: str) -> str:
    """Run ``python WORDS`` and return its output; AssertionError with it unless the program succeeds."""
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=scaled(seconds), cwd=ROOT, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_a_sample_of_the_grid_equals_the_reference(share: int) -> None:
    said = run("-m", "tests.triton.grid", "--sample", "--share", f"{share}/{SHARES}", TRITON_INTERPRET="1")
    assert said.endswith(" 0 wrong\n")


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("share", range(8))
def test_the_whole_grid_equals_the_reference(share: int) -> None:
    run("-m", "tests.triton.grid", "--share", f"{share}/8", seconds=1700, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_planted_faults_are_caught() -> None:
    said = run("-m", "tests.triton.mutants", TRITON_INTERPRET="1")
    assert said.count("caught: ") >= 17


@pytest.mark.slow
def test_what_surrounds_attention_equals_torch() -> None:
    assert run("-m", "tests.triton.parts", TRITON_INTERPRET="1").count(": right") == 6


@pytest.mark.slow
def test_products_with_weights_in_groups_equal_torch() -> None:
    assert run("-m", "tests.triton.groups", "--sample", TRITON_INTERPRET="1").endswith(" 0 wrong\n")


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.timeout(1200)
def test_all_products_with_weights_in_groups_equal_torch() -> None:
    run("-m", "tests.triton.groups", seconds=1100, TRITON_INTERPRET="1")


def compiled(*words: str, seconds: float, **environment: str) -> str:
    cache = str(ROOT / ".cache" / "triton")  # what was compiled before need not be compiled again
    environment |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    said = run("-m", "tests.triton.aot", *words, seconds=seconds, **environment)
    assert said.endswith(" 0 wrong\n")
    return said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sample_of_the_kernels_compiles_for_each_gpu() -> None:
    said = compiled("--sample", seconds=280)
    assert all(f"prefill           sm_{capability}" in said for capability in (80, 90, 100))


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", ["", "3.6.0"], ids=["installed", "3.6.0"])
def test_all_kernels_compile_for_each_gpu(version: str) -> None:
    """3.6.0 is what torch 2.11 brings along. ``make test-all`` installs it apart."""
    folder = ROOT / ".cache" / f"triton-{version}"
    if version and not folder.is_dir():
        pytest.skip(f"{folder.name} is not installed: `make test-all` does that")
    path = os.pathsep.join(map(str, (folder, ROOT) if version else (ROOT,)))
    said = compiled(seconds=1100, PYTHONPATH=path)
    assert said.startswith(f"triton {version}")


ON_A_CPU = """
import sys
from common.platform.device import hide_triton
hide_triton()  # an import of it fails, as where it is not installed
from common import builtin
from common.checkpoint.files import open_checkpoint
from common.core.sequence import Batch, Segment
from common.engine.loading import load_engine
from common.engine.runner import sequence_of
import deploy.worker, prefill.role, decode.role
for how in ({}, {"quantization": "int4"}, {"quantization": "int8", "products": "exact"}):
    engine = load_engine(
        open_checkpoint(str(builtin.path())), num_kv_blocks=64, max_batched_tokens=64, max_num_seqs=4, batch_hint=4,
        **how,
    )
    assert engine.step(Batch((Segment(sequence_of([5, 6, 7]), 0, 3),), ([0],))).tokens[0]
used = [name for name in sys.modules if name.startswith("common.kernels.triton.") or name == "common.attention.flash"]
assert used == ["common.kernels.triton.spans"] * len(used), used
assert sys.modules["triton"] is None and "torch._dynamo" in sys.modules
"""


def test_a_cpu_worker_needs_no_triton_and_imports_none_of_its_kernels() -> None:
    run("-c", ON_A_CPU)


def test_the_coordinator_imports_no_triton() -> None:
    run("-c", "import sys, coordinator.app; assert not {'torch', 'triton'} & sys.modules.keys()")
