"""llama.cpp's server, from PyPI's ``xllamacpp``, while it is measured."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.load.processes import started
from bench.load.systems import is_ready
from bench.peers.vllm import PeerSystem, free_port, program
from common.core.errors import StartError

WHEELS = ("xllamacpp==2026.10.11549", "gguf==0.19.0")
READY_S = 300.0
_TODO = "try the same file with another program of llama.cpp"
_SERVER = """
import signal, sys, xllamacpp
path, port, threads, places, context = sys.argv[1], *map(int, sys.argv[2:])
asked = xllamacpp.CommonParams()
asked.model.path, asked.hostnames, asked.port, asked.n_gpu_layers = path, ["127.0.0.1"], port, 0
asked.n_parallel, asked.n_ctx, asked.cache_prompt = places, places * context, False
asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(asked)
signal.sigwait({signal.SIGTERM, signal.SIGINT})
"""


def install(folder: Path) -> None:
    """Make ``folder`` an environment with llama.cpp and the package that writes its files. Raises StartError."""
    venv.create(folder, with_pip=True)
    words = [str(program(folder, "python")), "-m", "pip", "-q", "--disable-pip-version-check", "install", *WHEELS]
    _run(words, "llama.cpp cannot be installed")


def random_files(folder: Path, tokenizer: Path, shape: Sequence[int], types: Sequence[str], out: Path) -> list[Path]:
    """Write a Llama of random weights in each of ``types`` (see :mod:`bench.peers.random_gguf`), unless it is there,
    and return the files. ``shape``: layers, hidden, feed-forward, heads, key-value heads, vocabulary."""
    _check(folder)
    script = Path(__file__).with_name("random_gguf.py")
    files = {kind: out / f"{kind}.gguf" for kind in types}
    if missing := [kind for kind, file in files.items() if not file.exists()]:
        out.mkdir(parents=True, exist_ok=True)
        words = [str(program(folder, "python")), str(script), str(tokenizer), str(out), *map(str, shape), *missing]
        _run(words, "the random models cannot be written")
    return [files[kind] for kind in types]


@contextlib.contextmanager
def running(folder: Path, file: Path, *, threads: int, places: int, context: int) -> Iterator[PeerSystem]:
    """Run a ready server of ``file`` for ``places`` sequences of ``context`` tokens. Prompts are not cached. Raises
    StartError if it is not installed or does not start."""
    _check(folder)
    port = free_port()
    numbers = map(str, (port, threads, places, context))
    words = [str(program(folder, "python")), "-c", _SERVER, str(file), *numbers]
    with started(f"llama.cpp with {file.name}", words) as process:
        url = f"http://127.0.0.1:{port}"
        process.wait(lambda: url if is_ready(url, "/health") else None, READY_S, _TODO)
        yield PeerSystem(url, [(process, url)])


def _check(folder: Path) -> None:
    if not program(folder, "python").exists():
        todo = f"{sys.executable} -m deploy.cli bench install-peers {folder} --peer llamacpp"
        raise StartError(f"there is no llama.cpp in {folder}", f"{program(folder, 'python')} is missing", todo)


def _run(words: Sequence[str], what: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise StartError(what, lines[-1], "see whether the command works by hand: " + " ".join(words[:4]))
