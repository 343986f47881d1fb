"""The registry of workers: their states, heartbeats and announced prefix-cache keys.

Pure: time comes in as an argument. A worker is one incarnation; a restarted process is a new worker with the same name.

    (Hello) ──► JOINING ──► READY ──► DRAINING ──► GONE      silence or a lost connection leads from any state to GONE

Workers serve together only if they agree on the meaning of tokens and KV bytes; one that differs is refused with the
reason in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from common.core.errors import InvariantBroken
from common.core.gpu import GpuState
from common.core.ids import MAX_INCARNATION_BYTES, MAX_NAME_BYTES, Incarnation, WorkerName
from common.core.timeouts import FailureTimes
from common.kv.layout import CHAIN_STEP, converts
from common.kv.prefix import KEY_BYTES, ChainKey
from common.net.hosts import is_loopback, is_unspecified, parse_address, share_loopback
from common.net.messages import PROTOCOL, Cached, Gpus, Heartbeat, Hello, Role
from coordinator.cluster.absent_workers import AbsentWorkers
from coordinator.cluster.clock_offset import ClockOffset
from coordinator.cluster.liveness import LoopLag, UnresponsiveWorker, UnresponsiveWorkers

HANG_STEPS = 4.0
"""A worker hangs if one turn of its loop takes longer than the failure timeout and than this many expected steps."""
_COLOCATED: Role = "colocated"
"""The role whose workers do the work of both other roles."""


class WorkerState(Enum):
    """The states of a worker; the diagram above shows the transitions."""

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
    """One incarnation of a worker.

    ``hello`` is the message with which it joined, ``beat`` its last heartbeat, ``cached`` the prefix keys that it
    announced, ``answered`` the number of the last Ping that it answered, ``route`` the identity of its control socket.
    ``heard_at`` is the time of its Hello or last heartbeat. Other messages do not update it: they prove that the worker
    is alive, but not that its heartbeat connection works, and failures are detected by silence on that connection.
    """

    hello: Hello
    joined_at: float
    heard_at: float
    route: bytes = b""
    state: WorkerState = WorkerState.JOINING
    beat: Heartbeat | None = None
    gpus: tuple[GpuState, ...] = ()
    """The latest readings of the GPUs that it computes on."""
    clock: ClockOffset = field(default_factory=ClockOffset)
    """How far its clock is from the coordinator's."""
    cached: set[ChainKey] = field(default_factory=set)
    answered: int = 0
    owes_since: float | None = None
    """When the earliest Lease that it has not acknowledged was sent; None if it owes no LeaseAck."""
    cut_off_since: float | None = None
    """When a heartbeat first showed that its loop had time to acknowledge that Lease and did not. Since then its
    control connection is suspected to be broken."""

    @property
    def id(self) -> Incarnation:
        return self.hello.incarnation

    @property
    def role(self) -> Role:
        return self.hello.role

    @property
    def ready(self) -> bool:
        """Whether the worker accepts new requests."""
        return self.state is WorkerState.READY

    @property
    def blocks(self) -> tuple[int, int, int]:
        """The numbers of (free, cached, held) KV blocks; all are free before the first heartbeat."""
        return (self.beat.free, self.beat.cached, self.beat.held) if self.beat else (self.hello.kv_blocks, 0, 0)

    def move(self, to: WorkerState) -> None:
        """Change the state; raises InvariantBroken for a transition that is not allowed."""
        if to not in _MOVES[self.state]:
            raise InvariantBroken(f"worker {self.hello.name} cannot go from {self.state.name} to {to.name}")
        self.state = to

    def cached_prefix(self, chain: Sequence[ChainKey], limit_tokens: int) -> int:
        """Return the length in tokens of the longest prefix of ``chain`` that this worker has announced, in whole
        blocks and at most ``limit_tokens``."""
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
    """The refusal of a worker, with its reason. ``for_now``: it ends when the worker that has the same name is gone."""

    reason: str
    for_now: bool = False


