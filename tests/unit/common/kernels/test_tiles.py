"""The kernels for tile registers (AMX) on cores without them: only the registers are emulated in C."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from common.kernels import cpu

ROOT = Path(__file__).parents[4]
TILES = "amx_bf16"
TESTS = ("attention/test_backends.py", "kernels/test_core_lease.py", "kernels/test_layers.py", "engine/test_sampler.py")
VARIANTS = library.variants if (library := cpu.library()) else ()


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))


def knows_tiles() -> bool:
    """Return whether native.c builds its tile kernels with this compiler: GCC from version 11 on."""
    words = [*compiler(), "-dM", "-E", "-x", "c", "-"]
    macros = subprocess.run(words, input="", capture_output=True, text=True, check=True).stdout
    version = re.search(r"__GNUC__ (\d+)", macros)
    return version is not None and int(version[1]) >= 11 and "__clang__" not in macros


def compile_kernels(to: Path) -> None:
    """Compile native.c as the installation does, but with emulated tile registers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extension = next(
        each for each in project["tool"]["setuptools"]["ext-modules"] if each["name"] == "common.kernels.cpu._kernels"
    )
    tiles = f'-DFAKE_TILES="{ROOT / "tests" / "fakes" / "tiles.h"}"'
    flags = ["-shared", "-fPIC", *extension["extra-compile-args"], "-O1", tiles]  # -O1 compiles faster
    libraries = [f"-l{name}" for name in extension["libraries"]]
    subprocess.run([*compiler(), *flags, *extension["sources"], "-o", str(to), *libraries], cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(TILES in VARIANTS, reason="tests of this core's own tile registers are among the others")
@pytest.mark.skipif("avx512_bf16" not in VARIANTS, reason="what is around tiles is made for AVX512-BF16")
def test_kernels_for_tiles_where_there_are_none(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Run all kernel tests for this variant and, if the grids are not sampled, those that use the fastest variant."""
    if not knows_tiles():
        pytest.skip("this compiler knows no tiles")
    kernels = tmp_path / "kernels.so"
    compile_kernels(kernels)
    assert cpu.Library(kernels).variants[0] == TILES
    others = " or ".join(name for name in (*VARIANTS, "cpu") if name != TILES)
    chosen = ["--sample", "-k", TILES] if request.config.getoption("--sample") else ["-k", f"{TILES} or not ({others})"]
    command = [sys.executable, "-m", "pytest", "-q", "--kernels", str(kernels), *chosen]
    run = subprocess.run(
        [*command, *(f"tests/unit/common/{name}" for name in TESTS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
