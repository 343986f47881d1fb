"""The registry of workers: which may join, which are gone, which prefixes they have cached."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.errors import InvariantBroken
from common.core.ids import Incarnation, WorkerName
from common.core.timeouts import FailureTimes
from common.kv.prefix import chain_root, extend_chain
from common.net.messages import PROTOCOL, Cached, Heartbeat, Hello, Role
from coordinator.cluster.liveness import LoopLag
from coordinator.cluster.registry import JoinRefused, Registry, WorkerHandle, WorkerState

TIMES = FailureTimes()


def hello(name: str = "d0", incarnation: str = "i0", role: Role = "decode", **changes: Any) -> Hello:
    base = Hello(
        protocol=PROTOCOL,
        name=WorkerName(name),
        incarnation=Incarnation(incarnation),
        role=role,
        model="m",
        fingerprint="f",
        layout="l",
        pid=1,
        host="h",
        host_id="h",
        data_address="tcp://127.0.0.1:1" if role == "decode" else "",
        links=("shm",),
        kv_blocks=100,
        block_size=16,
        max_model_len=2000,
        vocab_size=512,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        device="cpu",
        dtype="float32",
    )
    return msgspec.structs.replace(base, **changes)


def join(registry: Registry, *args: Any, now: float = 0.0, **changes: Any) -> WorkerHandle:
    verdict = registry.join(hello(*args, **changes), now)
    assert isinstance(verdict, WorkerHandle), verdict
    registry.welcome(verdict)
    return verdict


def beat(incarnation: str, **changes: Any) -> Heartbeat:
    base = Heartbeat(Incarnation(incarnation), 0, b"", 90, 4, 6, 1, 0, 0, -1, False)
    return msgspec.structs.replace(base, **changes)


_NO_ADDRESSES = ("", "nonsense", "tcp://", "tcp://h", "tcp://h:", "tcp://h:0", "tcp://h:65536", "tcp://h:x", "h:1")
_NOWHERE = ("tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://[::ffff:0.0.0.0]:1", "tcp://*:1")


def test_a_worker_is_ready_once_it_was_welcomed() -> None:
    registry = Registry("f")
    verdict = registry.join(hello(), 0.0)
    assert isinstance(verdict, WorkerHandle) and verdict.state is WorkerState.JOINING
    assert registry.ready("decode") == []
    registry.welcome(verdict)
    assert registry.ready("decode") == [verdict]
    assert registry.seen["decode"] == {"d0"}


def test_registry_keeps_hellos_of_missing_but_not_departed_workers() -> None:
    registry = Registry("f")
    prefill, lost = join(registry, "p0", "i0", "prefill"), join(registry, "d0", "i1")
    registry.gone(lost)
    registry.misses(lost, 0.0)
    assert registry.hellos() == [prefill.hello, lost.hello]
    back = join(registry, "d0", "i2", max_model_len=77)
    assert registry.hellos() == [prefill.hello, back.hello]
    registry.gone(back)  # it leaves
    assert registry.hellos() == [prefill.hello]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": PROTOCOL + 1}, "protocol"),
        ({"fingerprint": "other"}, "fingerprint"),
        ({"layout": "other"}, "layout"),
        ({"vocab_size": 9}, "vocab_size"),
        ({"block_size": 24}, "block size"),
        ({"kv_blocks": 0}, "blocks"),
        ({"max_num_seqs": 0}, "0 sequences"),
        ({"max_num_batched_tokens": -1}, "-1 tokens"),
        ({"dtype": "bfloat16", "layout": "other"}, "layout other against l of d0"),
        ({"fingerprint": "f.2", "model": "n"}, r"fingerprint f.2 against f of d0 (n here, m there)"),
        ({"host": "elsewhere", "name": "d0"}, "--name"),
        ({"role": "prefill", "name": "d0", "data_address": ""}, "there is a decode worker d0 already"),
        *(({"data_address": address}, "data address") for address in (*_NO_ADDRESSES, *_NOWHERE)),
    ],
)
def test_a_worker_that_differs_is_refused_in_words(changes: dict[str, Any], words: str) -> None:
    registry = Registry("f")
    join(registry)
    verdict = registry.join(hello(**{"name": "d1", "incarnation": "i1", **changes}), 0.0)
    assert isinstance(verdict, JoinRefused) and words in verdict.reason
    assert len(registry) == 1


def test_registry_names_differing_weights_or_quantization() -> None:
    registry = Registry("f")
    join(registry, fingerprint="f.w")
    for fingerprint, words in (("f.v", "whose weight files differ"), ("f.w.8", "with another --quantization")):
        verdict = registry.join(hello("d1", "i1", fingerprint=fingerprint), 0.0)
        assert isinstance(verdict, JoinRefused) and words in verdict.reason


def test_all_workers_of_a_model_have_kv_in_fp8_or_none_has() -> None:
    registry = Registry("f")
    join(registry)
    verdict = registry.join(hello("d1", "i1", dtype="fp8", fingerprint="f.8"), 0.0)
    assert isinstance(verdict, JoinRefused)
    assert "its KV is fp8, that of d0 float32: give all workers of a model the same --kv-cache-dtype" in verdict.reason
    other = Registry("f")
    join(other, dtype="fp8", fingerprint="f.w.1")
    verdict = other.join(hello("d1", "i1", dtype="fp8", fingerprint="f.w.2"), 0.0)
    assert isinstance(verdict, JoinRefused) and "KV in fp8 has other scales" in verdict.reason


def test_both_ends_of_a_hand_off_must_encrypt_alike() -> None:
    registry = Registry("f")
    join(registry, "p0", "i0", "prefill", kv_encryption="curve")
    verdict = registry.join(hello("d0", "i1", kv_encryption="none"), 0.0)
    assert isinstance(verdict, JoinRefused) and "--kv-encryption none, but curve of p0" in verdict.reason
    join(registry, "c0", "i2", "colocated", kv_encryption="none")  # it hands nothing over
    decode = join(registry, "d0", "i3", kv_encryption="curve")
    registry.gone(decode)
    registry.gone(next(worker for worker in registry if worker.role == "prefill"))
    join(registry, "d0", "i4", kv_encryption="none")  # all workers with the other setting are gone


def test_both_ends_of_a_hand_off_need_a_transport_in_common() -> None:
    registry = Registry("f")
    join(registry, "p0", "i0", "prefill", links=("shm",))
    verdict = registry.join(hello("d0", "i1", links=("zmq",)), 0.0)
    assert isinstance(verdict, JoinRefused) and "--kv-transport zmq, but shm of p0" in verdict.reason
    join(registry, "d1", "i2", links=("shm", "zmq"))
    join(registry, "c0", "i3", "colocated", links=("zmq",))  # it hands nothing over


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:1"])
@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("far", ["other boot/ipc:[1]:net:[1]/0", "boot/ipc:[2]:net:[2]/0"], ids=["host", "namespace"])
def test_a_decode_worker_must_be_where_prefill_workers_of_other_hosts_can_dial_it(
    first: Role, address: str, far: str
) -> None:
    """Cloned machines share a host name; processes in one network may belong to other users or share no memory."""
    registry = Registry("f")
    near = {"host": "vm", "host_id": "boot/ipc:[1]:net:[1]/0"}
    hellos = [hello("p0", "i0", "prefill", **near)]
    hellos.append(hello("d0", "i1", "decode", host="vm", host_id=far, data_address=address))
    if first == "decode":
        hellos.reverse()
    assert isinstance(registry.join(hellos[0], 0.0), WorkerHandle)
    verdict = registry.join(hellos[1], 0.0)
    assert isinstance(verdict, JoinRefused) and f"{address} of d0 on vm, which p0 on vm cannot reach" in verdict.reason
    join(registry, "c0", "i2", "colocated", host_id=far)  # a colocated worker is never dialed
    joined = hellos[0].host_id.replace("ipc:[1]", "ipc:[3]").replace("/0", "/1000")
    join(registry, "x0", "i3", hellos[1].role, host_id=joined)


def test_a_name_that_libzmq_cannot_carry_is_refused() -> None:
    verdict = Registry("f").join(hello("d" * 129, "i0"), 0.0)
    assert isinstance(verdict, JoinRefused) and "128" in verdict.reason


def test_workers_may_hold_kv_in_types_and_blocks_of_their_own() -> None:
    registry = Registry("f")
    join(registry)
    other = join(registry, "p0", "i1", "prefill", dtype="bfloat16", block_size=32)
    assert other.ready and len(registry) == 2


def test_without_a_model_of_its_own_the_registry_takes_the_first_workers() -> None:
    registry = Registry(None)
    join(registry, fingerprint="x")
    assert isinstance(registry.join(hello("d1", "i1", fingerprint="y"), 0.0), JoinRefused)


def test_silence_is_the_end_and_our_own_lag_is_not_silence() -> None:
    registry = Registry("f")
    worker = join(registry)
    registry.sweep(0.0)
    assert registry.sweep(TIMES.sweep_s) == []
    assert registry.sweep(TIMES.sweep_s + 10) == [], "we were not listening for ten seconds"
    now = TIMES.sweep_s + 10
    while registry.get(worker.id) is not None and now < 100:
        now += TIMES.sweep_s
        gone = registry.sweep(now)
    [(lost, why)] = gone
    assert lost is worker and why.startswith("silent for 1") and worker.state is WorkerState.GONE
    assert now - (TIMES.sweep_s + 10) <= TIMES.silence_s + 2 * TIMES.sweep_s


def test_registry_excuses_own_lag_only_before_last_heartbeat() -> None:
    registry = Registry("f")
    worker = join(registry)
    registry.sweep(0.0)
    registry.beat(worker, beat("i0"), 10.0)  # the waiting heartbeat is read before the sweep
    assert registry.sweep(10.0) == [] and worker.heard_at == 10.0
    assert registry.sweep(10.0 + TIMES.sweep_s) == []
    now = 10.0 + TIMES.sweep_s
    while registry.get(worker.id) is not None and now < 100:
        now += TIMES.sweep_s
        registry.sweep(now)
    assert now - 10.0 <= TIMES.silence_s + 2 * TIMES.sweep_s


@pytest.mark.parametrize("late_s", [0.01, 0.1, 0.25, 0.5, 1.0])
def test_a_coordinator_that_is_always_late_notices_silence_all_the_same(late_s: float) -> None:
    """Only the longest lag is excused; between two lags the coordinator did listen."""
    registry = Registry("f")
    join(registry)
    now = 0.0
    registry.sweep(now)
    while len(registry):
        now += TIMES.sweep_s + late_s
        registry.sweep(now)
    assert now <= TIMES.silence_s + TIMES.sweep_s + 2 * late_s


def test_short_lag_does_not_replace_longer_excused_lag() -> None:
    registry = Registry("f")
    join(registry)
    for now in (0.0, 0.3, 0.6, 10.6, 10.9, 11.2):
        assert registry.sweep(now) == []
    assert registry.sweep(12.6), "0.6 s before it, and two seconds after"


@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=40), st.integers(0, 39), st.floats(0.0, 1.0))
def test_silence_excludes_longest_lag_since_last_message(lags: list[float], which: int, part: float) -> None:
    looks, reported = [0.0], LoopLag(TIMES.sweep_s)
    reported.look(0.0)
    for late_s in lags:
        looks.append(looks[-1] + TIMES.sweep_s + late_s)
        reported.look(looks[-1])
    before = looks[min(which, len(lags) - 1)]
    heard_at = before + part * (looks[-1] - before)
    excuses = [min(late, at - heard_at) for at, late in zip(looks[1:], lags, strict=True) if at > heard_at]
    assert reported.silence(heard_at, looks[-1]) == pytest.approx(looks[-1] - heard_at - max(excuses, default=0.0))


def test_a_heartbeat_keeps_a_worker() -> None:
    registry = Registry("f")
    worker = join(registry)
    for step in range(40):
        registry.beat(worker, beat("i0"), step * TIMES.sweep_s)
        assert registry.sweep(step * TIMES.sweep_s) == []


def test_registry_removes_worker_without_heartbeats_despite_messages() -> None:
    registry = Registry("f")
    worker = join(registry)
    registry.beat(worker, beat("i0"), 0.0)
    for step in range(1, 8):
        registry.leased(worker, step * TIMES.sweep_s)
        registry.renewed(worker)
        assert registry.sweep(step * TIMES.sweep_s) == []
    assert registry.sweep(8 * TIMES.sweep_s) == [(worker, f"silent for {8 * TIMES.sweep_s:.3g} s")]


def test_messages_replace_first_heartbeat_for_one_lease() -> None:
    """A worker may send messages before its first heartbeat, but is given up if none comes within a lease."""
    registry = Registry("f")
    worker, gone_at = join(registry), 0.0
    for step in range(1, 100):
        registry.on_message(worker, step * TIMES.sweep_s)
        if registry.sweep(step * TIMES.sweep_s):
            gone_at = step * TIMES.sweep_s
            break
    assert TIMES.lease_s < gone_at <= TIMES.lease_s + TIMES.timeout_s


def beaten(
    registry: Registry, worker: WorkerHandle, turn_ms: Callable[[float], int], answers_until: float
) -> float | None:
    """Send heartbeats and leases for a minute; return when the worker was given up, or None. It acknowledges leases at
    the beginning of each of its turns; ``turn_ms`` gives the running time of the current turn."""
    for step in range(1, 240):
        now = step * TIMES.sweep_s
        if registry.sweep(now):
            return now
        if step % 2:
            continue
        began = now - max(0, turn_ms(now)) / 1000
        if worker.owes_since is not None and worker.owes_since <= min(began, answers_until):
            registry.renewed(worker)
        registry.leased(worker, now)
        registry.beat(worker, beat("i0", turn_ms=turn_ms(now)), now)
    return None


@pytest.mark.parametrize("turn_s", [0.0, 0.3, 1.0, 3.0])
def test_registry_removes_worker_without_lease_acks_despite_heartbeats(turn_s: float) -> None:
    """The coordinator cannot know whether the worker receives nothing or its answers are lost."""
    registry = Registry("f")
    worker = join(registry)
    registry.sweep(0.0)

    def turn_ms(now: float) -> int:
        return int(now % turn_s * 1000) if turn_s else -1

    gone_at = beaten(registry, worker, turn_ms, answers_until=5.0)
    assert gone_at is not None and worker.state is WorkerState.GONE
    assert gone_at - 5.0 <= TIMES.timeout_s + 3 * TIMES.heartbeat_s + turn_s
    [reported] = hung(registry, 60.0, since=gone_at)
    assert reported.startswith("d0 1 no answer over its control connection for "), "it may be replaced"


def test_registry_keeps_worker_while_messages_are_unread() -> None:
    """While messages queue up, a heartbeat can overtake the lease acknowledgements."""
    registry = Registry("f")
    worker = join(registry)
    for step in range(40):
        now = step * TIMES.sweep_s
        assert registry.sweep(now, caught_up=False) == []
        registry.leased(worker, now)
        registry.beat(worker, beat("i0"), now)
    assert registry.sweep(now + TIMES.sweep_s) == [(worker, "no answer over its control connection for 8 s")]


@pytest.mark.parametrize("turn_s", [0.0, 0.4, 1.0, 3.0, 20.0])
def test_registry_keeps_worker_that_acks_after_each_turn(turn_s: float) -> None:
    registry = Registry("f")
    worker = join(registry)
    registry.sweep(0.0)
    assert beaten(registry, worker, lambda now: int(now % turn_s * 1000) if turn_s else -1, math.inf) is None


@pytest.mark.parametrize("changes", [{}, {"host": "other"}, {"role": "prefill"}, {"fingerprint": "f.2"}])
def test_the_name_of_a_worker_that_is_here_cannot_be_taken(changes: dict[str, Any]) -> None:
    registry = Registry("f")
    old = join(registry)
    changed = msgspec.structs.replace(hello("d0", "i1"), **changes)
    verdict = registry.join(changed, 1.0)
    assert isinstance(verdict, JoinRefused) and verdict.for_now and "already" in verdict.reason
    assert old.ready and list(registry) == [old]
    registry.gone(old)
    assert isinstance(registry.join(changed, 2.0), WorkerHandle), "a process that has died is followed by another"
    late = registry.join(hello("d0", "i0"), 3.0)
    assert isinstance(late, JoinRefused) and late.for_now, "two processes must not push each other out"


def test_repeated_hello_replaces_worker_handle() -> None:
    registry = Registry("f")
    old = join(registry)
    again = join(registry)
    assert again is not old and registry.get(old.id) is again and old.state is WorkerState.GONE


def test_draining_takes_a_worker_out_of_the_ready_ones() -> None:
    registry = Registry("f")
    worker = join(registry)
    registry.beat(worker, beat("i0", draining=True), 0.0)
    assert worker.state is WorkerState.DRAINING and registry.ready("decode") == []
    registry.beat(worker, beat("i0", draining=True), 0.0)
    assert worker.blocks == (90, 4, 6)
    with pytest.raises(InvariantBroken):
        worker.move(WorkerState.READY)


@pytest.mark.parametrize("block_size", [16, 32])
def test_the_longest_announced_prefix_in_whole_blocks(block_size: int) -> None:
    registry = Registry("f")
    worker = join(registry, block_size=block_size)
    tokens = list(range(100))
    chain = extend_chain(chain_root("", "f", "float32"), [], tokens)
    ends = [chain[end // 16 - 1] for end in range(block_size, 97, block_size)]
    registry.cached(worker, Cached(b"".join(ends), b""))
    assert worker.cached_prefix(chain, 99) == 96
    assert worker.cached_prefix(chain, 95) == 96 - block_size
    other = extend_chain(chain_root("salt", "f", "float32"), [], tokens)
    assert worker.cached_prefix(other, 99) == 0
    registry.cached(worker, Cached(b"", ends[0]))
    assert worker.cached_prefix(chain, 99) == 0
    with pytest.raises(ValueError, match="whole"):
        registry.cached(worker, Cached(b"x", b""))


def hung(registry: Registry, until_s: float, *, since: float = 0.0) -> list[str]:
    """Sweep at the regular interval; return the workers to be replaced and the reasons."""
    reported, steps = [], round((until_s - since) / TIMES.sweep_s)
    for now in (since + step * TIMES.sweep_s for step in range(1, steps + 1)):
        registry.sweep(now)
        reported += [f"{hang.name} {hang.pid} {hang.why(now)}" for hang in registry.unresponsive.overdue(now)]
    return reported


def test_silent_worker_is_replaced_once_after_lease() -> None:
    registry = Registry(None)
    join(registry, "d0", pid=7)
    registry.sweep(0.0)
    given_up = TIMES.silence_s + TIMES.sweep_s
    assert hung(registry, given_up + TIMES.lease_s - TIMES.sweep_s) == []
    assert hung(registry, 60.0, since=given_up + TIMES.lease_s - TIMES.sweep_s) == ["d0 7 silent for 10 s"]


def test_worker_that_hangs_in_turn_is_replaced() -> None:
    registry = Registry(None)
    worker = join(registry, "d0", pid=7)
    registry.sweep(0.0)
    registry.beat(worker, beat("i0", turn_ms=3000), 0.0)
    assert registry.hangs(worker)
    registry.give_up(worker, 0.0)
    assert hung(registry, 60.0) == ["d0 7 in one turn of its loop for 11 s"]


@pytest.mark.parametrize("incarnation", ["i0", "i1"], ids=["itself", "another process"])
def test_rejoined_worker_is_not_replaced(incarnation: str) -> None:
    registry = Registry(None)
    join(registry, "d0")
    join(registry, "d1", "other")
    registry.sweep(0.0)
    last = TIMES.silence_s + TIMES.lease_s
    assert hung(registry, last) == []
    registry.gone(join(registry, "d0", incarnation, now=last))
    assert [reported.split()[0] for reported in hung(registry, 60.0, since=last)] == ["d1"]


def test_expected_worker_has_one_lease_to_join() -> None:
    registry = Registry(None)
    early = join(registry, "d0")
    for pid, name in enumerate(("d0", "d1", "d2")):
        registry.expect_rejoin(WorkerName(name), "h", pid, 0.0)
    registry.gone(early)
    registry.sweep(0.0)
    assert hung(registry, 2.0) == []
    registry.gone(join(registry, "d1", "i1", now=2.0))
    assert hung(registry, TIMES.lease_s - TIMES.sweep_s, since=2.0) == []
    reported = hung(registry, 60.0, since=TIMES.lease_s - TIMES.sweep_s)
    assert reported == ["d2 2 no Hello to this coordinator for 8 s"]


def test_expected_worker_in_long_step_may_join_after_it() -> None:
    """Its heartbeats report the long step to a coordinator that does not know the worker."""
    registry = Registry(None)
    registry.expect_rejoin(WorkerName("d0"), "h", 7, 5.0)
    registry.sweep(5.0)
    turn_ms = 3000
    for tick in range(40):
        now, turn_ms = 5.5 + tick / 2, turn_ms + 500
        registry.stranger_beats("d0", beat("i0", turn_ms=turn_ms, expected_ms=6000), now)
        assert hung(registry, now + 0.5, since=now) == []
    assert turn_ms == 23000, "the last beat before it would be a hang"
    for tick in range(3):  # in another turn: it could have sent Hello before
        registry.stranger_beats("d0", beat("i0", turn_ms=100, expected_ms=6000), 25.5 + tick)
    assert len(hung(registry, 60.0, since=25.5)) == 1
    assert hung(registry, 90.0, since=60.0) == []


def test_departed_worker_is_not_replaced() -> None:
    registry = Registry(None)
    worker = join(registry)
    registry.sweep(0.0)
    registry.gone(worker)
    assert hung(registry, 60.0) == []


def test_coordinator_lag_is_not_counted_as_hang() -> None:
    registry = Registry(None)
    join(registry)
    registry.sweep(0.0)
    given_up = TIMES.silence_s + TIMES.sweep_s
    assert hung(registry, given_up) == []
    registry.sweep(given_up + 60.0)
    assert registry.unresponsive.overdue(given_up + 60.0) == [], "we were not listening for a minute"
    assert len(hung(registry, given_up + 70.0, since=given_up + 60.0)) == 1
