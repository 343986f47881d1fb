"""Every message between processes, in one file.

Owns the types; :mod:`common.net.wire` makes bytes of them. Arrays with a leading tag, so that the bytes are small and
carry no class names. Adding a field with a default at the end stays compatible; anything else raises ``PROTOCOL``. What
:class:`AnyHello` and :class:`AnyMessage` have stays where it is for ever, and so do Rejoin and Rejected: by them those
of another version are told that they are.

    worker ──► coordinator   Hello, Heartbeat, Tokens, Timing, RequestFailed, Cached, Measured, LeaseAck, Goodbye
    coordinator ──► worker   Welcome, Rejected, NameTaken, Rejoin, Prefill, Reserve, Generate, Abort, Lease, Resend,
                             Measure, Drain
    coordinator ──► heart    Ping
    prefill ──► decode       Open, (KV frames), Commit, Cancel, Released
    decode ──► prefill       Heard, Grant, Ack, Accept, Cancel
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from common.core.ids import MAX_INCARNATION_BYTES, REQUEST_ID_BYTES, TOKEN_ID_BYTES, Incarnation, WorkerName
from common.core.request import MAX_LOGPROBS, Id, Request
from common.kv.layout import KvDtype
from common.kv.prefix import KEY_BYTES

PROTOCOL = 12
Role = Literal["prefill", "decode", "colocated"]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Milliseconds = Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
Secret = Annotated[bytes, msgspec.Meta(max_length=64)]
Short = Annotated[str, msgspec.Meta(max_length=128)]
"""A name or a fingerprint; the address of an abstract socket has at most 107 bytes."""
MAX_TEXT = 1 << 12
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
"""Words, an address, or a name whose length is refused in words."""
MAX_SPANS = 2048
"""Spans, and tokens, of one Tokens message."""
MAX_HELD = 1 << 14
"""Requests that one worker can tell of."""
MAX_KEYS = 1 << 14
"""Prefix keys that come, and that go, with one Cached message."""
Column = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_SPANS)]
Held = Annotated[bytes, msgspec.Meta(max_length=MAX_HELD * REQUEST_ID_BYTES)]
Keys = Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS * KEY_BYTES)]
Figure = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
"""Neither infinite nor NaN: sums are made of them, and whole numbers."""
Values = Annotated[dict[Short, Figure], msgspec.Meta(max_length=64)]
TokenBytes = bytes
"""For a message that has a field named ``bytes``: inside such a class the builtin's name means that field."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


# -- worker to coordinator --------------------------------------------------------------------------------------------


class Hello(Message, tag="hello"):
    """A worker joins. ``fingerprint`` is the model's (name-independent: configuration, revision and a sample of the
    weights, then all weights, then what loading made of them, with dots between); ``layout`` the KV layout's;
    ``dtype`` is its KV's element type, which may differ. ``data_address`` is where a decode worker takes hand-offs (""
    for others); ``host_id`` is equal for processes that can share memory. ``kv_encryption`` is how its KV travels:
    "curve" or "none". ``links`` are the transports it speaks, best first."""

    protocol: int
    name: Annotated[WorkerName, msgspec.Meta(max_length=MAX_TEXT)]
    incarnation: Annotated[Incarnation, msgspec.Meta(max_length=MAX_TEXT)]
    role: Role
    model: Text
    fingerprint: Text
    layout: Text
    pid: int
    host: Text
    host_id: Text
    data_address: Text
    links: Annotated[tuple[Short, ...], msgspec.Meta(max_length=16)]
    kv_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: Text
    dtype: KvDtype
    kv_encryption: Short = "none"


class AnyHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """As much of a Hello as every version says; whatever comes behind it is skipped."""

    protocol: int


class AnyMessage(msgspec.Struct, frozen=True, array_like=True):
    """As much of a message as every version says; whatever comes behind it is skipped."""

    kind: Short


class Heartbeat(Message, tag="heartbeat"):
    """Every ``Welcome.heartbeat_ms`` from a thread of its own. ``acted_on`` counts the control messages whose effect is
    in this snapshot, so that an id missing from ``live`` may only be reaped if it was sent before. ``live`` are 16-byte
    request ids, joined. ``turn_ms`` is how long the running turn of the loop has taken so far (messages, hand-offs, one
    step), -1 while it waits; ``expected_ms`` how long the running step may well take, or, outside of one, what the
    longest of the last took: a turn that takes much longer hangs, however faithfully the heart beats. ``longest_ms`` is
    the longest of the last steps and the running one: so long a stream may wait for its token. ``resting`` are the live
    requests that have begun and wait for a slot or for blocks: no tokens of theirs are due. ``asked`` is the number of
    the Ping that this one answers, 0 if it was due."""

    incarnation: Annotated[Incarnation, msgspec.Meta(max_length=MAX_INCARNATION_BYTES)]
    acted_on: int
    live: Held
    free: int
    cached: int
    held: int
    running: int
    waiting: int
    waiting_tokens: int
    turn_ms: int
    draining: bool
    counters: Values = {}
    expected_ms: int = 0
    resting: Held = b""
    longest_ms: int = 0
    asked: Count = 0


