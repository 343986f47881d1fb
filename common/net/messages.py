"""The types of all messages between processes. :mod:`common.net.wire` encodes them.

A message is an array with a leading tag, so that its bytes are few and carry no class names. A reader refuses fields
that it does not know, so every change of fields requires a higher ``PROTOCOL``. The fields of :class:`AnyHello`,
:class:`AnyMessage`, Rejoin and Rejected must never move: with them a coordinator recognizes and refuses workers of
another version.

    worker ──► coordinator   Hello, Heartbeat, Gpus, Tokens, PromptLogprobs, Timing, RequestFailed, Cached, Measured,
                             LeaseAck, Moved, Goodbye
    coordinator ──► worker   Welcome, Rejected, NameTaken, Rejoin, Prefill, Reserve, Generate, Abort, Lease, Resend,
                             ResendPrompt, Measure, Drain, Leaving
    coordinator ──► heartbeat thread   Ping
    prefill ──► decode       Open, (KV frames), Commit, Cancel, Released
    decode ──► prefill       Heard, Grant, Ack, Accept, Cancel
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from common.core.gpu import MAX_GPUS, GpuState
from common.core.ids import MAX_INCARNATION_BYTES, REQUEST_ID_BYTES, TOKEN_ID_BYTES, Incarnation, WorkerName
from common.core.prompt_span import WORD
from common.core.request import MAX_LOGPROBS, Id, Request
from common.kv.layout import KvDtype
from common.kv.prefix import KEY_BYTES

PROTOCOL = 16
Role = Literal["prefill", "decode", "colocated"]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Milliseconds = Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
Secret = Annotated[bytes, msgspec.Meta(max_length=64)]
Short = Annotated[str, msgspec.Meta(max_length=128)]
"""A name, a fingerprint, or the address of an abstract socket (at most 107 bytes)."""
MAX_TEXT = 1 << 12
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
"""A sentence, an address, or a name. The length of names is checked later, so that the refusal can say why."""
MAX_SPANS = 2048
"""Most spans, and most tokens, of one Tokens message."""
MAX_PROMPT_ENTRIES = 1 << 11
"""Most log-probabilities of one PromptLogprobs message. The coordinator writes them as JSON in its event loop, which
takes about a microsecond each."""
MAX_CHUNKS = 64
"""Most chunks of a prompt that a Timing reports; a worker merges more."""
MAX_HELD = 1 << 14
"""Most requests that one worker can report."""
MAX_KEYS = 1 << 14
"""Most added, and most removed, prefix keys of one Cached message."""
Column = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_SPANS)]
Held = Annotated[bytes, msgspec.Meta(max_length=MAX_HELD * REQUEST_ID_BYTES)]
Keys = Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS * KEY_BYTES)]
Figure = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
"""A finite number: figures are summed and converted to int."""
Values = Annotated[dict[Short, Figure], msgspec.Meta(max_length=64)]
TokenBytes = bytes
"""For messages with a field named ``bytes``, which hides the builtin inside the class."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


# -- worker to coordinator --------------------------------------------------------------------------------------------


class Hello(Message, tag="hello"):
    """A worker joins.

    ``fingerprint`` identifies the model independently of its name: hashes of (configuration, revision and a sample of
    the weights), of all weights, and of the weights as loaded, joined by dots. ``layout`` is the fingerprint of the KV
    layout. ``dtype`` is the element type of its KV, which may differ between workers. ``data_address`` is where a
    decode worker receives hand-offs ("" for others). ``host_id`` is equal for processes that can share memory.
    ``kv_encryption`` is how its KV travels: "curve" or "none". ``links`` are the transports it supports, best first.
    """

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
    """The part of a Hello that all versions share; later fields are skipped."""

    protocol: int


class AnyMessage(msgspec.Struct, frozen=True, array_like=True):
    """The part of a message that all versions share, its tag; the fields are skipped."""

    kind: Short


STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds, in tokens, of the sizes by which heartbeats count steps; those of vLLM's histogram."""
STEPS_OF = (*(f"steps_of_{size}" for size in STEP_SIZES), "steps_of_more")
"""Names of these counters. Each counts the steps of at most its size and of more than the size before."""


