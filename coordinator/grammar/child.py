"""The coordinator's end of the process that screens grammars (:mod:`coordinator.grammar.screening`)."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from coordinator.grammar.task import Done, Setup, Verdict, frame, take

log = logging.getLogger("tandem.grammar")

START_S = 60.0
"""Maximum seconds for the start of the process; large tokenizers load for several."""
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


class Owner(Protocol):
    """What the process reports to. It calls nothing after :meth:`ScreeningProcess.end`."""

    def on_ready(self, verdict: Verdict) -> None:
        """The process has loaded the tokenizer, or ``verdict`` says why it cannot."""

    def on_done(self, done: Done) -> None:
        """A task is screened."""

    def on_lost(self, was_ready: bool) -> None:
        """The process has died or was killed because it hangs. ``was_ready``: after it had started."""


@dataclass(slots=True, eq=False)
class ScreeningProcess:
    """The screening process and the socket to it."""

    owner: Owner
    setup: Setup
    ready: bool = False
    process: subprocess.Popen[bytes] = field(init=False)
    _socket: socket.socket = field(init=False)
    _received: bytearray = field(init=False, default_factory=bytearray)
    _unsent: bytearray = field(init=False, default_factory=bytearray)
    _patience: asyncio.TimerHandle = field(init=False)

    def __post_init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "coordinator.grammar.screening", str(os.getpid())],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    process_group=0,  # a terminal's Ctrl-C goes to the coordinator alone
                    env={**os.environ, **_ENVIRONMENT},
                )
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, self._read)
        self._patience = loop.call_later(START_S, self.hang, "it does not start")
        self.send(frame(self.setup))

    def send(self, data: bytes) -> None:
        """Send ``data`` as soon as the socket takes it."""
        if not self._unsent:
            asyncio.get_running_loop().add_writer(self._socket, self._write)
        self._unsent += data

    def hang(self, why: str) -> None:
        """Kill a process that hangs, and report it as lost."""
        log.warning("the process that compiles grammars is killed: %s", why)
        self._lost()

    def end(self) -> None:
        """Kill the process and wait for its end, which takes milliseconds."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        loop.remove_writer(self._socket)
        self._patience.cancel()
        self._socket.close()
        self.process.kill()
        self.process.wait()

    def _write(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:  # it has died, which the reader finds out
            sent = len(self._unsent)
        del self._unsent[:sent]
        if not self._unsent:
            asyncio.get_running_loop().remove_writer(self._socket)

    def _read(self) -> None:
        try:
            more = self._socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        if not more:
            log.warning("the process that compiles grammars has ended")
            self._lost()
            return
        self._received += more
        while (body := take(self._received)) is not None:
            done = msgspec.msgpack.decode(body, type=Done)
            if done.number:
                self.owner.on_done(done)
                continue
            self.ready = True
            self._patience.cancel()
            self.owner.on_ready(done.verdict)

    def _lost(self) -> None:
        self.end()
        self.owner.on_lost(self.ready)
