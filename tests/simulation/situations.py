"""Histories about one fault each, in pools with a spare worker: whatever the fault hits can move elsewhere.

Their time limits count from the beginning of the fault, so that each watchdog, timer and lease has a history that is
late without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from common.core.ids import TransferId
from common.core.request import SamplingParams
from common.core.sequence import Batch
from common.net.messages import Role
from coordinator.requests.state import MAX_CRASHES, State
from coordinator.requests.wait_limits import WORKERLESS_WAIT_S
from coordinator.routing.router import FAILED_PAIRS, Demand
from tests.fakes.constraints import LONG
from tests.fakes.oracle import oracle_stream
from tests.simulation.grammars import constrained
from tests.simulation.history import History
from tests.simulation.liveness import (
    CALM_STEPS,
    COORDINATOR,
    DYING_S,
    LEASE_ANSWERED_S,
    LEASE_S,
    LINGERS_S,
    LOST_S,
    NOTICED_S,
    RESENT_S,
)
from tests.simulation.network import Frameless, Losing, Mute, Severed
from tests.simulation.system import Poisoned, SimulatedClient, SimulatedWorker, WorkerShape

ROLES: tuple[Role, ...] = ("prefill", "decode", "colocated")
LONG_S = 12.0
"""Duration of a fault whose end nothing may wait for."""
UNLISTED_S = 0.6
"""Time until a lease without the request arrives: leases are sent twice a second, plus network delay."""
LOOK_S = 0.003
BEGUN_S = 0.05
"""Time after which a step that was asked to be long has begun."""


class OneFault(History):
    """A history with ample memory and clients that stay; each request has ``tokens`` output tokens."""

    roles = ("prefill", "prefill", "decode", "decode")
    requests, rate, tokens = 7, 20.0, 24
    pace = 2.0
    constrains = True
    """Whether some outputs may be constrained. They are as long as the others, but take fewer steps."""

    def _build(self) -> None:
        self.system.coordinator.router.local_prefill, self.system.pace = "never", self.pace
        together = self.rng.random() < 0.5  # on one host, KV is pulled
        for number, role in enumerate(self.roles):
            name = f"{role}-{number}"
            self.names.append(name)
            self.system.add_worker(name, role, self._blocks(role), 16, "a" if together else name)

    def _blocks(self, role: str) -> int:
        return 200

    def _work_s(self) -> float:
        """Return the time for the chunks of all prompts and the steps of one answer: the pools work in parallel."""
        return (4 * self.requests + self.tokens) * self.system.slowest_s

    def _requests(self) -> None:
        rng, at = self.rng, 0.0
        for number in range(1, self.requests + 1):
            at += rng.expovariate(self.rate)
            prompt = rng.choices(range(1000), k=rng.randint(20, 90))
            sampling = SamplingParams(self.tokens, rng.randrange(1 << 32))
            if self.constrains and self.system.constrains:
                sampling = constrained(sampling, LONG)
            client = self._client(number, prompt, sampling)
            self.system.clients.append(client)
            self._plan(at, self._send, client, "")

    def _client(self, number: int, prompt: list[int], sampling: SamplingParams) -> SimulatedClient:
        return SimulatedClient(self.system, number, prompt, sampling, 1)

    def _when(self, ready: Callable[[], object], action: Callable[[], None]) -> None:
        """Run ``action`` as soon as ``ready`` is true, unless all requests end before."""
        if ready():
            action()
        elif self.system.running or any(not client.over for client in self.system.clients):
            self._plan(LOOK_S, self._when, ready, action)

    def _victim(self) -> SimulatedWorker:
        worker = self.system.workers[self.rng.choice(self.names)]
        self.system.suspects.add(worker.name)
        return worker

    def _busy(self, worker: SimulatedWorker) -> bool:
        """Return whether the worker holds a client's request (not only trials of links)."""
        ours = {client.id for client in self.system.clients}
        return any(transfer.request in ours for transfer in worker.worker.holdings())

    def _streams(self, worker: SimulatedWorker) -> bool:
        records = self.system.coordinator.dispatcher.records.values()
        lives = [
            request_record.progress
            for request_record in records
            if request_record.progress.decode == worker.worker.incarnation
        ]
        return any(progress.state is State.DECODING for progress in lives)

    def _lasts(self) -> None:
        """Keep the history going until the fault is over."""
        self._plan(LONG_S + 1.0, lambda: None)