class Registry:
    """All workers that are not gone. ``fingerprint`` is that of the served model, None to take the first worker's;
    ``times``: heartbeat interval, lease and timeout, by which silent and hung workers are detected."""

    def __init__(self, fingerprint: str | None, times: FailureTimes | None = None) -> None:
        self.fingerprint, self.times = fingerprint, times or FailureTimes()
        self.seen: dict[Role, set[str]] = {"prefill": set(), "decode": set(), "colocated": set()}
        """Names of the workers that have been ready at least once."""
        self.expected: dict[Role, int] = {"prefill": 0, "decode": 0, "colocated": 0}
        """For each role, how many workers must have been ready once before the system counts as started."""
        self._workers: dict[Incarnation, WorkerHandle] = {}
        self._last: dict[Role, Hello] = {}
        """For each role, the Hello of the worker that was lost last, if its connection broke (it did not leave)."""
        self.on_drain: Callable[[WorkerHandle], None] = lambda worker: None
        """Called when a worker accepts no new requests any more."""
        self.absent = AbsentWorkers()
        self.loop_lag = LoopLag(self.times.sweep_s)
        self.unresponsive = UnresponsiveWorkers(self.times.lease_s, self.loop_lag)

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, incarnation: Incarnation) -> WorkerHandle | None:
        """Return the worker of that incarnation, None if it is not registered."""
        return self._workers.get(incarnation)

    def ready(self, role: Role) -> list[WorkerHandle]:
        """Return the workers of exactly this role that accept new requests; a colocated worker has a role of its
        own."""
        return [worker for worker in self._workers.values() if worker.role == role and worker.ready]

    def hellos(self) -> list[Hello]:
        """Return the Hellos of all workers and, for a role without workers, of the one whose connection broke last,
        which may reconnect before a request is placed. Workers that left with a Goodbye do not count, because their
        replacements may have other settings."""
        here = [worker.hello for worker in self]
        roles = {hello.role for hello in here}
        return here + [hello for role, hello in self._last.items() if role not in roles]

    def starting(self, role: Role) -> bool:
        """Return whether fewer workers that do the work of ``role`` have been ready so far than ``expected``."""
        return any(len(self.seen[each]) < self.expected[each] for each in (role, _COLOCATED))

    def had(self, role: Role) -> bool:
        """Return whether any worker that does the work of ``role`` has ever been ready."""
        return any(self.seen[each] for each in (role, _COLOCATED))

    def named(self, name: WorkerName) -> WorkerHandle | None:
        """Return the worker of that name, if it is registered."""
        return next((worker for worker in self if worker.hello.name == name), None)

    # -- events ---------------------------------------------------------------------------------------------------

    def join(self, hello: Hello, now_s: float, route: bytes = b"") -> WorkerHandle | JoinRefused:
        """Register the worker that sent ``hello`` from the identity ``route``, or return why it is refused.

        A second Hello of the same incarnation registers it anew. The name of a registered worker cannot be taken; the
        name of a dead process is free once its connection has broken or it was silent for too long.
        """
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
        """Make the worker READY after its Welcome was sent: it may get requests."""
        worker.move(WorkerState.READY)
        self.seen[worker.role].add(worker.hello.name)
        self.absent.forget(worker.hello.name)

    def on_message(self, worker: WorkerHandle, now_s: float) -> None:
        """Count any message as a heartbeat until the first heartbeat, for at most ``times.lease_s`` after the Hello.

        The heartbeat thread connects after the Welcome. Over a slow network that takes longer than a worker may be
        silent. If no heartbeat has come after a lease, the heartbeat connection is broken.
        """
        if worker.beat is None and now_s - worker.joined_at < self.times.lease_s:
            worker.heard_at = max(worker.heard_at, now_s)

    def beat(self, worker: WorkerHandle, beat: Heartbeat, now_s: float) -> None:
        """Record a heartbeat. If the current turn of the worker's loop began more than ``times.silence_s`` after a
        Lease that is not acknowledged, suspect the control connection."""
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

    def read_gpus(self, worker: WorkerHandle, report: Gpus) -> None:
        """Record a report about the worker's GPUs. One whose GPU is unhealthy gets no new requests: it is leaving."""
        worker.gpus = report.gpus
        if report.fault:
            self.drains(worker)

    def leased(self, worker: WorkerHandle, now_s: float) -> None:
        """Note that a Lease was sent to the worker, which acknowledges it in the next turn of its loop."""
        if worker.owes_since is None:
            worker.owes_since = now_s

    def renewed(self, worker: WorkerHandle) -> None:
        """Note that the worker has acknowledged a Lease."""
        worker.owes_since = worker.cut_off_since = None

    def hangs(self, worker: WorkerHandle) -> bool:
        """Return whether the worker's last heartbeat shows that its loop hangs; its heartbeat thread goes on then."""
        return worker.beat is not None and self.endless(worker.beat)

    def stranger_beats(self, name: str, beat: Heartbeat, now_s: float) -> None:
        """Record a heartbeat of a worker that is not registered (any more): it is alive, and sends a Hello when the
        turn of its loop is over."""
        if not self.endless(beat):
            self.unresponsive.busy(name, beat.turn_ms / 1000, now_s)

    def endless(self, beat: Heartbeat) -> bool:
        """Return whether a heartbeat reports a turn so long that the worker's loop hangs."""
        return beat.turn_ms > max(1000 * self.times.timeout_s, HANG_STEPS * beat.expected_ms)

    def misses(self, worker: WorkerHandle, now_s: float) -> None:
        """Note that the worker's connection broke: it has died, or has one lease to send a new Hello."""
        self._last[worker.role] = worker.hello
        self.unresponsive.add(UnresponsiveWorker.of(worker.hello, "no Hello since its connection broke", now_s, now_s))

    def give_up(self, worker: WorkerHandle, now_s: float) -> None:
        """Remove a worker that hangs in the turn that its last heartbeat reported."""
        self.gone(worker)
        turn_s = worker.beat.turn_ms / 1000 if worker.beat else 0.0
        self.unresponsive.add(UnresponsiveWorker.of(worker.hello, "in one turn of its loop", now_s - turn_s, now_s))

    def drains(self, worker: WorkerHandle) -> None:
        """Note that the worker accepts no new requests. Idempotent."""
        if worker.ready:
            worker.move(WorkerState.DRAINING)
            self.on_drain(worker)

    def cached(self, worker: WorkerHandle, message: Cached) -> None:
        """Update the prefix keys that the worker's cache holds; raises ValueError if the message contains a partial
        key."""
        worker.cached.difference_update(_keys(message.removed))
        worker.cached.update(_keys(message.added))

    def gone(self, worker: WorkerHandle) -> None:
        """Remove a worker that is lost or has left."""
        if worker.state is not WorkerState.GONE:
            worker.move(WorkerState.GONE)
        self._workers.pop(worker.id, None)
        self._last.pop(worker.role, None)

    def sweep(self, now_s: float, *, caught_up: bool = True) -> list[tuple[WorkerHandle, str]]:
        """Remove and return the workers that have been silent too long, or whose control connection is broken while
        heartbeats arrive on the other one; each with the reason and duration in words.

        Must be called every ``times.sweep_s``, after reading what had arrived. ``caught_up``: everything was read;
        otherwise a heartbeat may have overtaken a LeaseAck, so control connections are not judged.
        """
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

    def expect_rejoin(self, name: WorkerName, host: str, pid: int, now_s: float) -> None:
        """Expect a Hello of a worker that ran before this coordinator started; without one it counts as hung."""
        if not any((worker.hello.name, worker.hello.host) == (name, host) for worker in self):
            self.unresponsive.add(UnresponsiveWorker(name, host, pid, "no Hello to this coordinator", now_s, now_s))

    # -- what workers must agree on --------------------------------------------------------------------------------

    def _objection(self, hello: Hello) -> str | None:
        """Return what is wrong with a Hello regardless of the other workers, or None."""
        if reason := other_protocol(hello.protocol):
            return reason
        if len(hello.name.encode()) > MAX_NAME_BYTES or len(hello.incarnation.encode()) > MAX_INCARNATION_BYTES:
            return f"its name exceeds {MAX_NAME_BYTES} bytes or its incarnation {MAX_INCARNATION_BYTES} bytes"
        if self.fingerprint is not None and _checkpoint(hello.fingerprint) != self.fingerprint:
            return (
                f"its model {hello.model} is not the one served here, or has other weights or settings "
                f"(fingerprint {hello.fingerprint}, not {self.fingerprint}): "
                "start the worker with the same model and revision as the coordinator"
            )
        if hello.block_size <= 0 or hello.block_size % CHAIN_STEP or hello.kv_blocks <= 0 or hello.max_model_len <= 0:
            return f"block size {hello.block_size}, {hello.kv_blocks} blocks or length {hello.max_model_len} is invalid"
        if hello.max_num_seqs <= 0 or hello.max_num_batched_tokens <= 0:
            return f"a step of {hello.max_num_seqs} sequences and {hello.max_num_batched_tokens} tokens is invalid"
        if not _is_data_address(hello.data_address, hello.role):
            return (
                f"data address {hello.data_address[:128]!r}: a decode worker needs tcp://HOST:PORT that others "
                "can reach; other workers may have none"
            )
        return None

    def _disagreement(self, hello: Hello) -> str | None:
        """Return what keeps a worker from serving together with the registered ones, or None."""
        others = [worker.hello for worker in self if worker.id != hello.incarnation]
        ends = [other for other in others if {hello.role, other.role} == {"prefill", "decode"}]
        if ends and ends[0].kv_encryption != hello.kv_encryption:
            return (
                f"--kv-encryption {hello.kv_encryption}, but {ends[0].kv_encryption} of {ends[0].name}: "
                "both ends of a hand-off must use the same"
            )
        for end in ends:
            if not set(end.links) & set(hello.links):
                ours, theirs = ", ".join(hello.links), ", ".join(end.links)
                return f"--kv-transport {ours}, but {theirs} of {end.name}: both ends of a hand-off must share one"
            decode, prefill = (hello, end) if hello.role == "decode" else (end, hello)
            far = not share_loopback(decode.host_id, prefill.host_id)
            if far and is_loopback(_data_host(decode.data_address)):
                return (
                    f"data address {decode.data_address} of {decode.name} on {decode.host}, which {prefill.name} on "
                    f"{prefill.host} cannot reach: start {decode.name} with --host and an address of its host"
                )
        for other in others:
            if not converts(hello.dtype, other.dtype):
                return (
                    f"its KV is {hello.dtype}, that of {other.name} {other.dtype}: "
                    "give all workers of a model the same --kv-cache-dtype"
                )
        return _difference(hello, others[0]) if others else None


