"""Start ``tandem`` commands whose workers share one import of torch and transformers.

That import takes most of the start of a worker with a tiny model, and the end-to-end tests start more than a hundred. A
spawner imports them once, while it has one thread, and then forks for each command; the forked process runs the
command's module as ``python -m`` does. A forked ``tandem up`` keeps a spawner of its own, from which its workers are
forked in turn; its coordinator, which does not import torch, is started as usual.

    pytest ── spawner (imports, one thread)
      └── tandem up ── spawner of its workers (the same memory)
            ├── prefill-0 (── spawner of its ranks, if asked for)
            └── decode-0

The requesting process becomes the parent, as if it had started the child itself: the spawner forks twice, and the
requesting process is a subreaper (``PR_SET_CHILD_SUBREAPER``) until it has adopted the orphan. Exit codes, signals,
process ids, process groups and the parent-death signal are therefore real. Tests about processes and signals
(``test_up.py``) do not use a spawner.

    python -m tests.e2e.spawner SOCKET      imports when the first command comes; ends when the socket is closed
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from common.platform import device

ROOT = Path(__file__).parents[2]
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Variables that torch reads at import. A worker that needs other values is started as usual."""
HEAVY = (
    *("common.engine.loading", "common.engine.rank_follower", "deploy.worker", "prefill.role", "decode.role"),
    *("transformers.modeling_utils", "transformers.generation", "transformers.models.auto.modeling_auto"),
    "transformers.models.llama.modeling_llama",
)
"""Modules that every worker imports, whatever model it serves."""
RANKS = "SPAWN_RANKS"
"""Environment variable with which workers keep a spawner, too, from which the ranks of a tensor-parallel one are
forked."""
PRELOADED = "PRELOADED_IN_WORKERS"
"""An environment variable with the name of a module to import in each worker before it starts, to change it."""
_PR_SET_CHILD_SUBREAPER = 36
_MOST_DESCRIPTORS = 32
_MOST_BYTES = 1 << 20


