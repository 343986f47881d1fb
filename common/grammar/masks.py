"""Token masks for the rows of a step, computed in threads while the model's kernels run.

    engine    begin ──► forward ──► finish ──► sample with the masks
    threads     └──► masks ──────────┘

A hostile grammar must not slow down the streams beside it. So a sequence is a *suspect* until it has got a mask within
:data:`common.grammar.limits.SUSPECT_S`, and *costly* if the masks of its request have cost more than
:data:`common.grammar.limits.COSTLY_S`. A step waits for the masks of the others, at most WAIT_S. Suspects have threads
of low priority, costly sequences one that runs only where a core is idle; a step waits for them only if it has nothing
else to sample. A row without a mask is late: its last token is computed again in a later step. A worker leaves its
sequence out of its steps until the mask is there (:meth:`Grammars.held`), so that nothing waits for it. It gets the
same token as without that, since forced tokens and masks depend on the output alone.

llguidance computes without the interpreter lock. Its own thread pool is not used: it does not say how long each mask
took.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, thread_time
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from common.core.ids import TransferId
from common.core.sequence import Batch, Refusal, StepResult, certain
from common.core.sequence import Sequence as Tokens
from common.grammar.compiled import CompiledGrammar, CompiledGrammars
from common.grammar.errors import BROKEN, TOO_COMPLEX, UNKNOWN, GrammarError
from common.grammar.limits import GIVE_UP_S, SUSPECT_S, Budget, Cost, Pace, Spending
from common.grammar.matcher import Mask, Matcher
from common.grammar.memory import estimate

WAIT_S = 0.002
"""Seconds that a step with other rows waits for masks once its logits are computed."""
CHUNK = 16
"""Least masks that are worth another thread."""
LIVE_BYTES = 1 << 30
"""Estimated bytes of compiled grammars from which on those that have grown fail their requests."""
_THREADS, _SUSPECT_THREADS, _NICE, _LAST_NICE = 4, 2, 10, 19
_TOO_SLOW = Refusal(TOO_COMPLEX, "the grammar is too complex: its token masks take too long")
_TOO_LARGE = Refusal(TOO_COMPLEX, "the grammar is too complex: its token masks take too much memory")


class OutputTokens(NamedTuple):
    """An output of ``length`` tokens, which begins in ``tokens`` at ``start``. Outputs are long and looked at for every
    token, so they are not copied; what comes behind may grow meanwhile."""

    tokens: list[int]
    start: int
    length: int

    @classmethod
    def of(cls, sequence: Tokens) -> OutputTokens:
        """Return the output of ``sequence`` as it is now."""
        return cls(sequence.tokens, sequence.prompt_length, sequence.output_length)

    def since(self, length: int) -> list[int]:
        """Return the tokens behind the first ``length``."""
        return self.tokens[self.start + length : self.start + self.length]


class SequenceGrammar:
    """The grammar of one sequence on this worker (``Sequence.matcher``). While ``busy``, only the thread that computes
    the mask may touch the matcher."""

    def __init__(self, compiled: CompiledGrammars, sequence: Tokens, budget: Budget | None = None) -> None:
        self._grammars, self._sampling = compiled, sequence.request.sampling
        self.compiled: Future[CompiledGrammar] | None = compiled.request(self._sampling.grammar)
        self._known: CompiledGrammar | None = None
        self._matcher: Matcher | None = None
        self._paid = 0
        """Length of the output that the request's budget has been raised for."""
        self.mask: Mask = np.zeros((compiled.vocab_size + 31) // 32, np.int32)
        self.mask_at = -1
        """Length of the output after which ``mask`` is right."""
        self.certain = False
        """Whether the only token in ``mask`` is forced."""
        self.suspect = True
        self.refusal: Refusal | None = None
        self.busy = False
        self.began_at = 0.0
        self.job: Future[None] | None = None
        """What computes the mask, perhaps with those of others."""
        self._spending = Spending(budget=budget)

    @property
    def costly(self) -> bool:
        """Whether the masks of its request have cost so much that they must take no time from others."""
        return self._spending.budget.costly

    @property
    def aside(self) -> bool:
        """Whether no step with other rows waits for its masks."""
        return self.suspect or self.costly

    def compute(self, output: OutputTokens) -> None:
        """Compute the mask after ``output``, and judge whether this took too long. Runs in a thread."""
        try:
            try:
                self._fill(output)
            except GrammarError:
                if self._matcher is None:  # there is none
                    raise
                self._fill(output, alone=True)
        except GrammarError as error:
            self.refusal = error.refusal
        except TimeoutError:
            self.refusal = _TOO_SLOW
        finally:
            if self.refusal is None and self.mask_at != output.length:
                self.refusal = BROKEN
            if self.refusal is not None:
                self._known = self._matcher = self.compiled = None
            self.busy = False

    def _fill(self, output: OutputTokens, *, alone: bool = False) -> None:
        """Compute the mask. ``alone``: by a matcher that has done nothing else and shares nothing with others. What
        fails on that one fails wherever the output is computed; on another one, the masks before may have used up the
        states of its lexer, also those of other sequences, and it then fails in one way or another."""
        began = thread_time()
        if self._matcher is None or alone:
            grammar, self._matcher = self._sampling.grammar, None
            assert self.compiled is not None
            self._known = self._grammars.alone(grammar) if alone else self.compiled.result(GIVE_UP_S)
            self._matcher = Matcher(self._known, self._sampling, self._grammars.vocab_size)
        matcher, started = self._matcher, thread_time()
        new = output.since(matcher.length)
        matcher.follow(new)
        followed = thread_time()
        self.certain = matcher.fill(self.mask)
        ended = thread_time()
        self._judge(ended - started, followed - started, len(new), output.length, started - began)
        self.mask_at = matcher.length

    def force(self, output: OutputTokens) -> list[int]:
        """Return the tokens that are forced after ``output``; none if no step waits for its masks: then the next mask
        has the first."""
        if self.aside or self.busy or self._matcher is None:
            return []
        started = thread_time()
        try:
            self._matcher.follow(output.since(self._matcher.length))
            forced = self._matcher.force()
        except GrammarError:  # the next mask finds it again, and says why
            self.suspect, self._matcher = True, None
            return []
        spent, run = thread_time() - started, 1 + len(forced)
        self._judge(spent, spent, run, output.length + len(forced))
        return forced

    def _judge(self, cpu_s: float, following_s: float, followed: int, length: int, compiling_s: float = 0.0) -> None:
        """Count a mask of ``cpu_s`` CPU seconds, of which ``following_s`` for ``followed`` tokens. ``length``: that of
        the output. ``compiling_s``: what compiling the grammar for it cost."""
        self.suspect = cpu_s >= SUSPECT_S
        new, self._paid = max(0, length - self._paid), max(length, self._paid)
        known = self._known
        if known is not None and (size := estimate(cpu_s)):
            known.grow(size)
            if known.has_grown:
                self._grammars.forget(self._sampling.grammar, known)
                if self._grammars.memory.bytes > LIVE_BYTES:
                    self.refusal = _TOO_LARGE
        if self._spending.exceeded(Cost(cpu_s, following_s, followed, new, compiling_s)):
            self.refusal = _TOO_SLOW


@dataclass(slots=True)
class StepMasks:
    """The masks of one step. ``rows``: the index of each segment, the length of its output, and its grammar;
    ``others``: whether the step samples rows that need no mask. ``began_at``: when the step began, to note its duration
    in ``pace``. ``wait_s``, ``on_mask``: those of :class:`Grammars`. :meth:`finish` sets the rest, by index."""

    rows: list[tuple[int, int, SequenceGrammar]]
    others: bool
    pace: Pace = field(default_factory=Pace)
    began_at: float = 0.0
    wait_s: float = GIVE_UP_S
    on_mask: Callable[[], None] | None = None
    ready: dict[int, SequenceGrammar] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    refusals: dict[int, Refusal] = field(default_factory=dict)

    def finish(self) -> None:
        """Wait for the masks that the step waits for, and sort its rows."""
        self.pace.note(perf_counter() - self.began_at)
        known = [grammar for _, _, grammar in self.rows if not grammar.aside]
        if known or self.others:
            _wait(known, WAIT_S if self.others else self.wait_s)
        else:
            _wait([grammar for _, _, grammar in self.rows], self.wait_s)
        now = perf_counter()
        for index, length, grammar in self.rows:
            if grammar.refusal is not None:
                self.refusals[index] = grammar.refusal
            elif grammar.mask_at == length:
                self.ready[index] = grammar
            elif grammar.busy and now - grammar.began_at > GIVE_UP_S:
                self.refusals[index] = _TOO_SLOW
            else:
                self._leave_out(index, grammar)

    def _leave_out(self, index: int, grammar: SequenceGrammar) -> None:
        self.late.add(index)
        on_mask = self.on_mask
        if on_mask is not None and grammar.job is not None:
            grammar.job.add_done_callback(lambda _: on_mask())

    def settle(self, result: StepResult) -> None:
        """Take the rows without a mask out of ``result``, and give forced tokens their log-probability."""
        for index, grammar in self.ready.items():
            if grammar.certain and result.logprobs[index]:
                (token,), (known,) = result.tokens[index], result.logprobs[index]
                result.logprobs[index] = [certain(token, len(known.top_ids))]
        for index in (*self.late, *self.refusals):
            result.tokens[index], result.logprobs[index] = [], []
            result.errors.pop(index, None)
        result.late |= self.late
        result.refusals |= self.refusals


class Grammars:
    """The grammars of one worker, over the vocabulary in ``tokenizer`` (see :class:`CompiledGrammars`). All methods are
    for the thread that runs the engine."""

    wait_s = GIVE_UP_S
    """Longest wait of a step for its masks if it samples nothing else. A worker's loop, which leaves sequences out
    while they are :meth:`held`, sets WAIT_S: new prompts must not wait."""
    on_mask: Callable[[], None] | None = None
    """Called when the mask of a late row is there, from the thread that has computed it."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self._threads: Executor = ThreadPoolExecutor(_THREADS, "masks")
        self._suspect_threads: Executor = ThreadPoolExecutor(_SUSPECT_THREADS, "suspect-masks", _lower_priority)
        self._last_threads: Executor = ThreadPoolExecutor(1, "costly-masks", _take_only_idle_time)
        self._compiled = CompiledGrammars(tokenizer, vocab_size, eos_token_ids, self._suspect_threads)
        self._pace = Pace()
        self._budgets: WeakValueDictionary[TransferId, Budget] = WeakValueDictionary()

    def close(self) -> None:
        """End the threads."""
        for threads in (self._threads, self._suspect_threads, self._last_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self._compiled.memory.close()

    def prepare(self, grammar: str) -> None:
        """Compile ``grammar`` in a thread, so that its first mask need not wait for that."""
        self._compiled.request(grammar)

    def begin(self, sequences: Sequence[tuple[int, Tokens]], *, others: bool) -> StepMasks:
        """Begin the masks of a step's ``sequences``, each with the index of its segment. ``others``: whether the step
        samples other rows."""
        rows = [(index, each.output_length, self._of(each)) for index, each in sequences]
        together: list[tuple[SequenceGrammar, OutputTokens]] = []
        now = perf_counter()
        for (_, sequence), (_, length, grammar) in zip(sequences, rows, strict=True):
            if grammar.busy or grammar.refusal or grammar.mask_at == length:
                continue
            grammar.busy, grammar.began_at = True, now
            if grammar.aside:
                self._begin_alone(grammar, OutputTokens.of(sequence))
            else:
                together.append((grammar, OutputTokens.of(sequence)))
        size = max(CHUNK, -(-len(together) // _THREADS))
        for at in range(0, len(together), size):
            part = together[at : at + size]
            job = self._threads.submit(_compute, part)
            for grammar, _ in part:
                grammar.job = job
        return StepMasks(rows, others, self._pace, now, self.wait_s, self.on_mask)

    def _begin_alone(self, grammar: SequenceGrammar, output: OutputTokens) -> None:
        """Begin a mask for which no step waits, once its grammar is compiled: no thread waits for that."""
        threads, compiled = self._last_threads if grammar.costly else self._suspect_threads, grammar.compiled
        if compiled is None or compiled.done():
            grammar.job = threads.submit(grammar.compute, output)
            return
        job = grammar.job = Future[None]()

        def submit(done: Future[CompiledGrammar]) -> None:
            if done.cancelled():  # by the end of the threads, which has their lock
                return
            with suppress(RuntimeError):  # the threads have ended
                threads.submit(grammar.compute, output).add_done_callback(lambda _: job.set_result(None))

        compiled.add_done_callback(submit)

    @staticmethod
    def held(sequence: Tokens) -> bool:
        """Return whether the mask of the next token of ``sequence`` is still being computed. Not for longer than
        GIVE_UP_S: then a step refuses it."""
        grammar = sequence.matcher
        return isinstance(grammar, SequenceGrammar) and grammar.busy and perf_counter() - grammar.began_at <= GIVE_UP_S

    def force(self, sequence: Tokens) -> list[int]:
        """Return the tokens that the grammar of ``sequence`` forces after its output, to be appended at once. None if
        the request has other restrictions: then the sampler must see each token."""
        if sequence.request.sampling.restricts:
            return []
        grammar = sequence.matcher
        return grammar.force(OutputTokens.of(sequence)) if isinstance(grammar, SequenceGrammar) else []

    def _of(self, sequence: Tokens) -> SequenceGrammar:
        grammar = sequence.matcher
        if not isinstance(grammar, SequenceGrammar):
            transfer = sequence.id.transfer
            if (budget := self._budgets.get(transfer)) is None:
                budget = self._budgets[transfer] = Budget(pace=self._pace)
            grammar = sequence.matcher = SequenceGrammar(self._compiled, sequence, budget)
        return grammar


def begin_masks(grammars: Grammars | None, batch: Batch, sampled: Sequence[int]) -> StepMasks | None:
    """Begin the masks of the segments ``sampled`` of ``batch``; None if none of them has a grammar. Those that have one
    are refused without ``grammars``."""
    rows = [(index, batch.segments[index].sequence) for index in sampled if batch.segments[index].sequence.constrained]
    if not rows:
        return None
    if grammars is None:
        return StepMasks([], False, refusals={index: UNKNOWN for index, _ in rows})
    return grammars.begin(rows, others=len(rows) < len(sampled))


def _compute(rows: Iterable[tuple[SequenceGrammar, OutputTokens]]) -> None:
    for grammar, output in rows:
        grammar.compute(output)


def _wait(grammars: Iterable[SequenceGrammar], seconds: float) -> None:
    jobs = {each.job for each in grammars if each.job is not None and each.busy}
    if jobs:
        wait(jobs, seconds)


def _lower_priority(niceness: int = _NICE) -> None:
    """Let the kernels of a step on CPUs go before this thread."""
    with suppress(OSError, AttributeError):  # only Linux has priorities of threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def _take_only_idle_time() -> None:
    """Let this thread run only where no other one wants to."""
    _lower_priority(_LAST_NICE)
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
