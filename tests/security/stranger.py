"""A process that connects to sockets without authorization and prints what it received at each.

    python stranger.py  < {"uid": null or N, "attacks": [["unix:NAME" or "HOST:PORT", how], ...],
                           "say": [[hex, ...], [hex, ...]], "wait_s": seconds, "identity": "..."}

``how``: ``raw`` sends the bytes of the second list of ``say`` as they are and waits ``wait_s`` for an answer, ``greet``
sends the greeting of a CURVE peer and waits, ``plain`` is a ZeroMQ dealer without keys that sends the first list,
``curve`` is one with newly made keys. Everything is imported before the process becomes another user, because that user
may not be able to read this directory.

Prints for each attack {"got": [hex, ...], "files": number of descriptors received, "dialled": whether the connection
succeeded}.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq

WAIT_S = 1.5
GREET_WAIT_S = 10.0
"""Seconds. A peer that does not hang up at once aborts the handshake after two seconds."""
MOST_BYTES = 1 << 16
CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""The 64-byte ZMTP 3.0 greeting: signature, version, mechanism, as-server flag (0), filler. A peer answers with its
own."""


def raw(at: str, say: list[bytes], wait_s: float) -> dict[str, Any]:
    unix, _, name = at.rpartition("unix:")
    if unix or at.startswith("unix:"):
        dialled = socket.socket(socket.AF_UNIX)
        address: Any = f"\0{name}"
    else:
        host, _, port = at.rpartition(":")
        dialled, address = socket.socket(), (host, int(port))
    got, files = b"", array.array("i")
    with dialled:
        dialled.settimeout(wait_s)
        try:
            dialled.connect(address)
        except OSError as error:
            return {"got": [], "files": 0, "dialled": False, "error": str(error)}
        with contextlib.suppress(OSError):  # the peer has closed the connection, perhaps after an answer
            for each in say:
                dialled.sendall(each)
        try:
            while len(got) < MOST_BYTES and not files:
                data, passed, _, _ = dialled.recvmsg(4096, socket.CMSG_SPACE(16))
                for _, _, each in passed:
                    files.frombytes(each)
                if not data:
                    break
                got += data
        except OSError:  # the peer has closed the connection, or sends nothing
            pass
    return {"got": [got.hex()] if got else [], "files": len(files), "dialled": True}


def dealer(at: str, say: list[bytes], identity: bytes, *, keyed: bool) -> dict[str, Any]:
    got: list[str] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as dialled:
        dialled.setsockopt(zmq.LINGER, 0)
        dialled.setsockopt(zmq.IDENTITY, identity)
        if keyed:
            public, secret = zmq.curve_keypair()
            dialled.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_keypair()[0])
            dialled.setsockopt(zmq.CURVE_PUBLICKEY, public)
            dialled.setsockopt(zmq.CURVE_SECRETKEY, secret)
        dialled.connect(f"ipc://@{at.removeprefix('unix:')}" if at.startswith("unix:") else f"tcp://{at}")
        for each in say:
            dialled.send(each)
        until = time.monotonic() + WAIT_S
        while (left := until - time.monotonic()) > 0:
            if dialled.poll(1000 * left):
                got += [part.hex() for part in dialled.recv_multipart()]
    return {"got": got, "files": 0, "dialled": True}


def attack(at: str, how: str, asked: dict[str, Any]) -> dict[str, Any]:
    say = [bytes.fromhex(each) for each in asked["say"][how == "raw"]]
    if how == "raw":
        return raw(at, say, asked["wait_s"])
    if how == "greet":
        return raw(at, [CURVE_GREETING], GREET_WAIT_S)
    return dealer(at, say, asked["identity"].encode(), keyed=how == "curve")


def main() -> None:
    asked = json.load(sys.stdin)
    if asked["uid"] is not None:
        os.setgroups([])
        os.setresgid(asked["uid"], asked["uid"], asked["uid"])
        os.setresuid(asked["uid"], asked["uid"], asked["uid"])
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda each: attack(*each, asked), asked["attacks"]))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