class Heartbeat(Message, tag="heartbeat"):
    """A snapshot of a worker, sent every ``Welcome.heartbeat_ms`` by a thread of its own.

    ``acted_on`` counts the control messages whose effect is in this snapshot: a request missing from ``live`` counts as
    lost only if it was sent among those. ``live`` are 16-byte request ids, concatenated. ``resting`` are the live
    requests that have begun and wait for a slot or for blocks, so that no tokens of them are due.

    ``turn_ms`` is how long the current turn of the loop (messages, hand-offs, one step) has taken so far, -1 while the
    loop waits. ``expected_ms`` is the time that the running step may take, or, outside of a step, the longest recent
    one. A turn that takes much longer hangs, even if heartbeats arrive. ``longest_ms`` is the longest of the recent
    steps and the running one, the time that a stream may have to wait for its next token. ``asked`` is the number of
    the Ping that this heartbeat answers, 0 for a regular one. ``unix_ms`` is the worker's time of day in milliseconds
    since the epoch, 0 for unknown: it shows how far the clocks of hosts are apart, and times nothing.
    """

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
    unix_ms: Count = 0


class Gpus(Message, tag="gpus"):
    """The state of the GPUs that a worker computes on. It follows a heartbeat, on the same connection, whenever there
    is a new reading (about once a second); a worker without a GPU never sends it. ``fault`` is why a GPU is unhealthy,
    so that the worker is about to leave, "" for none."""

    gpus: Annotated[tuple[GpuState, ...], msgspec.Meta(max_length=MAX_GPUS)]
    fault: Text = ""


class Logprobs(Message):
    """Log-probabilities of one token: its own, and ``top`` for the ids in ``top_ids`` (little-endian uint32)."""

    logprob: float
    top_ids: Annotated[bytes, msgspec.Meta(max_length=MAX_LOGPROBS * TOKEN_ID_BYTES)] = b""
    top: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_LOGPROBS)] = ()


class Tokens(Message, tag="tokens"):
    """The output tokens of one engine step (several messages if there are more than MAX_SPANS), as columns of spans.

    Span i is ``counts[i]`` tokens from output position ``starts[i]`` on, of (request, choice, attempt). ``finish`` is a
    FinishReason, nonzero on the last span of a choice. ``stop_ids`` is the token id that ended the choice, else -1.
    ``ids`` holds the tokens of all spans. ``logprobs`` matches it, with None for tokens whose request wants none, or is
    empty if no span wants any.
    """

    requests: Annotated[bytes, msgspec.Meta(max_length=MAX_SPANS * REQUEST_ID_BYTES)]
    choices: Column
    attempts: Column
    starts: Column
    counts: Column
    finish: Column
    stop_ids: Column
    ids: Annotated[bytes, msgspec.Meta(max_length=MAX_SPANS * TOKEN_ID_BYTES)]
    logprobs: Annotated[tuple[Logprobs | None, ...], msgspec.Meta(max_length=MAX_SPANS)] = ()


PromptColumn = Annotated[bytes, msgspec.Meta(max_length=MAX_PROMPT_ENTRIES * WORD)]


class PromptLogprobs(Message, tag="prompt_logprobs"):
    """Log-probabilities of the n prompt tokens from position ``start`` on, with k most likely tokens each.

    The columns are those of :class:`common.core.prompt_span.PromptSpan`, little-endian: ``logprobs`` [n] float32,
    ``ranks`` [n] uint32, ``top_ids`` [n * k] uint32, ``top`` [n * k] float32. A prompt's are all sent before its first
    output token.
    """

    request: Id
    attempt: Count
    start: Count
    logprobs: PromptColumn
    ranks: PromptColumn
    top_ids: PromptColumn
    top: PromptColumn


class PromptChunk(Message):
    """``tokens`` of a prompt that were computed together, in a step that began ``start_ms`` after the first one and
    took ``ms``. ``steps`` is more than 1 if several steps, and the time between them, were merged to one."""

    start_ms: Figure
    ms: Figure
    tokens: Count
    steps: Count = 1


class Timing(Message, tag="timing"):
    """Figures that a worker measured about one request; the suffix of a name is its unit (ms, bytes, tokens).

    The worker that computes a prompt, and behind it the output of earlier attempts, sends queue_ms, prefill_ms and
    cached_tokens just before its first token, with the ``chunks`` that were computed until then. Prefill sends
    transfer_ms, transfer_exposed_ms and kv_bytes once decode has accepted. Decode sends decode_wait_ms with its first
    step and repeats those that prefill sent before token 1, since decode's whole answer can overtake prefill's
    messages, which take another connection. ``link`` is the transport used, "" for none.
    """

    request: Id
    attempt: Count
    values: Values
    link: Short = ""
    chunks: Annotated[tuple[PromptChunk, ...], msgspec.Meta(max_length=MAX_CHUNKS)] = ()