def name_taken(holder: WorkerHandle) -> str:
    """Return the reason for refusing a worker that has the same name as ``holder``."""
    hello = holder.hello
    return (
        f"there is a {hello.role} worker {hello.name} already, process {hello.pid} of {hello.host}: "
        "give every worker a name of its own with --name; if that process has died, its name is free in a moment"
    )


def other_protocol(protocol: int) -> str | None:
    """Return the reason for refusing a worker that speaks ``protocol``, None if this coordinator speaks it too."""
    if protocol == PROTOCOL:
        return None
    return f"protocol {protocol}, but this coordinator speaks {PROTOCOL}: run the same version of Tandem"


def _difference(hello: Hello, peer: Hello) -> str | None:
    """Return what keeps two workers from serving one model together, or None. They may differ in the element type and
    block size of their KV."""
    differing = [
        name for name in ("fingerprint", "layout", "vocab_size") if getattr(hello, name) != getattr(peer, name)
    ]
    if not differing:
        return None
    pairs = [f"{name} {getattr(hello, name)} against {getattr(peer, name)}" for name in differing]
    models = f"{hello.model} here, {peer.model} there" if hello.model != peer.model else hello.model
    why = ""
    if _weights(hello.fingerprint) != _weights(peer.fingerprint):
        why = ", whose weight files differ"
    elif hello.fingerprint != peer.fingerprint and hello.dtype == "fp8":
        why = ", loaded with another --quantization, --products or --dtype, or whose KV in fp8 has other scales"
    elif hello.fingerprint != peer.fingerprint:
        why = (
            ", loaded with another --quantization or --products, or a --max-model-len that changes the model's rotary "
            "embedding"
        )
    return f"{', '.join(pairs)} of {peer.name} ({models}){why}: workers of one model must have the same"


def _is_data_address(address: str, role: Role) -> bool:
    """Return whether a worker of ``role`` may have this data address: decode workers must have one that others can
    connect to, other workers may have none."""
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
    """Return the part of a worker's fingerprint that the coordinator can check without loading the model. The parts
    after the first dot (a hash of all weights, then the result of loading) must be equal among workers."""
    return fingerprint.partition(".")[0]


def _weights(fingerprint: str) -> list[str]:
    """Return the hash of all weights in a worker's fingerprint as a list, empty if it has none."""
    return fingerprint.split(".")[1:2]


def _keys(joined: bytes) -> Iterator[ChainKey]:
    if len(joined) % KEY_BYTES:
        raise ValueError(f"{len(joined)} bytes are not whole prefix keys")
    return (joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES))
