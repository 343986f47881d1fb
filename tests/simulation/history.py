"""A history: a system, requests, faults, and the invariants that must hold at its end."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from common.core.request import SamplingParams
from tests.simulation.grammars import constrained, restricted
from tests.simulation.liveness import COORDINATOR, DYING_S, NOISE_S, NOTICED_S, Patience, Strike, absent, unjustified
from tests.simulation.network import LineProperties
from tests.simulation.system import LONGEST_HOLD_S, Broken, SimulatedClient, SimulatedSystem, SimulatedWorker

PATIENCE_S = 120.0
"""The longest time, in virtual seconds, until all requests have ended; deadlines are shorter."""
QUIET_S = 10.5
"""The longest time from then until nothing is left: the lease (8 s), and its detection."""


class History:
    """One randomly drawn history. ``flavour`` forces a subject:

    any      none
    lonely   the coordinator is away for longer than the lease
    deaf     control messages are lost while clients leave
    torn     a black hole between two workers of a busy system
    """

    def __init__(self, system: SimulatedSystem, rng: Random, flavour: str = "any") -> None:
        self.system, self.rng, self.flavour = system, rng, flavour
        self.names: list[str] = []
        self.noisy: list[frozenset[str]] = []
        """The ends of each line that loses and damages messages."""
        self.noticed_s = NOTICED_S
        self.pending = 0

    def play(self) -> None:
        self._build()
        system = self.system
        self._until(lambda: all(self._joined(name) for name in self.names), 5.0, "workers join")
        self._requests()
        self._faults()
        self._until(lambda: not self.pending and not system.running, PATIENCE_S, "requests end")
        self._heal()
        self._grow_quiet()
        self._judge()
        self._epilogue()
        self._close()

    def _grow_quiet(self) -> None:
        """Check that nothing is left after ``QUIET_S``. One history in six keeps watching for the whole time: nothing
        may come back, and no idle worker may be declared dead."""
        system, watches = self.system, self.rng.random() < 1 / 6
        until = system.clock.now + QUIET_S
        self._pass(NOTICED_S)  # the last fault may have struck just now
        while system.clock.now < until and (watches or system.left_behind() or system.sore()):
            self._pass(min(1.0, until - system.clock.now))
        system.look_at_quiet()

    def _judge(self) -> None:
        """Check that every long wait and every failure has a cause."""
        system = self.system
        patience = self._patience()
        noise = [Strike(ends, 0.0, system.clock.now) for ends in self.noisy]
        for client in system.clients:
            for what in patience.overdue(client.record, system.strikes):
                system.complain(f"request {client.number} {what}")
            how, _, code = client.ends[0].partition(": ")
            failed = how == "failed" and not client.was_refused
            if failed and (why := unjustified(client.record, code, [*system.strikes, *noise])):
                system.complain(f"request {client.number} fails with {code}: {why}")
            for role in ("prefill", "decode"):
                holders = [name for name in self.names if name.startswith(role)]
                away = [*system.strikes, *system.unheard]
                if code == f"no_{role}_workers" and not absent(holders, client.ended_at, away):
                    system.complain(f"request {client.number} finds no {role} worker")
        system.check()

    def _patience(self) -> Patience:
        noise_s = NOISE_S if self.noisy else 0.0
        return Patience(self.system.slowest_s, self._work_s(), self.noticed_s, noise_s)

    def _work_s(self) -> float:
        """Return the seconds that one worker would take for all requests, one token at a time."""
        asked = [client for client in self.system.clients if client.request_record is not None]
        steps = sum(len(client.prompt) // 32 + client.sampling.max_tokens for client in asked)
        return steps * self.system.slowest_s

    def _epilogue(self) -> None:
        """Check that nothing stays broken after the faults: one more request is served, by both pools if there are
        two."""
        for name in self.names:
            self.system.start_worker(name)
        self._until(lambda: all(self._joined(name) for name in self.names), 5.0, "workers are back")
        client = SimulatedClient(self.system, 999, [7] * 40, SamplingParams(3, 1), 1)
        self.system.clients.append(client)
        self._send(client, "")
        seconds = 3.0 + 10 * self.system.slowest_s
        self._until(lambda: not self.system.running, seconds, "the last request is served")
        if client.ends != ["done"]:
            raise Broken(f"after all faults a request ends with {client.ends}")
        assert client.request_record is not None
        if client.request_record.path not in ("disagg", "colocated"):
            raise Broken(f"after all faults a request takes the path {client.request_record.path}")
        self._pass(1.0)
        self.system.look_at_quiet()

    # -- what there is ------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        rng = self.rng
        roles: list[Any] = ["prefill"] * rng.randint(1, 3) + ["decode"] * rng.randint(1, 3)
        if rng.random() < 0.1:
            roles = ["colocated"] * rng.randint(1, 3)
        elif rng.random() < 0.1:
            roles.append("colocated")
        tight = rng.random() < 0.3
        for number, role in enumerate(roles):
            name = f"{role}-{number}"
            self.names.append(name)
            blocks = rng.randint(14, 24) if tight else rng.randint(40, 120)
            self.system.add_worker(name, role, blocks, rng.choice((16, 16, 32)), rng.choice(("a", "b")))

    def _joined(self, name: str) -> bool:
        worker = self.system.coordinator.registry.get(self.system.workers[name].worker.incarnation)
        return worker is not None and worker.ready

    def _requests(self) -> None:
        rng, system = self.rng, self.system
        shared = rng.choices(range(1000), k=48)
        at, impatient, leaving = 0.0, rng.choice((0, 0, 0, 0.3)), rng.choice((0.1, 0.1, 0.5))
        if self.flavour == "deaf":
            leaving = 0.7
        for number in range(1, 20 if self.flavour == "torn" else rng.randint(4, 14)):
            at += rng.expovariate(rng.choice((5.0, 50.0)))
            prompt = rng.choices(range(1000), k=rng.choice((1, rng.randint(2, 40), rng.randint(20, 110))))
            if rng.random() < 0.3:
                prompt = shared[: rng.randint(16, 48)] + prompt
            n = rng.choice((1, 1, 1, 1, 2, 3))
            most = rng.choice((1, rng.randint(2, 12), rng.randint(5, 40 if system.pace < 100 else 12)))
            if self.flavour in ("lonely", "deaf"):
                most = 40
            seed, logprobs = rng.randrange(1 << 32), rng.choice((None, None, 0))
            scores = seed % 4 == 0  # of these, one in three asks for no output
            sampling = SamplingParams(
                0 if seed % 12 == 0 else most, seed, logprobs=logprobs, prompt_logprobs=seed % 3 if scores else None
            )
            if system.constrains:
                sampling = restricted(constrained(sampling))
            stops = {c: rng.randint(1, most) for c in range(n) if rng.random() < 0.15}
            priority = rng.choice((-1, 0, 0, 1)) if system.ranked else 0
            client = SimulatedClient(system, number, prompt, sampling, n, stops, priority)
            system.clients.append(client)
            timeout_s = rng.uniform(0.01, 1.0) if rng.random() < impatient else 60.0
            self._plan(at, self._send, client, rng.choice(("", "", "salt")), timeout_s)
            if rng.random() < leaving:
                self._plan(at + rng.expovariate(8.0), client.leave)

    def _send(self, client: SimulatedClient, salt: str, timeout_s: float = 60.0) -> None:
        self.system.running += 1
        client.send(timeout_s, salt)

    def _plan(self, at: float, action: Any, *arguments: Any) -> None:
        """Schedule ``action`` in ``at`` seconds; the history does not end before it."""
        self.pending += 1

        def then() -> None:
            self.pending -= 1
            action(*arguments)

        self.system.clock.after(at, then)

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    def _faults(self) -> None:
        rng = self.rng
        self._distances()
        if self.flavour in ("lonely", "deaf") or rng.random() < 0.05:
            for worker in self.system.workers.values():
                worker.engine.slowness = max(60.0, self.system.pace)
        if self.flavour == "lonely":
            self._plan(rng.uniform(0.1, 1.0), self._restart, LONGEST_HOLD_S + 0.5)
        if self.flavour == "torn" and len(self.names) > 1:
            roles = ("prefill", "decode")
            pairs = [name for name in (self._some(role) for role in roles) if name]
            one, other = pairs if len(pairs) == 2 else rng.sample(self.names, 2)
            ends = self.system.workers[one].process, self.system.workers[other].process
            self._plan(0.1, self._cut_for, ends, rng.uniform(4.0, 8.0))
        if self.flavour == "deaf" or rng.random() < 0.5:
            self._noise()
        faults = (
            self._kill,
            self._kill,
            self._kill_pool,
            self._stop,
            self._cut,
            self._cut,
            self._reset,
            self._slow,
            self._drain,
            self._restart,
            self._stall,
            self._hang,
        )
        for _ in range(rng.choice((0, 1, 1, 2, 3, 4))):
            self._plan(rng.uniform(0.0, 2.5), rng.choice(faults))

    def _some(self, role: str) -> str | None:
        names = [name for name in self.names if name.startswith(role)]
        return self.rng.choice(names) if names else None

    def _distances(self) -> None:
        """Draw the network delay between all processes: as on one machine, in one data center, or across a country."""
        processes = [self.system.coordinator.process, *(worker.process for worker in self.system.workers.values())]
        delay_s = self.rng.choice((0.0003, 0.0003, 0.005, 0.04))
        for one in processes:
            for other in processes:
                if one is not other:
                    self.system.network.line(one, other).delay_s = delay_s

    def _noise(self) -> None:
        """Make lines between workers drop, duplicate, reorder, corrupt and truncate messages; lines to the coordinator
        may drop some."""
        rng = self.rng
        if self.flavour == "deaf" or rng.random() < 0.3:
            for name in self.names:
                line = self.system.network.line(self.system.workers[name].process, self.system.coordinator.process)
                line.rates.drop = 0.1 if self.flavour == "deaf" else rng.choice((0, 0.01, 0.04))
                self.system.lossy.add(name)
                self.noisy.append(frozenset((name, COORDINATOR)))
        for one in self.names:
            for other in self.names:
                if one < other and rng.random() < 0.7:
                    rates = self._line(one, other).rates
                    self.noisy.append(frozenset((one, other)))
                    rates.drop, rates.duplicate = rng.choice((0, 0.02, 0.1)), rng.choice((0, 0.02, 0.1))
                    rates.reorder, rates.corrupt = rng.choice((0, 0.02, 0.2)), rng.choice((0, 0.02, 0.1))
                    rates.truncate = rng.choice((0, 0.02))

    def _line(self, one: str, other: str) -> LineProperties:
        return self.system.network.line(self.system.workers[one].process, self.system.workers[other].process)

    def _kill(self) -> None:
        self._kill_all([self.rng.choice(self.names)])

    def _kill_pool(self) -> None:
        """Kill all workers of a role at once, as when their host dies; their deaths are detected one after another."""
        role, _, _ = self.rng.choice(self.names).partition("-")
        self._kill_all([name for name in self.names if name.startswith(role)])

    def _kill_all(self, names: Sequence[str]) -> None:
        for name in names:
            seconds = self.rng.uniform(0.1, 3.0)
            lingers_s = self.rng.choice((0.0, self.rng.uniform(0.0, min(seconds, DYING_S))))
            self.system.kill_worker(name, seconds, lingers_s)
            self._plan(seconds, self.system.start_worker, name)

    def _stop(self) -> None:
        process = self.system.workers[self.rng.choice(self.names)].process
        self.system.suspects.add(process.name)
        self.system.network.count("stopped")
        process.stop()
        seconds = self.rng.uniform(0.1, 6.0)
        self.system.struck(process.name, seconds=seconds)
        self._plan(seconds, process.go_on)

    def _hang(self) -> None:
        worker = self.system.workers[self.rng.choice(self.names)]
        if not worker.gone:
            self.system.suspects.add(worker.name)
            worker.engine.stuck_s = self.rng.uniform(0.1, 6.0)
            self._plan(1.0, setattr, worker.engine, "stuck_s", 0.0)  # an idle worker has no step to hang in

    def _stall(self) -> None:
        process = self.system.coordinator.process
        self.system.network.count("coordinator stalled")
        self.system.stalled = True
        process.stop()
        seconds = self.rng.uniform(0.1, 3.0)
        self.system.struck(process.name, seconds=seconds)
        self._plan(seconds, process.go_on)

    def _ends(self) -> tuple[Any, Any]:
        rng, workers = self.rng, self.system.workers
        one = workers[rng.choice(self.names)].process
        if rng.random() < 0.4 or len(self.names) == 1:
            return one, self.system.coordinator.process
        return one, workers[rng.choice([name for name in self.names if name != one.name])].process

    def _cut(self) -> None:
        self._cut_for(self._ends(), self.rng.uniform(0.1, 6.0))

    def _cut_for(self, ends: tuple[Any, Any], seconds: float) -> None:
        self.system.suspects |= {end.name for end in ends}
        self.system.struck(*(end.name for end in ends), seconds=seconds)
        self.system.network.cut(*ends)
        self._plan(seconds, self.system.network.heal, *ends)

    def _reset(self) -> None:
        ends = self._ends()
        self.system.struck(*(end.name for end in ends))
        self.system.network.reset(*ends)

    def _slow(self) -> None:
        engine = self.system.workers[self.rng.choice(self.names)].engine
        self.system.network.count("slowed")
        engine.slowness = self.rng.choice((10.0, 100.0))
        self._plan(self.rng.uniform(0.1, 3.0), setattr, engine, "slowness", self.system.pace)

    def _drain(self) -> None:
        worker = self.system.workers[name := self.rng.choice(self.names)]
        if not worker.gone:
            self.system.network.count("drained")
            self.system.struck(name, seconds=6.0)
            worker.process.run(worker.worker.drain, self.rng.uniform(0.0, 3.0))
            self._plan(self.rng.uniform(3.5, 6.0), self._start_again, worker)

    def _start_again(self, worker: SimulatedWorker) -> None:
        """Start the worker again once it has left; one that was stopped meanwhile leaves later."""
        if worker.gone:
            self.system.start_worker(worker.name)
        else:
            self.system.struck(worker.name, seconds=0.5)
            self._plan(0.5, self._start_again, worker)

    def _restart(self, pause_s: float = 0.5) -> None:
        if self.system.coordinator.process.alive:
            self.system.struck(COORDINATOR, seconds=pause_s)
            self.system.kill_coordinator()
            self._plan(pause_s, self.system.start_coordinator, pause_s)

    def _heal(self) -> None:
        for line in self.system.network.lines():
            line.rates.__init__()  # type: ignore[misc]

    # -- time ---------------------------------------------------------------------------------------------------------

    def _until(self, done: Any, seconds: float, what: str) -> None:
        clock = self.system.clock
        limit = clock.now + seconds
        while not done():
            if clock.now > limit:
                states = {
                    c.number: (c.request_record and c.request_record.progress.state)
                    for c in self.system.clients
                    if not c.over
                }
                raise Broken(f"after {seconds:g} s of waiting: {what}; running {states}")
            self.system.step()

    def _pass(self, seconds: float) -> None:
        until = self.system.clock.now + seconds
        self.system.clock.at(until, lambda: None)
        while self.system.clock.now < until:
            self.system.step()

    def _close(self) -> None:
        for worker in self.system.workers.values():
            if not worker.gone:
                worker.unmap()
