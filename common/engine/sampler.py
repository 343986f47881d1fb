"""Sampling of the next token of every row, vectorized over the batch.

Parameters have vLLM's names and meanings, and apply in vLLM's order: min_tokens mask, logit_bias, penalties (repetition
over prompt and output, frequency and presence over output), the grammar's mask, temperature, min_p, top_k, top_p.
Log-probabilities are those of the model's own distribution, before all of these; a token that a grammar forces has 0.

Noise is a pure function of (seed, choice, position): one uniform number per row selects a token through the inverse of
the cumulative distribution *in the order of token ids*. No random generator has a state, so a hand-off, a preemption or
a retry continues with the same tokens. Because that order does not depend on the probabilities, logits that differ in
their last bits select another token only if the number falls within that difference of a boundary.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.core.request import GREEDY_BELOW, SamplingParams
from common.core.sequence import TokenLogprobs, certain
from common.kernels import cpu

LARGEST = 1e30
"""Larger logits become this before the draw: a penalty may overflow to infinity, and a difference of infinities is
NaN."""
NOTHING_LEFT = -2
"""In place of a token id where the mask and the other parameters of a request leave none."""
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_HEAD = 1024
"""Number of most likely tokens among which a top_p cut is searched first."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One token to sample from logits row ``row`` for ``choice``. ``tokens`` are all token ids before it, of which the
    first ``prompt_length`` are the prompt. ``mask``: one bit per token id that the request's grammar and restrictions
    allow, int32 [ceil(vocab / 32)]; None for none. ``certain``: whether the grammar forces the only one."""

    row: int
    sampling: SamplingParams
    choice: int
    tokens: Sequence[int]
    prompt_length: int
    mask: npt.NDArray[np.int32] | None = None
    certain: bool = False

    @property
    def position(self) -> int:
        """Index of the token in the output, from 0."""
        return len(self.tokens) - self.prompt_length


# -- noise ------------------------------------------------------------------------------------------------------------


def uniform(seed: int, choice: int, position: int) -> float:
    """Return the number in [0, 1) that decides output token ``position`` of ``choice``."""
    return float(uniforms([seed], [choice], [position])[0])


def uniforms(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return the numbers of n rows, float64 [n]: the top 53 bits after three rounds of SplitMix64 (Steele, Lea and
    Flood, 2014)."""
    word = _mix(np.array([seed & _WORD for seed in seeds], np.uint64))
    word = _mix(word ^ np.array(choices, np.uint64))
    word = _mix(word ^ np.array(positions, np.uint64))
    return (word >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        word = word + np.uint64(_GOLDEN)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return word ^ (word >> np.uint64(31))


# -- sampling ---------------------------------------------------------------------------------------------------------


def peaks(logits: torch.Tensor) -> list[int]:
    """Return the most likely token id of each row of ``logits`` [R, vocab], of any float dtype: the lowest id among
    equals, and -1 where a logit is NaN or the largest is not finite."""
    library = cpu.library()
    if library is None or logits.dtype not in (torch.float32, torch.bfloat16) or logits.device.type != "cpu":
        wide = logits.float()  # argmax and amax are several times faster than in bfloat16
        return torch.where(wide.amax(dim=-1).isfinite(), wide.argmax(dim=-1), -1).tolist()
    logits, found = logits.contiguous(), array("q", bytes(8 * logits.shape[0]))
    library.peaks(logits.data_ptr(), *logits.shape, cpu.TYPES[logits.dtype], found.buffer_info()[0])
    return found.tolist()


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Return one token id for each entry of ``rows``, sampled from ``logits`` [R, vocab] of any float dtype, and its
    log-probabilities where the request wants them, else None. The id is NOTHING_LEFT if a mask and the other
    parameters together leave no token."""
    logits = logits.float()
    if len(rows) != logits.shape[0] or any(row.row != index for index, row in enumerate(rows)):
        logits = logits[torch.tensor([row.row for row in rows])]
    processed = _process(logits, rows)
    random = [index for index, row in enumerate(rows) if row.sampling.temperature >= GREEDY_BELOW]
    if not random:
        tokens = processed.argmax(dim=-1)
    elif len(random) == len(rows):
        tokens = _draw(processed, rows)
    else:
        tokens = processed.argmax(dim=-1)
        tokens[random] = _draw(processed[random], [rows[index] for index in random])
    chosen: list[int] = tokens.tolist()
    logprobs = _logprobs(logits, rows, chosen)
    for index in [index for index, row in enumerate(rows) if row.mask is not None]:
        if processed[index].max() == -torch.inf:
            chosen[index] = NOTHING_LEFT
    return chosen, logprobs


def _logprobs(logits: torch.Tensor, rows: Sequence[SampleRow], chosen: list[int]) -> list[TokenLogprobs | None]:
    """Return the log-probabilities of the chosen token and of the most likely ones for each row that wants them."""
    result: list[TokenLogprobs | None] = [None] * len(rows)
    asked = [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]
    if not asked:
        return result
    logprobs = torch.log_softmax(logits[asked].float(), dim=-1)
    within = torch.tensor([chosen[index] for index in asked]).clamp_(max=logprobs.shape[1] - 1)
    own = logprobs.gather(1, within[:, None]).squeeze(1).tolist()
    most = min(max(rows[index].sampling.logprobs or 0 for index in asked), logprobs.shape[1])
    values, ids = (part.tolist() for part in torch.topk(logprobs, most, dim=-1))
    for place, index in enumerate(asked):
        k = rows[index].sampling.logprobs or 0
        result[index] = TokenLogprobs(own[place], tuple(ids[place][:k]), tuple(values[place][:k]))
        if rows[index].certain:
            result[index] = certain(chosen[index], k)
    return result


# -- processors -------------------------------------------------------------------------------------------------------


def _process(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Return the logits [n, vocab] after masks, biases and penalties; a float32 copy if any of these apply."""
    steps: list[Callable[[torch.Tensor, Sequence[SampleRow]], None]] = []
    if any(row.position < row.sampling.min_tokens for row in rows):
        steps.append(_mask_endings)
    if any(row.sampling.logit_bias for row in rows):
        steps.append(_add_biases)
    if any(row.sampling.has_penalty for row in rows):
        steps.append(_penalise)
    if any(row.mask is not None for row in rows):
        steps.append(_apply_masks)
    if not steps:
        return logits
    changed = logits.to(torch.float32, copy=True)
    for step in steps:
        step(changed, rows)
    return changed


def _mask_endings(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Mask all tokens that could end a sequence with fewer than ``min_tokens`` output tokens."""
    for index, row in enumerate(rows):
        if row.position < row.sampling.min_tokens:
            ends = {*row.sampling.eos_token_ids, *row.sampling.stop_token_ids}
            logits[index, [token for token in ends if token < logits.shape[1]]] = -torch.inf


def _add_biases(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    entries = [
        (index, token, bias)
        for index, row in enumerate(rows)
        for token, bias in row.sampling.logit_bias.items()
        if 0 <= token < logits.shape[1]
    ]
    if entries:
        at, tokens, biases = zip(*entries, strict=True)
        logits.index_put_((torch.tensor(at), torch.tensor(tokens)), torch.tensor(biases), accumulate=True)


def _penalise(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    for index, row in enumerate(rows):
        if row.sampling.has_penalty:
            _penalise_row(logits[index], row)


def _penalise_row(logits: torch.Tensor, row: SampleRow) -> None:
    """Penalize one row [vocab] in place: repetition divides positive logits of tokens seen and multiplies negative
    ones; frequency and presence are subtracted from tokens in the output."""
    sampling = row.sampling
    tokens = torch.tensor(row.tokens, dtype=torch.int64)
    if sampling.repetition_penalty != 1.0:
        seen = tokens.unique()
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
        )
    output, counts = tokens[row.prompt_length :].unique(return_counts=True)
    if output.numel():
        logits[output] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def _apply_masks(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    size = logits.shape[1]
    for index, row in enumerate(rows):
        if row.mask is not None:
            bits = np.unpackbits(row.mask.view(np.uint8), count=min(size, 32 * len(row.mask)), bitorder="little")
            allowed = torch.from_numpy(bits).bool()
            logits[index, : len(allowed)].masked_fill_(~allowed, -torch.inf)
            logits[index, len(allowed) :] = -torch.inf


# -- the draw ---------------------------------------------------------------------------------------------------------


def _draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Draw tokens, int64 [n], from ``logits`` [n, vocab] of rows with a temperature."""
    scaled = logits.float() / torch.tensor([row.sampling.temperature for row in rows])[:, None]
    scaled.clamp_(max=LARGEST)
    _cut_min_p(scaled, rows)
    _cut_top(scaled, rows)
    cumulative = torch.softmax(scaled, dim=-1).double().cumsum_(dim=-1)
    total = cumulative[:, -1:]
    noise = uniforms([row.sampling.seed for row in rows], [row.choice for row in rows], [row.position for row in rows])
    # a product that rounds up to the total would point behind the last token that has any probability
    wanted = torch.minimum(torch.from_numpy(noise)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, wanted, right=True).squeeze(1)


def _cut_min_p(scaled: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Drop tokens less likely than ``min_p`` times the best one: logits more than ``-log(min_p)`` below the best."""
    if any(row.sampling.min_p > 0 for row in rows):
        floor = torch.tensor([row.sampling.min_p for row in rows]).log()[:, None]
        scaled.masked_fill_(scaled < scaled.amax(dim=-1, keepdim=True) + floor, -torch.inf)


def _cut_top(scaled: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Drop all but the ``top_k`` best (ties stay), then all after the token with which the sum reaches ``top_p``."""
    vocabulary = scaled.shape[1]
    by_k = [index for index, row in enumerate(rows) if 0 < row.sampling.top_k < vocabulary]
    if by_k:
        ks = torch.tensor([rows[index].sampling.top_k for index in by_k])
        best = torch.topk(scaled[by_k], int(ks.max()), dim=-1).values
        floor = best.gather(1, ks[:, None] - 1)
        scaled[by_k] = scaled[by_k].masked_fill(scaled[by_k] < floor, -torch.inf)
    by_p = [index for index, row in enumerate(rows) if row.sampling.top_p < 1]
    if by_p:
        limits = torch.tensor([rows[index].sampling.top_p for index in by_p])
        scaled[by_p] = _cut_top_p(scaled[by_p], limits)


def _cut_top_p(scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Drop the tokens before which the sum, taken from the most likely token on, has already reached ``top_p`` [n]. The
    best token always stays.

    Among equals the lower id comes first. The cut nearly always lies among the ``_HEAD`` best, and finding these is
    many times cheaper than sorting a large vocabulary; rows whose cut lies deeper are redone with the whole vocabulary.
    """
    vocabulary = scaled.shape[1]
    result, deeper = _cut_within(scaled, top_p, min(_HEAD, vocabulary))
    if deeper.any():
        result[deeper], _ = _cut_within(scaled[deeper], top_p[deeper], vocabulary)
    return result


def _cut_within(scaled: torch.Tensor, top_p: torch.Tensor, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut each row at ``top_p`` within its ``head`` best tokens. Return the cut logits [n, vocab], and a bool [n] that
    is True for rows whose cut lies deeper; these are cut too early."""
    best = torch.topk(scaled, head, dim=-1).values
    probabilities = (best - torch.logsumexp(scaled, dim=-1, keepdim=True)).double().exp_()
    stays = probabilities.cumsum(dim=-1).sub_(probabilities) < top_p[:, None].double()
    stays[:, 0] = True
    worst = best.gather(1, stays.sum(dim=-1, keepdim=True) - 1)  # the value of the last token that stays
    equals = ((best == worst) & stays).sum(dim=-1, keepdim=True)
    tied = scaled == worst
    keep = (scaled > worst) | (tied & (tied.cumsum(dim=-1) <= equals))
    return scaled.masked_fill(~keep, -torch.inf), stays.all(dim=-1) & (head < scaled.shape[1])