class Logprobs(Message):
    """Columns of one token's log-probabilities; ids little-endian uint32, ``top`` beside them."""

    logprob: float
    top_ids: Annotated[bytes, msgspec.Meta(max_length=MAX_LOGPROBS * TOKEN_ID_BYTES)] = b""
    top: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_LOGPROBS)] = ()


class Tokens(Message, tag="tokens"):
    """One message per engine step, several of more than MAX_SPANS; in columns: spans of output tokens. Column i:
    ``counts[i]`` tokens of output positions ``starts[i]``... of (request, choice, attempt). ``finish`` is a
    FinishReason, not 0 on the last span of a choice; ``stop_ids`` the token id that stopped it, else -1.
    ``logprobs`` matches ``ids``, or is empty when no span wants any (an entry is None where its request wants
    none)."""

    requests: Annotated[bytes, msgspec.Meta(max_length=MAX_SPANS * REQUEST_ID_BYTES)]
    choices: Column
    attempts: Column
    starts: Column
    counts: Column
    finish: Column
    stop_ids: Column
    ids: Annotated[bytes, msgspec.Meta(max_length=MAX_SPANS * TOKEN_ID_BYTES)]
    logprobs: Annotated[tuple[Logprobs | None, ...], msgspec.Meta(max_length=MAX_SPANS)] = ()


class Timing(Message, tag="timing"):
    """What a worker measured about one request, in ms, bytes or tokens by the name's ending. Prefill sends queue_ms,
    prefill_ms and cached_tokens just before token 1, then transfer_ms, transfer_exposed_ms and kv_bytes when decode has
    accepted; decode sends decode_wait_ms with its first step, and those before token 1 again: its whole answer may
    overtake what prefill says over another connection. ``link`` is the transport used, "" for none."""

    request: Id
    attempt: Count
    values: Values
    link: Short = ""


class RequestFailed(Message, tag="failed"):
    """A worker gives one request up. ``code`` is one of FAILURES; ``retriable`` if another worker may succeed."""

    request: Id
    attempt: Count
    code: Short
    detail: Text
    retriable: bool


FAILURES = ("no_memory", "engine_error", "transfer_failed", "deadline", "draining", "too_long")


class Cached(Message, tag="cached"):
    """Prefix chain keys (16 bytes each, joined) that entered and left this worker's prefix cache."""

    added: Keys
    removed: Keys


class Measured(Message, tag="measured"):
    """A hand-off of ``bytes`` bytes to ``decode`` that :class:`Measure` asked for took ``seconds`` over ``link``."""

    decode: Annotated[Incarnation, msgspec.Meta(max_length=MAX_INCARNATION_BYTES)]
    link: Short
    bytes: Count
    seconds: Figure


class Goodbye(Message, tag="goodbye"):
    """The worker has drained or stops; its requests are no longer served."""

    incarnation: Annotated[Incarnation, msgspec.Meta(max_length=MAX_INCARNATION_BYTES)]
    reason: Text


class LeaseAck(Message, tag="renewed"):
    """The answer to every Lease, in the next turn of the loop: what is said to this worker arrives, and what it says,
    too. Its heart, which has a connection of its own, proves neither."""

    incarnation: Annotated[Incarnation, msgspec.Meta(max_length=MAX_INCARNATION_BYTES)]


FromWorker = Hello | Heartbeat | Tokens | Timing | RequestFailed | Cached | Measured | LeaseAck | Goodbye

# -- coordinator to worker --------------------------------------------------------------------------------------------


class Welcome(Message, tag="welcome"):
    """The worker is registered. What it holds for a coordinator or a hand-off that is not heard of for ``lease_ms`` it
    drops; a hand-off without progress for ``patience_ms`` it gives up."""

    coordinator: Incarnation
    heartbeat_ms: Milliseconds
    lease_ms: Milliseconds
    patience_ms: Milliseconds


class Rejected(Message, tag="turned"):
    """Registration refused, in words; the worker exits with them."""

    reason: str


class NameTaken(Message, tag="name_taken"):
    """A live worker has this name, in words: say Hello again in a while, it may be what is left of a process that has
    died. Until then nothing may be held here."""

    reason: str


class Rejoin(Message, tag="rejoin"):
    """This coordinator does not know you (it restarted): drop what the last one gave you and say Hello again."""


class Ping(Message, tag="ask"):
    """To a worker's heart: beat now. Another worker has died, and whoever does not answer may have died with it."""

    number: Count


class Peer(Message):
    """How one worker finds another; ``dtype`` is the element type of its KV. ``token`` is known to the two of them
    alone, and for one hand-off: each shows the other that it holds it (:mod:`kvtransfer.peer_proof`)."""

    name: WorkerName
    incarnation: Incarnation
    address: str
    host_id: str
    dtype: KvDtype
    token: Secret = b""


class Prefill(Message, tag="prefill"):
    """Build the KV of ``request``, send token 1 to the coordinator, ship to ``decode``."""

    request: Request
    attempt: Count
    decode: Peer


class Reserve(Message, tag="reserve"):
    """Keep blocks for ``request``; its KV comes from ``prefill``."""

    request: Request
    attempt: Count
    prefill: Peer


