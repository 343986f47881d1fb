"""The slow, obvious oracle: is this output right for this prompt?

Comparing two runs token by token is fragile: float32 differs in the last bits between batch shapes, so near-ties flip.
Instead the reference *verifies*. It runs one eager forward pass of transformers over prompt + output. For every output
position it computes the sampling distribution from those logits in float64, with the plain loops below, and checks that
the token the system chose is a correct choice within a stated tolerance:

- greedy: its (processed) logit lies within ``GREEDY_STDS`` standard deviations of the row's maximum;
- sampled: ``u = uniform(seed, choice, position)`` falls within ``CDF_TOLERANCE`` of the token's interval of the
  cumulative distribution in token-id order; where a top-k, top-p or min-p cut is a near-tie, either side is right.

Nothing here shares code with the engine, except the definition of ``u``.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from common.core.ids import unpack_tokens
from common.core.request import SamplingParams

Row = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

GREEDY_STDS = 1e-4
CDF_TOLERANCE = 1e-4
LOGPROB_TOLERANCE = 1e-4
GREEDY_BELOW = 1e-5
CUT_TOLERANCE = 1e-4
"""How far, in probability (relative) or logit, a token may be from a cut-off to count as a near-tie."""


@dataclass(frozen=True)
class Tolerance:
    """How much a run may differ from the reference; the defaults are what float32 must meet."""

    greedy_stds: float = GREEDY_STDS
    cdf: float = CDF_TOLERANCE
    logprob: float = LOGPROB_TOLERANCE
    cut: float = CUT_TOLERANCE


FLOAT32 = Tolerance()
BFLOAT16 = Tolerance(greedy_stds=0.25, cdf=0.05, logprob=0.25, cut=0.1)
"""bfloat16 has eight bits of mantissa. Over a few layers, a token a quarter of a standard deviation behind may win."""


class Reference:
    """A checkpoint as transformers understands it, eager and in float32.

    ``max_model_len`` is the longest sequence that the system serves. Rotary variants that look at the longest position
    of a batch (``longrope``, ``dynamic``) are frozen for it, so that a sequence's numbers never depend on a neighbour.
    """

    def __init__(self, checkpoint: Path, max_model_len: int | None = None, dtype: torch.dtype = torch.float32) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager")
        self.model = model.float().eval()
        self.vocab_size: int = self.model.config.get_text_config().vocab_size
        if max_model_len is not None:
            self._freeze_rotary(max_model_len)

    def _freeze_rotary(self, max_model_len: int) -> None:
        """Freeze each such rotary module at its frequencies for the last position, as transformers computes them."""
        for module in self.model.modules():
            if getattr(module, "rope_type", None) in ("longrope", "dynamic"):
                module(torch.zeros(1), torch.tensor([[max_model_len - 1]]))
                module.rope_type = "default"

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], last: int | None = None) -> Row:
        """Return the logits after each of the ``last`` tokens (all by default), shape [last, vocab]."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tiny matrices: more threads only take cores from the workers under test
        try:
            out = self.model(torch.tensor([list(tokens)]), use_cache=False, logits_to_keep=last or 0)
        finally:
            torch.set_num_threads(threads)
        return np.asarray(out.logits[0].double().numpy(), np.float64)

    def check(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        sampling: SamplingParams,
        *,
        choice: int = 0,
        tolerance: Tolerance = FLOAT32,
        logprobs: Sequence[float] | None = None,
        top_logprobs: Sequence[Sequence[float]] | None = None,
        name: str = "",
    ) -> None:
        """Raise AssertionError unless every token of ``output`` is right given everything before it.

        ``logprobs`` are those that the system reported for the chosen tokens, ``top_logprobs`` those of the most likely
        tokens in falling order: natural logarithms of the model's own distribution, before penalties and temperature.
        """
        assert output, f"{name}: no output"
        rows = self.logits([*prompt, *output[:-1]], last=len(output))
        assert len(rows) == len(output)
        for position, (row, token) in enumerate(zip(rows, output, strict=True)):
            where = f"{name or 'output'}[{position}] = {token} after {len(prompt) + position} tokens"
            problem = misfit(row, prompt, output[:position], token, sampling, choice, tolerance)
            assert problem is None, f"{where}: {problem}"
            if logprobs is not None:
                top = top_logprobs[position] if top_logprobs else ()
                _check_logprobs(row, token, logprobs[position], top, tolerance, where)


