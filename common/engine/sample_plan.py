"""What a step's sampling needs, worked out on the host before the step: columns to upload, and how to read the result.

Must not know the device. The parameters' meanings are those of :mod:`common.engine.sampler`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common.core.request import GREEDY_BELOW, SamplingParams
from common.core.sequence import Sequence as Tokens
from common.core.sequence import TokenLogprobs
from common.engine.sampler import uniforms
from common.engine.staging import Column
from common.engine.token_counts import NO_SLOT, Rebuild, TokenCounts

_ALL = inf
"""A ``top_p`` that no sum of probabilities reaches, not even one in which huge logits have rounded to 1 each."""
_KEPT_BIASES = 256


@dataclass(frozen=True, slots=True)
class Features:
    """The parts of sampling that some row of a step needs. The other rows get values with which they change nothing.
    ``logprobs``: how many of the most likely tokens are reported; None for no log-probabilities at all."""

    random: bool = False
    min_p: bool = False
    top_k: bool = False
    top_p: bool = False
    biases: bool = False
    penalties: bool = False
    logprobs: int | None = None


PLAIN = Features()
"""Every row takes its most likely token."""


@dataclass(slots=True)
class SamplePlan:
    """One step's sampling. ``choices``: tokens per sequence. ``columns``: as
    :class:`common.engine.device_sampler.Columns`, and the histories that ``rebuilds`` need; none if the features are
    PLAIN. ``logprobs``: the parameter of that name of each row."""

    features: Features
    choices: list[int]
    columns: dict[str, Column] = field(default_factory=dict)
    logprobs: list[int | None] = field(default_factory=list)
    rebuilds: list[Rebuild] = field(default_factory=list)

    def read(self, packed: npt.NDArray[np.int32]) -> list[list[tuple[int, TokenLogprobs | None]]]:
        """Return the tokens of each sequence, one per choice, from ``packed`` [n, width], what
        :func:`common.engine.device_sampler.sample_on_device` returned; -1 where the logits were not finite."""
        tokens: list[int] = packed[:, 0].tolist()
        if not self.columns:
            return [[(token, None)] * count for token, count in zip(tokens, self.choices, strict=True)]
        entries = iter(zip(tokens, self._logprobs(packed), strict=True))
        return [[next(entries) for _ in range(count)] for count in self.choices]

    def _logprobs(self, packed: npt.NDArray[np.int32]) -> list[TokenLogprobs | None]:
        most = self.features.logprobs
        if most is None:
            return [None] * len(packed)
        numbers = packed[:, 1 : 2 + most].view(np.float32).tolist()
        ids = packed[:, 2 + most :].tolist()
        return [
            None if wanted is None else TokenLogprobs(own, tuple(best[:wanted]), tuple(values[:wanted]))
            for wanted, (own, *values), best in zip(self.logprobs, numbers, ids, strict=True)
        ]


class _Biases(NamedTuple):
    """Token ids int64, and what is added to their logits: for all positions, and before ``min_tokens``."""

    always: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
    early: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]


class SamplePlanner:
    """Plans the sampling from logits of ``vocab_size`` columns; ``counts`` places sequences with penalties."""

    def __init__(self, vocab_size: int, counts: TokenCounts) -> None:
        self.vocab_size, self._counts = vocab_size, counts
        self._biases: OrderedDict[int, tuple[SamplingParams, _Biases]] = OrderedDict()

    def plan(self, sequences: Sequence[Tokens]) -> SamplePlan:
        """Plan the next tokens of ``sequences``, of which each has a row of logits, in this order."""
        if all(len(each.tokens) >= each.best_from for each in sequences):
            return SamplePlan(PLAIN, [each.siblings + 1 for each in sequences])
        rows = [(row, each, choice) for row, each in enumerate(sequences) for choice in each.choices]
        params = [each.request.sampling for _, each, _ in rows]
        positions = [each.output_length for _, each, _ in rows]
        plan = SamplePlan(
            self.features(params),
            [len(each.choices) for each in sequences],
            self.numbers(params, positions, [choice for _, _, choice in rows]),
            [one.logprobs for one in params],
        )
        plan.columns["rows"] = array("q", [row for row, _, _ in rows])
        self._add_slots(plan, sequences)
        self._add_biases(plan, params, positions)
        return plan

    def features(self, params: Sequence[SamplingParams]) -> Features:
        """Return what rows with these parameters need."""
        wanted = [one.logprobs for one in params if one.logprobs is not None]
        return Features(
            random=any(one.temperature >= GREEDY_BELOW for one in params),
            min_p=any(one.min_p > 0 for one in params),
            top_k=any(0 < one.top_k < self.vocab_size for one in params),
            top_p=any(one.top_p < 1 for one in params),
            biases=any(one.logit_bias or one.min_tokens for one in params),
            penalties=any(one.has_penalty for one in params),
            logprobs=min(max(wanted), self.vocab_size) if wanted else None,
        )

    def numbers(
        self, params: Sequence[SamplingParams], positions: Sequence[int], choices: Sequence[int]
    ) -> dict[str, Column]:
        """Return the columns that follow from each row's parameters and position alone."""
        size = self.vocab_size
        return {
            "noise": uniforms([one.seed for one in params], choices, positions),
            "top_k": array("q", [one.top_k if 0 < one.top_k < size else size for one in params]),
            "temperature": array("d", [one.temperature if one.temperature >= GREEDY_BELOW else 0 for one in params]),
            "top_p": array("d", [one.top_p if one.top_p < 1 else _ALL for one in params]),
            "min_p": array("d", [one.min_p for one in params]),
            "repetition": array("d", [one.repetition_penalty for one in params]),
            "frequency": array("d", [one.frequency_penalty for one in params]),
            "presence": array("d", [one.presence_penalty for one in params]),
        }

    def _add_slots(self, plan: SamplePlan, sequences: Sequence[Tokens]) -> None:
        """Add the slot of each row; the choices of one sequence share its slot."""
        counted = [each for each in sequences if each.request.sampling.has_penalty]
        placed = self._counts.place(counted)
        found = iter(zip(placed.slots, placed.grows, strict=True))
        slots, grows = array("q"), array("q")
        for each, count in zip(sequences, plan.choices, strict=True):
            slot, grown = next(found) if each.request.sampling.has_penalty else (NO_SLOT, 0)
            slots.extend([slot] * count)
            grows.extend([grown] * count)
        plan.columns |= {"slots": slots, "grows": grows}
        plan.rebuilds = placed.rebuilds
        for slot, prompt, output in placed.rebuilds:
            plan.columns |= {f"prompt {slot}": array("q", prompt), f"output {slot}": array("q", output)}

    def _add_biases(self, plan: SamplePlan, params: Sequence[SamplingParams], positions: Sequence[int]) -> None:
        """Add the logits to change: those of ``logit_bias``, and of all that must not end a sequence yet."""
        rows, tokens, values = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.float64)]
        for row, (one, position) in enumerate(zip(params, positions, strict=True)):
            early = position < one.min_tokens
            if not (early or one.logit_bias):
                continue
            biases = self._biases_of(one)
            for ids, added in (biases.always, biases.early) if early else (biases.always,):
                rows.append(np.full(len(ids), row))
                tokens.append(ids)
                values.append(added)
        plan.columns |= {
            "bias_rows": np.concatenate(rows),
            "bias_tokens": np.concatenate(tokens),
            "bias_values": np.concatenate(values),
        }

    def _biases_of(self, params: SamplingParams) -> _Biases:
        """Return the biases of a request, which are looked up in every step and kept for the last requests."""
        if (found := self._biases.get(id(params))) is not None:
            self._biases.move_to_end(id(params))
            return found[1]
        size = self.vocab_size
        biased = {token: bias for token, bias in params.logit_bias.items() if 0 <= token < size}
        ends = {token for token in (*params.eos_token_ids, *params.stop_token_ids) if token < size}
        made = _Biases(
            (np.array([*biased], np.int64), np.array([*biased.values()], np.float64)),
            (np.array([*ends], np.int64), np.full(len(ends), -np.inf)),
        )
        self._biases[id(params)] = params, made
        while len(self._biases) > _KEPT_BIASES:
            self._biases.popitem(last=False)
        return made