class Generate(Message, tag="generate"):
    """Do it all: prefill locally, then decode (colocated workers, and decode workers when that is cheaper)."""

    request: Request
    attempt: Count


class Abort(Message, tag="abort"):
    """Stop and free whatever (request, attempt) has. Idempotent; unknown ids are fine."""

    request: Id
    attempt: Count


class Lease(Message, tag="lease"):
    """As often as heartbeats: all that this worker may hold, as (16-byte request id, attempt as little-endian uint32),
    joined. It renews the lease on those; whatever came before this message and is not listed was given up (its Abort
    was lost). A worker that hears none for ``Welcome.lease_ms`` drops everything: its coordinator is gone or cut off.
    ``sent`` is how many messages this one makes since Welcome: those of them that have not arrived were lost. Answered
    by LeaseAck."""

    live: bytes
    sent: int


class Resend(Message, tag="resend"):
    """Send the output tokens of (request, choice) again from output position ``start``."""

    request: Id
    attempt: Count
    choice: Count
    start: Count


class Measure(Message, tag="measure"):
    """Try the link: prefill sends ``tokens`` tokens of whatever lies in blocks that nobody holds (cached prefixes give
    way) to ``peer``, decode takes them from ``peer`` and drops them. Goes to both, decode first; a worker that is short
    of blocks stays silent."""

    request: Id
    attempt: Count
    peer: Peer
    tokens: Count


class Drain(Message, tag="drain"):
    """Take nothing new, finish what is here, then leave."""

    timeout_ms: int


ToHeart = Ping
ToWorker = (
    Welcome | Rejected | NameTaken | Rejoin | Prefill | Reserve | Generate | Abort | Lease | Resend | Measure | Drain
)

# -- prefill and decode -----------------------------------------------------------------------------------------------


class Open(Message, tag="open"):
    """A sender announces a hand-off of ``tokens`` prompt tokens, whose KV travels as elements of ``dtype``; ``pool`` is
    the abstract socket where a process on the same host gets the descriptor of the sender's shared pool ("" for none),
    of ``pool_blocks`` blocks of ``pool_block_size`` tokens with their heads in ``pool_shards`` shards. ``agent`` is
    where NIXL reads that pool (b"" where it cannot)."""

    request: Id
    attempt: Count
    sender: Annotated[Incarnation, msgspec.Meta(max_length=MAX_INCARNATION_BYTES)]
    tokens: Count
    layout: Short
    dtype: KvDtype
    host_id: Annotated[str, msgspec.Meta(max_length=512)]
    pool: Short
    pool_blocks: Count
    pool_block_size: Count
    pool_shards: Count
    proof: Secret = b""
    agent: Annotated[bytes, msgspec.Meta(max_length=1 << 16)] = b""


class Grant(Message, tag="grant"):
    """Blocks are reserved. The first ``have`` tokens are in decode's own prefix cache and pinned: send the rest over
    ``link``. Frames may begin before byte ``credit_bytes`` of what is sent, and acks move that place forward.
    ``step_ms``: decode may be busy for so long before it answers a frame."""

    request: Id
    attempt: Count
    have: Count
    link: Short
    credit_bytes: Count
    step_ms: Count = 0
    proof: Secret = b""


class Heard(Message, tag="heard"):
    """The announcement has arrived; blocks are not reserved yet. ``step_ms`` as in :class:`Grant`."""

    request: Id
    attempt: Count
    step_ms: Count = 0


class Ack(Message, tag="ack"):
    """Frames up to sequence number ``frame`` (inclusive) have been verified and placed; ``bytes`` in all so far, and
    ``credit_bytes`` beyond them may be on their way."""

    request: Id
    attempt: Count
    frame: Count
    bytes: Count
    credit_bytes: Count = 0


class Commit(Message, tag="commit"):
    """Everything was sent: ``frames`` frames of ``bytes`` bytes over tokens ``[have, tokens)``, whose checksums folded
    in order give ``checksum``. ``first`` are the first tokens (uint32) and ``finish`` their reasons, one per choice.
    ``figures`` are those of prefill's first Timing. ``proof`` is over all of it."""

    request: Id
    attempt: Count
    tokens: Count
    have: Count
    frames: Count
    bytes: Count
    checksum: int
    layout: Short
    first: TokenBytes
    finish: tuple[int, ...]
    stop_ids: tuple[int, ...]
    logprobs: tuple[Logprobs | None, ...] = ()
    figures: Values = {}
    proof: Secret = b""


class Accept(Message, tag="accept"):
    """Counts, bytes, layout and checksums were right; the sender may let go."""

    request: Id
    attempt: Count
    bytes: Count


class Released(Message, tag="released"):
    """The sender has let go: the hand-off is over on both sides."""

    request: Id
    attempt: Count


class Cancel(Message, tag="cancel"):
    """Either side gives the hand-off up, with a reason. Idempotent."""

    request: Id
    attempt: Count
    reason: str


ToDecode = Open | Commit | Cancel | Released
ToPrefill = Grant | Heard | Ack | Accept | Cancel
