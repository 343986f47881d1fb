"""The process that screens grammars: it loads the model's tokenizer once and forks one process per task.

All have a low priority, and a fork has 2 s of processor time, 5 s in all, and 256 MiB. At the end of its time the
kernel's alarm kills it, so that no grammar, however hostile, needs anything else to stop it. A crash, too, ends only
the fork. This process itself does nothing but pass messages on, and it ends when the coordinator does. It imports no
torch and never fetches anything.

    python -m coordinator.grammar.screening PARENT_PID  < socket
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from llguidance import LLTokenizer

from common.grammar.limits import parser_limits
from common.platform.parent import die_with
from coordinator.grammar.checks import screen
from coordinator.grammar.errors import CROWDED_OUT, TOO_COMPLEX, UNSUPPORTED
from coordinator.grammar.task import Done, Job, Setup, Task, Verdict, frame, take
from coordinator.grammar.vocabulary import ModelVocabulary

NICENESS, LAST_NICENESS = 5, 19
SUSPECT_S = 0.2
"""Seconds of processor time after which a fork gets the last niceness, so that hostile grammars do not take cores from
workers. Those of ordinary clients take milliseconds."""
MAX_FORKS = 8
"""Forks at the same time. One more ends the oldest."""
_LEAST_WAIT_S = 0.005
"""Least seconds between two looks at the processor time of forks."""
_READ = 1 << 16


@dataclass(slots=True)
class _Fork:
    """A running fork. ``written``: what has arrived from it. ``suspect``: it has the last niceness. ``crowded_out``: it
    was ended in favour of a newer one."""

    number: int
    pid: int
    written: bytearray = field(default_factory=bytearray)
    suspect: bool = False
    crowded_out: bool = False

    def cpu_s(self) -> float:
        """Return the seconds of processor time that it has taken."""
        try:
            return time.clock_gettime(~self.pid << 3 | 2)  # the clock that clock_getcpuclockid(3) names on Linux
        except OSError:  # another system
            return SUSPECT_S


class Screening:
    """The loop of this process. Raises ConnectionError when the coordinator closes the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()
        setup = msgspec.msgpack.decode(self._next(), type=Setup)
        self._seconds, self._wait_s = setup.seconds, setup.wait_s
        self._tokenizer = self._load(setup)
        self._vocabulary = ModelVocabulary(self._tokenizer)
        gc.collect()
        gc.freeze()  # a collection in a fork would copy pages
        self._memory = _address_space() + setup.memory
        self._forks: dict[int, _Fork] = {}
        """By the descriptor of their pipe, oldest first."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    def run(self) -> None:
        """Announce that the process is ready and serve for ever."""
        self._connection.sendall(frame(Done(0)))
        while True:
            for key, _ in self._selector.select(self._yield_to_others()):
                if key.fd != self._connection.fileno():
                    self._read(key.fd)
                    continue
                self._receive()
                while (body := take(self._received)) is not None:
                    self._begin(msgspec.msgpack.decode(body, type=Job))

    def _yield_to_others(self) -> float | None:
        """Give forks that take long the last niceness, and return the seconds until the next one may take long."""
        left = []
        for fork in self._forks.values():
            if fork.suspect:
                continue
            if (more := SUSPECT_S - fork.cpu_s()) > 0:
                left.append(more)
                continue
            fork.suspect = True
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, fork.pid, LAST_NICENESS)
        return max(min(left), _LEAST_WAIT_S) if left else None

    def _load(self, setup: Setup) -> LLTokenizer:
        """Load the tokenizer. If llguidance cannot read it, report that and raise ConnectionError."""
        file = Path(setup.directory) / "tokenizer.json"
        try:
            return LLTokenizer(str(file), n_vocab=setup.vocab_size, eos_token=list(setup.end_ids) or None)
        except Exception as error:
            text = "is not supported for this model: its tokenizer cannot be constrained"
            self._connection.sendall(frame(Done(0, Verdict(error=f"{text} ({str(error)[:200]}).", code=UNSUPPORTED))))
            raise ConnectionResetError from error

    def _next(self) -> bytes:
        """Wait for the next message and return it."""
        while (body := take(self._received)) is None:
            self._receive()
        return body

    def _receive(self) -> None:
        if not (more := self._connection.recv(_READ)):
            raise ConnectionResetError
        self._received += more

    def _begin(self, job: Job) -> None:
        """Fork a process for ``job``. If there are too many, end the oldest, which takes longest."""
        running = [fork for fork in self._forks.values() if not fork.crowded_out]
        if len(running) >= MAX_FORKS:
            running[0].crowded_out = True
            os.kill(running[0].pid, signal.SIGKILL)
        reading, writing = os.pipe()
        parent = os.getpid()
        child = os.fork()
        if not child:
            os.close(reading)
            self._screen(job, writing, parent)
        os.close(writing)
        self._forks[reading] = _Fork(job.number, child)
        self._selector.register(reading, selectors.EVENT_READ)

    def _screen(self, job: Job, writing: int, parent: int) -> None:
        """Do ``job`` in a fork, and end the fork."""
        try:
            die_with(parent)
            self._connection.close()
            log = os.dup(2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a crash prints would fill the log
            self._confine()
            try:
                task = msgspec.msgpack.decode(job.task, type=Task)
                verdict = screen(task, self._tokenizer, self._vocabulary, parser_limits())
            except Exception as error:
                if isinstance(error, MemoryError):
                    raise
                os.write(log, traceback.format_exc().encode())
                verdict = Verdict(error="cannot be compiled: the server failed on it.", code="internal_error")
            with open(writing, "wb") as pipe:
                pipe.write(msgspec.msgpack.encode(verdict))
        except BaseException:  # out of memory, or a panic in llguidance, which is no Exception
            os._exit(1)
        os._exit(0)

    def _confine(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (self._memory, self._memory))
        for alarm, timer, seconds in (
            (signal.SIGPROF, signal.ITIMER_PROF, self._seconds),
            (signal.SIGALRM, signal.ITIMER_REAL, self._wait_s),
        ):
            signal.signal(alarm, signal.SIG_DFL)
            signal.setitimer(timer, seconds)

    def _read(self, descriptor: int) -> None:
        """Read from the pipe of a fork, and report its verdict if it has ended."""
        fork = self._forks[descriptor]
        if more := os.read(descriptor, _READ):
            fork.written += more
            return
        self._selector.unregister(descriptor)
        os.close(descriptor)
        del self._forks[descriptor]
        _, status = os.waitpid(fork.pid, 0)
        self._connection.sendall(frame(Done(fork.number, self._verdict(fork, status))))

    def _verdict(self, fork: _Fork, status: int) -> Verdict:
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.msgpack.decode(fork.written, type=Verdict)
        killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if fork.crowded_out or killed_by == signal.SIGALRM:
            return Verdict(error="takes long to compile.", code=CROWDED_OUT)
        if killed_by == signal.SIGPROF:
            return Verdict(error=f"takes more than {self._seconds:g} s to compile.", code=TOO_COMPLEX)
        return Verdict(error="needs too much memory to compile, or is nested too deeply.", code=TOO_COMPLEX)


def _address_space() -> int:
    """Return the bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main() -> None:
    """Serve the coordinator whose process id is the first argument, over the socket that is standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator decides when this process ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with(int(sys.argv[1]))
    with contextlib.suppress(OSError):  # the coordinator's thread may be urgent or a real-time one
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    with socket.socket(fileno=0) as connection, contextlib.suppress(ConnectionError):
        Screening(connection).run()


if __name__ == "__main__":
    main()