class Hung(OneFault):
    """A worker hangs in a step; its heartbeats continue."""

    def _faults(self) -> None:
        victim = self._victim()

        def hang() -> None:
            victim.engine.stuck_s = LONG_S
            self._lasts()

        self._when(lambda: victim.engine.steps >= 3 and self._busy(victim), hang)


class Jammed(OneFault):
    """A worker loop hangs outside of any step; its heartbeats continue."""

    def _faults(self) -> None:
        victim = self._victim()

        def jam() -> None:
            victim.jam(LONG_S)
            self._lasts()

        self._when(lambda: self._busy(victim), jam)


class Muted(OneFault):
    """The tokens of a decode worker are lost; its heartbeats, which list the streams, arrive."""

    roles = ("prefill", "decode", "decode")
    constrains = False
    requests, tokens, pace = 4, 125, 8.0  # long: once a stream ends, heartbeats omit it, which reveals the loss too

    def _faults(self) -> None:
        victim = self._victim()

        def mute() -> None:
            self.system.network.losing = Mute(victim.name, "tokens")
            self.system.struck(victim.name, COORDINATOR)

        self._when(lambda: self._streams(victim), mute)

    def _victim(self) -> SimulatedWorker:
        worker = super()._victim()
        return worker if worker.role == "decode" else self._victim()


