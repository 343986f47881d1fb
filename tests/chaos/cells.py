"""The failure matrix: each fault in each phase, with the expected outcome and a time bound.

One line per cell. ``measure`` selects the time, in seconds, that the bound applies to:

    gap      the longest pause after the fault until the client's next token or the end of its answer. For an answer
             that is not streamed (D) it lasts until the answer arrives, REST_S without a fault. In Q it is the
             neighbours' gap, and ``turn_s`` bounds the gap of the request itself, which waits TURN_S without a fault
    freed    from the fault until a living worker frees the last block
    answer   from the fault until the end of the answer
    back     from the time a new process listens (coordinator) or is ready (worker) until it is used again
    unqueued from the fault until the coordinator counts no waiting request
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from tests.chaos import faults
from tests.chaos.faults import Fault, frame, lost
from tests.chaos.scenes import OUTPUT, REST_S, TURN_S, Arranged, Phase
from tests.chaos.worker import FAILS, FAILS_ONCE, KILLS, OUT_OF_MEMORY, RAISES

KILLED_S, STOPPED_S, RECOMPUTED_S = 0.5, 2.5, 0.7
"""Bounds on a stream's largest gap: a death is detected within 0.2 s, silence within 2 s, and then the attempt starts
anew. ``RECOMPUTED_S`` is the time to compute a prompt again in phase P's slow prefill."""
HUNG_S = 3.25
"""A hung worker loop or a stalled stream is detected after 2 s by a check every 0.25 s; a hung loop is reported by a
heartbeat, every 0.5 s. Then the attempt starts anew."""
CUT_OFF_S = 4.0
"""A worker whose control connection carries nothing is detected after at most 3.5 s: a lease (sent every 0.5 s) is
unanswered for 1.75 s, a heartbeat (every 0.5 s) reports that, 0.5 s pass, and a check runs every 0.25 s. Then the
attempt starts anew."""
ALIVE_S = 1.0
"""How long a request suspected of crashing two workers waits until their deaths are confirmed or refuted."""
BACK_S = 1.0
"""Within this time a worker whose connection broke has joined again; an idle one notices by its next heartbeat."""
SOON_S = 0.5
"""Allowance for a fault that should not delay anything."""
BESIDE_S = 1.0
"""Allowance for the delay of an answer's steps, or of two successive answers', by other clusters on the same cores."""
HELD_S = 10.0
"""The longest time that anything may be held for a peer that is gone or silent."""
FREED_S, PREFILL_FREED_S = 0.15, 0.25
"""Time to free blocks after a client has left: 0.1 s plus the running step (decode, prefill)."""
UNQUEUED_S = 0.25
"""Time to forget a request that was only queued: immediate, but the coordinator is polled every 0.03 s under load."""
REFUSED_S, WORKERLESS_S, BEGUN_S = 1.0, 10.0, 18.0
"""Time to the error that there is no worker: for a new request, for an admitted one, and for one that has tokens which
its client has not received."""
EXPIRED_S = 0.5
"""Bound on the answer after a deadline, which is checked every 0.1 s."""
STARTED_S = 3.0
"""Time to start new workers: usually 0.4 s, up to 2 s while other clusters start theirs."""
REJOINED_S, USED_S = 3.0, 1.0
"""Time until the workers of a restarted coordinator are back, and until a restarted worker is used."""
OUTLIVES_LEASE = 500
"""Tokens of an answer that takes 15 s, longer than the lease of 8 s."""
Measure = Literal["gap", "freed", "answer", "back", "unqueued"]


@dataclass(frozen=True)
class Kind:
    """Flags of a cluster's workers and of its coordinator (``coordinator_flags``)."""

    flags: tuple[str, ...] = ("--max-num-seqs", "2")
    coordinator_flags: tuple[str, ...] = ()
    each: int = 2
    """Number of workers of each role."""


