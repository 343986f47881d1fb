"""Whether a dealer is connected, and why the other side does not let it in, as libzmq's monitor tells it.

libzmq dials again for ever when a connection breaks off, but never again after an answer that means no (an error of the
ZAP handler, another security mechanism): whoever waits for a corrected peer has to dial again itself.
"""

from __future__ import annotations

import struct
from typing import Any

import zmq

EVENT = struct.Struct("=HI")
"""What a monitor tells: a zmq.EVENT_…, and a value."""
_MECHANISM_MISMATCH = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
_BROKEN_OFF = 3
"""So many handshakes in a row that just end are no coincidence, such as a peer that is stopped in the middle of one."""
_ASKS_FOR_ONE = "it asks for a key: give this worker the cluster's --cluster-key-file"
_HAS_NONE = "it has no keys: start it with --cluster-key-file too"
_OTHERS = (
    "it breaks every handshake off: most likely it has no keys, or those of another keygen; "
    "give both the same --cluster-key-file"
)


class Handshakes:
    """What became of the handshakes of ``dealer``; ``keyed`` if it speaks CURVE. Used from the dealer's thread."""

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
        """Whether the last handshake succeeded and its connection has not ended: what is sent now leaves now."""
        self.refusal = ""
        """Why there is no connection, and what to do about it; "" as long as nothing speaks against one."""
        self.final = False
        """Whether libzmq has given up: only another dealer dials again."""

    def look(self) -> bool:
        """Takes notice of what has happened; whether a connection was made since the last look."""
        made = False
        while True:
            try:
                event, value = EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return made
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            made |= self.connected
            if event != zmq.EVENT_DISCONNECTED:  # follows on every failure too, of which it says nothing new
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
            self.refusal = f"it does not speak as a coordinator does (error {value:#x}): is the address right?"
        elif self._broken_off >= _BROKEN_OFF:  # of two that do not fit one may hang up before the other can see why
            self.refusal = _OTHERS if self._keyed else f"it breaks every handshake off, most likely {_ASKS_FOR_ONE}"

    def close(self) -> None:
        """To be called before the dealer is closed."""
        self._dealer.disable_monitor()
        self._monitor.close(0)