class CutOff(OneFault):
    """One of a worker's two connections to the coordinator loses everything, in one or both directions, without
    breaking: either its control connection or that of its heartbeats. Its requests must move to other workers, and it
    must reconnect."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.noticed_s = LEASE_ANSWERED_S + RESENT_S

    def _build(self) -> None:
        self.roles = self.rng.choice((OneFault.roles, ("colocated",) * 3))
        super()._build()

    def _faults(self) -> None:
        victim = self._victim()
        deaf, mute = self.rng.choice(((True, False), (False, True), (True, True)))
        beats = mute and self.rng.random() < 0.3  # losing what is sent to the heartbeat connection alone does no harm

        def sever() -> None:
            network = self.system.network
            connection = network.control(victim.process, self.system.coordinator.process, beats=beats)
            network.losing = Severed(connection, deaf, mute)
            self.system.struck(victim.name, COORDINATOR)

        steps = self.rng.randint(0, 8)
        self._when(lambda: victim.engine.steps >= steps and self._busy(victim), sever)

    def _judge(self) -> None:
        super()._judge()
        for client in self.system.clients:
            if client.ends != ["done"]:
                self.system.complain(f"request {client.number} ends with {client.ends}, beside a severed connection")
        self.system.check()


class Forlorn(OneFault):
    """A link breaks, and the sender's failure report is lost: only the receiver's lease can end the hand-off."""

    roles = ("prefill", "decode", "decode")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.noticed_s = LEASE_S + RESENT_S

    def _faults(self) -> None:
        sender = self.system.workers["prefill-0"]
        receiver = self.system.workers[self.rng.choice(("decode-1", "decode-2"))]
        self.system.suspects |= {sender.name, receiver.name}

        def cut() -> None:
            self.system.network.losing = Mute(sender.name, "failed")
            self.system.struck(sender.name, COORDINATOR)
            self._cut_for((sender.process, receiver.process), LONG_S)

        self._when(lambda: sender.sessions() and self._busy(receiver), cut)


class Unladen(OneFault):
    """Announcements and grants pass but frames are lost, so that decode must compute each prompt itself in the end."""

    requests = 5

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.noticed_s = FAILED_PAIRS * NOTICED_S

    def _faults(self) -> None:
        self.system.network.losing = Frameless()
        for attempt in range(FAILED_PAIRS + 1):  # recorded as a fault of each attempt
            self._plan(attempt * LINGERS_S, self._strike)

    def _strike(self) -> None:
        for one in self.names:
            for other in self.names:
                if one.startswith("prefill") and other.startswith("decode"):
                    self.system.struck(one, other)

    def _heal(self) -> None:
        self.system.network.losing = None
        super()._heal()

    def _judge(self) -> None:
        super()._judge()
        for client in self.system.clients:
            if client.ends != ["done"]:
                self.system.complain(f"request {client.number} ends with {client.ends} for want of frames")
        self.system.check()


class Poisonous(OneFault):
    """One request kills every worker that computes it beyond some position; workers restart. Only this request may
    fail, and it must before many workers have died."""

    roles = ("prefill", "prefill", "decode", "decode", "decode")
    requests, rate, tokens = 12, 60.0, 30

    def _faults(self) -> None:
        raised, poison = self.rng.random() < 0.5, self.rng.choice(self.system.clients)
        self.poison, deadly = poison.id, len(poison.prompt) + self.rng.choice((0, 1, 2, 20))

        def look(batch: Batch) -> None:
            if any(each.sequence.request.id == self.poison and each.end >= deadly for each in batch.segments):
                raise Poisoned(raised=raised)

        self.system.poison = look
        for name in self.names:
            self._comes_back(name)

    def _comes_back(self, name: str) -> None:
        worker = self.system.workers[name]
        self._when(lambda: worker.gone, lambda: self._plan(0.5, self._start_again, name))

    def _start_again(self, name: str) -> None:
        self.system.start_worker(name)
        self._comes_back(name)

    def _judge(self) -> None:
        super()._judge()
        deaths = sum(strike.deadly for strike in self.system.strikes)
        known = max(
            len(each.request_record.progress.crashes) for each in self.system.clients if each.request_record is not None
        )
        # one more if other requests were suspects too, and one that died before the coordinator knew it had the request
        if known > MAX_CRASHES + 1 or deaths > MAX_CRASHES + 2:
            self.system.complain(f"{deaths} workers have died of one request, {known} of them known to have had it")
        for client in self.system.clients:
            ends = "failed: request_quarantined" if client.id == self.poison else "done"
            if client.ends != [ends]:
                self.system.complain(f"request {client.number} ends with {client.ends}, beside a poisonous one")
        self.system.check()


class Disconnected(OneFault):
    """The control connection of a decode worker breaks, then that of a worker to which a stream has moved.

    This also happens in the middle of long steps, during which only heartbeats show that the workers live. No request
    may be quarantined."""

    roles = ("prefill", "prefill", "decode", "decode", "decode")
    requests, tokens, pace = 6, 40, 8.0

    def _faults(self) -> None:
        first = self.system.workers["decode-2"]
        busy_s = self.rng.choice((0.0, 1.5))

        def strike(worker: SimulatedWorker) -> None:
            worker.engine.stuck_s = busy_s
            self._plan(BEGUN_S, self._reset_line, worker)

        self._when(lambda: self._streams(first), lambda: strike(first))
        self._when(self._moved_to, lambda: strike(self._moved_to()[0]))

    def _reset_line(self, worker: SimulatedWorker) -> None:
        self.system.struck(worker.name, COORDINATOR)
        self.system.network.reset(worker.process, self.system.coordinator.process)

    def _moved_to(self) -> list[SimulatedWorker]:
        """Return the decode workers with streams that have migrated there."""
        records = self.system.coordinator.dispatcher.records.values()
        moved = {
            each.progress.decode
            for each in records
            if each.progress.migrations and each.progress.state is State.DECODING
        }
        return [worker for worker in self.system.workers.values() if worker.worker.incarnation in moved]

    def _judge(self) -> None:
        super()._judge()
        for client in self.system.clients:
            if client.ends != ["done"]:
                self.system.complain(f"request {client.number} ends with {client.ends}, though no worker has died")
        self.system.check()


class Forgotten(Disconnected):
    """A device in the network loses every connection to the coordinator: each breaks at its next packet, once or twice.

    No worker has died, so no request may be quarantined."""

    roles = OneFault.roles
    requests, rate, tokens = 8, 6.0, 32

    def _faults(self) -> None:
        for at in sorted(self.rng.uniform(0.1, 1.2) for _ in range(self.rng.choice((1, 2)))):
            for name in self.names:
                self._plan(at + self.rng.uniform(0.0, 0.2), self._reset_line, self.system.workers[name])


class Paused(OneFault):
    """All processes are stopped together, as when a container is paused: once between short steps, or once or twice in
    the middle of long ones.

    Processes that continue first receive nothing from the others for a moment, but must not declare them silent or
    hung."""

    requests, rate = 8, 6.0

    def _build(self) -> None:
        self.pace, self.tokens = self.rng.choice(((2.0, 32), (60.0, 12), (60.0, 12)))
        super()._build()

    def _faults(self) -> None:
        long_steps = self.pace > 2.0
        for at in (0.2, 4.5)[: self.rng.choice((1, 2)) if long_steps else 1]:
            self._plan(self.rng.uniform(at, at + 1.0), self._pause)

    def _pause(self) -> None:
        system, seconds = self.system, self.rng.uniform(2.1, 3.0)
        system.network.count("paused")
        system.struck(COORDINATOR)
        for process in (system.coordinator.process, *(worker.process for worker in system.workers.values())):
            process.stop()
            self._plan(seconds + self.rng.uniform(0.0, 0.1), process.go_on)

    def _judge(self) -> None:
        super()._judge()
        for client in self.system.clients:
            if client.ends != ["done"] or len(client.record.attempts) > 1:
                how = f"{client.ends} after {len(client.record.attempts)} attempts"
                self.system.complain(f"request {client.number} ends with {how}, though all that was stopped went on")
        self.system.check()


class Sick(OneFault):
    """Two of three workers of a role fail every request but stay alive; no request may fail for that."""

    roles = ("prefill", "prefill", "prefill", "decode", "decode", "decode")
    requests, tokens = 12, 10

    def _faults(self) -> None:
        role = self.rng.choice(("prefill", "decode"))
        for name in [name for name in self.names if name.startswith(role)][:2]:
            self.system.workers[name].engine.sick = True
            self.system.network.count("sick")

    def _heal(self) -> None:
        for worker in self.system.workers.values():
            worker.engine.sick = False
        super()._heal()

    def _judge(self) -> None:
        super()._judge()
        for client in self.system.clients:
            if client.ends != ["done"]:
                self.system.complain(
                    f"request {client.number} ends with {client.ends}, though there is a healthy worker"
                )
        attempts = sum(len(client.record.attempts) for client in self.system.clients)
        if attempts > 2 * self.requests:
            self.system.complain(f"{attempts} attempts of {self.requests} requests: sick workers get all that comes")
        self.system.check()


class Careless(OneFault):
    """A single message is lost, and its connection stays."""

    tags: tuple[str, ...] = (
        "prefill", "reserve", "open", "grant", "frame", "ack", "commit", "accept", "prompt_logprobs"
    )  # fmt: skip

    def _client(self, number: int, prompt: list[int], sampling: SamplingParams) -> SimulatedClient:
        return super()._client(number, prompt, replace(sampling, prompt_logprobs=1))

    def _faults(self) -> None:
        tag = self.rng.choice(self.tags)
        self.noticed_s = LOST_S if tag in ("prefill", "reserve") else RESENT_S
        self.system.network.losing = Losing(tag, self.rng.randint(1, 6), self.system.struck)


class Unheard(Careless):
    """A lost message with tokens. Most requests have several choices, one of which ends long before the others on their
    worker; the client may have ended the others already. There are enough slots, so no choice has to wait for one."""

    tags = "tokens", "last tokens"
    constrains = False
    requests, tokens, pace = 3, 125, 8.0

    def _client(self, number: int, prompt: list[int], sampling: SamplingParams) -> SimulatedClient:
        n, stops = self.rng.choice((1, 2, 3)), {}
        if n > 1:
            first, *others = self.rng.sample(range(n), n)
            sampling = replace(sampling, stop_token_ids=(oracle_stream(prompt, sampling.seed, first, 20)[-1],))
            if self.rng.random() < 0.5:
                stops = dict.fromkeys(others, 10)
        return SimulatedClient(self.system, number, prompt, sampling, n, stops)

    def _judge(self) -> None:
        super()._judge()
        limit = self.noticed_s + CALM_STEPS * self.system.slowest_s
        for client in self.system.clients:
            if (gap := max(client.gaps)) > limit:
                self.system.complain(
                    f"request {client.number} waits {gap:.2f} s for the next token of one choice, {limit:.2f} s allowed"
                )
        self.system.check()


class Unaborted(OneFault):
    """Clients leave during long answers, and the aborts are lost: the worker must drop their requests because its lease
    does not list them, within half a second and a step."""

    constrains = False
    requests, tokens, pace = 4, 100, 20.0

    def _faults(self) -> None:
        worker = self.system.workers[self.rng.choice([name for name in self.names if name.startswith("decode")])]

        def leave() -> None:
            self.system.network.losing = Mute(worker.name, "abort")
            held = worker.worker.holdings()
            for client in [client for client in self.system.clients if client.id in {each.request for each in held}]:
                client.leave()
            self._plan(UNLISTED_S + 2 * self.system.slowest_s, look, held)

        def look(held: set[TransferId]) -> None:
            if kept := held & worker.worker.holdings():
                self.system.complain(f"{worker.name}: {kept} are still held though no lease has listed them")

        self._when(lambda: self._streams(worker), leave)


class Misled(OneFault):
    """Two workers of a pool die at once, but one death is detected later, and meanwhile the requests of the other move
    there. A request that arrives at a dead worker did not kill it."""

    roles = ("prefill", "prefill", "decode", "decode", "decode")
    requests, rate, tokens, pace = 8, 60.0, 30, 4.0

    def _faults(self) -> None:
        known, unknown = self.rng.sample([name for name in self.names if name.startswith("decode")], 2)

        def kill() -> None:
            for name, lingers_s in ((known, 0.0), (unknown, DYING_S)):
                self.system.kill_worker(name, 1.0, lingers_s)
                self._plan(1.0, self.system.start_worker, name)

        self._when(lambda: self._streams(self.system.workers[known]), kill)

    def _judge(self) -> None:
        super()._judge()
        for client in self.system.clients:
            if client.ends != ["done"]:
                self.system.complain(
                    f"request {client.number} ends with {client.ends}, though it met one death at most"
                )
        self.system.check()


class Crowded(OneFault):
    """The only prefill worker dies while it has more requests than may be retried at once."""

    roles = ("prefill", "decode", "decode", "decode")
    requests, rate, tokens = 30, 400.0, 10

    def _faults(self) -> None:
        def many() -> bool:
            records = self.system.coordinator.dispatcher.records.values()
            return sum(request_record.progress.state is State.PREFILLING for request_record in records) >= 20

        def kill() -> None:
            self.system.kill_worker(self.names[0], 3.0)
            self._plan(3.0, self.system.start_worker, self.names[0])

        self._when(many, kill)


class Resized(OneFault):
    """Workers die and come back with pools of another size, or accept only shorter requests.

    A request that fits on some worker must be completed, up to the last token if its client has set a limit. One that
    fits on no worker any more must be answered in bounded time."""

    constrains = False
    requests, rate = 7, 5.0
    blocks, prompts = 12, 60
    """Blocks of every worker at first, and the longest prompt in tokens, which a restarted decode worker can hold at
    least."""

    def _build(self) -> None:
        self.roles = self.rng.choice((OneFault.roles, ("prefill", "decode"), ("colocated",) * 2))
        super()._build()
        self.policy = self.rng.choice(("local", "local", "local", "wait", "reject"))
        self.system.no_prefill = self.system.coordinator.router.no_prefill = self.policy

    def _blocks(self, role: str) -> int:
        return self.blocks

    def _client(self, number: int, prompt: list[int], sampling: SamplingParams) -> SimulatedClient:
        prompt = prompt[: self.prompts]
        open_ended = self.rng.random() < 0.5
        most = 16 * self.blocks - len(prompt) if open_ended else self.rng.randint(4, 100)
        n = 1 if open_ended else self.rng.choice((1, 1, 2))
        sampling = replace(sampling, max_tokens=most // n)
        return SimulatedClient(self.system, number, prompt, sampling, n, open_ended=open_ended)

    def _faults(self) -> None:
        self.struck = self.rng.sample(self.names, self.rng.randint(1, len(self.names)))
        for name in self.struck:
            self._plan(self.rng.uniform(0.05, 1.0), self._resize, name)

    def _resize(self, name: str) -> None:
        rng, seconds = self.rng, self.rng.uniform(0.1, 1.0)
        shape = self.system.shapes[name]
        length = rng.choice((4096, rng.randint(self.prompts + 4, 16 * self.blocks)))
        self.system.kill_worker(name, seconds)
        least = 3 if shape.role == "prefill" else 4
        self.system.shapes[name] = shape._replace(blocks=rng.randint(least, self.blocks + 2), length=length)
        self._plan(seconds, self.system.start_worker, name)

    def _judge(self) -> None:
        first = WorkerShape("decode", self.blocks, 16, "")
        shapes = {role: [self.system.shapes[name] for name in self.names if name.startswith(role)] for role in ROLES}
        holders = shapes["decode"] + shapes["colocated"]
        missing = [role for role, names in self._by_role().items() if names and names <= {*self.struck}]
        for client in self.system.clients:
            demand = Demand(len(client.prompt), client.sampling.max_tokens, client.n)
            length, wanted = len(client.prompt) + len(client.output[0]), len(client.prompt) + demand.output
            fits = [all(demand.output <= each.room(demand) for each in some) for some in (holders, [first])]
            somewhere = any(demand.output <= each.room(demand) for each in holders)
            allowed = {"done"}
            if not somewhere and (not client.open_ended or length >= max(each.holds for each in holders)):
                allowed |= {"failed: worker_lost", "failed: context_length_exceeded"}
            if not all(fits):  # the larger workers may have been absent when it arrived
                allowed.add("refused: context_length_exceeded")
            if self.policy != "local" and any(each.holds < wanted for each in shapes["prefill"]):
                allowed |= {
                    "failed: worker_lost",
                    "failed: context_length_exceeded",
                    "refused: context_length_exceeded",
                }
            if len(self.struck) > 1:
                allowed.add("failed: request_quarantined")
            if "prefill" in missing and self.policy == "reject":
                allowed |= {"refused: no_prefill_workers", "failed: no_prefill_workers"}
            if "decode" in missing or "colocated" in missing:
                allowed |= {"refused: no_decode_workers", "failed: no_decode_workers"}  # absent for a while
            if client.ends[0] not in allowed:
                self.system.complain(f"request {client.number} of {wanted} tokens ends with {client.ends} ({shapes})")
            least = min(each.holds for each in [first, *holders])
            if client.ends == ["done"] and length < min(wanted, least):
                self.system.complain(f"request {client.number} gets {length} of {wanted} tokens ({shapes})")
            if client.longest_gap > 2 * LEASE_S + WORKERLESS_WAIT_S + NOTICED_S:
                self.system.complain(f"request {client.number} waits for {client.longest_gap:.1f} s ({shapes})")
        self.system.check()

    def _by_role(self) -> dict[str, set[str]]:
        return {role: {name for name in self.names if name.startswith(role)} for role in ROLES}


class Crammed(OneFault):
    """Decode workers are promised more than they have blocks for, so that sequences are parked in the middle of their
    answers and computed again when there is room."""

    requests, rate, tokens = 11, 200.0, 44
    blocks = 22
    """Blocks of a decode worker: enough for two or three whole answers, but for twice as many prompts."""

    def _build(self) -> None:
        super()._build()
        self.system.horizon = self.system.coordinator.router.horizon = 2

    def _blocks(self, role: str) -> int:
        return self.blocks if role == "decode" else super()._blocks(role)

    def _faults(self) -> None:
        """Inject no faults; the lack of blocks is the subject."""

    def _count_parked(self) -> int:
        """Return the number of sequences that were parked on the current workers."""
        parked = sum(worker.worker.planner.preemptions for worker in self.system.workers.values())
        self.system.network.count("parked", parked)
        return parked

    def _judge(self) -> None:
        if not self._count_parked():
            self.system.complain("no sequence was parked")
        for client in self.system.clients:
            if client.ends != ["done"]:
                self.system.complain(f"request {client.number} ends with {client.ends}, for want of blocks")
        super()._judge()


class CrammedForks(Crammed):
    """As :class:`Crammed`, with several choices per request, some ended early by clients, while workers die, leave or
    lose a connection.

    There are enough other workers and time, so all requests must complete, except those that were on two workers when
    these died, which are quarantined. The common checks judge whether they were there."""

    requests, tokens = 9, 40
    blocks = 22

    def _client(self, number: int, prompt: list[int], sampling: SamplingParams) -> SimulatedClient:
        rng, n = self.rng, self.rng.choice((1, 2, 3))
        stops = {choice: rng.randint(1, self.tokens) for choice in range(n) if rng.random() < 0.4}
        sampling = replace(sampling, logprobs=rng.choice((None, None, 2)))
        return SimulatedClient(self.system, number, prompt, sampling, n, stops)

    def _faults(self) -> None:
        faults = self._kill, self._kill, self._reset, self._drain
        for _ in range(self.rng.choice((1, 2, 3))):
            self._plan(self.rng.uniform(0.1, 1.5), self.rng.choice(faults))

    def _drain(self) -> None:
        """Drain at most one worker at a time: it stays away longer than requests may wait, so others must remain."""
        if not any(each.gone or each.worker.draining_until is not None for each in self.system.workers.values()):
            super()._drain()

    def _judge(self) -> None:
        self._count_parked()
        for client in self.system.clients:
            if client.ends[0] not in ("done", "failed: request_quarantined"):
                self.system.complain(f"request {client.number} ends with {client.ends} though there is room")
        History._judge(self)
