"""What another rank answers to the pings of rank 0."""

from __future__ import annotations

import socket
import threading

import msgspec

from common.core.errors import DeviceLost
from deploy.launcher.status import Reason
from deploy.ranks.follower import Channel, Watched
from deploy.ranks.group import PING, PONG

ILLEGAL = "CUDA error: an illegal memory access was encountered"


def test_a_gpu_that_fails_is_reported_while_the_main_thread_waits_for_a_message() -> None:
    """Rank 0 cannot send one, since it waits for this rank's GPU."""
    failed = threading.Event()

    def check() -> None:
        if failed.is_set():
            raise DeviceLost(ILLEGAL)

    ours, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(10)
    near, far = socket.socketpair()
    with near, far:
        Channel(near, Watched(own, "rank 1 of 2")).watch(check)
        ours.send(PING)
        assert ours.recv(4096) == PONG
        failed.set()
        ours.send(PING)
        error = msgspec.json.decode(ours.recv(4096), type=Reason).error()
    assert str(error) == f"the GPU of rank 1 of 2 has failed: {ILLEGAL}" and "nvidia-smi" in error.todo
    # the thread now waits for the end of the process, and no longer for the socket, whose end would exit this one
    ours.close()
