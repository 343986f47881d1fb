"""What Triton needs beside itself is asked for in words, before a kernel runs."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from common.kernels import triton


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    """Return ``machine(compiler, headers)``: why kernels cannot run on the GPU of a machine that has these."""

    def ask(compiler: str | None, headers: bool) -> str | None:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(triton, "find_spec", lambda name: object())
        monkeypatch.setattr(triton, "INTERPRETED", False)
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == compiler else None)
        monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
        (tmp_path / "Python.h").unlink(missing_ok=True)
        if headers:
            (tmp_path / "Python.h").touch()
        return triton.unusable("cuda")

    return ask


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_a_compiler_and_headers_are_enough(machine: Callable[..., str | None], compiler: str) -> None:
    assert machine(compiler, headers=True) is None


def test_what_is_missing_is_named(machine: Callable[..., str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "apt install gcc" in (machine(None, headers=True) or "")
    assert "apt install python3-dev" in (machine("gcc", headers=False) or "")
    machine(None, headers=True)
    monkeypatch.setenv("CC", "/opt/cc")
    assert triton.unusable("cuda") is None, "Triton takes the compiler that CC names"
    assert "run on GPUs" in (triton.unusable("cpu") or "")
