"""Which workers there are, how they are, and what their prefix caches hold.

Pure: time comes in as an argument. A worker is an incarnation; a restarted process is another worker of the same name.

    (Hello) ──► JOINING ──► READY ──► DRAINING ──► GONE      silence or a lost connection leads to GONE from everywhere

Workers serve together only if they agree on what tokens and KV bytes mean; one that differs is refused in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from common.core.errors import InvariantBroken
from common.core.ids import MAX_INCARNATION_BYTES, MAX_NAME_BYTES, Incarnation, WorkerName
from common.core.timeouts import FailureTimes
from common.kv.layout import CHAIN_STEP
from common.kv.prefix import KEY_BYTES, ChainKey
from common.net.hosts import is_loopback, is_unspecified, parse_address, share_loopback
from common.net.messages import PROTOCOL, Cached, Heartbeat, Hello, Role
from coordinator.cluster.liveness import LoopLag, UnresponsiveWorker, UnresponsiveWorkers

HANG_STEPS = 4.0
"""A turn of a worker's loop that takes longer than the failure timeout, and than so many expected steps, never ends."""
_COLOCATED: Role = "colocated"
"""A worker of this role does the work of both others."""


class WorkerState(Enum):
    JOINING = "joining"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


_MOVES: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.JOINING: frozenset({WorkerState.READY, WorkerState.DRAINING, WorkerState.GONE}),
    WorkerState.READY: frozenset({WorkerState.DRAINING, WorkerState.GONE}),
    WorkerState.DRAINING: frozenset({WorkerState.GONE}),
    WorkerState.GONE: frozenset(),
}


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One incarnation of a worker: what it said at joining, its last heartbeat, the prefix keys it announced, the last
    Ping that it answered. ``route`` is the identity of its control socket. ``heard_at`` is when it joined or its heart
    last beat: whatever else it says proves that it lives, but not that we would hear if it did not."""

    hello: Hello
    joined_at: float
    heard_at: float
    route: bytes = b""
    state: WorkerState = WorkerState.JOINING
    beat: Heartbeat | None = None
    cached: set[ChainKey] = field(default_factory=set)
    answered: int = 0
    owes_since: float | None = None
    """When the first lease was sent that it has not answered."""
    cut_off_since: float | None = None
    """When its heart told of a turn in which it should have answered that, and had not."""

    @property
    def id(self) -> Incarnation:
        return self.hello.incarnation

    @property
    def role(self) -> Role:
        return self.hello.role

    @property
    def ready(self) -> bool:
        return self.state is WorkerState.READY

    @property
    def blocks(self) -> tuple[int, int, int]:
        """(free, cached, held); a worker that has not reported yet has everything free."""
        return (self.beat.free, self.beat.cached, self.beat.held) if self.beat else (self.hello.kv_blocks, 0, 0)

    def move(self, to: WorkerState) -> None:
        if to not in _MOVES[self.state]:
            raise InvariantBroken(f"worker {self.hello.name} cannot go from {self.state.name} to {to.name}")
        self.state = to

    def cached_prefix(self, chain: Sequence[ChainKey], limit_tokens: int) -> int:
        """Tokens of the longest prefix that this worker announced, in whole blocks, at most ``limit_tokens``."""
        steps = self.hello.block_size // CHAIN_STEP
        found = 0
        if self.cached:
            for end in range(steps, min(len(chain), limit_tokens // CHAIN_STEP) + 1, steps):
                if chain[end - 1] not in self.cached:
                    break
                found = end * CHAIN_STEP
        return found


@dataclass(frozen=True, slots=True)
class JoinRefused:
    """A worker was not taken in, and why. ``for_now``: only as long as another one has its name."""

    reason: str
    for_now: bool = False


class Registry:
    """All workers that are not gone. ``fingerprint`` is the served model's, None to take the first worker's; ``times``
    say when one that is silent is."""

    def __init__(self, fingerprint: str | None, times: FailureTimes | None = None) -> None:
        self.fingerprint, self.times = fingerprint, times or FailureTimes()
        self.seen: dict[Role, set[str]] = {"prefill": set(), "decode": set(), "colocated": set()}
        """Names of the workers that have been ready at least once."""
        self.expected: dict[Role, int] = {"prefill": 0, "decode": 0, "colocated": 0}
        """How many of each must have been ready once before the system is."""
        self._workers: dict[Incarnation, WorkerHandle] = {}
        self._last: dict[Role, Hello] = {}
        """Of each role, who went last, if it did not leave but its connection broke."""
        self.loop_lag = LoopLag(self.times.sweep_s)
        self.unresponsive = UnresponsiveWorkers(self.times.lease_s, self.loop_lag)

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, incarnation: Incarnation) -> WorkerHandle | None:
        return self._workers.get(incarnation)

    def ready(self, role: Role) -> list[WorkerHandle]:
        return [worker for worker in self._workers.values() if worker.role == role and worker.ready]

    def hellos(self) -> list[Hello]:
        """Of all workers, and of who was lost last of a role that has none: it may be back before a request is placed.
        Who left, as all do when a system gets other workers, counts no more."""
        here = [worker.hello for worker in self]
        roles = {hello.role for hello in here}
        return here + [hello for role, hello in self._last.items() if role not in roles]

    def starting(self, role: Role) -> bool:
        """Whether fewer workers that do the work of ``role`` have been ready so far than the system was started
        with."""
        return any(len(self.seen[each]) < self.expected[each] for each in (role, _COLOCATED))

    def had(self, role: Role) -> bool:
        """Whether any worker that does the work of ``role`` has been ready."""
        return any(self.seen[each] for each in (role, _COLOCATED))

    def named(self, name: WorkerName) -> WorkerHandle | None:
        """The worker of that name."""
        return next((worker for worker in self if worker.hello.name == name), None)

    # -- events ---------------------------------------------------------------------------------------------------

    def join(self, hello: Hello, now_s: float, route: bytes = b"") -> WorkerHandle | JoinRefused:
        """A worker says Hello over ``route``; saying it twice starts it anew. The name of a worker that is here cannot
        be taken: of a process that has died the name is free when its connection has broken, or was silent for long
        enough."""
        if reason := self._objection(hello):
            return JoinRefused(reason)
        if (holder := self.named(hello.name)) is not None and holder.id != hello.incarnation:
            return JoinRefused(name_taken(holder), for_now=True)
        if reason := self._disagreement(hello):
            return JoinRefused(reason)
        self.unresponsive.came(hello)
        if (again := self.get(hello.incarnation)) is not None:
            self.gone(again)
        if self.fingerprint is None:
            self.fingerprint = _checkpoint(hello.fingerprint)
        worker = WorkerHandle(hello, joined_at=now_s, heard_at=now_s, route=route)
        self._workers[hello.incarnation] = worker
        return worker

    def welcome(self, worker: WorkerHandle) -> None:
        """The worker has been told that it is registered: it may get work."""
        worker.move(WorkerState.READY)
        self.seen[worker.role].add(worker.hello.name)

    def spoke(self, worker: WorkerHandle, now_s: float) -> None:
        """It has said something, which counts for a heartbeat as long as none has come: a heart dials when its worker
        is welcome, and over a slow line that takes longer than it may be silent. One that a lease later was never heard
        has a connection that carries nothing."""
        if worker.beat is None and now_s - worker.joined_at < self.times.lease_s:
            worker.heard_at = max(worker.heard_at, now_s)

    def beat(self, worker: WorkerHandle, beat: Heartbeat, now_s: float) -> None:
        worker.beat, worker.heard_at = beat, max(worker.heard_at, now_s)
        if beat.draining:
            self.drains(worker)
        turn_began_s = now_s - max(0, beat.turn_ms) / 1000
        if (
            worker.owes_since is not None
            and worker.cut_off_since is None
            and turn_began_s - worker.owes_since > self.times.silence_s
        ):
            worker.cut_off_since = now_s

    def leased(self, worker: WorkerHandle, now_s: float) -> None:
        """It was sent a lease, which it answers in the next turn of its loop."""
        if worker.owes_since is None:
            worker.owes_since = now_s

    def renewed(self, worker: WorkerHandle) -> None:
        """It has answered."""
        worker.owes_since = worker.cut_off_since = None

    def hangs(self, worker: WorkerHandle) -> bool:
        """Whether the turn that the worker told of last will never end: a heart that beats is no proof of life."""
        return worker.beat is not None and self.endless(worker.beat)

    def stranger_beats(self, name: str, beat: Heartbeat, now_s: float) -> None:
        """Who is not registered (any more) lives, and will say Hello when its turn is over."""
        if not self.endless(beat):
            self.unresponsive.busy(name, beat.turn_ms / 1000, now_s)

    def endless(self, beat: Heartbeat) -> bool:
        """Whether the turn that it tells of will never end."""
        return beat.turn_ms > max(1000 * self.times.timeout_s, HANG_STEPS * beat.expected_ms)

    def misses(self, worker: WorkerHandle, now_s: float) -> None:
        """Its connection broke: it has died, or a lease to say Hello."""
        self._last[worker.role] = worker.hello
        self.unresponsive.add(UnresponsiveWorker.of(worker.hello, "no Hello since its connection broke", now_s, now_s))

    def give_up(self, worker: WorkerHandle, now_s: float) -> None:
        """It hangs in the turn that it told of last."""
        self.gone(worker)
        turn_s = worker.beat.turn_ms / 1000 if worker.beat else 0.0
        self.unresponsive.add(UnresponsiveWorker.of(worker.hello, "in one turn of its loop", now_s - turn_s, now_s))

    def drains(self, worker: WorkerHandle) -> None:
        """The worker has said that it takes nothing new. Idempotent."""
        if worker.ready:
            worker.move(WorkerState.DRAINING)

    def cached(self, worker: WorkerHandle, message: Cached) -> None:
        """Prefix keys entered and left the worker's cache; ValueError if they are not whole keys."""
        worker.cached.difference_update(_keys(message.removed))
        worker.cached.update(_keys(message.added))

    def gone(self, worker: WorkerHandle) -> None:
        """The worker is lost or has left."""
        if worker.state is not WorkerState.GONE:
            worker.move(WorkerState.GONE)
        self._workers.pop(worker.id, None)
        self._last.pop(worker.role, None)

    def sweep(self, now_s: float, *, caught_up: bool = True) -> list[tuple[WorkerHandle, str]]:
        """Removes and returns workers that have been silent too long, or whose control connection carries nothing while
        their hearts beat on another; each with which it is and for how long, in words. To be called every
        ``times.sweep_s``, when what had arrived was read. ``caught_up``: all of it, else a heartbeat may have overtaken
        an answer to a lease."""
        self.loop_lag.look(now_s)
        lost = []
        for worker in self:
            if self.loop_lag.silence(worker.heard_at, now_s) > self.times.silence_s:
                lost.append((worker, "silent", worker.heard_at))
            elif (
                caught_up
                and (since_s := worker.cut_off_since) is not None
                and self.loop_lag.silence(since_s, now_s) > self.times.heartbeat_s
            ):
                lost.append((worker, "no answer over its control connection", since_s))
        hangs = [(worker, UnresponsiveWorker.of(worker.hello, how, since_s, now_s)) for worker, how, since_s in lost]
        for worker, hang in hangs:
            self.gone(worker)
            self.unresponsive.add(hang)
        return [(worker, hang.why(now_s)) for worker, hang in hangs]

    def awaits(self, name: WorkerName, host: str, pid: int, now_s: float) -> None:
        """That worker served before this coordinator did, and should say Hello."""
        if not any((worker.hello.name, worker.hello.host) == (name, host) for worker in self):
            self.unresponsive.add(UnresponsiveWorker(name, host, pid, "no word to this coordinator", now_s, now_s))

    # -- what workers must agree on --------------------------------------------------------------------------------

    def _objection(self, hello: Hello) -> str | None:
        """What is wrong with it, whoever is here."""
        if reason := other_protocol(hello.protocol):
            return reason
        if len(hello.name.encode()) > MAX_NAME_BYTES or len(hello.incarnation.encode()) > MAX_INCARNATION_BYTES:
            return f"names of up to {MAX_NAME_BYTES} and incarnations of up to {MAX_INCARNATION_BYTES} bytes are taken"
        if self.fingerprint is not None and _checkpoint(hello.fingerprint) != self.fingerprint:
            return (
                f"its model {hello.model} is another one than is served here, or has other weights or settings "
                f"(fingerprint {hello.fingerprint}, not {self.fingerprint}): "
                "start the worker with the same model and revision as the coordinator"
            )
        if hello.block_size <= 0 or hello.block_size % CHAIN_STEP or hello.kv_blocks <= 0 or hello.max_model_len <= 0:
            return (
                f"block size {hello.block_size}, {hello.kv_blocks} blocks, length {hello.max_model_len} make no sense"
            )
        if hello.max_num_seqs <= 0 or hello.max_num_batched_tokens <= 0:
            return f"steps of {hello.max_num_seqs} sequences, {hello.max_num_batched_tokens} tokens make no sense"
        if not _is_data_address(hello.data_address, hello.role):
            return (
                f"data address {hello.data_address[:128]!r}: a decode worker has tcp://HOST:PORT that others "
                "can dial, and the rest may have none"
            )
        return None

    def _disagreement(self, hello: Hello) -> str | None:
        """What keeps it from serving with those that are here."""
        others = [worker.hello for worker in self if worker.id != hello.incarnation]
        ends = [other for other in others if {hello.role, other.role} == {"prefill", "decode"}]
        if ends and ends[0].kv_encryption != hello.kv_encryption:
            return (
                f"--kv-encryption {hello.kv_encryption}, but {ends[0].kv_encryption} of {ends[0].name}: "
                "both ends of a hand-off must have the same"
            )
        for end in ends:
            if not set(end.links) & set(hello.links):
                told, theirs = ", ".join(hello.links), ", ".join(end.links)
                return f"--kv-transport {told}, but {theirs} of {end.name}: a hand-off needs one that both ends have"
            decode, prefill = (hello, end) if hello.role == "decode" else (end, hello)
            far = not share_loopback(decode.host_id, prefill.host_id)
            if far and is_loopback(_data_host(decode.data_address)):
                return (
                    f"data address {decode.data_address} of {decode.name} on {decode.host}, which {prefill.name} on "
                    f"{prefill.host} cannot reach: start {decode.name} with --host and an address of its host"
                )
        return _difference(hello, others[0]) if others else None


