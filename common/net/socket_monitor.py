"""Tracks whether a DEALER is connected and why its peer refuses it, from the events of libzmq's socket monitor.

libzmq reconnects for ever when a connection breaks, but never after a definite refusal (an error of the ZAP handler,
another security mechanism). To reach a peer whose configuration is corrected later, the caller must open a new socket.
"""

from __future__ import annotations

import struct
from typing import Any

import zmq

EVENT = struct.Struct("=HI")
"""The first part of a monitor message: a zmq.EVENT_… and its value."""
_MECHANISM_MISMATCH = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
_BROKEN_OFF = 3
"""Handshakes in a row that end without a reason before they count as a refusal. Fewer can be a coincidence, such as a
peer that stops in the middle of a handshake."""
_ASKS_FOR_ONE = "it requires a key: give this worker the cluster's --cluster-key-file"
_HAS_NONE = "it has no keys: start it with --cluster-key-file as well"
_OTHERS = (
    "it breaks off every handshake; most likely it has no keys, or keys of another tandem keygen: "
    "give both the same --cluster-key-file"
)


class Handshakes:
    """The outcome of the handshakes of ``dealer``; ``keyed`` if it uses CURVE. Used only from the dealer's thread."""

    ENDINGS = (
        zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_DISCONNECTED
    )
    EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | ENDINGS

    def __init__(self, dealer: zmq.Socket[Any], monitor: zmq.Socket[Any], *, keyed: bool) -> None:
        self._dealer, self._monitor, self._keyed = dealer, monitor, keyed
        self._broken_off = 0
        self.connected = False
        """Whether the last handshake succeeded and its connection is still open, so that messages leave at once."""
        self.refusal = ""
        """Why the peer refuses a connection and what to do about it; "" if no refusal is known."""
        self.final = False
        """Whether libzmq has stopped reconnecting; only a new socket can connect."""

    def look(self) -> bool:
        """Process all pending events; return whether a connection was made among them."""
        made = False
        while True:
            try:
                event, value = EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return made
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            made |= self.connected
            if event != zmq.EVENT_DISCONNECTED:  # also follows every failure, and adds no information to it
                self._heard(event, value)

    def _heard(self, event: int, value: int) -> None:
        self.final = event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        self._broken_off = self._broken_off + 1 if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL else 0
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.refusal = ""
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refusal = "it does not admit this worker's key: give both a --cluster-key-file of the same keygen"
        elif value == _MECHANISM_MISMATCH:
            self.refusal = _HAS_NONE if self._keyed else _ASKS_FOR_ONE
        elif self.final:
            self.refusal = f"it does not behave like a coordinator (error {value:#x}): check the address"
        elif self._broken_off >= _BROKEN_OFF:  # on a mismatch one side may hang up before the other learns the reason
            self.refusal = _OTHERS if self._keyed else f"it breaks off every handshake; most likely {_ASKS_FOR_ONE}"

    def close(self) -> None:
        """Stop monitoring. Must be called before the dealer is closed."""
        self._dealer.disable_monitor()
        self._monitor.close(0)
