"""Sampling of the next token of every row on the device of the logits, without waiting for the device.

The rules, their order and their arithmetic are those of :mod:`common.engine.sampler`, which samples on CPUs. All shapes
are known on the host and all parameters are uploaded before the step; nothing is read back before the end, and then one
tensor with everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from common.core.sequence import Sequence as Tokens
from common.engine.sample_plan import Features, SamplePlan, SamplePlanner
from common.engine.sampler import LARGEST, NOTHING_LEFT
from common.engine.token_counts import TokenCounts


class Columns(NamedTuple):
    """Parameters of n rows on the device.

    int64 [n]: ``rows`` are the rows of the logits, ``last`` the last token of each sequence, ``slots`` and ``grows`` as
    :class:`common.engine.token_counts.TokenCounts` wants them, ``top_k`` the vocabulary's size if off. float64 [n]:
    ``noise``. float32 [n]: ``temperature`` (0 for greedy rows), ``top_p`` (infinite if off), ``min_p`` (0 if off) and
    the penalties. int64 and float32 [m]: ``bias_values`` to add to the logits of ``bias_tokens`` in rows ``bias_rows``.
    """

    rows: torch.Tensor
    last: torch.Tensor
    slots: torch.Tensor
    grows: torch.Tensor
    top_k: torch.Tensor
    noise: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    bias_rows: torch.Tensor
    bias_tokens: torch.Tensor
    bias_values: torch.Tensor

    @classmethod
    def of(cls, uploaded: Mapping[str, torch.Tensor], last: torch.Tensor) -> Columns:
        """Return the columns of a plan from its ``uploaded`` ones; ``last`` [R] are the last tokens before the rows of
        the logits."""
        columns = {name: uploaded[name] for name in cls._fields if name != "last"}
        for name in ("temperature", "top_p", "min_p", "repetition", "frequency", "presence", "bias_values"):
            columns[name] = columns[name].float()
        return cls(last=last.index_select(0, columns["rows"]), **columns)


class DeviceSampler:
    """Samples from logits of ``vocab_size`` columns on ``device``."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.counts = TokenCounts(vocab_size, device)
        self._planner = SamplePlanner(vocab_size, self.counts)

    def plan(self, sequences: Sequence[Tokens]) -> SamplePlan:
        """Plan the next tokens of ``sequences``, of which each has a row of logits. The plan must be followed by
        :meth:`sample` or, if anything fails before that, by :meth:`forget`."""
        return self._planner.plan(sequences)

    def sample(
        self,
        logits: torch.Tensor,
        plan: SamplePlan,
        uploaded: Mapping[str, torch.Tensor],
        last: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the packed result for ``logits`` [R, vocab_size] of any float dtype, as :func:`sample_on_device`.
        ``uploaded`` are the plan's columns on the device, ``last`` as in :meth:`Columns.of`."""
        for slot, _, _ in plan.rebuilds:
            self.counts.fill(slot, uploaded[f"prompt {slot}"], uploaded[f"output {slot}"])
        columns = Columns.of(uploaded, last) if plan.columns else None
        return sample_on_device(logits, columns, plan.features, self.counts, mask)

    def forget(self) -> None:
        """Forget all counts after a step that failed; they are uploaded anew when they are needed."""
        self.counts.forget()


def sample_on_device(
    logits: torch.Tensor,
    columns: Columns | None,
    features: Features,
    counts: TokenCounts,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return int32 [n, width]: in the first column the token sampled for each row, -1 where the logits are not finite.

    With ``features.logprobs`` = k there follow, as the bits of float32, the log-probabilities of this token and of the
    k most likely ones, and then the ids of these. ``columns`` may be None if the features are PLAIN: then there is one
    row for each of the logits, which takes the most likely token. ``mask``, int64 [n, words]: the tokens that
    grammars allow, one bit per id; a row gets NOTHING_LEFT where none is left.
    """
    wide = logits.float()
    valid = wide.amax(dim=-1).isfinite()
    if columns is None:
        return wide.argmax(dim=-1).masked_fill_(~valid, -1).to(torch.int32)[:, None]
    if columns.rows.shape[0] != wide.shape[0]:  # else each row has one choice
        wide, valid = wide.index_select(0, columns.rows), valid.index_select(0, columns.rows)
    scores = _process(wide, columns, features, counts)
    if mask is not None:
        scores = _masked(scores, mask)
    tokens = scores.argmax(dim=-1)
    if features.random:
        tokens = torch.where(columns.temperature > 0, _draw(scores, columns, features), tokens)
    taken = tokens
    if mask is not None:
        taken = tokens.masked_fill(scores.amax(dim=-1) == -torch.inf, NOTHING_LEFT)
    result = [taken.masked_fill(~valid, -1).to(torch.int32)[:, None]]
    if features.logprobs is not None:
        logprobs = torch.log_softmax(wide, dim=-1)
        own = logprobs.gather(1, tokens.clamp(max=wide.shape[1] - 1)[:, None])
        best, ids = logprobs.topk(features.logprobs, dim=-1)
        result += [own.view(torch.int32), best.contiguous().view(torch.int32), ids.to(torch.int32)]
    return torch.cat(result, dim=1)


def _process(wide: torch.Tensor, columns: Columns, features: Features, counts: TokenCounts) -> torch.Tensor:
    """Return the logits [n, vocab] after masks, biases and penalties; new memory if any of these apply."""
    if features.biases:
        at = columns.bias_rows * wide.shape[1] + columns.bias_tokens
        wide = wide.flatten().scatter_add(0, at, columns.bias_values).view_as(wide)
    if features.penalties:
        counts.grow(columns.slots, columns.last, columns.grows)
        output = counts.output.index_select(0, columns.slots)
        emitted = output > 0
        seen = counts.prompt.index_select(0, columns.slots) | emitted
        factor = columns.repetition[:, None].where(seen, 1.0)
        wide = torch.where(wide > 0, wide / factor, wide * factor)
        wide -= output * columns.frequency[:, None] + emitted * columns.presence[:, None]
    return wide


def _masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return ``scores`` [n, vocab] with minus infinity where a bit of ``mask`` [n, words of 64] is 0."""
    ids = torch.arange(scores.shape[1], device=scores.device)
    allowed = (mask.index_select(1, ids >> 6) >> (ids & 63)) & 1
    return scores.masked_fill(allowed == 0, -torch.inf)


def _draw(scores: torch.Tensor, columns: Columns, features: Features) -> torch.Tensor:
    """Draw tokens, int64 [n], from ``scores`` [n, vocab]; those of greedy rows mean nothing."""
    temperature = columns.temperature.where(columns.temperature > 0, 1.0)
    scaled = (scores / temperature[:, None]).clamp_(max=LARGEST)
    if features.min_p:
        floor = scaled.amax(dim=-1, keepdim=True) + columns.min_p.log()[:, None]
        scaled.masked_fill_(scaled < floor, -torch.inf)
    if features.top_k or features.top_p:
        scaled = _cut(scaled, columns, features)
    cumulative = torch.softmax(scaled, dim=-1).double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    # a product that rounds up to the total would point behind the last token that has any probability
    wanted = torch.minimum(columns.noise[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, wanted, right=True).squeeze(1)


def _cut(scaled: torch.Tensor, columns: Columns, features: Features) -> torch.Tensor:
    """Drop all but the ``top_k`` best (ties stay), then all after the token with which the sum reaches ``top_p``; among
    equals the lower id comes first. One sort serves both, and has the same shape whatever the parameters are."""
    ordered = scaled.sort(dim=-1, descending=True).values
    if features.top_k:
        floor = ordered.gather(1, columns.top_k[:, None] - 1)
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
        ordered = ordered.masked_fill(ordered < floor, -torch.inf)
    if not features.top_p:
        return scaled
    probabilities = (ordered - torch.logsumexp(scaled, dim=-1, keepdim=True)).double().exp_()
    stays = probabilities.cumsum(dim=-1).sub_(probabilities) < columns.top_p[:, None].double()
    stays[:, :1].fill_(True)
    worst = ordered.gather(1, stays.sum(dim=-1, keepdim=True) - 1)  # the value of the last token that stays
    equals = ((ordered == worst) & stays).sum(dim=-1, keepdim=True)
    tied = scaled == worst
    keep = (scaled > worst) | (tied & (tied.cumsum(dim=-1) <= equals))
    return scaled.masked_fill(~keep, -torch.inf)
