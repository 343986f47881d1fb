"""Fixtures for every test, and the check that no test leaves anything behind.

After the teardown of each test's own fixtures, this process may not have any new asyncio task, non-daemon thread, open
ZeroMQ socket, shared-memory descriptor or segment, or child process. Fixtures of a wider scope are set up before the
first snapshot, so what they keep is allowed.
"""

from __future__ import annotations

import asyncio
import asyncio.runners
import atexit
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import zmq
from hypothesis import HealthCheck, settings

from common.platform.device import calm_threads
from tests import leaked_keys, selection
from tests.chaos.host import TAKEN, TRIES, Taken
from tests.e2e.spawner import Spawner
from tests.pace import scaled

# On a busy machine an example is slow, not wrong.
settings.register_profile("tandem", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tandem")

collect_ignore = ["conformance"]  # run by `make conformance`, in an environment of its own

GRACE_S = 3.0
"""Seconds within which stopped threads, sockets and processes must be gone; more on a slower machine."""

_sockets: weakref.WeakSet[zmq.Socket[Any]] = weakref.WeakSet()
_taken = pytest.StashKey[Taken]()
_abandoned: list[str] = []  # tasks that were still running when their event loop was closed


def _watch_sockets() -> None:
    original = zmq.Socket.__init__

    def watched(self: zmq.Socket[Any], *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _sockets.add(self)

    zmq.Socket.__init__ = watched  # type: ignore[method-assign]


def _watch_tasks() -> None:
    original = asyncio.runners._cancel_all_tasks  # type: ignore[attr-defined]

    def watched(loop: asyncio.AbstractEventLoop) -> None:
        _abandoned.extend(repr(task) for task in asyncio.all_tasks(loop))
        original(loop)

    asyncio.runners._cancel_all_tasks = watched  # type: ignore[attr-defined]


_watch_sockets()
_watch_tasks()
calm_threads()  # else OpenMP's threads wait by spinning, which with several processes takes half of all CPU time


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", type=Path, help="shared library of kernels to test in place of the installed ones")
    selection.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(leaked_keys, "leaked_keys")
    if path := config.getoption("--kernels"):
        from common.kernels import cpu

        kernels = cpu.Library(path)
        cpu.library = lambda: kernels  # type: ignore[assignment]


_OF_MULTIPROCESSING = "sem.mp-" if sys.version_info >= (3, 14) else ()
"""Name prefix of multiprocessing's semaphores in /dev/shm. Since Python 3.14 they stay linked until its resource
tracker removes them at exit; tqdm keeps one for the whole process as soon as transformers has written a model."""


class Belongings(NamedTuple):
    """Snapshot of what this process has open, by kind: identity -> description."""

    tasks: dict[Any, str]
    threads: dict[Any, str]
    sockets: dict[Any, str]
    descriptors: dict[Any, str]
    segments: dict[Any, str]
    children: dict[Any, str]

    @classmethod
    def now(cls) -> Belongings:
        return cls(
            dict(enumerate(_abandoned)),
            {thread.ident: repr(thread) for thread in threading.enumerate() if not thread.daemon},
            {id(socket): repr(socket) for socket in list(_sockets) if not socket.closed},
            _shared_descriptors(),
            {name: f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if not name.startswith(_OF_MULTIPROCESSING)},
            _children(),
        )

    def since(self, before: Belongings) -> list[str]:
        """Describe everything in this snapshot that is not in ``before``."""
        return [
            f"{kind}: {description}"
            for kind, mine, theirs in zip(self._fields, self, before, strict=True)
            for identity, description in mine.items()
            if identity not in theirs and not (kind == "segments" and _is_of_others(description))
        ]


def _shared_descriptors() -> dict[Any, str]:
    found: dict[Any, str] = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the descriptor of this listing itself
            continue
        if target.startswith(("/memfd:", "/dev/shm/")):
            found[fd, target] = f"descriptor {fd} of {target}"
    return found


def _is_of_others(segment: str) -> bool:
    """Return whether only processes outside this one's family map the segment. /dev/shm is shared with test runs beside
    this one; a segment that no process maps is reported, unless it is gone after all have been looked at."""
    me = psutil.Process()
    family = {me.pid, *(child.pid for child in me.children(recursive=True))}
    try:
        mapped = f" {os.stat(segment).st_ino} "  # by inode: glibc maps a semaphore before it gives it its final name
    except FileNotFoundError:
        return True
    mapping = set()
    for pid in psutil.pids():
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:  # the process has ended or belongs to another user
            continue
        if any("/dev/shm/" in line and mapped in line for line in lines):
            mapping.add(pid)
    return not mapping & family if mapping else not os.path.exists(segment)


def _children() -> dict[Any, str]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is none, as after most tests
        return {}
    found: dict[Any, str] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:
            continue
        for pid in pids:
            try:
                command = (
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
                started = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
            except OSError:
                continue
            if "resource_tracker" not in command:  # multiprocessing's own, one per interpreter
                found[pid, started] = f"process {pid}: {command or 'a zombie that its parent does not wait for'}"
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    _abandoned.clear()
    before = Belongings.now()
    yield
    deadline = time.monotonic() + scaled(GRACE_S)
    while left := Belongings.now().since(before):
        if time.monotonic() > deadline:
            pytest.fail("the test left behind\n  " + "\n  ".join(left), pytrace=False)
        gc.collect()  # objects that only a reference cycle keeps alive do not count as left behind
        time.sleep(0.02)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect without garbage collection, which would scan the growing lists of tests again and again."""
    selection.forbid_what_is_slow(session.config)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return selection.is_ignored(collection_path, config) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Scale timeouts to this machine, mark tests with tight time bounds as flaky, and apply ``--fast`` and
    ``--sample``.

    A test marked ``alone`` is run again if it fails while the hypervisor took CPU time (steal); the terminal summary
    reports that. An explicit ``--timeout`` is not scaled.
    """
    for item in items:
        if config.getoption("timeout") is None:
            marker = item.get_closest_marker("timeout")
            seconds = marker.args[0] if marker else float(config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(scaled(seconds)), append=False)
        if item.get_closest_marker("alone"):
            condition = partial(_host_took_cores, item)
            item.add_marker(pytest.mark.flaky(reruns=TRIES - 1, condition=condition))
    selection.select(config, items)
    if hasattr(config, "workerinput"):  # an xdist worker: tests are handed out in this order
        items.sort(key=lambda item: not item.get_closest_marker("slow"))


def pytest_collection_finish() -> None:
    """Exempt everything created so far from garbage collection, so that later collections do not scan it.

    At exit it is freed after all: the bindings of Triton, which torch imports, complain of what is not."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_taken] = Taken()


def _host_took_cores(item: pytest.Item) -> bool:
    return item.stash[_taken].share() >= TAKEN


_SHARING = frozenset(
    f"tests/e2e/test_{name}.py"
    for name in ("bad_inputs", "features", "load", "namespaces", "prompt_logprobs", "structured_outputs", "tools")
)
"""Modules whose tests share one system, so they run in one xdist worker; so do those of tests/security (shared servers)
and the known-bug tests (shared run)."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule tests under xdist: each test goes to the next free worker process, but tests that share a system or
    servers stay together, so that these start once.

    Those are the tests of one system in test_tokens.py, of one module in tests/security or ``_SHARING``, and of the
    known bugs. These groups come first, then the tests marked slow, because a long test should not start last.
    """
    from xdist.scheduler import LoadScopeScheduling

    class BySystem(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path, _, test = nodeid.partition("::")
            if path.startswith("tests/security/") or path in _SHARING or test.startswith("test_a_known_bug_is_caught"):
                return path
            return test.partition("[")[2] if path.endswith("e2e/test_tokens.py") else nodeid

    return BySystem(config, log)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return ``checkpoint(kind)``: the directory of a tiny random checkpoint, written once per session."""
    from tests.models import make_model  # imports torch and transformers, which tests without a model do not need

    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_model(kind, tmp_path_factory.mktemp("checkpoints") / kind)
        return made[kind]

    return get


@pytest.fixture(scope="session")
def one_spawner() -> Iterator[Spawner]:
    """The spawner that forks all workers of the e2e and security tests of this pytest process."""
    with Spawner.running() as spawner:
        yield spawner


@pytest.fixture
def mock_url() -> Iterator[str]:
    """The URL of a ``tandem bench mock-server`` (answers follow a scripted clock) in a process of its own."""
    command = [sys.executable, "-m", "deploy.cli", "bench", "mock-server", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()