class Spawner:
    """Client side of a spawner: sends it requests for processes over a socket."""

    def __init__(self, asking: socket.socket) -> None:
        self._socket = asking
        self._lock = threading.Lock()

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[Spawner]:
        """Run a spawner in a process of its own for the duration of the block."""
        asking, answering = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with asking:
            with answering:
                command = [sys.executable, "-m", __name__, str(answering.fileno())]
                process = subprocess.Popen(command, cwd=ROOT, env=os.environ | THREADS, pass_fds=[answering.fileno()])
            try:
                yield cls(asking)
            finally:
                asking.close()
                process.wait()

    def fork(self, job: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Fork a new child of this process and return its process id. ``job`` holds the module, its arguments,
        environment, working directory, the numbers that ``descriptors`` get in the child, and the process group as in
        :class:`subprocess.Popen`."""
        data = json.dumps(job).encode()
        with self._lock, _subreaper():
            socket.send_fds(self._socket, [data], descriptors)
            answer = self._socket.recv(64)
        if not answer:
            raise ChildProcessError("the spawner has ended; its error is above")
        return int(answer)

    def popen(self) -> type[subprocess.Popen[Any]]:
        """Return a ``subprocess.Popen`` that has this spawner fork ``tandem`` commands that import torch. RuntimeError
        on a Python whose ``Popen`` has other internals."""
        _check_details(subprocess.Popen)
        spawner = self

        class Popen(subprocess.Popen[Any]):
            def _execute_child(self, args: Any, *details: Any) -> None:
                details_by_name = dict(zip(_DETAILS, details, strict=True))
                if not _computes(args, details_by_name["env"]):
                    super()._execute_child(args, *details)  # type: ignore[misc]
                    return
                self.pid = spawner.fork(*_job(args, details_by_name))
                self._child_created = True
                self._close_pipe_fds(*(details_by_name[name] for name in _PIPES))  # type: ignore[attr-defined]

        return Popen


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_DETAILS = (
    *("executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags", "shell"),
    *_PIPES,
    *("restore_signals", "gid", "gids", "uid", "umask", "start_new_session", "process_group"),
)
"""Parameters of ``Popen._execute_child`` after the command, in Python 3.11 to 3.14."""


def _check_details(popen: type) -> None:
    found = tuple(inspect.signature(popen._execute_child).parameters)  # type: ignore[attr-defined]
    if found != ("self", "args", *_DETAILS):
        raise RuntimeError(f"subprocess.Popen._execute_child has other parameters here than _DETAILS: {found}")


def _computes(args: Any, env: dict[str, str] | None) -> bool:
    """Return whether this is a ``tandem`` command, or a worker of one, that may be forked."""
    modules = ("deploy.cli", "deploy.launcher.process", "deploy.ranks.follower")
    if list(args[:2]) != [sys.executable, "-m"] or args[2] not in modules:
        return False
    wanted = os.environ if env is None else env
    if any(wanted.get(name, value) != value for name, value in THREADS.items()):
        return False
    return args[3] in ("up", "prefill", "decode") if args[2] == "deploy.cli" else args[3] != "coordinator"


def _job(args: Sequence[str], details: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    unusual = [name for name in ("preexec_fn", "gid", "gids", "uid", "start_new_session") if details[name]]
    assert not unusual, f"a forked process has no {unusual}"
    standard = {0: details["p2cread"], 1: details["c2pwrite"], 2: details["errwrite"]}
    passed = {number: own if own != -1 else number for number, own in standard.items()}
    passed |= {number: number for number in details["pass_fds"]}
    environment = dict(os.environ if details["env"] is None else details["env"])
    job = {
        "module": args[2],
        "words": [os.fspath(word) for word in args[3:]],
        "environment": environment,
        "folder": os.fspath(details["cwd"] or os.getcwd()),
        "descriptors": list(passed),
        "group": details["process_group"],
    }
    return job, list(passed.values())


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Make this process adopt orphans among its descendants for the duration of the block."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# -- the spawner's process --------------------------------------------------------------------------------------------


def _import() -> None:
    """Import HEAVY; none of it starts a thread."""
    device.calm_threads()
    device.hide_triton()
    for name in HEAVY:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would write to every page that the forked processes share, and so copy it


def _serve(answering: socket.socket) -> dict[str, Any]:
    """Fork for each job received. Returns only in the forked processes, each with its job."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(answering, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not data:
            sys.exit(0)
        if "torch" not in sys.modules:
            _import()
        tasks = os.listdir("/proc/self/task")
        assert len(tasks) == 1, f"{len(tasks)} threads: a fork would have one of them, and the locks of all"
        job = json.loads(data)
        job["received"] = descriptors
        if _fork_orphan(answering):
            return job
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_orphan(answering: socket.socket) -> bool:
    """Fork a grandchild, and send its process id to the requesting process. Return True in the grandchild, once its
    parent is the requesting process, and False in the spawner."""
    reported, telling = os.pipe()
    waiting, going = os.pipe()
    middle = os.fork()
    if middle == 0:
        child = os.fork()
        if child != 0:
            os.write(telling, str(child).encode())
            os._exit(0)
        for descriptor in (reported, telling, going):
            os.close(descriptor)
        answering.close()
        os.read(waiting, 1)  # until the intermediate process has ended
        os.close(waiting)
        return True
    os.waitpid(middle, 0)
    answering.send(os.read(reported, 64))
    for descriptor in (reported, telling, waiting, going):
        os.close(descriptor)
    return False


def _become(job: dict[str, Any]) -> None:
    """Turn this process into what ``subprocess.Popen`` would have started, up to the module that it runs."""
    _place(dict(zip(job["descriptors"], job["received"], strict=True)))
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    if job["group"] is not None and job["group"] >= 0:
        os.setpgid(0, job["group"])
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.argv = ["", *job["words"]]


def _place(received: dict[int, int]) -> None:
    """Give each descriptor its number and close all others."""
    aside = {number: os.dup2(own, _above(received) + at) for at, (number, own) in enumerate(received.items())}
    for number, own in aside.items():
        os.dup2(own, number)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in received:
            with contextlib.suppress(OSError):  # the descriptor of this listing
                os.close(descriptor)


def _above(received: dict[int, int]) -> int:
    return max(*received, *received.values()) + 1


def _keep_spawner() -> None:
    """Fork a spawner for this launcher's workers before the launcher has changed anything in its memory."""
    asking, answering = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        asking.close()
        _run(_serve(answering))
    answering.close()
    subprocess.Popen = Spawner(asking).popen()  # type: ignore[misc]


def _run(job: dict[str, Any]) -> NoReturn:
    _become(job)
    is_launcher = job["words"][:1] == ["up"]
    if is_launcher or (job["module"] == "deploy.launcher.process" and RANKS in os.environ):
        _keep_spawner()
    if PRELOADED in os.environ and not is_launcher:
        importlib.import_module(os.environ[PRELOADED])
    runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))
