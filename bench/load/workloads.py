"""Workloads: prompts and output lengths, synthetic or from a recorded trace.

Pure except for reading files. Workloads and their fields are named as in ``vllm bench serve``. Prompts are token ids,
so that they have exactly the requested length; only ShareGPT prompts are text.

    random              lengths uniform in [n·(1 - range_ratio), n·(1 + range_ratio)], after one shared random prefix
    prefix_repetition   a few prefixes, many suffixes each, shuffled
    sharegpt            first question and length of the first answer of conversations: a JSON list of objects with
                        ``conversations``, a list of turns with ``from`` and ``value``
    azure               the Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens
    mooncake            JSON lines with timestamp (ms), input_length, output_length and hash_ids; each hash id stands
                        for a block of 512 tokens, and equal ids for equal blocks
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from common.config.bench.shared import LONGEST_TOKENS
from common.core.errors import StartError, reason

MOONCAKE_BLOCK_TOKENS = 512
SHAREGPT_MIN_TOKENS, SHAREGPT_MAX_PROMPT_TOKENS, SHAREGPT_MAX_TOKENS = 4, 1024, 2048
"""Conversations outside these bounds are left out, as other benchmark clients do."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: its prompt, the prompt's length in tokens (0 if only the server will know it), the number of output
    tokens to request and, in a trace, its arrival time in seconds after the first request."""

    prompt: str | list[int]
    prompt_tokens: int
    output_tokens: int
    at: float | None = None


# -- made up ----------------------------------------------------------------------------------------------------------


def random_asks(
    ids: Sequence[int],
    count: int,
    input_len: int,
    output_len: int,
    *,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
) -> list[PlannedRequest]:
    """Return prompts of random tokens from ``ids``. All share the first ``prefix_len`` tokens and, except by chance, no
    more. Lengths are uniform within ``range_ratio`` around the given ones."""
    generator = np.random.default_rng(seed)
    prefix = _some(generator, ids, prefix_len)
    inputs = _lengths(generator, input_len, range_ratio, count)
    outputs = _lengths(generator, output_len, range_ratio, count)
    return [
        PlannedRequest(prefix + _some(generator, ids, length), prefix_len + length, output)
        for length, output in zip(inputs, outputs, strict=True)
    ]


def prefix_repetition_asks(
    ids: Sequence[int],
    count: int,
    *,
    prefix_len: int = 256,
    suffix_len: int = 256,
    num_prefixes: int = 10,
    output_len: int = 128,
    seed: int = 0,
) -> list[PlannedRequest]:
    """Return prompts made of ``num_prefixes`` prefixes with about equally many random suffixes each, shuffled."""
    generator = np.random.default_rng(seed)
    prefixes = [_some(generator, ids, prefix_len) for _ in range(num_prefixes)]
    asks = [
        PlannedRequest(
            prefixes[index % num_prefixes] + _some(generator, ids, suffix_len), prefix_len + suffix_len, output_len
        )
        for index in range(count)
    ]
    order = generator.permutation(count)
    return [asks[index] for index in order]


def _some(generator: np.random.Generator, ids: Sequence[int], count: int) -> list[int]:
    chosen: list[int] = np.asarray(ids)[generator.integers(0, len(ids), count)].tolist()
    return chosen


def _lengths(generator: np.random.Generator, mean: int, range_ratio: float, count: int) -> list[int]:
    low, high = math.floor(mean * (1 - range_ratio)), math.ceil(mean * (1 + range_ratio))
    drawn: list[int] = generator.integers(max(low, 1), max(high, 1), count, endpoint=True).tolist()
    return drawn


# -- recorded ---------------------------------------------------------------------------------------------------------


def sharegpt_asks(
    path: Path, count: int, tokens: Callable[[str], int], *, output_len: int | None = None, seed: int = 0
) -> list[PlannedRequest]:
    """Return up to ``count`` conversations in random order. ``tokens`` returns the number of tokens in a text.

    Raises StartError if the file cannot be read or is not a ShareGPT dataset."""
    try:
        entries = json.loads("".join(_lines(path)))
    except ValueError as error:
        raise _bad(path, f"is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise _bad(path, "is not a list of conversations")
    pairs = [pair for entry in entries if (pair := _first_pair(entry))]
    order = np.random.default_rng(seed).permutation(len(pairs))
    return list(islice(_fitting((pairs[index] for index in order), tokens, output_len), count))


def _first_pair(entry: Any) -> tuple[str, str] | None:
    try:
        first, second = (turn["value"] for turn in entry["conversations"][:2])
    except (TypeError, KeyError, ValueError):
        return None
    return (first, second) if isinstance(first, str) and isinstance(second, str) else None


def _fitting(
    pairs: Iterable[tuple[str, str]], tokens: Callable[[str], int], output_len: int | None
) -> Iterator[PlannedRequest]:
    for question, answer in pairs:
        prompt, output = tokens(question), tokens(answer) if output_len is None else output_len
        enough = prompt >= SHAREGPT_MIN_TOKENS and (output_len is not None or output >= SHAREGPT_MIN_TOKENS)
        if enough and prompt <= SHAREGPT_MAX_PROMPT_TOKENS and prompt + output <= SHAREGPT_MAX_TOKENS:
            yield PlannedRequest(question, prompt, output)


def azure_asks(path: Path, ids: Sequence[int], *, seed: int = 0) -> Iterator[PlannedRequest]:
    """Yield the rows of an Azure trace in file order. Raises StartError for an invalid file."""
    generator = np.random.default_rng(seed)
    rows = csv.DictReader(_lines(path))
    wanted = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    began: datetime | None = None
    try:
        if missing := wanted - set(rows.fieldnames or ()):
            raise _bad(path, f"has no column {', '.join(sorted(missing))}")
        for row in rows:
            at = _timestamp(row["TIMESTAMP"])
            began = began or at
            lengths = _whole(row, "ContextTokens"), _whole(row, "GeneratedTokens")
            seconds = (at - began).total_seconds()
            _check_lengths(path, rows.line_num, *lengths)
            yield PlannedRequest(_some(generator, ids, lengths[0]), *lengths, at=seconds)
    except (csv.Error, TypeError, ValueError) as error:
        raise _bad(path, f"line {rows.line_num}: {error}") from error


def _whole(row: dict[str, str | None], column: str) -> int:
    try:
        return int(row[column] or "")
    except ValueError:
        raise ValueError(f"{column} is {row[column] or 'missing'}, not a whole number") from None


def _timestamp(text: str | None) -> datetime:
    """Parse a timestamp of the 2023 trace, ``2023-11-16 18:17:03.9799600`` (seven decimals), or of the 2024 trace,
    ``2024-05-10 00:00:00.009930+00:00``."""
    whole, dot, rest = (text or "").partition(".")
    zone = rest.lstrip("0123456789")
    digits = rest[: len(rest) - len(zone)]
    try:
        return datetime.fromisoformat(f"{whole}{dot}{digits[:6].ljust(6, '0') if dot else ''}{zone}")
    except ValueError:
        raise ValueError(f"TIMESTAMP is {text or 'missing'}, not a date and time") from None


def mooncake_asks(path: Path, ids: Sequence[int], *, seed: int = 0) -> Iterator[PlannedRequest]:
    """Yield the rows of a Mooncake trace in file order. Raises StartError for an invalid file."""
    own = np.random.default_rng(seed)
    began: float | None = None
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            at, length, output = float(row["timestamp"]), int(row["input_length"]), int(row["output_length"])
            hashes = [int(each) for each in row.get("hash_ids", ())]
            if not math.isfinite(at):
                raise ValueError(f"timestamp is {at}")
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise _bad(path, f"line {number}: {_wrong(error)}") from error
        _check_lengths(path, number, length, output)
        began = at if began is None else began
        prompt: list[int] = []
        for each in hashes:
            block = np.random.default_rng((seed, each & ((1 << 63) - 1)))
            prompt += _some(block, ids, MOONCAKE_BLOCK_TOKENS)
        prompt += _some(own, ids, max(0, length - len(prompt)))
        yield PlannedRequest(prompt[:length], length, output, at=(at - began) / 1000)


def _wrong(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error})"
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _check_lengths(path: Path, line: int, prompt: int, output: int) -> None:
    if not (1 <= prompt <= LONGEST_TOKENS and 0 <= output <= LONGEST_TOKENS):
        raise _bad(path, f"line {line}: unusable lengths, {prompt} prompt tokens and {output} output tokens")


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file lazily, since it may be larger than memory."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"cannot read the dataset {path}", reason(error), "correct --dataset-path") from error


def _bad(path: Path, what: str) -> StartError:
    return StartError(
        f"{path} {what}", "it is not the dataset that --dataset-name names", "correct --dataset-name or --dataset-path"
    )


def relabelled(asks: Sequence[PlannedRequest], seed: int) -> list[PlannedRequest]:
    """Return the same requests with other tokens, so that no prefix cache helps them.

    The tokens that occur are permuted, in all prompts alike; lengths and shared prefixes stay the same. A prompt that
    is text is prefixed with ``seed`` instead, which makes it a few tokens longer."""
    prompts = [ask.prompt for ask in asks if not isinstance(ask.prompt, str)]
    known = np.unique(np.concatenate([np.asarray(prompt) for prompt in prompts])) if prompts else np.empty(0, np.int64)
    others = np.random.default_rng((seed, len(known))).permutation(known)

    def other(prompt: list[int] | str) -> list[int] | str:
        if isinstance(prompt, str):
            return f"{seed} {prompt}"
        ids: list[int] = others[np.searchsorted(known, prompt)].tolist()
        return ids

    return [replace(ask, prompt=other(ask.prompt)) for ask in asks]


# -- what a server can take -------------------------------------------------------------------------------------------


def within(asks: Iterable[PlannedRequest], count: int, longest: int | None) -> tuple[list[PlannedRequest], int]:
    """Return the first ``count`` requests that are usable, sorted by arrival time, and how many were skipped for them.

    A request is usable if it wants at least one output token and fits into ``longest`` tokens (None: no limit). Traces
    need not be sorted by time."""
    kept: list[PlannedRequest] = []
    left_out = 0
    for ask in asks:
        if len(kept) == count:
            break
        if ask.output_tokens > 0 and (longest is None or ask.prompt_tokens + ask.output_tokens <= longest):
            kept.append(ask)
        else:
            left_out += 1
    return sorted(kept, key=lambda ask: ask.at or 0.0), left_out