USUAL = Kind()
"""Two slots per decode worker: four requests fill all slots."""
HURRIED = Kind(coordinator_flags=("--request-timeout", str(faults.DEADLINE_S)))
IMPATIENT = Kind(flags=("--max-num-seqs", "8"), coordinator_flags=("--client-timeout", "1"))
WAITS = Kind(coordinator_flags=("--no-prefill-policy", "wait"))
REJECTS = Kind(coordinator_flags=("--no-prefill-policy", "reject"))
ALONE_WAITS = Kind(("--max-num-seqs", "8"), coordinator_flags=("--no-prefill-policy", "wait"), each=1)
ALONE_REJECTS = Kind(("--max-num-seqs", "8"), coordinator_flags=("--no-prefill-policy", "reject"), each=1)
HASTY = Kind(("--max-num-seqs", "2", "--drain-timeout", "0.1"))
PROMISED = Kind(flags=("--max-num-seqs", "4", "--blocks", "110"))
"""Per decode worker: blocks for two requests of 320 + 512 tokens, and slots for two more."""
FILLED = Kind(flags=("--max-num-seqs", "4", "--blocks", str(faults.POOL_BLOCKS)))
"""Blocks for the same two requests and one of 320 + 60 tokens, but not for it and two streams of 320 + 700."""
STRICT = Kind(coordinator_flags=("--max-queued-requests", "1"))
CRAMPED = PROMISED
"""The same limits; two streams of 320 + 700 tokens do not fit either."""


@dataclass(frozen=True)
class Cell:
    """One fault in one phase.

    ``expect`` is the expected verdict on the request's answer (see :meth:`tests.chaos.cluster.ChaosRequest.verdict`),
    ``neighbours`` that on the other requests. ``arranged`` is the phase in which the fault is set up, if that is an
    earlier one. ``output`` is the number of tokens requested, ``stream`` whether they are streamed, ``cluster`` the
    kind of cluster needed. ``turn_s`` bounds the time without a token of a request that was queued."""

    name: str
    phase: Phase
    fault: Fault
    expect: str
    bound_s: float
    measure: Measure = "gap"
    arranged: Arranged | None = None
    neighbours: str = "exact"
    output: int = OUTPUT
    stream: bool = True
    cluster: Kind = USUAL
    turn_s: float = TURN_S + BESIDE_S + SOON_S

    @property
    def id(self) -> str:
        return f"{self.name} / {self.phase}"

    @property
    def turns(self) -> bool:
        """Whether the request is queued when the fault strikes and answered afterwards, so that ``turn_s`` applies."""
        return self.phase == "Q" and self.arranged is None and self.measure in ("gap", "freed", "back")


def _row(name: str, fault: Fault, expect: str, bounds: dict[Phase, float], **more: object) -> list[Cell]:
    return [Cell(name, phase, fault, expect, bound, **more) for phase, bound in bounds.items()]  # type: ignore[arg-type]


def _late(delay_s: float) -> dict[Phase, float]:
    """Return the bounds of a fault that delays decoding by ``delay_s``."""
    return {"D": REST_S + BESIDE_S + delay_s, "S": delay_s}


_KILL = {"Q": KILLED_S, "P": KILLED_S + RECOMPUTED_S, "X": KILLED_S, **_late(KILLED_S)}
_STOP = {"Q": STOPPED_S, "P": STOPPED_S + RECOMPUTED_S, "X": STOPPED_S, **_late(STOPPED_S)}
_CUT_OFF = {"P": CUT_OFF_S + RECOMPUTED_S, "X": CUT_OFF_S, **_late(CUT_OFF_S)}
_UNMOVED = _late(SOON_S)
"""Faults of prefill do not affect requests that decode."""
_FEWER = {"Q": 6.0}
_FEWER_TURN_S = 2 * (TURN_S + BESIDE_S)
"""Half of the slots are left: a queued request's neighbours wait for each other (1.8 to 3.6 s), and it for them."""
_CUT_S = 0.5
"""A client's connection breaks at once when the coordinator dies."""
_NONE = {"Q": 1.0, "P": 1.0, "X": 1.0, **_late(1.0), "D": _UNMOVED["D"]}
_CALM = {phase: bound for phase, bound in _NONE.items() if phase != "Q"}

