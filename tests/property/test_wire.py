"""Messages to bytes and back: every type round-trips, the bytes are pinned, and no bytes but ours are accepted.

The pinned bytes lie in ``tests/golden/wire.json``. When they change on purpose, processes of two versions can no longer
talk: raise ``PROTOCOL`` and write the file anew with
``make golden ARGS=wire``.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
import tracemalloc
import types
import typing
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.core.errors import Damaged, WireError
from common.core.gpu import MAX_GPUS, MAX_XIDS, GpuState
from common.core.ids import TOKEN_ID_BYTES, Incarnation, RequestId, TransferId, WorkerName, pack_tokens, unpack_tokens
from common.core.request import MAX_ALLOWED_IDS, MAX_GRAMMAR, Request, SamplingParams
from common.kv.prefix import chain_root, extend_chain
from common.net import messages
from common.net.messages import (
    MAX_HELD,
    MAX_KEYS,
    MAX_SPANS,
    MAX_TEXT,
    PROTOCOL,
    Abort,
    Accept,
    Ack,
    Cached,
    Cancel,
    Commit,
    Drain,
    FromWorker,
    Generate,
    Goodbye,
    Gpus,
    Grant,
    Heard,
    Heartbeat,
    Hello,
    Lease,
    LeaseAck,
    Leaving,
    Logprobs,
    Measure,
    Measured,
    Message,
    Moved,
    NameTaken,
    Open,
    Peer,
    Ping,
    Prefill,
    PromptLogprobs,
    Rejected,
    Rejoin,
    Released,
    RequestFailed,
    Resend,
    ResendPrompt,
    Reserve,
    Timing,
    ToDecode,
    ToHeartbeatThread,
    Tokens,
    ToPrefill,
    ToWorker,
    Welcome,
)
from common.net.sockets import identity
from common.net.wire import (
    DIGEST_BYTES,
    MAX_ARRAY_ITEMS,
    MAX_CONTAINERS,
    MAX_HANDOFF_BYTES,
    MAX_MAP_ITEMS,
    MAX_MESSAGE_BYTES,
    MAX_REPORT_BYTES,
    MAX_STRING_BYTES,
    UNCOUNTED_BYTES,
    decode,
    encode,
    seal,
    unseal,
)
from coordinator.api.openai import MAX_BIASES, MAX_CHOICES, MAX_LOGPROBS
from kvtransfer.frames import UNSAID, FrameHeader, Rectangle, checksum_of, fold
from kvtransfer.links.pull import signed
from kvtransfer.peer_proof import proof, proven

GOLDEN = Path(__file__).parents[1] / "golden" / "wire.json"
UNIONS = (FromWorker, ToHeartbeatThread, ToWorker, ToDecode, ToPrefill)
KINDS = {union: typing.get_args(union) or (union,) for union in UNIONS}
TAGGED = {
    kind.__struct_config__.tag: kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind.__struct_config__.tag is not None
}


# -- values of any message type, from its annotations -----------------------------------------------------------------

_PACKED = MAX_ALLOWED_IDS * TOKEN_ID_BYTES
"""The length of the annotation that allows whole token ids only."""


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """A strategy for everything that ``annotation`` allows, NaN apart (it equals nothing)."""
    if typing.get_origin(annotation) is typing.Annotated:
        inner, meta = annotation.__origin__, annotation.__metadata__[0]
        if inner is str or getattr(inner, "__supertype__", None) is str:
            return st.text(max_size=8)
        if typing.get_origin(inner) in (tuple, dict):
            return values(inner).filter(lambda value: len(value) >= (meta.min_length or 0))
        if inner is float:
            return st.floats(meta.ge, meta.le)
        if inner is not int:
            drawn = st.binary(min_size=meta.min_length or 0, max_size=meta.max_length)
            return drawn.map(lambda data: data[: len(data) & ~3]) if meta.max_length == _PACKED else drawn
        return st.integers(meta.ge, meta.lt - 1 if meta.le is None else meta.le)
    if isinstance(annotation, typing.NewType):
        return values(annotation.__supertype__)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        assert arguments[1] is ...
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if annotation is Request:
        return requests()
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return st.builds(annotation, **{field.name: values(field.type) for field in msgspec.structs.fields(annotation)})
    return {
        int: st.integers(-(1 << 63), (1 << 64) - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=12),
        bool: st.booleans(),
        type(None): st.none(),
    }[annotation]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Columns that fit together."""
    fields = {field.name: field.type for field in msgspec.structs.fields(Request)}
    drawn = {name: draw(values(kind)) for name, kind in fields.items() if name not in ("prompt", "emitted", "ended")}
    tokens = st.lists(st.integers(0, (1 << 32) - 1), max_size=3).map(pack_tokens)
    emitted = tuple(draw(st.lists(tokens, min_size=drawn["n"], max_size=drawn["n"]) | st.just([])))
    ended = draw(st.sets(st.integers(0, drawn["n"] - 1), max_size=drawn["n"] - 1)) if emitted else set()
    prompt = draw(tokens.filter(bool))
    to_score = 0 if drawn["sampling"].prompt_logprobs is None else len(prompt) // TOKEN_ID_BYTES - 1
    drawn["scored"] = draw(st.integers(0, to_score))
    return Request(prompt=prompt, emitted=emitted, ended=tuple(ended), **drawn)


