"""The link on one host: the receiver maps the sender's pool read-only and pulls, as in :mod:`kvtransfer.links.pull`.

The pool's descriptor is handed out at an *endpoint*, an abstract Unix socket that serves processes of the same user
only. The endpoint of a pool in a GPU's memory hands out two, for :mod:`kvtransfer.links.cuda_ipc`. The receiver checks
the endpoint's user too, since anyone may take the socket's name once its owner has died. Each side gets the other's
user id from the kernel. The endpoint has a thread of its own because the sender's engine may be in the middle of a long
step when a receiver connects.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading

from common.core.ids import Incarnation
from common.kv.storage.cuda import CudaMemory, DeviceDescriptors
from common.kv.storage.host import KvMemory

log = logging.getLogger("tandem.kv")

NAME = "shm"
ONE_PASS_GRAIN = 4
"""Size factor of frames whose receiver copies once: it takes as long as the two copies of one of ``pull.GRAIN``."""
_UCRED = struct.Struct("3i")
_PAUSE_S = 0.1
"""Pause after a failed accept (no descriptors or memory), much shorter than a client's timeout."""
_HOST, _CUDA = b"pool", struct.Struct("<4sQ")
"""What comes with the descriptors: of host memory, and ("cuda", bytes of each slab) of GPUs'."""
_MOST_SLABS = 64


def _is_of_this_user(peer: socket.socket) -> bool:
    """Return whether the process at the other end belongs to our user."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return bool(_UCRED.unpack(credentials)[1] == os.geteuid())


class PoolEndpoint:
    """Hands the descriptors of ``memory`` to processes of the same user that connect to :attr:`address`. Raises
    DeviceFailed if the memory of this GPU cannot be handed out."""

    def __init__(self, memory: KvMemory | CudaMemory, incarnation: Incarnation) -> None:
        self.address = f"tandem-kv-{incarnation}"
        if isinstance(memory, KvMemory):
            self._exported, self._descriptors, self._words = None, [memory.fd], _HOST
        else:  # exported here, since the GPU's driver is called by one thread only
            self._exported = memory.descriptors()
            self._descriptors = [self._exported.generations, *self._exported.slabs]
            self._words = _CUDA.pack(b"cuda", self._exported.slab_bytes)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(socket.SOMAXCONN)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kv-pool-endpoint", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        stuck = False
        while not self._closed.is_set():
            try:
                peer, _ = self._socket.accept()
            except OSError as error:
                if not stuck and not self._closed.is_set():
                    log.warning("the KV pool's endpoint cannot accept connections for now: %s", error)
                stuck = True
                self._closed.wait(_PAUSE_S)
                continue
            stuck = False
            with peer:
                if _is_of_this_user(peer):
                    try:
                        socket.send_fds(peer, [self._words], self._descriptors)
                    except OSError:  # the client has disconnected
                        continue

    def close(self) -> None:
        """Accept no further connections and wait for the thread. Pools that were handed out stay mapped."""
        self._closed.set()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        finally:
            self._socket.close()
            self._thread.join()
            if self._exported is not None:
                self._exported.close()


class PoolConnection:
    """One non-blocking connection to an endpoint. Raises OSError or ValueError if there is no such endpoint."""

    def __init__(self, address: str) -> None:
        self._visitor = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._visitor.setblocking(False)
        try:
            self._visitor.connect(f"\0{address}")  # BlockingIOError, an OSError, if the backlog is full
            if not _is_of_this_user(self._visitor):
                raise PermissionError("a process of another user listens there")
        except (OSError, ValueError):
            self._visitor.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor to poll; it becomes readable when the endpoint has answered."""
        return self._visitor.fileno()

    def answer(self) -> int | DeviceDescriptors | None:
        """Return the pool's descriptors, which the caller then owns: one of host memory, or those of a GPU's. None
        until the endpoint has answered. Raises OSError if it is refused."""
        try:
            words, descriptors, _, _ = socket.recv_fds(self._visitor, 16, 1 + _MOST_SLABS)
        except BlockingIOError:
            return None
        if len(descriptors) == 1 and words == _HOST:
            return descriptors[0]
        if len(descriptors) > 1 and len(words) == _CUDA.size and words.startswith(b"cuda"):
            return DeviceDescriptors(descriptors[0], tuple(descriptors[1:]), _CUDA.unpack(words)[1])
        for each in descriptors:
            os.close(each)
        raise OSError("the endpoint sent no descriptors of a pool")

    def close(self) -> None:
        """Close the connection; descriptors that :meth:`answer` returned stay open."""
        self._visitor.close()