# Combinations without a cell:
# - Faults of a hand-off's frame or message outside X. (While an Accept is lost, prefill waits though decode already
#   computes; the cell in X covers that the blocks are freed.)
# - A slow, late or black-holed link in phases without a hand-off (Q, D, S): "link P-D reset" shows that these are
#   unaffected.
# - A client that stops reading before anything is sent to it (Q, P, X, D): no client reads then.
# - "every decode killed, none comes" in S: a stream waits for new workers until its deadline, and both have cells. The
#   same holds in X once the client has the first token; therefore that cell's answer is not streamed.
# - "no decode", "no prefill" and "overload" after Q: they affect arriving requests; later, "every ... killed" applies.
# - An engine failure occurs in the prompt (P); a poisonous output token in D and S.
CELLS: list[Cell] = [
    *_row("client disconnects", faults.client_leaves, "gone",
          dict.fromkeys("PX", PREFILL_FREED_S) | dict.fromkeys("DS", FREED_S), measure="freed"),
    *_row("client disconnects", faults.queued_client_leaves, "gone", {"Q": UNQUEUED_S}, measure="unqueued"),
    *_row("client stops reading", faults.client_stops_reading, "exact", {"S": 4.0}, measure="freed", cluster=IMPATIENT),
    *_row("prefill killed", partial(faults.kill, "prefill"), "exact", _KILL | _UNMOVED),
    *_row("prefill stopped", partial(faults.stop, "prefill"), "exact", _STOP | _UNMOVED),
    *_row("prefill stopped for 3 s", partial(faults.pause, "prefill"), "exact", _STOP | _UNMOVED),
    *_row("decode killed", partial(faults.kill, "decode"), "exact", _KILL | _FEWER, turn_s=_FEWER_TURN_S),
    *_row("decode stopped", partial(faults.stop, "decode"), "exact", _STOP | _FEWER, turn_s=_FEWER_TURN_S),
    *_row("decode stopped for 3 s", partial(faults.pause, "decode"), "exact", _STOP | _FEWER, turn_s=_FEWER_TURN_S),
    *_row("exception in one request, once", partial(faults.engine_fails, FAILS_ONCE, 1), "exact", {"P": 2.0},
          arranged="idle"),
    *_row("exception in one request, always", partial(faults.engine_fails, FAILS, 3), "error worker_lost", {"P": 5.0},
          measure="answer", arranged="idle"),
    *_row("out of memory in one request", partial(faults.engine_fails, OUT_OF_MEMORY, 1), "exact", {"P": 2.0},
          arranged="idle"),
    *_row("poison request kills its workers", partial(faults.engine_fails, KILLS, 2), "error request_quarantined",
          {"P": 5.0}, measure="answer", arranged="idle"),
    *_row("poison request ends its workers by an error", partial(faults.engine_fails, RAISES, 2),
          "error request_quarantined", {"P": 5.0}, measure="answer", arranged="idle"),
    *_row("poison request kills whom it streams from", partial(faults.poison, "D"), "error request_quarantined",
          {"D": 5.0}, measure="answer", arranged="idle"),
    *_row("poison request kills whom it streams from", partial(faults.poison, "S"), "error request_quarantined",
          {"S": 5.0}, measure="answer", arranged="idle"),
    *_row("prefill and decode killed together", faults.kill_pair, "exact", {p: _KILL[p] for p in "PXS"}),
    *_row("prefill hangs in a step", partial(faults.stick, "prefill", "stuck_s"), "exact",
          {"P": HUNG_S + RECOMPUTED_S}),
    *_row("decode hangs in a step", partial(faults.stick, "decode", "stuck_s"), "exact", _late(HUNG_S)),
    *_row("prefill hangs between steps", partial(faults.stick, "prefill", "jammed_s"), "exact",
          {"P": HUNG_S + RECOMPUTED_S, "X": HUNG_S}),
    *_row("decode hangs between steps", partial(faults.stick, "decode", "jammed_s"), "exact", _late(HUNG_S)),
    *_row("tokens of a decode worker are lost", faults.mute, "exact", _late(HUNG_S)),
    *_row("prefill hears nothing, its heartbeats arrive", partial(faults.cut_off_idle, "prefill", "down"), "exact",
          {"Q": CUT_OFF_S}, arranged="idle"),
    *_row("prefill hears nothing, its heartbeats arrive", partial(faults.cut_off, "prefill", "down"), "exact",
          {phase: _CUT_OFF[phase] for phase in "PX"}),
    *_row("prefill is not heard, its heartbeats arrive", partial(faults.cut_off_idle, "prefill", "up"), "exact",
          {"Q": CUT_OFF_S}, arranged="idle"),
    *_row("prefill is not heard, its heartbeats arrive", partial(faults.cut_off, "prefill", "up"), "exact",
          {phase: _CUT_OFF[phase] for phase in "PX"}),
    *_row("decode hears nothing, its heartbeats arrive", partial(faults.cut_off_idle, "decode", "down"), "exact",
          {"Q": CUT_OFF_S}, arranged="idle"),
    *_row("decode hears nothing, its heartbeats arrive", partial(faults.cut_off, "decode", "down"), "exact", _CUT_OFF),
    *_row("decode is not heard, its heartbeats arrive", partial(faults.cut_off_idle, "decode", "up"), "exact",
          {"Q": CUT_OFF_S}, arranged="idle"),
    *_row("decode is not heard, its heartbeats arrive", partial(faults.cut_off, "decode", "up"), "exact", _CUT_OFF),
    *_row("prefill is heard, its heartbeats are not", partial(faults.stop_heartbeats, "prefill"), "exact",
          {"P": _STOP["P"]}),
    *_row("decode is heard, its heartbeats are not", partial(faults.stop_heartbeats, "decode"), "exact",
          {"S": _STOP["S"]}),
    *_row("prefill leaves before it is done", partial(faults.outstay, "prefill"), "exact", {"P": _KILL["P"]},
          cluster=HASTY),
    *_row("decode leaves before it is done", partial(faults.outstay, "decode"), "exact", _late(1.0), cluster=HASTY),
    *_row("one hand-off fails, policy wait", faults.fail_hand_off, "exact", {"P": HUNG_S + RECOMPUTED_S},
          cluster=ALONE_WAITS),
    *_row("one hand-off fails, policy reject", faults.fail_hand_off, "exact", {"P": HUNG_S + RECOMPUTED_S},
          cluster=ALONE_REJECTS),
    *_row("link P-D reset", partial(faults.reset, "data"), "exact", _CALM),
    *_row("link P-D half-closed", partial(faults.half_close, "data"), "exact", _CALM),
    *_row("link P-D black hole", partial(faults.black_hole, "data"), "exact",
          {"P": STOPPED_S + RECOMPUTED_S, "X": STOPPED_S}),
    *_row("link P-D black hole", faults.black_hole_next, "exact", {"Q": SOON_S}, turn_s=TURN_S + STOPPED_S),
    *_row("link P-D slow", partial(faults.slow, "data", "bytes_per_s", 100_000.0, "bandwidth"), "exact",
          {"P": 1.0, "X": 1.0}),
    *_row("link P-D late by 50 ms", partial(faults.slow, "data", "latency_s", 0.05, "latency"), "exact",
          {"P": 1.5, "X": 1.5}),
    *_row("link P-D in slices of 7 bytes", partial(faults.slow, "data", "slice_bytes", 7, "slices"), "exact",
          {"P": 1.0, "X": 1.0}),
    *_row("frame corrupted", frame("corrupt"), "exact", {"X": 1.0}, arranged="P"),
    *_row("every frame corrupted", faults.corrupt_every_frame, "exact", {"X": STOPPED_S + RECOMPUTED_S}, arranged="P"),
    *_row("frame truncated", frame("truncate"), "exact", {"X": 1.0}, arranged="P"),
    *_row("frame dropped", frame("drop"), "exact", {"X": 1.0}, arranged="P"),
    *_row("frame duplicated", frame("duplicate"), "exact", {"X": 1.0}, arranged="P"),
    *_row("frames reordered", frame("reorder"), "exact", {"X": 1.0}, arranged="P"),
    *_row("grant lost", faults.grant_lost, "exact", {"X": 1.5}, arranged="idle"),
    *_row("commit lost", lost("commit", "up"), "exact", {"X": 1.0}, arranged="P"),
    *_row("accept lost", lost("accept", "down"), "exact", {"X": 1.0}, arranged="P"),
    *_row("acks lost", lost("ack", "down", 3), "exact", {"X": 1.0}, arranged="P"),
    *_row("coordinator killed", faults.kill_coordinator, "cut", dict.fromkeys("QPXDS", HELD_S), measure="freed",
          neighbours="cut", output=OUTLIVES_LEASE, turn_s=_CUT_S),
    *_row("coordinator killed, a new one comes", faults.replace_coordinator, "cut", dict.fromkeys("QPXDS", REJOINED_S),
          measure="back", neighbours="cut", output=OUTLIVES_LEASE, turn_s=_CUT_S),
    *_row("coordinator stalls for 0.5 s", partial(faults.stall_coordinator, 0.5), "exact", _NONE),
    *_row("coordinator stalls for 2.6 s", partial(faults.stall_coordinator, 2.6), "exact",
          dict.fromkeys("PXDS", 2.6 + SOON_S)),
    *_row("everything stopped for 2.6 s", partial(faults.stop_everybody, 2.6), "exact",
          {"P": 2.6 + SOON_S + RECOMPUTED_S, "X": 2.6 + SOON_S, **_late(2.6 + SOON_S)}),
    *_row("coordinator drains", faults.terminate_coordinator, "exact", _NONE),
    *_row("coordinator-prefill partition", partial(faults.black_hole, "prefill"), "exact",
          _STOP | _UNMOVED),
    *_row("coordinator-decode partition", partial(faults.black_hole, "decode"), "exact", _STOP | _FEWER,
          turn_s=_FEWER_TURN_S),
    *_row("coordinator-prefill partition, longer than a lease", partial(faults.outlast_lease, "prefill"), "exact",
          {"P": REJOINED_S}, measure="back"),
    *_row("coordinator-decode partition, longer than a lease", partial(faults.outlast_lease, "decode"), "exact",
          {"S": REJOINED_S}, measure="back", output=OUTLIVES_LEASE),
    *_row("coordinator-prefill reset", partial(faults.reset, "prefill"), "exact", _KILL | _UNMOVED),
    *_row("coordinator-decode reset", partial(faults.reset, "decode"), "exact", _KILL),
    *_row("coordinator-decode reset, of one after the other", faults.reset_one_after_the_other, "exact",
          _late(KILLED_S + ALIVE_S)),
    *_row("every connection to the coordinator reset", faults.reset_all, "exact",
          {"Q": BACK_S, "P": BACK_S + RECOMPUTED_S, "X": BACK_S + RECOMPUTED_S, **_late(BACK_S + RECOMPUTED_S)}),
    *_row("coordinator-prefill half-closed", partial(faults.half_close, "prefill"), "exact", {"P": _KILL["P"]}),
    *_row("coordinator-decode half-closed", partial(faults.half_close, "decode"), "exact", {"S": KILLED_S}),
    *_row("coordinator-decode in slices", partial(faults.slow, "decode", "slice_bytes", 5, "slices"), "exact",
          {phase: _NONE[phase] for phase in "DS"}),
    *_row("prefill drains", partial(faults.terminate, "prefill"), "exact", _NONE),
    *_row("prefill restarts at its address", partial(faults.restart, "prefill"), "exact", {"S": USED_S},
          measure="back"),
    *_row("decode restarts at its address", partial(faults.restart, "decode"), "exact", {"S": USED_S}, measure="back"),
    *_row("no prefill, policy local", partial(faults.no_prefill, "local"), "exact", {"Q": 1.0}, arranged="idle"),
    *_row("no prefill, policy wait", partial(faults.no_prefill, "wait"), "exact", {"Q": USED_S}, measure="back",
          arranged="idle", cluster=WAITS),
    *_row("no prefill, policy reject", partial(faults.no_prefill, "reject"), "error no_prefill_workers",
          {"Q": REFUSED_S}, measure="answer", arranged="idle", cluster=REJECTS),
    *_row("no decode", faults.no_decode, "error no_decode_workers", {"Q": ALIVE_S + REFUSED_S}, measure="answer",
          arranged="idle"),
    *_row("every decode killed, none comes", partial(faults.kill_pool, "decode"), "error no_decode_workers",
          {"P": WORKERLESS_S + 1.0}, measure="answer"),
    *_row("every decode killed, none comes", partial(faults.kill_pool, "decode"), "error no_decode_workers",
          dict.fromkeys("XD", BEGUN_S + 1.0), measure="answer", stream=False),
    *_row("every prefill killed", partial(faults.kill_pool, "prefill"), "exact", _KILL | _UNMOVED),
    *_row("every decode killed, new ones come", partial(faults.replace_pool, "decode"), "exact",
          {"P": STARTED_S, "X": STARTED_S, **_late(STARTED_S)}),
    *_row("decode killed beside one that is too small", faults.outgrow, "exact", {"D": 4 * REST_S + STARTED_S,
          "S": STARTED_S}, output=4 * OUTPUT),
    *_row("a worker of another model joins", faults.refuse_stranger, "exact", {"P": 1.0, "S": 1.0}),
    *_row("deadline passes", faults.deadline, "error request_timeout", dict.fromkeys("QPXDS", EXPIRED_S),
          measure="answer", neighbours="error request_timeout", cluster=HURRIED, output=4 * OUTPUT),
    *_row("overload", faults.overload, "exact", {"Q": 1.0}, cluster=STRICT),
    *_row("decode pool full", partial(faults.find_pool_full, 8), "exact", {"Q": 1.0}, cluster=PROMISED, output=256),
    *_row("decode pool full", partial(faults.fill_pool_beside, "P"), "exact", {"P": 3.0}, cluster=FILLED,
          arranged="idle"),
    *_row("decode pool full", partial(faults.fill_pool_beside, "X"), "exact", {"X": 3.0}, cluster=FILLED,
          arranged="idle"),
    *_row("decode pool full", partial(faults.fill_pool_beside, "D"), "exact", {"D": 6.0}, cluster=FILLED,
          arranged="idle"),
    *_row("decode pool full", faults.fill_pool, "exact", {"S": 6.0}, cluster=CRAMPED, output=700),
    *_row("decode drains", partial(faults.terminate, "decode"), "exact", _NONE | _FEWER, turn_s=_FEWER_TURN_S),
]  # fmt: skip

_CORE = """
client disconnects / P · client disconnects / S · prefill killed / P · prefill stopped / X · decode killed / X
decode killed / S · decode stopped / S · exception in one request, once / P · link P-D reset / X
link P-D black hole / X · frame corrupted / X · frame dropped / X · commit lost / X · coordinator stalls for 0.5 s / S
coordinator-decode partition / S · decode drains / S
"""
CORE = [cell for cell in CELLS if cell.id in {name.strip() for name in _CORE.replace("\n", " · ").split(" · ")}]
