"""``tandem bench grammar``: the cost of token masks, and what grammars do to the streams beside them.

First each grammar constrains one output after another, whose tokens are drawn at random from those that are allowed:
the CPU time per token is that of following it, of the tokens that it forces, and of the next mask. Then one engine
decodes plain streams and some more sequences: plain ones, or in every other round ones that a grammar constrains, each
with a text of its own, so that nothing is compiled for two. When one fails or ends, a plain one takes its place, until
the next such round. So both kinds of rounds see the same machine, and as many constrained requests come in every other
second. All but one of these grammars are hostile; the coordinator would refuse most before they reach a worker.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher

from bench.load import results
from common import builtin
from common.checkpoint.files import open_checkpoint
from common.config.bench.grammar import BenchGrammarConfig
from common.core.errors import StartError
from common.core.ids import BlockId, new_request_id, pack_tokens
from common.core.request import FinishReason, Request, SamplingParams
from common.core.sequence import Batch, Segment, Sequence
from common.engine.runner import ModelEngine
from common.grammar.compiled import CompiledGrammars
from common.grammar.masks import Grammars, OutputTokens, SequenceGrammar

CONTEXT, PROMPT, ROUND_S = 256, 32, 1.0
LONGEST = CONTEXT - PROMPT
_PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["new", "regular", "former"]}, "maxItems": 3},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "any object": {"type": "object"},
    "person": _PERSON,
    "list of persons": {"type": "array", "items": _PERSON, "minItems": 1},
    "200 optional fields": {"type": "object", "properties": {f"field_{at}": {"type": "string"} for at in range(200)}},
    "enumeration of 500": {"enum": [f"value number {at} of many" for at in range(500)]},
    "20 patterns": {
        "type": "object",
        "properties": {f"p{at}": {"type": "string", "pattern": f"^[a-z]{{1,{at + 3}}}(-[0-9]+)?$"} for at in range(20)},
        "required": [f"p{at}" for at in range(20)],
    },
}


def _words(count: int) -> str:
    rules = [f"t{at}: /[a-z]*{chr(97 + at % 26)}[a-z]{{{at % 17 + 1}}}/ start?" for at in range(count)]
    return "\n".join([f"start: {' | '.join(f't{at}' for at in range(count))}", *rules])


BESIDE = {
    "a harmless schema": 'start: %json {"type": "array", "minItems": 200, "items": {"type": "integer"}}',
    "ambiguous": 'start: x\nx: x x | x x x | "a" | "b" | "ab" | "ba"',
    "80 overlapping words": _words(80),
    "400 overlapping words": _words(400),
    "endless states": "start: /[a-z]*a[a-z]{200}c/",
    "nothing, often": 'start: a{0,2000}\na: b{0,200}\nb: c?\nc: "x" | "y"?',
}


def token_costs(source: CompiledGrammars, grammar: str, count: int, seed: int) -> Iterator[tuple[float, int]]:
    """Yield the CPU seconds of each mask, with what comes before it, and the number of tokens that it was for."""
    rng, eos, made = random.Random(seed), source.eos_token_ids, 0
    while made < count:
        sampling = SamplingParams(LONGEST, seed, grammar=grammar, eos_token_ids=tuple(eos))
        sequence = Sequence(Request(new_request_id(), pack_tokens([0]), sampling), 0)
        one = SequenceGrammar(source, sequence)
        one.compute(OutputTokens.of(sequence))
        while sequence.finish is FinishReason.RUNNING and one.refusal is None:
            bits = np.unpackbits(one.mask.view(np.uint8), bitorder="little")
            if sequence.append(int(rng.choice(np.flatnonzero(bits)))) is not FinishReason.RUNNING:
                break
            started, before = time.thread_time(), sequence.output_length
            for token in one.force(OutputTokens.of(sequence)):
                if sequence.force(token) is not FinishReason.RUNNING:
                    break
            if sequence.finish is FinishReason.RUNNING:
                one.compute(OutputTokens.of(sequence))
            tokens = 1 + sequence.output_length - before
            made += tokens
            yield time.thread_time() - started, tokens
        if one.refusal is not None:
            raise StartError("a grammar is refused", one.refusal.words, "run it alone on this machine")


class Decoder:
    """Decodes ``streams`` plain streams and ``more`` sequences on ``engine``, whose tokens ``ends`` end a constrained
    one."""

    def __init__(self, engine: ModelEngine, streams: int, more: int, ends: tuple[int, ...]) -> None:
        self._engine, self._rng, self._more, self._ends = engine, random.Random(1), more, ends
        self._rows = [self._new("") for _ in range(streams + more)]
        size = engine.layout.block_size
        blocks = CONTEXT // size
        self._tables = [[BlockId(blocks * row + at) for at in range(blocks)] for row in range(streams + more)]
        self.refused = 0

    def run(self, grammar: str) -> list[float]:
        """Run a round of decode steps and return the seconds of each, as a stream sees them; ``grammar`` is that of the
        additional sequences, "" for none."""
        self._rows[-self._more :] = [self._new(grammar) for _ in range(self._more)]
        self._prefill()
        seconds: list[float] = []
        while sum(seconds) < ROUND_S:
            started = time.perf_counter()
            self._take()
            seconds.append(time.perf_counter() - started)
            self._renew()
        return seconds

    def _take(self) -> None:
        """Run a step, without the sequences whose masks are still being computed, as a worker does."""
        rows = [row for row, one in enumerate(self._rows) if not Grammars.held(one)]
        segments = (Segment(self._rows[row], self._rows[row].computed, self._rows[row].missing) for row in rows)
        result = self._engine.step(Batch(tuple(segments), tuple(self._tables[row] for row in rows)))
        grammars = self._engine.grammars
        for at, row in enumerate(rows):
            one = self._rows[row]
            if at in result.refusals:
                self.refused += 1
                one.finish = FinishReason.FAILED
                continue
            one.computed = len(one.tokens) - (at in result.late)
            if not result.tokens[at]:
                continue
            one.append(result.tokens[at][0])
            if one.constrained and one.finish is FinishReason.RUNNING and grammars is not None:
                for token in grammars.force(one):
                    if one.force(token) is not FinishReason.RUNNING:
                        break

    def _renew(self) -> None:
        """Put plain sequences in the place of those that are over, outside of the measured time."""
        over = [at for at, one in enumerate(self._rows) if one.finish is not FinishReason.RUNNING]
        for at in over:
            self._rows[at] = self._new("")
        if over:
            self._prefill()

    def _prefill(self) -> None:
        """Compute all prompts but for their last token."""
        new = [(one, table) for one, table in zip(self._rows, self._tables, strict=True) if not one.computed]
        segments = tuple(Segment(one, 0, len(one.tokens) - 1) for one, _ in new)
        self._engine.step(Batch(segments, tuple(table for _, table in new)))
        for one, _ in new:
            one.computed = len(one.tokens) - 1

    def _new(self, grammar: str) -> Sequence:
        prompt, seed = [self._rng.randrange(self._engine.vocab_size) for _ in range(PROMPT)], self._rng.getrandbits(30)
        sampling = SamplingParams(LONGEST, seed, ignore_eos=True)
        if grammar:
            sampling = SamplingParams(LONGEST, seed, grammar=f"{grammar}\n// {seed}", eos_token_ids=self._ends)
        return Sequence(Request(new_request_id(), pack_tokens(prompt), sampling), 0)


def mask_cpu_s() -> dict[str, float]:
    """Return the CPU seconds of this process's threads for masks so far: of those that compete with the kernels, and of
    those that take only idle time."""
    found = {"masks": 0.0, "idle": 0.0}
    for thread in threading.enumerate():
        if "masks" in thread.name and thread.ident is not None:
            kind = "idle" if thread.name.startswith("costly") else "masks"
            found[kind] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return found


def interference(
    engine: ModelEngine, config: BenchGrammarConfig, grammar: str, ends: tuple[int, ...]
) -> dict[str, float]:
    """Return mean, median and P99 seconds of steps beside plain sequences and beside constrained ones, how many of the
    latter were refused, and the CPU time of their masks as a share of the time of the steps beside them."""
    decoder = Decoder(engine, config.streams, config.hostile, ends)
    plain, beside = list[float](), list[float]()
    decoder.run("")
    before = mask_cpu_s()
    for _ in range(config.rounds):
        plain += decoder.run("")
        beside += decoder.run(grammar)
    found: dict[str, float] = {"refused": decoder.refused}
    found |= {f"{name}_share": (used - before[name]) / sum(beside) for name, used in mask_cpu_s().items()}
    for name, seconds in (("plain", plain), ("beside", beside)):
        found |= {
            f"{name}_mean_s": statistics.fmean(seconds),
            f"{name}_p50_s": statistics.median(seconds),
            f"{name}_p99_s": float(np.quantile(seconds, 0.99)),
        }
    return found


def run(config: BenchGrammarConfig) -> int:
    """Print both tables as they are measured."""
    from common.engine.loading import load_engine

    checkpoint = open_checkpoint(config.model or str(builtin.path()))
    threads = ThreadPoolExecutor(1)
    source = CompiledGrammars(
        checkpoint.path / "tokenizer.json", checkpoint.vocab_size, checkpoint.eos_token_ids, threads
    )
    costs: dict[str, dict[str, float]] = {}
    print(f"| {source.vocab_size} token ids, grammar | CPU us per token | P99, us |\n|---|---|---|", flush=True)
    for name, schema in SCHEMAS.items():
        each = list(token_costs(source, LLMatcher.grammar_from_json_schema(schema), config.tokens, 1))
        mean = sum(seconds for seconds, _ in each) / sum(tokens for _, tokens in each)
        costs[name] = {"token_s": mean, "mask_p99_s": float(np.quantile([seconds for seconds, _ in each], 0.99))}
        print(f"| {name} | {1e6 * mean:.1f} | {1e6 * costs[name]['mask_p99_s']:.0f} |", flush=True)
    threads.shutdown()
    rows = config.streams + config.hostile
    engine = load_engine(
        checkpoint, num_kv_blocks=rows * CONTEXT // 16, max_batched_tokens=rows * CONTEXT, max_num_seqs=rows,
        batch_hint=rows,
    )  # fmt: skip
    found: dict[str, dict[str, float]] = {}
    head = f"{config.streams} streams beside {config.hostile} sequences of"
    refused = f"refused of {config.rounds * config.hostile}"
    print(f"\n| {head} | mean ITL | P50 | P99 | {refused} | CPU of masks, in idle time |")
    print("|---|---|---|---|---|---|")
    try:
        engine.warm_up()
        for name, grammar in BESIDE.items():
            found[name] = one = interference(engine, config, grammar, tuple(checkpoint.eos_token_ids))
            shown = (f"{one[f'beside_{key}_s'] / one[f'plain_{key}_s'] - 1:+.1%}" for key in ("mean", "p50", "p99"))
            shares = f"{one['masks_share']:.1%}, {one['idle_share']:.1%}"
            print(f"| {name} | {' | '.join(shown)} | {one['refused']:.0f} | {shares} |", flush=True)
    finally:
        engine.close()
    if config.save:
        results.save(
            Path(config.save), {"tokens": costs, "streams": config.streams, "hostile": config.hostile, "beside": found}
        )
    return 0