class RequestFailed(Message, tag="failed"):
    """A worker gives up one request. ``code`` is one of FAILURES; ``retriable`` if another worker may succeed."""

    request: Id
    attempt: Count
    code: Short
    detail: Text
    retriable: bool


FAILURES = (
    "no_memory", "engine_error", "transfer_failed", "deadline", "draining", "too_long", "grammar_too_complex",
    "grammar_failed",
)  # fmt: skip


class Cached(Message, tag="cached"):
    """Prefix chain keys (16 bytes each, concatenated) that entered and left this worker's prefix cache."""

    added: Keys
    removed: Keys


class Measured(Message, tag="measured"):
    """The result of a :class:`Measure`: a hand-off of ``bytes`` bytes to ``decode`` took ``seconds`` over ``link``."""

    decode: Annotated[Incarnation, msgspec.Meta(max_length=MAX_INCARNATION_BYTES)]
    link: Short
    bytes: Count
    seconds: Figure


DRAINED, STOPPED = "drained", "stopped"
"""The reasons of a Goodbye that was asked for."""


class Goodbye(Message, tag="goodbye"):
    """The worker has drained or is stopping, or its device failed; it serves its requests no longer."""

    incarnation: Annotated[Incarnation, msgspec.Meta(max_length=MAX_INCARNATION_BYTES)]
    reason: Text


class Moved(Message, tag="moved"):
    """To a coordinator that is leaving: another one has welcomed this worker."""

    incarnation: Annotated[Incarnation, msgspec.Meta(max_length=MAX_INCARNATION_BYTES)]


class LeaseAck(Message, tag="renewed"):
    """The answer to every Lease, in the next turn of the worker's loop. It proves that the control connection works in
    both directions; heartbeats, which have a connection of their own, do not."""

    incarnation: Annotated[Incarnation, msgspec.Meta(max_length=MAX_INCARNATION_BYTES)]


FromWorker = (
    Hello
    | Heartbeat
    | Gpus
    | Tokens
    | PromptLogprobs
    | Timing
    | RequestFailed
    | Cached
    | Measured
    | LeaseAck
    | Moved
    | Goodbye
)

# -- coordinator to worker --------------------------------------------------------------------------------------------


class Welcome(Message, tag="welcome"):
    """The worker is registered. It drops what it holds for a coordinator, or for a hand-off, that is silent for
    ``lease_ms``, and it gives up a hand-off that makes no progress for ``patience_ms``."""

    coordinator: Incarnation
    heartbeat_ms: Milliseconds
    lease_ms: Milliseconds
    patience_ms: Milliseconds


class Rejected(Message, tag="turned"):
    """Registration is refused for ``reason``; the worker prints it and exits."""

    reason: str


class NameTaken(Message, tag="name_taken"):
    """A live worker has this name; ``reason`` says which. Hello can be retried later: the other worker may have died
    without its loss being noticed yet. Until then this worker must hold no requests."""

    reason: str


class Rejoin(Message, tag="rejoin"):
    """This coordinator does not know the worker, since it has restarted or has given the worker up. The worker drops
    all requests and sends Hello again."""


class Ping(Message, tag="ask"):
    """Sent to a heartbeat thread: send a heartbeat at once. Another worker has died, and those that do not answer may
    have died with it."""

    number: Count


class Peer(Message):
    """The other worker of a hand-off. ``dtype`` is the element type of its KV. ``token`` is a secret of these two
    workers for one hand-off; each proves to the other that it has it (:mod:`kvtransfer.peer_proof`)."""

    name: WorkerName
    incarnation: Incarnation
    address: str
    host_id: str
    dtype: KvDtype
    token: Secret = b""


class Prefill(Message, tag="prefill"):
    """Compute the KV of ``request``, send token 1 to the coordinator, and hand the KV off to ``decode``."""

    request: Request
    attempt: Count
    decode: Peer


class Reserve(Message, tag="reserve"):
    """Reserve blocks for ``request``, whose KV will come from ``prefill``."""

    request: Request
    attempt: Count
    prefill: Peer


class Generate(Message, tag="generate"):
    """Prefill and decode ``request`` on this worker: a colocated worker, or a decode worker if that is cheaper. A
    prefill worker gets it if nothing is to be decoded (``max_tokens`` 0 or 1)."""

    request: Request
    attempt: Count


class Abort(Message, tag="abort"):
    """Stop (request, attempt) and free all that it holds. Idempotent; unknown ids are ignored."""

    request: Id
    attempt: Count


