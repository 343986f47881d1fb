"""Greedy and seeded tokens of each model family, from the engine in float32, without near-ties.

The last bits of logits differ between machines. Therefore prompts are tried until every token of the answer still wins
with each of ``TRIALS`` random errors added to its logits, of ``ERROR`` standard deviations: a thousand times the error
of float32.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden import adapter
from tests.golden.store import HERE, Lines, read_whole, write_whole

FILE = HERE / "tokens.txt"
KINDS = ("llama", "llama-untied", "qwen3", "mistral", "gemma2", "gemma3", "qwen3-moe", "phi3", "gpt2", "gpt-oss",
         "deepseek-v3", "mixtral")  # fmt: skip
PROMPTS = (5, 16, 33)
"""Prompt lengths: within a block of 16 tokens, at its end, and beyond two blocks."""
COUNT, TRIALS, ERROR, ATTEMPTS = 6, 32, 0.003, 400
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.7, "top_k": 20},
    "seeded, cut and penalised": {"temperature": 0.9, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.2},
}


class NearTieError(Exception):
    """Raised when no prompt was found whose answer is the same on every machine."""


def kept() -> dict[str, Lines]:
    return read_whole(FILE)


def _case(kind: str, length: int, sampling: str, attempt: int) -> tuple[list[int], int, dict[str, Any]]:
    """Return a prompt of ordinary tokens, the answer's seed, and its sampling fields."""
    chance = random.Random(f"{kind} {length} {sampling} {attempt}")
    return [chance.randrange(8, 512) for _ in range(length)], chance.randrange(1 << 63), SAMPLINGS[sampling]


def _keys() -> Iterator[tuple[str, list[tuple[str, int, str]]]]:
    for kind in KINDS:
        yield kind, [(f"{kind}: {length} tokens, {how}", length, how) for length in PROMPTS for how in SAMPLINGS]


def record(keys: Iterable[str] | None = None) -> Iterator[tuple[str, Lines]]:
    frozen = kept()
    for kind, cases in _keys():
        chosen = [case for case in cases if keys is None or case[0] in keys]
        if chosen:
            with _generator(kind) as generator:
                for key, length, how in chosen:
                    prompt = frozen[key][0]
                    case = _case(kind, length, how, int(prompt.removeprefix("prompt ")))
                    yield key, [prompt, _shown(generator.tokens(*case, COUNT))]


@contextlib.contextmanager
def _generator(kind: str) -> Iterator[adapter.Generator]:
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(adapter.Generator(kind, Path(folder))) as made:
        yield made


def _shown(tokens: list[int]) -> str:
    return "tokens " + " ".join(map(str, tokens))


def freeze() -> str:
    found: list[tuple[str, Lines]] = []
    errors = np.random.default_rng(51).normal(scale=ERROR, size=(TRIALS, 512)).astype(np.float32)
    for kind, cases in _keys():
        with _generator(kind) as generator:
            for key, length, how in cases:
                for attempt in range(ATTEMPTS):
                    case = _case(kind, length, how, attempt)
                    tokens = generator.tokens(*case, COUNT)
                    if generator.certain(*case, tokens, errors):
                        found.append((key, [f"prompt {attempt}", _shown(tokens)]))
                        break
                else:
                    raise NearTieError(f"{key}: each of {ATTEMPTS} prompts has a near-tie")
    write_whole(FILE, found)
    return f"{len(found)} answers of {len(KINDS)} families"
