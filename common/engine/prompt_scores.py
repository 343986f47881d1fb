"""Log-probabilities of the tokens of a prompt: a whole chunk's, with the logits of only a few rows at a time.

The logits of a chunk of 2,048 tokens over 150,000 entries take 1.2 GB as float32, so the output layer runs on slices of
the chunk's rows. It is run as the model runs it: the model's own code runs again on each slice, with the final hidden
states in place of its layers, since some architectures scale or cap their logits.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from common.core.prompt_span import PromptSpan
from common.core.sequence import Batch
from common.engine.batch import FlatStep
from common.model.probe import forward

MOST_LOGITS = 1 << 23
"""Most logits that exist at once for log-probabilities of a prompt: 32 MiB as float32."""


def forward_and_score(model: Any, step: FlatStep, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the model on ``step``, which has ``scored`` rows. Return the logits of its ``kept`` rows, as
    :func:`common.model.probe.forward`, and the scores of its scored rows with the ``most`` most likely tokens each, as
    :func:`score`. On the device of the model; waits for nothing."""
    logits, slices = forward_in_slices(model, step)
    targets = step.tensor("targets").split(slice_rows(model))
    return logits, torch.cat([score(each, wanted, most) for each, wanted in zip(slices, targets, strict=True)])


def forward_in_slices(model: Any, step: FlatStep) -> tuple[torch.Tensor, Iterator[torch.Tensor]]:
    """Run the model on ``step``. Return the logits of its ``kept`` rows, and an iterator over those of its ``scored``
    rows, [rows, vocab] per slice: each is computed when it is taken. The ranks of a tensor-parallel worker must all
    take them all, since they compute a slice together."""
    ids, positions = step.tensor("ids")[None], step.tensor("positions")[None]
    outputs: list[Any] = []
    hook = model.base_model.register_forward_hook(lambda module, given, output: outputs.append(output))
    try:
        logits = forward(model, ids, positions, step.tensor("kept"))
    finally:
        hook.remove()
    if len(outputs) != 1:
        raise RuntimeError(f"log-probabilities of prompts are not supported for {type(model).__name__}")
    return logits, _heads(model, ids, positions, outputs[0], step.tensor("scored").split(slice_rows(model)))


def _heads(
    model: Any, ids: torch.Tensor, positions: torch.Tensor, output: Any, slices: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    for rows in slices:
        with _answered(model.base_model, output):
            logits = forward(model, ids, positions, rows)
        yield logits


@contextmanager
def _answered(module: nn.Module, output: Any) -> Iterator[None]:
    """Let ``module`` return ``output``, whatever it is called with, for the duration of the block."""
    module.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del module.forward


def slice_rows(model: Any) -> int:
    """Return the number of rows whose logits are computed at once."""
    return max(1, MOST_LOGITS // int(model.config.get_text_config().vocab_size))


def score(logits: torch.Tensor, targets: torch.Tensor, most: int) -> torch.Tensor:
    """Return int32 [rows, 2 + 2 * most] for ``logits`` [rows, vocab] of any float dtype and ``targets`` int64 [rows].

    The columns are: the bits of the target's log-probability as float32; its rank, the number of tokens that are at
    least as likely, or 0 if the row's logits are not finite; the bits of the ``most`` highest log-probabilities; and
    the ids of their tokens.
    """
    wide = logits.float()
    total = torch.logsumexp(wide, dim=-1, keepdim=True)
    own = wide.gather(1, targets[:, None])
    ranks = (wide >= own).sum(dim=-1, keepdim=True).masked_fill_(~total.isfinite(), 0)
    best, ids = wide.topk(most, dim=-1)
    columns = [(own - total).view(torch.int32), ranks, (best - total).contiguous().view(torch.int32), ids]
    return torch.cat([each.to(torch.int32) for each in columns], dim=1)


def most_wanted(batch: Batch, step: FlatStep, vocab_size: int) -> int:
    """Return the largest number of most likely tokens that a request with scored rows asks for."""
    wanted = (batch.segments[each.segment].sequence.request.sampling.prompt_logprobs or 0 for each in step.scores)
    return min(vocab_size, max(wanted, default=0))


def read(batch: Batch, step: FlatStep, scores: torch.Tensor) -> tuple[dict[int, PromptSpan], list[int]]:
    """Return the log-probabilities of each segment with scored rows, by its index, from ``scores`` as
    :func:`forward_and_score` returned them; and the indices of segments whose logits were not finite. Waits for the
    device."""
    packed = scores.to("cpu").numpy()
    most = (packed.shape[1] - 2) // 2
    spans: dict[int, PromptSpan] = {}
    faulty: list[int] = []
    at = 0
    for index, position, rows in step.scores:
        part = packed[at : at + rows]
        at += rows
        if not part[:, 1].all():
            faulty.append(index)
            continue
        tops = min(most, batch.segments[index].sequence.request.sampling.prompt_logprobs or 0)
        spans[index] = PromptSpan(
            position + 1,
            tops,
            _column("f", part[:, 0]),
            _column("I", part[:, 1]),
            _column("I", part[:, 2 + most : 2 + most + tops]),
            _column("f", part[:, 2 : 2 + tops]),
        )
    return spans, faulty


def _column(kind: str, numbers: Any) -> array[Any]:
    column = array(kind)
    column.frombytes(np.ascontiguousarray(numbers).tobytes())
    return column