@pytest.mark.parametrize("tag", sorted(TAGGED))
def test_every_message_survives_the_wire(tag: str) -> None:
    kind = TAGGED[tag]
    unions = [union for union in UNIONS if kind in KINDS[union]]
    assert unions, f"{kind.__name__} goes in no direction"

    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(values(kind))
    def round_trip(message: Message) -> None:
        data = encode(message)
        for union in unions:
            again = decode(data, union)
            assert again == message
            assert type(again) is kind
        assert decode(memoryview(data), kind) == message

    round_trip()


@given(st.lists(st.integers(0, (1 << 32) - 1)))
def test_token_ids_survive(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(tokens)) == tokens
    assert pack_tokens(tokens) == struct.pack(f"<{len(tokens)}I", *tokens)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7])
def test_half_a_token_is_no_token(length: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_tokens(b"x" * length)


# -- golden bytes -----------------------------------------------------------------------------------------------------

_ID = bytes(range(16))
_SAMPLING = SamplingParams(
    max_tokens=7,
    seed=2**63 + 1,
    temperature=0.5,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.1,
    frequency_penalty=-0.5,
    presence_penalty=0.25,
    logit_bias={3: -100.0, 70_000: 1.5},
    min_tokens=2,
    stop_token_ids=(9, 10),
    eos_token_ids=(1,),
    ignore_eos=True,
    logprobs=2,
)
_REQUEST = Request(
    id=_ID,  # type: ignore[arg-type]
    prompt=pack_tokens([5, 300, 70_000]),
    sampling=_SAMPLING,
    n=2,
    emitted=(pack_tokens([6]), b""),
    cache_salt="tenant ä",
    priority=-1,
    deadline_ms=30_000,
)
_PEER = Peer("prefill-0", "00ff00ff00ff00ff", "tcp://127.0.0.1:5555", "boot/ipc:net/0", "float32")  # type: ignore[arg-type]
_LOGPROBS = Logprobs(-0.5, pack_tokens([4, 5]), (-0.5, -1.5))
_COMMITTED: tuple[Any, ...] = (_ID, 1, 500, 32, 4, 65_536, 2**63, "1" * 16)
_HELLO: dict[str, Any] = {
    "protocol": 1,
    "name": "decode-0",
    "incarnation": "0123456789abcdef",
    "role": "decode",
    "model": "tiny",
    "fingerprint": "f" * 16,
    "layout": "1" * 16,
    "pid": 4242,
    "host": "somewhere",
    "host_id": "boot/ipc:net/0",
    "data_address": "tcp://127.0.0.1:6001",
    "links": ("shm", "zmq"),
    "kv_blocks": 1024,
    "block_size": 16,
    "max_model_len": 4096,
    "vocab_size": 512,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "device": "cpu",
    "dtype": "float32",
}
_BEAT: dict[str, Any] = {
    "incarnation": "0123456789abcdef",
    "acted_on": 12,
    "live": _ID,
    "free": 100,
    "cached": 20,
    "held": 8,
    "running": 3,
    "waiting": 1,
    "waiting_tokens": 900,
    "turn_ms": -1,
    "draining": False,
    "counters": {"preemptions": 2.0},
    "expected_ms": 40,
    "resting": _ID,
    "longest_ms": 60,
    "asked": 3,
    "unix_ms": 1_764_571_234_567,
}
_GPU = GpuState(
    0, "GPU-0123", "NVIDIA H100 80GB HBM3", 87, 60 << 30, 80 << 30, 412_000, 700_000, 64, 1755, 2619, 4, 18, 1 << 40,
    1 << 41, 3, 0, 1, 0, False, False, None, None, 0, {31: 2},
)  # fmt: skip
EXAMPLES: list[Message] = [
    Hello(**_HELLO),
    Heartbeat(**_BEAT),
    Gpus((_GPU, GpuState(1, "GPU-4567", "a card without readings")), "GPU 1 is lost"),
    Tokens(_ID, (0,), (1,), (4,), (2,), (1,), (9,), pack_tokens([7, 9]), (_LOGPROBS, None)),
    PromptLogprobs(_ID, 1, 2, bytes(8), b"\1\0\0\0" * 2, bytes(16), bytes(16)),  # type: ignore[arg-type]
    Timing(_ID, 1, {"queue_ms": 1.5, "cached_tokens": 32.0}, "shm"),  # type: ignore[arg-type]
    RequestFailed(_ID, 1, "no_memory", "the pool is full", True),  # type: ignore[arg-type]
    Cached(b"a" * 16, b"b" * 16),
    Measured("0123456789abcdef", "shm", 65_536, 0.002),  # type: ignore[arg-type]
    LeaseAck("0123456789abcdef"),  # type: ignore[arg-type]
    Goodbye("0123456789abcdef", "drained"),  # type: ignore[arg-type]
    Welcome("0123456789abcdef", 500, 8000, 2000),  # type: ignore[arg-type]
    Rejected("another model"),
    NameTaken("decode-0 lives"),
    Rejoin(),
    Ping(3),
    Prefill(_REQUEST, 1, _PEER),
    Reserve(_REQUEST, 1, _PEER),
    Generate(_REQUEST, 1),
    Abort(_ID, 1),  # type: ignore[arg-type]
    Resend(_ID, 1, 0, 5),  # type: ignore[arg-type]
    ResendPrompt(_ID, 1, 5),  # type: ignore[arg-type]
    Measure(_ID, 0, _PEER, 256),  # type: ignore[arg-type]
    Drain(30_000),
    Leaving(),
    Moved(Incarnation("w")),
    Lease(bytes(20), 7),
    Open(_ID, 1, "0123456789abcdef", 500, "1" * 16, "bfloat16", "boot/ipc:net/0", "tandem-1", 1024, 16, 2),  # type: ignore[arg-type]
    Grant(_ID, 1, 32, "shm", 1 << 20, 40),  # type: ignore[arg-type]
    Heard(_ID, 1, 40),  # type: ignore[arg-type]
    Ack(_ID, 1, 3, 65_536, 1_048_576),  # type: ignore[arg-type]
    Commit(*_COMMITTED, pack_tokens([7]), (0,), (-1,), (_LOGPROBS,), {"cached_tokens": 32.0}, bytes(16)),
    Accept(_ID, 1, 65_536),  # type: ignore[arg-type]
    Released(_ID, 1),  # type: ignore[arg-type]
    Cancel(_ID, 1, "aborted"),  # type: ignore[arg-type]
]


def golden() -> dict[str, Any]:
    return {
        "protocol": PROTOCOL,
        "messages": {example.__struct_config__.tag: encode(example).hex() for example in EXAMPLES},
        "beside messages": {name: data.hex() for name, data in beside_messages().items()},
    }


def beside_messages() -> dict[str, bytes]:
    """What else two processes must agree on: headers of KV frames, checksums, proofs, prefix keys, and socket names."""
    transfer, cells = TransferId(RequestId(_ID), 3), Rectangle(0, 2, 16, 48)
    payload = np.arange(64, dtype=np.uint8)
    commit = next(each for each in EXAMPLES if isinstance(each, Commit))
    headers = [
        FrameHeader(transfer, 7, cells, 4096, checksum_of(payload)).pack(),
        FrameHeader(transfer, 1 << 31, Rectangle(1, 80, 0, 1 << 20), 1 << 40, UNSAID).pack(),
    ]
    return {
        "frame header": headers[0],
        "frame header of much, unsaid checksum": headers[1],
        "frames folded": fold(fold(0, checksum_of(payload)), 5).to_bytes(8, "little"),
        "directions to cells": signed(b"directions", transfer, cells, checksum_of(payload)),
        "proof of an open": proof(bytes(16), transfer, "open"),
        "proof of a grant": proof(bytes(16), transfer, "grant"),
        "proven commit": encode(proven(commit, bytes(16))),
        "prefix keys": b"".join(extend_chain(chain_root("salt", "f" * 16, "bfloat16"), [], list(range(70)))),
        "name of a control socket": identity(WorkerName("decode-0"), Incarnation("0123456789abcdef")),
        "name of a heartbeat socket": identity(WorkerName("decode-0"), Incarnation("0123456789abcdef"), beats=True),
    }


def freeze() -> None:
    GOLDEN.write_text(json.dumps(golden(), indent=2) + "\n")


def test_there_is_an_example_of_every_message() -> None:
    assert {type(example) for example in EXAMPLES} == set(TAGGED.values())


def test_the_bytes_on_the_wire_have_not_changed() -> None:
    pinned, now = json.loads(GOLDEN.read_text()), golden()
    for part in ("messages", "beside messages"):
        changed = [name for name in now[part] if pinned[part].get(name) != now[part][name]]
        assert not changed, f"the bytes of {', '.join(changed)} changed; see the docstring of this file"
    assert pinned == now


def test_pinned_bytes_are_still_understood() -> None:
    pinned = json.loads(GOLDEN.read_text())["messages"]
    for example in EXAMPLES:
        assert decode(bytes.fromhex(pinned[example.__struct_config__.tag]), type(example)) == example


# -- anything else is refused, in one way -----------------------------------------------------------------------------

valid = st.sampled_from(EXAMPLES).map(encode)
unions = st.sampled_from(UNIONS)


def refused(data: bytes, kind: Any) -> None:
    with pytest.raises(WireError):
        decode(data, kind)


@settings(max_examples=300)
@given(st.binary(max_size=200), unions)
def test_random_bytes(data: bytes, kind: Any) -> None:
    try:
        message = decode(data, kind)
    except WireError:
        return
    assert isinstance(message, typing.get_args(kind)), "accepted, so it must really be one"


@given(valid, unions, st.data())
def test_truncated(data: bytes, kind: Any, draw: st.DataObject) -> None:
    refused(data[: draw.draw(st.integers(0, len(data) - 1))], kind)
    refused(seal(unseal(data)[: draw.draw(st.integers(0, len(data) - DIGEST_BYTES - 1))]), kind)


@given(valid, unions, st.binary(min_size=1, max_size=8))
def test_trailing_bytes(data: bytes, kind: Any, tail: bytes) -> None:
    refused(data + tail, kind)
    refused(seal(bytes(unseal(data)) + tail), kind)


@settings(max_examples=300)
@given(valid, unions, st.data())
def test_flipped_bits_are_another_message_or_refused(data: bytes, kind: Any, draw: st.DataObject) -> None:
    changed = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 3))):
        changed[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    try:
        message = decode(bytes(changed), kind)
    except WireError:
        return
    assert isinstance(message, typing.get_args(kind) or kind)


@settings(max_examples=300)
@given(valid, unions, st.data())
def test_msgspec_understands_the_same(data: bytes, kind: Any, draw: st.DataObject) -> None:
    """msgspec's own decoder, the slow oracle here, accepts what is accepted and refuses the rest, also behind a right
    digest."""
    changed = bytearray(unseal(data))
    for _ in range(draw.draw(st.integers(0, 2))):
        changed[draw.draw(st.integers(0, len(changed) - 1))] = draw.draw(st.integers(0, 255))
    try:
        wanted = msgspec.msgpack.decode(changed, type=kind)
    except (ValueError, TypeError, OverflowError):
        refused(seal(bytes(changed)), kind)
        return
    assert repr(decode(seal(bytes(changed)), kind)) == repr(wanted)


@given(valid)
def test_msgspec_writes_the_same(data: bytes) -> None:
    packed = unseal(data)
    message = next(each for each in EXAMPLES if encode(each) == data)
    assert msgspec.msgpack.encode(message) == packed


def test_wire_limits_exceed_largest_messages() -> None:
    assert MAX_ARRAY_ITEMS >= MAX_SPANS
    assert MAX_MAP_ITEMS >= MAX_BIASES
    assert 4 * max(MAX_TEXT, MAX_GRAMMAR) <= MAX_STRING_BYTES
    assert MAX_CONTAINERS >= 2 * MAX_SPANS + 64
    biased = msgspec.structs.replace(_SAMPLING, logit_bias=dict.fromkeys(range(MAX_BIASES), 1.0))
    message = Generate(msgspec.structs.replace(_REQUEST, sampling=biased), 1)
    assert decode(encode(message), ToWorker) == message


def test_a_message_that_goes_the_other_way() -> None:
    for example in EXAMPLES:
        for union in UNIONS:
            if type(example) not in KINDS[union]:
                refused(encode(example), union)


_DEEP = 100_000
_COMMIT = msgpack.packb(["commit", _ID, 1, 500, 32, 4, 65_536, 7, "1" * 16, bytes(4), [], [], []])[:-3]
"""A Commit as far as its columns."""


def _wide(items: int) -> bytes:
    """An array of arrays, ``items`` in all, each an object of its own to whoever builds it first and looks later."""
    row = b"\xdd" + struct.pack(">I", 1 << 10) + b"\x90" * (1 << 10)
    return b"\xdd" + struct.pack(">I", items >> 10) + row * (items >> 10)


def _biased(key: Any) -> bytes:
    """A Generate whose logit bias has ``key`` in place of a token id."""

    def swapped(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: 1.0}
        return [swapped(each) for each in part] if isinstance(part, list | tuple) else part

    return msgpack.packb(swapped(msgspec.to_builtins(Generate(_REQUEST, 1), builtin_types=(bytes,))))


HOSTILE = {
    "empty": b"",
    "many small arrays": b"\xdc\x10\x00" + b"\x90" * (1 << 12),
    "many containers": _wide(MAX_CONTAINERS + (1 << 10)) + bytes(UNCOUNTED_BYTES),
    "nil": b"\xc0",
    "huge array header": b"\xdd\xff\xff\xff\xff",
    "huge map header": b"\xdf\xff\xff\xff\xff",
    "huge string header": b"\xdb\xff\xff\xff\xff",
    "huge binary header": b"\xc6\xff\xff\xff\xff",
    "huge header inside": b"\x93\xa5abort\xc6\xff\xff\xff\xff\x01",
    "nested arrays": b"\x91" * _DEEP + b"\xc0",
    "nested maps": b"\x81\xa1a" * _DEEP + b"\xc0",
    "nested after a tag": b"\x92\xa6turned" + b"\x91" * _DEEP + b"\xc0",
    "extension type": b"\x92\xa6turned" + msgpack.packb(msgpack.ExtType(5, b"x")),
    "empty extension": b"\x92\xa6turned\xc7\x00\x05",
    "timestamp": b"\x92\xa6turned" + msgpack.packb(msgpack.Timestamp(1, 2)),
    "wide and nested": _wide(1 << 20),
    "huge array header in a field": b"\x93\xa5hello" + b"\xdd\xff\xff\xff\xff",
    "huge array header of choices": _COMMIT + b"\xdd\xff\xff\xff\xff\x01",
    "huge map header in a field": b"\x95\xa6timing\xc4\x10" + _ID + b"\x01\xdf\xff\xff\xff\xff",
    "nested headers of much": b"\xdc\x0f\xff" * 100,
    "nested headers of much, as deep as the stack": b"\xdc\x0f\xff" * 1000,
    "nested headers of much, deeper than the stack": b"\xdc\x0f\xff" * 1400,
    "nested map headers of much": b"\xde\x0f\xff\xa1a" * 1000,
    "trailing bytes": msgpack.packb(["abort", _ID, 1]) + b"\x00",
    "a second message": msgpack.packb(["abort", _ID, 1]) * 2,
    "number for a figure's name": msgpack.packb(["timing", _ID, 1, {1: 1.0}]),
    **{f"{key!r} for a biased token": _biased(key) for key in ("7", 7.0, True, b"7", None)},
    "bytes for a figure's name": msgpack.packb(["timing", _ID, 1, {b"a": 1.0}]),
    "map with arrays for keys": b"\x81\x91\x01\x01",
    "map with twice the same key": b"\x95\xa6timing\xc4\x10" + _ID + b"\x01\x82\xa1a\xc0\xa1a\xc0\xa0",
    "timestamp of 96 bits": b"\x92\xa6turned\xc7\x0c\xff" + bytes(12),
    "nested in a column": _COMMIT + b"\x91" * _DEEP + b"\xc0",
    "reserved byte": b"\xc1",
    "pickle": pickle.dumps({"cmd": "run"}),
    "pickle with code": b"cos\nsystem\n(S'true'\ntR.",
    "json": b'["turned", "x"]',
    "unknown tag": msgpack.packb(["nonsense", 1]),
    "tag of another type": msgpack.packb([1, 2]),
    "no tag": msgpack.packb([]),
    "a map": msgpack.packb({"type": "turned", "reason": "x"}),
    "invalid unicode": b"\x92\xa6turned\xa2\xff\xfe",
    "surrogate": b"\x92\xa6turned\xa3\xed\xa0\x80",
    "too few fields": msgpack.packb(["abort", _ID]),
    "too many fields": msgpack.packb(["abort", _ID, 1, 2]),
    "text for bytes": msgpack.packb(["abort", "0" * 16, 1]),
    "bytes for text": msgpack.packb(["turned", b"x"]),
    "true for a number": msgpack.packb(["abort", _ID, True]),
    "text for a number": msgpack.packb(["abort", _ID, "1"]),
    "float for a number": msgpack.packb(["abort", _ID, 1.5]),
    "short id": msgpack.packb(["abort", _ID[:15], 1]),
    "long id": msgpack.packb(["abort", _ID + b"x", 1]),
    "negative count": msgpack.packb(["abort", _ID, -1]),
    "count out of range": msgpack.packb(["abort", _ID, 1 << 62]),
    "nil for a field": msgpack.packb(["abort", _ID, None]),
    "infinity for a figure": msgpack.packb(["timing", _ID, 1, {"kv_bytes": math.inf}]),
    "no number for a figure": msgpack.packb(["timing", _ID, 1, {"kv_bytes": math.nan}]),
    "unhashable key": b"\x93\xa6timing\xc4\x10" + _ID + b"\x01\x81\x90\x01",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    "kind", UNIONS, ids=["from worker", "to heartbeat thread", "to worker", "to decode", "to prefill"]
)
def test_hostile_bytes(name: str, kind: Any) -> None:
    """With a valid digest, as an attacker would send them; little is built of them before they are refused."""
    refused(HOSTILE[name], kind)
    data = seal(HOSTILE[name])
    tracemalloc.start()
    try:
        refused(data, kind)
        assert tracemalloc.get_traced_memory()[1] < (1 << 20) + 2 * len(data)
    finally:
        tracemalloc.stop()


def test_a_bias_of_a_token_id_is_decoded() -> None:
    """The messages with other keys in HOSTILE are right otherwise."""
    assert decode(seal(_biased(7)), ToWorker).request.sampling.logit_bias == {7: 1.0}


def test_too_large_a_message_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(WireError, match="allowed") as caught:
        decode(seal(bytes(MAX_MESSAGE_BYTES)), ToWorker)
    assert not isinstance(caught.value, Damaged)


def test_oversized_message_counts_as_damage() -> None:
    with pytest.raises(Damaged):
        decode(bytes(MAX_MESSAGE_BYTES + 1), ToWorker)


def test_the_largest_messages_of_a_hand_off_are_far_below_their_limit() -> None:
    shown = Logprobs(-0.5, pack_tokens(range(MAX_LOGPROBS)), (-0.5,) * MAX_LOGPROBS)
    first = pack_tokens([7] * MAX_CHOICES)
    columns = ((0,) * MAX_CHOICES, (-1,) * MAX_CHOICES, (shown,) * MAX_CHOICES)
    figures = {f"{number:0128d}": 1.5 for number in range(64)}
    host_id, pool, agent = "h" * 512, "p" * 128, bytes(1 << 16)
    for message in (
        Commit(*_COMMITTED, first, *columns, figures, bytes(64)),
        Open(_ID, 1, "i" * 64, 500, "1" * 16, "bfloat16", host_id, pool, 1024, 16, 2, bytes(64), agent),  # type: ignore[arg-type]
    ):
        assert decode(encode(message), ToDecode, MAX_HANDOFF_BYTES) == message
        assert len(encode(message)) < MAX_HANDOFF_BYTES / 3


def _largest_gpu() -> GpuState:
    most = (1 << 62) - 1
    counts = dict.fromkeys(GpuState.__struct_fields__[3:-1], most)
    counts |= {"temperature": 1000, "remap_pending": True, "remap_failed": True}
    return GpuState(most, "u" * 128, "n" * 128, **counts, xids={most - number: most for number in range(MAX_XIDS)})


def test_a_report_of_a_card_is_small() -> None:
    """It is sent once a second."""
    assert len(encode(Gpus((_GPU,)))) < 160


@pytest.mark.parametrize("field", GpuState.__struct_fields__)
def test_a_reading_of_the_wrong_type_is_refused(field: str) -> None:
    wrong: Any = "x" * 129 if field in ("uuid", "name") else {1: -1} if field == "xids" else -(1 << 40)
    refused(encode(Gpus((msgspec.structs.replace(_GPU, **{field: wrong}),))), FromWorker)


def test_the_largest_reports_of_a_worker_are_below_their_limit() -> None:
    shown = Logprobs(-0.123456789, pack_tokens(range(MAX_LOGPROBS)), (-0.123456789,) * MAX_LOGPROBS)
    column, large = (0,) * MAX_SPANS, ((1 << 32) - 1,) * MAX_SPANS
    ids, keys = pack_tokens(large), bytes(16 * MAX_KEYS)
    requests = bytes(16 * MAX_SPANS)
    counters = {f"counter_{number}": 1e9 for number in range(64)}
    for message in (
        Tokens(requests, column, large, large, column, column, large, ids, (shown,) * MAX_SPANS),
        msgspec.structs.replace(
            Heartbeat(**_BEAT), live=bytes(16 * MAX_HELD), resting=bytes(16 * MAX_HELD), counters=counters
        ),
        Gpus((_largest_gpu(),) * MAX_GPUS, "x" * MAX_TEXT),
        Cached(keys, keys),
        RequestFailed(_ID, 1, "engine_error", "x" * MAX_TEXT, True),  # type: ignore[arg-type]
    ):
        assert decode(encode(message), FromWorker, MAX_REPORT_BYTES) == message
        assert len(encode(message)) < 0.75 * MAX_REPORT_BYTES


def _array(length: int) -> bytes:
    return b"\xdd" + length.to_bytes(4, "big")


@pytest.mark.parametrize(
    "data",
    [
        b"\x9a\xa6tokens\xc4\x00" + _array(1 << 20) + b"\x01" * (1 << 20) + b"\x90" * 5 + b"\xc4\x00\x90",
        b"\x9a\xa6tokens\xc4\x00" + b"\x90" * 6 + b"\xc4\x00" + _array(1 << 20) + b"\xc0" * (1 << 20),
        b"\x9d\xa9heartbeat\xa1i\x00\xc4\x00" + bytes(7) + b"\xc2\xdf\x00\x10\x00\x00" + b"\xa1a\x01" * (1 << 18),
        msgpack.packb(["heartbeat", "i", 0, bytes(1 << 20), *[0] * 7, False]),
        msgpack.packb(["failed", _ID, 1, "engine_error", "x" * (1 << 20), True]),
        msgpack.packb(["cached", bytes(1 << 20), b""]),
        msgpack.packb(["goodbye", "i", "x" * (1 << 20)]),
        msgpack.packb(["timing", _ID, 1, {"x" * 200: 1.0}, ""]),
    ],
    ids=["columns", "log-probabilities", "counters", "live", "detail", "keys", "reason", "a name"],
)
def test_a_report_of_more_than_any_worker_says_is_refused_unread(data: bytes) -> None:
    tracemalloc.start()
    try:
        refused(seal(data), FromWorker)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("field", ["sender", "layout", "host_id", "pool", "proof", "agent"])
def test_an_announcement_with_more_than_any_sender_says_is_refused(field: str) -> None:
    """Announcements are kept until blocks are reserved for them."""
    example = next(each for each in EXAMPLES if isinstance(each, Open))
    much: Any = bytes(70_000) if field in ("proof", "agent") else "x" * 600
    refused(encode(msgspec.structs.replace(example, **{field: much})), ToDecode)
