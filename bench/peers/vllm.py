"""vLLM's CPU build, served on given cores while it is measured.

``colocated`` is one server. ``1p1d`` is a prefill and a decode server with half of the cores each, joined by vLLM's
NixlConnector over sockets and shared memory, behind :mod:`bench.peers.proxy`. Only the compute threads are bound to
cores, as with Tandem's workers.
"""

from __future__ import annotations

import contextlib
import random
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from bench.load.processes import Process, started
from bench.load.systems import is_ready
from common.core.errors import StartError

Mode = Literal["colocated", "1p1d"]
READY_S = 600.0
"""It compiles for more than a minute."""
_TODO = "try the same vllm serve"
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_PORTS_FROM, _TRIES = 20000, 100
"""Below the ports that connections are usually given, which start at 32768."""
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_KV_TRANSFER = '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}'


def program(environment: Path, name: str) -> Path:
    """Return a program of an environment folder, or of the folder ``venv`` in it."""
    inner = environment / "venv" / "bin" / name
    return inner if inner.exists() else environment / "bin" / name


def check_installed(environment: Path) -> None:
    """Raise StartError unless vLLM can be started from there."""
    if not program(environment, "vllm").exists():
        todo = "tandem bench install-peers FOLDER, then --peers FOLDER"
        raise StartError(f"there is no vLLM in {environment}", f"{program(environment, 'vllm')} is missing", todo)


def version(environment: Path) -> str:
    """Return the version that is installed there, as vLLM reports it."""
    inner = environment / "venv" if (environment / "venv" / "bin" / "vllm").exists() else environment
    entries = sorted(inner.glob("lib/python*/site-packages/vllm-*.dist-info"))
    return entries[-1].name.removesuffix(".dist-info") if entries else "vllm"


class PeerSystem:
    """A running vLLM: the ``url`` to send requests to, and its servers with their own URLs."""

    def __init__(self, url: str, servers: Sequence[tuple[Process, str]]) -> None:
        self.url = url
        self._servers, self._paused = servers, False

    def pause(self) -> None:
        """Stop its processes while others are measured: a worker with NIXL polls without pause on all of its cores."""
        if not self._paused:
            for process, _ in self._servers:
                process.pause()
        self._paused = True

    def resume(self) -> None:
        """Continue them. Returns when the servers have answered, and so have closed every connection that grew too
        old."""
        if self._paused:
            for process, _ in self._servers:
                process.resume()
            for server in self._servers:
                _ready(*server)
        self._paused = False


@contextlib.contextmanager
def running(
    environment: Path, model: str, mode: Mode, cores: Sequence[int], *, kv_gib: int = 1, flags: Sequence[str] = ()
) -> Iterator[PeerSystem]:
    """Run a ready vLLM that serves ``model`` with ``flags`` and ``kv_gib`` GiB of KV cache in each server. Raises
    StartError if it is not installed or does not start; ends all of its processes."""
    check_installed(environment)
    with contextlib.ExitStack() as stack:
        if mode == "colocated":
            server = stack.enter_context(_server(environment, model, cores, free_port(), kv_gib, flags))
            yield PeerSystem(_ready(*server), [server])
            return
        half = len(cores) // 2
        if not half:
            raise StartError("vLLM as 1P1D needs two cores", f"there is only {list(cores)}", "give it another")
        joined = [*flags, "--kv-transfer-config", _KV_TRANSFER]
        servers = [
            stack.enter_context(_server(environment, model, share, free_port(), kv_gib, joined, side=free_port()))
            for share in (cores[:half], cores[half:])
        ]
        urls = [_ready(*server) for server in servers]
        port = free_port()
        words = [sys.executable, "-m", "bench.peers.proxy", str(port), *urls]
        proxy = stack.enter_context(started("the proxy before vLLM", words))
        yield PeerSystem(_ready(proxy, f"http://127.0.0.1:{port}"), servers)


@contextlib.contextmanager
def _server(
    environment: Path,
    model: str,
    cores: Sequence[int],
    port: int,
    kv_gib: int,
    flags: Sequence[str],
    side: int | None = None,
) -> Iterator[tuple[Process, str]]:
    """Run a server; yields it with its URL. ``side`` is the port of the NIXL side channel, through which it describes
    its memory to the other server."""
    environ = {
        **_QUIET,
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }
    if side is not None:
        environ |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side), "UCX_TLS": "tcp,posix,sysv,cma,self"}
    words = [str(program(environment, "vllm")), "serve", model, "--port", str(port), *flags]
    with started(f"vLLM on cores {list(cores)}", words, environ) as process:
        yield process, f"http://127.0.0.1:{port}"


def _ready(process: Process, url: str) -> str:
    return process.wait(lambda: url if is_ready(url, "/health") else None, READY_S, _TODO)


def free_port() -> int:
    """Return a port without a listener, if possible one that no outgoing connection is given by chance: a minute passes
    until vLLM listens on it."""
    first = max(int(_EPHEMERAL.read_text().split()[0]), _PORTS_FROM + _TRIES)
    for port in (*random.sample(range(_PORTS_FROM, first), _TRIES), 0):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)) as listener:
            return int(listener.getsockname()[1])
    raise StartError("there is no port for vLLM", "all are in use", "stop a program that listens")
