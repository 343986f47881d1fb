"""Process groups of two: one prefill and one decode worker, for the link of :mod:`kvtransfer.links.nccl`.

A group is one of torch.distributed, with NCCL between GPUs (gloo in tests). Its rank 0 sends and its rank 1 receives.
NCCL has no tags: both ends must post their operations in the same order. A group whose peer dies, or of which one
operation fails, is lost as a whole, and a new one is made with the next hand-off. Making one blocks, so a thread does
it. Both ends meet in a store that the sender serves, under a name that is new for each group.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from common.core.errors import WireError
from common.kv.storage.device_calls import DeviceBuffer, DeviceCalls

log = logging.getLogger("tandem.kv")

JOIN_S, OFFER_S = 2.0, 10.0
"""Timeouts for making a group: of the receiver, and of the sender, which waits for the receiver to hear of it."""
OPERATION_S = 120.0
"""Timeout of one operation inside torch.distributed. The hand-off and its session give up much earlier."""
_SEPARATOR = " "


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the two ends of a group meet: the store's address and the name of the group in it."""

    backend: str
    host: str
    port: int
    name: str

    def pack(self) -> bytes:
        """Return the meeting as ASCII text, its fields separated by spaces; :meth:`unpack` inverts it."""
        return _SEPARATOR.join((self.backend, self.host, str(self.port), self.name)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Meeting:
        """Parse a packed meeting; raises WireError if ``data`` is none."""
        try:
            backend, host, port, name = data.decode("ascii").split(_SEPARATOR)
            return cls(backend, host, int(port), name)
        except ValueError as error:
            raise WireError("the sender announces no process group") from error


class Operation:
    """One posted send or receive; ``done`` once it has ended."""

    def __init__(self, work: Any) -> None:
        self.work, self.done = work, False


class PairGroup:
    """One end of a group; ``rank`` 0 sends, 1 receives. ``lost`` says why it cannot be used any more, "" while it can.

    A thread makes the group. With gloo, whose operations end only inside ``wait``, it then waits for them one by one.
    """

    def __init__(self, calls: DeviceCalls, meeting: Meeting, rank: int, store: Any = None) -> None:
        self.meeting, self.rank, self._calls, self._store = meeting, rank, calls, store
        self.lost, self.ready = "", False
        self._group: Any = None
        self._posted: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-group", daemon=True)
        self._thread.start()

    def send(self, buffer: DeviceBuffer, size: int) -> Operation:
        """Send the first ``size`` bytes of ``buffer``, which must not change before the operation is done. Raises
        WireError if the group is lost."""
        return self._post("send", buffer, size)

    def receive(self, buffer: DeviceBuffer, size: int) -> Operation:
        """Receive ``size`` bytes into ``buffer``. Raises WireError if the group is lost."""
        return self._post("recv", buffer, size)

    def poll(self, operation: Operation) -> bool:
        """Return whether ``operation`` has ended. Raises WireError if the group is lost."""
        if operation.done:
            return True
        self._demand()
        if self.meeting.backend != "gloo":
            try:
                operation.done = bool(operation.work.is_completed())
                if operation.done and (error := operation.work.exception()) is not None:
                    raise RuntimeError(str(error))
            except RuntimeError as error:
                self.lose(str(error))
                self._demand()
        return operation.done

    def lose(self, why: str) -> None:
        """Give the group up: no operation is posted any more, and those that run are aborted."""
        if not self.lost:
            self.lost = why.splitlines()[0][:200] if why else "unknown"
            log.info("a process group for KV is lost: %s", self.lost)
        self._posted.put(None)
        self._abort()

    def close(self) -> None:
        """Give the group up and wait for its thread."""
        self.lose("closed")
        self._thread.join(OFFER_S + 1.0)
        self._group, self._posted = None, queue.SimpleQueue()  # their operations refer to the memory

    @property
    def ended(self) -> bool:
        """Whether no operation of the group can touch memory any more."""
        return not self._thread.is_alive()

    def _demand(self) -> None:
        if self.lost:
            raise WireError(f"the process group with the other worker is lost: {self.lost}")

    def _post(self, name: str, buffer: DeviceBuffer, size: int) -> Operation:
        self._demand()
        tensor = self._calls.tensor(buffer, size)
        try:
            operation = Operation(getattr(self._group, name)([tensor], 1 - self.rank, 0))
        except RuntimeError as error:
            self.lose(str(error))
            raise WireError(f"the process group with the other worker is lost: {self.lost}") from error
        if self.meeting.backend == "gloo":
            self._posted.put(operation)
        return operation

    def _run(self) -> None:
        try:
            self._group = self._made()
            if self.lost:
                self._abort()
                return
            self.ready = True
            while not self.lost and (operation := self._posted.get()) is not None:
                operation.work.wait(timedelta(seconds=OPERATION_S))
                operation.done = True
        except Exception as error:  # torch raises its own errors, and RuntimeError for most
            self.lost = self.lost or (str(error).splitlines() or [type(error).__name__])[0][:200]

    def _made(self) -> Any:
        dist = _distributed()
        meeting, patience = self.meeting, timedelta(seconds=JOIN_S if self.rank else OFFER_S)
        store = self._store or dist.TCPStore(
            meeting.host, meeting.port, is_master=False, timeout=patience, wait_for_workers=False
        )
        named = dist.PrefixStore(meeting.name, store)
        named.set_timeout(patience)
        if meeting.backend == "gloo":
            options = dist.ProcessGroupGloo._Options()
            options._timeout, options._threads = patience, 1
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.host)]
            return dist.ProcessGroupGloo(named, self.rank, 2, options)
        group = dist.ProcessGroupNCCL(named, self.rank, 2, dist.ProcessGroupNCCL.Options())
        word = self._calls.allocate(1)  # the first operation makes the communicator, which blocks
        try:
            (group.recv if self.rank else group.send)([self._calls.tensor(word, 1)], 1 - self.rank, 0).wait()
        finally:
            self._calls.free(word)
        return group

    def _abort(self) -> None:
        group = self._group
        if group is None:
            return
        with contextlib.suppress(Exception):  # it may be broken already
            if self.meeting.backend == "gloo":  # its abort ends no operation; one that times out ends all
                import torch

                group.recv([torch.empty(1)], 1 - self.rank, 1).wait(timedelta(milliseconds=1))
            group.abort()


def _distributed() -> Any:
    import torch.distributed

    return torch.distributed


class Store:
    """The store in which the groups of one sender meet, at ``host`` and a free port."""

    def __init__(self, host: str) -> None:
        self.host = host
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port = int(listener.getsockname()[1])
        self.store = _distributed().TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=JOIN_S),
            master_listen_fd=listener.detach(),
        )  # fmt: skip

    def meeting(self, backend: str) -> Meeting:
        """Return a new meeting here."""
        return Meeting(backend, self.host, self.port, secrets.token_hex(16))
