"""Result files, and the provenance that each contains: machine, commit, command, date."""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.config.redaction import without_secrets
from common.core.errors import StartError, reason
from common.platform import device, threads

PICTURES = (".png", ".svg")
INSTRUCTIONS = {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16"}
"""The CPU flags that change which kernels run; only these are recorded."""
DATE = "%Y%m%d-%H%M%S"
_CORES = len(os.sched_getaffinity(0))
"""Cores at start-up: some measurements later bind this process to fewer."""
ROOT = Path(__file__).resolve().parents[2]


def provenance() -> dict[str, Any]:
    """Return the provenance of results that are made now.

    It records whether threads may get real-time priority because that changes the scheduling on machines with few
    cores. The commit ends in ``+`` if tracked files outside bench/results differ from it, and is None outside a
    repository."""
    return {
        "date": datetime.now(UTC).strftime(DATE),
        "command": _command(),
        "commit": _commit(),
        "machine": {
            "cpu": device.cpu_name(),
            "cpu_model": device.cpu_model(),
            "instructions": sorted(device.cpu_flags() & INSTRUCTIONS),
            "cores": _CORES,
            "real_time_threads": threads.may_be_real_time(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "python": platform.python_version(),
            "system": platform.system(),
        },
    }


def provenance_line() -> str:
    """Return the provenance in one line, for the caption of a table."""
    found = provenance()
    machine = found["machine"]
    date = datetime.strptime(found["date"], DATE).date()
    cpu = f"{machine['cpu']} ({machine['cpu_model']})" if machine["cpu_model"] else machine["cpu"]
    ranks = ", which may have real-time threads" if machine["real_time_threads"] else ""
    return f"`{found['command']}`, {date}, {machine['cores']} x {cpu}{ranks}, commit {found['commit']}"


def _command() -> str:
    """Return the command line without secrets. Absolute paths are cut to their last name: the rest is specific to this
    machine."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec else ""
    program = "tandem" if module == "deploy.cli" else Path(sys.argv[0]).name
    words = [Path(word).name if word.startswith("/") else word for word in without_secrets(sys.argv[1:])]
    return f"{program} {shlex.join(words)}"


@functools.cache
def _commit() -> str | None:
    """Return the commit of the sources, as of the first call: a measurement may run for hours, and commits made
    meanwhile are not what it measures."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)bench/results")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}{'+' if changed else ''}"


def comparable(earlier: dict[str, Any]) -> bool:
    """Return whether saved results are of this machine and the present sources.

    Commits since then may have changed only documents, results and tests, and there must be no uncommitted changes."""
    now = provenance()
    if earlier.get("machine") != now["machine"] or not now["commit"] or now["commit"].endswith("+"):
        return False
    try:
        _git(
            "diff",
            "--quiet",
            str(earlier.get("commit")),
            "HEAD",
            "--",
            ".",
            ":(exclude)bench/results",
            ":(exclude)tests",
            ":(exclude)*.md",
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def check_outputs(save: str | None, plot: str | None, cost: str | None = None) -> None:
    """Raise StartError if the output files of a measurement cannot be written, so that it fails before it starts."""
    _commit()
    for flag, name in (("--save", save), ("--plot", plot), ("--cost", cost)):
        if name and Path(name).is_dir():
            raise StartError(f"cannot write {name}", "it is a directory", f"name a file with {flag}")
        if name and not (folder := Path(name).absolute().parent).is_dir():
            raise StartError(f"cannot write {name}", f"there is no directory {folder}", f"make it, or correct {flag}")
    if plot:
        if Path(plot).suffix.lower() not in PICTURES:
            raise StartError(f"cannot draw {plot}", "its name does not end in .png or .svg", "correct --plot")
        if find_spec("matplotlib") is None:
            todo = "install it: .venv/bin/pip install -e '.[bench]' -c constraints.txt"
            raise StartError("cannot draw", "matplotlib is not installed", todo)


def save(path: Path, figures: dict[str, Any]) -> None:
    """Write the provenance and ``figures`` as JSON. Replaces an existing file; raises StartError if it cannot write.

    ``FILE#NAME`` adds them to the runs in FILE under that name, or replaces the run of that name."""
    file, name = _section(path)
    found: dict[str, Any] = _plain(provenance() | figures)
    try:
        if name:
            found = (_runs(file) if file.exists() else {}) | {name: found}
        file.write_text(json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StartError(
            f"cannot save the figures in {path}", reason(error), "name another file with --save"
        ) from error


def load(path: Path) -> dict[str, Any]:
    """Read what :func:`save` wrote there. Raises OSError, ValueError or LookupError if there is no such run."""
    file, name = _section(path)
    found: dict[str, Any] = _runs(file)[name] if name else json.loads(file.read_text(encoding="utf-8"))
    return found


def _section(path: Path) -> tuple[Path, str]:
    """Split ``FILE#NAME`` into the file and the name of a run in it."""
    file, _, name = path.name.partition("#")
    return path.with_name(file), name


def _runs(file: Path) -> dict[str, Any]:
    """Read a file of several runs. Raises ValueError if it holds a single one, which has a date."""
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or "date" in found:
        raise ValueError("the file holds one run, not several with names")
    return found


def _plain(value: Any) -> Any:
    """Convert ``value`` to plain JSON types; a number that is not finite becomes its text (``"inf"``, as in vLLM's
    files)."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
