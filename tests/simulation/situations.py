"""Histories that are about one fault each, which two pools of two can take: whatever it hits has somewhere else to go.

Their clocks start when the fault does, so that each watchdog, timer and lease has a history that is late without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from common.core.ids import TransferId
from common.core.request import SamplingParams
from common.core.sequence import Batch
from common.net.messages import Role
from coordinator.requests.dispatcher import WORKERLESS_WAIT_S
from coordinator.requests.state import MAX_CRASHES, State
from coordinator.routing.router import FAILED_PAIRS, Demand
from tests.fakes.oracle import oracle_stream
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
from tests.simulation.system import Poisoned, Shape, SimulatedClient, SimulatedWorker

ROLES: tuple[Role, ...] = ("prefill", "decode", "colocated")
LONG_S = 12.0
"""A fault that nobody must wait for."""
UNLISTED_S = 0.6
"""Leases come twice a second, and take their way."""
LOOK_S = 0.003
BEGUN_S = 0.05
"""Later than any step that is asked to be long has begun."""


class OneFault(History):
    """Roomy pools, requests that nobody hangs up on, ``tokens`` of output each."""

    roles = ("prefill", "prefill", "decode", "decode")
    requests, rate, tokens = 7, 20.0, 24
    pace = 2.0

    def _build(self) -> None:
        self.system.coordinator.router.local_prefill, self.system.pace = "never", self.pace
        together = self.rng.random() < 0.5  # on one host KV is pulled
        for number, role in enumerate(self.roles):
            name = f"{role}-{number}"
            self.names.append(name)
            self.system.add_worker(name, role, self._blocks(role), 16, "a" if together else name)

    def _blocks(self, role: str) -> int:
        return 200

    def _work_s(self) -> float:
        """Chunks of all prompts, and as many steps as an answer has tokens: pools work side by side."""
        return (4 * self.requests + self.tokens) * self.system.slowest_s

    def _requests(self) -> None:
        rng, at = self.rng, 0.0
        for number in range(1, self.requests + 1):
            at += rng.expovariate(self.rate)
            prompt = rng.choices(range(1000), k=rng.randint(20, 90))
            sampling = SamplingParams(self.tokens, rng.randrange(1 << 32))
            client = self._client(number, prompt, sampling)
            self.system.clients.append(client)
            self._plan(at, self._send, client, "")

    def _client(self, number: int, prompt: list[int], sampling: SamplingParams) -> SimulatedClient:
        return SimulatedClient(self.system, number, prompt, sampling, 1)

    def _when(self, ready: Callable[[], object], action: Callable[[], None]) -> None:
        """At the first moment at which it is so, if there is one before the requests have ended."""
        if ready():
            action()
        elif self.system.running or any(not client.over for client in self.system.clients):
            self._plan(LOOK_S, self._when, ready, action)

    def _victim(self) -> SimulatedWorker:
        worker = self.system.workers[self.rng.choice(self.names)]
        self.system.suspects.add(worker.name)
        return worker

    def _busy(self, worker: SimulatedWorker) -> bool:
        """Whether it has a client's request."""
        ours = {client.id for client in self.system.clients}
        return any(transfer.request in ours for transfer in worker.worker.holdings())

    def _streams(self, worker: SimulatedWorker) -> bool:
        records = self.system.coordinator.dispatcher.records.values()
        lives = [ticket.life for ticket in records if ticket.life.decode == worker.worker.incarnation]
        return any(life.state is State.DECODING for life in lives)

    def _lasts(self) -> None:
        """The history goes on until the fault is over."""
        self._plan(LONG_S + 1.0, lambda: None)


class Hung(OneFault):
    """A step does not end; the heart beats."""

    def _faults(self) -> None:
        victim = self._victim()

        def hang() -> None:
            victim.engine.stuck_s = LONG_S
            self._lasts()

        self._when(lambda: victim.engine.steps >= 3 and self._busy(victim), hang)


class Jammed(OneFault):
    """A turn of a loop does not end, outside of any step; the heart beats."""

    def _faults(self) -> None:
        victim = self._victim()

        def jam() -> None:
            victim.jam(LONG_S)
            self._lasts()

        self._when(lambda: self._busy(victim), jam)


class Muted(OneFault):
    """The tokens of a decode worker do not arrive; what its heart tells does, and that it has the streams."""

    roles = ("prefill", "decode", "decode")
    requests, tokens, pace = 4, 125, 8.0  # as of a stream that is over the heart tells no more, which is noticed, too

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
    """One of a worker's two connections to the coordinator carries nothing any more, in one direction or in both, and
    does not break: its heart beats over the other, or is what is not heard. Whatever the worker was doing moves on, and
    it dials anew."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.noticed_s = LEASE_ANSWERED_S + RESENT_S

    def _build(self) -> None:
        self.roles = self.rng.choice((OneFault.roles, ("colocated",) * 3))
        super()._build()

    def _faults(self) -> None:
        victim = self._victim()
        deaf, mute = self.rng.choice(((True, False), (False, True), (True, True)))
        beats = mute and self.rng.random() < 0.3  # a heart that is deaf is told nothing that it needs

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
    """A sender finds its link dead, and what it says about it is lost: only the receiver's lease ends the hand-off."""

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
    """Announcements and grants pass, frames never do: each request ends by a prompt that decode computes itself."""

    requests = 5

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.noticed_s = FAILED_PAIRS * NOTICED_S

    def _faults(self) -> None:
        self.system.network.losing = Frameless()
        for attempt in range(FAILED_PAIRS + 1):  # each of which it is there to strike
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
    """One request ends whoever computes it beyond some position; workers come back. It alone must fail, before many
    have died of it."""

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
        known = max(len(each.ticket.life.crashes) for each in self.system.clients if each.ticket is not None)
        # one more where it had company, and one of whom nobody had heard yet that the request had come there
        if known > MAX_CRASHES + 1 or deaths > MAX_CRASHES + 2:
            self.system.complain(f"{deaths} workers have died of one request, {known} of them known to have had it")
        for client in self.system.clients:
            ends = "failed: request_quarantined" if client.id == self.poison else "done"
            if client.ends != [ends]:
                self.system.complain(f"request {client.number} ends with {client.ends}, beside a poisonous one")
        self.system.check()


