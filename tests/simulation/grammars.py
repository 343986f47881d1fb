"""Constraints of outputs in histories: which requests have them, and token masks on virtual time.

The real code computes masks in threads and judges their CPU time. Here they are there at once, or late, and cost what
a history's random numbers say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from msgspec.structs import replace

from common.core.ids import pack_tokens
from common.core.request import SamplingParams
from common.grammar import masks
from common.grammar.compiled import CompiledGrammars
from common.grammar.masks import Grammars
from common.grammar.memory import GrammarMemory
from tests.fakes.checkpoint import EOS
from tests.fakes.constrained import Stream, constrained_stream
from tests.fakes.constraints import LONG, SHORT, Constraint, vocabulary
from tests.fakes.oracle import VOCABULARY, oracle_stream
from tests.simulation.clock import SimulatedProcess, VirtualClock

ONE_IN = 4
"""Number of histories of which one has constrained outputs. Most requests of that one are plain."""
SLOW_S, SLOW = 0.0007, 1 / 32
"""CPU seconds from one look at the time to the next in a slow job, and the share of slow ones: their masks make their
sequences suspects, but are no strikes."""
LATE, DELAYS_S = (0, 0.05, 0.3), (0.001, 0.01, 0.1)
"""Shares of late masks, of which each history has one, and how late a mask may be, in seconds."""
_BY_GRAMMAR = {each.grammar: each for each in (*SHORT, *LONG)}


def constraint_of(sampling: SamplingParams) -> Constraint | None:
    """Return the constraint whose grammar ``sampling`` has."""
    return _BY_GRAMMAR.get(sampling.grammar)


def constrained(sampling: SamplingParams, constraints: tuple[Constraint, ...] = SHORT) -> SamplingParams:
    """Return ``sampling`` with one of ``constraints`` for two requests in five. Its seed decides."""
    number = sampling.seed // 97
    if number % 5 > 1:
        return sampling
    return replace(sampling, grammar=constraints[number // 5 % len(constraints)].grammar, eos_token_ids=(EOS,))


def restricted(sampling: SamplingParams) -> SamplingParams:
    """Return ``sampling`` with bad words for one request in three, and with allowed ids: four, or most of those that a
    grammar needs, so that some cannot be obeyed. Its seed decides."""
    number = sampling.seed // 89
    if number % 3:
        return sampling
    rng = Random(sampling.seed)
    few = not sampling.grammar
    ids = rng.sample(range(VOCABULARY), 4) if few else [EOS, *(each for each in range(300) if rng.random() < 0.8)]
    one, other, *_ = ids
    words = (one, other), (other, one, one), (other, other)
    if not few:
        return replace(sampling, allowed_token_ids=pack_tokens(ids), bad_words=((rng.choice(ids),),))
    stops = tuple(ids[3:]) if rng.random() < 0.5 else ()
    return replace(sampling, allowed_token_ids=pack_tokens(ids), bad_words=words, stop_token_ids=stops)


def expected(prompt: list[int], sampling: SamplingParams, choice: int) -> Stream:
    """Return the whole output of a choice."""
    if sampling.grammar or sampling.restricts:
        return constrained_stream(prompt, sampling, choice, vocabulary())
    stream = oracle_stream(prompt, sampling.seed, choice, sampling.max_tokens)
    ends = (at + 1 for at, token in enumerate(stream) if token in sampling.ending_token_ids)
    return Stream(stream[: next(ends, None)], refused=False)


class MaskTimes:
    """What masks cost in one history on virtual time, and which are late: drawn from ``rng``. ``compiled`` serves all
    workers of the history."""

    def __init__(self, rng: Random, clock: VirtualClock) -> None:
        self._rng, self._clock = rng, clock
        self._late = rng.choice(LATE)
        self._spent_s = self._call_s = 0.0
        self.compiled = CompiledGrammars(Path(), VOCABULARY, (EOS,), Threads(lambda job: job.run()))
        self.compiled.memory = UncountedMemory()
        self.compiled._tokenizer = vocabulary()

    def begin(self, process: SimulatedProcess, job: Job) -> None:
        """Run a job of ``process`` at once, or later if it is late."""
        call_s = SLOW_S if self._rng.random() < SLOW else 0.0
        if self._rng.random() >= self._late:
            self._run(job, call_s)
        else:
            self._clock.after(self._rng.choice(DELAYS_S), process.run, self._run, job, call_s)

    def _run(self, job: Job, call_s: float) -> None:
        self._call_s = call_s
        job.run()
        self._call_s = 0.0

    def thread_time(self) -> float:
        self._spent_s += self._call_s
        return self._spent_s

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Let masks take these times in the block. A step does not wait for what is late."""
        times = {"thread_time": self.thread_time, "perf_counter": lambda: self._clock.now, "wait": lambda *_: None}
        with mock.patch.multiple(masks, **times):
            yield


class UncountedMemory(GrammarMemory):
    """Counts nothing, as that is the work of a thread."""

    def add(self, size: int) -> None: ...

    def free(self, size: int) -> None: ...


class SimulatedGrammars(Grammars):
    """The grammars of a simulated worker."""

    def __init__(self, times: MaskTimes, process: SimulatedProcess) -> None:
        super().__init__(Path(), VOCABULARY, (EOS,))
        self._compiled = times.compiled
        self._threads = self._suspect_threads = self._last_threads = Threads(partial(times.begin, process))


class Threads(Executor):
    """Gives each job to ``begin``, which runs it now or later."""

    def __init__(self, begin: Callable[[Job], object]) -> None:
        self._begin = begin

    def submit(self, run: Callable[..., Any], /, *arguments: Any, **_: Any) -> Future[Any]:
        job = Job(partial(run, *arguments))
        self._begin(job)
        return job


class Job(Future[Any]):
    """Work of a thread."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        super().__init__()
        self._compute = compute

    def run(self) -> None:
        try:
            self.set_result(self._compute())
        except Exception as error:
            self.set_exception(error)