def name_taken(holder: WorkerHandle) -> str:
    """Why nobody else can have the name of ``holder``, as long as that lives."""
    hello = holder.hello
    return (
        f"there is a {hello.role} worker {hello.name} already, process {hello.pid} of {hello.host}: "
        "give every worker a name of its own with --name; if that process has died, its name is free in a moment"
    )


def other_protocol(protocol: int) -> str | None:
    """Why a worker that speaks ``protocol`` cannot join, whatever else it says; None if it speaks ours."""
    if protocol == PROTOCOL:
        return None
    return f"protocol {protocol}, but this coordinator speaks {PROTOCOL}: run the same version of Tandem"


def _difference(hello: Hello, peer: Hello) -> str | None:
    """What keeps two workers from serving one model together. They may differ in how they hold KV: in its element type
    and block size."""
    told = [name for name in ("fingerprint", "layout", "vocab_size") if getattr(hello, name) != getattr(peer, name)]
    if not told:
        return None
    pairs = [f"{name} {getattr(hello, name)} against {getattr(peer, name)}" for name in told]
    models = f"{hello.model} here, {peer.model} there" if hello.model != peer.model else hello.model
    why = ""
    if _weights(hello.fingerprint) != _weights(peer.fingerprint):
        why = ", whose weight files differ"
    elif hello.fingerprint != peer.fingerprint:
        why = ", loaded with another --quantization, or another --max-model-len where the model's rotary depends on it"
    return f"{', '.join(pairs)} of {peer.name} ({models}){why}: workers of one model must have the same"


def _is_data_address(address: str, role: Role) -> bool:
    """Whether hand-offs can be sent there; only decode workers take any."""
    if not address:
        return role != "decode"
    try:
        host = _data_host(address)
    except ValueError:
        return False
    return address.startswith("tcp://") and not is_unspecified(host)


def _data_host(address: str) -> str:
    return parse_address(address.removeprefix("tcp://"))[0]


def _checkpoint(fingerprint: str) -> str:
    """What a coordinator, which loads no model, can know of a worker's fingerprint: behind a dot stands what those know
    who have (a hash of all weights, then what loading made of them), and there workers must agree with each other."""
    return fingerprint.partition(".")[0]


def _weights(fingerprint: str) -> list[str]:
    """The hash of all weights in a worker's fingerprint, if it has one."""
    return fingerprint.split(".")[1:2]


def _keys(joined: bytes) -> Iterator[ChainKey]:
    if len(joined) % KEY_BYTES:
        raise ValueError(f"{len(joined)} bytes are not whole prefix keys")
    return (joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES))
