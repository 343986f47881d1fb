"""Start of a child process: the launcher's side and the entry point of the child.

A child reads its configuration and the keys of its role from standard input (not from the command line, the environment
or a file, because keys must not show in ``ps``). It gets the number of its status pipe as an argument and ignores
Ctrl-C, because the launcher decides in which order children stop. It never outlives the launcher: the kernel kills it
when the launcher dies (PR_SET_PDEATHSIG), and a launcher that died before this was set is detected by the parent
process id.

    python -m deploy.launcher.process LABEL PARENT_PID STATUS_FD [IPC_FD]  < {"kind": "worker", "config": {...}}
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import msgspec

from common.config.coordinator import CoordinatorConfig
from common.config.worker import WorkerConfig
from common.core.errors import StartError
from common.core.ids import WorkerName
from common.net.keys import ClusterKeys
from common.platform.core_lease import Lending
from common.platform.log import setup_logging
from common.platform.parent import die_with
from deploy.launcher import status

_MEBIBYTE = 1 << 20


class ChildLaunch(msgspec.Struct, frozen=True):
    """The message that a child reads from standard input. ``keys``: cluster keys of its role.

    For a coordinator: ``workers`` are the ready workers and their process ids, ``at_once`` is as in
    :func:`coordinator.app.run`. For a worker: ``lending`` is the core lease of this machine."""

    kind: str
    config: dict[str, Any]
    workers: dict[WorkerName, int] = {}
    lending: Lending | None = None
    at_once: bool = False
    keys: ClusterKeys | None = None


@dataclasses.dataclass(frozen=True)
class ChildSpec:
    """A child process to start. ``environment``: variables to add. ``ipc_socket``: the child's end of a socket pair for
    :mod:`deploy.launcher.ipc`. The other fields are those of :class:`ChildLaunch`."""

    label: str
    config: WorkerConfig | CoordinatorConfig
    environment: Mapping[str, str]
    ipc_socket: socket.socket | None = None
    workers: Mapping[WorkerName, int] | None = None
    lending: Lending | None = None
    at_once: bool = False
    keys: ClusterKeys | None = dataclasses.field(default=None, repr=False)

    def message(self) -> bytes:
        """Return what the child reads from standard input. It contains secrets."""
        kind = "worker" if isinstance(self.config, WorkerConfig) else "coordinator"
        config, workers = dataclasses.asdict(self.config), dict(self.workers or {})
        return msgspec.json.encode(ChildLaunch(kind, config, workers, self.lending, self.at_once, self.keys))


async def start(child: ChildSpec) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
    """Start a child process and return it with the reading end of its status pipe. Its output is a pipe, with stderr
    merged into stdout."""
    environment = {**os.environ, **child.environment}
    return await spawn(child.label, child.message(), environment, child.ipc_socket, child.lending)


async def spawn(
    label: str,
    message: bytes,
    environment: Mapping[str, str],
    ipc_socket: socket.socket | None = None,
    lending: Lending | None = None,
    cwd: str | None = None,
) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
    """Start a child process that reads ``message`` as :func:`start` does. ``environment``: all its variables."""
    reading, writing = os.pipe()
    passed = (writing,) if ipc_socket is None else (writing, ipc_socket.fileno())
    try:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "deploy.launcher.process", label, str(os.getpid()), *map(str, passed)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_MEBIBYTE,
            pass_fds=(*passed, *([lending.descriptor] if lending else ())),
            process_group=0,  # a terminal's Ctrl-C goes to the launcher alone
            env=dict(environment),
            cwd=cwd,
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    assert child.stdin is not None
    child.stdin.write(message)
    child.stdin.close()
    stream = asyncio.StreamReader(limit=_MEBIBYTE)
    pipe = os.fdopen(reading, "rb", 0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
    return child, stream


def run(launch: ChildLaunch, label: str, ipc_fd: int | None = None) -> int:
    """Run the coordinator or worker that ``launch`` describes and return the exit code. Imports only what its role
    needs."""
    try:
        if launch.kind == "coordinator":
            served = CoordinatorConfig(**launch.config)
            setup_logging(served.log_level, served.log_format, label)
            from coordinator.app import run as run_coordinator
            from deploy.launcher.ipc import SupervisorIPC

            return run_coordinator(
                served,
                lambda url, control: status.ready(url=url, control=control),
                SupervisorIPC(ipc_fd) if ipc_fd is not None else None,
                launch.workers,
                launch.at_once,
                launch.keys,
            )
        config = WorkerConfig(**launch.config)
        setup_logging(config.log_level, config.log_format, label)
        from deploy.worker import run as run_worker

        return run_worker(config, launch.lending, launch.keys)
    except StartError as error:
        if launch.config.get("debug"):
            traceback.print_exc()
        status.failed(error)
        return 1
    except Exception:
        logging.getLogger(__name__).exception("%s crashed", label)
        return 70  # EX_SOFTWARE: a bug rather than a failed start


def main() -> None:
    """Run a child process from its command line and standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    label, parent, status_fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    die_with(parent)
    status.attach(status_fd)
    launch = msgspec.json.decode(sys.stdin.buffer.read(), type=ChildLaunch)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    code = run(launch, label, int(sys.argv[4]) if len(sys.argv) > 4 else None)
    logging.shutdown()
    sys.exit(code)


if __name__ == "__main__":
    main()