class Disconnected(OneFault):
    """The control connection of a decode worker breaks, then that of one to which a stream has moved; also in the
    middle of long steps, in which only their hearts can tell that nobody has died. Nobody is blamed."""

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
        """Decode workers on which streams go on that began elsewhere."""
        records = self.system.coordinator.dispatcher.records.values()
        moved = {each.life.decode for each in records if each.life.migrations and each.life.state is State.DECODING}
        return [worker for worker in self.system.workers.values() if worker.worker.incarnation in moved]

    def _judge(self) -> None:
        super()._judge()
        for client in self.system.clients:
            if client.ends != ["done"]:
                self.system.complain(f"request {client.number} ends with {client.ends}, though nobody has died")
        self.system.check()


class Forgotten(Disconnected):
    """Something between forgets every connection to the coordinator: each breaks at its next packet, once or twice.
    Nobody has died, so nobody is refused, either."""

    roles = OneFault.roles
    requests, rate, tokens = 8, 6.0, 32

    def _faults(self) -> None:
        for at in sorted(self.rng.uniform(0.1, 1.2) for _ in range(self.rng.choice((1, 2)))):
            for name in self.names:
                self._plan(at + self.rng.uniform(0.0, 0.2), self._reset_line, self.system.workers[name])


class Paused(OneFault):
    """Everything is stopped together, as a container that is paused: once between short steps, once or twice in the
    middle of long ones. Those that go on first hear nothing of the others for a moment, but nobody is silent and nobody
    hangs."""

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
    """Two of three workers of a role fail whatever they are given, and live: that costs no request its life."""

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
    """One message is lost, and the connection stays."""

    tags: tuple[str, ...] = ("prefill", "reserve", "open", "grant", "frame", "ack", "commit", "accept")

    def _faults(self) -> None:
        tag = self.rng.choice(self.tags)
        self.noticed_s = LOST_S if tag in ("prefill", "reserve") else RESENT_S
        self.system.network.losing = Losing(tag, self.rng.randint(1, 6), self.system.struck)


class Unheard(Careless):
    """It had tokens that the coordinator has not. Most requests have choices of which one ends long before the others,
    as their worker sees it: their client may have ended those. There is a slot for each, so none of them ever waits."""

    tags = "tokens", "last tokens"
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
    """Clients leave in the middle of long answers, and what tells the worker so never arrives: only its lease does, by
    not listing them, within half a second and a step."""

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
    """Two workers of a pool die at once, but of one of them it is known later: meanwhile it is sent what the other had.
    Who comes to a worker that has died already did not kill it."""

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
    """The only prefill worker dies while it has more requests than may be tried again at once."""

    roles = ("prefill", "decode", "decode", "decode")
    requests, rate, tokens = 30, 400.0, 10

    def _faults(self) -> None:
        def many() -> bool:
            records = self.system.coordinator.dispatcher.records.values()
            return sum(ticket.life.state is State.PREFILLING for ticket in records) >= 20

        def kill() -> None:
            self.system.kill_worker(self.names[0], 3.0)
            self._plan(3.0, self.system.start_worker, self.names[0])

        self._when(many, kill)


class Resized(OneFault):
    """Workers die and come back with other pools, or take only shorter requests. What some worker holds is done, to the
    last token if its client has set a limit; who fits nobody any more is told so, in bounded time."""

    requests, rate = 7, 5.0
    blocks, prompts = 12, 60
    """Of every worker at first, and the longest prompt: whoever comes back and decodes holds that at least."""

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
        first = Shape("decode", self.blocks, 16, "")
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
            if not all(fits):  # the larger ones were not there when it came
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
                allowed |= {"refused: no_decode_workers", "failed: no_decode_workers"}  # for a while there was none
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
    """Decode workers promise more than they have blocks for: sequences are parked in the middle of their answers, and
    computed again when there is room."""

    requests, rate, tokens = 11, 200.0, 44
    blocks = 22
    """Of one decode worker: for two or three whole answers, but for twice as many prompts."""

    def _build(self) -> None:
        super()._build()
        self.system.horizon = self.system.coordinator.router.horizon = 2

    def _blocks(self, role: str) -> int:
        return self.blocks if role == "decode" else super()._blocks(role)

    def _faults(self) -> None:
        """None but the lack of room."""

    def _count_parked(self) -> int:
        """Sequences that were parked on workers that are still there."""
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
    """Of requests with several choices, some of which their clients end, while workers die, leave or lose a line. There
    are other workers and time enough, so all are done, but those that were on two workers when these died: they are
    refused, as poison would be. Whether they were there is for the judge of all histories."""

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
        """One at a time: who has left stays away for longer than anybody may wait for it, so others must be there."""
        if not any(each.gone or each.worker.draining_until is not None for each in self.system.workers.values()):
            super()._drain()

    def _judge(self) -> None:
        self._count_parked()
        for client in self.system.clients:
            if client.ends[0] not in ("done", "failed: request_quarantined"):
                self.system.complain(f"request {client.number} ends with {client.ends} though there is room")
        History._judge(self)
