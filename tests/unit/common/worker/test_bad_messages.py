"""Invalid requests and messages do no harm."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import msgspec
import pytest
import zmq

from common.core.errors import WireError
from common.core.ids import pack_tokens
from common.net.messages import FromWorker
from common.net.wire import decode, seal
from tests.unit.workers import Bench, make_request

_SENSE: dict[str, Any] = {"prompt": pack_tokens([1, 2, 3]), "sampling": [8, 1], "n": 2, "emitted": [], "ended": []}
_NONSENSE: dict[str, dict[str, Any]] = {
    "no whole tokens": {"prompt": b"abc"},
    "no prompt": {"prompt": b""},
    "a strange token": {"prompt": pack_tokens([1, 1 << 31])},
    "less than no output": {"sampling": [-1, 1]},
    "no choice": {"n": 0},
    "choices without end": {"n": 1 << 40},
    "no whole tokens of output": {"emitted": [b"", b"abc"]},
    "a strange token of output": {"emitted": [b"", pack_tokens([1 << 31])]},
    "output of too many": {"emitted": [b"", b"", b""]},
    "output of too few": {"emitted": [b""]},
    "ended without output": {"ended": [0]},
    "no ended choice": {"emitted": [b"", b""], "ended": [2]},
    "all have ended": {"emitted": [b"", b""], "ended": [0, 1]},
    "an attempt without end": {"attempt": 1 << 40},
}


NIXL = [pytest.mark.torch, pytest.mark.skipif(find_spec("nixl") is None, reason="the extra nixl is not installed")]


@pytest.mark.parametrize(
    "pair",
    [
        "shm",
        pytest.param("zmq", marks=pytest.mark.whole),
        pytest.param("nixl", marks=[pytest.mark.whole, *NIXL]),
    ],
    indirect=True,
)
@pytest.mark.parametrize("wrong", _NONSENSE.values(), ids=_NONSENSE)
def test_worker_counts_invalid_request_and_serves_next(pair: Bench, wrong: dict[str, Any]) -> None:
    """Messages of the right type with invalid content are counted, and the next request is served."""
    said = {**_SENSE, **wrong}
    fields = [bytes(16), said["prompt"], said["sampling"], said["n"], said["emitted"], "", 0, 1000, said["ended"]]
    attempt = said.get("attempt", 1)
    peers = {name: msgspec.to_builtins(pair.peer(name), builtin_types=(bytes,)) for name in pair.hellos}
    for worker, message in (
        ("decode-1", ["reserve", fields, attempt, peers["prefill-0"]]),
        ("decode-1", ["generate", fields, attempt]),
        ("prefill-0", ["prefill", fields, attempt, peers["decode-1"]]),
    ):
        before = pair.workers[worker].membership.bad_messages
        pair.socket.send_multipart([pair.routes[worker], seal(msgspec.msgpack.encode(message))])
        pair.until(lambda: pair.workers[worker].membership.bad_messages > before)  # noqa: B023
    request = make_request(20, 3)
    pair.place(request, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(request))
    pair.check(request)


def test_worker_survives_garbage_on_wire(pair: Bench) -> None:
    request = make_request(80, 5)
    stranger = pair.context.socket(zmq.DEALER)
    stranger.connect(pair.peer("decode-1").address)
    for parts in ([b""], [b"x" * 68, b"y"], [b"TKV1" + b"\0" * 60, b""], [b"\xc1"], [b"a"] * 6):
        stranger.send_multipart(parts)
    pair.place(request, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(request))
    pair.until(lambda: pair.workers["decode-1"].receiver.bad_messages >= 4)  # type: ignore[attr-defined]
    stranger.close(0)
    pair.check(request)
    with pytest.raises(WireError):
        decode(b"\xc1", FromWorker)