class Lease(Message, tag="lease"):
    """Renews the lease on all that this worker may hold; sent as often as heartbeats and answered by LeaseAck.

    ``live`` is packed as by :func:`common.core.ids.pack_transfers`. A request that came before this message and is not
    listed was given up, and its Abort was lost. A worker that gets no Lease for ``Welcome.lease_ms`` drops everything:
    its coordinator is gone or cut off. ``sent`` counts the messages to this worker since Welcome, this one included;
    those that have not arrived were lost.
    """

    live: bytes
    sent: int


class Resend(Message, tag="resend"):
    """Send the output tokens of (request, choice) again, from output position ``start`` on."""

    request: Id
    attempt: Count
    choice: Count
    start: Count


class ResendPrompt(Message, tag="resend_prompt"):
    """Send the log-probabilities of the prompt again, from position ``start`` on."""

    request: Id
    attempt: Count
    start: Count


class Measure(Message, tag="measure"):
    """Measure the link to ``peer`` with a hand-off of ``tokens`` tokens. Sent to both workers, decode first.

    Prefill sends the undefined contents of newly taken blocks (cached prefixes may be evicted for them); decode
    receives and drops them. A worker that is short of blocks does not answer.
    """

    request: Id
    attempt: Count
    peer: Peer
    tokens: Count


class Drain(Message, tag="drain"):
    """Accept no new requests, finish the running ones, then leave."""

    timeout_ms: int


class Leaving(Message, tag="leaving"):
    """This coordinator will stop, and another one listens at its address: dial that again. This connection stays for
    the requests that came over it. Also the answer to a Hello that came here since: dial once more."""


ToHeartbeatThread = Ping
ToWorker = (
    Welcome
    | Rejected
    | NameTaken
    | Rejoin
    | Prefill
    | Reserve
    | Generate
    | Abort
    | Lease
    | Resend
    | ResendPrompt
    | Measure
    | Drain
    | Leaving
)

# -- prefill and decode -----------------------------------------------------------------------------------------------


class Open(Message, tag="open"):
    """A sender announces a hand-off of ``tokens`` prompt tokens, whose KV travels as elements of ``dtype``.

    ``pool`` is the abstract socket from which a process on the same host gets the descriptor of the sender's shared
    pool ("" for none). The pool has ``pool_blocks`` blocks of ``pool_block_size`` tokens, with their heads in
    ``pool_shards`` shards. ``agent`` is the data with which NIXL reads that pool (b"" if it cannot).
    """

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
    """Blocks are reserved: send the KV over ``link``, except for the first ``have`` tokens, which decode has pinned in
    its own prefix cache. A frame may be sent if it begins before byte ``credit_bytes`` of the stream; acks raise that
    limit. ``step_ms`` is how long a step may keep decode from answering a frame."""

    request: Id
    attempt: Count
    have: Count
    link: Short
    credit_bytes: Count
    step_ms: Count = 0
    proof: Secret = b""


class Heard(Message, tag="heard"):
    """The Open has arrived, but blocks are not reserved yet. ``step_ms`` is as in :class:`Grant`."""

    request: Id
    attempt: Count
    step_ms: Count = 0


class Ack(Message, tag="ack"):
    """Frames up to sequence number ``frame`` (inclusive) are verified and placed, ``bytes`` bytes in all; the next
    ``credit_bytes`` bytes after them may be in flight."""

    request: Id
    attempt: Count
    frame: Count
    bytes: Count
    credit_bytes: Count = 0


class Commit(Message, tag="commit"):
    """All is sent: ``frames`` frames with ``bytes`` bytes in total, of tokens ``[have, tokens)``.

    ``checksum`` is the checksums of the frames folded in order. ``first`` are the first output tokens (uint32) and
    ``finish`` their finish reasons, one per choice. ``figures`` are those of prefill's first Timing. ``proof`` covers
    the whole message.
    """

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
    """Counts, bytes, layout and checksums match; the sender may drop its blocks."""

    request: Id
    attempt: Count
    bytes: Count


class Released(Message, tag="released"):
    """The sender has dropped its blocks; the hand-off is over on both sides."""

    request: Id
    attempt: Count


class Cancel(Message, tag="cancel"):
    """Either side gives up the hand-off for ``reason``. Idempotent."""

    request: Id
    attempt: Count
    reason: str


ToDecode = Open | Commit | Cancel | Released
ToPrefill = Grant | Heard | Ack | Accept | Cancel