def misfit(
    row: Row,
    prompt: Sequence[int],
    before: Sequence[int],
    token: int,
    sampling: SamplingParams,
    choice: int,
    tolerance: Tolerance,
) -> str | None:
    """Return the reason why ``token`` cannot have been chosen from ``row``; None if it can."""
    spread = float(row.std())
    processed = process(row, prompt, before, sampling)
    best = int(processed.argmax())
    if sampling.temperature < GREEDY_BELOW:
        behind = (processed[best] - processed[token]) / spread
        return None if behind <= tolerance.greedy_stds else f"{behind:.2e} standard deviations below the best, {best}"
    u = uniform_for(sampling.seed, choice, len(before))
    nearest = math.inf
    for mask in keep_masks(processed, sampling, tolerance.cut):
        if not mask[token]:
            continue
        low, high = cdf_interval(processed / sampling.temperature, mask, token)
        nearest = min(nearest, max(low - u, u - high, 0.0))
        if nearest <= tolerance.cdf:
            return None
    if math.isinf(nearest):
        return f"was masked out (best is {best})"
    return f"u = {u:.6f} misses its interval by {nearest:.2e}"


def uniform_for(seed: int, choice: int, position: int) -> float:
    """Return the engine's noise; both sides must share this definition."""
    from common.engine.sampler import uniform

    return float(uniform(seed, choice, position))


# -- the distribution, as vLLM defines it -----------------------------------------------------------------------------


def process(row: Row, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams) -> Row:
    """Return the logits after min_tokens, logit_bias, restrictions and penalties, before temperature."""
    logits = row.astype(np.float64).copy()
    if len(output) < sampling.min_tokens:
        for token in (*sampling.eos_token_ids, *sampling.stop_token_ids):
            logits[token] = -math.inf
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if sampling.allowed_token_ids:
        allowed = set(unpack_tokens(sampling.allowed_token_ids))
        logits[[token not in allowed for token in range(len(logits))]] = -math.inf
    for *before, last in sampling.bad_words:
        if list(output[len(output) - len(before) :]) == before:
            logits[last] = -math.inf
    if sampling.repetition_penalty != 1.0:
        for token in {*prompt, *output}:
            divide = logits[token] > 0
            logits[token] *= 1 / sampling.repetition_penalty if divide else sampling.repetition_penalty
    for token, count in Counter(output).items():
        logits[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return logits


def softmax(logits: Row) -> Row:
    shifted = np.exp(logits - logits.max())
    return np.asarray(shifted / shifted.sum(), np.float64)


def keep_masks(processed: Row, sampling: SamplingParams, slack: float) -> Iterator[Mask]:
    """Yield the mask of tokens that survive min_p, top_k and top_p, then the masks with each cut moved by ``slack``
    either way.

    On a near-tie any of these masks is right; away from one they are all the same.
    """
    seen: set[bytes] = set()
    shifts = (0.0, slack, -slack)
    cuts = (sampling.min_p > 0, sampling.top_k > 0, sampling.top_p < 1)
    for each in itertools.product(*(shifts if is_made else (0.0,) for is_made in cuts)):
        mask = _keep(processed, sampling, *each)
        if (key := mask.tobytes()) not in seen:
            seen.add(key)
            yield mask


def _keep(processed: Row, sampling: SamplingParams, min_p_shift: float, top_k_shift: float, top_p_shift: float) -> Mask:
    """Apply min_p to the distribution after temperature, then top_k, then top_p to the renormalized rest."""
    scaled = processed / sampling.temperature
    keep = np.isfinite(scaled)
    if sampling.min_p > 0:
        probabilities = softmax(scaled)
        keep &= probabilities >= sampling.min_p * probabilities.max() * (1 + min_p_shift)
    left = np.where(keep, scaled, -math.inf)
    if 0 < sampling.top_k < len(scaled):
        kth = np.sort(left)[-sampling.top_k]
        if np.isfinite(kth):
            keep &= left >= kth + top_k_shift
    left = np.where(keep, scaled, -math.inf)
    if sampling.top_p < 1:
        order = np.argsort(-left, kind="stable")
        probabilities = softmax(left)[order]
        before = np.cumsum(probabilities) - probabilities  # keep a token while those above it have not reached top_p
        stays = before < sampling.top_p + top_p_shift
        stays[0] = True
        keep[order[~stays]] = False
    return np.asarray(keep, np.bool_)


def cdf_interval(scaled: Row, mask: Mask, token: int) -> tuple[float, float]:
    """Return the part of [0, 1) that chooses ``token``, with tokens in the order of their ids."""
    probabilities = softmax(np.where(mask, scaled, -math.inf))
    low = float(probabilities[:token].sum())
    return low, low + float(probabilities[token])


def log_softmax(row: Row) -> Row:
    top = row.max()
    return np.asarray(row - top - math.log(np.exp(row - top).sum()), np.float64)


def _check_logprobs(
    row: Row, token: int, reported: float, top: Sequence[float], tolerance: Tolerance, where: str
) -> None:
    expected = log_softmax(row)
    known = expected[token]
    assert abs(known - reported) <= tolerance.logprob, f"{where}: logprob {reported}, reference {known}"
    best = np.sort(expected)[::-1][: len(top)]
    assert np.abs(best - np.array(top)).max(initial=0) <= tolerance.logprob, f"{where}: top logprobs {top}, not {best}"


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    """Return greedy parameters that run to ``max_tokens`` whatever is sampled."""
    return SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True, **fields)
