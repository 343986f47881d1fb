"""What a step on a device with memory of its own needs around the model's forward pass.

One upload before it, the sampler behind it, and one read at its end. Between the two the host never waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from common.core.sequence import Sequence as Tokens
from common.core.sequence import TokenLogprobs
from common.engine.batch import DeviceStep, FlatStep
from common.engine.device_sampler import DeviceSampler
from common.engine.faults import wait_for
from common.engine.sample_plan import SamplePlan
from common.engine.staging import Column, UploadStaging
from common.grammar.matcher import Mask

Entry = tuple[int, TokenLogprobs | None]
"""A sampled token, -1 where the logits were not finite, and its log-probabilities if the request wants them."""


class DeviceSteps:
    """Uploads and samples the steps of one engine on ``device``. ``token_ids``: size of the model's embedding;
    ``vocab_size``: columns of its logits."""

    def __init__(self, device: torch.device, token_ids: int, vocab_size: int) -> None:
        self.device = device
        self.sampler = DeviceSampler(vocab_size, device)
        self._staging, self._mask_staging = UploadStaging(device), UploadStaging(device)
        self._token_ids = token_ids
        self._mask_words = -(-vocab_size // 64) * 2

    def plan(self, sequences: Sequence[Tokens]) -> SamplePlan:
        """Plan the sampling of a step's ``sequences``, as :meth:`common.engine.device_sampler.DeviceSampler.plan`."""
        return self.sampler.plan(sequences)

    def upload(self, step: FlatStep, plan: SamplePlan | None = None) -> DeviceStep:
        """Return ``step`` with its columns on the device, and those of ``plan`` beside them. IndexError for a token id
        outside the vocabulary, which on a GPU would not fail one request but end the process."""
        if max(step.ids) >= self._token_ids:
            raise IndexError(f"a token outside the vocabulary of {self._token_ids}")
        return uploaded(step, self._staging, plan.columns if plan is not None else {})

    def sample(
        self, logits: torch.Tensor, step: DeviceStep, plan: SamplePlan, masks: Sequence[Mask | None] = ()
    ) -> list[list[Entry]]:
        """Return the entries of each sequence of ``plan``, one per choice, from their ``logits`` [R, vocab_size]. This
        is where the host waits for the device. ``masks``: the tokens that the grammar of each sequence allows, None
        for all; none at all if no sequence has one."""
        last = step.tensor("ids").index_select(0, step.tensor("kept"))
        packed = self.sampler.sample(logits, plan, step.uploaded, last, self._uploaded(masks, plan.choices))
        return plan.read(packed.to("cpu").numpy())

    def _uploaded(self, masks: Sequence[Mask | None], choices: Sequence[int]) -> torch.Tensor | None:
        """Return the masks of all rows, one per choice of each sequence, int64 [n, words] on the device; None if no
        row has one."""
        if all(mask is None for mask in masks):
            return None
        words = np.full((len(masks), self._mask_words), -1, np.int32)
        for row, mask in zip(words, masks, strict=True):
            if mask is not None:
                row[:] = 0
                row[: len(mask)] = mask[: self._mask_words]
        rows = np.repeat(words, choices, axis=0)
        uploaded = self._mask_staging.upload({"mask": rows.view(np.int64).reshape(-1)})
        return uploaded["mask"].view(len(rows), -1)

    def wait(self) -> None:
        """Wait for a step that samples nothing."""
        wait_for(self.device)

    def forget(self) -> None:
        """Forget what the device knows of sequences, after a step that failed."""
        self.sampler.forget()


def uploaded(step: FlatStep, staging: UploadStaging, more: Mapping[str, Column] | None = None) -> DeviceStep:
    """Return ``step`` with its columns on the device of ``staging``, and ``more`` columns beside them."""
    columns = {name: getattr(step, name) for name in ("ids", "positions", "blocks", "offsets", "kept")}
    if step.scored:
        columns |= {"scored": step.scored, "targets": step.targets}  # only rank 0 has targets
    return DeviceStep.of(step, staging.upload(columns | dict(more or {})))
