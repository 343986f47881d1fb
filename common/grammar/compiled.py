"""Compiled grammars, cached by content."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from threading import Lock
from time import perf_counter, thread_time
from typing import TYPE_CHECKING

import numpy as np

from common.grammar.errors import FAILED, TOO_COMPLEX, GrammarError
from common.grammar.limits import GIVE_UP_S, parser_limits
from common.grammar.matcher import Mask
from common.grammar.memory import BASE_BYTES, BYTES_PER_CHAR, GrammarMemory

if TYPE_CHECKING:  # an engine without grammars does not need it
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger("tandem.grammar")

KEPT, KEPT_BYTES = 128, 256 << 20
"""Compiled grammars kept, and their estimated size: those that were used last."""
GROWN_BYTES = 8 << 20
"""Estimated growth by use from which on a compiled grammar is not kept for new sequences. Compiling it again costs
less than it has cost already."""


class CompiledGrammar:
    """A grammar for all sequences that have it. ``start``: the matcher at its start, only to be copied. ``first``: the
    mask there as llguidance computes it, which may take milliseconds with a large vocabulary. ``size``: estimated
    bytes, which ``memory`` counts."""

    def __init__(self, start: LLMatcher, first: Mask, size: int, memory: GrammarMemory) -> None:
        self.start, self.first = start, first
        self.unused_size = self.size = size
        self._memory = memory
        memory.add(size)

    def grow(self, size: int) -> None:
        """Count ``size`` more bytes, of states that a sequence has added."""
        self.size += size
        self._memory.add(size)

    @property
    def has_grown(self) -> bool:
        """Whether it has grown so much that it is not worth its memory."""
        return self.size > self.unused_size + GROWN_BYTES

    def __del__(self) -> None:
        self._memory.free(self.size)


class CompiledGrammars:
    """Compiles grammars in ``threads`` over the vocabulary of ``tokenizer``, a tokenizer.json.

    The vocabulary has ``vocab_size`` token ids, the padding of the model's included, of which ``eos_token_ids`` end an
    output. It is read when the first grammar comes, since most workers never need it: that takes about a second for
    128,000 tokens.
    """

    def __init__(
        self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int], threads: Executor, kept: int = KEPT
    ) -> None:
        self._path, self._threads, self._kept = tokenizer, threads, kept
        self.memory = GrammarMemory()
        self.vocab_size = vocab_size
        self.eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        self._reading, self._changing = Lock(), Lock()

    def request(self, grammar: str) -> Future[CompiledGrammar]:
        """Return ``grammar`` compiled, now or later. The future raises GrammarError if that is not possible."""
        with self._changing:
            future = self._compiled.pop(grammar, None)
            if future is None:
                future = self._threads.submit(self._compile, grammar)
            self._compiled[grammar] = future
            self._drop_oldest()
            return future

    def _drop_oldest(self) -> None:
        excess = sum(map(_size, self._compiled.values())) - KEPT_BYTES
        while len(self._compiled) > self._kept or (excess > 0 and len(self._compiled) > 1):
            excess -= _size(self._compiled.popitem(last=False)[1])

    def alone(self, grammar: str) -> CompiledGrammar:
        """Compile ``grammar`` again for one sequence, and forget the matcher that others have copied: copies share the
        states of one lexer, so what one of them did counts against the limits of all. Raises GrammarError."""
        with self._changing:
            self._compiled.pop(grammar, None)
        return self._compile(grammar)

    def forget(self, grammar: str, known: CompiledGrammar) -> None:
        """Do not give ``known`` to sequences to come. Its memory is given back once no sequence has it."""
        with self._changing:
            future = self._compiled.get(grammar)
            if future is not None and future.done() and future.exception() is None and future.result() is known:
                del self._compiled[grammar]

    def _compile(self, grammar: str) -> CompiledGrammar:
        from llguidance import LLMatcher

        tokenizer, started = self.tokenizer(), thread_time()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        seconds = thread_time() - started
        if matcher.is_error():
            raise GrammarError(FAILED, f"the grammar cannot be compiled: {_first_line(matcher.get_error())}")
        if seconds > GIVE_UP_S:
            raise GrammarError(TOO_COMPLEX, f"the grammar took {seconds:.1f} s of CPU time to compile")
        first: Mask = np.zeros((self.vocab_size + 31) // 32, np.int32)
        beginning = matcher.deep_copy()
        beginning.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
        if beginning.is_error():
            raise GrammarError(TOO_COMPLEX, f"the grammar is too complex: {_first_line(beginning.get_error())}")
        return CompiledGrammar(matcher, first, BASE_BYTES + BYTES_PER_CHAR * len(grammar) + first.nbytes, self.memory)

    def tokenizer(self) -> LLTokenizer:
        """Return the vocabulary, which the first call reads. Raises GrammarError if the checkpoint has none."""
        with self._reading:
            if self._tokenizer is None:
                self._tokenizer = self._read()
            return self._tokenizer

    def _read(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        started = perf_counter()
        try:
            text = self._path.read_text(encoding="utf-8")
        except OSError as error:
            why = f"the model's {self._path.name} cannot be read: {error.strerror}"
            raise GrammarError(FAILED, f"outputs cannot be constrained: {why}") from None
        try:
            found = LLTokenizer(text, n_vocab=self.vocab_size, eos_token=self.eos_token_ids or None)
        except ValueError as error:
            why = f"{self._path.name} is not understood: {_first_line(str(error))}"
            raise GrammarError(FAILED, f"outputs cannot be constrained: {why}") from None
        log.info("read the vocabulary for grammars in %.2f s", perf_counter() - started)
        return found


def _size(future: Future[CompiledGrammar]) -> int:
    """Return the estimated bytes of a compiled grammar, 0 if it is not there yet or there is none."""
    return future.result().size if future.done() and future.exception() is None else 0


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:300]
