"""The kernels for tile registers (AMX) on cores without them: only the registers are emulated in C."""

from __future__ import annotations

import hashlib
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
TESTS: tuple[str, ...] = ("attention/test_backends.py", "kernels/test_core_lease.py", "kernels/test_layers.py")
MORE_TESTS = ("engine/test_sampler.py",)
"""Tests of kernels that use no tiles."""
SLOW = "2900 or (390 and 2112) or decoder_layers"
"""Tests that multiply large matrices, with emulated tiles, or load models."""
VARIANTS = library.variants if (library := cpu.library()) else ()


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))


def knows_tiles() -> bool:
    """Return whether native.c builds its tile kernels with this compiler: GCC from version 11 on."""
    words = [*compiler(), "-dM", "-E", "-x", "c", "-"]
    macros = subprocess.run(words, input="", capture_output=True, text=True, check=True).stdout
    version = re.search(r"__GNUC__ (\d+)", macros)
    return version is not None and int(version[1]) >= 11 and "__clang__" not in macros


def compiled_kernels() -> Path:
    """Return native.c compiled as by the installation, but with emulated tile registers. What was compiled before is
    not compiled again."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extension = next(
        each for each in project["tool"]["setuptools"]["ext-modules"] if each["name"] == "common.kernels.cpu._kernels"
    )
    tiles = f'-DFAKE_TILES="{ROOT / "tests" / "fakes" / "tiles.h"}"'
    flags = ["-shared", "-fPIC", *extension["extra-compile-args"], "-O1", tiles]  # -O1 compiles faster
    libraries = [f"-l{name}" for name in extension["libraries"]]
    version = subprocess.run([*compiler(), "--version"], capture_output=True, check=True).stdout
    state = hashlib.sha256(repr((flags, libraries)).encode() + version)
    for source in (*sorted((ROOT / "common/kernels/cpu").glob("*.[ch]")), ROOT / "tests/fakes/tiles.h"):
        state.update(source.read_bytes())
    kernels = ROOT / ".cache" / "tiles" / f"{state.hexdigest()[:16]}.so"
    if not kernels.exists():
        kernels.parent.mkdir(parents=True, exist_ok=True)
        for old in kernels.parent.iterdir():
            old.unlink(missing_ok=True)
        made = kernels.with_suffix(f".{os.getpid()}")
        subprocess.run([*compiler(), *flags, *extension["sources"], "-o", str(made), *libraries], cwd=ROOT, check=True)
        made.rename(kernels)
    return kernels


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(TILES in VARIANTS, reason="tests of this core's own tile registers are among the others")
@pytest.mark.skipif("avx512_bf16" not in VARIANTS, reason="what is around tiles is made for AVX512-BF16")
def test_kernels_for_tiles_where_there_are_none(pytestconfig: pytest.Config) -> None:
    """Run the kernel tests for this variant. If grids are not sampled, also run the slow ones and those that use the
    fastest variant."""
    if not knows_tiles():
        pytest.skip("this compiler knows no tiles")
    kernels = compiled_kernels()
    assert cpu.Library(kernels).variants[0] == TILES
    others = " or ".join(name for name in (*VARIANTS, "cpu") if name != TILES)
    if pytestconfig.getoption("--sample"):
        tests, chosen = TESTS, ["--sample", "-k", f"{TILES} and not ({SLOW})"]
    else:
        tests, chosen = (*TESTS, *MORE_TESTS), ["-k", f"{TILES} or not ({others})"]
    command = [sys.executable, "-m", "pytest", "-q", "--kernels", str(kernels), *chosen]
    run = subprocess.run(
        [*command, *(f"tests/unit/common/{name}" for name in tests)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
